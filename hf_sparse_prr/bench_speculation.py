"""Where speculation pays and what the runtime makes of it: a measured profile of each shape and selector, and what
`speculate="auto"` does by it at set hit rates."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .bench_profile import bench_profile
from .budget import GAIN, LAG, OVER, WINDOW, Policy, hits_at
from .profile import Profile

HITS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
CONTEXTS = tuple(2**power for power in range(14, 20))  # 16K .. 512K
TOKENS = 2048  # that are played


def played(policy: Policy, context: int, hit_rate: float, tokens: int = TOKENS) -> tuple[list[float], float]:
    """The ratio of each token where that share of the selected blocks is hit at a ratio of 1, and the largest share of
    serial's time that any OVER tokens in a row took longer than serial ones; below 0 where all of them took less.

    As `Budget` has it: a hit rate is that of WINDOW tokens, and known LAG tokens later.
    """
    at, ratios = policy.profile.at(context), []
    policy.start(context)
    next_look = WINDOW + (LAG + 1 if policy.ratio else 0)
    for token in range(tokens):
        if token == next_look:
            before = policy.ratio
            hits = [hits_at(before, hit_rate, 1.0)] if before else []
            after = policy.look(context, WINDOW, hits)
            next_look += WINDOW + (LAG + 1 if after != before and after else 0)
        ratios.append(policy.ratio)
    more = {ratio: at.step(ratio, hits_at(ratio, hit_rate, 1.0)) / at.serial - 1 for ratio in set(ratios) if ratio}
    lost = [more.get(ratio, 0.0) for ratio in ratios]
    over = min(OVER, tokens)
    window = sum(lost[:over])
    most = window
    for token in range(over, tokens):
        window += lost[token] - lost[token - over]
        most = max(most, window)
    return ratios, most / over


def row_of(profile: Profile, context: int, hit_rate: float) -> dict[str, Any]:
    """What a serial step takes, one that speculates at the best ratio, and what "auto" does: the ratio that it ends
    with, the share of tokens that speculated, and the largest cost over OVER tokens."""
    at = profile.at(context)
    steps = {ratio: at.step(ratio, hits_at(ratio, hit_rate, 1.0)) for ratio in at.speculate}
    best = min(steps, key=lambda ratio: steps[ratio])
    ratios, cost = played(Policy(profile), context, hit_rate)
    return {
        "hit_rate": hit_rate,
        "serial_us": at.serial,
        "speculative_us": steps[best],
        "ratio": best,
        "gain": at.serial / steps[best],
        "auto": ratios[-1],
        "auto_gain": at.serial / steps[ratios[-1]] if ratios[-1] else None,
        "on_share": sum(ratio > 0 for ratio in ratios) / len(ratios),
        "cost": cost,
    }


def table_of(profile: Profile, hits: Sequence[float]) -> list[dict[str, Any]]:
    """Of each context of the profile, the rows of those hit rates."""
    return [
        {"context": at.context, "rows": [row_of(profile, at.context, hit) for hit in hits]} for at in profile.contexts
    ]


def verdict(tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The least gain where "auto" ends with speculation on, None where it never does, and the largest cost."""
    rows = [row for table in tables for at in table["contexts"] for row in at["rows"]]
    gains = [row["auto_gain"] for row in rows if row["auto_gain"] is not None]
    return {"least_gain_on": min(gains, default=None), "largest_cost": max(row["cost"] for row in rows), "asked": GAIN}


@torch.no_grad()
def bench_speculation(
    shapes: Sequence[str] = ("llama-3.1-8b", "glm-4-9b"),
    selectors: Sequence[str] = ("quest", "infllm_v2"),
    contexts: Sequence[int] = CONTEXTS,
    hits: Sequence[float] = HITS,
    ratios: Sequence[float] = (1.0,),
    budget: int = 4096,
    block_size: int | str = "auto",
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    rounds: int = 12,
    layers: int | None = None,
    kernels: str | Path | ModuleType = "auto",
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> dict[str, Any]:
    """A profile of each shape and selector, measured at 0 and at the hit rates `hits`, and its `table_of`.

    Raises:
        ValueError: a shape, context, ratio or setting that can't be.  KernelError: kernels that can't be loaded.
        ExactnessError: a step of PRR that hasn't the bits of the serial one.
    """
    every, tables = sorted({*hits, 0.0}, reverse=True), []
    for shape in shapes:
        for selector in selectors:

            def at(stage: str, done: int, total: int | None, name: str = f"{shape}, {selector}") -> None:
                progress(f"{name}: {stage}", done, total)

            found = bench_profile(
                shape, contexts, selector, budget, block_size, batch, dtype, device, rounds, layers, ratios,
                kernels, at, every,
            )  # fmt: skip
            table = {"shape": shape, "selector": selector, "profile": found.document()}
            tables.append({**table, "contexts": table_of(found, hits)})
    return {"bench": "speculation", "tokens": TOKENS, "over": OVER, "tables": tables, **verdict(tables)}
