"""Measure a profile: what selection, speculation, repair and whole decode steps of a layer take, by context, spec_ratio
and hit rate. Nothing is timed before its bits were seen to be those of serial decoding."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .bench import machine, measured_kernels
from .bench_exact import check_bits
from .bench_problem import Case, Problem, cold_layers, predicted_at
from .bench_segment import check_arguments, history
from .bench_stages import Works
from .bench_time import Call, Captured, in_turns
from .config import DEFAULT_EMA, LayerPlan
from .decode import Token, decode_token
from .predictor import Expected, Memory, Prior
from .profile import At, Cell, Key, Profile
from .report import Statistics

CONTEXTS = tuple(2**power for power in range(12, 20))  # 4K .. 512K
RATIOS = (0.5, 0.75, 1.0, 1.5, 2.0)
HITS = (1.0, 0.95, 0.8, 0.5, 0.0)  # of what the ratio has room for
STEPS = 3  # decoded tokens, of which the last is timed


class Steps:
    """Whole decode steps over a problem's layers, each from the state before its last token."""

    def __init__(self, problem: Problem, cases: Sequence[Case], token: Token) -> None:
        self.problem, self.cases, self.token = problem, cases, token
        self._counters = Statistics(1)

    def serial(self) -> Call:
        """fp32 [B, H, G, D] a call."""
        priors = [Prior(self._winners(case)) for case in self.cases]
        return self._call(self.problem.plans["serial"], priors)

    def prr(self, ratio: float, hit_rate: float) -> Call:
        """As `serial`, with floor(ratio * free blocks) predictions that hit that share of the selected ones."""
        plan = at_ratio(self.problem.plans["prr"], ratio)
        priors = []
        for index, case in enumerate(self.cases):
            level = self.problem.kernels.normalise(case.selection.scores)
            expected = self.expected(index, plan, hit_rate)
            priors.append(Prior(self._winners(case), level, torch.zeros_like(level), expected))
        return self._call(plan, priors)

    def expected(self, index: int, plan: LayerPlan, hit_rate: float) -> Expected:
        """What the layer at `index` predicts."""
        free, scores = self.cases[index].selection.free, self.cases[index].selection.scores
        predicted = predicted_at(hit_rate, free, scores, index, min(plan.predicted_blocks, scores.shape[2]))
        forced = self.token.forced.expand(-1, free.shape[1], -1)
        return Expected(torch.cat([forced, predicted], dim=2), predicted)

    def _winners(self, case: Case) -> torch.Tensor:
        assert case.hint is not None
        return case.hint

    def _call(self, plan: LayerPlan, priors: Sequence[Prior]) -> Call:
        problem = self.problem
        ema = torch.tensor([DEFAULT_EMA], device=problem.device).repeat(self.cases[0].query.shape[0], 1)

        def call(index: int) -> torch.Tensor:
            case = self.cases[index]
            layer = case.layer
            layer.plan, layer.memory = plan, Memory()
            layer.memory.prior, layer.memory.ema = priors[index], ema
            given = (case.query, self.token, problem.kernels, problem.scale, self._counters, False)
            return decode_token(layer, 0, *given)[0]

        return call


def at_ratio(plan: LayerPlan, ratio: float) -> LayerPlan:
    """The plan with floor(ratio * free blocks) predictions."""
    return plan._replace(predicted_blocks=math.floor(ratio * plan.free_blocks))


def _timed(
    call: Call, layers: int, device: torch.device, rounds: int, expected: torch.Tensor | None, what: str
) -> float:
    """Microseconds. ExactnessError where its first result isn't `expected`, in or out of a CUDA graph."""
    if expected is not None:
        check_bits(what, call(0), expected)
    if device.type != "cuda":
        return in_turns({what: call}, layers, device, rounds, lambda *_: None)[what].us
    captured = Captured(call, layers, device)
    if expected is not None:
        captured.replay()
        check_bits(f"{what} in a CUDA graph", captured.results[0], expected)
    return captured.timed(rounds).us


