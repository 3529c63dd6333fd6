"""register_attention: sparse attention as an attention function of transformers. It keeps no state: every call
summarises the keys that it is given, and selects from them as a patched model does."""

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import kernel_loader
from .config import LayerPlan, SparseConfig, is_int
from .decode import prefill_token, token_at
from .layer import SparseLayer
from .mixed import kinds_of, other_layers
from .tokens import MASK_REASON, MAX_DRAFT, Step, Tokens, read_mask

NAME = "hf_sparse_prr"
_WORKSPACE = 2**28  # bytes of gathered K/V at a time
_WARNED: set[str] = set()


def register_attention(config: SparseConfig | None = None) -> None:
    """Make attn_implementation="hf_sparse_prr" available: exact sparse attention on any model and transformers cache.

    No SparseCache, no patch, nothing predicted or kept. `patch_model` is the fast way: here each call summarises all
    keys anew, and is slower than dense attention (a decode step over 32768 tokens of 8 KV heads, one CPU thread, fp32:
    301 ms against 82). The registration is global, and the last one counts, also for models that are loaded already.

    Every query token selects for itself in the batch rows that outgrew their budget; rows that fit get stock SDPA. The
    whole call is stock SDPA for a prompt unless config.sparse_prefill (more than 16 query tokens; the last chunk of a
    chunked prompt may have fewer, and selects), in dense layers and those with a sliding window, while gradients are
    recorded, in training, and for a mask that is not causal x per-token validity (said once; strict raises). Models
    with an indexer of their own attend to exactly the tokens it has chosen, whatever the settings. Masks are read on
    the host, and a compiled model breaks its graph here.

    Args:
        config: settings, SparseConfig() by default.

    Raises:
        TypeError: config isn't a SparseConfig.
        ValueError: settings that need a state: speculate=True, trace=True, semantics="superset".
        KernelError: the kernels can't be loaded, and nothing may take their place.
    """
    if config is not None and not isinstance(config, SparseConfig):
        raise TypeError(f"config: expected a SparseConfig, got {config!r}")
    config = config or SparseConfig()
    for field, refused, expected in (
        ("speculate", True, "False or 'auto'"),
        ("trace", True, "False"),
        ("semantics", "superset", "'exact'"),
    ):
        if getattr(config, field) == refused:
            raise ValueError(f"{field}: expected {expected} for register_attention, got {refused!r}: it keeps no state")
    AttentionInterface.register(NAME, SparseAttention(config))
    AttentionMaskInterface.register(NAME, sdpa_mask)


