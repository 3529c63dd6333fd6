"""What `bench topk` selects from: rows of scores shaped as real layers' are, and guesses of known worth: hints are
indices, thresholds are scores."""

import math
from collections.abc import Callable, Sequence
from inspect import signature
from types import ModuleType

import torch

from .bench import CORRELATION
from .bundled.reference import ascending

_AT_ONCE = 2**24  # entries that the oracle sorts at a time: fp64 keys and int64 indices
_STEP = {"previous": CORRELATION, "other": 0.0}  # correlation with the timed row, of the normal variables behind both
STALE = 10.0  # what scores of another row are multiplied by before a useless threshold is taken from them
_THRESHOLDS = ("threshold", "predicted", "stale")
STRATEGIES = ("none", "random", "previous", "predicted", "oracle", "threshold", "stale")


def _above(normal: torch.Tensor) -> torch.Tensor:
    """The probability of a larger normal variable: of few digits lost in the tail that a top-k looks at."""
    return 0.5 * torch.erfc(normal / math.sqrt(2))


def _beta(normal: torch.Tensor) -> torch.Tensor:
    span, mean = 13.60 + 0.75, 1.90 + 0.75
    return -0.75 + span * (1 - _above(normal) ** (mean / (span - mean)))  # the first of its two shapes is 1


def _logistic(normal: torch.Tensor) -> torch.Tensor:
    above = _above(normal)
    return (1.46 + torch.log1p(-above) - above.log()).clamp(-0.47, 12.32)


def _lognormal(normal: torch.Tensor) -> torch.Tensor:
    mean, sigma = 2.55 + 4.12, 0.3
    return (-4.12 + torch.exp(math.log(mean) - sigma**2 / 2 + sigma * normal)).clamp(max=17.28)


def _weibull(normal: torch.Tensor) -> torch.Tensor:
    mean, shape = 1.57 + 3.04, 14
    scale = mean / math.gamma(1 + 1 / shape)
    return (-3.04 + scale * (-_above(normal).log()).clamp(min=0) ** (1 / shape)).clamp(max=12.30)


def _bits(normal: torch.Tensor) -> torch.Tensor:
    """Every fp32 is as likely as any other, NaN and infinities too."""
    rank = ((1 - _above(normal.double())) * 2.0**32).long().clamp(0, 2**32 - 1)
    bits = torch.where(rank >= 2**31, rank - 2**31, -1 - rank)  # as int32: negative floats descend
    return bits.to(torch.int32).view(torch.float32)


# Of a normal variable, ascending, so that rows that are correlated stay so. Minimum, mean and maximum of beta,
# logistic, lognormal and weibull are those of layers in TRT-LLM's indexer tests; of relu 3% lie above a plateau.
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda normal: normal,
    "beta": _beta,
    "logistic": _logistic,
    "lognormal": _lognormal,
    "weibull": _weibull,
    "relu": lambda normal: (normal - 1.87).relu(),
    "bits": _bits,
}


def written(share: float) -> str:
    """As it is read back, to the last digit."""
    return repr(share).removesuffix(".0")


def takes_threshold(kernels: ModuleType) -> bool:
    """Whether these kernels can start a top-k from a score."""
    return hasattr(kernels, "topk_threshold") and "threshold" in signature(kernels.gvr_topk).parameters


