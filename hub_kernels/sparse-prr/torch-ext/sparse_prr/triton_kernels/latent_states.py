"""Norms and RoPE of one token of latent attention and of its indexer, and its latent and keys into the buffers."""

import torch
import triton
import triton.language as tl

from ..reference.latent_states import check_index_append_arguments, check_latent_append_arguments
from .launch import options, wait_for_previous
from .linear import rounded
from .tile import padded

_HEADS = 8  # of a program


@triton.jit
def _along(one, two, cos, sin, dtype: tl.constexpr):
    """The first of a pair, turned."""
    return (rounded(one * cos, dtype) - rounded(two * sin, dtype)).to(dtype)


@triton.jit
def _across(one, two, cos, sin, dtype: tl.constexpr):
    """The second."""
    return (rounded(two * cos, dtype) + rounded(one * sin, dtype)).to(dtype)


@triton.jit
def _angles(cos, sin, c_b, c_a, n_b, n_a, b, j, HALF: tl.constexpr):
    c = tl.load(cos + b * c_b + j * c_a, mask=j < HALF, other=0.0).to(tl.float32)
    return c, tl.load(sin + b * n_b + j * n_a, mask=j < HALF, other=0.0).to(tl.float32)


@triton.jit
def _pair(j, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Channels that are rotated together."""
    if INTERLEAVED:
        one, two = 2 * j, 2 * j + 1
    else:
        one, two = j, j + HALF
    return one, two


@triton.jit
def _turn_heads(
    source, x_h, x_d, target, h, H, c, s, j, dtype: tl.constexpr,
    HALF: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads h of [H, E] at `source`, to `target`, without gaps."""
    one, two = _pair(j, HALF, INTERLEAVED)
    inside = (h < H)[:, None] & (j < HALF)[None, :]
    row, to = source + h[:, None].to(tl.int64) * x_h, target + h[:, None].to(tl.int64) * E
    x = tl.load(row + one[None, :] * x_d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(row + two[None, :] * x_d, mask=inside, other=0.0).to(tl.float32)
    tl.store(to + j[None, :], _along(x, y, c[None, :], s[None, :], dtype), mask=inside)
    tl.store(to + HALF + j[None, :], _across(x, y, c[None, :], s[None, :], dtype), mask=inside)
    if E > 2 * HALF:
        e = tl.arange(0, EP)[None, :]
        rest = (h < H)[:, None] & (e >= 2 * HALF) & (e < E)
        tl.store(to + e, tl.load(row + e * x_d, mask=rest), mask=rest)


@triton.jit
def _latent(
    queries, compressed, cos, sin, norm, latents, ropes, end, output, eps, H, groups,
    q_b, q_h, q_a, x_b, x_y, c_b, c_a, n_b, n_a, w_c, l_b, l_t, l_c, r_b, r_t, r_a, e_b,
    C: tl.constexpr, CP: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of the query, or the latent and the key."""
    wait_for_previous(PDL)
    dtype: tl.constexpr = latents.dtype.element_ty
    part, b, j = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, HP)
    c, s = _angles(cos, sin, c_b, c_a, n_b, n_a, b, j, HALF)
    if part < groups:
        h = part * HEADS + tl.arange(0, HEADS)
        _turn_heads(
            queries + b * q_b, q_h, q_a, output + b * H * 2 * HALF, h, H, c, s, j, dtype, HALF, 2 * HALF, 2 * HP, True
        )
    else:
        column = tl.load(end + b * e_b).to(tl.int64) - 1
        compressed += b * x_b
        i = tl.arange(0, CP)
        x = tl.load(compressed + i * x_y, mask=i < C, other=0.0).to(tl.float32)
        x = rounded(x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps), dtype)
        x = x * tl.load(norm + i * w_c, mask=i < C, other=0.0).to(tl.float32)
        tl.store(latents + b * l_b + column * l_t + i * l_c, x.to(dtype), mask=i < C)
        one = tl.load(compressed + (C + 2 * j) * x_y, mask=j < HALF, other=0.0).to(tl.float32)
        two = tl.load(compressed + (C + 2 * j + 1) * x_y, mask=j < HALF, other=0.0).to(tl.float32)
        ropes += b * r_b + column * r_t
        tl.store(ropes + j * r_a, _along(one, two, c, s, dtype), mask=j < HALF)
        tl.store(ropes + (HALF + j) * r_a, _across(one, two, c, s, dtype), mask=j < HALF)


@triton.jit
def _normed(key, norm, bias, at, x_e, w_e, v_e, mean, scale, there, dtype: tl.constexpr):
    """Channels `at` of a layer norm."""
    x = tl.load(key + at * x_e, mask=there, other=0.0).to(tl.float32)
    w = tl.load(norm + at * w_e, mask=there, other=0.0).to(tl.float32)
    return rounded((x - mean) * scale * w + tl.load(bias + at * v_e, mask=there, other=0.0).to(tl.float32), dtype)


@triton.jit
def _index(
    queries, key, weights, cos, sin, norm, bias, keys, end, asked, shares, eps, share, I, groups,
    q_b, q_y, x_b, x_e, g_b, g_i, c_b, c_a, n_b, n_a, w_e, v_e, k_b, k_t, k_e, e_b,
    E: tl.constexpr, EP: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of the query and their weights, or the key."""
    wait_for_previous(PDL)
    dtype: tl.constexpr = keys.dtype.element_ty
    part, b, j = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, HP)
    c, s = _angles(cos, sin, c_b, c_a, n_b, n_a, b, j, HALF)
    if part < groups:
        h = part * HEADS + tl.arange(0, HEADS)
        _turn_heads(queries + b * q_b, E * q_y, q_y, asked + b * I * E, h, I, c, s, j, dtype, HALF, E, EP, INTERLEAVED)
        weight = tl.load(weights + b * g_b + h * g_i, mask=h < I, other=0.0).to(tl.float32)
        tl.store(shares + b * I + h, weight * share, mask=h < I)
    else:
        key += b * x_b
        keys += b * k_b + (tl.load(end + b * e_b).to(tl.int64) - 1) * k_t
        e = tl.arange(0, EP)
        x = tl.load(key + e * x_e, mask=e < E, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=0) / E
        spread = tl.where(e < E, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(spread * spread, axis=0) / E + eps)
        rest = (e >= 2 * HALF) & (e < E)
        value = _normed(key, norm, bias, e, x_e, w_e, v_e, mean, scale, rest, dtype)
        tl.store(keys + e * k_e, value.to(dtype), mask=rest)
        one, two = _pair(j, HALF, INTERLEAVED)
        x = _normed(key, norm, bias, one, x_e, w_e, v_e, mean, scale, j < HALF, dtype)
        y = _normed(key, norm, bias, two, x_e, w_e, v_e, mean, scale, j < HALF, dtype)
        tl.store(keys + j * k_e, _along(x, y, c, s, dtype), mask=j < HALF)
        tl.store(keys + (HALF + j) * k_e, _across(x, y, c, s, dtype), mask=j < HALF)


def _shared(*angles: torch.Tensor) -> list[int]:
    """Strides of angles, which may be one row's for all."""
    return [stride for each in angles for stride in (0 if each.shape[0] == 1 else each.stride(0), each.stride(1))]


def latent_append(
    queries: torch.Tensor,
    compressed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    end: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """As the reference, in one launch."""
    check_latent_append_arguments(queries, compressed, cos, sin, norm, latents, ropes, end)
    (batch, heads, rotated), channels = queries.shape, latents.shape[2]
    output = torch.empty((batch, heads, rotated), dtype=queries.dtype, device=queries.device)
    groups = triton.cdiv(heads, _HEADS)
    if batch:
        _latent[(groups + 1, batch)](
            queries, compressed, cos, sin, norm, latents, ropes, end, output, eps, heads, groups,
            *queries.stride(), *compressed.stride(), *_shared(cos, sin), *norm.stride(), *latents.stride(),
            *ropes.stride(), *end.stride(), C=channels, CP=padded(channels), HALF=rotated // 2,
            HP=padded(rotated // 2), HEADS=_HEADS, **options(latents, num_warps=4, enable_fp_fusion=False),
        )  # fmt: skip
    return output


def index_append(
    queries: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    bias: torch.Tensor,
    keys: torch.Tensor,
    end: torch.Tensor,
    *,
    eps: float,
    share: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, in one launch."""
    check_index_append_arguments(queries, key, weights, cos, sin, norm, bias, keys, end)
    (batch, heads), dim, half = weights.shape, keys.shape[2], cos.shape[1] // 2
    asked = torch.empty((batch, heads, dim), dtype=keys.dtype, device=keys.device)
    shares = torch.empty((batch, heads), dtype=torch.float32, device=keys.device)
    groups = triton.cdiv(heads, _HEADS)
    if batch and dim:
        _index[(groups + 1, batch)](
            queries, key, weights, cos, sin, norm, bias, keys, end, asked, shares, eps, share, heads, groups,
            *queries.stride(), *key.stride(), *weights.stride(), *_shared(cos, sin), *norm.stride(), *bias.stride(),
            *keys.stride(), *end.stride(), E=dim, EP=padded(dim), HALF=half, HP=padded(half), HEADS=_HEADS,
            INTERLEAVED=interleaved, **options(keys, num_warps=4, enable_fp_fusion=False),
        )  # fmt: skip
    return asked, shares
