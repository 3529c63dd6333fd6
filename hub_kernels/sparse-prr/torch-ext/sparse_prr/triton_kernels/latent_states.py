"""Norms and RoPE of one token of latent attention and of its indexer, and its latent and keys into the buffers."""

import torch
import triton
import triton.language as tl

from ..reference.latent_states import (
    check_index_append_arguments,
    check_index_queries_arguments,
    check_latent_append_arguments,
)
from .launch import options, wait_for_previous
from .linear import rounded
from .rotate import angles_at, rotated, shared, sources
from .tile import padded


@triton.jit
def _latent(
    compressed, cos, sin, norm, latents, ropes, end, eps,
    x_b, x_y, c_b, c_a, n_b, n_a, w_c, l_b, l_t, l_c, r_b, r_t, r_a, e_b,
    C: tl.constexpr, CP: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Latent and RoPE key of one row."""
    wait_for_previous(PDL)
    dtype: tl.constexpr = latents.dtype.element_ty
    b, i, a = tl.program_id(0).to(tl.int64), tl.arange(0, CP), tl.arange(0, AP)
    column = tl.load(end + b * e_b).to(tl.int64) - 1
    compressed += b * x_b
    x = tl.load(compressed + i * x_y, mask=i < C, other=0.0).to(tl.float32)
    weight = tl.load(norm + i * w_c, mask=i < C, other=0.0).to(tl.float32)
    own, partner, angle = sources(a, A, True)
    one = tl.load(compressed + (C + own) * x_y, mask=a < A, other=0.0).to(tl.float32)
    two = tl.load(compressed + (C + partner) * x_y, mask=a < A, other=0.0).to(tl.float32)
    c, s = angles_at(cos + b * c_b, sin + b * n_b, c_a, n_a, angle, a < A)
    x = rounded(x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps), dtype) * weight
    tl.store(latents + b * l_b + column * l_t + i * l_c, x.to(dtype), mask=i < C)
    tl.store(ropes + b * r_b + column * r_t + a * r_a, rotated(one, two, c, s, a, A, dtype), mask=a < A)


@triton.jit
def _normed(key, norm, bias, at, x_e, w_e, v_e, mean, scale, there, dtype: tl.constexpr):
    """Channels `at` of a layer norm."""
    x = tl.load(key + at * x_e, mask=there, other=0.0).to(tl.float32)
    w = tl.load(norm + at * w_e, mask=there, other=0.0).to(tl.float32)
    return rounded((x - mean) * scale * w + tl.load(bias + at * v_e, mask=there, other=0.0).to(tl.float32), dtype)


@triton.jit
def _index_key(
    key, cos, sin, norm, bias, keys, end, eps, x_b, x_e, c_b, c_a, n_b, n_a, w_e, v_e, k_b, k_t, k_e, e_b,
    E: tl.constexpr, EP: tl.constexpr, A: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The key of one row."""
    wait_for_previous(PDL)
    dtype: tl.constexpr = keys.dtype.element_ty
    b, e = tl.program_id(0).to(tl.int64), tl.arange(0, EP)
    key += b * x_b
    keys += b * k_b + (tl.load(end + b * e_b).to(tl.int64) - 1) * k_t
    x = tl.load(key + e * x_e, mask=e < E, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / E
    spread = tl.where(e < E, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(spread * spread, axis=0) / E + eps)
    own, partner, angle = sources(e, A, INTERLEAVED)
    one = _normed(key, norm, bias, own, x_e, w_e, v_e, mean, scale, e < E, dtype)
    two = _normed(key, norm, bias, partner, x_e, w_e, v_e, mean, scale, e < A, dtype)
    c, s = angles_at(cos + b * c_b, sin + b * n_b, c_a, n_a, angle, e < A)
    tl.store(keys + e * k_e, rotated(one, two, c, s, e, A, dtype), mask=e < E)


@triton.jit
def _index_queries(
    queries, weights, cos, sin, asked, shares, share, q_b, q_i, q_e, g_b, g_i, c_b, c_a, n_b, n_a,
    E: tl.constexpr, EP: tl.constexpr, A: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head and its weight. The scorer waits for it, and its code is in no cache: little of it, no sums, and all
    that it reads on its way at once."""
    i, b, e = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, EP)
    own, partner, angle = sources(e, A, INTERLEAVED)
    queries += b * q_b + i * q_i
    wait_for_previous(PDL)
    one = tl.load(queries + own * q_e, mask=e < E, other=0.0)
    two = tl.load(queries + partner * q_e, mask=e < A, other=0.0)
    weight = tl.load(weights + b * g_b + i * g_i)
    c, s = angles_at(cos + b * c_b, sin + b * n_b, c_a, n_a, angle, e < A)
    turned = rotated(one.to(tl.float32), two.to(tl.float32), c, s, e, A, asked.dtype.element_ty)
    head = b * tl.num_programs(0) + i
    tl.store(asked + head * E + e, turned, mask=e < E)
    tl.store(shares + head, weight.to(tl.float32) * share)


def latent_append(
    compressed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    end: torch.Tensor,
    *,
    eps: float,
) -> None:
    """As the reference. One program a row."""
    check_latent_append_arguments(compressed, cos, sin, norm, latents, ropes, end)
    (batch, _, channels), wide = latents.shape, ropes.shape[2]
    if batch:
        _latent[(batch,)](
            compressed, cos, sin, norm, latents, ropes, end, eps,
            *compressed.stride(), *shared(cos, sin), *norm.stride(), *latents.stride(), *ropes.stride(),
            *end.stride(), C=channels, CP=padded(channels), A=wide, AP=padded(wide),
            **options(latents, num_warps=4, enable_fp_fusion=False),
        )  # fmt: skip


def index_append(
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    bias: torch.Tensor,
    keys: torch.Tensor,
    end: torch.Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> None:
    """As the reference. One program a row."""
    check_index_append_arguments(key, cos, sin, norm, bias, keys, end)
    batch, _, dim = keys.shape
    if batch and dim:
        _index_key[(batch,)](
            key, cos, sin, norm, bias, keys, end, eps, *key.stride(), *shared(cos, sin), *norm.stride(),
            *bias.stride(), *keys.stride(), *end.stride(), E=dim, EP=padded(dim), A=cos.shape[1],
            INTERLEAVED=interleaved, **options(keys, num_warps=4, enable_fp_fusion=False),
        )  # fmt: skip


def index_queries(
    queries: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    share: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference. One program a head."""
    check_index_queries_arguments(queries, weights, cos, sin)
    batch, heads, dim = queries.shape
    asked = torch.empty((batch, heads, dim), dtype=queries.dtype, device=queries.device)
    shares = torch.empty((batch, heads), dtype=torch.float32, device=queries.device)
    if shares.numel():  # without a channel there still are weights
        _index_queries[(heads, batch)](
            queries, weights, cos, sin, asked, shares, share,
            *queries.stride(), *weights.stride(), *shared(cos, sin),
            E=dim, EP=padded(dim), A=cos.shape[1], INTERLEAVED=interleaved,
            **options(queries, num_warps=1, enable_fp_fusion=False),
        )  # fmt: skip
    return asked, shares
