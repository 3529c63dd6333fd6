"""What a selector is."""

from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from hf_sparse_prr.config import LayerPlan

Summaries = tuple[torch.Tensor, ...]


class Columns(NamedTuple):
    """K/V columns end - added .. end - 1 are new; those before them are known.

    keys: [B, H, T, D], post-RoPE.  valid: bool [B, T].  start: [B], the column of each row's first real token, where
    its block 0 begins.  end: [B], on the device like the others.
    """

    keys: torch.Tensor
    valid: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    added: int


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
    scores depend on keys in the local blocks too; if not, summaries are brought up to date once a block.  scoped:
    `scores` are NaN out of scope already.
    """

    block_size = 64
    groups: tuple[str, ...] = ("sum",)
    reads_local = False
    scoped = False

    def allocate(self, keys: torch.Tensor, blocks: int, plan: "LayerPlan") -> Summaries:
        """Empty summaries of `blocks` blocks, [B, H, blocks, ..], for keys [B, H, T, D]."""
        raise NotImplementedError

    def summarise(self, kernels: ModuleType, summaries: Summaries, columns: Columns, plan: "LayerPlan") -> None:
        """Bring the blocks that hold a new column up to date, in place."""
        raise NotImplementedError

    def scores(
        self, kernels: ModuleType, query: torch.Tensor, summaries: Summaries, scope: Scope, plan: "LayerPlan"
    ) -> torch.Tensor:
        """fp32 [B, H, N] for query [B, H, G, D]; NaN for what can't be scored, blocks without a token for instance."""
        raise NotImplementedError

    def checked_scores(
        self, kernels: ModuleType, query: torch.Tensor, summaries: Summaries, scope: Scope, plan: "LayerPlan"
    ) -> torch.Tensor:
        """`scores`, NaN out of scope.

        Raises:
            ValueError: they have another shape or dtype.
        """
        scores = self.scores(kernels, query, summaries, scope, plan)
        expected = (*query.shape[:2], summaries[0].shape[2])
        if scores.shape != expected or scores.dtype != torch.float32:
            raise ValueError(
                f"scores of selector {plan.selector!r}: expected float32 {list(expected)}, got {scores.dtype} "
                f"{list(scores.shape)}"
            )
        if self.scoped:
            return scores
        blocks = torch.arange(expected[2], device=scores.device)
        inside = (blocks >= scope.first) & (blocks < scope.last[:, None])
        return scores.masked_fill(~inside[:, None], float("nan"))
