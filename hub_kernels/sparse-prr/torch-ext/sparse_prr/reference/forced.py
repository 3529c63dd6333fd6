"""Which blocks a token attends to whatever they score."""

from typing import NamedTuple

import torch

from .check import expect_rows, integer


class Reach(NamedTuple):
    """Of the last token of each row. selects: bool [B], whether the row has more than `fits` tokens.  length: int64
    [B], its tokens.  last: int64 [B], blocks from `sink_blocks` up to it are selectable; 0 where the row fits.
    forced: int32 [B, 1, F], the sinks and the last blocks, ascending; -1 where the row fits or no token is left in one.
    next_last, next_forced: those of the token to come, with blocks that may turn out to be empty."""

    selects: torch.Tensor
    length: torch.Tensor
    last: torch.Tensor
    forced: torch.Tensor
    next_last: torch.Tensor
    next_forced: torch.Tensor


def check_forced_arguments(
    valid: torch.Tensor, start: torch.Tensor, end: torch.Tensor, fits: int, block_size: int, sinks: int, local: int
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `forced_blocks`."""
    if not isinstance(valid, torch.Tensor) or valid.dim() != 2:
        raise ValueError(f"valid: expected [B, T], got {list(getattr(valid, 'shape', ()))}")
    expect_rows(valid, start, end, valid.shape[0], valid.shape[1], valid.device)
    for name, value, least in (
        ("fits", fits, 0),
        ("block_size", block_size, 1),
        ("sinks", sinks, 0),
        ("local", local, 1),
    ):
        integer(name, value, least)
    if fits < (sinks + local) * block_size:
        raise ValueError(f"fits: expected at least the forced blocks, {(sinks + local) * block_size}, got {fits}")


def _reach(
    start: torch.Tensor, end: torch.Tensor, fits: int, block_size: int, sinks: int, local: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(selects, last, forced), whatever blocks hold a token."""
    selects, newest = end - start > fits, (end - 1 - start) // block_size
    last_ones = newest[:, None] - torch.arange(local - 1, -1, -1, device=start.device)
    first_ones = torch.arange(sinks, device=start.device).expand(newest.shape[0], -1)
    return selects, torch.where(selects, newest - local + 1, 0), torch.cat([first_ones, last_ones], dim=1)


def forced_blocks(
    valid: torch.Tensor, start: torch.Tensor, end: torch.Tensor, fits: int, block_size: int, sinks: int, local: int
) -> Reach:
    """Args:
        valid: bool [B, T], which columns hold a token.  start, end: int64 [B], the row's first column and the one
            behind its last, at most T, which isn't checked: on the device.
        fits: tokens up to which a row attends to all of them, at least those of the forced blocks.
        sinks, local: first and last blocks, always attended; the open one is the first of the local ones.

    Raises:
        ValueError: shapes, dtypes, devices or numbers outside the above.
    """
    check_forced_arguments(valid, start, end, fits, block_size, sinks, local)
    sizes = (fits, block_size, sinks, local)
    selects, last, forced = _reach(start, end, *sizes)
    next_selects, next_last, next_forced = _reach(start, end + 1, *sizes)
    members = start[:, None, None] + forced[..., None] * block_size
    members = members + torch.arange(block_size, device=start.device)
    real = valid.gather(1, members.clamp(0, max(valid.shape[1] - 1, 0)).flatten(1)).view(members.shape)
    holds = (real & (members < end[:, None, None])).any(dim=-1) & selects[:, None]
    forced, next_forced = (
        torch.where(known, blocks, -1).to(torch.int32)[:, None]
        for known, blocks in ((holds, forced), (next_selects[:, None], next_forced))
    )
    return Reach(selects, end - start, last, forced, next_last, next_forced)
