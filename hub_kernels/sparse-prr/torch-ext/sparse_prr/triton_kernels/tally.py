"""What a decode step did, in numbers."""

import torch
import triton
import triton.language as tl

from ..reference.tally import check_tally_arguments
from .launch import options, wait_for_previous

# Ids of a list at a time: of most lists all, so that their loads are on their way at once. More threads than one for
# eight ids would need half of a multiprocessor to be free, beside what fills them
_TAKEN, _OF_A_THREAD = 2048, 8


@triton.jit
def _found(guesses, p_k, J, steps, block):
    """Which of `block` are among J ascending ids, -1 last. A bisection: 2048 by 2048 pairs took most of a step's
    1033 us."""
    low = tl.zeros_like(block)
    high = low + J
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        value = tl.load(guesses + middle * p_k, mask=open_, other=0)
        right = open_ & (value >= 0) & (value < block)
        low, high = tl.where(right, middle + 1, low), tl.where(open_ & ~right, middle, high)
    value = tl.load(guesses + low * p_k, mask=low < J, other=-1)
    return (value == block) & (block >= 0)


@triton.jit
def _tally(
    selected, free, predicted, importance, last, numbers, first, A, K, J, most, steps,
    a_b, a_h, a_k, f_b, f_h, f_k, p_b, p_h, p_k, i_b, i_h, i_n, e_b, H,
    KT: tl.constexpr, SCORED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: ids are counted and weights summed in their lanes, and lanes are added up once, at the end."""
    wait_for_previous(PDL)
    h, b, k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.arange(0, KT)
    selected += b * a_b + h * a_h
    free += b * f_b + h * f_h
    predicted += b * p_b + h * p_h
    importance += b * i_b + h * i_h
    attended, chosen, guesses, hits = (tl.zeros([KT], tl.int32),) * 4
    total, share = (tl.zeros([KT], tl.float64),) * 2
    for begin in range(0, most, KT):
        at = begin + k
        kept = tl.load(selected + at * a_k, mask=at < A, other=-1)
        block = tl.load(free + at * f_k, mask=at < K, other=-1)
        guess = tl.load(predicted + at * p_k, mask=at < J, other=-1)
        if SCORED:
            weight = tl.load(importance + block.to(tl.int64) * i_n, mask=block >= 0, other=0.0).to(tl.float64)
        hit = _found(predicted, p_k, J, steps, block)
        attended += (kept >= 0).to(tl.int32)
        chosen += (block >= 0).to(tl.int32)
        guesses += (guess >= 0).to(tl.int32)
        hits += hit.to(tl.int32)
        if SCORED:
            total += weight
            share += tl.where(hit, weight, 0.0)
    guessed, found = tl.sum(guesses, axis=0), tl.sum(hits, axis=0)
    whole, part = tl.sum(total, axis=0), tl.sum(share, axis=0)
    asked = ((whole > 0) & (guessed > 0)).to(tl.float64)
    part = tl.where(asked > 0, part / tl.where(whole > 0, whole, 1.0), 0.0)
    scored = tl.maximum(tl.load(last + b * e_b).to(tl.int64) - first, 0)
    to = numbers + (b * H + h) * 7  # this program's alone: no atomics
    tl.store(to, tl.load(to) + (tl.sum(attended, axis=0) + guessed - found).to(tl.float64))
    tl.store(to + 1, tl.load(to + 1) + scored.to(tl.float64))
    tl.store(to + 2, tl.load(to + 2) + found.to(tl.float64))
    tl.store(to + 3, tl.load(to + 3) + tl.sum(chosen, axis=0).to(tl.float64))
    tl.store(to + 4, tl.load(to + 4) + guessed.to(tl.float64))
    tl.store(to + 5, tl.load(to + 5) + part)
    tl.store(to + 6, tl.load(to + 6) + asked)


def tally(
    numbers: torch.Tensor,
    selected: torch.Tensor,
    free: torch.Tensor,
    predicted: torch.Tensor,
    importance: torch.Tensor | None,
    first: int,
    last: torch.Tensor,
) -> None:
    """As the reference. One program a row."""
    check_tally_arguments(numbers, selected, free, predicted, importance, last)
    batch, heads, slots = free.shape
    scored = importance is not None and importance.shape[2] > 0
    weights = free if importance is None else importance
    guesses = predicted.shape[2]
    most = max(selected.shape[2], slots, guesses)
    taken = min(_TAKEN, max(64, triton.next_power_of_2(most)))
    if numbers.numel():
        _tally[(heads, batch)](
            selected, free, predicted, weights, last, numbers, first,
            selected.shape[2], slots, guesses, most, guesses.bit_length(),
            *selected.stride(), *free.stride(), *predicted.stride(), *weights.stride(), *last.stride(), heads,
            KT=taken, SCORED=scored, **options(free, num_warps=max(1, taken // (32 * _OF_A_THREAD))),
        )  # fmt: skip
