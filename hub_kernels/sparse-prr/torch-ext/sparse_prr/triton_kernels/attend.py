"""Attention over single blocks."""

import torch
import triton
import triton.language as tl

from ..reference.attend import LOG2_E, Partials, check_attention_arguments
from .launch import options, wait_for_previous
from .tile import WARPS, attend_tile, check_block_size, padded, padded_group, part_of, store_tile


@triton.jit
def _partials(
    query, keys, values, valid, start, end, blocks, output, peak, total, columns, K, H, scale,
    q_b, q_h, q_g, q_d, k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, m_b, m_t, b_b, b_h, b_k, s_b, e_b,
    G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, ST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    slot, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    block = tl.load(blocks + b * b_b + h * b_h + slot * b_k).to(tl.int64)
    origin, limit = tl.load(start + b * s_b).to(tl.int64), tl.load(end + b * e_b).to(tl.int64)
    at = (b * H + h) * K + slot
    if block < 0:
        o, m, l = tl.zeros([GP, DP], tl.float32), tl.full([GP], float("-inf"), tl.float32), tl.zeros([GP], tl.float32)
        store_tile(output, peak, total, o, m, l, at, G, D, GP, DP)
    else:
        o, m, l = attend_tile(
            query + b * q_b + h * q_h, keys + b * k_b + h * k_h, values + b * v_b + h * v_h, valid + b * m_b,
            origin + block * S, limit, columns, q_g, q_d, k_t, k_d, v_t, v_d, m_t, scale, G, D, GP, DP, S, ST,
        )  # fmt: skip
        store_tile(output, peak, total, o, m, l, at, G, D, GP, DP)


def empty_partials(query: torch.Tensor, slots: int) -> Partials:
    """Room for the partials of `slots` blocks; nothing is written."""
    batch, heads, group, dim = query.shape
    shape = (batch, heads, slots, group)
    return Partials(*(query.new_empty(size, dtype=torch.float32) for size in ((*shape, dim), shape, shape)))


def block_partials(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    blocks: torch.Tensor,
    end: torch.Tensor,
    *,
    scale: float,
    block_size: int,
) -> Partials:
    """As the reference. One program a block and KV head; block_size is a power of two, 16 at least."""
    block_size = check_attention_arguments(query, keys, values, valid, start, blocks, end, block_size)
    check_block_size(block_size)
    return attend_blocks(query, keys, values, valid, start, blocks, end, scale, block_size)


def attend_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    blocks: torch.Tensor,
    end: torch.Tensor,
    scale: float,
    block_size: int,
) -> Partials:
    """`block_partials` of arguments that are checked."""
    batch, heads, group, dim = query.shape
    slots = blocks.shape[2]
    partials = empty_partials(query, slots)
    if partials.peak.numel() == 0:
        return partials
    valid = valid.view(torch.uint8)
    _partials[(slots, heads, batch)](
        query, keys, values, valid, start, end, blocks, *partials, keys.shape[2], slots, heads, scale * LOG2_E,
        *query.stride(), *keys.stride(), *values.stride(), *valid.stride(), *blocks.stride(), *start.stride(),
        *end.stride(), G=group, D=dim, GP=padded_group(group), DP=padded(dim), S=block_size,
        ST=part_of(block_size, dim, keys.element_size()), **options(query, num_warps=WARPS),
    )  # fmt: skip
    return partials
