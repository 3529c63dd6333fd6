"""Attention of absorbed queries over listed latents.

A list is cut into chunks of ST slots. One routine says what attention over a chunk is, another how chunks add up: one
after the other, in the order of the list. So it changes no bit who does it. Where queries and heads are few programs
(decoding), each chunk has a program of its own and a second kernel adds up; where they are many (a part of a prompt), a
program does both.

2048 tokens of DeepSeek-V3.2 are 2.4 MB and 0.6 GFLOP. What their chunks leave is more: 8.4 MB, written and read again.
"""

import torch
import triton
import triton.language as tl

from ..reference.attend import LOG2_E
from ..reference.latent import check_latent_arguments
from .launch import options, shared_memory, wait_for_previous
from .tile import padded

_WARPS = 8  # of both kernels that inline `_attend_chunk`: another number may give other bits
_FEW = 48  # programs; fewer leave most of a GPU to those that take one chunk each
_CHANNELS, _TAKE, _MERGING = 256, 32, 4  # of a program that adds up: channels, chunks that it loads at once, warps
_STAGES = 5  # of the loop over chunks: one tile is filled while the other is used, tokens come two chunks before
_OTHER = 12 * 2**10  # bytes of shared memory: weights in halves, what reductions take
_LOWEST = tl.constexpr(-3.4028234663852886e38)


