"""Attention of one forward of latent attention: prompts in parts, dense or over gathered latents, and decode tokens one
after the other."""

from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_sparse_prr.cache import SparseCache
from hf_sparse_prr.decode import decode_step, record_fitting
from hf_sparse_prr.dense import on_gpu, without_cudnn
from hf_sparse_prr.fused_latent import Projected
from hf_sparse_prr.indexed import IndexedLayer
from hf_sparse_prr.latent import LatentAttention, parts, select_tokens, token_of
from hf_sparse_prr.ops import traceable
from hf_sparse_prr.patches._absorb import Absorbed
from hf_sparse_prr.tokens import Step

if TYPE_CHECKING:
    from hf_sparse_prr.patches._mla import SparseMLA

# Products over gathered latents take as long as so many of SDPA's. DeepSeek-V3.2's layer, 2 CPU cores, float32: 64
# queries over 3000 tokens 1.8 s expanded and 2.7 gathered, over 6000 6.3 and 3.5; 256 over 6000 12.0 and 11.5
_GATHERED = 3
_LISTED = 1.5  # of kernels: by products 361 against 253 TFLOP/s; of .5, 1, 1.5, 3 the best at 8K and 32K (H200)
_SCORED = 32  # bytes that a score takes: itself, in float64 and as a key of the top-k
_KERNEL_SCORED = 8  # by kernels: itself, and the mask


class Run:
    """Attention of one forward in one layer."""

    def __init__(
        self,
        module: "SparseMLA",
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
        self._output: torch.Tensor | None = None

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
        weights = None
        size = self.handle.config.workspace
        whole = wants_weights or self.mask is not None
        for begin, end in [(0, step.count)] if whole else parts(step.begin, together, self._bytes, size):
            chosen = self._select(begin, end)
            if whole or self._dense_is_cheaper(end - begin, step.begin + end):
                output, weights = self._dense(begin, end, chosen)
            else:
                output = self._sparse(begin, end, chosen)
            self._keep(chosen[:, : together - begin])
            self._put(begin, output[:, : together - begin])
        for at in range(together, step.count):
            self._put(at, self._decode(at, statistics))
        assert self._output is not None
        return self._output, weights if wants_weights else None

    def _put(self, begin: int, values: torch.Tensor) -> None:
        """Values [B, q, H, v] of some tokens where they belong: parts that are joined at the end took as much again."""
        if self._output is None:
            self._output = values.new_empty((values.shape[0], self.step.count, *values.shape[2:]))
        self._output[:, begin : begin + values.shape[1]] = values

    def _decode_step(self, at: int) -> int:
        return len(self.cache.decode_columns) + self.step.begin + at - self.cache.tokens.length

    def _keep(self, chosen: torch.Tensor) -> None:
        if self._keeps and self.given is None:
            self._chosen.append(chosen)

    def _bytes(self, columns: int) -> int:
        """That a query token takes while it is worked on: scores and what the top-k makes of them, a mask, gathered
        latents and weights, as the references hold them. Kernels hold neither of the last two, but the query moved to
        latents and what it attended to: as few queries as the references take leave most of a GPU idle (8K tokens of
        DeepSeek-V3.2's layer took 37.8 ms in 71 parts and 22.4 in 5)."""
        (batch, heads), latent = self.new.nope.shape[:2], self.new.latent
        channels, rope, slots = latent.shape[3], self.new.key.shape[3], min(self.plan.blocks, columns)
        if self._has_kernels:
            return batch * (columns * _KERNEL_SCORED + heads * (3 * channels + rope) * latent.element_size())
        gathered = slots * (channels + rope) * 2 * latent.element_size()
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
        held = batch * heads * columns * (wide + (0 if self._has_kernels else rope)) * self.new.latent.element_size()
        if held > self.handle.config.workspace:
            return False
        expansion = 0 if self._expanded is not None else columns * channels * wide
        dense = expansion + count * columns * (wide + rope)
        sparse = count * (min(self.plan.blocks, columns) * (2 * channels + rope) + channels * wide)
        return dense < (_LISTED if self._has_kernels else _GATHERED) * sparse

    def _dense(self, begin: int, end: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Over expanded K/V, under a mask of what was chosen: by the stock attention function, or on a GPU by a kernel
        that takes the mask as it is."""
        module, columns = self.module, self.step.begin + end
        keys, values = (states[:, :, :columns] for states in self._expansion())
        seen = torch.zeros((*chosen.shape[:2], columns + 1), dtype=torch.bool, device=chosen.device)
        seen.scatter_(2, torch.where(chosen >= 0, chosen, columns).long(), True)
        seen = seen[:, :, :columns]
        if self._has_kernels:
            nope, rope = (part[:, :, begin:end] for part in (self.new.nope, self.new.rope))
            data = (keys, self.layer.values[:, 0, :columns], values, seen)
            first = self.step.begin + begin
            return self.kernels.masked_attention(nope, rope, *data, first, scale=module.scaling), None
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

    def _expansion(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, made once; a kernel takes keys without the RoPE part that all heads share."""
        if self._expanded is None:
            module, whole = self.module, self.step.begin + self.step.count
            latents, ropes = self.layer.keys[:, :, :whole], self.layer.values[:, :, :whole]
            if self._has_kernels:
                sizes = [module.qk_nope_head_dim, module.v_head_dim]
                both = module.kv_b_proj(latents[:, 0]).unflatten(2, (-1, sum(sizes))).transpose(1, 2)
                self._expanded = both.split(sizes, dim=3)
            else:
                self._expanded = module.expand_kv(latents, ropes)
        return self._expanded

    @cached_property
    def _has_kernels(self) -> bool:
        """Of a plain prompt in half precision. Its weights aren't kept, and the stock masks aren't per token."""
        plain = self.mask is None and self.module.config._attn_implementation != "eager"
        half = self.new.latent.dtype in (torch.bfloat16, torch.float16)
        on_gpu = self.new.latent.is_cuda and self.handle.kernels.backend in ("cuda", "triton")
        return plain and half and on_gpu and not torch.compiler.is_compiling()

    def _absorbed_query(self, begin: int, end: int) -> torch.Tensor:
        """[B, Q, H, C + A]"""
        if self.new.query is not None:
            return self.new.query
        return self.absorbed.queries(self.new.nope[:, :, begin:end], self.new.rope[:, :, begin:end])

    def _sparse(self, begin: int, end: int, chosen: torch.Tensor) -> torch.Tensor:
        latents, ropes, scale = self.layer.keys[:, 0], self.layer.values[:, 0], self.module.scaling
        if self._has_kernels and end - begin > 1:  # one alone is few programs
            query, rope = self.absorbed.moved(self.new.nope[:, :, begin:end]), self.new.rope[:, :, begin:end]
            output = self.kernels.listed_attention(query, rope.transpose(1, 2), latents, ropes, chosen, scale=scale)
            return self.absorbed.values(output)
        query, nothing = self._absorbed_query(begin, end), chosen[:, :, :0]
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
