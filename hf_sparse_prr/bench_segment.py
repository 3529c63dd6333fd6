"""Time the selection + attention segment of one layer's decode step: dense, serial sparse and PRR, in turns in one
process, over the same random K/V and the same queries. Nothing is timed before it was seen to be exact."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import kernel_loader
from .bench import machine, successive
from .bench_exact import check_step
from .config import DEFAULT_EMA, LayerPlan, SparseConfig
from .decode import Token, decode_token, token_at
from .layer import SparseLayer
from .predictor import Memory, Prior
from .report import Statistics, rates_of
from .selectors import SELECTORS, Scope
from .shapes import Shape
from .shapes import shape as shape_named
from .tokens import Tokens

CONTEXTS = (1024, 2**20)  # tokens: the shortest and the longest
BANDWIDTH = {  # bytes a second of a GPU's memory, from its data sheet, by torch's name of it
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
}
WARMUP = 4  # first steps of a turn, not timed: PRR has nothing to predict from in the very first
COMPARED = ("dense", "dense_grouped", "serial", "prr")
STAGES = ("score", "topk", "partials", "merge")
_CHUNK = 2**16  # tokens that are made at once


class Segment:
    """One attention layer, without padding, that holds `context` tokens, and the decode steps that follow.

    Every turn runs the same `steps` steps. keys, values: random normal.  queries: [B, H, G, D] a step, random normal,
    each correlated with the one before it.  plans: "serial" and "prr".
    """

    def __init__(
        self,
        shape: Shape,
        context: int,
        plans: dict[str, LayerPlan],
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        steps: int,
        correlation: float,
        kernels: Any,
    ) -> None:
        self.context, self.device, self.kernels, self.scale = context, device, kernels, shape.head_dim**-0.5
        self.plans, self.selector = plans, SELECTORS[plans["serial"].selector]
        self.layer, self.tokens = SparseLayer(max_length=context + steps), Tokens()
        generator = torch.Generator(device).manual_seed(0)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

        heads, dim, group = shape.kv_heads, shape.head_dim, shape.heads // shape.kv_heads
        self.use("serial", Memory())
        for begin in range(0, context, _CHUNK):
            count = min(_CHUNK, context - begin)
            self._append(normal(batch, heads, count, dim), normal(batch, heads, count, dim))
        self.new = [(normal(batch, heads, 1, dim), normal(batch, heads, 1, dim)) for _ in range(steps)]
        self.queries = successive(lambda: normal(batch, heads, group, dim), steps, correlation)

    def use(self, name: str, memory: Memory) -> None:
        """Give the layer the plan of that name, and what it remembers of the steps before."""
        self.layer.plan, self.layer.memory = self.plans[name], memory

    def rewind(self) -> None:
        """Back to the context."""
        self.layer.crop(self.context - self.layer.length)
        self.tokens.crop(self.context)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch, _, count, _ = keys.shape
        length = self.tokens.length + count
        step = self.tokens.plan(None, batch, count, length, min(length, self.context))
        self.layer.update(keys, values)
        self.tokens.commit(step, batch, self.layer.capacity, self.device)
        self.layer.summarise(self.kernels, self.tokens.on(self.device), length - 1)

    def append(self, step: int) -> None:
        """The new token of a step, as the cache appends it, and its block's summary."""
        self._append(*self.new[step])

    def token(self, step: int) -> Token:
        """The query token of a step that was appended."""
        return token_at(self.tokens, self.context + step, step, self.layer.plan, self.device)

    def decode(self, step: int, counters: Statistics) -> tuple[torch.Tensor, torch.Tensor]:
        """What a patched layer runs between its projections: fp32 [B, H, G, D], and the blocks attended to."""
        query, token = self.queries[step], self.token(step)
        return decode_token(self.layer, 0, query, token, self.kernels, self.scale, counters, False)

    def dense(self, step: int, grouped: bool) -> torch.Tensor:
        """SDPA over the whole context: as transformers calls it, or with a KV head's query heads as its query tokens,
        which is the same without a copy of K/V for each (CPU, 8 KV heads of 8 x 128, 16K: 14 ms against 54)."""
        end, query = self.context + step + 1, self.queries[step]
        keys, values = self.layer.keys[:, :, :end], self.layer.values[:, :, :end]
        if grouped:
            return scaled_dot_product_attention(query, keys, values, scale=self.scale)
        query = query.flatten(1, 2)[:, :, None]
        return scaled_dot_product_attention(query, keys, values, scale=self.scale, enable_gqa=True)

    def stages(self, step: int, timed: "Timer") -> dict[str, float]:
        """Milliseconds of each stage of a serial step, one after the other."""
        layer, kernels, query, token = self.layer, self.kernels, self.queries[step], self.token(step)
        plan, prior = layer.plan, layer.memory.prior
        scope = Scope(plan.sink_blocks, token.last, token.end - token.start, self.scale)
        data = (query, layer.keys, layer.values, token.valid, token.start)
        hint = None if prior is None else prior.winners
        attend = partial(kernels.block_partials, scale=self.scale, block_size=plan.block_size)

        ms = {}
        ms["score"], scores = timed(self.selector.scores, kernels, query, layer.summaries, scope, plan)
        choose = partial(kernels.select_blocks, hint=hint)
        ms["topk"], (blocks, free) = timed(choose, scores, token.forced, plan.free_blocks)
        ms["partials"], partials = timed(attend, *data, blocks, token.end)
        ms["merge"], _ = timed(kernels.merge_partials, partials)
        layer.memory.advance(token.column, Prior(free))
        return ms


