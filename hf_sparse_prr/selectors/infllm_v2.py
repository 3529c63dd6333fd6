"""InfLLM-v2 (arXiv 2509.24663), training-free as in the PRR paper: a block's score is the largest attention weight,
summed over the query heads, that falls on one of its compressed keys.

Compressed keys are means of 32 post-RoPE keys, every 16 tokens. A window belongs to the block it ends in, so a block's
summary never holds a key that comes after the block; the published kernels also count the window that straddles the
block's end, and lose windows when several tokens are appended at once. In blocks of 16 no window ends in a row's first
block: it is attended as a sink or not at all.
"""

from types import ModuleType
from typing import TYPE_CHECKING

import torch

from .base import Columns, Scope, Selector, Summaries

if TYPE_CHECKING:
    from hf_sparse_prr.config import LayerPlan

STRIDE = 16
WINDOW = 32


class InfLLMv2(Selector):
    """Summaries are (means, filled): [B, H, N, S/16, D] in the dtype of the keys, a sixteenth of their bytes, and bool
    [B, H, N, S/16], which windows are complete and hold a valid token."""

    block_size = 64
    reads_local = True  # the softmax goes over every window up to the query
    scoped = True

    def allocate(self, keys: torch.Tensor, blocks: int, plan: "LayerPlan") -> Summaries:
        batch, heads, _, dim = keys.shape
        shape = (batch, heads, blocks, plan.block_size // STRIDE)
        return keys.new_zeros((*shape, dim)), keys.new_zeros(shape, dtype=torch.bool)

    def summarise(self, kernels: ModuleType, summaries: Summaries, columns: Columns, plan: "LayerPlan") -> None:
        keys, valid, start, end, added = columns
        kernels.compress_keys(keys, valid, start, *summaries, end, added, window=WINDOW, stride=STRIDE)

    def scores(
        self, kernels: ModuleType, query: torch.Tensor, summaries: Summaries, scope: Scope, plan: "LayerPlan"
    ) -> torch.Tensor:
        first, last, length, scale = scope
        return kernels.infllm_scores(query, *summaries, first, last, length, scale=scale, stride=STRIDE)
