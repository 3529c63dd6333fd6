"""How a model decodes in an evaluation, as data: dense, forced blocks alone, serial sparse or PRR, by selector, budget
and block size."""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_sparse_prr.config import SparseConfig
from hf_sparse_prr.evidence.forced import FORCED

MODES = ("dense", FORCED, "serial", "prr")


class Setting(NamedTuple):
    """mode: one of `MODES`.  The rest is empty with "dense".  budget: tokens, 0 where an indexer decides.  asked: the
    budget as it was asked for, maybe a share."""

    mode: str
    selector: str = ""
    budget: int = 0
    block_size: int = 0
    dense_layers: int | str = "auto"
    asked: str = ""

    @property
    def label(self) -> str:
        """Distinct within an evaluation, and part of a file's name."""
        if self.mode == "dense":
            return "dense"
        if self.mode == FORCED:
            return f"{FORCED}-{self.block_size}"
        if self.selector == "dsa":
            return f"{self.mode}-dsa"
        return f"{self.mode}-{self.selector}-{self.budget}-{self.block_size}"

    @property
    def serial(self) -> Setting:
        """What a PRR setting must equal in every bit."""
        return self._replace(mode="serial")

    def overrides(self, **more: Any) -> dict[str, Any]:
        """What patch_model is given."""
        found: dict[str, Any] = dict(selector=self.selector, speculate=self.mode == "prr", **more)
        if self.selector == "dsa":
            return found
        return found | dict(budget=self.budget, block_size=self.block_size, dense_layers=self.dense_layers)


def settings_for(
    indexed: bool,
    length: int,
    selectors: list[str],
    budgets: list[str],
    block_sizes: list[int],
    modes: list[str],
    dense_layers: int | str = "auto",
) -> list[Setting]:
    """Dense first, forced blocks alone, then every combination, each once, PRR right after its serial twin. A model
    with an indexer has but one, and no forced blocks.

    budgets: tokens, "512", or shares of the length, "1/8".
    """
    found = [Setting("dense")] if "dense" in modes else []
    sparse = [mode for mode in ("serial", "prr") if mode in modes]
    if indexed:
        return found + [Setting(mode, "dsa") for mode in sparse]
    if FORCED in modes:  # under the smallest budget there is, for nothing but forced blocks is read of it
        least = SparseConfig().forced_blocks + 1
        found += [Setting(FORCED, FORCED, least * size, size, dense_layers) for size in block_sizes]
    for selector in selectors:
        for text in budgets:
            for size in block_sizes:
                chosen = (selector, budget_of(text, length), size, dense_layers, text)
                found += [Setting(mode, *chosen) for mode in sparse]
    unique: dict[str, Setting] = {}
    for setting in found:  # 512 tokens and 1/8 of 4096 are one
        unique.setdefault(setting.label, setting)
    return list(unique.values())


def budget_of(text: str, length: int) -> int:
    """Tokens; ValueError for what is neither a number nor a share."""
    share, _, of = text.partition("/")
    if not share.isdecimal() or (of and not of.isdecimal()) or (of and int(of) == 0) or text.endswith("/"):
        raise ValueError(f"budget: expected tokens like 512, or a share of the length like 1/8, got {text!r}")
    return length * int(share) // int(of) if of else int(share)
