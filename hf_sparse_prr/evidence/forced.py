"""The control of an evaluation: nothing is selected, a step reads the forced blocks alone.

Layers that stay dense can answer a task by themselves: two do for the tiny models, which have four. Where this control
answers as well as a selector does, accuracy says nothing of the selector.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from hf_sparse_prr.selectors import SELECTORS, Columns, Scope, Selector, Summaries

if TYPE_CHECKING:
    from hf_sparse_prr.config import LayerPlan

FORCED = "forced"


class _Nothing(Selector):
    """Scores are NaN, which is never selected."""

    scoped = True

    def allocate(self, keys: torch.Tensor, blocks: int, plan: LayerPlan) -> Summaries:
        return (keys.new_zeros((*keys.shape[:2], blocks, 1)),)

    def summarise(self, kernels: ModuleType, summaries: Summaries, columns: Columns, plan: LayerPlan) -> None:
        pass

    def scores(
        self, kernels: ModuleType, query: torch.Tensor, summaries: Summaries, scope: Scope, plan: LayerPlan
    ) -> torch.Tensor:
        shape = (*query.shape[:2], summaries[0].shape[2])
        return torch.full(shape, float("nan"), dtype=torch.float32, device=query.device)


@contextmanager
def nothing_selected() -> Iterator[None]:
    """Inside, selector "forced" is there."""
    SELECTORS[FORCED] = _Nothing()
    try:
        yield
    finally:
        del SELECTORS[FORCED]
