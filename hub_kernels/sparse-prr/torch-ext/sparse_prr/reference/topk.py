"""Exact top-k with smallest-index ties."""

from typing import NamedTuple

import torch

_SCORE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INT_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_INVALID = torch.iinfo(torch.int32).min


class TopKStats(NamedTuple):
    """How the result was found, [R] tensors on the scores' device.

    passes: int32, count + collect + fill passes over the row.  candidates: int32, entries that were refined.
    fallback: bool, the guard had to take over.
    """

    passes: torch.Tensor
    candidates: torch.Tensor
    fallback: torch.Tensor


def check_topk_arguments(scores: torch.Tensor, k: int, hint: torch.Tensor | None, lengths: torch.Tensor | None) -> None:
    """Raise ValueError for anything outside the contract of `gvr_topk`."""
    if scores.dim() != 2 or scores.dtype not in _SCORE_DTYPES:
        raise ValueError(
            f"scores: expected [R, N] in float32, bfloat16 or float16, got {list(scores.shape)} in {scores.dtype}"
        )
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise ValueError(f"k: expected an int >= 0, got {k!r}")
    rows = scores.shape[0]
    for name, tensor, dims in (("lengths", lengths, 1), ("hint", hint, 2)):
        if tensor is None:
            continue
        if tensor.dim() != dims or tensor.shape[0] != rows or tensor.dtype not in _INT_DTYPES:
            expected = f"[{rows}]" if dims == 1 else f"[{rows}, M]"
            raise ValueError(
                f"{name}: expected an integer tensor {expected}, got {list(tensor.shape)} in {tensor.dtype}"
            )
        if tensor.device != scores.device:
            raise ValueError(f"{name}: expected device {scores.device}, got {tensor.device}")


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """int32 [R, N] that order as the scores do: -0.0 equals +0.0, NaN lies below everything (the int32 minimum)."""
    bits = (scores.float() + 0.0).view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.where(scores.isnan(), _INVALID, keys)


def gvr_topk(
    scores: torch.Tensor,
    k: int,
    *,
    hint: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, TopKStats]:
    """The k largest entries of each row, as ascending indices; at the k-th value the smallest index wins.

    Args:
        scores: [R, N] float32, bfloat16 or float16, any strides. -0.0 equals +0.0, +inf is largest, -inf may be
            selected, NaN never is.
        k: how many; k > N pads.
        hint: [R, M] integers of any content. It may change the speed, never the result. This reference sorts the
            whole row and ignores it.
        lengths: [R] integers, clamped to [0, N]; entries at or past them are never candidates.
        return_stats: also return `TopKStats`.

    Returns:
        int32 [R, k], ascending, -1 in unused slots, which come last. Valid slots = min(k, non-NaN entries within the
        length). The result depends on (scores, k, lengths) alone.

    Raises:
        ValueError: shapes, dtypes, devices or k outside the above.
    """
    check_topk_arguments(scores, k, hint, lengths)
    rows, columns = scores.shape
    keys = order_keys(scores)
    if lengths is not None:
        beyond = torch.arange(columns, device=scores.device) >= lengths.long()[:, None]
        keys = keys.masked_fill(beyond, _INVALID)
    # A stable descending sort of integer keys leaves equal keys in index order: the smallest index wins.
    best, order = keys.sort(dim=1, descending=True, stable=True)
    kept = min(k, columns)
    winners = order[:, :kept].masked_fill(best[:, :kept] == _INVALID, columns).sort(dim=1).values
    indices = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    indices[:, :kept] = torch.where(winners == columns, -1, winners)
    if not return_stats:
        return indices
    return indices, TopKStats(
        passes=torch.ones(rows, dtype=torch.int32, device=scores.device),
        candidates=(keys != _INVALID).sum(dim=1, dtype=torch.int32),
        fallback=torch.zeros(rows, dtype=torch.bool, device=scores.device),
    )