def _tile(heads: int, channels: int, rotated: int, element_size: int, device: int) -> tuple[int, int, int]:
    """(ST, HB, stages): slots of a chunk, query heads of a program, stages of the loop. The output of HB heads takes 64
    registers of a thread, 32 in fp32; shared memory holds their queries and two tiles."""
    row = (padded(channels) + padded(rotated)) * element_size
    room = (shared_memory(device) - _OTHER) // row
    group = min(padded(heads), max(16, min(32, 2**15 // (padded(channels) * element_size))))
    size = max(16, min(64, 1 << max(0, (room - group) // 2).bit_length() >> 1))  # a power of two
    return size, group, _STAGES if 2 * size + group <= room else 1


@triton.jit
def _place(program, groups, Q, HB: tl.constexpr):
    """(batch row, query, heads [HB]) of a program. The heads of a query run next to each other: they read the same."""
    row = program // groups
    return (row // Q).to(tl.int64), (row % Q).to(tl.int64), (program % groups) * HB + tl.arange(0, HB)


@triton.jit
def _attend_chunk(
    query, h, latents, ropes, tokens, first, K, H, scale, q_h, q_c, l_t, l_c, r_t, r_a, t_k,
    C: tl.constexpr, A: tl.constexpr, CP: tl.constexpr, AP: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """(output [HB, CP], peak [HB, 1], total [HB, 1]) over the slots first .. first + ST - 1, fp32, base 2.

    query: pointer to the query's head 0.  h: heads [HB].  latents, ropes: to the batch row's token 0.  tokens: to the
    query's slot 0.  scale: of the base-2 logits.  The peak is -inf where nothing is listed, and only there.
    """
    # In this order tokens, queries and latents are in flight before the first is used, with one latency of memory
    # after the tokens', and the keys' last part comes during the first product (seen in SASS). A tile's way through
    # shared memory has its place right after its load, and what is loaded behind it waits
    k, c, a = first + tl.arange(0, ST), tl.arange(0, CP)[None, :], tl.arange(0, AP)[None, :]
    token = tl.load(tokens + k.to(tl.int64) * t_k, mask=k < K, other=-1).to(tl.int64)[:, None]
    row, inside = query + h[:, None].to(tl.int64) * q_h, (h < H)[:, None]
    q_rope = tl.load(row + (C + a) * q_c, mask=inside & (a < A), other=0.0)
    q = tl.load(row + c * q_c, mask=inside & (c < C), other=0.0)
    listed = token >= 0  # nothing else is read, so nothing else can leak
    latent = tl.load(latents + token * l_t + c * l_c, mask=listed & (c < C), other=0.0)
    logits = tl.dot(q, tl.trans(latent), input_precision="ieee")
    rope = tl.load(ropes + token * r_t + a * r_a, mask=listed & (a < A), other=0.0)
    logits = tl.dot(q_rope, tl.trans(rope), logits, input_precision="ieee") * scale
    seen = tl.trans(listed)
    # A listed token whose logit is -inf is one all the same: 0 / 0 is to come out where there is no other
    peak = tl.max(tl.where(seen, tl.maximum(logits, _LOWEST), float("-inf")), axis=1, keep_dims=True)
    weights = tl.where(seen, tl.exp2(logits - peak), 0.0)
    total = tl.sum(weights, axis=1, keep_dims=True)
    if latent.dtype == tl.float32:
        output = tl.dot(weights, latent, input_precision="ieee")
    else:  # in halves, as in `tile.py`: an infinite value times a low half is nothing to add
        high = weights.to(latent.dtype)
        rest = tl.dot((weights - high.to(tl.float32)).to(latent.dtype), latent)
        output = tl.dot(high, latent) + tl.where(rest - rest == 0, rest, 0.0)
    return output, peak, total


@triton.jit
def _add_chunk(o, m, l, o2, m2, l2):
    """One that lists nothing changes no bit but the sign of a zero, which `_divided` takes away."""
    top = tl.maximum(m, m2)
    safe = tl.where(top == float("-inf"), 0.0, top)
    one, two = tl.exp2(m - safe), tl.exp2(m2 - safe)
    return o * one + o2 * two, top, l * one + l2 * two


@triton.jit
def _divided(o, m, l):
    """0 where nothing is listed."""
    return tl.div_rn(o + 0.0, tl.where(m == float("-inf"), 1.0, l) + tl.zeros_like(o))


@triton.jit
def _chunks(
    query, latents, ropes, tokens, outputs, peaks, totals, chunks, K, H, Q, groups, scale,
    q_b, q_q, q_h, q_c, l_b, l_t, l_c, r_b, r_t, r_a, t_b, t_q, t_k,
    C: tl.constexpr, A: tl.constexpr, CP: tl.constexpr, AP: tl.constexpr, HB: tl.constexpr, ST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of one query, HB heads: partials [B, Q, H, chunks, C] and [B, Q, H, chunks]."""
    wait_for_previous(PDL)
    chunk, c = tl.program_id(0), tl.arange(0, CP)[None, :]
    b, i, h = _place(tl.program_id(1), groups, Q, HB)
    o, m, l = _attend_chunk(
        query + b * q_b + i * q_q, h, latents + b * l_b, ropes + b * r_b, tokens + b * t_b + i * t_q, chunk * ST,
        K, H, scale, q_h, q_c, l_t, l_c, r_t, r_a, t_k, C, A, CP, AP, ST,
    )  # fmt: skip
    at, inside = (((b * Q + i) * H + h) * chunks + chunk)[:, None], (h < H)[:, None]
    tl.store(peaks + at, m, mask=inside)
    tl.store(totals + at, l, mask=inside)
    tl.store(outputs + at * C + c, o, mask=inside & (c < C))


@triton.jit
def _add_up(
    outputs, peaks, totals, result, chunks, C: tl.constexpr, CS: tl.constexpr, TAKE: tl.constexpr, PDL: tl.constexpr
):
    """CS channels of one head."""
    wait_for_previous(PDL)
    head, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * CS + tl.arange(0, CS)
    first = head * chunks
    o, m, l = tl.zeros([CS], tl.float32), tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for begin in range(0, chunks, TAKE):
        o2, m2, l2 = (), (), ()  # loaded first: where a load stands beside its use they come one after the other
        for j in tl.static_range(TAKE):
            at = first + begin + j
            there = at < first + chunks
            o2 = o2 + (tl.load(outputs + at * C + c, mask=c < tl.where(there, C, 0), other=0.0),)  # type: ignore
            m2 = m2 + (tl.load(peaks + at, mask=there, other=float("-inf")),)  # type: ignore[assignment]
            l2 = l2 + (tl.load(totals + at, mask=there, other=0.0),)  # type: ignore[assignment]
        for j in tl.static_range(TAKE):
            o, m, l = _add_chunk(o, m, l, o2[j], m2[j], l2[j])
    tl.store(result + head * C + c, _divided(o, m, l), mask=c < C)


@triton.jit
def _lists(
    query, latents, ropes, tokens, result, K, H, Q, groups, scale,
    q_b, q_q, q_h, q_c, l_b, l_t, l_c, r_b, r_t, r_a, t_b, t_q, t_k,
    C: tl.constexpr, A: tl.constexpr, CP: tl.constexpr, AP: tl.constexpr, HB: tl.constexpr, ST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All chunks of one query, HB heads."""
    wait_for_previous(PDL)
    b, i, h = _place(tl.program_id(0), groups, Q, HB)
    c, mine = tl.arange(0, CP)[None, :], tokens + b * t_b + i * t_q
    used = 0  # slots up to the last that is listed: an early token of a prompt leaves most of its list unused
    for begin in range(0, K, 1024):
        k = begin + tl.arange(0, 1024)
        token = tl.load(mine + k.to(tl.int64) * t_k, mask=k < K, other=-1)
        used = tl.maximum(used, tl.max(tl.where(token >= 0, k + 1, 0), axis=0))
    o, m = tl.zeros([HB, CP], tl.float32), tl.full([HB, 1], float("-inf"), tl.float32)
    l = tl.zeros([HB, 1], tl.float32)
    for first in range(0, used, ST):
        o2, m2, l2 = _attend_chunk(
            query + b * q_b + i * q_q, h, latents + b * l_b, ropes + b * r_b, mine, first,
            K, H, scale, q_h, q_c, l_t, l_c, r_t, r_a, t_k, C, A, CP, AP, ST,
        )  # fmt: skip
        o, m, l = _add_chunk(o, m, l, o2, m2, l2)
    at = (b * Q + i) * H + h
    tl.store(result + at[:, None] * C + c, _divided(o, m, l), mask=(h < H)[:, None] & (c < C))


def latent_attention(
    query: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    tokens: torch.Tensor,
    predicted: torch.Tensor,
    held: torch.Tensor | None,
    *,
    scale: float,
) -> torch.Tensor:
    """As the reference. `predicted` and `held` aren't looked at: a listed row would have to be found among what is held
    before it is read there, and reading it again gives the same bits. How queries are split, or batched, changes no
    bit either."""
    check_latent_arguments(query, latents, ropes, tokens, predicted, held)
    batch, queries, heads, _ = query.shape
    channels, rotated, slots = latents.shape[2], ropes.shape[2], tokens.shape[2]
    result = query.new_empty((batch, queries, heads, channels), dtype=torch.float32)
    if result.numel() == 0 or slots == 0:
        return result.zero_()
    size, group, stages = _tile(heads, channels, rotated, latents.element_size(), latents.get_device())
    if latents.stride(2) != 1 or ropes.stride(2) != 1:
        stages = 1  # what a loop loads ahead of other memory takes twice as much
    chunks, groups = triton.cdiv(slots, size), triton.cdiv(heads, group)
    programs = batch * queries * groups
    sizes = (slots, heads, queries, groups, scale * LOG2_E)
    strides = (*query.stride(), *latents.stride(), *ropes.stride(), *tokens.stride())
    shapes = dict(C=channels, A=rotated, CP=padded(channels), AP=padded(rotated), HB=group, ST=size)
    exact = dict(enable_fp_fusion=False)  # what one kernel contracts, another may not
    if programs >= _FEW:
        _lists[(programs,)](
            query, latents, ropes, tokens, result, *sizes, *strides, **shapes,
            **options(query, num_warps=_WARPS, num_stages=stages, **exact),
        )  # fmt: skip
        return result
    outputs = result.new_empty((batch, queries, heads, chunks, channels))
    peaks, totals = (result.new_empty((batch, queries, heads, chunks)) for _ in range(2))
    _chunks[(chunks, programs)](
        query, latents, ropes, tokens, outputs, peaks, totals, chunks, *sizes, *strides, **shapes,
        **options(query, num_warps=_WARPS, **exact),
    )  # fmt: skip
    part = min(_CHANNELS, padded(channels))
    _add_up[(triton.cdiv(channels, part), batch * queries * heads)](
        outputs, peaks, totals, result, chunks, C=channels, CS=part, TAKE=min(_TAKE, triton.next_power_of_2(chunks)),
        **options(query, num_warps=_MERGING, **exact),
    )  # fmt: skip
    return result
