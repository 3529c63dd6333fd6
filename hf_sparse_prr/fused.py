"""One decode token through a decoder layer in four kernels beside attention: norms, projections, gate and residuals.

A plain layer calls some 30 kernels there, 48 us of an H200's time a layer and 133 more for the products, one by one;
these take 112. They read the model's own weights where they are. What isn't plain is called as the module it is.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, silu

from .cache import SparseCache, cache_in

if TYPE_CHECKING:
    from .patching import PatchHandle

DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)  # in float32 a model stays stock to the last bit
_SILU = ("SiLU", "SiLUActivation")

Layer = Callable[..., torch.Tensor]


def why_not_module(module: Any) -> str | None:
    """What a graph, or another kernel in its place, would leave out."""
    name = type(module).__name__
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # Those of transformers wait for hidden states to be asked for; our own hands on a mask that the tail doesn't see
    others = [hook for hook in hooks if str(hook.__module__).partition(".")[0] not in ("transformers", __package__)]
    if hasattr(module, "_hf_hook") or others:
        return f"a hook on {name}"
    if "forward" in module.__dict__:
        return f"the forward of a {name} was replaced"
    if module._compiled_call_impl:
        return f"a {name} is compiled"
    return None


class Linears(NamedTuple):
    """Plain linear layers over one input, as `grouped_linear` takes them."""

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor, ...] | None

    def apply(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Each layer's output, by the op that its module calls."""
        if self.biases is None:
            return [linear(x, weight) for weight in self.weights]
        return [linear(x, *each) for each in zip(self.weights, self.biases, strict=True)]


def linears(modules: list[Any], dtypes: tuple[torch.dtype, ...] = DTYPES) -> Linears | None:
    """None unless they are linear layers as torch makes them, without any hook (a sharded one sums in its own), of one
    dtype and device, all with a bias or none."""
    for module in modules:
        weight = getattr(module, "weight", None)
        if type(module) is not nn.Linear or type(weight) is not nn.Parameter or why_not_module(module) is not None:
            return None
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        if weight.dtype not in dtypes or weight.device.type not in DEVICES or weight.stride(1) != 1:
            return None
    weights, biases = tuple(module.weight for module in modules), [module.bias for module in modules]
    if len({(weight.dtype, weight.device) for weight in weights}) > 1 or len({bias is None for bias in biases}) > 1:
        return None
    return Linears(weights, None if biases[0] is None else tuple(biases))


def _halves(linears: Linears | None) -> Linears | None:
    """Of the one layer whose output is cut in two."""
    if linears is None:
        return None
    return Linears(linears.weights[0].chunk(2), None if linears.biases is None else linears.biases[0].chunk(2))


def is_norm(norm: Any, modeling: Any) -> bool:
    """Whether it's an RMS norm of the modeling file, in half precision."""
    named = type(norm).__module__ == modeling.__name__ and type(norm).__name__.endswith("RMSNorm")
    return named and norm.weight.dtype in DTYPES and why_not_module(norm) is None


def is_silu(activation: Any) -> bool:
    """Whether it does x * sigmoid(x), and a hook or another forward nothing else."""
    return type(activation).__name__ in _SILU and why_not_module(activation) is None


