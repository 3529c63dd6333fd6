"""Time the selection + attention segment of one layer's decode step: dense, serial sparse and PRR by hit rate, and the
stages of a step, in one process, over the same random K/V and the same query. Nothing is timed before it was seen to be
exact."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .bench import bandwidth_of, described, machine, measured_kernels
from .bench_exact import check_bits, check_serial
from .bench_problem import Case, Problem, Rate, cold_layers
from .bench_stages import Work, Works
from .bench_time import Captured, Taken, in_turns
from .config import DEFAULT_EMA, LayerPlan, SparseConfig
from .decode import Token
from .predictor import Memory
from .report import Statistics, rates_of
from .shapes import Shape
from .shapes import shape as shape_named

CONTEXTS = (1024, 2**20)  # tokens: the shortest and the longest
GPU_RATES: tuple[Rate, ...] = (1.0, 0.95, 0.0)
ROUNDS, REPLAYS = 5, 50


def history(problem: Problem, rates: Sequence[Rate]) -> tuple[list[Case], Token, dict[str, float]]:
    """Decode the tokens: every layer by PRR, the first one serially too. Returns the layers before the last token,
    which is the timed one, and how far the first one's results were from their oracles. ExactnessError."""
    serial, worst = Memory(), {"scores_error": 0.0, "output_error": 0.0}
    for step in range(problem.steps):
        token = problem.append(step)
        cases = []
        for index, layer in enumerate(problem.layers):
            if step == problem.steps - 1:
                cases.append(problem.case(index, token, rates))
            counters = problem.counters if step else Statistics(1)  # nothing is predicted of the first one
            prr = problem.decode(index, "prr", layer.memory, token, counters)
            if index == 0:
                expected = problem.decode(index, "serial", serial, token, Statistics(1))
                check_bits(f"PRR's blocks of step {step}", prr[1], expected[1])
                check_bits(f"PRR's output of step {step}", prr[0], expected[0])
                query = problem.queries[index][step]
                found = check_serial(layer, query, token, problem.kernels, problem.scale, expected)
                worst = {name: max(value, worst[name]) for name, value in found.items()}
    return cases, token, worst


def _exact(works: Works, settings: dict[str, Work], worst: dict[str, float]) -> dict[str, Any]:
    """ExactnessError unless the timed token is right in every layer and setting. Returns what was compared."""
    for index, case in enumerate(works.cases):
        serial = settings["serial"].call(index), case.selection.selected
        found = check_serial(case.layer, case.query, works.token, works.kernels, works.scale, serial)
        worst = {name: max(value, worst[name]) for name, value in found.items()}
        for name, work in settings.items():
            if name.startswith("prr"):
                check_bits(f"the output of {name} in layer {index}", work.call(index), serial[0])
    return {"steps": works.token.step + 1, "prr_equals_serial": "bitwise", "topk": "stable sort", **worst}


def _replayed(
    settings: dict[str, Work], stages: dict[str, Work], layers: int, device: torch.device, replays: int,
    progress: Callable[[int, int], None],
) -> dict[str, Taken]:  # fmt: skip
    """The time of each, from a CUDA graph of its own. ExactnessError where a replay of serial or PRR doesn't give
    the bits that the calls outside of a graph give."""
    times, everything = {}, {**settings, **stages}
    for done, (name, work) in enumerate(everything.items()):
        progress(done, len(everything))
        captured = Captured(work.call, layers, device)
        if name in settings and not name.startswith("dense"):
            expected = [work.call(index) for index in range(layers)]
            captured.replay()
            for step, result in enumerate(captured.results):
                check_bits(f"{name} in a CUDA graph", result, expected[step % layers], "the same without one")
        times[name] = captured.timed(replays)
    return times


def _figures(taken: Taken, work: Work, bandwidth: float | None) -> dict[str, Any]:
    """One row: the time, bytes, GB/s of what is moved, and of the time the share that the floor takes."""
    us, row = taken.us, dict[str, Any](taken._asdict())
    row.update(floor_bytes=work.floor, moved_bytes=work.moved, hit_rate=work.hit_rate)
    row["gb_per_s"] = work.moved / us / 1e3 if work.moved else None
    row["floor_us"] = 1e6 * work.floor / bandwidth if work.floor and bandwidth else None
    row["floor_share"] = row["floor_us"] / us if row["floor_us"] else None
    return row


def _measure(
    problem: Problem, rates: Sequence[Rate], rounds: int, progress: Callable[[str, int, int | None], None]
) -> dict[str, Any]:
    """One context: exactness, then the times."""
    name, layers, device = f"{problem.context} tokens", len(problem.layers), problem.device
    progress(f"{name}: exactness", 0, None)
    cases, token, worst = history(problem, rates)
    works = Works(cases, token, problem.plans["prr"], problem.kernels, problem.scale)
    settings = works.settings(rates)
    exact = _exact(works, settings, worst)
    stages = works.stages(rates)

    def at(done: int, total: int) -> None:
        progress(f"{name}: times", done, total)

    if on_gpu := device.type == "cuda":
        times = _replayed(settings, stages, layers, device, rounds, at)
    else:
        times = in_turns({key: work.call for key, work in {**settings, **stages}.items()}, layers, device, rounds, at)
    bandwidth, us = bandwidth_of(device), {key: taken.us for key, taken in times.items()}
    best = min(us["dense"], us["dense_grouped"])
    compared = {key: _figures(times[key], work, bandwidth) for key, work in settings.items()}
    for row in compared.values():
        row["to_dense"], row["to_best_dense"] = row["us"] / us["dense"], row["us"] / best
        row["to_serial"] = row["us"] / us["serial"]
    decoded = rates_of(problem.counters.layer(0))
    return {
        "context": problem.context,
        "layers": layers,
        "l2_bytes": torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else None,
        "serial_bytes_of_all_layers": layers * (works.blocks + works.summaries),
        "exact": {**exact, "graph_equals_eager": "bitwise" if on_gpu else None},
        "bytes": {"dense": works.whole, "blocks": works.blocks, "summaries": works.summaries},
        "settings": compared,
        "stages": {key: _figures(times[key], work, bandwidth) for key, work in stages.items()},
        "natural": {key: decoded[key] for key in ("hit_rate", "hit_rate_weighted", "extra_rate")},
    }


