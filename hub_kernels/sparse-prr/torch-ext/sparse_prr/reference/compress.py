"""Compressed keys: means over overlapping windows of keys (InfLLM-v2, arXiv 2509.24663)."""

import torch

from .check import BOOL, FLOATS, expect, expect_rows
from .summary import touched_blocks
from .sums import fixed_sum


def check_window_arguments(
    keys: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    means: torch.Tensor,
    filled: torch.Tensor,
    end: torch.Tensor,
    window: int,
    stride: int,
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `compress_keys`."""
    if stride < 1 or window < stride or window % stride:
        raise ValueError(f"window: expected a positive multiple of stride={stride}, got {window}")
    expect("keys", keys, "B, H, T, D", (None,) * 4, FLOATS)
    (batch, heads, columns, dim), device = keys.shape, keys.device
    expect_rows(valid, start, end, batch, columns, device)
    expect("means", means, "B, H, N, W, D", (batch, heads, None, None, dim), (keys.dtype,), device)
    expect("filled", filled, "B, H, N, W", means.shape[:4], BOOL, device)


def compress_keys(
    keys: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    means: torch.Tensor,
    filled: torch.Tensor,
    end: torch.Tensor,
    count: int,
    *,
    window: int,
    stride: int,
) -> None:
    """Recompute, in place, the windows of every block that holds one of the columns end - count .. end - 1.

    Windows of `window` tokens begin every `stride` tokens of a batch row. Block n holds the W windows that end in it:
    slot w covers the row's tokens n*S + (w+1)*stride - window .. n*S + (w+1)*stride - 1. A window is filled when it
    begins at or after the row's first token, all its columns lie before `end`, and one of them is valid; its
    mean is over the valid ones. The others get mean 0. A block is recomputed whole, so the result is the same however
    the tokens arrived. A NaN key makes its channel NaN in the windows that hold it.

    Args:
        keys: [B, H, T, D], post-RoPE.  valid: [B, T] bool.  start: [B] integer, first real column of each row.
        means: [B, H, N, W, D] in the dtype of keys, written.  filled: bool [B, H, N, W], written. N blocks must reach
            column end - 1, which isn't checked.
        end: [B] integer, and count: each row's new columns, end - count .. end - 1.  window: a multiple of stride.
            S = W * stride.

    Raises:
        ValueError: `window` is not a positive multiple of `stride`; shapes, dtypes or devices outside the above.
    """
    check_window_arguments(keys, valid, start, means, filled, end, window, stride)
    if count <= 0:
        return
    _, heads, columns, dim = keys.shape
    windows = means.shape[3]
    end, start = end.long(), start.long()
    rows, ids = touched_blocks(start, end, count, windows * stride)
    pieces = window // stride  # pieces of `stride` tokens in a window; neighbouring windows share them
    lead = window - stride
    first = start[rows] + ids * windows * stride - lead
    tokens = first[:, None] + torch.arange(lead + windows * stride, device=keys.device)
    within = tokens.clamp(0, columns - 1)
    counted = (tokens >= start[rows][:, None]) & (tokens < end[rows, None]) & valid[rows[:, None], within]
    planes = rows[:, None] * heads + torch.arange(heads, device=keys.device)
    flat = planes[..., None] * columns + within[:, None]
    gathered = keys.reshape(-1, dim).index_select(0, flat.flatten()).view(*flat.shape, dim).float()
    gathered = gathered.masked_fill(~counted[:, None, :, None], 0.0)
    sums = fixed_sum(gathered.unflatten(2, (-1, stride)), 3)  # [R, H, pieces of the block, D]
    counts = counted.unflatten(1, (-1, stride)).sum(dim=2)
    total, tokens_in = sums[:, :, :windows], counts[:, :windows]
    for piece in range(1, pieces):
        total = total + sums[:, :, piece : piece + windows]
        tokens_in = tokens_in + counts[:, piece : piece + windows]
    begins = first[:, None] + torch.arange(windows, device=keys.device) * stride
    complete = (begins >= start[rows][:, None]) & (begins + window <= end[rows, None]) & (tokens_in > 0)
    mean = total / tokens_in.clamp(min=1)[:, None, :, None]
    means[rows, :, ids] = mean.masked_fill(~complete[:, None, :, None], 0.0).to(means.dtype)
    filled[rows, :, ids] = complete[:, None].expand(-1, heads, -1)
