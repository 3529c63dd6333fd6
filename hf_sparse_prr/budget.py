"""Whether a cache's decode steps speculate, and on how many blocks: from a profile of what steps take, and their hit
rates. PRR's runtime (arXiv 2606.30389, section 4.4), for a step that is exact.

The choice never changes a bit of what is computed, nor does it depend on when a copy arrives: counters are copied
without a wait, and looked at a fixed number of tokens later.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .config import DEFAULT_EMA
from .decode import expect, token_at
from .predictor import Prior
from .profile import At, Key, Profile, device_name, find, sources_of
from .report import NUMBERS
from .tokens import Step

if TYPE_CHECKING:
    from .cache import SparseCache
    from .layer import SparseLayer
    from .patching import PatchHandle
    from .report import Statistics

WINDOW = 16  # tokens over which a hit rate is taken
LAG = 2  # tokens after which a copy is looked at: generate() has waited for an earlier one by then
GAIN = 1.10  # times as fast as serial: what a step has to be for speculation to stay on
_START = GAIN + 0.03  # and to be kept on after a try: less, and noise would turn it on and off
_BETTER = 0.03  # of a step's time that another ratio has to save
_UNKNOWN = 0.9  # the hit rate that a try starts from, at a ratio of 1
_LOSS, OVER = 0.05, 256  # of the time of so many steps, what tries may cost
_STALE = "measured with other sources of these kernels: `hf-sparse-prr profile` renews it"
_FIRST_WAIT, _LONGEST_WAIT = 128, 512  # tokens without speculation before it is tried again


def hits_at(ratio: float, hit_rate: float, measured: float) -> float:
    """The hit rate to expect at a ratio, from the one at the ratio `measured`: as if each further prediction found what
    is left with the same luck. On SmolLM2 1.5 and 2 times as many find more than this says."""
    return min(ratio, 1.0, 1 - (1 - min(hit_rate, 1.0)) ** (ratio / measured))


def choices(at: At, hit_rate: float, measured: float = 1.0) -> list[tuple[float, float]]:
    """(ratio, microseconds of a step) of each ratio, where predictions at the ratio `measured` hit that share."""
    return [(ratio, at.step(ratio, hits_at(ratio, hit_rate, measured))) for ratio in at.speculate]


class Policy:
    """Host numbers alone: which ratio a step shall have, 0.0 for none.

    given: the only ratio there may be, None for all of the profile's.  always: never 0.0.
    """

    def __init__(self, profile: Profile, given: float | None = None, always: bool = False) -> None:
        self.profile, self.given, self.always = profile, given, always
        self.ratio = 0.0
        self._confirmed = False  # that it pays, by a measured hit rate
        self._since = 0  # tokens of this state
        self._tokens = 0
        self._wait = _FIRST_WAIT
        self._lost: deque[tuple[int, float]] = deque()  # (token, steps' time that was lost up to it)

    def start(self, context: int) -> float:
        """For the first decode token behind a prompt of so many tokens."""
        self._confirmed, self._since = False, 0
        self.ratio = self._try(context)
        return self.ratio

    def look(self, context: int, tokens: int, hits: Sequence[float]) -> float:
        """After so many more tokens. hits: the measured hit rate of each layer, none where nothing was predicted."""
        self._tokens += tokens
        self._since += tokens
        at = self.profile.at(context)
        if not self.ratio:
            if self._since >= self._wait and (chosen := self._try(context)):
                self._wait = min(2 * self._wait, _LONGEST_WAIT)
                self._turn(chosen)
            return self.ratio
        if not hits:
            return self.ratio
        now = self._time(at, self.ratio, hits)
        self._lost.append((self._tokens, max(0.0, now / at.serial - 1) * tokens))
        times = {
            ratio: self._time(at, ratio, [hits_at(ratio, hit, self.ratio) for hit in hits]) for ratio in self._all(at)
        }
        times[self.ratio] = now
        best = min(times, key=lambda ratio: times[ratio])
        if times[best] > (1 - _BETTER) * now:
            best = self.ratio
        if not self.always and at.serial / times[best] < (GAIN if self._confirmed else _START):
            self._turn(0.0)
        elif best != self.ratio:
            self._turn(best)
        else:
            self._confirmed = True
            if self._since >= OVER:
                self._wait = _FIRST_WAIT
        return self.ratio

    def _turn(self, ratio: float) -> None:
        self.ratio, self._since, self._confirmed = ratio, 0, False

    def _all(self, at: At) -> list[float]:
        return list(at.speculate) if self.given is None else [self.given]

    def _time(self, at: At, ratio: float, hits: Sequence[float]) -> float:
        return sum(at.step(ratio, hit) for hit in hits) / len(hits)

    def _try(self, context: int) -> float:
        """A ratio to begin with; 0.0 where it can't pay at any hit rate, or a miss might cost too much by now."""
        at = self.profile.at(context)
        usual = {ratio: at.step(ratio, hits_at(ratio, _UNKNOWN, 1.0)) for ratio in self._all(at)}
        ratio = min(usual, key=lambda each: usual[each])
        if self.always:
            return ratio
        best = min(at.step(each, min(each, 1.0)) for each in usual)
        while self._lost and self._lost[0][0] <= self._tokens - OVER:
            self._lost.popleft()
        worst = max(0.0, at.step(ratio, 0.0) / at.serial - 1) * (WINDOW + LAG + 1)
        affordable = sum(lost for _, lost in self._lost) + worst <= _LOSS * OVER
        return ratio if at.serial / best >= _START and affordable else 0.0