def check_arguments(
    shape: str,
    contexts: Sequence[int],
    selector: str,
    budget: int,
    block_size: int | str,
    correlation: float,
    hit_rates: Sequence[Rate] | None = None,
) -> tuple[Shape, dict[str, LayerPlan]]:
    """The shape, and the plans "serial" and "prr", that the arguments of `bench_segment` mean. ValueError for what
    can't be."""
    sizes = shape_named(shape)
    settings: dict[str, Any] = dict(selector=selector, budget=budget, block_size=block_size, dense_layers=0)
    plans = {
        name: SparseConfig(**settings, speculate=name == "prr", ema=DEFAULT_EMA).plan([""])[0]
        for name in ("serial", "prr")
    }
    fits = plans["serial"].fits
    for context in contexts:
        if not CONTEXTS[0] <= context <= CONTEXTS[1] or context < fits:
            raise ValueError(
                f"context: expected {CONTEXTS[0]} .. {CONTEXTS[1]} tokens, and not fewer than the {fits} that "
                f"budget={budget} attends to, got {context}"
            )
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation: expected a number from 0 to 1, got {correlation}")
    for rate in hit_rates or ():
        if rate is not None and not 0 <= rate <= 1:
            raise ValueError(f"hit_rate: expected a number from 0 to 1, or natural, got {rate}")
    return sizes, plans


@torch.no_grad()
def bench_segment(
    shape: str = "qwen3-32b",
    contexts: Sequence[int] = (16384,),
    selector: str = "quest",
    budget: int = 4096,
    block_size: int | str = "auto",
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    rounds: int | None = None,
    steps: int = 8,
    correlation: float = 0.9,
    hit_rates: Sequence[Rate] | None = None,
    layers: int | None = None,
    kernels: str | Path | ModuleType = "auto",
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> dict[str, Any]:
    """Scores, selection and attention of one token in a layer of that shape, at each of the contexts, in microseconds:
    no projections, no append, no EMA; those two are stages of their own. K/V are random, so the selection means
    nothing.

    "serial" and "prr RATE" run what `decode_token` runs, on a prediction that holds that share of the selected blocks,
    and wrong ones for the rest; "prr natural" on what the EMA predicts after `steps` - 1 tokens, whose queries are
    correlated by `correlation`. On a GPU each time is that of a CUDA graph, the median of its replays over its calls;
    elsewhere of calls in turns. Calls rotate over the layers: on a GPU over so many that K/V come from memory.

    A floor are the bytes that an algorithm has to read, K/V of the attended blocks and the scored summaries, over the
    data sheet's bandwidth; what was predicted in vain is moved on top of it.

    Args:
        rounds: turns of each call, by default 5; on a GPU replays of each graph, by default 50.
        hit_rates: 0 .. 1, None for natural; by default natural, on a GPU 1, 0.95 and 0.
        layers: by default as many as read 8 times the GPU's L2, if they fit its memory; 1 on a CPU.
        kernels: as in `SparseConfig`; only "auto" may fall back, which "kernels" of the result says.
        progress: called with (stage, done, total or None).

    Raises:
        ValueError: a shape, context or setting that can't be.
        KernelError: kernels that can't be loaded.
        ExactnessError: an output, a selection or a score is wrong.
    """
    sizes, plans = check_arguments(shape, contexts, selector, budget, block_size, correlation, hit_rates)
    where, loaded, plan = torch.device(device), measured_kernels(kernels), plans["prr"]
    on_gpu = where.type == "cuda"
    rates = tuple(hit_rates or (GPU_RATES if on_gpu else (None,)))
    rounds = rounds or (REPLAYS if on_gpu else ROUNDS)
    found = []
    for context in contexts:
        if on_gpu:
            torch.cuda.empty_cache()  # what the last context held counts as free
        count = layers or cold_layers(sizes, context, plan, batch, dtype, where)
        problem = Problem(sizes, context, plans, batch, dtype, where, count, steps, correlation, loaded.module)
        found.append(_measure(problem, rates, rounds, progress))
        del problem  # its K/V are given back before the next one's are made
    return {
        "bench": "segment",
        **machine(device, dtype),
        "bandwidth": bandwidth_of(where),
        "timed_by": "CUDA graph" if on_gpu else "clock",
        "kernels": described(loaded),
        "shape": {
            "name": shape,
            "heads": sizes.heads,
            "kv_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "batch": batch,
        },
        "selector": plan.selector,
        "budget": budget,
        "block_size": plan.block_size,
        "blocks": {"selected": plan.blocks, "by_score": plan.free_blocks, "predicted": plan.predicted_blocks},
        "ema": DEFAULT_EMA,
        "correlation": correlation,
        "rounds": rounds,
        "steps": steps,
        "contexts": found,
    }
