"""Block scores."""

import torch

from .sums import fixed_sum


def quest_scores(
    query: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, first: int, last: torch.Tensor
) -> torch.Tensor:
    """Quest's upper bound of q.k over each block, summed exactly over the query heads of a KV head.

    max over the block's box of q.k is relu(q).upper - relu(-q).lower, which is linear in the two query parts. So
    sum_g U_g = (sum_g relu(q_g)).upper - (sum_g relu(-q_g)).lower: the price of one head (Quest, arXiv 2406.10774;
    the group sum is ours).

    Args:
        query: [B, H, G, D], post-RoPE.  lower, upper: [B, H, N, D] from `update_summaries`.
        first: blocks below it are not scored.  last: [B] integer, blocks at or past it are not scored.

    Returns:
        fp32 [B, H, N]; NaN for blocks that are not scored or hold no valid token.
    """
    # Multiply and sum, not matmul: a BLAS dot product changes its bits with the shape around it, and scores must not
    # depend on the batch or on how many blocks there are. Contiguous, since a sum's order follows the strides.
    query = query.float().contiguous()
    positive = fixed_sum(query.clamp(min=0), 2).unsqueeze(2)
    negative = fixed_sum((-query).clamp(min=0), 2).unsqueeze(2)
    bound = positive * upper.float().contiguous() - negative * lower.float().contiguous()
    scores = fixed_sum(bound, -1)
    blocks = torch.arange(lower.shape[2], device=lower.device)
    scored = (blocks >= first) & (blocks < last[:, None])
    empty = (lower[..., 0] > upper[..., 0]) | ~scored[:, None]
    return scores.masked_fill(empty, float("nan"))
