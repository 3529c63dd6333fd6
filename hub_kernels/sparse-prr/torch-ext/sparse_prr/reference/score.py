"""Block scores."""

import torch

from .attend import shifted
from .check import BOOL, FLOATS, INTEGERS, expect, integer
from .sums import fixed_sum, tree_sum

GROUPS = ("sum", "max")


def _only(scores: torch.Tensor, first: int, last: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Scores [B, H, N] of blocks first .. last - 1 that aren't `empty`; NaN elsewhere."""
    blocks = torch.arange(scores.shape[2], device=scores.device)
    scored = (blocks >= first) & (blocks < last[:, None])
    return scores.masked_fill(empty | ~scored[:, None], float("nan"))


def check_quest_arguments(
    query: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, last: torch.Tensor, group: str
) -> None:
    """Raise ValueError for anything outside the contract of `quest_scores`."""
    if group not in GROUPS:
        raise ValueError(f"group: expected 'sum' or 'max', got {group!r}")
    expect("query", query, "B, H, G, D", (None,) * 4, FLOATS)
    (batch, heads, _, dim), device = query.shape, query.device
    expect("lower", lower, "B, H, N, D", (batch, heads, None, dim), FLOATS, device)
    expect("upper", upper, "B, H, N, D", (batch, heads, lower.shape[2], dim), FLOATS, device)
    expect("last", last, "B", (batch,), INTEGERS, device)


def quest_scores(
    query: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    first: int,
    last: torch.Tensor,
    *,
    group: str = "sum",
) -> torch.Tensor:
    """Quest's upper bound of q.k over each block, combined over the query heads of a KV head.

    max over the block's box of q.k is U_g = relu(q_g).upper - relu(-q_g).lower (Quest, arXiv 2406.10774), linear in the
    two query parts. So the exact sum is sum_g U_g = (sum_g relu(q_g)).upper - (sum_g relu(-q_g)).lower, at the price of
    one head; the maximum takes all G.

    Args:
        query: [B, H, G, D], post-RoPE.  lower, upper: [B, H, N, D] from `update_summaries`.
        first: blocks below it are not scored.  last: [B] integer, blocks at or past it are not scored.
        group: "sum" or "max" over the query heads.

    Returns:
        fp32 [B, H, N]; NaN for blocks that are not scored or hold no valid token.

    Raises:
        ValueError: another `group`; shapes, dtypes or devices outside the above.
    """
    check_quest_arguments(query, lower, upper, last, group)
    # Multiply and sum, not matmul: a BLAS dot product changes its bits with the shape around it, and scores must not
    # depend on the batch or on how many blocks there are. Contiguous, since a sum's order follows the strides.
    query = query.float().contiguous()
    positive, negative = query.clamp(min=0), (-query).clamp(min=0)
    lower, upper = lower.float().contiguous(), upper.float().contiguous()
    empty = lower[..., 0] > upper[..., 0]
    if group == "sum":
        positive, negative = fixed_sum(positive, 2).unsqueeze(2), fixed_sum(negative, 2).unsqueeze(2)
        return _only(fixed_sum(positive * upper - negative * lower, -1), first, last, empty)
    bounds = positive[:, :, :, None] * upper[:, :, None] - negative[:, :, :, None] * lower[:, :, None]
    return _only(fixed_sum(bounds, -1).amax(dim=2), first, last, empty)


def check_infllm_arguments(
    query: torch.Tensor,
    means: torch.Tensor,
    filled: torch.Tensor,
    last: torch.Tensor,
    length: torch.Tensor,
    stride: int,
) -> int:
    """Raise ValueError for anything outside the contract of `infllm_scores`.

    Returns:
        stride as an int.
    """
    expect("query", query, "B, H, G, D", (None,) * 4, FLOATS)
    (batch, heads, _, dim), device = query.shape, query.device
    expect("means", means, "B, H, N, W, D", (batch, heads, None, None, dim), (query.dtype,), device)
    expect("filled", filled, "B, H, N, W", means.shape[:4], BOOL, device)
    expect("last", last, "B", (batch,), INTEGERS, device)
    expect("length", length, "B", (batch,), INTEGERS, device)
    return integer("stride", stride, 1)


def infllm_scores(
    query: torch.Tensor,
    means: torch.Tensor,
    filled: torch.Tensor,
    first: int,
    last: torch.Tensor,
    length: torch.Tensor,
    *,
    scale: float,
    stride: int,
) -> torch.Tensor:
    """InfLLM-v2's block scores (arXiv 2509.24663, section 3): the softmax of q.c over the compressed keys c, summed
    over the query heads of a KV head, and of that the maximum over a block's windows.

    The softmax is exact: it goes over every filled window that ends at or before the query, those of blocks that are
    not scored included. A window whose logit is NaN or +inf counts for nothing, but makes its block's score NaN.

    Args:
        query: [B, H, G, D], post-RoPE.  means: [B, H, N, W, D] in its dtype and filled: bool [B, H, N, W], from
            `compress_keys`; in kernels W is a power of two.
        first: blocks below it are not scored.  last: [B] integer, blocks at or past it are not scored.
        length: [B] integer, tokens of each row up to the query's own.  scale: of the logits.
        stride: tokens between windows; slot w of block n ends after (n * W + w + 1) * stride tokens.

    Returns:
        fp32 [B, H, N] in [0, G]; NaN for blocks that are not scored or hold no window.

    Raises:
        ValueError: shapes, dtypes, devices or stride outside the above.
    """
    stride = check_infllm_arguments(query, means, filled, last, length, stride)
    blocks, windows = means.shape[2:4]
    if blocks == 0:
        return means.new_zeros(means.shape[:3], dtype=torch.float32)
    slots = torch.arange(blocks * windows, device=means.device)
    visible = filled.flatten(2) & ((slots + 1) * stride <= length[:, None])[:, None]  # [B, H, N * W]
    scaled = (query.float() * scale).contiguous()
    logits = fixed_sum(scaled[:, :, :, None] * means.flatten(2, 3).float().contiguous()[:, :, None], -1)
    hidden = ~visible[:, :, None]
    broken = (logits.isnan() | (logits == float("inf"))) & ~hidden
    logits = logits.masked_fill(hidden | broken, float("-inf"))
    weights = torch.exp(shifted(logits, logits.amax(dim=-1, keepdim=True)))
    shares = weights / tree_sum(weights, 3)[..., None]
    shares = shares.masked_fill(hidden, 0.0).masked_fill(broken, float("nan"))
    # Not torch's sum: along this dimension its order follows how many windows stand beside each other
    summed = tree_sum(shares, 2).unflatten(2, (blocks, windows))
    return _only(summed.amax(dim=-1), first, last, ~visible.unflatten(2, (blocks, windows)).any(dim=-1))