class FusedLayer:
    """Stands in for the forward of a decoder layer, for one token of one row that selects."""

    def __init__(self, decoder: Any, kernels: Any) -> None:
        self.decoder, self.kernels = decoder, kernels
        attention, mlp = decoder.self_attn, decoder.mlp
        modeling = attention.modeling
        names = ("q_proj", "k_proj", "v_proj")
        self.states = self.out = self.gates = self.down = None
        self.norms = decoder.input_layernorm, decoder.post_attention_layernorm
        self.after = [getattr(decoder, f"post_{part}_layernorm", None) for part in ("self_attn", "mlp")]  # GLM-4
        if attention.fuses() and why_not_module(attention) is None:
            states, out = linears([getattr(attention, name) for name in names]), linears([attention.o_proj])
            if states and out and is_norm(self.norms[0], modeling):
                self.states, self.out = states, out
        activation = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
        plain = type(mlp).__module__ == modeling.__name__ and is_silu(activation)
        if plain and why_not_module(mlp) is None and hasattr(mlp, "down_proj"):
            if hasattr(mlp, "gate_up_proj"):
                gates = _halves(linears([mlp.gate_up_proj]))
            else:
                gates = linears([mlp.gate_proj, mlp.up_proj]) if hasattr(mlp, "gate_proj") else None
            down = linears([mlp.down_proj])
            if gates and down and is_norm(self.norms[1], modeling):
                self.gates, self.down = gates, down

    @property
    def parts(self) -> int:
        """How many of its two parts, attention's projections and the MLP, are fused."""
        return (self.states is not None) + (self.gates is not None)

    def _linear(self, x: torch.Tensor, linears: Linears, norm: Any = None, **how: Any) -> torch.Tensor:
        if norm is not None:
            how |= dict(norm=norm.weight, eps=norm.variance_epsilon)
        output: torch.Tensor = self.kernels.grouped_linear(x, *linears, **how)
        return output

    def _back(self, x: torch.Tensor, linears: Linears, residual: torch.Tensor, after: Any) -> torch.Tensor:
        """Into the residual stream [1, X]."""
        if after is None:
            return self._linear(x, linears, residual=residual)
        return residual + after(self._linear(x, linears))

    def fit(self, hidden_states: torch.Tensor, held: SparseCache, **kwargs: Any) -> torch.Tensor | None:
        """A token for which all rows fit their budget, to the bits of the modules: the same ops without what torch does
        around each module, 20 us of a layer's 130 on a host. None where it has to go through them."""
        decoder, (before, between), mlp = self.decoder, self.norms, self.decoder.mlp
        if self.states is None or self.out is None or self.gates is None or self.down is None:
            return None
        if kwargs.get("attention_mask") is not None or not decoder.self_attn.goes_on(held, hidden_states):
            return None
        x = before.forward(hidden_states)
        query, key, value = self.states.apply(x)
        y, _ = decoder.self_attn.attend_fitting(query, key, value, held, **kwargs)
        (y,) = self.out.apply(y)
        x = hidden_states + (y if self.after[0] is None else self.after[0](y))
        y = between.forward(x)
        if "gate_up_proj" in mlp._modules:
            gate, up = linear(y, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias).chunk(2, dim=-1)
        else:
            gate, up = self.gates.apply(y)
        (y,) = self.down.apply(silu(gate) * up)
        return x + (y if self.after[1] is None else self.after[1](y))

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        decoder, x = self.decoder, hidden_states[0]
        if self.states is not None and self.out is not None:
            states = self._linear(x, self.states, self.norms[0])
            x = self._back(decoder.self_attn.attend_states(states, **kwargs), self.out, x, self.after[0])
        else:
            y = decoder.self_attn(hidden_states=self.norms[0](hidden_states), **kwargs)[0]
            x = (hidden_states + (y if self.after[0] is None else self.after[0](y)))[0]
        if self.gates is not None and self.down is not None:
            inner = self._linear(x, self.gates, self.norms[1], gated=True)
            return self._back(inner, self.down, x, self.after[1])[None]
        y = decoder.mlp(self.norms[1](x[None]))
        return x[None] + (y if self.after[1] is None else self.after[1](y))


def layer_of(handle: "PatchHandle", decoder: Any) -> Layer:
    """The forward of a decoder layer, fused where it can be, and for the tokens that it can be for."""
    stock: Layer = decoder.forward
    attention = decoder.self_attn
    known = type(decoder).__module__ == getattr(getattr(attention, "modeling", None), "__name__", None)
    if not handle.config.fused_layers or not known or why_not_module(decoder) is not None:
        return stock
    if torch.nn.modules.module._has_any_global_hook():
        return stock
    if handle.indexer is not None or handle.kinds[attention.layer_idx]:  # its attention does it alone; a window
        return stock
    fused, index = FusedLayer(decoder, handle.kernels.module), attention.layer_idx
    if not fused.parts:
        return stock
    handle.graphs.fused += 1

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        cache = cache_in(kwargs)
        fits = isinstance(cache, SparseCache) and cache.fitting is not None and index > cache.leader
        if fits and not args and handle.replaced:
            output = fused.fit(hidden_states, cache, **kwargs)
            return stock(hidden_states, **kwargs) if output is None else output
        if args or not applies(handle, index, hidden_states, kwargs):
            return stock(hidden_states, *args, **kwargs)
        return fused(hidden_states, **kwargs)

    return forward


def applies(handle: "PatchHandle", layer_idx: int, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether this is one decode token of one row that has outgrown its budget: by host numbers that the first layer
    has too, and the same tokens whether steps are captured or not, so that their bits are the same."""
    cache = cache_in(kwargs)
    if hidden_states.shape[:2] != (1, 1) or hidden_states.dtype not in DTYPES or not isinstance(cache, SparseCache):
        return False
    plan, device = handle.sparse_plan, hidden_states.device.type
    if device not in DEVICES or plan is None or not handle.replaced or cache.tokens.batch != 1:
        return False
    begin = cache.tokens.length - 1 if cache.on_device else cache.layers[layer_idx].get_seq_length()
    decodes = begin >= (1 if cache.prompt_length is None else cache.prompt_length)
    elsewhere = torch.is_grad_enabled() or torch.is_autocast_enabled(device) or torch.compiler.is_compiling()
    return decodes and not elsewhere and cache.tokens.all_longer(begin, plan.fits)