def best(scores: torch.Tensor, k: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """int32 [R, k] by a stable sort: key descending, then index ascending; NaN and what is past the length never, -1 in
    their place."""
    found = []
    rows = max(1, _AT_ONCE // scores.shape[1])
    for begin in range(0, len(scores), rows):
        key = scores[begin : begin + rows].double()
        real = ~key.isnan()
        if lengths is not None:
            real &= torch.arange(key.shape[1], device=key.device) < lengths[begin : begin + rows, None]
        key = key.clamp(min=-1e300).masked_fill(~real, float("-inf"))  # a real -inf stays above what isn't there
        order = key.sort(dim=1, descending=True, stable=True).indices[:, :k]
        past = torch.arange(k, device=key.device) >= real.sum(dim=1, keepdim=True)
        found.append(order.masked_fill(past, -1).to(torch.int32))
    return torch.cat(found)


class Rows:
    """Rows of N scores each, and what may be guessed of their top-k before it is known.

    scores: [P, N] in the dtype.  lengths: int32 [P], 1 .. N each, or None.
    """

    def __init__(
        self, name: str, rows: int, n: int, most: int, dtype: torch.dtype, device: torch.device, ragged: bool
    ) -> None:
        self._random = torch.Generator(device).manual_seed(n)
        self._normal = torch.randn((rows, n), generator=self._random, device=device)
        self._name, self._dtype = name, dtype
        self.scores = self._scored(self._normal)
        self.lengths: torch.Tensor | None = None
        if ragged:
            self.lengths = torch.randint(1, n + 1, (rows,), generator=self._random, device=device, dtype=torch.int32)
        self._best = best(self.scores, most, self.lengths)
        self._others: dict[str, torch.Tensor] = {}

    def _scored(self, normal: torch.Tensor) -> torch.Tensor:
        return SCORES[self._name](normal).to(self._dtype)

    def other(self, which: str) -> torch.Tensor:
        """Scores of "previous" or of "other" rows, [P, N]."""
        if which not in self._others:
            again = torch.randn(self._normal.shape, generator=self._random, device=self._normal.device)
            shared = _STEP[which]
            self._others[which] = self._scored(shared * self._normal + math.sqrt(1 - shared**2) * again)
        return self._others[which]

    def winners(self, k: int) -> torch.Tensor:
        """int32 [P, k]: what a top-k of each row has to give."""
        return ascending(self._best[:, :k])

    def _spread(self, slots: int, room: torch.Tensor) -> torch.Tensor:
        """int64 [P, slots], ascending: random numbers below `room` [P], distinct where there are enough."""
        uniform = torch.rand((len(room), slots), generator=self._random, device=room.device, dtype=torch.float64)
        bounds = torch.arange(slots + 1, device=room.device) * room[:, None] // max(slots, 1)  # one in each interval
        return bounds[:, :-1] + (uniform * bounds.diff(dim=1)).long()

    def random_hint(self, k: int) -> torch.Tensor:
        """int32 [P, k]: any indices of the row."""
        rows, n = self.scores.shape
        return self._spread(k, torch.full((rows,), n, device=self.scores.device)).to(torch.int32)

    def previous_hint(self, k: int, overlap: float) -> torch.Tensor:
        """int32 [P, k], ascending: this share of a row's winners, rounded to whole ones, and random losers."""
        winners, n = self.winners(k), self.scores.shape[1]
        kept = round(overlap * k)
        order = torch.rand(winners.shape, generator=self._random, device=winners.device).argsort(dim=1)
        won = winners.gather(1, order[:, :kept])
        count = (winners >= 0).sum(dim=1)
        lengths = torch.full_like(count, n) if self.lengths is None else self.lengths.long()
        # The j-th loser stands behind as many winners as have no more than j losers before them
        losers = torch.where(winners < 0, n, winners) - torch.arange(k, device=winners.device)
        rank = self._spread(k - kept, (lengths - count).clamp(min=1))
        lost = rank + torch.searchsorted(losers.long().contiguous(), rank.contiguous(), right=True)
        return ascending(torch.cat([won, lost.to(torch.int32)], dim=1))

    def guesses(self, strategy: str, k: int, kernels: ModuleType) -> dict[str, torch.Tensor]:
        """The keyword arguments of `gvr_topk` that a strategy of STRATEGIES adds; "previous 0.3" has its overlap."""
        kind, _, overlap = strategy.partition(" ")
        if kind == "none":
            return {}
        if kind == "random":
            return {"hint": self.random_hint(k)}
        if kind == "previous":
            return {"hint": self.previous_hint(k, float(overlap))}
        if kind == "oracle":
            return {"hint": self.winners(k)}
        scores = self.scores if kind == "threshold" else self.other("previous" if kind == "predicted" else "other")
        scores = scores * STALE if kind == "stale" else scores
        return {"threshold": kernels.topk_threshold(scores, k, lengths=self.lengths)}


def strategies_of(kernels: ModuleType, wanted: Sequence[str] | None, overlaps: Sequence[float]) -> list[str]:
    """Names of what is compared: each of `wanted` (by default all that these kernels can), "previous" once an overlap.

    Raises:
        ValueError: an unknown one, an overlap that is no share, or thresholds that these kernels don't take.
    """
    able = takes_threshold(kernels)
    for overlap in overlaps:
        if not 0 <= overlap <= 1:
            raise ValueError(f"overlap: expected a number from 0 to 1, got {overlap:g}")
    for name in wanted or ():
        if name not in STRATEGIES:
            raise ValueError(f"strategies: expected some of {', '.join(STRATEGIES)}, got {name!r}")
        if name in _THRESHOLDS and not able:
            raise ValueError(f"strategies: expected kernels with topk_threshold for {name!r}, got some without it")
    names = wanted or [name for name in STRATEGIES if able or name not in _THRESHOLDS]
    previous = [f"previous {written(overlap)}" for overlap in overlaps]
    return [each for name in names for each in (previous if name == "previous" else [name])]
