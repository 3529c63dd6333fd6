"""What a layer remembers from token to token: EMA of block scores and last winners, and how a crop undoes them."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Prior(NamedTuple):
    """State before a decode token. level, trend: fp32 [B, H, N], NaN level where a block was never scored; None while
    nothing is predicted. winners: int32 [B, H, K], the blocks the last token selected by score, -1 padded."""

    winners: torch.Tensor
    level: torch.Tensor | None = None
    trend: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Prior":
        return Prior(*(None if tensor is None else change(tensor) for tensor in self))

    def ema_state(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(level, trend) over `blocks` blocks; those that are new to them have never been scored."""
        assert self.level is not None and self.trend is not None
        grown = (0, blocks - self.level.shape[2])
        return (
            torch.nn.functional.pad(self.level, grown, value=float("nan")),
            torch.nn.functional.pad(self.trend, grown),
        )


class Memory:
    """The prior of one layer, and the priors that a crop inside the last forward brings back."""

    def __init__(self) -> None:
        self.prior: Prior | None = None
        self._ema: torch.Tensor | None = None
        self._before: dict[int, Prior | None] = {}  # by the column of a token of the last forward
        self._begin = 0

    def coefficients(self, ema: tuple[float, float, float], batch: int, device: torch.device) -> torch.Tensor:
        """fp32 [B, 3] (alpha, beta, gamma) of each batch row."""
        if self._ema is None:
            self._ema = torch.tensor(ema, dtype=torch.float32, device=device).repeat(batch, 1)
        return self._ema

    def open(self, begin: int) -> None:
        """A forward starts at column `begin`."""
        self._before, self._begin = {}, begin

    def advance(self, column: int, prior: Prior) -> None:
        """The decode token in `column` was seen."""
        self._before[column] = self.prior
        self.prior = prior

    def crop(self, length: int) -> None:
        """Columns at and past `length` are gone. Inside the last forward their tokens are undone; deeper, the prior is
        cleared: what it was then isn't known, and an empty prior is always right."""
        if length < self._begin:
            self.clear()
            return
        undone = sorted(column for column in self._before if column >= length)
        if undone:
            self.prior = self._before[undone[0]]
        for column in undone:
            del self._before[column]

    def clear(self) -> None:
        self.prior = None
        self._before = {}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension or of the device to everything."""
        self.prior = None if self.prior is None else self.prior.map(change)
        self._ema = None if self._ema is None else change(self._ema)
        self._before = {column: None if prior is None else prior.map(change) for column, prior in self._before.items()}
