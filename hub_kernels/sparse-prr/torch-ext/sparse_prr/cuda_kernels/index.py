"""The tokens that an indexer scores best: the scoring kernel leaves candidates, which are refined (`topk_cuda/`)."""

import torch

from .._ops import ops  # type: ignore[import-not-found]
from ..reference.check import integer
from ..reference.index import check_index_arguments
from ..reference.topk import check_topk_arguments
from ..triton_kernels.index import score_tokens
from .topk import MOST, gvr_topk

_EMITTED = 512 << 10  # columns


def index_topk(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor,
    end: torch.Tensor,
    k: int,
    *,
    scale: float,
    hint: torch.Tensor | None = None,
    threshold: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference. With a threshold, for one query a batch row and up to 512K columns, the scores' kernel leaves
    candidates and the top-k reads them alone: at 512K 41.5 us in all, by a pass over the scores 42.8."""
    check_index_arguments(query, weights, keys, valid, end)
    k, (batch, queries) = integer("k", k, 0), query.shape[:2]
    if threshold is None or queries != 1 or not 0 < k <= MOST or not 0 < keys.shape[1] <= _EMITTED:
        scores, _ = score_tokens(query, weights, keys, valid, end, scale, None)
        chosen = gvr_topk(scores.flatten(0, 1), k, hint=hint, threshold=threshold)
        return chosen.view(batch, queries, k), scores  # type: ignore[union-attr]
    check_topk_arguments(query.new_empty((batch, 0), dtype=torch.float32), k, hint, None, threshold)
    threshold = threshold.contiguous()
    scores, candidates = score_tokens(query, weights, keys, valid, end, scale, threshold)
    assert candidates is not None
    chosen = torch.empty((batch, k), dtype=torch.int32, device=query.device)
    refined = torch.empty(batch, dtype=torch.int32, device=query.device)
    fallback = torch.empty(batch, dtype=torch.bool, device=query.device)
    ops.topk_candidates(chosen, refined, fallback, scores[:, 0], None, threshold, *candidates)
    return chosen[:, None], scores
