"""Token scores of a model's own indexer (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

import torch

_HELD = 2**22  # logits that are held at a time, 32 MB


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
        query: [B, Q, I, E].  weights: [B, Q, I].  keys: [B, T, E].
        valid: bool [B, T].  end: [B or 1, Q] integer, columns at or past it aren't scored (the query's own + 1).

    Returns:
        fp32 [B, Q, T]; NaN for a column that isn't scored.
    """
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
