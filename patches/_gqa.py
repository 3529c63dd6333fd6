"""The forward that every grouped-query family shares: append, stock attention where it applies, sparse where rows
outgrow their budget."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_sparse_prr.budget import choose
from hf_sparse_prr.cache import SparseCache
from hf_sparse_prr.calibration import calibrate_beside
from hf_sparse_prr.compiled import attend
from hf_sparse_prr.decode import attention_weights, decode_token, prefill_token, record_fitting, token_at
from hf_sparse_prr.dense import gpu_attention, on_gpu, without_cudnn
from hf_sparse_prr.fitting import fitting_of
from hf_sparse_prr.fused import is_norm
from hf_sparse_prr.layer import ordinary, writes
from hf_sparse_prr.patches._base import SparseAttention
from hf_sparse_prr.report import Statistics
from hf_sparse_prr.tokens import Step

if TYPE_CHECKING:

    class _Attention(SparseAttention):
        """What a stock attention class has."""

        head_dim: int
        q_norm: Any
        k_norm: Any
        q_proj: Any
        k_proj: Any
        v_proj: Any

else:
    _Attention = SparseAttention


States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SparseGQA(_Attention):
    """Grouped-query attention, whose KV heads select blocks.

    rotates: which channels of a head RoPE turns together, "halves" (i and i + A/2 of the first A) or "neighbours"; None
    where it does something else: the layer's linear parts aren't fused then.
    """

    rotates: ClassVar[str | None] = None

    def project(self, hidden_states: torch.Tensor, position_embeddings: Any, *_: Any) -> States:
        """Post-RoPE query [B, H*G, Q, D], key and value [B, H, Q, D], by the modules of the stock class."""
        query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.turn(query, key, value, position_embeddings)

    def turn(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position_embeddings: Any) -> States:
        """As `project`, of what the projections gave: [B, Q, H*G*D] and [B, Q, H*D]."""
        heads = (*query.shape[:-1], -1, self.head_dim)
        query, key, value = query.view(heads), key.view(heads), value.view(heads)
        if "q_norm" in self._modules:  # Qwen3, and GLM-4-MoE where its config says so
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key = self.modeling.apply_rotary_pos_emb(query, key, *position_embeddings)
        if query.dtype != value.dtype:  # under autocast RoPE's float32 cosines promote; stock attention would cast back
            query, key = query.to(value.dtype), key.to(value.dtype)
        return query, key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the stock forward; the cache is `cache` since transformers 5.24 and `past_key_values` before."""
        given = past_key_values if cache is None else cache
        if isinstance(given, SparseCache):
            if given.in_compiled:
                assert attention_mask is not None
                return attend(self, hidden_states, position_embeddings, attention_mask, given), None
            if given.fitting is not None and attention_mask is None and self.goes_on(given, hidden_states):
                states = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
                output, weights = self.attend_fitting(*states, given, position_embeddings, **kwargs)
                return self.o_proj(output), weights
        cache = self.given_cache(cache, past_key_values, kwargs)
        if not isinstance(cache, SparseCache):
            self.note_stock(cache, attention_mask, hidden_states.shape[1], kwargs)
            return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        wants_weights = self.check_cache(cache, kwargs)
        grad = torch.is_grad_enabled()
        project = partial(self.project, hidden_states, position_embeddings)
        # Ordinary tensors without gradients, whatever mode the caller is in: a later caller may be in another
        with ordinary():
            if cache.kinds[self.layer_idx]:  # a sliding window: transformers' own layer
                try:
                    cache.check_settings(self.binding.handle.config)
                    mask = self._window_mask(attention_mask, cache, hidden_states)
                    gpu = on_gpu(self.config._attn_implementation, hidden_states.device)
                    with without_cudnn() if gpu else nullcontext():
                        return super().forward(hidden_states, position_embeddings, mask, cache, **kwargs)
                except BaseException:  # raised again
                    cache.undo(self.layer_idx)
                    raise
            if cache.on_device:
                output, weights = self._attend_on_device(project, cache), None
            else:
                output, weights = self._attend_over(project, attention_mask, cache, wants_weights, grad, kwargs)
            output = output.to(hidden_states.dtype).reshape(*hidden_states.shape[:-1], -1)
            return self.o_proj(output), weights

    def goes_on(self, cache: SparseCache, hidden_states: torch.Tensor) -> bool:
        """Whether this layer has a token of the first one's next, for which all rows fit their budget."""
        fitting = cache.fitting
        if fitting is None or self.layer_idx <= cache.leader or cache.kinds[self.layer_idx]:
            return False
        return fitting.goes_on(cache.layers[self.layer_idx], hidden_states, self.training)

    def attend_fitting(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        given: SparseCache,
        position_embeddings: Any = None,
        attention_mask: None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward` between its projections, of a token that `goes_on`."""
        assert given.fitting is not None
        states = self.turn(query, key, value, position_embeddings)
        output, weights = given.fitting.attend(self, given.layers[self.layer_idx], *states, kwargs)
        return output.reshape(*query.shape[:2], -1), weights

    def fuses(self) -> bool:
        """Whether `attend_states` does what `forward` does between its projections."""
        norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(self, name, None)) is not None]
        return self.rotates is not None and all(is_norm(norm, self.modeling) for norm in norms)

    @writes
    def attend_states(
        self, states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """`forward` of one token between its projections: states [1, Y], query, key and value side by side, to what
        `o_proj` is given, [1, H*G*D]."""
        cache = self.given_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None), kwargs)
        turn = partial(self._turn, states, position_embeddings)
        if cache.on_device:
            return self._attend_on_device(turn, cache).view(1, -1)
        self.check_cache(cache, kwargs)
        return self._attend_over(turn, attention_mask, cache, False, False, kwargs)[0].view(1, -1)

    def _turn(
        self,
        states: torch.Tensor,
        position_embeddings: Any,
        keys: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        end: torch.Tensor | None = None,
    ) -> States:
        """As `project`, of states [1, Y]. Key and value go to the column before `end` of `keys` and `values`, where
        they are given, and these are returned."""
        if keys is None or values is None or end is None:
            keys, values = states.new_empty((2, 1, self.config.num_key_value_heads, 1, self.head_dim))
            end = torch.ones(1, dtype=torch.int64, device=states.device)
        norms: dict[str, Any] = {}
        if "q_norm" in self._modules:
            norms = dict(query_norm=self.q_norm.weight, key_norm=self.k_norm.weight, eps=self.q_norm.variance_epsilon)
        cos, sin = (angle[:, 0] for angle in position_embeddings)
        query = self.binding.handle.kernels.module.rotate_append(
            states, cos, sin, keys, values, end, interleaved=self.rotates == "neighbours", **norms
        )
        return query[:, :, None], keys, values

    def _attend_over(
        self,
        project: Callable[[], States],
        attention_mask: Any,
        cache: SparseCache,
        wants_weights: bool,
        grad: bool,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Append what `project` gives, and attend: [B, Q, H*G, D], and weights where they are asked for. grad: whether
        the caller had gradients on."""
        config = self.binding.handle.config
        try:
            query, key, value = project()
            leads = self.layer_idx == cache.leader
            if leads:
                cache.fitting = None
            depth = self.config.num_hidden_layers if leads else None
            step = cache.begin(key, value, self.layer_idx, attention_mask, config, depth)
            if leads:
                self.binding.check_step(step, grad, key.device)
        except BaseException:  # raised again
            cache.undo(self.layer_idx)
            raise
        keys, values = cache.append(key, value, self.layer_idx, step, config)
        keys, values, attention_mask = self._stock_view(keys, values, attention_mask, cache, step)
        return self._attend(query, keys, values, attention_mask, cache, step, wants_weights, kwargs)

    def _attend_on_device(self, project: Callable[..., States], cache: SparseCache) -> torch.Tensor:
        """One decode token for which every row selects, that the first layer of full attention has checked: nothing of
        it is known on the host, so that a CUDA graph of it can be replayed for the next token. fp32 [B, 1, H*G, D]."""
        plan, handle, layer = self.binding.plan, self.binding.handle, cache.layers[self.layer_idx]
        kernels, tokens = handle.kernels.module, cache.tokens
        grid = tokens.on(layer.keys.device)
        query, key, value = project(layer.keys, layer.values, grid.end)
        if key is not layer.keys:
            layer.append_on_device(kernels, key, value, grid)
        layer.summarise_on_device(kernels, grid)
        token = token_at(tokens, tokens.length - 1, 0, plan, query.device, kernels=kernels)
        grouped = query[:, :, 0].unflatten(1, (layer.keys.shape[1], -1))
        statistics = handle.recorder.statistics_of(cache)
        given = (grouped, token, kernels, self.scaling, statistics, False, cache.late)
        output, _ = decode_token(layer, self.layer_idx, *given)
        return output.flatten(1, 2)[:, None]

    def _window_mask(self, mask: Any, cache: SparseCache, hidden_states: torch.Tensor) -> Any:
        """The mask of a layer with a window; where it hides nothing but the cache knows of padding, one of our own."""
        if not cache.tokens.padded or self.config._attn_implementation not in ("eager", "sdpa"):
            return mask
        layer, count = cache.layers[self.layer_idx], hidden_states.shape[1]
        begin, (length, offset) = layer.get_seq_length(), layer.get_mask_sizes(count)
        columns = torch.arange(offset, offset + length, device=hidden_states.device)
        own = torch.arange(begin, begin + count, device=hidden_states.device)[:, None]
        window = (columns <= own) & (columns > own - layer.sliding_window)
        if isinstance(mask, torch.Tensor):
            allowed = mask == 0 if mask.is_floating_point() else mask.bool()
            if not torch.equal(allowed, window.expand_as(allowed)):
                return mask
        valid = cache.tokens.on(hidden_states.device).valid
        new = max(begin + count - cache.tokens.length, 0)
        known = torch.nn.functional.pad(valid[:, : cache.tokens.length], (0, new), value=True)
        return self.as_mask((window & known[:, None, offset : offset + length])[:, None], hidden_states.dtype)

    def _stock_view(
        self, keys: torch.Tensor, values: torch.Tensor, mask: Any, cache: SparseCache, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """K/V and mask as a DynamicCache gives them to stock attention: a preallocated buffer's columns in use, no mask
        where it hides nothing, and a mask where none came but the cache knows of padding."""
        end = step.begin + step.count
        if keys.shape[2] > end:
            keys, values = keys[:, :, :end], values[:, :, :end]
            if isinstance(mask, torch.Tensor) and mask.dim() == 4:
                hides = cache.tokens.padded or step.dense_reason is not None
                mask = mask[..., :end] if step.count > 1 or hides or mask.dtype != torch.bool else None
        unmasked = step.validity is None and step.dense_reason is None
        if unmasked and cache.tokens.padded and self.config._attn_implementation in ("eager", "sdpa"):
            valid = cache.tokens.on(keys.device).valid
            columns = torch.arange(end, device=keys.device)
            seen = (columns <= columns[step.begin :, None]) & valid[:, None, :end]
            mask = self.as_mask(seen[:, None], keys.dtype)
        return keys, values, mask

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: SparseCache,
        step: Step,
        wants_weights: bool,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, Q, H*G, D]. Stock runs once where any row of any token needs it; tokens that select are overwritten."""
        plan, heads = self.binding.plan, keys.shape[1]
        sparse = plan.status == "sparse" and step.dense_reason is None
        first = step.begin + (0 if plan.sparse_prefill else step.first_decode)
        selecting = range(first, step.begin + step.count) if sparse else range(0)
        statistics = self.binding.handle.recorder.statistics_of(cache)
        if self.layer_idx == cache.leader:
            statistics.steps += step.count - step.first_decode
            choose(self.binding.handle, cache, step, query, heads)
        weights: torch.Tensor | None = None
        all_sparse = len(selecting) == step.count and cache.tokens.all_longer(step.begin, plan.fits)
        if all_sparse and not wants_weights:
            output = query.new_empty((query.shape[0], query.shape[2], query.shape[1], values.shape[3]))
        else:
            implementation = self.look(cache).implementation
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, self.modeling.eager_attention_forward)
            if on_gpu(implementation, query.device):
                causal = step.dense_reason is None and not cache.tokens.padded
                attention = partial(gpu_attention, causal=causal)
            if self.layer_idx == cache.leader and not wants_weights and attention_mask is None:
                cache.fitting = fitting_of(self.binding.handle, cache, step, attention)
            if "sliding_window" in self.__dict__:  # what Qwen's classes hand on; None in a layer of full attention
                kwargs["sliding_window"] = self.sliding_window
            output, weights = attention(
                self, query, keys, values, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
            )
        if sparse and cache.layers[self.layer_idx].plan.calibrates and step.first_decode:
            layer, kernels = cache.layers[self.layer_idx], self.binding.handle.kernels.module
            layer.memory.remember(query[:, :, : step.first_decode].unflatten(1, (heads, -1)), step.begin)
            if cache.ends_prompt(step) and cache.tokens.any_longer(step.begin + step.first_decode, plan.fits):
                calibrate_beside(layer, cache.tokens, kernels, self.scaling)
        for column in selecting:
            grouped = query[:, :, column - step.begin].unflatten(1, (heads, -1))
            is_prompt = column < step.begin + step.first_decode
            self._select(grouped, keys, column, is_prompt, cache, statistics, output, weights)
        return output, weights

    def _select(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        column: int,
        is_prompt: bool,
        cache: SparseCache,
        statistics: Statistics,
        output: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> None:
        """Overwrite `output` [B, Q, H*G, D], and `weights` [B, H*G, Q, T] where there are any, of the token in `column`
        in the rows that no longer fit. query: [B, H, G, D]."""
        plan, handle = self.binding.plan, self.binding.handle
        tokens, layer = cache.tokens, cache.layers[self.layer_idx]
        at = column - tokens.length  # from the end: a forward's decode tokens are its last ones
        decode_step = len(cache.decode_columns) + at
        if not tokens.any_longer(column, plan.fits):
            if handle.config.trace and not is_prompt:
                record_fitting(statistics, self.layer_idx, plan, query, decode_step)
            return
        kernels = handle.kernels.module
        token = token_at(tokens, column, decode_step, plan, query.device, handle.inv_freq)
        if layer.is_due(column):
            layer.summarise(kernels, tokens.on(query.device))
        if is_prompt:
            attended, blocks = prefill_token(layer, query, token, kernels, self.scaling)
        else:
            attended, blocks = decode_token(
                layer, self.layer_idx, query, token, kernels, self.scaling, statistics, handle.config.trace
            )
        selects = token.selects[:, None, None]
        output[:, at] = torch.where(selects, attended.flatten(1, 2).to(output.dtype), output[:, at])
        if weights is not None:
            sparse = attention_weights(query, keys, token, blocks, self.scaling, plan.block_size).flatten(1, 2)
            weights[:, :, at] = torch.where(selects, sparse.to(weights.dtype), weights[:, :, at])
