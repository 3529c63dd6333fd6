"""What a decode step did, in numbers."""

import torch
import triton
import triton.language as tl

from ..reference.tally import check_tally_arguments
from .launch import options, wait_for_previous


@triton.jit
def _tally(
    selected, free, predicted, importance, last, numbers, first, A, K, J, N,
    a_b, a_h, a_k, f_b, f_h, f_k, p_b, p_h, p_k, i_b, i_h, i_n, e_b, H,
    KT: tl.constexpr, JT: tl.constexpr, SCORED: tl.constexpr, PDL: tl.constexpr,
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
    if numbers.numel():
        _tally[(heads, batch)](
            selected, free, predicted, weights, last, numbers, first,
            selected.shape[2], slots, predicted.shape[2], weights.shape[2],
            *selected.stride(), *free.stride(), *predicted.stride(), *weights.stride(), *last.stride(), heads,
            KT=64, JT=64, SCORED=scored, **options(free, num_warps=4),
        )  # fmt: skip
