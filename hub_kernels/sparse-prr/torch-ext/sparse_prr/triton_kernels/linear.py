"""Linear layers of a decode step: weights are streamed once, in as many groups as there are layers."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..reference.linear import check_linear_arguments
from . import tuned
from .launch import let_next_start, options, wait_only

_NORM = 4096  # channels whose squares are summed at a time


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """In fp32, as the dtype holds it."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def _scale_of(x, X, eps, dtype: tl.constexpr, NX: tl.constexpr):
    """1 over the root mean square of a row."""
    squares = tl.zeros([NX], tl.float32)
    for first in range(0, X, NX):
        c = first + tl.arange(0, NX)
        value = rounded(tl.load(x + c, mask=c < X, other=0.0), dtype)
        squares += value * value
    return tl.rsqrt(tl.sum(squares, axis=0) / X + eps)


@triton.jit
def _inputs(x, norm, c, X, scale, dtype: tl.constexpr, NORM: tl.constexpr):
    """What channels `c` put into the layers."""
    value = rounded(tl.load(x + c, mask=c < X, other=0.0), dtype)
    if NORM:
        weight = tl.load(norm + c, mask=c < X, other=0.0).to(tl.float32)
        value = rounded(rounded(value * scale, dtype) * weight, dtype)
    return value[None, :]


@triton.jit
def _linear(
    x, w0, w1, w2, b0, b1, b2, norm, residual, output, Y0, Y1, Y2, X, eps,
    x_b, w0_y, w1_y, w2_y, r_b, r_y, o_b,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, AHEAD: tl.constexpr,
    BY: tl.constexpr, BX: tl.constexpr, NX: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BY output channels of one weight, or of both of a gate, of one batch row."""
    dtype: tl.constexpr = w0.dtype.element_ty
    part, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    weight, bias, w_y, Y, before = w0, b0, w0_y, Y0, 0
    first, second = tl.cdiv(Y0, BY), tl.cdiv(Y1, BY)
    if not GATED:
        if part >= first + second:
            weight, bias, w_y, Y, before = w2, b2, w2_y, Y2, Y0 + Y1
            part -= first + second
        elif part >= first:
            weight, bias, w_y, Y, before = w1, b1, w1_y, Y1, Y0
            part -= first
    y, c, ahead = part * BY + tl.arange(0, BY), tl.arange(0, BX), tl.arange(0, AHEAD)
    row = tl.minimum(y, Y - 1).to(tl.int64)[:, None]  # a row beyond the last is read in its place, and not stored
    at, at2 = weight + row * w_y, w1 + row * w1_y
    x += batch * x_b
    # Weights are there before the kernel in front is done: their first channels come while this one waits
    held = tl.load(at + ahead[None, :], mask=(ahead < X)[None, :], other=0.0)
    held2 = held
    if GATED:
        held2 = tl.load(at2 + ahead[None, :], mask=(ahead < X)[None, :], other=0.0)
    wait_only(PDL)
    scale = 1.0
    if NORM:
        scale = _scale_of(x, X, eps, dtype, NX)
    leading = _inputs(x, norm, ahead, X, scale, dtype, NORM)
    result, gates = tl.sum(held.to(tl.float32) * leading, axis=1), tl.sum(held2.to(tl.float32) * leading, axis=1)
    total, total2 = tl.zeros([BY, BX], tl.float32), tl.zeros([BY, BX], tl.float32)
    for k in tl.range(AHEAD, X, BX, num_stages=STAGES):
        inside = (k + c < X)[None, :]
        value = _inputs(x, norm, k + c, X, scale, dtype, NORM)
        total += tl.load(at + (k + c)[None, :], mask=inside, other=0.0).to(tl.float32) * value
        if GATED:
            total2 += tl.load(at2 + (k + c)[None, :], mask=inside, other=0.0).to(tl.float32) * value
    let_next_start(PDL)
    kept = y < Y
    result += tl.sum(total, axis=1)
    if BIAS:
        result += tl.load(bias + y, mask=kept, other=0.0).to(tl.float32)
    result = rounded(result, dtype)
    if GATED:
        gates += tl.sum(total2, axis=1)
        if BIAS:
            gates += tl.load(b1 + y, mask=kept, other=0.0).to(tl.float32)
        result = rounded(rounded(result / (1 + tl.exp(-result)), dtype) * rounded(gates, dtype), dtype)
    y += before
    if RESIDUAL:
        result += tl.load(residual + batch * r_b + y * r_y, mask=kept, other=0.0).to(tl.float32)
    tl.store(output + batch * o_b + y, result.to(dtype), mask=kept)


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference. A program takes BY channels of a row; rows don't share what they read: few are meant."""
    check_linear_arguments(x, weights, biases, norm, gated, residual)
    config = tuned.config("gate" if gated else "linear", x)
    size = config["BY"]
    x = x if x.stride(1) == 1 else x.contiguous()
    rows = [weight.shape[0] for weight in weights]
    output = x.new_empty((x.shape[0], rows[0] if gated else sum(rows)), dtype=weights[0].dtype)
    parts = triton.cdiv(rows[0], size) if gated else sum(triton.cdiv(count, size) for count in rows)
    if output.numel() == 0:
        return output
    w0, w1, w2 = [*weights, weights[0], weights[0]][:3]
    b0, b1, b2 = (w0, w0, w0) if biases is None else [*(bias.contiguous() for bias in biases), w0, w0][:3]
    added = output if residual is None else residual
    _linear[(parts, x.shape[0])](
        x, w0, w1, w2, b0, b1, b2, w0 if norm is None else norm.contiguous(), added, output,
        *[*rows, 0, 0][:3], x.shape[1], eps,
        x.stride(0), w0.stride(0), w1.stride(0), w2.stride(0), *added.stride(), output.stride(0),
        NORM=norm is not None, BIAS=biases is not None, GATED=gated, RESIDUAL=residual is not None,
        NX=min(_NORM, triton.next_power_of_2(x.shape[1])), **options(x, **config),
    )  # fmt: skip
    return output
