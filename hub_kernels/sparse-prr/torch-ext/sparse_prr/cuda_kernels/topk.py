"""Exact top-k with smallest-index ties: bound, histogram, rank, compact (`topk_cuda/topk.cuh`)."""

import torch

from .._ops import ops  # type: ignore[import-not-found]
from ..reference.topk import TopKStats, check_topk_arguments

_PASSES = 4  # bound, histogram, count, write; members and up to two more histograms where scores crowd


def _with_unit_stride(scores: torch.Tensor) -> torch.Tensor:
    return scores if scores.stride(-1) == 1 or scores.shape[-1] < 2 else scores.contiguous()


def gvr_topk(
    scores: torch.Tensor,
    k: int,
    *,
    hint: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, TopKStats]:
    """As the reference. One block a row; the hint isn't needed. One launch, nothing is read on the host."""
    check_topk_arguments(scores, k, hint, lengths)
    rows = scores.shape[0]
    indices = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    candidates = torch.empty(rows, dtype=torch.int32, device=scores.device)
    if lengths is not None and lengths.dtype not in (torch.int32, torch.int64):
        lengths = lengths.int()
    ops.gvr_topk(indices, candidates, _with_unit_stride(scores), lengths)
    if not return_stats:
        return indices
    passes = torch.full_like(candidates, _PASSES)
    return indices, TopKStats(passes, candidates, torch.zeros_like(candidates, dtype=torch.bool))


def select_blocks(
    scores: torch.Tensor, forced: torch.Tensor, k: int, *, hint: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, in the same one launch: forced and free blocks come out merged."""
    batch, heads, _ = scores.shape
    selected = torch.empty((batch, heads, forced.shape[2] + k), dtype=torch.int32, device=scores.device)
    free = torch.empty((batch, heads, k), dtype=torch.int32, device=scores.device)
    ops.select_blocks(selected, free, _with_unit_stride(scores), forced)
    return selected, free
