"""Exact top-k with smallest-index ties: radix selection over order-preserving integer keys."""

import torch
import triton
import triton.language as tl

from ..reference.topk import TopKStats, check_topk_arguments

_CHUNK = 8192  # entries of a row that are held at a time
_PASSES = 5  # four digits of eight bits, and one to collect


@triton.jit
def _keys(scores, at, inside):
    """uint32 that order as the scores do; 0 for NaN and for what isn't there. -0.0 is +0.0."""
    x = tl.load(scores + at, mask=inside, other=float("nan")).to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x == x, key, 0)


@triton.jit
def _select(
    scores, lengths, indices, candidates, N, k, s_r, s_n, t_r,
    HAS_LENGTHS: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One row: the k-th largest key digit by digit, then all above it and the first of those equal to it."""
    r = tl.program_id(0).to(tl.int64)
    limit = N
    if HAS_LENGTHS:
        limit = tl.minimum(tl.maximum(tl.load(lengths + r * t_r).to(tl.int64), 0), N).to(tl.int32)
    row, i, bins = scores + r * s_r, tl.arange(0, CHUNK), tl.arange(0, 256)
    prefix, need = tl.full([], 0, tl.uint32), k
    everything = tl.full([], 0, tl.int32)
    for level in tl.static_range(4):
        histogram = tl.zeros([256], tl.int32)
        for begin in range(0, limit, CHUNK):
            key = _keys(row, (begin + i).to(tl.int64) * s_n, begin + i < limit)
            counts = key != 0
            if level > 0:
                counts = counts & ((key >> (32 - 8 * level)) == prefix)
            histogram += tl.histogram(((key >> (24 - 8 * level)) & 255).to(tl.int32), 256, mask=counts)
        if level == 0:
            everything = (tl.sum(histogram, axis=0) <= k).to(tl.int32)
        reach = tl.cumsum(histogram, axis=0, reverse=True)  # entries with this digit or a larger one
        digit = tl.max(tl.where(reach >= need, bins, 0), axis=0)
        need -= tl.sum(tl.where(bins > digit, histogram, 0), axis=0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    threshold = tl.where(everything > 0, 0, prefix).to(tl.uint32)
    taken, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, limit, CHUNK):
        key = _keys(row, (begin + i).to(tl.int64) * s_n, begin + i < limit)
        equal = ((key == threshold) & (key != 0)).to(tl.int32)
        chosen = (key > threshold) | ((equal > 0) & (ties + tl.cumsum(equal, axis=0) <= need))
        slot = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(indices + r * k + slot, begin + i, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), axis=0)
        ties += tl.sum(equal, axis=0)
    tl.store(candidates + r, taken - tl.minimum(need, ties) + ties)
    for begin in range(0, k, KEPT):
        slot = begin + tl.arange(0, KEPT)
        tl.store(indices + r * k + slot, -1, mask=(slot >= taken) & (slot < k))


def gvr_topk(
    scores: torch.Tensor,
    k: int,
    *,
    hint: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, TopKStats]:
    """As the reference. One program a row, five passes whatever the row holds; the hint isn't needed."""
    check_topk_arguments(scores, k, hint, lengths)
    rows, columns = scores.shape
    indices = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    candidates = torch.zeros(rows, dtype=torch.int32, device=scores.device)
    if rows and k and columns:
        chunk = min(max(triton.next_power_of_2(columns), 256), _CHUNK)
        _select[(rows,)](
            scores, scores if lengths is None else lengths, indices, candidates, columns, k, *scores.stride(),
            1 if lengths is None else lengths.stride(0),
            HAS_LENGTHS=lengths is not None, CHUNK=chunk, KEPT=min(max(triton.next_power_of_2(k), 16), 1024),
            num_warps=min(max(chunk // 512, 4), 16),
        )  # fmt: skip
    else:
        indices.fill_(-1)
    if not return_stats:
        return indices
    passes = torch.full_like(candidates, _PASSES)
    return indices, TopKStats(passes, candidates, torch.zeros_like(candidates, dtype=torch.bool))