class _Copy:
    """Counters of layers on their way to the host. statistics: what they are of."""

    def __init__(self, statistics: "Statistics", layers: Sequence[int]) -> None:
        self.statistics = statistics
        self._rows: list[torch.Tensor] = []  # [layers, numbers] of a device each
        self._events: list[Any] = []
        counters = [held for layer in layers if (held := statistics.held(layer)) is not None]
        for device in dict.fromkeys(held.device for held in counters):
            rows = torch.stack([held.sum(dim=(0, 1)) for held in counters if held.device == device])
            if device.type == "cuda":
                rows = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True).copy_(
                    rows, non_blocking=True
                )
                self._events.append(torch.cuda.current_stream(device).record_event())
            self._rows.append(rows)

    def read(self) -> list[dict[str, float]]:
        """Each layer's counters by name."""
        for event in self._events:
            event.synchronize()
        return [dict(zip(NUMBERS, row, strict=True)) for rows in self._rows for row in rows.tolist()]


def _rates(before: _Copy, after: _Copy) -> list[float]:
    """Hit rates between two copies of the layers that selected; none where counters began anew."""
    if before.statistics is not after.statistics:
        return []
    rates = []
    for old, new in zip(before.read(), after.read(), strict=False):
        selected = new["selected"] - old["selected"]
        if selected > 0:
            rates.append(max(0.0, new["hits"] - old["hits"]) / selected)
    return rates


class Budget:
    """What a cache's layers speculate on. Its choice is their plan's `predicted_blocks`.

    current: whether the profile was measured with the kernels that run, and not with others of their version.
    """

    def __init__(self, policy: Policy, current: bool = True) -> None:
        self.policy = policy
        self.current = current
        self.turns = 0  # changes of the choice since the first token
        self._started = False
        self._tokens = 0
        self._mark = 0  # the token at which counters are copied next
        self._before: _Copy | None = None
        self._after: _Copy | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before": None, "_after": None, "_mark": self._tokens + 1}

    def forward(self, handle: "PatchHandle", cache: "SparseCache", statistics: "Statistics", step: Step) -> None:
        """Before a forward's first layer of full attention attends."""
        decoded, context = step.count - step.first_decode, step.begin + step.count
        if step.first_decode or not self._started:
            self._started = True
            self._apply(handle, cache, self.policy.start(context), step)
        if not decoded:
            return
        layers = [index for index, plan in enumerate(handle.plans) if plan.status == "sparse"]
        if self._after is not None and self._tokens >= self._mark + LAG:
            assert self._before is not None
            rates, ratio = _rates(self._before, self._after), self.policy.ratio
            self._before, self._after, self._mark = self._after, None, self._mark + WINDOW
            if self.policy.look(context, WINDOW, rates) != ratio:
                self._apply(handle, cache, self.policy.ratio, step)
        elif self._after is None and self._tokens >= self._mark:
            if not self.policy.ratio:
                self._mark = self._tokens + WINDOW
                if self.policy.look(context, WINDOW, ()):
                    self._apply(handle, cache, self.policy.ratio, step)
            elif self._before is None:
                self._before, self._mark = _Copy(statistics, layers), self._tokens + WINDOW
            else:
                self._after, self._mark = _Copy(statistics, layers), self._tokens
        self._tokens += decoded

    def leave(self, handle: "PatchHandle", cache: "SparseCache", step: Step) -> None:
        """There is no profile for the cache any more: as the settings are without one."""
        self._apply(handle, cache, 1.0 if self.policy.always else 0.0, step)

    def __str__(self) -> str:
        ratio, made = self.policy.ratio, self.policy.profile.key
        stale = "" if self.current else f", {_STALE}"
        choice = f"on, spec_ratio {ratio:g}" if ratio else "off"
        return f"{choice} after {self.turns} changes, by the profile of {made}{stale}"

    def _apply(self, handle: "PatchHandle", cache: "SparseCache", ratio: float, step: Step) -> None:
        """The layers' plans and what they remember; counters are looked at from the second token on, since the first
        may have no prediction."""
        self._before, self._after, self._mark = None, None, self._tokens + 1
        self.turns += self._tokens > 0
        for layer in cache.layers:
            if (plan := getattr(layer, "plan", None)) is None or plan.status != "sparse":
                continue
            blocks = math.floor(ratio * plan.free_blocks)
            if blocks != plan.predicted_blocks:
                layer.plan = plan._replace(predicted_blocks=blocks)
                _restart(handle, cache, layer, step)


