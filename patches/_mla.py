"""The forward that models with an indexer share: append latents and index keys, select tokens, attend to latents."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hf_sparse_prr import fused_latent
from hf_sparse_prr.cache import SparseCache
from hf_sparse_prr.decode import decode_step
from hf_sparse_prr.fused_latent import Held, Projected
from hf_sparse_prr.indexed import IndexedLayer
from hf_sparse_prr.latent import Index, LatentAttention, token_of
from hf_sparse_prr.layer import ordinary, writes
from hf_sparse_prr.ops import traceable
from hf_sparse_prr.overlap import Overlap
from hf_sparse_prr.patches._absorb import Absorbed, absorbed, plainly_absorbed
from hf_sparse_prr.patches._base import SparseAttention
from hf_sparse_prr.patches._mla_run import Run

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
        # Autocast on a GPU leaves what a layer norm gives in float32
        return Index(query, weights * indexer.n_heads**-0.5, indexer.softmax_scale), key[:, :, 0].to(query.dtype)

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
        with ordinary():
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
            run = Run(self, cache, step, new, attention_mask, prev_topk_indices, kwargs, fused)
            output, weights = run.attend(wants_weights)
            output = self.put_out(output, fused)
            return (output, weights, run.selected) if self.hands_on else (output, weights)

    @writes
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
            output, _ = decode_step(attention, self.layer_idx, statistics, False, cache.late, overlap)
            attended = attention.attended
        output = self.put_out(moved.values(output, fused), fused)
        return output, attended if self.hands_selection_on else None
