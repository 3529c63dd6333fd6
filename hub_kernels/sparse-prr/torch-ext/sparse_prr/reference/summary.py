"""Block summaries: the channel-wise minimum and maximum of a block's keys (Quest, arXiv 2406.10774, section 3.2)."""

import torch

from .check import FLOATS, expect, expect_rows, integer


def straddled(count: int, block_size: int) -> int:
    """Blocks that `count` columns may fall into, whatever the row's grid."""
    return (count + block_size - 2) // block_size + 1


def touched_blocks(
    start: torch.Tensor, end: torch.Tensor, count: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, block ids) of the blocks that hold one of the columns end - count .. end - 1. start, end: int64 [B]."""
    first = (end - count - start).clamp(min=0) // block_size
    last = (end - 1 - start).div(block_size, rounding_mode="floor")
    blocks = first[:, None] + torch.arange(straddled(count, block_size), device=start.device)
    rows, slots = (blocks <= last[:, None]).nonzero(as_tuple=True)
    return rows, blocks[rows, slots]


def check_summary_arguments(
    keys: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    end: torch.Tensor,
    block_size: int,
) -> int:
    """Raise ValueError for what the host can tell is outside the contract of `update_summaries`.

    Returns:
        block_size as an int.
    """
    expect("keys", keys, "B, H, T, D", (None,) * 4, FLOATS)
    (batch, heads, columns, dim), device, dtypes = keys.shape, keys.device, (keys.dtype,)
    expect_rows(valid, start, end, batch, columns, device)
    expect("lower", lower, "B, H, N, D", (batch, heads, None, dim), dtypes, device)
    expect("upper", upper, "B, H, N, D", (batch, heads, lower.shape[2], dim), dtypes, device)
    return integer("block_size", block_size, 1)


def update_summaries(
    keys: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    end: torch.Tensor,
    count: int,
    block_size: int,
) -> None:
    """Recompute, in place, the summary of every block that holds one of the columns end - count .. end - 1.

    A block is recomputed whole, from its valid tokens before column `end`, so the result is the same however
    the tokens arrived: at once, in chunks, one by one, or again after a crop. Blocks without a valid token get
    lower = +inf > upper = -inf. A NaN key makes its channel NaN.

    Args:
        keys: [B, H, T, D], post-RoPE.  valid: [B, T] bool.  start: [B] integer, first real column of each row.
        lower, upper: [B, H, N, D] in the dtype of keys, written; N blocks must reach column end - 1, which isn't
            checked.
        end: [B] integer, and count: each row's new columns, end - count .. end - 1.  block_size: S; in kernels a power
            of two from 16.

    Raises:
        ValueError: shapes, dtypes, devices or block_size outside the above.
    """
    block_size = check_summary_arguments(keys, valid, start, lower, upper, end, block_size)
    _, heads, columns, _ = keys.shape
    if count <= 0:
        return
    end, start = end.long(), start.long()
    rows, ids = touched_blocks(start, end, count, block_size)
    tokens = (start[rows] + ids * block_size)[:, None] + torch.arange(block_size, device=keys.device)
    within = tokens.clamp(max=columns - 1)
    counted = ((tokens < end[rows, None]) & valid[rows[:, None], within])[:, None, :, None]
    planes = rows[:, None] * heads + torch.arange(heads, device=keys.device)
    flat = planes[..., None] * columns + within[:, None]
    gathered = keys.reshape(-1, keys.shape[-1]).index_select(0, flat.flatten()).view(*flat.shape, keys.shape[-1])
    lower[rows, :, ids] = gathered.masked_fill(~counted, float("inf")).amin(dim=2)
    upper[rows, :, ids] = gathered.masked_fill(~counted, float("-inf")).amax(dim=2)
