"""Quest (arXiv 2406.10774): a block's score is an upper bound of q.k from the minimum and maximum of its keys."""

from types import ModuleType

import torch


class Quest:
    """Summaries are (lower, upper), [B, H, N, D] in the dtype of the keys: 2/S of the keys' bytes."""

    def allocate(self, keys: torch.Tensor, blocks: int) -> tuple[torch.Tensor, ...]:
        batch, heads, _, dim = keys.shape
        return keys.new_zeros((batch, heads, blocks, dim)), keys.new_zeros((batch, heads, blocks, dim))

    def summarise(
        self,
        kernels: ModuleType,
        summaries: tuple[torch.Tensor, ...],
        keys: torch.Tensor,
        valid: torch.Tensor,
        start: torch.Tensor,
        begin: int,
        count: int,
        block_size: int,
    ) -> None:
        lower, upper = summaries
        kernels.update_summaries(keys, valid, start, lower, upper, begin, count, block_size)

    def scores(
        self,
        kernels: ModuleType,
        query: torch.Tensor,
        summaries: tuple[torch.Tensor, ...],
        first: int,
        last: torch.Tensor,
    ) -> torch.Tensor:
        lower, upper = summaries
        return kernels.quest_scores(query, lower, upper, first, last)
