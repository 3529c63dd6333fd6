"""What a decode step did, in numbers."""

import torch

from .check import FP32, INT32, INTEGERS, expect
from .merge import slots_of

TALLY = ("attended", "scored", "hits", "chosen", "guessed", "shares", "asked")


def check_tally_arguments(
    numbers: torch.Tensor,
    selected: torch.Tensor,
    free: torch.Tensor,
    predicted: torch.Tensor,
    importance: torch.Tensor | None,
    last: torch.Tensor,
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `tally`."""
    expect("numbers", numbers, "B, H, 7", (None, None, len(TALLY)), (torch.float64,))
    if not numbers.is_contiguous():
        raise ValueError(f"numbers: expected a contiguous tensor, got strides {numbers.stride()}")
    (batch, heads, _), device = numbers.shape, numbers.device
    expect("selected", selected, "B, H, F + K", (batch, heads, None), INT32, device)
    expect("free", free, "B, H, K", (batch, heads, None), INT32, device)
    expect("predicted", predicted, "B, H, J", (batch, heads, None), INT32, device)
    if importance is not None:
        expect("importance", importance, "B, H, N", (batch, heads, None), FP32, device)
    expect("last", last, "B", (batch,), INTEGERS, device)


def tally(
    numbers: torch.Tensor,
    selected: torch.Tensor,
    free: torch.Tensor,
    predicted: torch.Tensor,
    importance: torch.Tensor | None,
    first: int,
    last: torch.Tensor,
) -> None:
    """Add the counts of one token's selection to each row's own, in place: numbers, contiguous float64
    [B, H, 7].

    attended: blocks that were attended to or predicted in vain.  scored: blocks first .. last - 1.  hits: blocks of
    `free` that were predicted.  chosen: those of `free`.  guessed: those of `predicted`.  shares, asked: the part of
    the score of `free` that was predicted (PRR, arXiv 2606.30389, section 4.2), and how many such parts were added:
    one where there is a prediction and a score above 0.

    Args:
        selected: int32 [B, H, F + K].  free: int32 [B, H, K], below N.  predicted: int32 [B, H, J], ascending, -1
            last. Neither is checked.
        importance: fp32 [B, H, N] from `normalise`; None where nothing is ever predicted.  last: [B] integer.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_tally_arguments(numbers, selected, free, predicted, importance, last)
    hit, chosen, guessed = slots_of(free, predicted) >= 0, free >= 0, predicted >= 0
    shares = asked = torch.zeros(free.shape[:2], dtype=torch.float64, device=free.device)
    if importance is not None and importance.shape[2]:
        weight = importance.gather(2, free.long().clamp(min=0)).masked_fill(~chosen, 0.0).double()
        total = weight.sum(dim=2)
        asked = (total > 0) & guessed.any(dim=2)
        shares = torch.where(asked, (weight * hit).sum(dim=2) / total, 0.0)
    hits, guesses = hit.sum(dim=2), guessed.sum(dim=2)
    scored = (last - first).clamp(min=0)[:, None].expand_as(hits)
    found = ((selected >= 0).sum(dim=2) + guesses - hits, scored, hits, chosen.sum(dim=2), guesses, shares, asked)
    numbers += torch.stack([number.double() for number in found], dim=2)