class SparseAttention:
    """What is registered: the attention function of one SparseConfig."""

    def __init__(self, config: SparseConfig) -> None:
        self.config = config
        self.kernels = kernel_loader.resolve(config.kernels, config.strict)
        if self.kernels.fallback is not None:
            _warn(f"kernels {config.kernels}", self.kernels.fallback)
        self._plans: WeakKeyDictionary[nn.Module, LayerPlan] = WeakKeyDictionary()

    @torch.compiler.disable  # traced, it would be compiled anew for each length
    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """[B, Q, Hq, Dv] of query [B, Hq, Q, D], key [B, H, T, D] and value [B, H, T, Dv].

        attention_mask: bool or additive, [B or 1, 1, Q, T]; None: causal.  indices: int [B, Q, k], the columns that the
        model has chosen for each query token; -1 and masked ones are ignored.

        Raises:
            ValueError: s_aux or softcap, or indices or a mask of another shape.
            RuntimeError: strict, and the mask or the heads force a dense call.
        """
        for name in ("s_aux", "softcap"):
            if kwargs.get(name) is not None:
                raise ValueError(f"{name}: expected None, got one from {type(module).__name__}: {NAME} would ignore it")
        recorded = torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value))
        plain = recorded or module.training or dropout > 0 or kwargs.get("position_bias") is not None
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        indices = kwargs.pop("indices", None)
        if indices is not None:
            check_indices(indices, query)
            shared = attention_mask is None or attention_mask.shape[1:] == (1, query.shape[2], key.shape[2])
            # Gathering pays while it reads less than all K/V. 16 heads, 4096 tokens, 256 of them chosen, fp32, one CPU
            # thread: 1 query 2.2 ms against 26 with a mask, 4 queries 10 against 29, 16 queries 64 against 36
            if shared and not plain and 0 < indices.shape[1] * indices.shape[2] < key.shape[2]:
                return gathered(query, key, value, attention_mask, indices, scale), None
            attention_mask = with_indices(attention_mask, indices, key.shape[2])
        stock: dict[str, Any] = dict(scaling=scaling, dropout=dropout, **kwargs)
        inputs = (module, query, key, value, attention_mask)
        dense = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if plain or indices is not None or kwargs.get("sliding_window") is not None or kwargs.get("is_causal") is False:
            return dense(*inputs, **stock)
        plan = self.plan(module)
        count, columns = query.shape[2], key.shape[2]
        prompt = count > MAX_DRAFT  # a shorter first call fits
        if plan.status != "sparse" or columns <= plan.fits or (prompt and not plan.sparse_prefill):
            return dense(*inputs, **stock)
        tokens = tokens_of(attention_mask, query, columns)
        if tokens is None or key.shape[3] != value.shape[3]:
            reason = MASK_REASON if tokens is None else f"keys have {key.shape[3]} channels and values {value.shape[3]}"
            self._fall_back(f"stock dense attention runs for this call, because {reason}")
            return dense(*inputs, **stock)
        begin = tokens.length - count
        if tokens.all_longer(begin, plan.fits):
            output = query.new_empty((query.shape[0], count, query.shape[1], value.shape[3]))
        else:
            output, _ = dense(*inputs, **stock)
        self._select(query, key, value, tokens, plan, scale, output)
        return output, None

    def plan(self, module: nn.Module) -> LayerPlan:
        """What a module's layer does; dense for one that isn't a causal layer of a transformers model."""
        plan = self._plans.get(module)
        if plan is None:
            index: Any = getattr(module, "layer_idx", None)
            config: Any = getattr(module, "config", None)
            plan = LayerPlan.dense("not a causal layer")
            if is_int(index) and hasattr(config, "get_text_config") and getattr(module, "is_causal", False) is True:
                plans = self.config.plan(kinds_of(other_layers(config)))
                plan = plans[index] if index < len(plans) else plan
                if not plan.full:
                    name = type(module).__name__
                    _warn(f"kind {plan.reason}", f"layers of {name} stay dense, because of their {plan.reason}")
            self._plans[module] = plan
        return plan

    def _select(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tokens: Tokens,
        plan: LayerPlan,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Overwrite `output` [B, Q, Hq, Dv] in the rows that no longer fit. The queries are the last of `tokens`."""
        layer, kernels, begin = SparseLayer(), self.kernels.module, tokens.length - query.shape[2]
        layer.keys, layer.values, layer.device, layer.is_initialized = key, value, key.device, True
        layer.length, layer.plan = tokens.length, plan
        if tokens.any_longer(tokens.length - 1, plan.fits):
            layer.summarise(kernels, tokens.on(key.device))
        for at in range(query.shape[2]):
            if not tokens.any_longer(begin + at, plan.fits):
                continue
            token = token_at(tokens, begin + at, 0, plan, query.device)
            grouped = query[:, :, at].unflatten(1, (key.shape[1], -1))
            attended, _ = prefill_token(layer, grouped, token, kernels, scale)
            sparse = attended.flatten(1, 2).to(output.dtype)
            output[:, at] = torch.where(token.selects[:, None, None], sparse, output[:, at])

    def _fall_back(self, message: str) -> None:
        if self.config.strict:
            raise RuntimeError(f"strict=True: {message}")
        _warn(message, message)


def check_implementation(config: Any) -> None:
    """ValueError where the registered attention would stand in for a patched model's stock attention."""
    if config._attn_implementation == NAME:
        raise ValueError(
            f"attn_implementation: expected a stock one on a patched model, got {NAME!r}, which selects by itself; "
            "call model.set_attn_implementation('sdpa')"
        )


def _warn(cause: str, message: str) -> None:
    """One warning per process and cause."""
    if cause not in _WARNED:
        _WARNED.add(cause)
        warnings.warn(f"hf_sparse_prr: {message}", UserWarning, stacklevel=2)


def tokens_of(mask: torch.Tensor | None, query: torch.Tensor, columns: int) -> Tokens | None:
    """The columns up to the last query's own, as its mask [B or 1, 1, Q, columns] has them; None where it isn't causal
    x per-token validity.

    The last query's own column is the last one that it sees in any batch row: a preallocated cache hides those after.
    """
    batch, _, count, _ = query.shape
    end, validity = columns, None
    if mask is None:
        end = _own_columns(count, columns).stop
    elif mask.dim() != 4:
        return None
    else:
        last, _ = read_mask(mask[:, :, -1:], batch, columns - 1, 1, columns)
        if last is not None:
            end -= int(last.any(dim=0).flip(0).to(torch.uint8).argmax())
        validity, factorises = read_mask(mask, batch, end - count, count, columns)
        if not factorises:
            return None
    tokens = Tokens()
    tokens.commit(Step(0, end, end - count, validity), batch, columns, query.device)
    return tokens


def _own_columns(count: int, columns: int) -> range:
    """Those of the queries where there is no mask, by SDPA's convention: the first ones of a preallocated cache at its
    first prompt, else the last."""
    return range(count) if count > 1 else range(columns - 1, columns)


def check_indices(indices: torch.Tensor, query: torch.Tensor) -> None:
    """ValueError unless they are an int tensor [B, Q, k]."""
    expected = (query.shape[0], query.shape[2])
    if indices.dim() != 3 or indices.shape[:2] != expected or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices: expected int32 or int64 [{expected[0]}, {expected[1]}, k], got {indices.dtype} "
            f"{list(indices.shape)}"
        )


