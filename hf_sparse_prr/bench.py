"""Time one attention layer's decode step: stock on a DynamicCache, serial sparse and PRR, in turns in one process."""

import copy
import statistics
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from . import kernel_loader
from .bench_time import Timer, spread_of
from .cache import SparseCache
from .config import SparseConfig
from .patching import patch_model
from .profile import device_name
from .shapes import shape as shape_named

DENSE = 2  # leading layers, which stay dense and aren't timed
CORRELATION = 0.9  # of a step's input with the one before it; it decides what PRR hits
BANDWIDTH = {  # bytes a second of a GPU's memory, from its data sheet, by torch's name of it
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
}


def successive(normal: Callable[[], torch.Tensor], steps: int, correlation: float) -> list[torch.Tensor]:
    """Random normal tensors, one a step, each correlated with the one before it as successive tokens are."""
    inputs = [normal()]
    while len(inputs) < steps:
        inputs.append(correlation * inputs[-1] + (1 - correlation**2) ** 0.5 * normal())
    return inputs


def _step(model: Any, cache: Any, hidden: torch.Tensor, position: int) -> float:
    """Milliseconds of one decode step of one attention layer, the mean over the timed layers."""
    embeddings = model.model.rotary_emb(hidden, torch.tensor([[position]], device=hidden.device))
    timed = Timer(hidden.device)
    taken = [timed(layer.self_attn, hidden, embeddings, None, cache)[0] for layer in model.model.layers]
    return statistics.mean(taken[DENSE:])


def filled(cache: Any, shape: tuple[int, ...], layers: int, device: str | torch.device, dtype: torch.dtype) -> Any:
    """The cache, with random normal K/V of this shape [B, H, T, D] in so many layers."""
    for index in range(layers):
        cache.update(
            torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype), index
        )
    return cache


