"""Exact top-k with smallest-index ties, in one of four ways (`topk_cuda/`). Which one, `way_of` says by shape, from
what was measured on the GPU.

    ROW      one block a row: bound, histogram, rank, compact
    TILES    a grid collects what reaches a guessed threshold, a block a row refines it; each block samples for itself
    GUESSED  the same behind a kernel that makes the guess: for several rows, or from a hint
    STREAM   one block a row guesses, collects and refines: where there are rows enough to fill the GPU
"""

import torch

from .._ops import ops  # type: ignore[import-not-found]
from ..reference.select import check_select_arguments
from ..reference.topk import TopKStats, check_topk_arguments
from ..triton_kernels.tuned import config

ROW, TILES, GUESSED, STREAM = range(4)
_PASSES = 4  # of ROW: bound, histogram, count, write; members and up to two more histograms where scores crowd
MOST = 4096  # winners, of at most 8192 candidates that are refined on chip
_LONGEST = 4096 * 1024  # entries of a row in tiles


def way_of(scores: torch.Tensor, k: int, *, guessed: bool) -> int:
    """The fastest way. guessed: a threshold is known."""
    rows, columns = scores.shape
    limits = config("ways", scores)
    # For many rows a threshold saves too little: 64 rows of 8192 take 6.4 us whole, 8.9 collected
    whole = limits["ROW_GUESSED" if guessed and rows <= limits["TILES"] else "ROW"]
    if not 0 < k <= MOST or columns <= whole or columns > _LONGEST:
        return ROW
    if rows <= limits["TILES"]:
        return TILES
    return GUESSED if rows <= limits["GUESSED"] else STREAM


def _with_unit_stride(scores: torch.Tensor) -> torch.Tensor:
    return scores if scores.stride(-1) == 1 or scores.shape[-1] < 2 else scores.contiguous()


def _integers(lengths: torch.Tensor | None) -> torch.Tensor | None:
    return lengths if lengths is None or lengths.dtype in (torch.int32, torch.int64) else lengths.int()


def gvr_topk(
    scores: torch.Tensor,
    k: int,
    *,
    hint: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_stats: bool = False,
    threshold: torch.Tensor | None = None,
    way: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, TopKStats]:
    """As the reference; one to three launches, nothing is read on the host. way: one of the above, instead of the
    fastest. A hint is read only if GUESSED is asked for: to gather it costs more than a sample (NOTES.md)."""
    k = check_topk_arguments(scores, k, hint, lengths, threshold)
    rows = scores.shape[0]
    if way is None:
        way = way_of(scores, k, guessed=threshold is not None)
        hint = None
    indices = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    candidates = torch.empty(rows, dtype=torch.int32, device=scores.device)
    fallback = torch.empty(rows, dtype=torch.bool, device=scores.device)
    lengths, scores = _integers(lengths), _with_unit_stride(scores)
    if way == ROW:
        ops.gvr_topk(indices, candidates, scores, lengths)
    else:
        hint = hint.long().contiguous() if hint is not None and way == GUESSED else None
        if threshold is not None and threshold.dim() == 2:
            threshold = _with_unit_stride(threshold)
        ops.topk_stream(indices, candidates, fallback, scores, lengths, threshold, hint, way)
    if not return_stats:
        return indices
    if way == ROW:
        return indices, TopKStats(torch.full_like(candidates, _PASSES), candidates, fallback.zero_())
    passes = torch.where(fallback, 1 + _PASSES, 1).int()
    return indices, TopKStats(passes, candidates, fallback)


def topk_threshold(scores: torch.Tensor, k: int, *, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, within the width of a bin; a block a row."""
    k = check_topk_arguments(scores, k, None, lengths)
    threshold = torch.empty((scores.shape[0], 2), dtype=torch.float32, device=scores.device)
    ops.topk_threshold(threshold, _with_unit_stride(scores), k, _integers(lengths))
    return threshold


def select_blocks(
    scores: torch.Tensor, forced: torch.Tensor, k: int, *, hint: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, in the same one launch: forced and free blocks come out merged. Where none is forced (tokens of
    an indexer, whose rows are long), as `gvr_topk`."""
    k = check_select_arguments(scores, forced, k, hint)
    batch, heads, _ = scores.shape
    if forced.shape[2] == 0:
        free = gvr_topk(scores.flatten(0, 1), k).view(batch, heads, k)  # type: ignore[union-attr]
        return free.clone(), free
    selected = torch.empty((batch, heads, forced.shape[2] + k), dtype=torch.int32, device=scores.device)
    free = torch.empty((batch, heads, k), dtype=torch.int32, device=scores.device)
    ops.select_blocks(selected, free, _with_unit_stride(scores), forced)
    return selected, free
