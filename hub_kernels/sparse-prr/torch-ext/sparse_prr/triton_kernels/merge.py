"""From per-block partials to the attention output, the same bits however the partials came about."""

import torch
import triton
import triton.language as tl

from ..reference.attend import LOG2_E, Partials
from .attend import empty_partials
from .tile import WARPS, attend_tile, load_query, padded, part_of, store_tile

_TAKE = 32  # ranks that are added at a time


@triton.jit
def _repair(
    query, keys, values, valid, start, selected, predicted, slots, output, peak, total,
    end, columns, K, J, H, scale,
    q_b, q_h, q_g, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, m_b, m_t, s_b,
    a_b, a_h, a_k, p_b, p_h, p_k,
    G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
    ST: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """One rank of the selection: where its partials are, and if nowhere, compute them.

    slots int32 [B, H, K]: the slot of the prediction that holds the block, -1 if it was computed here, -2 if unused.
    """
    rank, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    block = tl.load(selected + b * a_b + h * a_h + rank * a_k).to(tl.int64)
    j = tl.arange(0, JP)
    guess = tl.load(predicted + b * p_b + h * p_h + j * p_k, mask=j < J, other=-1).to(tl.int64)
    slot = tl.max(tl.where((guess == block) & (guess >= 0), j, -1), axis=0)
    at = (b * H + h) * K + rank
    tl.store(slots + at, tl.where(block < 0, -2, slot))
    if (block >= 0) & (slot < 0):
        q = load_query(query + b * q_b + h * q_h, q_g, q_d, G, D, GP, DP)
        first = tl.load(start + b * s_b).to(tl.int64) + block * S
        o, m, l = attend_tile(
            q, keys + b * k_b + h * k_h, values + b * v_b + h * v_h, valid + b * m_b, first, end, columns,
            k_t, k_d, v_t, v_d, m_t, scale, D, DP, S, ST,
        )  # fmt: skip
        store_tile(output, peak, total, o, m, l, at, G, D, GP, DP)


@triton.jit
def _pick(slot, held, fresh, row_held, row_fresh, offset, other, in_range):
    """Of each rank, from the prediction's partials or from the fresh ones; `other` where the rank is unused."""
    a = tl.load(held + row_held + offset, mask=in_range & (slot >= 0), other=0.0)
    b = tl.load(fresh + row_fresh + offset, mask=in_range & (slot == -1), other=0.0)
    return tl.where(slot >= 0, a, tl.where(slot == -1, b, other))


@triton.jit
def _merge(
    slots, held_o, held_m, held_l, fresh_o, fresh_m, fresh_l, result, K, J, H,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TAKE: tl.constexpr,
):  # fmt: skip
    """Canon(A) of one query head. TAKE ranks are added at a time, so unused ranks at the end change nothing, nor does
    their number."""
    g, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = b * H + h
    d, k = tl.arange(0, DP), tl.arange(0, TAKE)
    top = tl.full([], float("-inf"), tl.float32)
    for begin in range(0, K, TAKE):
        r = begin + k
        slot = tl.load(slots + head * K + r, mask=r < K, other=-2)
        held, fresh = (head * J + slot) * G + g, (head * K + r) * G + g
        top = tl.maximum(top, tl.max(_pick(slot, held_m, fresh_m, held, fresh, 0, float("-inf"), r < K), axis=0))
    top = tl.where(top == float("-inf"), 0.0, top)
    mixed, total = tl.zeros([DP], tl.float32), tl.full([], 0.0, tl.float32)
    for begin in range(0, K, TAKE):
        r = begin + k
        slot = tl.load(slots + head * K + r, mask=r < K, other=-2)
        held, fresh = (head * J + slot) * G + g, (head * K + r) * G + g
        weight = tl.exp2(_pick(slot, held_m, fresh_m, held, fresh, 0, float("-inf"), r < K) - top)
        total += tl.sum(weight * _pick(slot, held_l, fresh_l, held, fresh, 0, 0.0, r < K), axis=0)
        inside = (r < K)[:, None] & (d < D)[None, :]
        o = _pick(slot[:, None], held_o, fresh_o, (held * D)[:, None], (fresh * D)[:, None], d[None, :], 0.0, inside)
        mixed += tl.sum(weight[:, None] * o, axis=0)
    out = tl.where(total == 0, 0.0, tl.div_rn(mixed, total + tl.zeros([DP], tl.float32)))
    tl.store(result + (head * G + g) * D + d, out, mask=d < D)


def _merged(query: torch.Tensor, slots: torch.Tensor, held: Partials, fresh: Partials) -> torch.Tensor:
    batch, heads, group, dim = query.shape
    result = query.new_empty(query.shape, dtype=torch.float32)
    _merge[(group, heads, batch)](
        slots, *held, *fresh, result, slots.shape[2], held.peak.shape[2], heads,
        G=group, D=dim, DP=padded(dim), TAKE=_TAKE, num_warps=WARPS,
    )  # fmt: skip
    return result


def merge_partials(partials: Partials) -> torch.Tensor:
    """As the reference; partials are contiguous."""
    batch, heads, ranks, group, dim = partials.output.shape
    query = partials.output.new_empty((batch, heads, group, dim))
    if ranks == 0 or query.numel() == 0:
        return torch.zeros_like(query)
    partials = Partials(*(part.contiguous() for part in partials))
    slots = torch.full((batch, heads, ranks), -1, dtype=torch.int32, device=query.device)
    return _merged(query, slots, partials, partials)


def repair_merge(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    selected: torch.Tensor,
    end: int,
    predicted: torch.Tensor,
    partials: Partials,
    *,
    scale: float,
    block_size: int,
) -> torch.Tensor:
    """As the reference. Two kernels: a program a rank and KV head, then one a query head, which beat a last-arriving
    program that merges (10.3 us against 20 at Llama's shape, 7.5 against 31 at GLM's)."""
    batch, heads, group, dim = query.shape
    ranks, guesses = selected.shape[2], predicted.shape[2]
    if ranks == 0 or query.numel() == 0:
        return query.new_zeros(query.shape, dtype=torch.float32)
    partials, fresh = Partials(*(part.contiguous() for part in partials)), empty_partials(query, ranks)
    if guesses == 0:
        predicted, partials = selected[:, :, :1], fresh  # nothing is looked up: J is 0
    slots = torch.empty((batch, heads, ranks), dtype=torch.int32, device=query.device)
    valid = valid.view(torch.uint8)
    _repair[(ranks, heads, batch)](
        query, keys, values, valid, start, selected, predicted, slots, *fresh,
        end, keys.shape[2], ranks, guesses, heads, scale * LOG2_E,
        *query.stride(), *keys.stride(), *values.stride(), *valid.stride(), *start.stride(),
        *selected.stride(), *predicted.stride(),
        G=group, D=dim, GP=padded(group), DP=padded(dim), S=block_size,
        ST=part_of(block_size, dim, keys.element_size()), JP=padded(guesses), num_warps=WARPS,
    )  # fmt: skip
    return _merged(query, slots, partials, fresh)