def machine(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Where a figure was measured."""
    return {
        "device": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": import_module("triton").__version__ if find_spec("triton") else None,
        "dtype": str(dtype).removeprefix("torch."),
    }


def measured_kernels(key: str | Path | ModuleType) -> kernel_loader.Kernels:
    """The kernels of this key and no others, or KernelError; those of "auto" may have fallen back."""
    return kernel_loader.resolve(key, strict=key != "auto")


def described(kernels: kernel_loader.Kernels) -> dict[str, Any]:
    """What ran."""
    return {"source": kernels.source, "backend": kernels.backend, "fallback": kernels.fallback}


def bandwidth_of(device: torch.device) -> float | None:
    """Bytes a second by the data sheet; None where it isn't known."""
    return BANDWIDTH.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def layer_config(
    shape: str, layers: int, positions: int, heads: int | None, kv_heads: int | None, head_dim: int | None
) -> Any:
    """The transformers config of a few layers of a shape, with a small MLP and vocabulary, which aren't timed.

    heads, kv_heads, head_dim: in place of the shape's own; with other heads, hidden_size is heads * head_dim.

    Raises:
        ValueError: an unknown shape; heads that aren't a multiple of kv_heads; an odd head_dim, which RoPE can't turn.
    """
    sizes = shape_named(shape)
    hidden = sizes.hidden
    if heads is not None or head_dim is not None:
        hidden = (heads or sizes.heads) * (head_dim or sizes.head_dim)
    heads, kv_heads, head_dim = heads or sizes.heads, kv_heads or sizes.kv_heads, head_dim or sizes.head_dim
    if heads % kv_heads:
        raise ValueError(f"heads: expected a multiple of kv_heads={kv_heads}, got {heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim: expected an even number, got {head_dim}")
    return sizes.config(
        layers,
        vocab_size=64,
        intermediate_size=64,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max(positions, sizes.positions),
    )


def compared(
    times: dict[str, list[float]], stats: dict[str, Any], stock_bytes: int, attention: Any, device: str
) -> dict[str, Any]:
    """What "stock", "serial" and "prr" took and read, of their times in ms and the statistics of the latter two."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    moved = {"stock": stock_bytes}
    moved.update({name: each["bytes_read"] / max(each["selector_calls"], 1) for name, each in stats.items()})
    weights = sum(weight.numel() * weight.element_size() for weight in attention.parameters())
    bandwidth = bandwidth_of(torch.device(device))
    return {
        "correlation": CORRELATION,
        "hit_rate": stats["prr"]["hit_rate"],
        "ms": medians,
        "spread": {name: spread_of(values) for name, values in times.items()},
        "ratio_to_stock": {name: value / medians["stock"] for name, value in medians.items()},
        "kv_bytes_per_step": moved,
        "weight_bytes": weights,
        "floor_share": None
        if bandwidth is None
        else {name: (moved[name] + weights) / bandwidth / (1e-3 * medians[name]) for name in medians},
    }


def bench_layer(
    tokens: int,
    budget: int,
    block_size: int | str = "auto",
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    rounds: int = 3,
    steps: int = 40,
    shape: str = "smollm2",
    selector: str = "auto",
    kernels: str | Path | ModuleType = "auto",
) -> dict[str, Any]:
    """Medians in ms over `rounds` turns of `steps` steps each, with ratios to stock and bytes read a step.

    The layer is that of the named shape; heads, kv_heads and head_dim in place of its own where they are given. Layers
    follow each other as in a model, so each finds the caches as the layer before it left them; a step includes the
    projections, in all three settings. "floor_share": of the time, what K/V, summaries and projections take to read at
    the GPU's bandwidth; a layer starts with an idle GPU, so its launches are in the time. "spread": of the times
    of steps, the interquartile range as a share of the median.

    Raises:
        ValueError: a shape, heads or a setting that can't be; fewer tokens than the budget attends to.
        KernelError: kernels that can't be loaded; only those of "auto" may fall back.
    """
    layers = DENSE + 8
    chosen: dict[str, Any] = dict(selector=selector, budget=budget, block_size=block_size)
    fits = SparseConfig(**chosen).plan([""] * layers)[-1].fits
    if tokens < fits:
        raise ValueError(f"tokens: expected at least the {fits} that budget={budget} attends to, got {tokens}")
    loaded = measured_kernels(kernels)
    config = layer_config(shape, layers, 2 * tokens, heads, kv_heads, head_dim)
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    model = model.to(device, dtype).eval()
    size = (1, 1, config.hidden_size)
    inputs = successive(lambda: torch.randn(size, device=device, dtype=dtype), steps, CORRELATION)
    cached = (1, kv_heads, tokens, head_dim)
    prefilled = filled(SparseCache(config), cached, layers, device, dtype)
    times: dict[str, list[float]] = {"stock": [], "serial": [], "prr": []}
    stats: dict[str, Any] = {}
    with torch.inference_mode():
        for _ in range(rounds):
            cache = filled(DynamicCache(config=config), cached, layers, device, dtype)
            times["stock"] += [_step(model, cache, each, tokens + i) for i, each in enumerate(inputs)][3:]
            for name, speculate in (("serial", False), ("prr", True)):
                with patch_model(model, dense_layers=DENSE, speculate=speculate, kernels=kernels, **chosen) as handle:
                    cache = copy.deepcopy(prefilled)
                    times[name] += [_step(model, cache, each, tokens + i) for i, each in enumerate(inputs)][3:]
                    stats[name] = handle.stats()
    stock_bytes = 2 * kv_heads * tokens * head_dim * torch.empty(0, dtype=dtype).element_size()
    return {
        "bench": "layer",
        **machine(device, dtype),
        "kernels": described(loaded),
        "shape": {
            "name": shape,
            "tokens": tokens,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "batch": 1,
        },
        "selector": SparseConfig(selector=selector).resolved_selector,
        "budget": budget,
        **compared(times, stats, stock_bytes, model.model.layers[DENSE].self_attn, device),
    }
