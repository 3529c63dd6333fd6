"""What a selector is."""

from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from hf_sparse_prr.config import LayerPlan

Summaries = tuple[torch.Tensor, ...]


class Columns(NamedTuple):
    """K/V columns begin .. end - 1 are new; those before them are known.

    keys: [B, H, T, D], post-RoPE.  valid: bool [B, T].  start: [B], the column of each row's first real token, where
    its block 0 begins.
    """

    keys: torch.Tensor
    valid: torch.Tensor
    start: torch.Tensor
    begin: int
    end: int


class Scope(NamedTuple):
    """What a query token may select from: the blocks first .. last - 1 of each row, `last` [B].

    length: [B], tokens of each row up to the query's own.  scale: of the logits.
    """

    first: int
    last: torch.Tensor
    length: torch.Tensor
    scale: float


class Selector:
    """What the cache and decode.py need of a selector.

    block_size: what "auto" means.  groups: how the scores of a KV head's query heads may be combined.  reads_local:
    scores depend on keys in the local blocks too; if not, summaries are brought up to date once a block.
    """

    block_size = 64
    groups: tuple[str, ...] = ("sum",)
    reads_local = False

    def allocate(self, keys: torch.Tensor, blocks: int, plan: "LayerPlan") -> Summaries:
        """Empty summaries of `blocks` blocks, [B, H, blocks, ..], for keys [B, H, T, D]."""
        raise NotImplementedError

    def summarise(self, kernels: ModuleType, summaries: Summaries, columns: Columns, plan: "LayerPlan") -> None:
        """Bring the blocks that hold a new column up to date, in place."""
        raise NotImplementedError

    def scores(
        self, kernels: ModuleType, query: torch.Tensor, summaries: Summaries, scope: Scope, plan: "LayerPlan"
    ) -> torch.Tensor:
        """fp32 [B, H, N] for query [B, H, G, D]; NaN out of scope and for blocks without a token."""
        raise NotImplementedError
