"""Time a prompt in a layer with an indexer, and see what memory it takes."""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import DynamicCache

from .bench_time import Timer, spread_of
from .cache import SparseCache
from .patching import patch_model


def time_prompt(
    layer: Any,
    check: Callable[[torch.Tensor, torch.Tensor, str], float],
    tokens: int,
    with_stock: bool,
    rounds: int,
    kernels: str | Path | ModuleType,
    progress: Callable[[str, int, int | None], None],
) -> dict[str, Any]:
    """A prompt on an empty cache: ms, and on a GPU the most bytes that there were beside what had been there, weights
    and input: cache, output and all between. On a GPU one call warms up, and ms is the median of `rounds` others.

    layer: a `bench_indexed.Layer`.  check: an output and stock's, which may differ by so much.
    """
    device = torch.device(layer.options["device"])
    on_gpu, timed = device.type == "cuda", Timer(device)
    hidden = layer.normal(1, tokens, layer.config.hidden_size)
    found: dict[str, Any] = {"tokens": tokens, "ms": {}, "spread": {}, "peak_bytes": {}, "error": None}
    outputs: dict[str, torch.Tensor] = {}
    for name in (*(["stock"] if with_stock else []), "sparse"):

        def run(name: str = name) -> torch.Tensor:
            cache = DynamicCache(config=layer.config) if name == "stock" else SparseCache(layer.model)
            return layer.forward(hidden, 0, cache)

        progress(f"a prompt of {tokens} tokens: {name}", 0, 1)
        taken = []
        with nullcontext() if name == "stock" else patch_model(layer.model, kernels=kernels):
            if on_gpu:
                run()
                torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device) if on_gpu else 0
            for _ in range(rounds if on_gpu else 1):
                outputs.pop(name, None)
                ms, outputs[name] = timed(run)
                taken.append(ms)
        found["ms"][name], found["spread"][name] = statistics.median(taken), spread_of(taken)
        found["peak_bytes"][name] = torch.cuda.max_memory_allocated(device) - held if on_gpu else None
    if with_stock:
        found["error"] = check(outputs["sparse"], outputs["stock"], f"a prompt of {tokens} tokens")
    return found
