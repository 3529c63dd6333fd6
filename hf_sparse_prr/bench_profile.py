"""Measure a profile: what selection, speculation, repair and all of them together take, a layer, by context, spec_ratio
and hit rate. Nothing is timed before its bits were seen to be those of serial decoding."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .bench import machine, measured_kernels
from .bench_exact import check_bits
from .bench_problem import Problem, cold_layers, predicted_at
from .bench_segment import check_arguments, history
from .bench_stages import Works
from .bench_time import Call, Captured, in_turns
from .config import LayerPlan
from .profile import At, Cell, Key, Profile, sources_of

CONTEXTS = tuple(2**power for power in range(12, 20))  # 4K .. 512K
RATIOS = (0.5, 0.75, 1.0, 1.5, 2.0)
HITS = (1.0, 0.95, 0.8, 0.5, 0.0)  # of what the ratio has room for
STEPS = 3  # decoded tokens, of which the last is timed


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


class Predictions:
    """What a layer at a context attends to early, by ratio and hit rate."""

    def __init__(self, works: Works) -> None:
        self.works = works

    def early(self, ratio: float, hit_rate: float) -> list[torch.Tensor]:
        """Of each layer, int32 [B, H, F + P]: forced blocks, then floor(ratio * free blocks) predictions that hit that
        share of the selected ones."""
        return [self._of(index, at_ratio(self.works.plan, ratio), hit_rate) for index in range(len(self.works.cases))]

    def _of(self, index: int, plan: LayerPlan, hit_rate: float) -> torch.Tensor:
        selection = self.works.cases[index].selection
        slots = min(plan.predicted_blocks, selection.scores.shape[2])
        predicted = predicted_at(hit_rate, selection.free, selection.scores, index, slots)
        forced = self.works.token.forced.expand(-1, predicted.shape[1], -1)
        return torch.cat([forced, predicted], dim=2)


def _measure(
    problem: Problem,
    ratios: Sequence[float],
    hits: Sequence[float],
    rounds: int,
    progress: Callable[[str, int, int | None], None],
) -> At:
    """One context."""
    layers, device, name = len(problem.layers), problem.device, f"{problem.context} tokens"
    progress(f"{name}: exactness", 0, None)
    cases, token, _ = history(problem, (1.0,))
    works = Works(cases, token, problem.plans["prr"], problem.kernels, problem.scale)
    predictions = Predictions(works)
    done, total = 0, 2 + len(ratios) * (1 + 2 * len(hits))

    def timed(call: Call, what: str, expected: torch.Tensor | None = None) -> float:
        nonlocal done
        progress(f"{name}: times", done, total)
        done += 1
        return _timed(call, layers, device, rounds, expected, f"{what} at {name}")

    select = timed(works.select, "selection")
    expected = works.serial(0)
    serial = timed(works.serial, "serial", expected)
    speculate, cells = {}, []
    for ratio in ratios:
        early = predictions.early(ratio, min(ratio, 1.0))
        speculate[ratio] = timed(partial(_speculate, works, early), "speculation")
        for share in hits:
            hit = share * min(ratio, 1.0)
            early = predictions.early(ratio, hit)
            repair = timed(works.repair(early), "repair")
            what = f"PRR, spec_ratio {ratio:g}, hits {hit:g},"
            cells.append(Cell(ratio, hit, repair, timed(works.prr(early), what, expected)))
    return At(problem.context, select, serial, speculate, tuple(cells))


def _speculate(works: Works, early: Sequence[torch.Tensor], index: int) -> Any:
    return works.partials(index, early[index])


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
    hits: Sequence[float] = HITS,
) -> Profile:
    """The profile of that shape, selector and device, of the contexts that are longer than the budget, at hit rates
    that are the shares `hits` of what a ratio has room for. K/V are random and hit rates forced, as in `bench_segment`;
    on a GPU each time is that of a CUDA graph over layers whose K/V come from memory, the median of `rounds` replays.

    Raises:
        ValueError: a shape, context, ratio or setting that can't be.  KernelError: kernels that can't be loaded.
        ExactnessError: a step of PRR that hasn't the bits of the serial one.
    """
    wrong = [ratio for ratio in ratios if not 0 < ratio <= 16]
    if wrong or not ratios:
        raise ValueError(
            f"spec_ratio: expected numbers above 0 and up to 16, got {', '.join(map(str, wrong)) or 'none'}"
        )
    if not hits or not all(0 <= share <= 1 for share in hits):
        raise ValueError(f"hits: expected numbers from 0 to 1, got {', '.join(map(str, hits)) or 'none'}")
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
        measured.append(_measure(problem, ratios, hits, rounds, progress))
        del problem  # its K/V are given back before the next one's are made
    # A folder by its name: where it lies is nobody's business
    name = Path(loaded.source).resolve().name if loaded.source == str(kernels) else loaded.source
    made: dict[str, Any] = {**machine(device, dtype), "shape": shape, "kernels": f"{name} {loaded.version}"}
    made |= {"sources": sources_of(loaded.module), "rounds": rounds}
    key = Key(
        made["device"], loaded.backend, loaded.version, sizes.heads, sizes.kv_heads, sizes.head_dim, made["dtype"],
        batch, plan.selector, plan.block_size, plan.blocks,
    )  # fmt: skip
    return Profile(key, made, tuple(measured))
