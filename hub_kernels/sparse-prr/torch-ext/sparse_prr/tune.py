"""Measures launch parameters on a GPU, as `hf-sparse-prr tune` asks. Nothing else imports this module.

Op by op and parameter by parameter: the fastest value over all cases, a case being a published model's heads and a
context length. What a candidate computes is compared with the defaults' first. `triton_kernels/tuned.py` says what
may be chosen and what of it shows in the bits.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from . import cuda_kernels, triton_kernels
from .triton_kernels import tuned

Call = Callable[[], Any]  # a tensor, or a tuple of them
Clock = Callable[[list[Call]], float]

SHAPES = {"llama-3.1-8b": (8, 4, 128), "glm-4-9b": (2, 16, 128)}  # KV heads, query heads of one, head dim
CONTEXTS = (2**15, 2**17, 2**19)
BLOCK, SELECTED, WINDOWS = 64, 64, 4  # tokens of a block, blocks of a selection, windows of a block
_LINEAR = {"BY": (4, 8, 16), "AHEAD": (256, 512, 1024), "BX": (256, 512), "STAGES": (2, 4, 8), "num_warps": (4, 8)}
CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "quest": {"BN": (16, 32, 64, 128), "num_warps": (2, 4, 8)},
    "window_logits": {"BW": (32, 64, 128, 256), "num_warps": (2, 4, 8)},
    "window_shares": {"BN": (16, 32, 64, 128), "num_warps": (2, 4, 8)},
    "merge": {"DS": (16, 32, 64)},
    "select": {"num_warps": (4, 8, 16, 32)},
    "ema_step": {"CHUNK": (256, 512, 1024), "num_warps": (4, 8)},
    "linear": _LINEAR,
    "gate": _LINEAR,
    "ways": {
        "ROW": (4096, 8192, 16384),
        "ROW_GUESSED": (2048, 4096, 8192),
        "TILES": (1, 2, 4, 8),
        "GUESSED": (32, 64, 128, 256),
    },
}
_WORTH = 0.98  # of the defaults' time: a smaller gain is noise, and not worth other bits
_L2 = 2**27  # bytes that no GPU's L2 holds: a decode step finds nothing of its layer there


class Choice(NamedTuple):
    """What was chosen for an op, and microseconds by case, with the defaults and with the choice."""

    values: dict[str, int]
    before: dict[str, float]
    after: dict[str, float]
    refused: list[str]

    @property
    def ratio(self) -> float:
        """Time with the choice over time with the defaults, mean over the cases."""
        return statistics.mean(self.after[case] / self.before[case] for case in self.before)


def graph_time(calls: list[Call]) -> float:
    """Microseconds a call takes: the median replay of a CUDA graph of them all, so no host time is in it."""
    for call in calls:  # compiles
        call()
    torch.cuda.synchronize()
    rounds = max(1, 64 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 1000 * statistics.median(times[2:]) / (rounds * len(calls))


def _scored(
    op: str, heads: int, group: int, dim: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> list[Call]:
    """Calls that score `tokens` tokens, each with the summaries of another layer."""
    blocks, width = tokens // BLOCK, 2 if op == "quest" else WINDOWS
    layers = max(1, min(16, _L2 // (heads * blocks * width * dim * 2)))
    query = torch.randn((1, heads, group, dim), device=device).to(dtype)
    last, length = torch.tensor([blocks - 2], device=device), torch.tensor([tokens], device=device)
    held = [torch.randn((1, heads, blocks, width, dim), device=device).to(dtype) for _ in range(layers)]
    if op == "quest":
        boxes = [(layer.amin(dim=3), layer.amax(dim=3)) for layer in held]
        return [partial(triton_kernels.quest_scores, query, *box, first=1, last=last) for box in boxes]
    filled = torch.ones((1, heads, blocks, width), dtype=torch.bool, device=device)
    options: dict[str, Any] = dict(scale=dim**-0.5, stride=BLOCK // WINDOWS)
    return [partial(triton_kernels.infllm_scores, query, layer, filled, 1, last, length, **options) for layer in held]


def _rows(op: str, heads: int, tokens: int, device: torch.device) -> list[Call]:
    """Calls over the scores of `tokens` tokens: the selection, or the predictor's step."""
    blocks = tokens // BLOCK
    forced = torch.tensor([0, blocks - 2, blocks - 1], dtype=torch.int32, device=device)
    scores, level, trend = (torch.randn((1, heads, blocks), device=device) for _ in range(3))
    scores[:, :, forced.long()] = float("nan")
    if op == "select":
        return [partial(triton_kernels.select_blocks, scores, forced[None, None], min(SELECTED, blocks) - 3)]
    ema, last = torch.tensor([[0.5, 0.3, 0.5]], device=device), torch.tensor([blocks - 2], device=device)
    return [partial(triton_kernels.ema_step, scores, level, trend, ema, 1, last)]


