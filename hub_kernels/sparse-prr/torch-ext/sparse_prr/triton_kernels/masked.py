"""Attention of a prompt's queries to the tokens that each has selected: flash attention under a mask of all heads.

The mask is packed first, a bit a column: a tile of bytes would go through shared memory to where the logits are.
"""

import torch
import triton
import triton.language as tl

from ..reference.masked import check_masked_arguments
from .launch import first_that_fits, options, wait_for_previous
from .tile import padded

_LOG2_E = 1.4426950408889634
_PACKED = 64  # words of a program
# Queries, columns, warps, stages. DeepSeek-V3.2 takes the first, 172 KB, GLM-5 with its wider heads the second, 229 KB
_HALF = ((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1))
_FLOAT = ((32, 32, 4, 1), (16, 32, 4, 1))  # it has cores of its own


@triton.jit
def _pack(seen, words, Q, T, begin, W, m_b, m_q, m_t, WORDS: tl.constexpr, PDL: tl.constexpr):
    """Whether query q sees column t, as bit t % 32 of its word t // 32; no later column, and none that isn't there."""
    wait_for_previous(PDL)
    row, w = tl.program_id(0).to(tl.int64), tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    b, q, bit = row // Q, row % Q, tl.arange(0, 32)[None, :]
    t = w[:, None].to(tl.int64) * 32 + bit
    sees = tl.load(seen + b * m_b + q * m_q + t * m_t, mask=(t < T) & (t <= begin + q), other=0) != 0
    tl.store(words + row * W + w, tl.sum(sees.to(tl.int32) << bit, axis=1), mask=w < W)


@triton.jit
def _words(words, first, inside, BT: tl.constexpr):
    """The words of BT columns from `first` on, for each query."""
    at = words + first // 32
    low = tl.load(at, mask=inside, other=0)
    return low, low if BT == 32 else tl.load(at + 1, mask=inside, other=0)


@triton.jit
def _masked(
    nope, rope, keys, ropes, values, words, output, Q, T, begin, scale, W,
    n_b, n_h, n_q, n_d, r_b, r_h, r_q, r_a, k_b, k_h, k_t, k_d, t_b, t_t, t_a, v_b, v_h, v_t, v_d,
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
    # They are no operand of a product, so they aren't loaded ahead by themselves, and each step would wait for them
    words += (b * Q + q) * W
    low, high = _words(words, 0, there, BT)
    for first in range(0, tl.minimum(T, begin + tile * BQ + BQ), BT):
        following = _words(words, first + BT, there, BT)
        column = tl.arange(0, BT)[None, :]
        bits = tl.where(column < 32, low[:, None], high[:, None]) >> (column & 31) & 1
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
        low, high = following
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
    query_bytes = (padded(dim) + padded(turned)) * nope.element_size()
    token_bytes = query_bytes + padded(wide) * nope.element_size()
    queries, tokens, warps, stages = first_that_fits(
        _HALF if nope.element_size() == 2 else _FLOAT,
        lambda queries, tokens, _, stages: queries * query_bytes + stages * tokens * token_bytes,
        nope.get_device(),
    )
    width = triton.cdiv(columns, tokens) * tokens // 32 + tokens // 32  # a tile more: it is loaded ahead
    words = torch.empty((batch, count, width), dtype=torch.int32, device=nope.device)
    _pack[(batch * count, triton.cdiv(width, _PACKED))](
        seen.view(torch.uint8), words, count, columns, begin, width, *seen.stride(), WORDS=_PACKED, **options(nope)
    )
    _masked[(triton.cdiv(count, queries), heads, batch)](
        nope, rope, keys, key_ropes, values, words, output, count, columns, begin, scale * _LOG2_E, width,
        *nope.stride(), *rope.stride(), *keys.stride(), *key_ropes.stride(), *values.stride(), *output.stride()[:3],
         D=dim, A=turned, V=wide, DP=padded(dim), AP=padded(turned), VP=padded(wide),
        BQ=queries, BT=tokens, **options(nope, num_warps=warps, num_stages=stages),
    )  # fmt: skip
    return output
