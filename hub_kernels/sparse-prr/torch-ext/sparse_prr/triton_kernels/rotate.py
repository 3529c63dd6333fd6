"""RoPE of a decode step's query and key, and the new key and value into the buffer."""

import torch
import triton
import triton.language as tl

from ..reference.rotate import check_rotate_arguments
from .launch import options, wait_for_previous
from .linear import rounded
from .tile import padded


@triton.jit
def sources(d, A: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of channel d of a rotated head, the first of each pair in front: the channels that make it, and its angle."""
    half: tl.constexpr = A // 2
    second = (d >= half).to(tl.int32)
    angle = d - second * half
    if INTERLEAVED:
        own, partner = 2 * angle + second, 2 * angle + 1 - second
    else:
        own, partner = d, angle + (1 - second) * half
    return tl.where(d < A, own, d), tl.where(d < A, partner, d), angle


@triton.jit
def angles_at(cos, sin, c_a, n_a, angle, there):
    c = tl.load(cos + angle * c_a, mask=there, other=0.0).to(tl.float32)
    return c, tl.load(sin + angle * n_a, mask=there, other=0.0).to(tl.float32)


@triton.jit
def rotated(own, partner, c, s, d, A: tl.constexpr, dtype: tl.constexpr):
    """Channel d of what `sources` says. To be launched with `enable_fp_fusion=False`: every product is rounded."""
    along, across = rounded(own * c, dtype), rounded(partner * s, dtype)
    turned = tl.where(d < A // 2, along - across, along + across)
    return tl.where(d < A, turned, own).to(dtype)


def shared(*angles: torch.Tensor) -> list[int]:
    """Strides of angles, which may be one row's for all."""
    return [stride for each in angles for stride in (0 if each.shape[0] == 1 else each.stride(0), each.stride(1))]


@triton.jit
def _rotate(
    states, cos, sin, keys, values, end, query_norm, key_norm, query, eps, QH, H,
    s_b, s_y, c_b, c_a, n_b, n_a, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, e_b,
    A: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, INTERLEAVED: tl.constexpr,
    QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of query, key or value."""
    wait_for_previous(PDL)
    dtype: tl.constexpr = keys.dtype.element_ty
    head, batch, d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, DP)
    column = tl.load(end + batch * e_b).to(tl.int64) - 1
    states += batch * s_b
    if head >= QH + H:
        h = (head - QH - H).to(tl.int64)
        value = tl.load(states + ((QH + H) * DK + h * DV + d) * s_y, mask=d < DV)
        tl.store(values + batch * v_b + h * v_h + column * v_t + d * v_d, value, mask=d < DV)
    else:
        half: tl.constexpr = A // 2
        turned = d < A
        if INTERLEAVED:
            partner, angle, minus = d ^ 1, d // 2, d % 2 == 0
        else:
            partner, angle, minus = tl.where(d < half, d + half, d - half), d, d < half
        partner = tl.where(turned, partner, d)
        x = tl.load(states + (head * DK + d) * s_y, mask=d < DK, other=0.0).to(tl.float32)
        other = tl.load(states + (head * DK + partner) * s_y, mask=d < DK, other=0.0).to(tl.float32)
        normed = (QUERY_NORM and head < QH) or (KEY_NORM and head >= QH)
        if normed:
            norm = query_norm
            if head >= QH:
                norm = key_norm
            scale = tl.rsqrt(tl.sum(x * x, axis=0) / DK + eps)
            weight = tl.load(norm + d, mask=d < DK, other=0.0).to(tl.float32)
            other_weight = tl.load(norm + partner, mask=d < DK, other=0.0).to(tl.float32)
            x = rounded(rounded(x * scale, dtype) * weight, dtype)
            other = rounded(rounded(other * scale, dtype) * other_weight, dtype)
        c = tl.load(cos + batch * c_b + angle * c_a, mask=turned, other=0.0).to(tl.float32)
        s = tl.load(sin + batch * n_b + angle * n_a, mask=turned, other=0.0).to(tl.float32)
        along, across = rounded(x * c, dtype), rounded(other * s, dtype)
        x = tl.where(turned, along + tl.where(minus, -across, across), x).to(dtype)
        if head < QH:
            tl.store(query + (batch * QH + head) * DK + d, x, mask=d < DK)
        else:
            h = (head - QH).to(tl.int64)
            tl.store(keys + batch * k_b + h * k_h + column * k_t + d * k_d, x, mask=d < DK)


def rotate_append(
    states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    end: torch.Tensor,
    *,
    interleaved: bool = False,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """As the reference. One program a head, of query, key or value."""
    count = check_rotate_arguments(states, cos, sin, keys, values, end, query_norm, key_norm)
    batch, heads, _, dim = keys.shape
    wide = values.shape[3]
    query = states.new_empty((batch, count, dim))
    if batch == 0 or count + heads == 0:
        return query
    norms = [keys if norm is None else norm.contiguous() for norm in (query_norm, key_norm)]
    _rotate[(count + 2 * heads, batch)](
        states, cos, sin, keys, values, end, *norms, query, eps, count, heads,
        *states.stride(), *shared(cos, sin), *keys.stride(), *values.stride(),
        *end.stride(), A=cos.shape[1], DK=dim, DV=wide, DP=padded(max(dim, wide)), INTERLEAVED=interleaved,
        QUERY_NORM=query_norm is not None, KEY_NORM=key_norm is not None,
        **options(keys, num_warps=1, enable_fp_fusion=False),
    )  # fmt: skip
    return query
