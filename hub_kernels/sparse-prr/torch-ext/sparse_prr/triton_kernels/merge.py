"""From per-block partials to the attention output, the same bits however the partials came about."""

import torch
import triton
import triton.language as tl

from ..reference.attend import LOG2_E, Partials
from ..reference.merge import check_partials, check_repair_arguments
from .attend import attend_blocks, empty_partials
from .launch import let_next_start, options, wait_for_previous, wait_only
from .tile import WARPS, attend_tile, check_block_size, padded, padded_group, part_of, store_tile
from .tuned import config

_TAKE = 64  # ranks that are added at a time


@triton.jit
def _repair(
    query, keys, values, valid, start, end, selected, predicted, slots, output, peak, total, columns, K, J, H, scale,
    q_b, q_h, q_g, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, m_b, m_t, s_b, e_b,
    a_b, a_h, a_k, p_b, p_h, p_k,
    G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
    ST: tl.constexpr, JP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One rank of the selection: where its partials are, and if nowhere, compute them.

    slots int32 [B, H, K]: the slot of the prediction that holds the block, -1 if it was computed here, -2 if unused.
    """
    wait_for_previous(PDL)
    rank, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    block = tl.load(selected + b * a_b + h * a_h + rank * a_k).to(tl.int64)
    origin, limit = tl.load(start + b * s_b).to(tl.int64), tl.load(end + b * e_b).to(tl.int64)
    j = tl.arange(0, JP)
    guess = tl.load(predicted + b * p_b + h * p_h + j * p_k, mask=j < J, other=-1).to(tl.int64)
    slot = tl.max(tl.where((guess == block) & (guess >= 0), j, -1), axis=0)
    at = (b * H + h) * K + rank
    tl.store(slots + at, tl.where(block < 0, -2, slot))
    if (block >= 0) & (slot < 0):
        o, m, l = attend_tile(
            query + b * q_b + h * q_h, keys + b * k_b + h * k_h, values + b * v_b + h * v_h, valid + b * m_b,
            origin + block * S, limit, columns, q_g, q_d, k_t, k_d, v_t, v_d, m_t, scale, G, D, GP, DP, S, ST,
        )  # fmt: skip
        store_tile(output, peak, total, o, m, l, at, G, D, GP, DP)


@triton.jit
def _pick(slot, held, fresh, row_held, row_fresh, offset, other, in_range, HELD: tl.constexpr):
    """Of each rank, from the prediction's partials or from the fresh ones; `other` where the rank is unused."""
    result = tl.load(fresh + row_fresh + offset, mask=in_range & (slot == -1), other=other)
    if HELD:
        result = tl.where(slot >= 0, tl.load(held + row_held + offset, mask=in_range & (slot >= 0), other=0.0), result)
    return result


@triton.jit
def _ranks(slots, head, begin, g, K, J, G: tl.constexpr, TAKE: tl.constexpr, HELD: tl.constexpr):
    """Of TAKE ranks: which exist, their slots, and the rows of held and fresh partials they may stand in."""
    r = begin + tl.arange(0, TAKE)
    slot = tl.full([TAKE], -1, tl.int32)  # without a prediction the fresh partials hold every rank, used or not
    if HELD:
        slot = tl.load(slots + head * K + r, mask=r < K, other=-2)
    return r < K, slot, (head * J + slot) * G + g, (head * K + r) * G + g


@triton.jit
def _load_ranks(
    held_o, held_m, held_l, fresh_o, fresh_m, fresh_l, slots, head, begin, g, d, K, J,
    G: tl.constexpr, D: tl.constexpr, TAKE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """(peaks, totals, outputs) of TAKE ranks."""
    there, slot, held, fresh = _ranks(slots, head, begin, g, K, J, G, TAKE, HELD)
    inside = there[:, None] & (d < D)[None, :]
    m = _pick(slot, held_m, fresh_m, held, fresh, 0, float("-inf"), there, HELD)
    l = _pick(slot, held_l, fresh_l, held, fresh, 0, 0.0, there, HELD)
    o = _pick(slot[:, None], held_o, fresh_o, (held * D)[:, None], (fresh * D)[:, None], d[None, :], 0.0, inside, HELD)
    return m, l, o


@triton.jit
def _merge(
    slots, held_o, held_m, held_l, fresh_o, fresh_m, fresh_l, result, K, J, H,
    G: tl.constexpr, D: tl.constexpr, DS: tl.constexpr, TAKE: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Canon(A) of DS channels of one query head. TAKE ranks are added at a time, so unused ranks at the end change
    nothing, nor does their number. The first TAKE, all there are at 64 ranks, are loaded once and at once."""
    wait_only(PDL)
    g, h, b = tl.program_id(0) % G, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head, d = b * H + h, (tl.program_id(0) // G) * DS + tl.arange(0, DS)
    m, l, o = _load_ranks(
        held_o, held_m, held_l, fresh_o, fresh_m, fresh_l, slots, head, 0, g, d, K, J, G, D, TAKE, HELD
    )  # fmt: skip
    peaks = m
    for begin in range(TAKE, K, TAKE):
        there, slot, held, fresh = _ranks(slots, head, begin, g, K, J, G, TAKE, HELD)
        peaks = tl.maximum(peaks, _pick(slot, held_m, fresh_m, held, fresh, 0, float("-inf"), there, HELD))
    top = tl.max(peaks, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(m - top)
    total, mixed = tl.sum(weight * l, axis=0), tl.sum(weight[:, None] * o, axis=0)
    for begin in range(TAKE, K, TAKE):
        m, l, o = _load_ranks(
            held_o, held_m, held_l, fresh_o, fresh_m, fresh_l, slots, head, begin, g, d, K, J, G, D, TAKE, HELD
        )  # fmt: skip
        weight = tl.exp2(m - top)
        total, mixed = total + tl.sum(weight * l, axis=0), mixed + tl.sum(weight[:, None] * o, axis=0)
    let_next_start(PDL)
    out = tl.where(total == 0, 0.0, tl.div_rn(mixed, total + tl.zeros([DS], tl.float32)))
    tl.store(result + (head * G + g) * D + d, out, mask=d < D)


def merged(slots: torch.Tensor | None, held: Partials, fresh: Partials) -> torch.Tensor:
    """Canon(A) from the slots of each rank; without slots `fresh` holds every rank."""
    batch, heads, ranks, group, dim = fresh.output.shape
    result = fresh.output.new_empty((batch, heads, group, dim))
    tuned = config("merge", result)
    _merge[(group * triton.cdiv(dim, tuned["DS"]), heads, batch)](
        fresh.peak if slots is None else slots, *held, *fresh, result, ranks, held.peak.shape[2], heads,
        G=group, D=dim, TAKE=_TAKE,
        HELD=slots is not None, **options(result, num_warps=WARPS, **tuned),
    )  # fmt: skip
    return result


def merge_partials(partials: Partials) -> torch.Tensor:
    """As the reference. One program for a few channels of a query head."""
    check_partials(partials)
    batch, heads, ranks, group, dim = partials.output.shape
    if ranks == 0 or partials.output.numel() == 0:
        return partials.output.new_zeros((batch, heads, group, dim))
    partials = Partials(*(part.contiguous() for part in partials))
    return merged(None, partials, partials)


def repair_merge(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    selected: torch.Tensor,
    end: torch.Tensor,
    predicted: torch.Tensor,
    partials: Partials | None,
    *,
    scale: float,
    block_size: int,
) -> torch.Tensor:
    """As the reference. Two kernels: a program a rank and KV head, then the merge, which beat a last-arriving program
    that merges (10.3 us against 20 at Llama's shape, 7.5 against 31 at GLM's)."""
    data = (query, keys, values, valid, start, selected, end, predicted)
    block_size = check_repair_arguments(*data, partials, block_size)
    check_block_size(block_size)
    batch, heads, group, dim = query.shape
    ranks, guesses = selected.shape[2], predicted.shape[2]
    if ranks == 0 or query.numel() == 0:
        return query.new_zeros(query.shape, dtype=torch.float32)
    if partials is None or guesses == 0:
        fresh = attend_blocks(query, keys, values, valid, start, selected, end, scale, block_size)
        return merged(None, fresh, fresh)
    partials, fresh = Partials(*(part.contiguous() for part in partials)), empty_partials(query, ranks)
    slots = torch.empty((batch, heads, ranks), dtype=torch.int32, device=query.device)
    valid = valid.view(torch.uint8)
    _repair[(ranks, heads, batch)](
        query, keys, values, valid, start, end, selected, predicted, slots, *fresh,
        keys.shape[2], ranks, guesses, heads, scale * LOG2_E,
        *query.stride(), *keys.stride(), *values.stride(), *valid.stride(), *start.stride(), *end.stride(),
        *selected.stride(), *predicted.stride(),
        G=group, D=dim, GP=padded_group(group), DP=padded(dim), S=block_size,
        ST=part_of(block_size, dim, keys.element_size()), JP=padded(guesses), **options(query, num_warps=WARPS),
    )  # fmt: skip
    return merged(slots, partials, fresh)
