"""The blocks a query attends to: those that are forced, and the best of the rest."""

import torch

from .check import FP32, INT32, INTEGERS, expect, integer, size_or_1
from .topk import gvr_topk

_NO_BLOCK = torch.iinfo(torch.int32).max


def ascending(blocks: torch.Tensor) -> torch.Tensor:
    """Block ids in order, -1 last."""
    ordered = blocks.masked_fill(blocks < 0, _NO_BLOCK).sort(dim=-1).values
    return ordered.masked_fill(ordered == _NO_BLOCK, -1)


def check_select_arguments(scores: torch.Tensor, forced: torch.Tensor, k: int, hint: torch.Tensor | None) -> int:
    """Raise ValueError for what the host can tell is outside the contract of `select_blocks`.

    Returns:
        k as an int.
    """
    expect("scores", scores, "B, H, N", (None,) * 3, FP32)
    (batch, heads, _), device = scores.shape, scores.device
    expect("forced", forced, "B, 1 or H, F", (batch, size_or_1(forced, 1, heads), None), INT32, device)
    if hint is not None:
        expect("hint", hint, "B, H, M", (batch, heads, None), INTEGERS, device)
    return integer("k", k, 0)


def select_blocks(
    scores: torch.Tensor, forced: torch.Tensor, k: int, *, hint: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best-scored blocks of each KV head by `gvr_topk`, and the same in one list with the forced ones.

    Args:
        scores: fp32 [B, H, N]; NaN for a block that can't be chosen by its score, the forced ones among them.
        forced: int32 [B, 1 or H, F], ascending, below N, -1 where there is none, anywhere. Neither this nor that their
            scores are NaN is checked.
        k: how many.  hint: as in `gvr_topk`, [B, H, M].

    Returns:
        selected int32 [B, H, F + k] and free int32 [B, H, k], both ascending, -1 in unused slots, which come last.

    Raises:
        ValueError: shapes, dtypes, devices or k outside the above.
    """
    k = check_select_arguments(scores, forced, k, hint)
    hints = None if hint is None else hint.flatten(0, 1)
    free = gvr_topk(scores.flatten(0, 1), k, hint=hints).view(*scores.shape[:2], k)  # type: ignore[union-attr]
    return ascending(torch.cat([forced.expand(-1, scores.shape[1], -1), free], dim=-1)), free
