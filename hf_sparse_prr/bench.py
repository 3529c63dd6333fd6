"""Time one attention layer's decode step: stock on a DynamicCache, serial sparse and PRR, in turns in one process."""

import copy
import platform
import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from .cache import SparseCache
from .patching import patch_model

DENSE = 2  # leading layers, which stay dense and aren't timed


def _step(model: Any, cache: Any, hidden: torch.Tensor, position: int) -> float:
    """Milliseconds of one decode step of one attention layer, the mean over the timed layers."""
    embeddings = model.model.rotary_emb(hidden, torch.tensor([[position]], device=hidden.device))
    seconds = []
    for index, layer in enumerate(model.model.layers):
        begin = time.perf_counter()
        layer.self_attn(hidden, embeddings, None, cache)
        if hidden.is_cuda:
            torch.cuda.synchronize(hidden.device)
        if index >= DENSE:
            seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.mean(seconds)


def _filled(cache: Any, shape: tuple[int, ...], layers: int, device: str, dtype: torch.dtype) -> Any:
    for index in range(layers):
        cache.update(
            torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype), index
        )
    return cache


def bench_layer(
    tokens: int,
    budget: int,
    block_size: int | str = "auto",
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    rounds: int = 3,
    steps: int = 40,
) -> dict[str, Any]:
    """Medians in ms over `rounds` turns of `steps` steps each, with ratios to stock and bytes read a step.

    The defaults are SmolLM2-135M's layer. Layers follow each other as in a model, so each finds the caches as the layer
    before it left them; a step includes the projections, in all three settings.
    """
    layers = DENSE + 8
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=heads * head_dim,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2 * tokens,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model = model.to(device, dtype).eval()
    hidden = torch.randn(1, 1, heads * head_dim, device=device, dtype=dtype)
    shape = (1, kv_heads, tokens, head_dim)
    prefilled = _filled(SparseCache(config), shape, layers, device, dtype)
    times: dict[str, list[float]] = {"stock": [], "serial": [], "prr": []}
    stats: dict[str, Any] = {}
    with torch.inference_mode():
        for _ in range(rounds):
            cache = _filled(DynamicCache(config=config), shape, layers, device, dtype)
            times["stock"] += [_step(model, cache, hidden, tokens) for _ in range(steps)][3:]
            for name, speculate in (("serial", False), ("prr", True)):
                settings: dict[str, Any] = dict(budget=budget, block_size=block_size, speculate=speculate)
                with patch_model(model, dense_layers=DENSE, **settings) as handle:
                    cache = copy.deepcopy(prefilled)
                    times[name] += [_step(model, cache, hidden, tokens) for _ in range(steps)][3:]
                    stats[name] = handle.stats()
    medians = {name: statistics.median(values) for name, values in times.items()}
    element = torch.empty(0, dtype=dtype).element_size()
    stock_bytes = 2 * kv_heads * tokens * head_dim * element
    return {
        "device": torch.cuda.get_device_name()
        if device.startswith("cuda")
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": 1},
        "budget": budget,
        "ms": medians,
        "ratio_to_stock": {name: value / medians["stock"] for name, value in medians.items()},
        "kv_bytes_per_step": {
            "stock": stock_bytes,
            **{name: each["bytes_read"] / max(each["selector_calls"], 1) for name, each in stats.items()},
        },
    }
