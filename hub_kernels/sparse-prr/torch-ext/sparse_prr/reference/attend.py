"""Attention over single blocks."""

import math
from typing import NamedTuple

import torch

from .check import FLOATS, INT32, expect, expect_rows, integer
from .sums import fixed_sum

LOG2_E = math.log2(math.e)


class Partials(NamedTuple):
    """Unnormalised attention over each block of a list, fp32, base-2 logits.

    output: [B, H, K, G, D] = sum_j 2^(s_j - peak) v_j.  peak: [B, H, K, G] = max_j s_j.
    total: [B, H, K, G] = sum_j 2^(s_j - peak). A block without a token, or an unused slot: 0, -inf, 0.
    """

    output: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x whose bits depend on x alone. torch.exp2 rounds differently in its SIMD body and its scalar tail."""
    return torch.exp(x * math.log(2.0))


def shifted(x: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """x - peak, with -inf - -inf = -inf."""
    return x - peak.masked_fill(peak == float("-inf"), 0.0)


def _unused(query: torch.Tensor, blocks: torch.Tensor) -> Partials:
    """The partials of slots that hold no block."""
    _, _, group, dim = query.shape
    return Partials(
        output=query.new_zeros((*blocks.shape, group, dim), dtype=torch.float32),
        peak=query.new_full((*blocks.shape, group), float("-inf"), dtype=torch.float32),
        total=query.new_zeros((*blocks.shape, group), dtype=torch.float32),
    )


def check_attention_arguments(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    blocks: torch.Tensor,
    end: torch.Tensor,
    block_size: int,
    *,
    name: str = "blocks",
) -> int:
    """Raise ValueError for what the host can tell is outside the contract of `block_partials`. name: of the list.

    Returns:
        block_size as an int.
    """
    expect("query", query, "B, H, G, D", (None,) * 4, FLOATS)
    (batch, heads, _, dim), device, dtypes = query.shape, query.device, (query.dtype,)
    expect("keys", keys, "B, H, T, D", (batch, heads, None, dim), dtypes, device)
    columns = keys.shape[2]
    expect("values", values, "B, H, T, D", (batch, heads, columns, dim), dtypes, device)
    expect_rows(valid, start, end, batch, columns, device)
    expect(name, blocks, "B, H, K", (batch, heads, None), INT32, device)
    return integer("block_size", block_size, 1)


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
    """Attention of one query token over each listed block by itself.

    This one routine serves the serial, the speculative and the repair path. A slot's bits depend on its query, keys
    and values alone, not on the rest of the list: only elementwise operations and sums of fixed shape are used.

    Args:
        query: [B, H, G, D].  keys, values: [B, H, T, D] in its dtype.  valid: [B, T] bool.  start: [B] integer.
        blocks: int32 [B, H, K], -1 = unused, in any order; others begin before column T, which isn't checked.
        end: [B] integer, columns at or past it are not attended (the query's own column + 1).
        scale: of the logits before the softmax.  block_size: S; in kernels a power of two from 16.

    Raises:
        ValueError: shapes, dtypes, devices or block_size outside the above.
    """
    block_size = check_attention_arguments(query, keys, values, valid, start, blocks, end, block_size)
    heads, dim = query.shape[1], query.shape[3]
    columns = keys.shape[2]
    if blocks.shape[2] == 0:  # serial decoding predicts nothing
        return _unused(query, blocks)
    row, head, slot = (blocks >= 0).nonzero(as_tuple=True)
    tokens = (start.long()[row] + blocks[row, head, slot].long() * block_size)[:, None] + torch.arange(
        block_size, device=keys.device
    )
    within = tokens.clamp(max=columns - 1)
    attended = (tokens < end.long()[row, None]) & valid[row[:, None], within]
    flat = ((row * heads + head)[:, None] * columns + within).flatten()
    shape = (-1, block_size, dim)
    block_keys = keys.reshape(-1, dim).index_select(0, flat).view(shape).float()
    block_values = values.reshape(-1, dim).index_select(0, flat).view(shape).float()
    # What lies in an unattended column may be anything, also NaN, and 0 * NaN is NaN. Only blocks that have one are
    # masked: masking all of them takes as long as the product (100 us of 400 on a CPU, 87 blocks of 32 x 64).
    ragged = (~attended.all(dim=1)).nonzero().flatten()
    block_values[ragged] = block_values[ragged].masked_fill(~attended[ragged][..., None], 0.0)

    scaled = (query.float().contiguous() * (scale * LOG2_E))[row, head]
    logits = fixed_sum(scaled[:, :, None, :] * block_keys[:, None], -1)
    logits = logits.masked_fill(~attended[:, None], float("-inf"))
    peak = logits.amax(dim=-1)
    weights = exp2(shifted(logits, peak[..., None]))
    parts = (fixed_sum(weights[..., None] * block_values[:, None], -2), peak, fixed_sum(weights, -1))
    if len(row) == blocks.numel():  # every slot is used: nothing to scatter (60 us of 380 on a CPU)
        return Partials(*(part.view(*blocks.shape, *part.shape[1:]) for part in parts))
    result = _unused(query, blocks)
    for target, part in zip(result, parts, strict=True):
        target[row, head, slot] = part
    return result