def _restart(handle: "PatchHandle", cache: "SparseCache", layer: "SparseLayer", step: Step) -> None:
    """What the layer remembers, as its plan has it now: an EMA and a prediction for the coming token, or neither."""
    layer.settle()
    prior, plan = layer.memory.prior, layer.plan
    if prior is None or not layer.summaries:
        return
    if not plan.predicted_blocks:
        layer.memory.prior = Prior(prior.winners, threshold=prior.threshold)
        return
    batch, heads, blocks = *prior.winners.shape[:2], layer.summaries[0].shape[2]
    device, decoded = prior.winners.device, step.count - step.first_decode
    if prior.level is None:
        unknown = torch.zeros((batch, heads, blocks), device=device)
        prior = prior._replace(level=unknown + float("nan"), trend=unknown)
    prior = prior._replace(expected=None)
    if decoded:
        column, at = step.begin + step.first_decode, len(cache.decode_columns) - decoded
        token = token_at(cache.tokens, column, at, plan, device, handle.inv_freq)
        ema = layer.memory.coefficients(plan.ema or DEFAULT_EMA, batch, device)
        prior = prior._replace(expected=expect(layer, prior, token, heads, handle.kernels.module, ema))
    layer.memory.prior = prior


def _profile_for(handle: "PatchHandle", query: torch.Tensor, kv_heads: int) -> Profile | None:
    plan, kernels = handle.sparse_plan, handle.kernels
    assert plan is not None
    key = Key(
        device_name(query.device), kernels.backend, kernels.version, query.shape[1], kv_heads, query.shape[3],
        str(query.dtype).removeprefix("torch."), query.shape[0], plan.selector, plan.block_size, plan.blocks,
    )  # fmt: skip
    if key not in handle.profiles:
        try:
            handle.profiles[key] = find(key)
        except ValueError as error:  # a file is no reason to stop generating
            handle.profiles[key] = None
            handle.warn(f"profile {key}", f"no profile is used: {error}")
    return handle.profiles[key]


def choose(handle: "PatchHandle", cache: "SparseCache", step: Step, query: torch.Tensor, kv_heads: int) -> None:
    """Before a forward's first layer of full attention attends: let the cache's layers speculate as pays, where that
    is left to a profile and there is one. query: [B, H * G, Q, D]."""
    if not handle.config.leaves_to_profile or handle.sparse_plan is None or torch.compiler.is_compiling():
        return
    asked = (query.device, query.shape[0])
    if cache.budget_for != asked:
        cache.budget_for = asked
        profile = _profile_for(handle, query, kv_heads)
        if profile is not None:
            given = None if handle.config.spec_ratio == "profile" else handle.config.spec_ratio
            current = profile.made.get("sources") == sources_of(handle.kernels.module)
            cache.budget = Budget(Policy(profile, given, always=handle.config.speculate is True), current)
        elif cache.budget is not None:  # of another batch size
            cache.budget.leave(handle, cache, step)
            cache.budget = None
    if cache.budget is not None:
        cache.budget.forward(handle, cache, handle.recorder.statistics_of(cache), step)
        handle.budget = cache.budget
