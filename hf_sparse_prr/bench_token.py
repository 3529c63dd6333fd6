"""Time whole tokens of generate(), of a model of a published shape with random weights: stock on a DynamicCache, serial
sparse, PRR, and on a GPU serial without CUDA graphs; if they are named also stock on a StaticCache, compiled or not,
ours compiled, and speculation as the profile has it. No setting is timed before its tokens were seen to be right."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from .bench import bandwidth_of, described, machine, measured_kernels
from .bench_prompt import FEW, Prompt
from .config import DEFAULT_EMA, SparseConfig
from .patching import patch_model
from .shapes import Shape
from .shapes import shape as shape_named

SETTINGS: dict[str, dict[str, Any]] = {  # what each patches the model with, and in which order they are measured
    "dense": {},
    "static": {},
    "compiled": {},
    "serial": dict(speculate=False),
    "prr": dict(speculate=True),
    "eager": dict(speculate=False, cuda_graph=False),
    "auto": dict(speculate="auto"),
    "preallocated": dict(speculate=False),
}
USUAL = ("dense", "serial", "prr", "eager")  # if none are named
STOCK = ("dense", "static", "compiled")
_ON_GPU = ("eager", "compiled", "preallocated")  # what it takes a GPU for: graphs, and generate()'s own compiling
_ROUNDED = (*STOCK, "preallocated")  # other kernels, or others around them: within rounding
LONGEST = 2**20  # tokens of a context


def check_arguments(
    shape: str, contexts: Sequence[int], settings: Sequence[str] | None, layers: int | None, device: str
) -> tuple[Shape, list[str]]:
    """The shape and the settings, in order, that the arguments of `bench_token` mean. ValueError for what can't be."""
    sizes, on_gpu = shape_named(shape), torch.device(device).type == "cuda"
    for context in contexts:
        if not 1 <= context <= LONGEST:
            raise ValueError(f"context: expected 1 .. {LONGEST} tokens, got {context}")
    if layers is not None and not 1 <= layers <= sizes.layers:
        raise ValueError(f"layers: expected 1 .. {sizes.layers}, as {shape} has, got {layers}")
    there = [name for name in SETTINGS if on_gpu or name not in _ON_GPU]
    for name in settings or ():
        if name not in there:
            more = "" if on_gpu else f", and {', '.join(_ON_GPU)} on a GPU"
            raise ValueError(f"settings: expected some of {', '.join(there)}{more}, got {name!r}")
    return sizes, [name for name in there if name in (settings or USUAL)]


def _weight_bytes(model: Any) -> int:
    """Of weights that a token reads: all but an embedding that isn't the output's as well."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return sum(weight.nbytes for weight in model.parameters()) - (0 if tied else embedding.nbytes)


def _measure(
    prompt: Prompt, names: Sequence[str], chosen: dict[str, Any], rounds: int,
    progress: Callable[[str, int, int | None], None],
) -> dict[str, Any]:  # fmt: skip
    """All settings at one context."""
    model, weights, bandwidth = prompt.model, _weight_bytes(prompt.model), bandwidth_of(prompt.model.device)
    fits = prompt.context + prompt.many <= SparseConfig(**chosen).plan([""])[-1].fits
    is_stock = fits and model.device.type == "cpu" and model.dtype == torch.float32  # on a GPU it is within rounding
    alike = [name for name in names if name not in _ROUNDED or (is_stock and name == "dense")]
    rows: dict[str, Any] = {}
    known = None
    for name in names:

        def at(done: int, total: int, name: str = name) -> None:
            progress(f"{prompt.context} tokens: {name}", done, total)

        with nullcontext() if name in STOCK else patch_model(model, **chosen, **SETTINGS[name]) as handle:
            row, given = prompt.measure(name, handle, known if name in alike else None, rounds, at)
            read = prompt.read_bytes(handle)
            row["hit_rate"] = handle.stats()["hit_rate"] if handle else None
            row["graphs"] = asdict(handle.graphs) if handle else None
            row["choice"] = str(handle.budget) if handle and handle.budget else None
        if known is None and name in alike:
            known = name, given
        row["weight_bytes"], row["cache_bytes"] = weights, read
        row["floor_share"] = 1e3 * (weights + read) / bandwidth / row["ms"] if bandwidth else None
        rows[name] = row
    for row in rows.values():
        row["ratio_to_dense"] = row["ms"] / rows["dense"]["ms"] if "dense" in rows else None
    exact = {"tokens": prompt.many, "same_bits": alike if len(alike) > 1 else []}
    return {"context": prompt.context, "exact": exact, "settings": rows}


def bench_token(
    shape: str = "smollm2",
    contexts: Sequence[int] = (2048,),
    selector: str = "quest",
    budget: int = 1024,
    block_size: int | str = 64,
    batch: int = 1,
    tokens: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layers: int | None = None,
    settings: Sequence[str] | None = None,
    prefill: bool = False,
    rounds: int = 5,
    kernels: str | Path | ModuleType = "auto",
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> dict[str, Any]:
    """Milliseconds of a token at each of the contexts: of `rounds` turns, the time of generate() for FEW + `tokens` new
    tokens less that for FEW, over `tokens`. A call before them warms up.

    Weights are random and made on the device, and so are K/V: what is selected means nothing, and hits are what random
    queries give. The first new token, of a prompt, attends to everything in every setting; "first_ms" is the call for
    it alone. With `prefill` that call computes the prompt, once after one that warmed up.

    "gpu_ms": of a token, in which the GPU worked: of two more calls, profiled; None on a CPU.  "floor_share": of the
    time, what weights, and K/V and summaries that the setting reads, take at the data sheet's bandwidth.  "choice": of
    the profile, in the setting "auto".  "peak_bytes": of tensors on the GPU, weights and prompt among them.

    Args:
        layers: of the model, by default all.
        settings: of SETTINGS, by default those of USUAL that the device has.
        kernels: as in `SparseConfig`; only "auto" may fall back, which "kernels" of the result says.
        progress: called with (stage, done, total or None).

    Raises:
        ValueError: a shape, context, depth or setting that can't be; so few tokens that noise hides their time.
        KernelError: kernels that can't be loaded.
        ExactnessError: sparse settings gave other ids or logits than each other; or than dense, in float32 on a CPU at
            a context that fits the budget; or other ids in a second call.
    """
    sizes, names = check_arguments(shape, contexts, settings, layers, device)
    chosen: dict[str, Any] = dict(selector=selector, budget=budget, block_size=block_size)
    plan = SparseConfig(**chosen).plan([""])[-1]
    loaded = measured_kernels(kernels)
    config = sizes.config(layers, max_position_embeddings=max(sizes.positions, *contexts) + FEW + tokens + 1)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    chosen.update(kernels=kernels, ema="calibrate" if prefill else DEFAULT_EMA)  # random K/V come without queries
    found = []
    for length in contexts:
        found.append(_measure(Prompt(model, length, batch, tokens, prefill), names, chosen, rounds, progress))
    return {
        "bench": "token",
        **machine(device, dtype),
        "bandwidth": bandwidth_of(torch.device(device)),
        "kernels": described(loaded),
        "shape": {"name": shape, "layers": config.num_hidden_layers, "batch": batch},
        "selector": plan.selector,
        "budget": budget,
        "block_size": plan.block_size,
        "tokens": tokens,
        "rounds": rounds,
        "prefill": prefill,
        "contexts": found,
    }
