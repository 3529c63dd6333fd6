"""Attention of a prompt's queries to the tokens that each has selected: flash attention under a mask of all heads."""

import torch
import triton
import triton.language as tl

from ..reference.masked import check_masked_arguments
from .launch import options, wait_for_previous
from .tile import padded

_LOG2_E = 1.4426950408889634
_HALF, _FLOAT = (128, 64, 8, 3), (32, 32, 4, 1)  # queries, columns, warps, stages; float32 has cores of its own


@triton.jit
def _seen(mask, q, first, begin, T, Q, m_t, BT: tl.constexpr):
    """Whether queries q [BQ] see the BT columns from `first` on; not 0 where they do."""
    t = first + tl.arange(0, BT)[None, :]
    sees = (t <= begin + q[:, None]) & (t < T) & (q < Q)[:, None]
    return tl.load(mask + t * m_t, mask=sees, other=0)


@triton.jit
def _masked(
    nope, rope, keys, ropes, values, seen, output, Q, T, begin, scale,
    n_b, n_h, n_q, n_d, r_b, r_h, r_q, r_a, k_b, k_h, k_t, k_d, t_b, t_t, t_a, v_b, v_h, v_t, v_d, m_b, m_q, m_t,
    o_b, o_q, o_h, D: tl.constexpr, A: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, AP: tl.constexpr,
    VP: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BQ queries of one head. The last ones, which see most, come first."""
    wait_for_previous(PDL)
    tile, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q, d, a, v = tile * BQ + tl.arange(0, BQ), tl.arange(0, DP), tl.arange(0, AP), tl.arange(0, VP)
    there, q64 = q < Q, q.to(tl.int64)[:, None]
    part = tl.load(
        nope + b * n_b + h * n_h + q64 * n_q + d[None, :] * n_d, mask=there[:, None] & (d < D)[None, :], other=0.0
    )
    turned = tl.load(
        rope + b * r_b + h * r_h + q64 * r_q + a[None, :] * r_a, mask=there[:, None] & (a < A)[None, :], other=0.0
    )
    peak, total = tl.full([BQ], float("-inf"), tl.float32), tl.zeros([BQ], tl.float32)
    mixed = tl.zeros([BQ, VP], tl.float32)
    # The mask is no operand of a product, so it isn't loaded ahead by itself, and each step would wait for it
    mask = seen + b * m_b + q64 * m_q
    following = _seen(mask, q, 0, begin, T, Q, m_t, BT)
    for first in range(0, tl.minimum(T, begin + tile * BQ + BQ), BT):
        bits, following = following, _seen(mask, q, first + BT, begin, T, Q, m_t, BT)
        t = first + tl.arange(0, BT)
        t64, held = t.to(tl.int64)[:, None], (t < T)[:, None]
        key = tl.load(keys + b * k_b + h * k_h + t64 * k_t + d[None, :] * k_d, mask=held & (d < D)[None, :], other=0.0)
        angle = tl.load(ropes + b * t_b + t64 * t_t + a[None, :] * t_a, mask=held & (a < A)[None, :], other=0.0)
        logits = tl.dot(
            turned, tl.trans(angle), tl.dot(part, tl.trans(key), input_precision="ieee"), input_precision="ieee"
        )
        logits = tl.where(bits != 0, logits * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(logits, axis=1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights, kept = tl.exp2(logits - safe[:, None]), tl.exp2(peak - safe)
        total = total * kept + tl.sum(weights, axis=1)
        value = tl.load(
            values + b * v_b + h * v_h + t64 * v_t + v[None, :] * v_d, mask=held & (v < V)[None, :], other=0.0
        )
        mixed = tl.dot(weights.to(value.dtype), value, mixed * kept[:, None], input_precision="ieee")
        peak = top
    result = tl.where(total[:, None] == 0, 0.0, mixed / tl.where(total == 0, 1.0, total)[:, None])
    to = output + b * o_b + q64 * o_q + h * o_h + v[None, :]
    tl.store(to, result.to(output.dtype.element_ty), mask=there[:, None] & (v < V)[None, :])


def masked_attention(
    nope: torch.Tensor,
    rope: torch.Tensor,
    keys: torch.Tensor,
    key_ropes: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    begin: int,
    *,
    scale: float,
) -> torch.Tensor:
    """As the reference. One program a tile of queries and head. Keys and values are finite."""
    check_masked_arguments(nope, rope, keys, key_ropes, values, seen, begin)
    batch, heads, count, dim = nope.shape
    columns, turned, wide = keys.shape[2], rope.shape[3], values.shape[3]
    output = values.new_empty((batch, count, heads, wide))
    if output.numel() == 0:
        return output
    bits = seen.view(torch.uint8)
    queries, tokens, warps, stages = _HALF if nope.element_size() == 2 else _FLOAT
    _masked[(triton.cdiv(count, queries), heads, batch)](
        nope, rope, keys, key_ropes, values, bits, output, count, columns, begin, scale * _LOG2_E,
        *nope.stride(), *rope.stride(), *keys.stride(), *key_ropes.stride(), *values.stride(), *bits.stride(),
        *output.stride()[:3], D=dim, A=turned, V=wide, DP=padded(dim), AP=padded(turned), VP=padded(wide),
        BQ=queries, BT=tokens, **options(nope, num_warps=warps, num_stages=stages),
    )  # fmt: skip
    return output
