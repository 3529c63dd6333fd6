"""What a layer remembers from token to token: EMA of block scores and last winners, and how a crop undoes them."""

from collections.abc import Callable
from typing import NamedTuple

import torch

QUERIES = 32  # prompt queries kept for calibration
MIN_QUERIES = 8  # fewer don't calibrate


class Expected(NamedTuple):
    """What a token is expected to attend to, int32, ascending, -1 padded. early: [B, H, F + P], with the forced blocks.
    predicted: [B, H, P], without them."""

    early: torch.Tensor
    predicted: torch.Tensor


class Prior(NamedTuple):
    """State before a decode token. level, trend: fp32 [B, H, N], NaN level where a block was never scored; None while
    nothing is predicted. winners: int32 [B, H, K], the blocks the last token selected by score, -1 padded.
    expected: what the token before this one expected it to attend to, None where there was none.  threshold: fp32
    [B, 2], where the top-k of the next scores starts from, None where it needs none."""

    winners: torch.Tensor
    level: torch.Tensor | None = None
    trend: torch.Tensor | None = None
    expected: "Expected | None" = None
    threshold: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Prior":
        held = (self.level, self.trend, self.threshold)
        level, trend, threshold = (None if tensor is None else change(tensor) for tensor in held)
        expected = None if self.expected is None else Expected(*map(change, self.expected))
        return Prior(change(self.winners), level, trend, expected, threshold)

    def ema_state(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(level, trend) over `blocks` blocks; those that are new to them have never been scored."""
        assert self.level is not None and self.trend is not None
        grown = (0, blocks - self.level.shape[2])
        if grown[1] == 0:
            return self.level, self.trend
        return (
            torch.nn.functional.pad(self.level, grown, value=float("nan")),
            torch.nn.functional.pad(self.trend, grown),
        )

    def widened(self, blocks: int, slots: int) -> "Prior":
        """As a token leaves it that scores so many blocks, and expects at most so many of them."""
        if self.level is None or self.expected is None:
            return self
        level, trend = self.ema_state(blocks)
        wide = [torch.nn.functional.pad(ids, (0, slots - ids.shape[2]), value=-1) for ids in self.expected]
        return self._replace(level=level, trend=trend, expected=Expected(*wide))


class Memory:
    """The prior of one layer, the coefficients of its EMA, the prompt queries that calibrate them, and the priors that
    a crop inside the last forward brings back."""

    def __init__(self) -> None:
        self.prior: Prior | None = None
        self.ema: torch.Tensor | None = None  # fp32 [B, 3]: alpha, beta, gamma
        self.queries: torch.Tensor | None = None  # [B, H, G, Q, D] of the columns below
        self.columns: list[int] = []
        self.uncalibrated = False
        self._before: dict[int, Prior | None] = {}  # by the column of a token of the last forward
        self._begin = 0

    def coefficients(self, ema: tuple[float, float, float], batch: int, device: torch.device) -> torch.Tensor:
        """fp32 [B, 3] of each batch row; `ema` where nothing has calibrated them."""
        if self.ema is None:
            self.ema = torch.tensor(ema, dtype=torch.float32, device=device).repeat(batch, 1)
        return self.ema

    def remember(self, queries: torch.Tensor, begin: int) -> None:
        """Keep the last prompt queries, [B, H, G, Q, D] of the columns from `begin` on: the same ones however the
        prompt was chunked."""
        kept = queries[:, :, :, -QUERIES:]
        end = begin + queries.shape[3]
        self.queries = (
            kept.clone() if self.queries is None else torch.cat([self.queries, kept], dim=3)[:, :, :, -QUERIES:]
        )
        self.columns = [*self.columns, *range(end - kept.shape[3], end)][-QUERIES:]
        self.uncalibrated = True

    def start(self, ema: torch.Tensor, prior: Prior) -> None:
        """Calibration chose the coefficients and the state the EMA starts from."""
        self.ema, self.prior, self.uncalibrated = ema, prior, False

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
        dropped = self._drop_queries(length)
        if length < self._begin:
            self.clear()
            return
        if dropped:  # what calibrated the prior isn't there any more
            self.clear()
            self.uncalibrated = bool(self.columns)
            return
        undone = sorted(column for column in self._before if column >= length)
        if undone:
            self.prior = self._before[undone[0]]
        for column in undone:
            del self._before[column]

    def _drop_queries(self, length: int) -> bool:
        held = sum(column < length for column in self.columns)
        if self.queries is None or held == len(self.columns):
            return False
        self.queries, self.columns = self.queries[:, :, :, :held], self.columns[:held]
        self.uncalibrated = self.uncalibrated and held > 0
        return True

    def clear(self) -> None:
        self.prior = None
        self._before = {}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension or of the device to everything."""
        self.prior = None if self.prior is None else self.prior.map(change)
        self.ema = None if self.ema is None else change(self.ema)
        self.queries = None if self.queries is None else change(self.queries)
        self._before = {column: None if prior is None else prior.map(change) for column, prior in self._before.items()}
