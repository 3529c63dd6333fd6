"""What is timed, once a layer: the segment of a decode step in each setting, and the stages of a whole step."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from .bench_problem import Case, Rate
from .bench_time import Call
from .config import DEFAULT_EMA, LayerPlan
from .decode import Token, select
from .dense import without_cudnn
from .overlap import Overlap
from .selectors import SELECTORS, Columns, Scope


class Work(NamedTuple):
    """floor: bytes of K/V and summaries that it has to read, a layer; None where what it touches was just written, or
    is no more than that: partials, scores, lists.  moved: the floor and what was predicted in vain.
    hit_rate: the share of the free blocks that was predicted."""

    call: Call
    floor: float | None = None
    moved: float | None = None
    hit_rate: float | None = None


def _reading(size: float, call: Call) -> Work:
    """A call that moves no more than its floor."""
    return Work(call, size, size)


def named(rate: Rate, kind: str = "prr") -> str:
    """The name of a setting or stage at a hit rate."""
    return f"{kind} natural" if rate is None else f"{kind} {rate:g}"


class Works:
    """Settings and stages over the same layers and token."""

    def __init__(self, cases: Sequence[Case], token: Token, plan: LayerPlan, kernels: ModuleType, scale: float) -> None:
        self.cases, self.token, self.plan, self.kernels, self.scale = cases, token, plan, kernels, scale
        self._how: dict[str, Any] = dict(scale=scale, block_size=plan.block_size)
        self._selector = SELECTORS[plan.selector]
        layer, heads = cases[0].layer, cases[0].query.shape[1]
        self._block = plan.block_size * layer.bytes_per_token
        scored = int((token.last - plan.sink_blocks).clamp(min=0).sum())
        self.summaries = float(heads * scored * layer.bytes_per_summary)
        self.blocks = self._block * self._mean(lambda case: case.selection.selected >= 0)
        self.whole = float(cases[0].query.shape[0] * heads * layer.bytes_per_token * (token.column + 1))

    def _mean(self, chosen: Callable[[Case], torch.Tensor]) -> float:
        """Blocks a layer."""
        return sum(int(chosen(case).sum()) for case in self.cases) / len(self.cases)

    def _data(self, case: Case) -> tuple[torch.Tensor, ...]:
        return case.query, case.layer.keys, case.layer.values, self.token.valid, self.token.start

    def _held(self, blocks: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
        return self.kernels.slots_of(blocks, among) >= 0

    def hit_rate(self, rate: Rate) -> float:
        """That the predictions reach."""
        hits = self._mean(lambda case: self._held(case.selection.free, case.expected[rate].predicted))
        return hits / self._mean(lambda case: case.selection.free >= 0)

    def wrong(self, rate: Rate) -> float:
        """Bytes of K/V that are predicted in vain, a layer."""
        hits = self._mean(lambda case: self._held(case.expected[rate].predicted, case.selection.free))
        return self._block * (self._mean(lambda case: case.expected[rate].predicted >= 0) - hits)

    def _dense(self, grouped: bool) -> Call:
        """SDPA over the whole context: as transformers calls it, or with a KV head's query heads as its query tokens,
        which is the same without a copy of K/V for each (CPU, 8 KV heads of 8 x 128, 16K: 14 ms against 54)."""
        end = self.token.column + 1

        def call(index: int) -> torch.Tensor:
            case = self.cases[index]
            keys, values = case.layer.keys[:, :, :end], case.layer.values[:, :, :end]
            with without_cudnn():
                if grouped:
                    return scaled_dot_product_attention(case.query, keys, values, scale=self.scale)
                query = case.query.flatten(1, 2)[:, :, None]
                return scaled_dot_product_attention(query, keys, values, scale=self.scale, enable_gqa=True)

        return call

    def _serial(self, index: int) -> torch.Tensor:
        case = self.cases[index]
        selection = select(case.layer, case.query, self.token, self.kernels, self.scale, case.hint)
        return self._attend(case, selection.selected)

    def _attend(self, case: Case, selected: torch.Tensor) -> torch.Tensor:
        nothing = selected[:, :, :0]
        return self.kernels.repair_merge(*self._data(case), selected, self.token.end, nothing, None, **self._how)

    def _prr(self, rate: Rate) -> Call:
        def call(index: int) -> torch.Tensor:
            case = self.cases[index]
            early, overlap = case.expected[rate].early, Overlap(case.query.device)
            with overlap.beside():
                partials = self._partials(case, early)
            hint = case.expected[rate].predicted
            selection = select(case.layer, case.query, self.token, self.kernels, self.scale, hint)
            overlap.join()
            return self._repair(case, selection.selected, early, partials)

        return call

    def select(self, index: int) -> torch.Tensor:
        """Scores and the choice of blocks, as one stage."""
        case = self.cases[index]
        return select(case.layer, case.query, self.token, self.kernels, self.scale, case.hint).selected

    def partials(self, index: int, blocks: torch.Tensor) -> Any:
        """Attention over each of the blocks."""
        return self._partials(self.cases[index], blocks)

    def serial(self, index: int) -> torch.Tensor:
        """Scores, selection and attention, one after the other."""
        return self.attended(index, self.select(index))

    def prr(self, early: Sequence[torch.Tensor]) -> Call:
        """The same with attention over `early` of each layer beside the selection, and the rest after it."""
        return self.beside(early, self.merged)

    def beside(self, early: Sequence[torch.Tensor], then: Callable[..., torch.Tensor]) -> Call:
        """`then` (layer, selected, early, partials), after the selection and the attention beside it."""

        def call(index: int) -> torch.Tensor:
            overlap = Overlap(self.cases[index].query.device)
            with overlap.beside():
                partials = self.partials(index, early[index])
            selected = self.select(index)
            overlap.join()
            return then(index, selected, early[index], partials)

        return call

    def attended(self, index: int, selected: torch.Tensor) -> torch.Tensor:
        """Attention over the blocks, as serial has it."""
        return self._attend(self.cases[index], selected)

    def merged(self, index: int, selected: torch.Tensor, early: torch.Tensor, partials: Any) -> torch.Tensor:
        """Attention over `selected`, of which `partials` of `early` are there."""
        return self._repair(self.cases[index], selected, early, partials)

    def repair(self, early: Sequence[torch.Tensor]) -> Call:
        """What is left to do of a step once the selection is known, where `early` of each layer was attended to."""
        held = [self._partials(case, blocks) for case, blocks in zip(self.cases, early, strict=True)]

        def call(index: int) -> torch.Tensor:
            case = self.cases[index]
            return self._repair(case, case.selection.selected, early[index], held[index])

        return call

    def _partials(self, case: Case, blocks: torch.Tensor) -> Any:
        return self.kernels.block_partials(*self._data(case), blocks, self.token.end, **self._how)

    def _repair(self, case: Case, selected: torch.Tensor, early: torch.Tensor, partials: Any) -> torch.Tensor:
        return self.kernels.repair_merge(*self._data(case), selected, self.token.end, early, partials, **self._how)

    def settings(self, rates: Sequence[Rate]) -> dict[str, Work]:
        """Scores, selection and attention of one token: fp32 or SDPA's dtype [B, H, G, D] a call."""
        floor = self.summaries + self.blocks
        works = {
            "dense": _reading(self.whole, self._dense(grouped=False)),
            "dense_grouped": _reading(self.whole, self._dense(grouped=True)),
            "serial": _reading(floor, self._serial),
        }
        for rate in rates:
            works[named(rate)] = Work(self._prr(rate), floor, floor + self.wrong(rate), self.hit_rate(rate))
        return works

    def stages(self, rates: Sequence[Rate]) -> dict[str, Work]:
        """Each alone, on what the one before it gives.

        score, select, attend: what serial runs.  partials, merge: attend in two.  repair RATE: what PRR runs once the
        selection is known.  predict: the EMA and the next token's prediction.  tally: the counters.  append: the new
        token's K/V and its block's summary. The last three are in no setting.
        """
        cases, token, plan, kernels = self.cases, self.token, self.plan, self.kernels
        scope = Scope(plan.sink_blocks, token.last, token.length, self.scale)
        partials = [self._partials(case, case.selection.selected) for case in cases]
        choose, score = kernels.select_blocks, self._selector.checked_scores
        works = {
            "score": _reading(
                self.summaries, lambda i: score(kernels, cases[i].query, cases[i].layer.summaries, scope, plan)
            ),
            "select": Work(
                lambda i: choose(cases[i].selection.scores, token.forced, plan.free_blocks, hint=cases[i].hint)
            ),
            "partials": _reading(self.blocks, lambda i: self._partials(cases[i], cases[i].selection.selected)),
            "merge": Work(lambda i: kernels.merge_partials(partials[i])),
            "attend": _reading(self.blocks, lambda i: self._attend(cases[i], cases[i].selection.selected)),
        }
        for rate in rates:
            works[named(rate, "repair")] = self._repair_stage(rate)
        return {**works, **self._beside(rates[0])}

    def _repair_stage(self, rate: Rate) -> Work:
        call = self.repair([case.expected[rate].early for case in self.cases])
        found = self._mean(lambda case: self._held(case.selection.selected, case.expected[rate].early))
        missing = self.blocks - self._block * found
        return Work(call, missing, missing, self.hit_rate(rate))

    def _beside(self, rate: Rate) -> dict[str, Work]:
        """What a step does off its critical path, and the append before it."""
        cases, token, plan, kernels = self.cases, self.token, self.plan, self.kernels
        scores = [case.selection.scores for case in cases]
        batch, heads, blocks = scores[0].shape
        ema = torch.tensor([DEFAULT_EMA] * batch, dtype=torch.float32, device=scores[0].device)
        slots = min(plan.predicted_blocks, blocks)
        state = [(kernels.normalise(each), torch.zeros_like(each)) for each in scores]
        numbers = [torch.zeros((batch, heads, 7), dtype=torch.float64, device=each.device) for each in scores]
        new = [tuple(buffer[:, :, -1:].clone() for buffer in (case.layer.keys, case.layer.values)) for case in cases]

        def predict(index: int) -> Any:
            step = kernels.ema_step(scores[index], *state[index], ema, plan.sink_blocks, token.next_last)
            return step, kernels.select_blocks(step.expected, token.next_forced, slots)

        def count(index: int) -> None:
            selected, free, _ = cases[index].selection
            predicted, importance = cases[index].expected[rate].predicted, state[index][0]
            kernels.tally(numbers[index], selected, free, predicted, importance, plan.sink_blocks, token.last)

        def append(index: int) -> None:
            layer = cases[index].layer
            kernels.append_states(layer.keys, layer.values, *new[index], token.end)
            columns = Columns(layer.keys, token.valid, token.start, token.end, 1)
            self._selector.summarise(kernels, layer.summaries, columns, plan)

        return {"predict": Work(predict), "tally": Work(count), "append": Work(append)}
