"""Guess, verify, refine: the search behind `gvr_topk` (GVR, arXiv 2604.22312), for all rows at once.

Scores are seen as int32 keys that order as they do. A threshold is guessed from the scores that a hint points at,
verified by counting, moved until it leaves few enough candidates, and those are refined exactly. Two changes make the
search exact on every row, in at most 36 counts: after the hint's own count, one secant step, the smallest hinted score,
which leaves few too many where the hint is good, and an order statistic of a sample, each further threshold bisects the
keys, both ends of the bracket being anchored at -inf and +inf and not at what the hint says; and each count takes >= t
and > t together, so that a plateau of equal scores wider than the candidate buffer ends the search at once.
"""

from typing import NamedTuple

import torch

INVALID = torch.iinfo(torch.int32).min  # the key of NaN, and of entries at or past the length
_LOWEST = -2139095041  # of -inf
_BEYOND = 2139095041  # of +inf, plus 1


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """int32 of the same shape, ordered as the scores: -0.0 equals +0.0, NaN lies below everything."""
    bits = (scores.float() + 0.0).view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.where(scores.isnan(), INVALID, keys)


def key_scores(keys: torch.Tensor) -> torch.Tensor:
    """The fp32 score of a key that isn't INVALID."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)


def buffer_size(k: int) -> int:
    """Candidates that a threshold may leave: 5120 up to k = 1024, 3k from 1707 on, as published."""
    return max(5120, 3 * k)


class Guess(NamedTuple):
    """Statistics of the hinted scores, fp32 [R]; NaN where a row's hint points at no valid entry."""

    low: torch.Tensor
    mean: torch.Tensor
    high: torch.Tensor


class Found(NamedTuple):
    """threshold: int32 [R], the candidates are the keys >= it. plateau: bool [R], the k-th key is the threshold itself
    and more keys equal it than the buffer holds. counts: int32 [R]. guarded: bool [R], all guesses missed, or there
    was none, and bisection took over."""

    threshold: torch.Tensor
    plateau: torch.Tensor
    counts: torch.Tensor
    guarded: torch.Tensor


def guess(keys: torch.Tensor, hint: torch.Tensor | None) -> Guess:
    """Gather the hinted scores; entries outside the row, past the length or NaN are skipped."""
    rows, columns = keys.shape
    if hint is None or hint.shape[1] == 0 or columns == 0:
        nothing = torch.full((rows,), float("nan"), device=keys.device)
        return Guess(nothing, nothing, nothing)
    inside = (hint >= 0) & (hint < columns)
    hinted = keys.gather(1, torch.where(inside, hint, 0).long())
    inside &= hinted != INVALID
    scores = key_scores(torch.where(inside, hinted, 0))
    some = inside.any(dim=1)
    total = torch.where(inside, scores, 0.0).sum(dim=1)
    return Guess(
        torch.where(some, torch.where(inside, scores, float("inf")).amin(dim=1), float("nan")),
        torch.where(some, total / inside.sum(dim=1), float("nan")),
        torch.where(some, torch.where(inside, scores, float("-inf")).amax(dim=1), float("nan")),
    )