def _measure(
    problem: Problem, ratios: Sequence[float], rounds: int, progress: Callable[[str, int, int | None], None]
) -> At:
    """One context."""
    layers, device, name = len(problem.layers), problem.device, f"{problem.context} tokens"
    progress(f"{name}: exactness", 0, None)
    cases, token, _ = history(problem, (1.0,))
    works, steps = (
        Works(cases, token, problem.plans["prr"], problem.kernels, problem.scale),
        Steps(problem, cases, token),
    )
    done, total = 0, 2 + len(ratios) * (1 + 2 * len(HITS))

    def timed(call: Call, what: str, expected: torch.Tensor | None = None) -> float:
        nonlocal done
        progress(f"{name}: times", done, total)
        done += 1
        return _timed(call, layers, device, rounds, expected, f"{what} at {name}")

    select = timed(works.select, "selection")
    serial = steps.serial()
    expected = serial(0)
    times = select, timed(serial, "a serial step", expected)
    speculate, cells = {}, []
    for ratio in ratios:
        plan = at_ratio(problem.plans["prr"], ratio)
        early = [steps.expected(index, plan, min(ratio, 1.0)).early for index in range(layers)]
        speculate[ratio] = timed(lambda index, early=early: works.partials(index, early[index]), "speculation")  # type: ignore[misc]
        for share in HITS:
            hit = share * min(ratio, 1.0)
            early = [steps.expected(index, plan, hit).early for index in range(layers)]
            repair = timed(works.repair(early), "repair")
            step = timed(steps.prr(ratio, hit), f"a step of PRR, spec_ratio {ratio:g}, hits {hit:g}", expected)
            cells.append(Cell(ratio, hit, repair, step))
    return At(problem.context, *times, speculate, tuple(cells))


@torch.no_grad()
def bench_profile(
    shape: str = "llama-3.1-8b",
    contexts: Sequence[int] = CONTEXTS,
    selector: str = "quest",
    budget: int = 4096,
    block_size: int | str = "auto",
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    rounds: int = 12,
    layers: int | None = None,
    ratios: Sequence[float] = RATIOS,
    kernels: str | Path | ModuleType = "auto",
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> Profile:
    """The profile of that shape, selector and device, of the contexts that are longer than the budget. K/V are random
    and hit rates forced, as in `bench_segment`; on a GPU each time is that of a CUDA graph over layers whose K/V come
    from memory, the median of `rounds` replays.

    Raises:
        ValueError: a shape, context, ratio or setting that can't be.  KernelError: kernels that can't be loaded.
        ExactnessError: a step of PRR that hasn't the bits of the serial one.
    """
    wrong = [ratio for ratio in ratios if not 0 < ratio <= 16]
    if wrong or not ratios:
        raise ValueError(
            f"spec_ratio: expected numbers above 0 and up to 16, got {', '.join(map(str, wrong)) or 'none'}"
        )
    where, loaded = torch.device(device), measured_kernels(kernels)
    sizes, plans = check_arguments(shape, (), selector, budget, block_size, 0.9)
    plan = plans["prr"]
    longer = sorted({context for context in contexts if context > plan.fits})
    sizes, plans = check_arguments(shape, longer, selector, budget, block_size, 0.9)
    if not longer:
        raise ValueError(f"context: expected some above the {plan.fits} tokens of the budget, got {list(contexts)}")
    measured = []
    for context in longer:
        if where.type == "cuda":
            torch.cuda.empty_cache()  # what the last context held counts as free
        count = layers or cold_layers(sizes, context, plan, batch, dtype, where)
        problem = Problem(sizes, context, plans, batch, dtype, where, count, STEPS, 0.9, loaded.module)
        measured.append(_measure(problem, ratios, rounds, progress))
        del problem  # its K/V are given back before the next one's are made
    made: dict[str, Any] = {**machine(device, dtype), "shape": shape, "kernels": loaded.source, "rounds": rounds}
    key = Key(
        made["device"], loaded.backend, loaded.version, sizes.heads, sizes.kv_heads, sizes.head_dim, made["dtype"],
        batch, plan.selector, plan.block_size, plan.blocks,
    )  # fmt: skip
    return Profile(key, made, tuple(measured))
