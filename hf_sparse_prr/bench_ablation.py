"""What each part of PRR is worth, as the PRR paper's Table 8 takes it apart (arXiv 2606.30389): the last selection
reused, repair in place of doing it again, the EMA in place of the last selection, and exactness on top.

    S1     attention over the last token's blocks beside the selection; kept if that chose the same, else done anew
    S2     S1, but only blocks that are missing are attended to; those that weren't selected stay in, as in the paper
    S3     S2 with what the EMA predicts in place of the last token's blocks
    exact  S3 without what wasn't selected: what this library runs
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .bench import described, machine, measured_kernels
from .bench_exact import check_bits
from .bench_problem import Case, Problem, cold_layers, predicted_at
from .bench_segment import check_arguments, history
from .bench_stages import Works
from .bench_time import Call, Captured, Taken, in_turns

SETTINGS = ("serial", "S1", "S2", "S3", "exact")
_MISS, _HIT = "S1, another selection", "S1, the same selection"  # the two ways that S1 may go


def _winners(case: Case) -> torch.Tensor:
    assert case.hint is not None
    return case.hint


class Ablation:
    """The settings over a problem's layers and its last token. hits: of the last selection and of the EMA, None for
    what random K/V and queries give."""

    def __init__(self, problem: Problem, works: Works, hits: tuple[float, float] | None) -> None:
        self.problem, self.works, self.kernels = problem, works, works.kernels
        self._last = [_winners(case) for case in works.cases]
        self._ema = [case.expected[None].predicted for case in works.cases]
        if hits is not None:
            self._last, self._ema = ([self._forced_rate(i, rate) for i in range(len(works.cases))] for rate in hits)

    def _forced_rate(self, index: int, rate: float) -> torch.Tensor:
        selection = self.works.cases[index].selection
        return predicted_at(rate, selection.free, selection.scores, index)

    def _early(self, predicted: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        forced, ascending = self.works.token.forced, self.kernels.ascending  # the order that a selection has
        return [ascending(torch.cat([forced.expand(-1, each.shape[1], -1), each], dim=2)) for each in predicted]

    def _overlapped(self, predicted: Sequence[torch.Tensor], then: Callable[..., torch.Tensor]) -> Call:
        """`then` (layer, selected, early, partials), after the selection and the attention beside it."""
        return self.works.beside(self._early(predicted), then)

    def _union(self, index: int, selected: torch.Tensor, early: torch.Tensor, partials: Any) -> torch.Tensor:
        kernels = self.kernels
        extra = early.masked_fill(kernels.slots_of(early, selected) >= 0, -1)
        attended = kernels.ascending(torch.cat([selected, extra], dim=2))
        return self.works.merged(index, attended, early, partials)

    def calls(self) -> dict[str, Call]:
        """fp32 [B, H, G, D] a call, by setting; S1 as its two ways."""
        merge = self.kernels.merge_partials
        return {
            "serial": self.works.serial,
            _MISS: self._overlapped(self._last, lambda index, selected, *_: self.works.attended(index, selected)),
            _HIT: self._overlapped(self._last, lambda index, selected, early, partials: merge(partials)),
            "S2": self._overlapped(self._last, self._union),
            "S3": self._overlapped(self._ema, self._union),
            "exact": self._overlapped(self._ema, self.works.merged),
        }

    def rates(self) -> dict[str, float]:
        """Hit rate of the last selection and of the EMA, and how often the former was the whole selection."""
        cases, slots = self.works.cases, self.kernels.slots_of
        chosen = sum(int((case.selection.free >= 0).sum()) for case in cases)
        hits = {
            name: sum(
                int((slots(case.selection.free, each) >= 0).sum()) for case, each in zip(cases, guess, strict=True)
            )
            for name, guess in (("last", self._last), ("ema", self._ema))
        }
        pairs = zip(cases, self._last, strict=True)
        same = sum(torch.equal(case.selection.free.sort().values, each.sort().values) for case, each in pairs)
        return {"last": hits["last"] / chosen, "ema": hits["ema"] / chosen, "whole": same / len(cases)}


def _measure(
    problem: Problem, hits: tuple[float, float] | None, rounds: int, progress: Callable[[str, int, int | None], None]
) -> dict[str, Any]:
    """One context."""
    layers, device, name = len(problem.layers), problem.device, f"{problem.context} tokens"
    progress(f"{name}: exactness", 0, None)
    cases, token, _ = history(problem, (None,))
    works = Works(cases, token, problem.plans["prr"], problem.kernels, problem.scale)
    ablation = Ablation(problem, works, hits)
    calls, rates = ablation.calls(), ablation.rates()
    outputs = {key: call(0) for key, call in calls.items()}
    for key in (_MISS, "exact", *([_HIT] if rates["whole"] == 1 else [])):
        check_bits(f"the output of {key} at {name}", outputs[key], outputs["serial"])
    predict = works.stages((None,))["predict"].call
    everything = {**calls, "predict": predict}
    if device.type == "cuda":
        times: dict[str, Taken] = {}
        for done, (key, call) in enumerate(everything.items()):
            progress(f"{name}: times", done, len(everything))
            times[key] = Captured(call, layers, device).timed(rounds)
    else:
        times = in_turns(everything, layers, device, rounds, lambda *at: progress(f"{name}: times", *at))
    us = {key: taken.us for key, taken in times.items()}
    us["S1"] = rates["whole"] * us.pop(_HIT) + (1 - rates["whole"]) * us.pop(_MISS)
    largest = float(outputs["serial"].abs().max())
    error = {key: float((outputs[key] - outputs["serial"]).abs().max()) / largest for key in ("S2", "S3", "exact")}
    rows = {
        key: {"us": us[key], "to_serial": us[key] / us["serial"], "error": {"serial": 0.0, "S1": 0.0, **error}[key]}
        for key in SETTINGS
    }
    return {"context": problem.context, "layers": layers, "settings": rows, "rates": rates, "predict_us": us["predict"]}


@torch.no_grad()
def bench_ablation(
    shapes: Sequence[str] = ("llama-3.1-8b", "glm-4-9b"),
    contexts: Sequence[int] = (2**14, 2**17, 2**19),
    selector: str = "quest",
    budget: int = 4096,
    block_size: int | str = "auto",
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    rounds: int = 25,
    steps: int = 8,
    hits: tuple[float, float] | None = None,
    layers: int | None = None,
    kernels: str | Path | ModuleType = "auto",
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> dict[str, Any]:
    """Scores, selection and attention of one token in a layer, by setting, shape and context, as `bench_segment` times
    them. The EMA's own work runs beside the repair and is in none of the settings: "predict_us" is what it takes.

    "error": of the output, the largest difference from serial's, of the largest value of that; S1 and exact have its
    bits, or ExactnessError is raised.

    Args:
        hits: hit rates of the last selection and of the EMA; by default what random queries give, each correlated with
            the one before it by 0.9.

    Raises:
        ValueError: a shape, context or setting that can't be.  KernelError: kernels that can't be loaded.
    """
    where, loaded = torch.device(device), measured_kernels(kernels)
    found = []
    every = [check_arguments(shape, contexts, selector, budget, block_size, 0.9, hits) for shape in shapes]
    for shape, (sizes, plans) in zip(shapes, every, strict=True):
        each: dict[str, Any] = {"shape": shape, "contexts": []}
        for context in contexts:
            if where.type == "cuda":
                torch.cuda.empty_cache()  # what the last context held counts as free
            count = layers or cold_layers(sizes, context, plans["prr"], batch, dtype, where)
            problem = Problem(sizes, context, plans, batch, dtype, where, count, steps, 0.9, loaded.module)
            each["contexts"].append(_measure(problem, hits, rounds, progress))
            del problem  # its K/V are given back before the next one's are made
        found.append(each)
    return {
        "bench": "ablation",
        **machine(device, dtype),
        "kernels": described(loaded),
        "timed_by": "CUDA graph" if where.type == "cuda" else "clock",
        "batch": batch,
        "selector": plans["prr"].selector,
        "budget": budget,
        "block_size": plans["prr"].block_size,
        "hits": hits,
        "rounds": rounds,
        "shapes": found,
    }
