"""Time one latent-attention layer with an indexer at a published model's sizes: stock on a DynamicCache, serial sparse
and PRR, in turns in one process, on a GPU also as CUDA graphs, and prompts on an empty cache. Outputs that aren't
stock's end it."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from .bench import CORRELATION, compared, described, machine, measured_kernels, successive
from .bench_captured import CapturedSteps, shares
from .bench_exact import ExactnessError, check_bits
from .bench_indexed_prompt import time_prompt
from .bench_time import Timer
from .cache import SparseCache
from .hooks import cache_argument
from .patching import patch_model

# Their sizes are the defaults of transformers' config classes
SHAPES = {"deepseek-v3.2": "deepseek_v32", "glm-5": "glm_moe_dsa"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # of the largest output
DEVICES = ("cuda",)  # that have graphs
SETTINGS = {"serial": False, "prr": True}  # `speculate` of each
_WARM = 3  # first steps of a turn, not timed
# Of fused steps on a GPU: sums are ordered otherwise, and of random index scores some that nearly tie change places
_TIED = 0.15

Progress = Callable[[str, int, int | None], None]


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
        with torch.device(device):
            self.model: Any = AutoModelForCausalLM.from_config(self.config)
        self.model = self.model.to(dtype).eval()
        self.attention: Any = self.model.model.layers[0].self_attn
        self.attention.indexer.weights_proj.float()  # as in a model that was loaded
        self.options: dict[str, Any] = dict(device=device, dtype=dtype)

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, **self.options)

    def inputs(self, hidden: torch.Tensor, begin: int) -> dict[str, Any]:
        """What a layer of a patched model is given, of the tokens [1, Q, hidden] that follow `begin` others: no mask
        [1, 1, Q, T]."""
        positions = torch.arange(begin, begin + hidden.shape[1], device=hidden.device)[None]
        embeddings = self.model.model.rotary_emb(hidden, positions)
        return dict(hidden_states=hidden, position_embeddings=embeddings, attention_mask=None, position_ids=positions)

    def attend(self, given: dict[str, Any], cache: Any) -> torch.Tensor:
        return self.attention(**given, **{cache_argument(): cache})[0]

    def forward(self, hidden: torch.Tensor, begin: int, cache: Any) -> torch.Tensor:
        """Output of the tokens [1, Q, hidden] that follow `begin` others."""
        given = self.inputs(hidden, begin)
        if not isinstance(cache, SparseCache):
            columns = torch.arange(begin + hidden.shape[1], device=hidden.device)
            given["attention_mask"] = (columns <= given["position_ids"][0, :, None])[None, None]
        return self.attend(given, cache)

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


def check(found: torch.Tensor, stock: torch.Tensor, what: str, allowed: float | None = None) -> float:
    """Largest difference to stock, as a share of its largest output. ExactnessError above the tolerance."""
    error = float((found.float() - stock.float()).abs().max() / stock.float().abs().max())
    allowed = TOLERANCE[stock.dtype] if allowed is None else allowed
    if not error <= allowed:
        raise ExactnessError(f"{what}: expected stock's output within {allowed:g} of its largest, got {error:.2g}")
    return error


def _decode(
    layer: Layer, tokens: int, expanded: bool, rounds: int, steps: int, kernels: str | Path | ModuleType,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """All settings over a cache of random latents."""
    device = torch.device(layer.options["device"])
    inputs = successive(lambda: layer.normal(1, 1, layer.config.hidden_size), steps + _WARM, CORRELATION)
    states, timed = layer.states(tokens), Timer(device)
    prefilled = layer.filled(SparseCache(layer.config), states, False)
    times: dict[str, list[float]] = {"stock": [], **{name: [] for name in SETTINGS}}
    stats, graphs, error, drift = {}, {}, 0.0, 0.0
    for turn in range(rounds):
        progress(f"{tokens} tokens: decoding", turn, rounds)
        cache = layer.filled(DynamicCache(config=layer.config), states, expanded)
        taken = [timed(layer.forward, each, tokens + i, cache) for i, each in enumerate(inputs)]
        times["stock"] += [ms for ms, _ in taken[_WARM:]]
        stock = [output for _, output in taken]
        del cache
        if turn == 0:
            with patch_model(layer.model, speculate=False, kernels=kernels, fused_layers=False):
                cache = copy.deepcopy(prefilled)
                for i, (each, expected) in enumerate(zip(inputs, stock, strict=True)):
                    error = max(error, check(layer.forward(each, tokens + i, cache), expected, "by modules"))
        for name, speculate in SETTINGS.items():
            with patch_model(layer.model, speculate=speculate, kernels=kernels) as handle:
                cache = copy.deepcopy(prefilled)
                taken = [timed(layer.forward, each, tokens + i, cache) for i, each in enumerate(inputs)]
                times[name] += [ms for ms, _ in taken[_WARM:]]
                stats[name] = handle.stats()
                for (_, output), expected in zip(taken, stock, strict=True):
                    drift = max(drift, check(output, expected, name, None if device.type == "cpu" else _TIED))
                if turn == 0 and device.type in DEVICES:
                    cache = copy.deepcopy(prefilled)
                    for i, each in enumerate(inputs[:_WARM]):
                        layer.forward(each, tokens + i, cache)
                    captured = CapturedSteps(layer, handle, cache)
                    replayed = captured.outputs(inputs[_WARM:])
                    for output, (_, expected) in zip(replayed, taken[_WARM:], strict=True):
                        check_bits(f"{name}, captured", output, expected, "eager steps")
                    graphs[name] = captured.timed(inputs[_WARM:])
    stock_bytes = sum(each.numel() * each.element_size() for each in states)
    found = compared(times, stats, stock_bytes, layer.attention, layer.options["device"])
    captured_shares = {name: shares(each, found, name, device) for name, each in graphs.items()}
    return {"tokens": tokens, "error": error, "drift": drift, **found, "captured": captured_shares or None}


@torch.no_grad()
def bench_indexed(
    shape: str = "deepseek-v3.2",
    contexts: Sequence[int] = (8192,),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    rounds: int = 3,
    steps: int = 12,
    prefill: Sequence[int] = (),
    stock_prefill: int = 8192,
    progress: Progress = lambda *_: None,
    kernels: str | Path | ModuleType = "auto",
) -> dict[str, Any]:
    """At each of the contexts: medians in ms over `rounds` turns of `steps` decode steps each over so many tokens of
    random latents, with ratios to stock and bytes read a step. On a GPU also microseconds of a step in a CUDA graph,
    which has replayed the eager steps' bits, and the share of its floor. And ms and bytes of prompts of so many tokens
    as `prefill` lists, also of stock up to `stock_prefill` tokens.

    A step includes the projections and the append. Its input is random, correlated with the one before it.

    Raises:
        ValueError: a shape that isn't one of SHAPES; fewer tokens than a query selects.
        KernelError: kernels that can't be loaded; only those of "auto" may fall back.
        ExactnessError: an output by the modules isn't stock's, a fused one is farther from it than near ties take it
            ("drift"), or a captured step's isn't that of an eager one.
    """
    loaded = measured_kernels(kernels)
    layer = Layer(shape, device, dtype)
    topk, expanded = layer.config.index_topk, layer.caches_keys()
    for tokens in contexts:
        if tokens <= topk:
            raise ValueError(f"tokens: expected more than the {topk} that a query selects, got {tokens}")
    return {
        "bench": "layer",
        **machine(device, dtype),
        "kernels": described(loaded),
        "shape": {"name": shape, "heads": layer.config.num_attention_heads, "index_topk": topk},
        "rounds": rounds,
        "contexts": [_decode(layer, tokens, expanded, rounds, steps, kernels, progress) for tokens in contexts],
        "prefill": [
            time_prompt(layer, check, tokens, tokens <= stock_prefill, rounds, kernels, progress) for tokens in prefill
        ],
    }
