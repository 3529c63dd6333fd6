"""Traces: the block scores that a model's decode steps had, recorded, kept as safetensors, and replayed without it.

A replay predicts with the library's own ops, so its rates are those that `stats()` gave.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_sparse_prr.selectors import SELECTORS, Scope, Selector
from hf_sparse_prr.selectors.base import Columns, Summaries

if TYPE_CHECKING:
    from hf_sparse_prr.config import LayerPlan


@dataclass
class Trace:
    """scores: of each layer that selects, by its index, fp32 [T, H, N]: of block n at decode step t for KV head h; NaN
    where the block couldn't be selected.  free: blocks selected by score.  about: where it comes from."""

    scores: dict[int, torch.Tensor]
    free: int
    about: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """One safetensors file."""
        tensors = {f"scores.{layer}": scores.contiguous() for layer, scores in self.scores.items()}
        save_file(tensors, path, metadata={"free": str(self.free), "about": json.dumps(self.about)})

    @classmethod
    def load(cls, path: Path) -> Trace:
        """ValueError for a file that holds no trace."""
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
            if "free" not in metadata or any(not name.startswith("scores.") for name in names):
                raise ValueError(f"trace: expected scores and the metadata of Trace.save, got {names[:3]} in {path}")
            scores = {int(name.partition(".")[2]): file.get_tensor(name) for name in names}
        return cls(dict(sorted(scores.items())), int(metadata["free"]), json.loads(metadata["about"]))

    def part(self, begin: int, end: int | None = None) -> Trace:
        """Some of the steps."""
        return Trace({layer: scores[begin:end] for layer, scores in self.scores.items()}, self.free, self.about)


class _Recording(Selector):
    """Another selector, whose scores of one batch row are kept: [H, N] a call."""

    def __init__(self, inner: Selector) -> None:
        self.inner, self.seen = inner, []  # type: ignore[var-annotated]
        self.block_size, self.groups = inner.block_size, inner.groups
        self.reads_local, self.scoped = inner.reads_local, inner.scoped

    def allocate(self, keys: torch.Tensor, blocks: int, plan: LayerPlan) -> Summaries:
        return self.inner.allocate(keys, blocks, plan)

    def summarise(self, kernels: ModuleType, summaries: Summaries, columns: Columns, plan: LayerPlan) -> None:
        self.inner.summarise(kernels, summaries, columns, plan)

    def checked_scores(
        self, kernels: ModuleType, query: torch.Tensor, summaries: Summaries, scope: Scope, plan: LayerPlan
    ) -> torch.Tensor:
        scores = self.inner.checked_scores(kernels, query, summaries, scope, plan)
        if len(scores) != 1:
            raise ValueError(f"trace: expected one batch row, got {len(scores)}")
        self.seen.append(scores[0].cpu().clone())
        return scores


@contextmanager
def recorded(selector: str) -> Iterator[list[torch.Tensor]]:
    """The scores that `selector` gives inside, call by call: a decode step has one a sparse layer, in their order.

    Not for prompts that are calibrated by or select (their scores would come between), models with an indexer, whose
    scores are no selector's, or CUDA graphs.
    """
    inner = SELECTORS[selector]
    recording = _Recording(inner)
    SELECTORS[selector] = recording
    try:
        yield recording.seen
    finally:
        SELECTORS[selector] = inner


def trace_of(seen: list[torch.Tensor], layers: list[int], free: int, **about: Any) -> Trace:
    """Of `recorded` scores. layers: the indices of those that are sparse.

    Raises:
        ValueError: the scores aren't those of whole steps.
    """
    if not layers or not seen or len(seen) % len(layers):
        raise ValueError(f"trace: expected a multiple of {len(layers)} scores, one a layer and step, got {len(seen)}")
    wide = max(scores.shape[1] for scores in seen)
    padded = [torch.nn.functional.pad(each, (0, wide - each.shape[1]), value=float("nan")) for each in seen]
    steps = torch.stack(padded).unflatten(0, (-1, len(layers)))
    return Trace({layer: steps[:, place] for place, layer in enumerate(layers)}, free, about)
