"""Decode steps under torch.compile: what generate() compiles by itself over a `SparseCache(model, max_length=N)`.

Nothing in a compiled step is known on the host, and its shapes are those of the buffers, so that one graph does for all
tokens of a run. What the host has to know is checked before and told after it. A row that still fits its budget selects
all of its blocks: as dense attention within rounding, and no other graph. Nothing is predicted, since a compiled step
has no stream beside it.
"""

from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import SparseCache
from .config import LayerPlan
from .decode import Token, select
from .layer import ordinary
from .ops import traceable
from .tokens import Grid, Step

if TYPE_CHECKING:
    from .patching import PatchHandle

_IMPLEMENTATIONS = ("sdpa", "eager")


def why_not(handle: "PatchHandle", cache: SparseCache, copies: int) -> str | None:
    """Why generate() can't compile steps over this cache. copies: beams, or sequences, of each row."""
    plan, implementation = handle.sparse_plan, handle.model.config._attn_implementation
    reasons = (
        (not cache.is_compileable, "the cache grows; max_length=N makes one that doesn't"),
        (handle.indexer is not None, "the model has an indexer"),
        (any(handle.kinds), "some layers have a sliding window"),
        (plan is None, "no layer selects"),
        (plan is not None and plan.dense_length > plan.blocks * plan.block_size, "dense_length is above the budget"),
        (handle.config.semantics != "exact", "semantics='superset' needs predictions"),
        (handle.config.trace, "trace=True keeps tensors of every token"),
        (implementation not in _IMPLEMENTATIONS, f"the attention implementation is {implementation!r}"),
        (copies > 1, "beams reorder the cache"),
        (len({each.device for each in handle.model.parameters()}) > 1, "weights are on several devices"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _token(cache: SparseCache, plan: LayerPlan) -> Token:
    """The newest token, from the device alone: as `token_at`, but each row selects."""
    valid, start, end = cache.tokens.valid, cache.tokens.start, cache.tokens.end
    newest = (end - 1 - start) // plan.block_size
    local = newest[:, None] - torch.arange(plan.local_blocks - 1, -1, -1, device=start.device)
    local = torch.where(local >= plan.sink_blocks, local, -1)  # a short row's last blocks may be its first ones
    sinks = torch.arange(plan.sink_blocks, device=start.device).expand(newest.shape[0], -1)
    forced = torch.cat([sinks, local], dim=1)
    members = start[:, None, None] + forced[..., None] * plan.block_size
    members = members + torch.arange(plan.block_size, device=start.device)
    real = valid.gather(1, members.clamp(0, valid.shape[1] - 1).flatten(1)).view(members.shape)
    holds = (real & (members < end[:, None, None])).any(dim=-1) & (forced >= 0)
    forced = torch.where(holds, forced, -1).to(torch.int32)[:, None]
    last = (newest - plan.local_blocks + 1).clamp(min=0)
    always = torch.ones_like(start, dtype=torch.bool)
    return Token(
        column=0, step=0, valid=valid, start=start, end=end, selects=always, length=end - start, last=last,
        forced=forced, next_last=last, next_forced=forced,
    )  # fmt: skip


def attend(
    attention: Any, hidden_states: torch.Tensor, position_embeddings: Any, mask: torch.Tensor, cache: SparseCache
) -> torch.Tensor:
    """One layer of a token that `CompiledCall` has checked and appended to `cache.tokens`. mask: bool [B, 1, 1, T]."""
    handle, layer, plan = attention.binding.handle, cache.layers[attention.layer_idx], attention.binding.plan
    kernels, tokens = traceable(handle.kernels.module), cache.tokens
    query, key, value = attention.project(hidden_states, position_embeddings)
    if plan.status != "sparse":
        kernels.append_states(layer.keys, layer.values, key, value, tokens.end)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention.config._attn_implementation, attention.modeling.eager_attention_forward
        )
        seen = attention.as_mask(mask, query.dtype)
        output, _ = interface(attention, query, layer.keys, layer.values, seen, dropout=0.0, scaling=attention.scaling)
        return attention.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
    grid = Grid(tokens.valid, tokens.start, tokens.end)
    layer.append_on_device(kernels, key, value, grid)
    layer.summarise_on_device(kernels, grid)
    token = _token(cache, plan)
    grouped = query[:, :, 0].reshape(*key.shape[:2], -1, query.shape[3])
    selected, free, _ = select(layer, grouped, token, kernels, attention.scaling)
    nothing = selected[:, :, :0]
    data = (grouped, layer.keys, layer.values, token.valid, token.start)
    output = kernels.repair_merge(
        *data, selected, token.end, nothing, None, scale=attention.scaling, block_size=plan.block_size
    )
    numbers = cache.statistics.held(attention.layer_idx)  # type: ignore[union-attr]
    kernels.tally(numbers, selected, free, nothing, None, plan.sink_blocks, token.last)
    return attention.o_proj(output.to(query.dtype).reshape(*hidden_states.shape[:-1], -1))


class CompiledCall:
    """A model's forward: `compiled` for the decode tokens that it does for, the model's own for the others."""

    def __init__(self, handle: "PatchHandle", compiled: Any) -> None:
        self.handle, self.compiled = handle, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        ids = kwargs.get("input_ids")
        step = self._step(cache, ids, kwargs) if isinstance(cache, SparseCache) and ids is not None else None
        if step is None:
            return self.handle.model(*args, **kwargs)
        assert isinstance(cache, SparseCache) and ids is not None
        with ordinary():
            self._prepare(cache, step)
        cache.in_compiled = True
        try:
            output = self.compiled(*args, **{**kwargs, "attention_mask": cache.tokens.valid[:, None, None]})
        except BaseException:  # raised again
            cache.tokens.crop(step.begin)
            raise
        finally:
            cache.in_compiled = False
        self._advance(cache, step)
        return output

    def _step(self, cache: SparseCache, ids: torch.Tensor, kwargs: dict[str, Any]) -> Step | None:
        """The token, or None where it has to run as ever."""
        handle, layers = self.handle, cache.layers
        mask = kwargs.get("attention_mask")
        mask = next(iter(mask.values())) if isinstance(mask, dict) else mask
        plain = ids.shape[1] == 1 and not kwargs.get("output_attentions") and handle.replaced
        if not plain or not cache.is_compileable or not all(layer.is_initialized for layer in layers):
            return None
        if len({layer.length for layer in layers}) > 1 or layers[0].length >= layers[0].capacity:
            return None  # it says why
        cache.check_settings(handle.config)
        step = cache.tokens.plan(mask, ids.shape[0], 1, layers[0].capacity, cache.prompt_length)
        return step if step.first_decode == 0 and step.dense_reason is None and not step.changed else None

    def _prepare(self, cache: SparseCache, step: Step) -> None:
        """Bring everything that the step reads to where it stays."""
        kernels, device = self.handle.kernels.module, cache.layers[0].keys.device
        statistics = self.handle.recorder.statistics_of(cache)
        grid = cache.tokens.on(device)
        batch = cache.layers[0].batch_size
        for index, layer in enumerate(cache.layers):
            layer.settle()
            if layer.plan.status == "sparse":
                if layer.is_due(step.begin):
                    layer.summarise(kernels, grid)
                statistics.numbers(index, layer.keys)
                statistics.bytes_per_block[index] = layer.plan.block_size * layer.bytes_per_token
                statistics.bytes_per_summary[index] = layer.bytes_per_summary
        cache.tokens.commit(step, batch, cache.layers[0].capacity, device)
        for tensor in self._held(cache):
            if not hasattr(tensor, "_dynamo_static_input_type"):  # a CUDA graph may write to it where it is
                torch._dynamo.mark_static_address(tensor, guard=False)

    def _held(self, cache: SparseCache) -> list[torch.Tensor]:
        tensors = [cache.tokens.valid, cache.tokens.start, cache.tokens.end]
        for index, layer in enumerate(cache.layers):
            numbers = None if cache.statistics is None else cache.statistics.held(index)
            tensors += [layer.keys, layer.values, *layer.summaries, *([] if numbers is None else [numbers])]
        return tensors

    def _advance(self, cache: SparseCache, step: Step) -> None:
        """Tell the host what was appended."""
        statistics = self.handle.recorder.statistics_of(cache)
        cache.told(step)
        statistics.steps += 1
        self.handle.compiled += 1
        for index, layer in enumerate(cache.layers):
            layer.advance()
            layer.memory.clear()  # nothing was predicted, and what was last isn't any more
            statistics.selector_calls[index] += layer.plan.status == "sparse"
