"""Which blocks a token attends to whatever they score: one kernel for some 35 of torch's, 40 us of a captured token."""

import torch
import triton
import triton.language as tl

from ..reference.forced import Reach, check_forced_arguments
from .launch import options, wait_for_previous


@triton.jit
def _forced(
    valid, start, end, selects, length, last, forced, next_last, next_forced, fits, S, sinks, local,
    m_b, m_t, s_b, e_b, FP: tl.constexpr, SP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: every forced block, SP columns at a time."""
    wait_for_previous(PDL)
    b, f = tl.program_id(0).to(tl.int64), tl.arange(0, FP)
    first, behind = tl.load(start + b * s_b).to(tl.int64), tl.load(end + b * e_b).to(tl.int64)
    tokens = behind - first
    chosen, next_chosen = tokens > fits, tokens + 1 > fits
    newest, following = (tokens - 1) // S, tokens // S
    block = tl.where(f < sinks, f, newest - local + 1 + f - sinks)
    holds, limit = tl.zeros([FP], tl.int32), tl.where(chosen, behind, first)
    for begin in range(0, S, SP):
        offset = begin + tl.arange(0, SP)
        column = first + block[:, None] * S + offset[None, :]
        inside = (offset < S)[None, :] & (column >= 0) & (column < limit) & (f < sinks + local)[:, None]
        real = tl.load(valid + b * m_b + column * m_t, mask=inside, other=0) != 0
        holds = holds | tl.max((real & inside).to(tl.int32), axis=1)
    kept, to = f < sinks + local, b * (sinks + local) + f
    tl.store(forced + to, tl.where(holds != 0, block, -1).to(tl.int32), mask=kept)
    coming = tl.where(f < sinks, f, following - local + 1 + f - sinks)
    tl.store(next_forced + to, tl.where(next_chosen, coming, -1).to(tl.int32), mask=kept)
    tl.store(selects + b, chosen.to(tl.uint8))
    tl.store(length + b, tokens)
    tl.store(last + b, tl.where(chosen, newest - local + 1, 0))
    tl.store(next_last + b, tl.where(next_chosen, following - local + 1, 0))


def forced_blocks(
    valid: torch.Tensor, start: torch.Tensor, end: torch.Tensor, fits: int, block_size: int, sinks: int, local: int
) -> Reach:
    """As the reference. One program a row."""
    check_forced_arguments(valid, start, end, fits, block_size, sinks, local)
    batch, device = valid.shape[0], valid.device
    numbers = torch.empty((3, batch), dtype=torch.int64, device=device)
    blocks = torch.empty((2, batch, 1, sinks + local), dtype=torch.int32, device=device)
    selects = torch.empty(batch, dtype=torch.bool, device=device)
    if batch:
        _forced[(batch,)](
            valid.view(torch.uint8), start, end, selects.view(torch.uint8), numbers[0], numbers[1], blocks[0],
            numbers[2], blocks[1], fits, block_size, sinks, local, *valid.stride(), *start.stride(), *end.stride(),
            FP=triton.next_power_of_2(sinks + local), SP=min(128, triton.next_power_of_2(block_size)),
            **options(valid, num_warps=4),
        )  # fmt: skip
    return Reach(selects, numbers[0], numbers[1], blocks[0], numbers[2], blocks[1])