class Timer:
    """Milliseconds that a call takes, and its result: by events on a GPU, whose queue is empty when it starts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            result = call(*arguments)
            return 1e3 * (time.perf_counter() - begin), result
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            result = call(*arguments)
            last.record()
        last.synchronize()
        return first.elapsed_time(last), result


def _turn(segment: Segment, setting: str, timed: Timer, counters: Statistics) -> dict[str, float]:
    """Median milliseconds a step of one turn, by what was timed. Counters: of the timed steps."""
    segment.use("prr" if setting == "prr" else "serial", Memory())
    samples: dict[str, list[float]] = defaultdict(list)
    for step in range(len(segment.queries)):
        ms = {}
        ms["append"], _ = timed(segment.append, step)
        segment.token(step)  # every layer of a model shares it
        if setting == "stages":
            ms.update(segment.stages(step, timed))
        elif setting in segment.plans:
            used = counters if step >= WARMUP else Statistics(1)
            ms[setting], _ = timed(segment.decode, step, used)
        else:
            ms[setting], _ = timed(segment.dense, step, setting == "dense_grouped")
        for name, value in ms.items():
            if step >= WARMUP:
                samples[name].append(value)
    segment.rewind()
    return {name: statistics.median(values) for name, values in samples.items()}


def _check(segment: Segment, dtype: torch.dtype) -> dict[str, Any]:
    """ExactnessError unless every step of serial decoding and of PRR is right. Returns what was compared."""
    memories = {name: Memory() for name in segment.plans}
    worst: dict[str, float] = {}
    for step, query in enumerate(segment.queries):
        segment.append(step)
        results = {}
        for name, memory in memories.items():
            segment.use(name, memory)
            results[name] = segment.decode(step, Statistics(1))
        token = segment.token(step)
        found = check_step(segment.layer, query, token, segment.kernels, segment.scale, dtype, **results)
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
    segment.rewind()
    return {"steps": len(segment.queries), "prr_equals_serial": "bitwise", "topk": "stable sort", **worst}


def _bytes(counters: Statistics) -> dict[str, float]:
    """Read a step."""
    found = counters.layer(0)
    calls = found["selector_calls"]
    return {
        "summaries": found["summaries_read"] * counters.bytes_per_summary[0] / calls,
        "blocks": found["blocks_read"] * counters.bytes_per_block[0] / calls,
        "total": found["bytes_read"] / calls,
    }


def _measure(segment: Segment, dtype: torch.dtype, rounds: int, progress: Callable[..., None]) -> dict[str, Any]:
    """One context: exactness, a round to warm up, then `rounds` turns of each setting."""
    name = f"{segment.context} tokens"
    progress(f"{name}: exactness", 0, None)
    exact = _check(segment, dtype)
    timed = Timer(segment.device)
    counters = {plan: Statistics(1) for plan in segment.plans}
    turns: dict[str, list[float]] = defaultdict(list)
    for done in range(rounds + 1):
        progress(f"{name}: rounds", done, rounds + 1)
        for setting in (*COMPARED, "stages"):
            found = _turn(segment, setting, timed, counters.get(setting, Statistics(1)))
            for key, value in found.items():
                # The first round warms up: on a GPU its SDPA took 59 ms and the next ones 0.25 (cuDNN's plans)
                if done and (key != "append" or setting == "serial"):
                    turns[key].append(value)
    medians = {key: statistics.median(values) for key, values in turns.items()}
    stages = {stage: medians.pop(stage) for stage in STAGES}
    stages["other"] = medians["serial"] - sum(stages.values())
    batch, heads = segment.queries[0].shape[:2]
    length = segment.context + (WARMUP + len(segment.queries) + 1) / 2  # the mean over the timed steps
    dense = batch * heads * segment.layer.bytes_per_token * length
    moved = {"dense": {"total": dense}, "dense_grouped": {"total": dense}}
    moved.update({plan: _bytes(counters[plan]) for plan in segment.plans})
    rates = rates_of(counters["prr"].layer(0))
    fastest = min(medians["dense"], medians["dense_grouped"])
    bandwidth = BANDWIDTH.get(torch.cuda.get_device_name(segment.device)) if segment.device.type == "cuda" else None
    return {
        "context": segment.context,
        "exact": exact,
        "ms": medians,
        "stages_ms": stages,
        "ms_rounds": dict(turns),
        "ratio_to_dense": {key: medians[key] / medians["dense"] for key in COMPARED},
        "ratio_to_best_dense": {key: medians[key] / fastest for key in COMPARED},
        **{rate: rates[rate] for rate in ("hit_rate", "hit_rate_weighted", "extra_rate")},
        "bytes_per_step": moved,
        "floor_share": None
        if bandwidth is None
        else {key: moved[key]["total"] / bandwidth / (1e-3 * medians[key]) for key in COMPARED},
    }


def check_arguments(
    shape: str, contexts: Sequence[int], selector: str, budget: int, block_size: int | str, correlation: float
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
    rounds: int = 5,
    steps: int = 8,
    correlation: float = 0.9,
    progress: Callable[..., None] = lambda *_: None,
) -> dict[str, Any]:
    """The segment of one layer of that shape, at each of the contexts: medians in ms over `rounds` turns of `steps`
    steps, ratios to dense, hit rates, and bytes read a step. No projections; K/V are random, so the selection means
    nothing and `correlation`, of each query with the one before it, decides what PRR hits.

    "serial" and "prr" are `decode_token` of a layer with a plan of that kind; "append" is what the cache does before
    them, and is in neither. "score" .. "merge" are the stages of serial one by one, with the device idle in between;
    "other" is the rest of serial, what noise and waiting add included. Bytes are those that the algorithm has to read:
    K/V of the attended blocks and of those that were predicted in vain, and the summaries that are scored.

    Args:
        progress: called with (stage, done, total or None).

    Raises:
        ValueError: a shape, context or setting that can't be.
        ExactnessError: an output, a selection or a score is wrong.
    """
    sizes, plans = check_arguments(shape, contexts, selector, budget, block_size, correlation)
    kernels, where = kernel_loader.resolve("auto"), torch.device(device)
    arguments = (batch, dtype, where, WARMUP + steps, correlation, kernels.module)
    found = [_measure(Segment(sizes, context, plans, *arguments), dtype, rounds, progress) for context in contexts]
    plan = plans["prr"]
    return {
        "bench": "segment",
        **machine(device, dtype),
        "kernels": {"source": kernels.source, "backend": kernels.backend, "fallback": kernels.fallback},
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
