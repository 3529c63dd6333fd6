"""What a decode step did, in numbers."""

import torch
import triton
import triton.language as tl

from ..reference.tally import check_tally_arguments
from .launch import options, wait_for_previous

# Guesses that are compared one by one; of more a bisection finds one. 2048 by 2048 pairs took most of a step's 1033 us
_PAIRS = 256
_TAKEN = 1024  # chosen ids at a time, of a bisection


@triton.jit
def _found(guesses, p_k, J, steps, block):
    """Which of `block` are among J ascending ids, -1 last."""
    low = tl.zeros_like(block)
    high = low + J
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        value = tl.load(guesses + middle * p_k, mask=open_, other=0)
        right = open_ & (value >= 0) & (value < block)
        low, high = tl.where(right, middle + 1, low), tl.where(open_ & ~right, middle, high)
    value = tl.load(guesses + low * p_k, mask=low < J, other=-1)
    return ((value == block) & (block >= 0)).to(tl.int32)


@triton.jit
def _tally(
    selected, free, predicted, importance, last, numbers, first, A, K, J, steps,
    a_b, a_h, a_k, f_b, f_h, f_k, p_b, p_h, p_k, i_b, i_h, i_n, e_b, H,
    KT: tl.constexpr, JT: tl.constexpr, SCORED: tl.constexpr, BISECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    k, j = tl.arange(0, KT), tl.arange(0, JT)
    attended, chosen = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    guesses, hits = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    total, share = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for begin in range(0, A, KT):
        block = tl.load(selected + b * a_b + h * a_h + (begin + k) * a_k, mask=begin + k < A, other=-1)
        attended += tl.sum((block >= 0).to(tl.int32), axis=0)
    for begin in range(0, J, JT):
        guess = tl.load(predicted + b * p_b + h * p_h + (begin + j) * p_k, mask=begin + j < J, other=-1)
        guesses += tl.sum((guess >= 0).to(tl.int32), axis=0)
    for begin in range(0, K, KT):
        block = tl.load(free + b * f_b + h * f_h + (begin + k) * f_k, mask=begin + k < K, other=-1)
        hit = tl.zeros([KT], tl.int32)
        if BISECTS:
            hit = _found(predicted + b * p_b + h * p_h, p_k, J, steps, block)
        else:
            for first_guess in range(0, J, JT):
                inside = first_guess + j < J
                guess = tl.load(predicted + b * p_b + h * p_h + (first_guess + j) * p_k, mask=inside, other=-1)
                equal = (block[:, None] == guess[None, :]) & (block >= 0)[:, None]
                hit = hit | tl.max(equal.to(tl.int32), axis=1)
        chosen += tl.sum((block >= 0).to(tl.int32), axis=0)
        hits += tl.sum(hit, axis=0)
        if SCORED:
            at = importance + b * i_b + h * i_h + block.to(tl.int64) * i_n
            weight = tl.load(at, mask=block >= 0, other=0.0).to(tl.float64)
            total += tl.sum(weight, axis=0)
            share += tl.sum(weight * hit.to(tl.float64), axis=0)
    asked = ((total > 0) & (guesses > 0)).to(tl.float64)
    share = tl.where(asked > 0, share / tl.where(total > 0, total, 1.0), 0.0)
    scored = tl.maximum(tl.load(last + b * e_b).to(tl.int64) - first, 0)
    to = numbers + (b * H + h) * 7  # this program's alone: no atomics
    tl.store(to, tl.load(to) + (attended + guesses - hits).to(tl.float64))
    tl.store(to + 1, tl.load(to + 1) + scored.to(tl.float64))
    tl.store(to + 2, tl.load(to + 2) + hits.to(tl.float64))
    tl.store(to + 3, tl.load(to + 3) + chosen.to(tl.float64))
    tl.store(to + 4, tl.load(to + 4) + guesses.to(tl.float64))
    tl.store(to + 5, tl.load(to + 5) + share)
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
    taken = 64 if guesses <= _PAIRS else min(_TAKEN, max(64, triton.next_power_of_2(slots)))
    if numbers.numel():
        _tally[(heads, batch)](
            selected, free, predicted, weights, last, numbers, first,
            selected.shape[2], slots, guesses, guesses.bit_length(),
            *selected.stride(), *free.stride(), *predicted.stride(), *weights.stride(), *last.stride(), heads,
            KT=taken, JT=64, SCORED=scored, BISECTS=guesses > _PAIRS,
            **options(free, num_warps=4 if guesses <= _PAIRS else 8),
        )  # fmt: skip
