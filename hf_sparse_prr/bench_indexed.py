"""Time one latent-attention layer with an indexer at a published model's sizes: stock on a DynamicCache, serial sparse
and PRR, in turns in one process, and a prompt on an empty cache. Nothing is timed before it agrees with stock."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from .bench import CORRELATION, compared, described, machine, measured_kernels, successive
from .bench_exact import ExactnessError
from .bench_time import Timer
from .cache import SparseCache
from .hooks import cache_argument
from .patching import patch_model

# Their sizes are the defaults of transformers' config classes
SHAPES = {"deepseek-v3.2": "deepseek_v32", "glm-5": "glm_moe_dsa"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # of the largest output
_WARM = 3  # first steps of a turn, not timed


class Layer:
    """One attention layer of random weights, and what a forward of it takes."""

    def __init__(self, shape: str, device: str, dtype: torch.dtype) -> None:
        if shape not in SHAPES:
            raise ValueError(f"shape: expected one of {', '.join(SHAPES)}, got {shape!r}")
        kind = SHAPES[shape]
        sizes: dict[str, Any] = dict(
            num_hidden_layers=1, vocab_size=64, intermediate_size=64, mlp_layer_types=["dense"]
        )
        if kind == "glm_moe_dsa":
            sizes["indexer_types"] = ["full"]
        self.config = AutoConfig.for_model(kind, pad_token_id=None, bos_token_id=None, **sizes)
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_config(self.config)
        self.model = self.model.to(device, dtype).eval()
        self.attention: Any = self.model.model.layers[0].self_attn
        self.options: dict[str, Any] = dict(device=device, dtype=dtype)

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, **self.options)

    def forward(self, hidden: torch.Tensor, begin: int, cache: Any) -> torch.Tensor:
        """Output of the tokens [1, Q, hidden] that follow `begin` others."""
        columns = torch.arange(begin + hidden.shape[1], device=hidden.device)
        positions = columns[begin:][None]
        embeddings = self.model.model.rotary_emb(hidden, positions)
        mask = (columns <= positions[0, :, None])[None, None]
        given = {cache_argument(): cache}
        return self.attention(
            hidden_states=hidden, position_embeddings=embeddings, attention_mask=mask, position_ids=positions, **given
        )[0]

    def filled(self, cache: Any, states: tuple[torch.Tensor, ...], expanded: bool) -> Any:
        """A cache of latents, RoPE keys and index keys; of keys and values where this transformers caches those."""
        latents, ropes, index = states
        cache.update(*(self.attention.expand_kv(latents, ropes) if expanded else (latents, ropes)), 0)
        cache.update_indexer(index, 0)
        return cache

    def states(self, tokens: int) -> tuple[torch.Tensor, ...]:
        config = self.config
        latents = self.normal(1, 1, tokens, config.kv_lora_rank)
        return (
            latents,
            self.normal(1, 1, tokens, config.qk_rope_head_dim),
            self.normal(1, tokens, config.index_head_dim),
        )

    def caches_keys(self) -> bool:
        """Whether the stock class keeps expanded keys and values, as before transformers 5.24."""
        cache: Any = DynamicCache(config=self.config)
        self.forward(self.normal(1, 1, self.config.hidden_size), 0, cache)
        return cache.layers[0].keys.shape[1] > 1


def _check(found: torch.Tensor, stock: torch.Tensor, what: str) -> float:
    """Largest difference to stock, as a share of its largest output. ExactnessError above the tolerance."""
    error = float((found.float() - stock.float()).abs().max() / stock.float().abs().max())
    allowed = TOLERANCE[stock.dtype]
    if not error <= allowed:
        raise ExactnessError(f"{what}: expected stock's output within {allowed:g} of its largest, got {error:.2g}")
    return error


def _prompt(layer: Layer, tokens: int, with_stock: bool, kernels: str | Path | ModuleType) -> dict[str, Any]:
    """A prompt on an empty cache: ms, and on a GPU the bytes that it takes beside what was there."""
    device = torch.device(layer.options["device"])
    timed, hidden = Timer(device), layer.normal(1, tokens, layer.config.hidden_size)
    found: dict[str, Any] = {"tokens": tokens, "ms": {}, "peak_bytes": {}}
    outputs = {}
    for name in (*(["stock"] if with_stock else []), "sparse"):
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device) if on_gpu else 0
        if name == "stock":
            cache: Any = DynamicCache(config=layer.config)
            found["ms"][name], outputs[name] = timed(layer.forward, hidden, 0, cache)
        else:
            with patch_model(layer.model, kernels=kernels):
                found["ms"][name], outputs[name] = timed(layer.forward, hidden, 0, SparseCache(layer.model))
        found["peak_bytes"][name] = torch.cuda.max_memory_allocated(device) - held if on_gpu else None
    if with_stock:
        found["error"] = _check(outputs["sparse"], outputs["stock"], f"a prompt of {tokens} tokens")
    return found


@torch.no_grad()
def bench_indexed(
    shape: str = "deepseek-v3.2",
    tokens: int = 8192,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    rounds: int = 3,
    steps: int = 12,
    prefill: int = 0,
    stock_prefill: bool = True,
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
    kernels: str | Path | ModuleType = "auto",
) -> dict[str, Any]:
    """Medians in ms over `rounds` turns of `steps` decode steps each over `tokens` tokens of random latents, with
    ratios to stock and bytes read a step; and of a prompt of `prefill` tokens, once.

    A step includes the projections and the append. Its input is random, correlated with the one before it.

    Raises:
        ValueError: a shape that isn't one of SHAPES; fewer tokens than a query selects.
        KernelError: kernels that can't be loaded; only those of "auto" may fall back.
        ExactnessError: an output isn't stock's.
    """
    loaded = measured_kernels(kernels)
    layer = Layer(shape, device, dtype)
    topk, expanded = layer.config.index_topk, layer.caches_keys()
    if tokens <= topk:
        raise ValueError(f"tokens: expected more than the {topk} that a query selects, got {tokens}")
    inputs = successive(lambda: layer.normal(1, 1, layer.config.hidden_size), steps + _WARM, CORRELATION)
    states, timed = layer.states(tokens), Timer(torch.device(device))
    prefilled = layer.filled(SparseCache(layer.config), states, False)
    times: dict[str, list[float]] = {"stock": [], "serial": [], "prr": []}
    stats, error = {}, 0.0
    for turn in range(rounds):
        progress("decoding", turn, rounds)
        cache = layer.filled(DynamicCache(config=layer.config), states, expanded)
        taken = [timed(layer.forward, each, tokens + i, cache) for i, each in enumerate(inputs)]
        times["stock"] += [ms for ms, _ in taken[_WARM:]]
        stock = [output for _, output in taken]
        for name, speculate in (("serial", False), ("prr", True)):
            with patch_model(layer.model, speculate=speculate, kernels=kernels) as handle:
                cache = copy.deepcopy(prefilled)
                taken = [timed(layer.forward, each, tokens + i, cache) for i, each in enumerate(inputs)]
                times[name] += [ms for ms, _ in taken[_WARM:]]
                stats[name] = handle.stats()
            for (_, output), expected in zip(taken, stock, strict=True):
                error = max(error, _check(output, expected, name))
    stock_bytes = sum(each.numel() * each.element_size() for each in states)
    return {
        "bench": "layer",
        **machine(device, dtype),
        "kernels": described(loaded),
        "shape": {"name": shape, "tokens": tokens, "heads": layer.config.num_attention_heads, "index_topk": topk},
        "error": error,
        **compared(times, stats, stock_bytes, layer.attention, device),
        "prefill": _prompt(layer, prefill, stock_prefill, kernels) if prefill else None,
    }
