"""Exact top-k with smallest-index ties."""

from typing import NamedTuple

import torch

from .check import FLOATS, INTEGERS, expect_place, integer
from .gvr import (
    INVALID,
    Guess,
    buffer_size,
    collect,
    fill,
    guess,
    order_keys,
    refine,
    sampled_threshold,
    telling,
    verify,
)


class TopKStats(NamedTuple):
    """How the result was found, [R] tensors on the scores' device.

    passes: int32, count + collect + fill passes over the row, at most 40.
    candidates: int32, entries that were refined, 0 where a plateau was filled.
    fallback: bool, the guess missed or wasn't there, and the guard (bisection) took over.
    """

    passes: torch.Tensor
    candidates: torch.Tensor
    fallback: torch.Tensor


def check_topk_arguments(
    scores: torch.Tensor,
    k: int,
    hint: torch.Tensor | None,
    lengths: torch.Tensor | None,
    threshold: torch.Tensor | None = None,
) -> int:
    """Raise ValueError for anything outside the contract of `gvr_topk`.

    Returns:
        k as an int.
    """
    for name, tensor in (("scores", scores), ("hint", hint), ("lengths", lengths), ("threshold", threshold)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "scores"):
            raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if scores.dim() != 2 or scores.dtype not in FLOATS:
        raise ValueError(
            f"scores: expected [R, N] in float32, bfloat16 or float16, got {list(scores.shape)} in {scores.dtype}"
        )
    expect_place("scores", scores, None)
    k = integer("k", k, 0)
    rows = scores.shape[0]
    for name, tensor, dims in (("lengths", lengths, 1), ("hint", hint, 2)):
        if tensor is None:
            continue
        if tensor.dim() != dims or tensor.shape[0] != rows or tensor.dtype not in INTEGERS:
            expected = f"[{rows}]" if dims == 1 else f"[{rows}, M]"
            raise ValueError(
                f"{name}: expected an integer tensor {expected}, got {list(tensor.shape)} in {tensor.dtype}"
            )
        expect_place(name, tensor, scores.device)
    if threshold is None:
        return k
    if threshold.shape not in ((rows,), (rows, 2)) or threshold.dtype != torch.float32:
        raise ValueError(
            f"threshold: expected [{rows}] or [{rows}, 2] in torch.float32, got {list(threshold.shape)} in "
            f"{threshold.dtype}"
        )
    expect_place("threshold", threshold, scores.device)
    return k


def _valid_keys(scores: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    keys = order_keys(scores)
    if lengths is None:
        return keys
    beyond = torch.arange(scores.shape[1], device=scores.device) >= lengths.long()[:, None]
    return keys.masked_fill(beyond, INVALID)


def gvr_topk(
    scores: torch.Tensor,
    k: int,
    *,
    hint: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_stats: bool = False,
    threshold: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, TopKStats]:
    """The k largest entries of each row, as ascending indices; at the k-th value the smallest index wins.

    Args:
        scores: [R, N] float32, bfloat16 or float16, any strides. -0.0 equals +0.0, +inf is largest, -inf may be
            selected, NaN never is.
        k: how many; k > N pads.
        hint: [R, M] integers of any content: entries that are expected among the winners. It may change the speed,
            never the result.
        lengths: [R] integers, clamped to [0, N]; entries at or past them are never candidates.
        return_stats: also return `TopKStats`.
        threshold: fp32 [R] or [R, 2], a score that somewhat more than k entries are expected to reach, and one that few
            do, as `topk_threshold` finds them. As the hint, it may change the speed, never the result; it goes before
            a hint.

    Returns:
        int32 [R, k], ascending, -1 in unused slots, which come last. Valid slots = min(k, non-NaN entries within the
        length). The result depends on (scores, k, lengths) alone.

    Raises:
        ValueError: shapes, dtypes, devices or k outside the above.
    """
    k = check_topk_arguments(scores, k, hint, lengths, threshold)
    rows, columns = scores.shape
    keys = _valid_keys(scores, lengths)
    buffer = buffer_size(k)
    if columns <= buffer or rows == 0 or k == 0:  # every entry is a candidate
        winners = refine(keys, k)
        found = None
    else:
        if threshold is None:
            seen, hints = guess(keys, hint), 0 if hint is None else hint.shape[1]
        else:
            least = telling(threshold if threshold.dim() == 1 else threshold[:, 0])
            seen, hints = Guess(least, least, least), k
        found = verify(keys, k, seen, hints, buffer)
        kept = keys.masked_fill(found.plateau[:, None], INVALID)
        value, index, candidates = collect(kept, found.threshold)
        winners = index.gather(1, refine(value, k).clamp(max=index.shape[1] - 1))
        winners[found.plateau] = fill(keys[found.plateau], found.threshold[found.plateau], k)
    indices = torch.where(winners == columns, -1, winners).to(torch.int32)
    if not return_stats:
        return indices
    if found is None:
        candidates = (keys != INVALID).sum(dim=1, dtype=torch.int32)
        return indices, TopKStats(
            torch.ones_like(candidates), candidates, torch.zeros_like(candidates, dtype=torch.bool)
        )
    # One more pass collects, or fills a plateau
    return indices, TopKStats(found.counts + 1, candidates, found.guarded)


def topk_threshold(scores: torch.Tensor, k: int, *, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """By a sample of each row, a score that somewhat more than k entries reach, and the best of the sample: fp32
    [R, 2], what a later `gvr_topk` over scores like these takes as its `threshold`. -inf where a row has few entries.

    The sample is fours of neighbours, evenly over the row; the threshold is one of its order statistics, aimed so that
    3.5 standard deviations still leave k entries.

    Raises:
        ValueError: shapes, dtypes, devices or k outside the contract of `gvr_topk`.
    """
    k = check_topk_arguments(scores, k, None, lengths)
    return sampled_threshold(_valid_keys(scores, lengths), k)