def with_indices(mask: torch.Tensor | None, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """The mask [B, 1, Q, columns] that leaves of another only the columns in indices [B, Q, k]."""
    batch, count, _ = indices.shape
    inside = (indices >= 0) & (indices < columns)
    chosen = torch.zeros((batch, count, columns + 1), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(2, torch.where(inside, indices, columns).long(), True)[:, None, :, :columns]
    if mask is None:
        own = torch.tensor(_own_columns(count, columns), device=indices.device)
        return chosen & (torch.arange(columns, device=indices.device) <= own[:, None])
    if not mask.is_floating_point():
        return chosen & mask.bool()
    # -inf and not the lowest number: a row without a column then gives 0
    return mask.masked_fill(~chosen | (mask <= torch.finfo(mask.dtype).min / 2), float("-inf"))


def _columns_and_bias(
    mask: torch.Tensor | None, indices: torch.Tensor, columns: int, own: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of indices [B, Q, k]: the columns to read, int64, and what to add to their logits, fp32, -inf where one doesn't
    count: -1, out of range, masked, or listed twice. own: [Q], for when there is no mask."""
    index = indices.long().sort(dim=2).values
    counts = (index >= 0) & (index < columns)
    counts[:, :, 1:] &= index[:, :, 1:] != index[:, :, :-1]
    index = index.clamp(0, columns - 1)
    bias = torch.zeros(index.shape, device=index.device)
    if mask is None:
        counts &= index <= own[:, None]
    else:
        picked = mask[:, 0].expand(len(index), -1, -1).gather(2, index)
        if picked.is_floating_point():
            counts &= picked > torch.finfo(picked.dtype).min / 2
            bias = picked.float()
        else:
            counts &= picked.bool()
    # One that doesn't count reads a column that does: what lies in its own may be anything, also NaN
    stand_in = index.masked_fill(~counts, 0).amax(dim=2, keepdim=True)
    return torch.where(counts, index, stand_in), bias.masked_fill(~counts, float("-inf"))


def gathered(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    indices: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention [B, Q, Hq, Dv] to the columns in indices [B, Q, k] alone, in fp32; 0 where none counts. K/V are read in
    parts of at most _WORKSPACE bytes, or of one query token and KV head where that is more."""
    (batch, heads, columns, _), count, slots = key.shape, indices.shape[1], indices.shape[2]
    grouped = query.unflatten(1, (heads, -1))
    group = grouped.shape[2]
    lane_bytes = slots * ((key.shape[3] + value.shape[3]) * (key.element_size() + 4) + 12 * group)
    rows = max(_WORKSPACE // max(lane_bytes, 1), 1)
    step = min(max(rows // (batch * heads), 1), count)
    lanes = torch.arange(batch * heads, device=key.device).split(max(rows // step, 1))
    own = torch.tensor(_own_columns(count, columns), device=key.device)
    output = query.new_empty((batch, heads, group, count, value.shape[3]))
    for begin in range(0, count, step):
        part = slice(begin, begin + step)
        kept = None if mask is None else mask[:, :, part]
        index, bias = _columns_and_bias(kept, indices[:, part], columns, own[part])
        empty = (bias == float("-inf")).all(dim=2)[:, :, None, None]
        for lane in lanes:
            row, head = lane // heads, lane % heads
            at = (row[:, None, None], head[:, None, None], index[row])
            logits = grouped[row, head][:, :, part].transpose(1, 2).float() @ key[at].float().transpose(2, 3)
            logits = logits * scale + bias[row][:, :, None]
            attended = torch.softmax(logits, dim=3) @ value[at].float()
            attended = attended.masked_fill(empty[row], 0.0)
            output[row, head, :, part] = attended.transpose(1, 2).to(output.dtype)
    return output.flatten(1, 2).transpose(1, 2).contiguous()
