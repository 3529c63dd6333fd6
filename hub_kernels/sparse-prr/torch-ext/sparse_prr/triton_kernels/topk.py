"""Exact top-k with smallest-index ties: radix selection over order-preserving integer keys."""

import torch
import triton
import triton.language as tl

from ..reference.select import check_select_arguments
from ..reference.topk import TopKStats, check_topk_arguments
from .launch import options, wait_for_previous
from .tuned import config

_CHUNK = 8192  # entries of a row that are held at a time
_PASSES = 5  # four digits of eight bits, and one to collect


@triton.jit
def order_key(x):
    """uint32 that order as fp32 scores do; 0 for NaN. -0.0 is +0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x == x, key, 0)


@triton.jit
def _keys(scores, at, inside):
    """As `order_key`; 0 too for what isn't there."""
    return order_key(tl.load(scores + at, mask=inside, other=float("nan")).to(tl.float32))


@triton.jit
def _threshold(row, held, limit, k, s_n, CHUNK: tl.constexpr, ONCE: tl.constexpr):
    """(the k-th largest key, how many of those equal to it are wanted), digit by digit; (0, any) if all are."""
    i, bins = tl.arange(0, CHUNK), tl.arange(0, 256)
    prefix, need = tl.full([], 0, tl.uint32), k
    everything = tl.full([], 0, tl.int32)
    for level in tl.static_range(4):
        histogram = tl.zeros([256], tl.int32)
        for begin in range(0, limit, CHUNK):
            key = held
            if not ONCE:
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
    return tl.where(everything > 0, 0, prefix).to(tl.uint32), need


@triton.jit
def _weave(row, forced, selected, k, f_n, F: tl.constexpr, FP: tl.constexpr, KEPT: tl.constexpr):
    """The row's k ascending ids and the F forced ones, in one ascending list. They are distinct."""
    f = tl.arange(0, FP)
    must = tl.load(forced + f * f_n, mask=f < F, other=-1)
    valid = must >= 0
    place = tl.cumsum(valid.to(tl.int32), axis=0) - 1
    used = tl.sum(valid.to(tl.int32), axis=0)
    for begin in range(0, k, KEPT):
        j = begin + tl.arange(0, KEPT)
        block = tl.load(row + j, mask=j < k, other=-1)
        before = (must[None, :] < block[:, None]) & valid[None, :]
        tl.store(selected + j + tl.sum(before.to(tl.int32), axis=1), block, mask=block >= 0)
        place += tl.sum(((block[:, None] < must[None, :]) & (block >= 0)[:, None]).to(tl.int32), axis=0)
        used += tl.sum((block >= 0).to(tl.int32), axis=0)
    tl.store(selected + place, must, mask=valid)
    for begin in range(0, F + k, KEPT):
        j = begin + tl.arange(0, KEPT)
        tl.store(selected + j, -1, mask=(j >= used) & (j < F + k))


@triton.jit
def _select(
    scores, lengths, indices, candidates, forced, selected, N, k, H, s_b, s_h, s_n, t_r, f_b, f_h, f_n,
    HAS_LENGTHS: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr, ONCE: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: the k-th largest key, then all above it and the first of those equal to it; then the forced ones too."""
    wait_for_previous(PDL)
    h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    r, limit = b * H + h, N
    if HAS_LENGTHS:
        limit = tl.minimum(tl.maximum(tl.load(lengths + r * t_r).to(tl.int64), 0), N).to(tl.int32)
    row, i = scores + b * s_b + h * s_h, tl.arange(0, CHUNK)
    held = tl.zeros([CHUNK], tl.uint32)
    if ONCE:
        held = _keys(row, i.to(tl.int64) * s_n, i < limit)
    threshold, need = _threshold(row, held, limit, k, s_n, CHUNK, ONCE)
    taken, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for begin in range(0, limit, CHUNK):
        key = held
        if not ONCE:
            key = _keys(row, (begin + i).to(tl.int64) * s_n, begin + i < limit)
        equal = ((key == threshold) & (key != 0)).to(tl.int32)
        chosen = (key > threshold) | ((equal > 0) & (ties + tl.cumsum(equal, axis=0) <= need))
        slot = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(indices + r * k + slot, begin + i, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), axis=0)
        ties += tl.sum(equal, axis=0)
    if F == 0:
        tl.store(candidates + r, taken - tl.minimum(need, ties) + ties)
    for begin in range(0, k, KEPT):
        slot = begin + tl.arange(0, KEPT)
        tl.store(indices + r * k + slot, -1, mask=(slot >= taken) & (slot < k))
    if F > 0:
        tl.debug_barrier()  # what this program wrote is read again
        _weave(indices + r * k, forced + b * f_b + h * f_h, selected + r * (F + k), k, f_n, F, FP, KEPT)


def _launch(
    scores: torch.Tensor,
    k: int,
    indices: torch.Tensor,
    candidates: torch.Tensor,
    lengths: torch.Tensor | None = None,
    forced: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
) -> None:
    batch, heads, columns = scores.shape
    chunk = min(max(triton.next_power_of_2(columns), 256), _CHUNK)
    count = 0 if forced is None else forced.shape[2]
    steps = (0, 0, 0) if forced is None else forced.stride()
    warps = config("select", scores)["num_warps"]
    _select[(heads, batch)](
        scores, scores if lengths is None else lengths, indices, candidates,
        indices if forced is None else forced, indices if selected is None else selected,
        columns, k, heads, *scores.stride(), 1 if lengths is None else lengths.stride(0), *steps,
        HAS_LENGTHS=lengths is not None, CHUNK=chunk, KEPT=min(max(triton.next_power_of_2(k), 16), 256),
        ONCE=columns <= chunk, F=count, FP=max(triton.next_power_of_2(count), 2),
        **options(scores, num_warps=min(max(warps * chunk // _CHUNK, 4), warps)),
    )  # fmt: skip


def gvr_topk(
    scores: torch.Tensor,
    k: int,
    *,
    hint: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_stats: bool = False,
    threshold: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, TopKStats]:
    """As the reference. One program a row, five passes whatever the row holds; no guess is needed."""
    k = check_topk_arguments(scores, k, hint, lengths, threshold)
    rows, columns = scores.shape
    indices = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    candidates = torch.zeros(rows, dtype=torch.int32, device=scores.device)
    if rows and k and columns:
        _launch(scores[None], k, indices, candidates, lengths)
    else:
        indices.fill_(-1)
    if not return_stats:
        return indices
    passes = torch.full_like(candidates, _PASSES)
    return indices, TopKStats(passes, candidates, torch.zeros_like(candidates, dtype=torch.bool))


def select_blocks(
    scores: torch.Tensor, forced: torch.Tensor, k: int, *, hint: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference. One program a row; the hint isn't needed."""
    k = check_select_arguments(scores, forced, k, hint)
    batch, heads, _ = scores.shape
    forced = forced.expand(-1, heads, -1)
    free = torch.empty((batch, heads, k), dtype=torch.int32, device=scores.device)
    selected = torch.empty((batch, heads, forced.shape[2] + k), dtype=torch.int32, device=scores.device)
    if forced.shape[2] == 0 or not selected.numel():
        free = gvr_topk(scores.flatten(0, 1), k).view(batch, heads, k)  # type: ignore[union-attr]
        return free.clone(), free
    _launch(scores, k, free, free, None, forced, selected)
    return selected, free
