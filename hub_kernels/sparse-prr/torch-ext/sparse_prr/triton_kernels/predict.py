"""The predictor's step: normalise, update the EMA, predict."""

import torch
import triton
import triton.language as tl

from ..reference.predict import EmaStep, check_ema_arguments
from .launch import options, wait_for_previous
from .tuned import config


@triton.jit
def _finite(x):
    return (x == x) & (x != float("inf")) & (x != float("-inf"))


_LONG = 16384  # blocks of a row from which on each program reads the extremes of parts, not the row
_PART = 4096


@triton.jit
def _extremes(scores, lows, highs, N, H, x_b, x_h, x_n, PART: tl.constexpr, PDL: tl.constexpr):
    """Of PART blocks of one row the least finite score and the largest."""
    wait_for_previous(PDL)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = (tl.program_id(0) * PART + tl.arange(0, PART)).to(tl.int64)
    x = tl.load(scores + b * x_b + h * x_h + n * x_n, mask=n < N, other=float("nan"))
    finite, at = _finite(x), (b * H + h) * tl.num_programs(0) + tl.program_id(0)
    tl.store(lows + at, tl.min(tl.where(finite, x, float("inf")), axis=0))
    tl.store(highs + at, tl.max(tl.where(finite, x, float("-inf")), axis=0))


@triton.jit
def _ema_step(
    scores, lows, highs, level, trend, ema, last, new_level, new_trend, expected, importance, first, N, H, parts,
    x_b, x_h, x_n, l_b, l_h, l_n, t_b, t_h, t_n, c_b, c_i, e_b,
    CHUNK: tl.constexpr, LONG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """CHUNK blocks of one row. Each program finds the extremes of the whole row, or of what is known of its parts. fp64
    where the reference has it: max - min may exceed fp32. Products and sums are not fused, so that the bits are the
    reference's."""
    wait_for_previous(PDL)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, i = scores + b * x_b + h * x_h, tl.arange(0, 4 * CHUNK)
    low, high = tl.full([4 * CHUNK], float("inf"), tl.float32), tl.full([4 * CHUNK], float("-inf"), tl.float32)
    if LONG:
        for begin in range(0, parts, 4 * CHUNK):
            n, mine = begin + i, (b * H + h) * parts
            low = tl.minimum(low, tl.load(lows + mine + n, mask=n < parts, other=float("inf")))
            high = tl.maximum(high, tl.load(highs + mine + n, mask=n < parts, other=float("-inf")))
    else:
        for begin in range(0, N, 4 * CHUNK):
            n = (begin + i).to(tl.int64)
            x = tl.load(row + n * x_n, mask=n < N, other=float("nan"))
            finite = _finite(x)
            low = tl.minimum(low, tl.where(finite, x, float("inf")))
            high = tl.maximum(high, tl.where(finite, x, float("-inf")))
    bottom, top = tl.min(low, axis=0), tl.max(high, axis=0)
    wide = (top > bottom).to(tl.int32)
    least = bottom.to(tl.float64)
    span = tl.where(wide > 0, top.to(tl.float64) - least, 1.0)
    alpha, beta, gamma = tl.load(ema + b * c_b), tl.load(ema + b * c_b + c_i), tl.load(ema + b * c_b + 2 * c_i)
    end, out = tl.load(last + b * e_b).to(tl.int64), (b * H + h) * N
    n = (tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    there = n < N
    x = tl.load(row + n * x_n, mask=there, other=float("nan"))
    share = ((x.to(tl.float64) - least) / span).to(tl.float32)
    share = tl.where(_finite(x) & (wide > 0), share, 0.0)
    share = tl.where(x == float("inf"), 1.0, share)
    old = tl.load(level + b * l_b + h * l_h + n * l_n, mask=there, other=0.0)
    v = tl.load(trend + b * t_b + h * t_h + n * t_n, mask=there, other=0.0)
    seen, known = x == x, old == old
    moved = tl.where(known, beta * (share - old) + (1 - beta) * v, 0.0)
    mixed = tl.where(known, alpha * share + (1 - alpha) * old, share)
    v, mixed = tl.where(seen, moved, v), tl.where(seen, mixed, old)
    hope = tl.where((n >= first) & (n < end), mixed + gamma * v, float("nan"))
    tl.store(importance + out + n, tl.where(seen, share, float("nan")), mask=there)
    tl.store(new_level + out + n, mixed, mask=there)
    tl.store(new_trend + out + n, v, mask=there)
    tl.store(expected + out + n, hope, mask=there)


def ema_step(
    scores: torch.Tensor, level: torch.Tensor, trend: torch.Tensor, ema: torch.Tensor, first: int, last: torch.Tensor
) -> EmaStep:
    """As the reference, bit for bit. Programs of CHUNK blocks: one a row took 12 us at 8192 blocks. Where blocks are
    tokens, rows are long: that each program reads the whole of one would be more than all else."""
    check_ema_arguments(scores, level, trend, ema, last)
    batch, heads, blocks = scores.shape
    step = EmaStep(*(torch.empty((batch, heads, blocks), dtype=torch.float32, device=scores.device) for _ in range(4)))
    if scores.numel():
        tuned, long = config("ema_step", scores), blocks > _LONG
        parts = triton.cdiv(blocks, _PART)
        lows, highs = scores.new_empty((2, batch * heads * parts if long else 0))
        if long:
            _extremes[(parts, heads, batch)](
                scores, lows, highs, blocks, heads, *scores.stride(), PART=_PART, **options(scores, num_warps=8)
            )
        _ema_step[(triton.cdiv(blocks, tuned["CHUNK"]), heads, batch)](
            scores, lows, highs, level, trend, ema, last, *step, first, blocks, heads, parts,
            *scores.stride(), *level.stride(), *trend.stride(), *ema.stride(), *last.stride(),
            LONG=long, **options(scores, enable_fp_fusion=False, **tuned),
        )  # fmt: skip
    return step