def _selections(columns: int, device: torch.device) -> dict[str, list[Call]]:
    """Calls that select tokens as an indexer does, by rows, and with a threshold from scores like these."""
    kernels = cuda_kernels if cuda_kernels.AVAILABLE else triton_kernels
    cases: dict[str, list[Call]] = {}
    for rows in (1, 4, 64, 256):
        scores, k = torch.randn((rows, columns), device=device), min(2048, columns // 4)
        threshold = kernels.topk_threshold(scores, k)
        cases[f"{rows} x {columns}"] = [partial(kernels.gvr_topk, scores, k)]
        cases[f"{rows} x {columns}, threshold"] = [partial(kernels.gvr_topk, scores, k, threshold=threshold)]
    return cases


def _merges(heads: int, group: int, dim: int, device: torch.device, dtype: torch.dtype) -> list[Call]:
    """A call that merges as serial decoding does, and as PRR does where everything was predicted."""
    tokens = SELECTED * BLOCK
    query = torch.randn((1, heads, group, dim), device=device).to(dtype)
    keys, values = (torch.randn((1, heads, tokens, dim), device=device).to(dtype) for _ in range(2))
    valid = torch.ones((1, tokens), dtype=torch.bool, device=device)
    start, end = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([tokens], device=device)
    options: dict[str, Any] = dict(scale=dim**-0.5, block_size=BLOCK)
    selected = torch.arange(SELECTED, dtype=torch.int32, device=device).expand(1, heads, -1).contiguous()
    inputs = (query, keys, values, valid, start)
    partials = triton_kernels.block_partials(*inputs, selected, end, **options)

    def call() -> tuple[torch.Tensor, ...]:
        repaired = triton_kernels.repair_merge(*inputs, selected, end, selected, partials, **options)
        return triton_kernels.merge_partials(partials), repaired

    return [call]


def _layers(heads: int, group: int, dim: int, device: torch.device, dtype: torch.dtype) -> list[Call]:
    """A call of the linear parts of one layer over one token, 3.5 times as wide inside: more than an L2 holds."""
    wide = heads * group * dim
    inner = 7 * wide // 2

    def weight(rows: int, channels: int) -> torch.Tensor:
        return (torch.randn((rows, channels), device=device) / channels**0.5).to(dtype)

    states = [weight(rows, wide) for rows in (wide, heads * dim, heads * dim)]
    out, gates, down = weight(wide, wide), (weight(inner, wide), weight(inner, wide)), weight(wide, inner)
    x, norm = weight(1, wide) * wide**0.5, torch.ones(wide, device=device, dtype=dtype)
    linear = triton_kernels.grouped_linear

    def call() -> tuple[torch.Tensor, ...]:
        projected = linear(x, states, norm=norm, eps=1e-5)
        middle = linear(projected[:, :wide], [out], residual=x)
        return projected, linear(linear(middle, gates, norm=norm, eps=1e-5, gated=True), [down], residual=middle)

    return [call]


def cases_of(
    op: str, device: torch.device, contexts: tuple[int, ...] = CONTEXTS, dtype: torch.dtype = torch.bfloat16
) -> dict[str, list[Call]]:
    """What an op is measured on, by name."""
    cases: dict[str, list[Call]] = {}
    if op == "ways":
        for columns in sorted({contexts[0] // 8, contexts[0] // 4, *contexts[:2]}):
            cases |= _selections(columns, device)
        return cases
    for shape, (heads, group, dim) in SHAPES.items():
        if op in ("merge", "linear", "gate"):
            cases[shape] = (_merges if op == "merge" else _layers)(heads, group, dim, device, dtype)
            continue
        for tokens in contexts:
            name = f"{shape} {tokens // 1024}K"
            if op in ("select", "ema_step"):
                cases[name] = _rows(op, heads, tokens, device)
            else:
                cases[name] = _scored(op, heads, group, dim, tokens, device, dtype)
    return cases


def _results(call: Call) -> tuple[torch.Tensor, ...]:
    found = call()
    return found if isinstance(found, tuple) else (found,)


def _agrees(op: str, found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """The numbers of the defaults, but for a sum's order; and merged it is the same to the bit, predicted or not. What
    linear layers round to their dtype may be rounded the other way."""
    if op == "merge" and not torch.equal(*found):
        return False
    close = dict(rtol=2e-2, atol=2e-2) if op in ("linear", "gate") else dict(rtol=1e-4, atol=1e-5)
    return all(torch.allclose(a, b, **close, equal_nan=True) for a, b in zip(found, expected, strict=True))


def choose(
    op: str, device: int, cases: dict[str, list[Call]], clock: Clock, candidates: dict[str, tuple[int, ...]]
) -> Choice:
    """The fastest parameters of one op; the defaults unless they lose by 2%."""
    refused: list[str] = []
    expected: dict[str, tuple[torch.Tensor, ...]] = {}

    def measure(values: dict[str, int]) -> dict[str, float] | None:
        with tuned.trying(device, {**tuned.DEFAULTS, op: values}):
            try:
                for name, calls in cases.items():
                    found = _results(calls[0])
                    if not _agrees(op, found, expected.setdefault(name, found)):
                        refused.append(f"{values}: another result, {name}")
                        return None
                return {name: clock(calls) for name, calls in cases.items()}
            except OutOfResources as error:
                refused.append(f"{values}: {error}")
                return None

    best = tuned.DEFAULTS[op]
    before = measure(best)
    if before is None:
        raise RuntimeError(f"{op}: expected the defaults to run, got {refused[0]}")
    choice = Choice(best, before, before, refused)
    for parameter, numbers in candidates.items():
        kept = choice.values
        for number in numbers:
            values = {**kept, parameter: number}
            times = None if values == kept else measure(values)
            if times is not None:
                other = Choice(values, before, times, refused)
                choice = min(choice, other, key=lambda each: each.ratio)
    return choice if choice.ratio <= _WORTH else Choice(best, before, before, refused)


def tune(
    device: torch.device,
    progress: Callable[[str, int, int], None],
    *,
    clock: Clock = graph_time,
    contexts: tuple[int, ...] = CONTEXTS,
    candidates: dict[str, dict[str, tuple[int, ...]]] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Choice]:
    """Every op's choice on a device. `progress` is told the op, how many are done, and of how many."""
    if candidates is None:  # there is but one way without compiled kernels
        candidates = {op: values for op, values in CANDIDATES.items() if op != "ways" or cuda_kernels.AVAILABLE}
    chosen = {}
    index = torch.empty(0, device=device).get_device()
    for done, (op, values) in enumerate(candidates.items()):
        progress(op, done, len(candidates))
        chosen[op] = choose(op, index, cases_of(op, device, contexts, dtype), clock, values)
    return chosen


def document(gpu: str, chosen: dict[str, Choice]) -> dict[str, Any]:
    """What is written to a file: `tuned.read` takes "config"; the rest says where it came from."""
    from triton import __version__ as triton_version

    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton_version,
        "ratio_to_defaults": {op: round(choice.ratio, 3) for op, choice in chosen.items()},
        "config": {op: choice.values for op, choice in chosen.items()},
    }
