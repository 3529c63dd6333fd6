"""Token scores of a model's own indexer (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

import torch

from .check import BOOL, FLOATS, INTEGERS, expect, size_or_1
from .topk import gvr_topk

_HELD = 2**22  # logits that are held at a time, 32 MB


def check_index_arguments(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, end: torch.Tensor
) -> None:
    """Raise ValueError for anything outside the contract of `index_scores`."""
    expect("query", query, "B, Q, I, E", (None,) * 4, FLOATS)
    (batch, queries, heads, dim), device = query.shape, query.device
    expect("weights", weights, "B, Q, I", (batch, queries, heads), FLOATS, device)
    expect("keys", keys, "B, T, E", (batch, None, dim), (query.dtype,), device)
    expect("valid", valid, "B, T", (batch, keys.shape[1]), BOOL, device)
    expect("end", end, "B or 1, Q", (size_or_1(end, 0, batch), queries), INTEGERS, device)


def index_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor,
    end: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """sum_i w_i relu(scale q_i . k) of each key, for each query.

    Summed in float64 and rounded once: how the queries are split, and what else is in the batch, changes nothing that
    float32 keeps.

    Args:
        query: [B, Q, I, E].  weights: [B, Q, I].  keys: [B, T, E] in the dtype of query.
        valid: bool [B, T].  end: [B or 1, Q] integer, columns at or past it aren't scored (the query's own + 1).

    Returns:
        fp32 [B, Q, T]; NaN for a column that isn't scored.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_index_arguments(query, weights, keys, valid, end)
    batch, queries, heads, dim = query.shape
    columns = keys.shape[1]
    scores = query.new_empty((batch, queries, columns), dtype=torch.float32)
    flat = query.double().reshape(batch, queries * heads, dim)
    wide = weights.double()[..., None]
    step = max(1, _HELD // max(1, batch * queries * heads))
    for begin in range(0, columns, step):
        part = keys[:, begin : begin + step].double()
        logits = (flat @ part.mT).mul_(scale).relu_().view(batch, queries, heads, part.shape[1])
        scores[:, :, begin : begin + step] = logits.mul_(wide).sum(dim=2)
    scored = valid[:, None] & (torch.arange(columns, device=keys.device) < end[:, :, None])
    return scores.masked_fill_(~scored, float("nan"))


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
    """`index_scores` and `gvr_topk` over them in one: the k columns that score best for each query, and all scores.

    Args:
        as of `index_scores`.
        hint: integer [B * Q, M].  threshold: fp32 [B * Q, 2], what the last query's scores left (`topk_threshold`). As
            in `gvr_topk`: they may change the speed, never the result.

    Returns:
        int32 [B, Q, k], ascending, -1 in unused slots, which come last; fp32 [B, Q, T].

    Raises:
        ValueError: shapes, dtypes, devices or k outside the above.
    """
    scores = index_scores(query, weights, keys, valid, end, scale=scale)
    chosen = gvr_topk(scores.flatten(0, 1), k, hint=hint, threshold=threshold)
    return chosen.view(*scores.shape[:2], k), scores  # type: ignore[union-attr]
