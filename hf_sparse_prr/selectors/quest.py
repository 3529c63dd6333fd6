"""Quest (arXiv 2406.10774): a block's score is an upper bound of q.k from the minimum and maximum of its keys."""

from types import ModuleType
from typing import TYPE_CHECKING

import torch

from .base import Columns, Scope, Selector, Summaries

if TYPE_CHECKING:
    from hf_sparse_prr.config import LayerPlan


class Quest(Selector):
    """Summaries are (lower, upper), [B, H, N, D] in the dtype of the keys: 2/S of the keys' bytes."""

    block_size = 32  # the bound loosens as blocks grow
    groups = ("sum", "max")
    scoped = True

    def allocate(self, keys: torch.Tensor, blocks: int, plan: "LayerPlan") -> Summaries:
        batch, heads, _, dim = keys.shape
        return keys.new_zeros((batch, heads, blocks, dim)), keys.new_zeros((batch, heads, blocks, dim))

    def summarise(self, kernels: ModuleType, summaries: Summaries, columns: Columns, plan: "LayerPlan") -> None:
        keys, valid, start, end, added = columns
        kernels.update_summaries(keys, valid, start, *summaries, end, added, plan.block_size)

    def scores(
        self, kernels: ModuleType, query: torch.Tensor, summaries: Summaries, scope: Scope, plan: "LayerPlan"
    ) -> torch.Tensor:
        return kernels.quest_scores(query, *summaries, scope.first, scope.last, group=plan.group)
