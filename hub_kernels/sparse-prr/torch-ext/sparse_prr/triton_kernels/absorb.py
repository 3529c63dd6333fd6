"""Queries to latents, and attended latents to values: each head's matrix is streamed once, where it is."""

import torch
import triton
import triton.language as tl

from ..reference.absorb import check_query_arguments, check_value_arguments
from .launch import options, wait_for_previous
from .rotate import angles_at, rotated, shared, sources
from .tile import padded

_CHANNELS = 64  # of latents that a program gives: 128 bytes of a row
_TILE = 2**13  # weights of a program that gives values


@triton.jit
def _queries(
    queries, ropes, cos, sin, up, output, H, q_b, q_h, q_d, r_b, r_h, r_a, c_b, c_a, n_b, n_a, u_h, u_d, u_c,
    D: tl.constexpr, C: tl.constexpr, A: tl.constexpr, DP: tl.constexpr, AP: tl.constexpr, CS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """CS channels of one head; the first program of it also rotates what is handed on."""
    dtype: tl.constexpr = output.dtype.element_ty
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    d, c = tl.arange(0, DP), tl.program_id(0) * CS + tl.arange(0, CS)
    at = up + h * u_h + d[:, None] * u_d + c[None, :] * u_c
    # Weights are there before the kernel in front is done, and stay as they are until then: in fp32 half of the
    # programs would fit
    weights = tl.load(at, mask=(d < D)[:, None] & (c < C)[None, :], other=0.0)
    wait_for_previous(PDL)
    query = tl.load(queries + b * q_b + h * q_h + d * q_d, mask=d < D, other=0.0).to(tl.float32)
    output += (b * H + h) * (C + A)
    if tl.program_id(0) == 0:
        a = tl.arange(0, AP)
        own, partner, angle = sources(a, A, True)
        row = ropes + b * r_b + h * r_h
        one = tl.load(row + own * r_a, mask=a < A, other=0.0).to(tl.float32)
        two = tl.load(row + partner * r_a, mask=a < A, other=0.0).to(tl.float32)
        turn, side = angles_at(cos + b * c_b, sin + b * n_b, c_a, n_a, angle, a < A)
        tl.store(output + C + a, rotated(one, two, turn, side, a, A, dtype), mask=a < A)
    moved = tl.sum(weights.to(tl.float32) * query[:, None], axis=0)
    tl.store(output + c, moved.to(dtype), mask=c < C)


@triton.jit
def _values(
    latents, down, output, H, l_b, l_h, l_c, w_h, w_d, w_c,
    D: tl.constexpr, C: tl.constexpr, DS: tl.constexpr, CP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """DS channels of one head."""
    dtype: tl.constexpr = down.dtype.element_ty
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    d, c = tl.program_id(0) * DS + tl.arange(0, DS), tl.arange(0, CP)
    at = down + h * w_h + d[:, None] * w_d + c[None, :] * w_c
    weights = tl.load(at, mask=(d < D)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    latent = tl.load(latents + b * l_b + h * l_h + c * l_c, mask=c < C, other=0.0).to(dtype).to(tl.float32)
    value = tl.sum(weights * latent[None, :], axis=1)
    tl.store(output + (b * H + h) * D + d, value.to(dtype), mask=d < D)


def absorb_queries(
    queries: torch.Tensor, ropes: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """As the reference. Batch rows don't share what they read: few are meant."""
    check_query_arguments(queries, ropes, cos, sin, up)
    (batch, heads, dim), wide, channels = queries.shape, ropes.shape[2], up.shape[2]
    output = queries.new_empty((batch, heads, channels + wide))
    if output.numel() == 0:
        return output
    # Not fused: RoPE's products are rounded, and of two halves a product is exact in fp32
    _queries[(max(1, triton.cdiv(channels, _CHANNELS)), heads, batch)](
        queries, ropes, cos, sin, up, output, heads, *queries.stride(), *ropes.stride(), *shared(cos, sin),
        *up.stride(), D=dim, C=channels, A=wide, DP=padded(dim), AP=padded(wide), CS=_CHANNELS,
        **options(queries, num_warps=4, enable_fp_fusion=False),
    )  # fmt: skip
    return output


def absorb_values(latents: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    check_value_arguments(latents, down)
    (batch, heads, channels), dim = latents.shape, down.shape[1]
    output = down.new_empty((batch, heads, dim))
    if output.numel() == 0:
        return output
    wide = padded(channels)
    size = max(1, min(triton.next_power_of_2(dim), _TILE // wide))
    _values[(triton.cdiv(dim, size), heads, batch)](
        latents, down, output, heads, *latents.stride(), *down.stride(),
        D=dim, C=channels, DS=size, CP=wide, **options(latents, num_warps=4),
    )  # fmt: skip
    return output
