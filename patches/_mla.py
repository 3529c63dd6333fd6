"""The forward that models with an indexer share: append latents and index keys, select tokens, attend to latents."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_sparse_prr import fused_latent
from hf_sparse_prr.cache import SparseCache
from hf_sparse_prr.decode import decode_step, record_fitting
from hf_sparse_prr.dense import on_gpu, without_cudnn
from hf_sparse_prr.fused_latent import Held, Projected
from hf_sparse_prr.indexed import IndexedLayer
from hf_sparse_prr.latent import Index, LatentAttention, parts, select_tokens, token_of
from hf_sparse_prr.ops import traceable
from hf_sparse_prr.overlap import Overlap
from hf_sparse_prr.patches._absorb import Absorbed, absorbed, plainly_absorbed
from hf_sparse_prr.patches._base import SparseAttention
from hf_sparse_prr.tokens import Step

if TYPE_CHECKING:

    class _Attention(SparseAttention):
        """What a stock attention class has."""

        kv_lora_rank: int
        qk_nope_head_dim: int
        qk_rope_head_dim: int
        v_head_dim: int
        q_a_proj: Any
        q_a_layernorm: Any
        q_b_proj: Any
        kv_a_proj_with_mqa: Any
        kv_a_layernorm: Any
        kv_b_proj: Any
        indexer: Any
        expand_kv: Callable[..., tuple[torch.Tensor, torch.Tensor]]

else:
    _Attention = SparseAttention

_MODULES = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
# Products over gathered latents take as long as so many of SDPA's. DeepSeek-V3.2's layer, 2 CPU cores, float32: 64
# queries over 3000 tokens 1.8 s expanded and 2.7 gathered, over 6000 6.3 and 3.5; 256 over 6000 12.0 and 11.5
_GATHERED = 3
_SCORED = 32  # bytes that a score takes: itself, in float64 and as a key of the top-k
_INDEXER_MODULES = ("wq_b", "wk", "k_norm", "weights_proj")


class SparseMLA(_Attention):
    """Latent attention (MLA) to the tokens that an indexer selects.

    rotate_index: RoPE of the indexer.  index_rotates: which channels it turns together, "halves" (i and i + A/2 of the
    first A) or "neighbours".  hands_on: the class returns its selection, for layers that share it.
    """

    extra_arguments: ClassVar[frozenset[str]] = frozenset({"position_ids"})
    rotate_index: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    index_rotates: ClassVar[str]
    hands_on = False

    @classmethod
    def check_stock(cls, module: torch.nn.Module) -> None:
        """ValueError naming the submodule that is missing."""
        indexer: Any = getattr(module, "indexer", None)
        held = {name: getattr(module, name, None) for name in _MODULES}
        if indexer is not None:
            held.update({f"indexer.{name}": getattr(indexer, name, None) for name in _INDEXER_MODULES})
        elif not getattr(module, "skip_topk", False):
            held["indexer"] = None
        missing = [name for name, value in held.items() if value is None]
        if missing:
            raise ValueError(f"{type(module).__name__}: expected submodules {', '.join(held)}, got no {missing[0]}")
        config: Any = module.config
        if indexer is not None and indexer.index_topk != config.index_topk:
            raise ValueError(
                f"index_topk: expected the config's {config.index_topk}, got {indexer.index_topk} in a layer"
            )

    def project(self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> Projected:
        """By the modules of the stock class, called as modules: their weights may be elsewhere, sharded or wrapped."""
        batch, count = hidden_states.shape[:2]
        residual = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(residual).view(batch, count, -1, self.qk_nope_head_dim + self.qk_rope_head_dim)
        nope, rope = query.transpose(1, 2).split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        compressed, key = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent = self.kv_a_layernorm(compressed)[:, None]
        rope, key = self.modeling.apply_rotary_pos_emb_interleave(rope, key[:, None], *position_embeddings)
        if self.indexer is None:
            return Projected(nope, rope, latent, key, None, None)
        return Projected(nope, rope, latent, key, *self._index(hidden_states, residual, position_embeddings))

    def _index(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[Index, torch.Tensor]:
        """What the indexer asks of these tokens, and their keys."""
        indexer = self.indexer
        query = indexer.wq_b(residual).view(*hidden_states.shape[:2], -1, indexer.head_dim)
        key = indexer.k_norm(indexer.wk(hidden_states))[:, :, None]
        sizes = [self.qk_rope_head_dim, indexer.head_dim - self.qk_rope_head_dim]
        (query_rope, query_rest), (key_rope, key_rest) = query.split(sizes, dim=-1), key.split(sizes, dim=-1)
        query_rope, key_rope = self.rotate_index(query_rope, key_rope, *position_embeddings, unsqueeze_dim=2)
        query, key = torch.cat([query_rope, query_rest], dim=-1), torch.cat([key_rope, key_rest], dim=-1)
        # Its weights are kept in fp32
        weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
        return Index(query, weights * indexer.n_heads**-0.5, indexer.softmax_scale), key[:, :, 0]

    def absorb(self, latents: torch.Tensor) -> Absorbed:
        """What moves queries to latents, and attended latents to values."""
        return absorbed(self.kv_b_proj, latents, self.qk_nope_head_dim, self.v_head_dim)

    def absorb_plainly(self, latents: torch.Tensor) -> Absorbed | None:
        """The same of a projection that is plain, None of another."""
        return plainly_absorbed(self.kv_b_proj, latents, self.qk_nope_head_dim, self.v_head_dim)

    def put_out(self, values: torch.Tensor, kernels: Any = None) -> torch.Tensor:
        """The layer's output [B, Q, hidden] of each head's values [B, Q, H, v]. kernels: where it's a fused token."""
        if kernels is None:
            return self.o_proj(values.flatten(2))
        return fused_latent.linear(kernels, values[0].flatten(1), [self.o_proj])[0][None]

    def fuses(self) -> bool:
        """Whether the linear parts of a token may be fused."""
        return fused_latent.has_plain_norms(self)

    @property
    def hands_selection_on(self) -> bool:
        """Whether the next layer shares this one's selection."""
        shared = self.binding.handle.indexer.shared if self.binding.handle.indexer is not None else ()
        return self.hands_on and any(shared[self.layer_idx + 1 : self.layer_idx + 2])

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        prev_topk_indices: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """As the stock forward; a selection that is handed on is int32 [B, Q, K], ascending columns, -1 padded."""
        cache = self.given_cache(cache, past_key_values, kwargs)
        if not isinstance(cache, SparseCache):
            self.note_stock(cache, attention_mask, hidden_states.shape[1], kwargs)
            before = (prev_topk_indices,) if self.hands_on else ()
            return super().forward(
                hidden_states, position_embeddings, attention_mask, cache, position_ids, *before, **kwargs
            )
        if cache.on_device:
            output, selected = self._attend_on_device(hidden_states, position_embeddings, cache, prev_topk_indices)
            return (output, None, selected) if self.hands_on else (output, None)
        wants_weights = self.check_cache(cache, kwargs)
        config, grad = self.binding.handle.config, torch.is_grad_enabled()
        layer = cache.layers[self.layer_idx]
        # Ordinary tensors without gradients, whatever mode the caller is in: a later caller may be in another
        with torch.inference_mode(False), torch.no_grad():
            if self.binding.plan.status == "shared" and prev_topk_indices is None:
                raise ValueError(f"prev_topk_indices: expected those of an earlier layer in layer {self.layer_idx}")
            fused = fused_latent.kernels_for(self, layer, hidden_states, position_embeddings)
            try:
                if fused is None:
                    new = self.project(hidden_states, position_embeddings)
                else:
                    overlap = Overlap(hidden_states.device)
                    new = fused_latent.project(self, hidden_states, position_embeddings, fused, overlap)
                    overlap.join()
                step = cache.begin(
                    new.latent, new.key, self.layer_idx, attention_mask, config, self.config.num_hidden_layers
                )
                if new.index_key is not None:
                    layer.check_index(new.index_key, layer.length)
                if self.layer_idx == cache.leader:
                    self.binding.check_step(step, grad, new.latent.device)
            except BaseException:  # raised again
                cache.undo(self.layer_idx)
                raise
            cache.append(new.latent, new.key, self.layer_idx, step, config)
            if new.index_key is not None:
                layer.update_indexer(new.index_key)
            run = _Run(self, cache, step, new, attention_mask, prev_topk_indices, kwargs, fused)
            output, weights = run.attend(wants_weights)
            output = self.put_out(output, fused)
            return (output, weights, run.selected) if self.hands_on else (output, weights)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _attend_on_device(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: SparseCache,
        given: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `SparseGQA._attend_on_device`: the output, and the selection where the next layer shares it."""
        plan, handle = self.binding.plan, self.binding.handle
        layer: IndexedLayer = cache.layers[self.layer_idx]
        kernels, tokens, device = traceable(handle.kernels.module), cache.tokens, hidden_states.device
        grid, overlap = tokens.on(device), Overlap(device)
        with overlap.beside():  # what only the counters read
            token = token_of(tokens, tokens.length - 1, 0, plan.blocks, device)
        fused = fused_latent.kernels_for(self, layer, hidden_states, position_embeddings)
        if fused is None:
            new = self.project(hidden_states, position_embeddings)
            layer.append_on_device(kernels, new.latent, new.key, grid, new.index_key)
        else:
            held = Held(layer.keys[:, 0], layer.values[:, 0], layer.index_keys, grid.end)
            new = fused_latent.project(self, hidden_states, position_embeddings, fused, overlap, held)
        moved, query = self.absorb(new.latent), new.query
        if query is None:
            overlap.join()
            query = moved.queries(new.nope, new.rope)
        attended = given
        if new.asked is None:
            assert given is not None  # the first layer that shares has been given it
            overlap.join()
            data = (query, layer.keys[:, 0], layer.values[:, 0], given, given[:, :, :0], None)
            output = kernels.latent_attention(*data, scale=self.scaling)
        else:
            attention = LatentAttention(layer, new.asked, query, token, kernels, self.scaling, on_device=True)
            statistics = handle.recorder.statistics_of(cache)
            output, _ = decode_step(attention, self.layer_idx, statistics, False, overlap)
            attended = attention.attended
        output = self.put_out(moved.values(output, fused), fused)
        overlap.join()
        return output, attended if self.hands_selection_on else None


class _Run:
    """Attention of one forward in one layer."""

    def __init__(
        self,
        module: SparseMLA,
        cache: SparseCache,
        step: Step,
        new: Projected,
        mask: Any,
        given: torch.Tensor | None,
        kwargs: dict[str, Any],
        fused: Any,
    ) -> None:
        self.module, self.cache, self.step, self.new, self.kwargs = module, cache, step, new, kwargs
        self.fused = fused  # kernels, of a token whose linear parts are
        self.plan, self.handle = module.binding.plan, module.binding.handle
        self.kernels = traceable(self.handle.kernels.module)
        self.layer: IndexedLayer = cache.layers[module.layer_idx]
        self.valid = cache.tokens.on(new.latent.device).valid
        self.given = given.to(new.latent.device) if self.plan.status == "shared" and given is not None else None
        self.mask = None if step.dense_reason is None else mask  # one that isn't causal x validity
        self._expanded: tuple[torch.Tensor, torch.Tensor] | None = None
        self._keeps = module.hands_selection_on
        self._chosen: list[torch.Tensor] = []

    @cached_property
    def absorbed(self) -> Absorbed:
        """Not before it is needed: a module that isn't plain is called for it, and a prompt may do without."""
        return self.module.absorb(self.new.latent)

    @property
    def selected(self) -> torch.Tensor | None:
        """What the tokens attended to, where the next layer shares it."""
        if not self._keeps:
            return None
        if self.given is not None:
            return self.given
        width = max(chosen.shape[2] for chosen in self._chosen)
        pad = torch.nn.functional.pad
        return torch.cat([pad(each, (0, width - each.shape[2]), value=-1) for each in self._chosen], dim=1)

    def attend(self, wants_weights: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, Q, H, v]: prompt tokens, and those whose rows all fit, in parts; others one after the other."""
        step, cache = self.step, self.cache
        statistics = self.handle.recorder.statistics_of(cache)
        if self.module.layer_idx == cache.leader:
            statistics.steps += step.count - step.first_decode
        alone = self.plan.status == "sparse" and self.mask is None
        together = step.first_decode if alone else step.count
        while together < step.count and not cache.tokens.any_longer(step.begin + together, self.plan.blocks):
            if self.handle.config.trace:
                at = self._decode_step(together)
                record_fitting(statistics, self.module.layer_idx, self.plan, self.new.latent, at)
            together += 1
        outputs, weights = [], None
        size = self.handle.config.workspace
        whole = wants_weights or self.mask is not None
        for begin, end in [(0, step.count)] if whole else parts(step.begin, together, self._bytes, size):
            chosen = self._select(begin, end)
            if whole or self._dense_is_cheaper(end - begin, step.begin + end):
                output, weights = self._dense(begin, end, chosen)
            else:
                output = self._sparse(begin, end, chosen)
            self._keep(chosen[:, : together - begin])
            outputs.append(output[:, : together - begin])
        for at in range(together, step.count):
            outputs.append(self._decode(at, statistics))
        return torch.cat(outputs, dim=1), weights if wants_weights else None

    def _decode_step(self, at: int) -> int:
        return len(self.cache.decode_columns) + self.step.begin + at - self.cache.tokens.length

    def _keep(self, chosen: torch.Tensor) -> None:
        if self._keeps and self.given is None:
            self._chosen.append(chosen)

    def _bytes(self, columns: int) -> int:
        """That a query token takes while it is worked on: scores and what the top-k makes of them, a mask, gathered
        latents and weights, as the references hold them."""
        batch, heads = self.new.nope.shape[:2]
        slots = min(self.plan.blocks, columns)
        gathered = slots * (self.new.latent.shape[3] + self.new.key.shape[3]) * 2 * self.new.latent.element_size()
        return batch * (columns * _SCORED + min(gathered, 2**26) + heads * slots * 16)

    def _select(self, begin: int, end: int) -> torch.Tensor:
        if self.given is not None:
            return self.given[:, begin:end]
        assert self.new.asked is not None
        mask = None if self.mask is None else self.mask[:, 0, begin:end]  # as the stock indexer takes it
        first = self.step.begin + begin
        index = self.new.asked.part(begin, end)
        return select_tokens(self.layer, index, self.valid, first, self.plan.blocks, self.kernels, mask)[0]

    def _dense_is_cheaper(self, count: int, columns: int) -> bool:
        """By products: K/V expanded for all columns and masked, or gathered latents; and the former must fit the
        workspace."""
        module, (batch, heads) = self.module, self.new.nope.shape[:2]
        wide = module.qk_nope_head_dim + module.v_head_dim
        channels, rope = module.kv_lora_rank, module.qk_rope_head_dim
        held = batch * heads * columns * (wide + rope) * self.new.latent.element_size()
        if held > self.handle.config.workspace:
            return False
        expansion = 0 if self._expanded is not None else columns * channels * wide
        dense = expansion + count * columns * (wide + rope)
        sparse = count * (min(self.plan.blocks, columns) * (2 * channels + rope) + channels * wide)
        return dense < _GATHERED * sparse

    def _dense(self, begin: int, end: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """By the stock attention function over expanded K/V, under a mask of what was chosen."""
        module, columns = self.module, self.step.begin + end
        if self._expanded is None:
            whole = self.step.begin + self.step.count
            self._expanded = module.expand_kv(self.layer.keys[:, :, :whole], self.layer.values[:, :, :whole])
        keys, values = (states[:, :, :columns] for states in self._expanded)
        seen = torch.zeros((*chosen.shape[:2], columns + 1), dtype=torch.bool, device=chosen.device)
        seen.scatter_(2, torch.where(chosen >= 0, chosen, columns).long(), True)
        seen = seen[:, :, :columns]
        own = torch.arange(self.step.begin + begin, columns, device=chosen.device)
        nothing = ~seen.any(dim=2)  # padding: what it attends to is of no use, but must be a number
        seen[:, torch.arange(end - begin, device=chosen.device), own] |= nothing
        query = torch.cat([self.new.nope, self.new.rope], dim=-1)[:, :, begin:end]
        implementation = module.config._attn_implementation
        eager = module.modeling.eager_attention_forward
        attention = eager if implementation == "eager" else ALL_ATTENTION_FUNCTIONS["sdpa"]
        if self.mask is None:
            mask = module.as_mask(seen[:, None], query.dtype)
        else:
            given = self.mask[:, :, begin:end, :columns]
            mask = given.masked_fill(~seen[:, None], torch.finfo(given.dtype).min if given.is_floating_point() else 0)
        with without_cudnn() if on_gpu("sdpa", query.device) else nullcontext():
            return attention(module, query, keys, values, mask, dropout=0.0, scaling=module.scaling, **self.kwargs)

    def _absorbed_query(self, begin: int, end: int) -> torch.Tensor:
        """[B, Q, H, C + A]"""
        if self.new.query is not None:
            return self.new.query
        return self.absorbed.queries(self.new.nope[:, :, begin:end], self.new.rope[:, :, begin:end])

    def _sparse(self, begin: int, end: int, chosen: torch.Tensor) -> torch.Tensor:
        latents, ropes = self.layer.keys[:, 0], self.layer.values[:, 0]
        query, scale = self._absorbed_query(begin, end), self.module.scaling
        nothing = chosen[:, :, :0]
        output = self.kernels.latent_attention(query, latents, ropes, chosen, nothing, None, scale=scale)
        return self.absorbed.values(output, self.fused)

    def _decode(self, at: int, statistics: Any) -> torch.Tensor:
        """A token some of whose rows select."""
        assert self.new.asked is not None
        column, device = self.step.begin + at, self.new.latent.device
        token = token_of(self.cache.tokens, column, self._decode_step(at), self.plan.blocks, device)
        attention = LatentAttention(
            self.layer,
            self.new.asked.part(at, at + 1),
            self._absorbed_query(at, at + 1),
            token,
            self.kernels,
            self.module.scaling,
        )
        output, _ = decode_step(attention, self.module.layer_idx, statistics, self.handle.config.trace)
        assert attention.attended is not None
        self._keep(attention.attended)
        return self.absorbed.values(output, self.fused)
