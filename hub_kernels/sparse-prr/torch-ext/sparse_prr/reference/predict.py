"""The predictor of PRR (arXiv 2606.30389, section 4.1): an EMA of each block's score, with a trend. All fp32.

`level` and `trend` are [B, H, N]; level is NaN for a block that was never scored. `ema` is [B, 3]: alpha, beta, gamma.
"""

from typing import NamedTuple

import torch

from .check import FP32, INTEGERS, expect


def normalise(scores: torch.Tensor) -> torch.Tensor:
    """I = (raw - min) / (max - min) over the scored blocks of each row: [.., N] in [0, 1], NaN where scores are NaN.

    +inf counts as 1 and -inf as 0; where all finite scores are equal they count as 0.
    """
    if scores.shape[-1] == 0:
        return scores
    finite = scores.isfinite()
    wide = scores.double()  # max - min may exceed fp32
    low = wide.masked_fill(~finite, float("inf")).amin(dim=-1, keepdim=True)
    span = wide.masked_fill(~finite, float("-inf")).amax(dim=-1, keepdim=True) - low
    importance = torch.where(finite & (span > 0), (wide - low) / span, 0.0).float()
    importance = importance.masked_fill(scores == float("inf"), 1.0)
    return importance.masked_fill(scores.isnan(), float("nan"))


def _coefficients(ema: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(ema[:, i, None, None] for i in range(3))


def ema_predict(level: torch.Tensor, trend: torch.Tensor, ema: torch.Tensor) -> torch.Tensor:
    """Predicted score of each block, level + gamma * trend; NaN for a block that was never scored."""
    _, _, gamma = _coefficients(ema)
    return level + gamma * trend


def ema_update(
    level: torch.Tensor, trend: torch.Tensor, importance: torch.Tensor, ema: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """New (level, trend) after `importance` ([B, H, N], from `normalise`) was seen; its NaN entries change nothing.

    v <- beta (I - l) + (1 - beta) v with the old l, then l <- alpha I + (1 - alpha) l. A new block: l = I, v = 0.
    """
    alpha, beta, _ = _coefficients(ema)
    seen, new = ~importance.isnan(), level.isnan()
    moved_trend = beta * (importance - level) + (1 - beta) * trend
    moved_level = alpha * importance + (1 - alpha) * level
    return (
        torch.where(seen, torch.where(new, importance, moved_level), level),
        torch.where(seen, torch.where(new, 0.0, moved_trend), trend),
    )


class EmaStep(NamedTuple):
    """State after a token, and what it expects of the next: level, trend, expected, importance, fp32 [B, H, N]."""

    level: torch.Tensor
    trend: torch.Tensor
    expected: torch.Tensor
    importance: torch.Tensor


def check_ema_arguments(
    scores: torch.Tensor, level: torch.Tensor, trend: torch.Tensor, ema: torch.Tensor, last: torch.Tensor
) -> None:
    """Raise ValueError for anything outside the contract of `ema_step`."""
    expect("scores", scores, "B, H, N", (None,) * 3, FP32)
    shape, device = scores.shape, scores.device
    expect("level", level, "B, H, N", shape, FP32, device)
    expect("trend", trend, "B, H, N", shape, FP32, device)
    expect("ema", ema, "B, 3", (shape[0], 3), FP32, device)
    expect("last", last, "B", shape[:1], INTEGERS, device)


def ema_step(
    scores: torch.Tensor, level: torch.Tensor, trend: torch.Tensor, ema: torch.Tensor, first: int, last: torch.Tensor
) -> EmaStep:
    """`normalise`, `ema_update` and `ema_predict` in one: what a decode step does off the critical path.

    Args:
        scores: fp32 [B, H, N].  level, trend: the state before.  ema: fp32 [B, 3].
        first, last: `expected` is NaN but for the blocks first .. last - 1 of each row; last: [B] integer.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_ema_arguments(scores, level, trend, ema, last)
    importance = normalise(scores)
    level, trend = ema_update(level, trend, importance, ema)
    blocks = torch.arange(scores.shape[2], device=scores.device)
    selectable = (blocks >= first) & (blocks < last[:, None])
    return EmaStep(
        level, trend, ema_predict(level, trend, ema).masked_fill(~selectable[:, None], float("nan")), importance
    )
