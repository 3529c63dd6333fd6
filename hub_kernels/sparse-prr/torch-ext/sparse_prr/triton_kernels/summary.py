"""Block summaries: minimum and maximum of a block's keys, and means of windows of them."""

import torch
import triton
import triton.language as tl

from ..reference.compress import check_window_arguments
from ..reference.summary import check_summary_arguments, straddled
from .launch import options, wait_for_previous
from .tile import check_block_size, padded


@triton.jit
def _boxes(
    keys, valid, start, end, lower, upper, count, columns,
    k_b, k_h, k_t, k_d, m_b, m_t, s_b, e_b, l_b, l_h, l_n, l_d, u_b, u_h, u_n, u_d,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    origin, limit = tl.load(start + b * s_b).to(tl.int64), tl.load(end + b * e_b).to(tl.int64)
    block = tl.maximum(limit - count - origin, 0) // S + tl.program_id(0)
    if origin + block * S < limit:
        t, d = origin + block * S + tl.arange(0, S), tl.arange(0, DP)
        inside = (t < limit) & (t < columns)
        seen = inside & (tl.load(valid + b * m_b + t * m_t, mask=inside, other=0) != 0)
        held = seen[:, None] & (d < D)[None, :]
        k = tl.load(keys + b * k_b + h * k_h + t[:, None] * k_t + d[None, :] * k_d, mask=held, other=0.0)
        k = k.to(tl.float32)
        nan = tl.sum((k != k).to(tl.int32), axis=0) > 0
        low = tl.min(tl.where(held, k, float("inf")), axis=0)
        high = tl.max(tl.where(held, k, float("-inf")), axis=0)
        low, high = tl.where(nan, float("nan"), low), tl.where(nan, float("nan"), high)
        tl.store(lower + b * l_b + h * l_h + block * l_n + d * l_d, low.to(lower.dtype.element_ty), mask=d < D)
        tl.store(upper + b * u_b + h * u_h + block * u_n + d * u_d, high.to(upper.dtype.element_ty), mask=d < D)


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
    """As the reference. One program a block and KV head; block_size is a power of two, 16 at least."""
    block_size = check_summary_arguments(keys, valid, start, lower, upper, end, block_size)
    check_block_size(block_size)
    batch, heads, columns, dim = keys.shape
    if count <= 0 or keys.numel() == 0:
        return
    valid = valid.view(torch.uint8)
    _boxes[(straddled(count, block_size), heads, batch)](
        keys, valid, start, end, lower, upper, count, columns,
        *keys.stride(), *valid.stride(), *start.stride(), *end.stride(), *lower.stride(), *upper.stride(),
        S=block_size, D=dim, DP=padded(dim), **options(keys, num_warps=4),
    )  # fmt: skip


@triton.jit
def _windows(
    keys, valid, start, end, means, filled, count, columns,
    k_b, k_h, k_t, k_d, m_b, m_t, s_b, e_b, c_b, c_h, c_n, c_w, c_d, f_b, f_h, f_n, f_w,
    W: tl.constexpr, WINDOW: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One window of one block: its tokens are summed in an order of their own, whatever else is computed."""
    wait_for_previous(PDL)
    slot, h, b = tl.program_id(0) % W, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    origin, limit = tl.load(start + b * s_b).to(tl.int64), tl.load(end + b * e_b).to(tl.int64)
    block = tl.maximum(limit - count - origin, 0) // (W * STRIDE) + tl.program_id(0) // W
    if origin + block * W * STRIDE < limit:
        first = origin + (block * W + slot + 1) * STRIDE - WINDOW
        d, total, counted = tl.arange(0, DP), tl.zeros([DP], tl.float32), tl.zeros([DP], tl.int32)
        for i in range(WINDOW):  # one after the other: a reduction's order would follow the keys' strides
            t = first + i + tl.zeros([DP], tl.int64)
            inside = (t >= origin) & (t < limit) & (t < columns)
            seen = inside & (tl.load(valid + b * m_b + t * m_t, mask=inside, other=0) != 0)
            k = tl.load(keys + b * k_b + h * k_h + t * k_t + d * k_d, mask=seen & (d < D), other=0.0)
            total += k.to(tl.float32)
            counted += seen.to(tl.int32)
        complete = (first >= origin) & (first + WINDOW <= limit) & (tl.max(counted, axis=0) > 0)
        mean = tl.div_rn(total, tl.maximum(counted, 1).to(tl.float32))
        mean = tl.where(complete, mean, 0.0).to(means.dtype.element_ty)
        tl.store(means + b * c_b + h * c_h + block * c_n + slot * c_w + d * c_d, mean, mask=d < D)
        tl.store(filled + b * f_b + h * f_h + block * f_n + slot * f_w, complete.to(tl.uint8))


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
    """As the reference. One program a window and KV head; W is a power of two."""
    check_window_arguments(keys, valid, start, means, filled, end, window, stride)
    batch, heads, columns, dim = keys.shape
    windows = means.shape[3]
    if count <= 0 or keys.numel() == 0:
        return
    valid, filled = valid.view(torch.uint8), filled.view(torch.uint8)
    _windows[(straddled(count, windows * stride) * windows, heads, batch)](
        keys, valid, start, end, means, filled, count, columns,
        *keys.stride(), *valid.stride(), *start.stride(), *end.stride(), *means.stride(), *filled.stride(),
        W=windows, WINDOW=window, STRIDE=stride, D=dim, DP=padded(dim), **options(keys, num_warps=1),
    )  # fmt: skip