def sampled_threshold(keys: torch.Tensor, k: int, size: int = 2048) -> torch.Tensor:
    """fp32 [R, 2]: the order statistic of a sample of each row that aims somewhat beyond the k-th key, and its first.
    -inf where every entry is a candidate anyway, or the sample has too few."""
    rows, columns = keys.shape
    everything = torch.full((rows, 2), float("-inf"), device=keys.device)
    if columns <= max(size, buffer_size(k)):
        return everything
    spacing = columns / size
    half = 1.75 * spacing**0.5  # 3.5 standard deviations above k
    need = max(int((half + (half * half + k) ** 0.5) ** 2 / spacing), 1)
    if need > size:
        return everything
    number = torch.arange(size, device=keys.device)
    where = (number // 4 * columns // (size // 4)) // 4 * 4 + number % 4
    best = keys[:, where.clamp(max=columns - 1)].sort(dim=1, descending=True).values
    chosen = torch.stack([best[:, need - 1], best[:, 0]], dim=1)
    return torch.where(chosen == INVALID, everything, key_scores(chosen))


def telling(threshold: torch.Tensor) -> torch.Tensor:
    """A threshold of -inf leaves everything, and tells nothing: NaN."""
    return threshold.masked_fill(threshold == float("-inf"), float("nan"))


def _secant(seen: Guess, first: torch.Tensor, count: torch.Tensor, k: int, hints: int) -> torch.Tensor:
    """The second threshold, fp32: between the first and the hint's minimum or maximum, where a straight line through
    their counts meets k. The counts at those ends are invented (5/4 of the hints, and 1), as published."""
    above = count < k  # the first threshold was too high
    low, high = torch.where(above, seen.low, first), torch.where(above, first, seen.high)
    count_low = torch.where(above, hints + hints // 4, count).double()
    count_high = torch.where(above, count, 1).double()
    fraction = (count_low - k) / (count_low - count_high)
    fraction = torch.where(count_low > count_high, fraction.clamp(0.05, 0.5), 0.5)
    return (low.double() + (high.double() - low.double()) * fraction).float()


def verify(keys: torch.Tensor, k: int, seen: Guess, hints: int, buffer: int) -> Found:
    """Move each row's threshold until k <= count(>= t) <= buffer, or until t is the k-th key.

    A row with fewer than k valid entries ends with all of them as candidates.
    """
    rows = keys.shape[0]
    low = torch.full((rows,), _LOWEST, dtype=torch.int64, device=keys.device)  # the k-th key is at or above it
    high = torch.full_like(low, _BEYOND)  # and below this
    found = Found(
        torch.full((rows,), _LOWEST, dtype=torch.int32, device=keys.device),
        torch.zeros(rows, dtype=torch.bool, device=keys.device),
        torch.zeros(rows, dtype=torch.int32, device=keys.device),
        torch.zeros(rows, dtype=torch.bool, device=keys.device),
    )
    done = torch.zeros_like(found.plateau)
    sampled = telling(sampled_threshold(keys, k)[:, 0])  # where nothing else is known, or it is known to miss
    steps = [torch.where(seen.mean.isfinite(), seen.mean, seen.high)]  # an infinity among the hints: try the largest
    for step in range(36):
        active = ((high > low) & ~done).nonzero().flatten()
        if len(active) == 0:
            break
        middle = low[active] + (high[active] - low[active]) // 2
        threshold, guarded = middle, torch.ones_like(active, dtype=torch.bool)
        for guesses in (sampled, steps[step]) if step < len(steps) else ():
            wished = order_keys(guesses[active]).long()
            usable = (wished >= low[active]) & (wished < high[active])
            threshold, guarded = torch.where(usable, wished, threshold), guarded & ~usable
        found.guarded[active] |= guarded
        part = keys[active]
        at_least = (part >= threshold[:, None]).sum(dim=1)
        above = (part > threshold[:, None]).sum(dim=1)
        found.counts[active] += 1
        if step == 0:
            counted = torch.zeros(rows, dtype=torch.int64, device=keys.device).index_copy(0, active, at_least)
            steps += [_secant(seen, steps[0], counted, k, hints), seen.low, sampled]
        kth = (above < k) & (at_least >= k)
        accepted = (at_least >= k) & (at_least <= buffer)
        found.threshold[active] = torch.where(accepted | kth, threshold.int(), found.threshold[active])
        found.plateau[active] = kth & ~accepted
        done[active] = accepted | kth
        low[active] = torch.where(above >= k, threshold + 1, low[active])
        high[active] = torch.where(at_least < k, threshold, high[active])
    return found


def refine(keys: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [R, k]: where the k best keys stand, ascending, N in unused slots.

    A stable sort leaves equal keys in index order, so the smallest index wins.
    """
    columns = keys.shape[1]
    best, order = keys.sort(dim=1, descending=True, stable=True)
    kept = min(k, columns)
    winners = order[:, :kept].masked_fill(best[:, :kept] == INVALID, columns).sort(dim=1).values
    return winners if kept == k else torch.nn.functional.pad(winners, (0, k - kept), value=columns)


def collect(keys: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The keys >= threshold of each row, compacted in index order: keys int32 [R, C] (INVALID past the last), their
    columns int64 [R, C], and how many there are, int32 [R]."""
    rows, columns = keys.shape
    candidate = keys >= threshold[:, None]
    number = candidate.sum(dim=1, dtype=torch.int32)
    row, column = candidate.nonzero(as_tuple=True)
    slot = (candidate.cumsum(dim=1) - 1)[row, column]
    index = torch.full((rows, int(number.max()) + 1), columns, dtype=torch.int64, device=keys.device)
    index[row, slot] = column
    value = torch.full_like(index, INVALID, dtype=torch.int32)
    value[row, slot] = keys[row, column]
    return value, index, number


def fill(keys: torch.Tensor, kth: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [R, k], ascending: all keys above the k-th one, and of those that equal it the first in index order."""
    above, equal = keys > kth[:, None], keys == kth[:, None]
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(-1, k)
