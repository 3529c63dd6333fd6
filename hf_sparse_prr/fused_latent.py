"""One token of one row through the linear parts of a layer with latent attention: four products of few launches each,
and norms, RoPE and the new latent and keys in small kernels between and beside them.

By modules they are some 60 kernels, 170 us of an H200's time beyond the weights of DeepSeek-V3.2's layer. As in
fused.py, the model's own weights are read where they are, and what isn't plain is called as the module it is. A token
runs the same kernels whether its step is captured or not, so that the bits are the same.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from . import fused
from .latent import Index
from .overlap import Overlap


class Held(NamedTuple):
    """Where a token's latent [B, T, C], RoPE key [B, T, A] and index key [B, T, E] go: to the column before `end`,
    integer [B]."""

    latents: torch.Tensor
    ropes: torch.Tensor
    index_keys: torch.Tensor | None
    end: torch.Tensor


class Projected(NamedTuple):
    """Of the new tokens. nope, rope: the query's two parts, [B, H, Q, .].  latent: [B, 1, Q, C].  key: its RoPE part,
    [B, 1, Q, A].  asked, index_key: what the indexer asks, and its key [B, Q, E]; None in a layer without one.
    query: [B, Q, H, C + A], absorbed, where that is done already."""

    nope: torch.Tensor
    rope: torch.Tensor
    latent: torch.Tensor
    key: torch.Tensor
    asked: Index | None
    index_key: torch.Tensor | None
    query: torch.Tensor | None = None


def _is_layer_norm(norm: Any) -> bool:
    if type(norm) is not nn.LayerNorm or norm.bias is None or norm.weight is None:
        return False
    return norm.weight.dtype in fused.DTYPES and norm.weight.dim() == 1 and fused.why_not_module(norm) is None


def has_plain_norms(attention: Any) -> bool:
    """Whether the norms of latents and of index keys are those that the kernels apply."""
    indexer = attention.indexer
    return fused.is_norm(attention.kv_a_layernorm, attention.modeling) and (
        indexer is None or _is_layer_norm(indexer.k_norm)
    )


def applies(attention: Any, layer: Any, hidden_states: torch.Tensor, angles: Any) -> bool:
    """Whether `project` can take these hidden states [B, Q, X] over a cache's layer: one token of one row."""
    device, dtype = hidden_states.device.type, hidden_states.dtype
    if hidden_states.shape[:2] != (1, 1) or device not in fused.DEVICES or dtype not in fused.DTYPES:
        return False
    if torch.is_autocast_enabled(device) or torch.compiler.is_compiling():
        return False
    if not attention.binding.handle.config.fused_layers or torch.nn.modules.module._has_any_global_hook():
        return False
    rotated = (1, 1, attention.qk_rope_head_dim)
    if any(angle.shape != rotated or angle.dtype != dtype for angle in angles):
        return False
    held = [layer.keys, *([] if attention.indexer is None else [layer.index_keys])]
    same = all(each is not None and each.dtype == dtype and each.device == hidden_states.device for each in held)
    norms = [attention.kv_a_layernorm, *([] if attention.indexer is None else [attention.indexer.k_norm])]
    return same and has_plain_norms(attention) and all(norm.weight.dtype == dtype for norm in norms)


def kernels_for(attention: Any, layer: Any, hidden_states: torch.Tensor, angles: Any) -> Any:
    """The kernels of a token that is fused, None of others. Asked anew each time: nothing says when an adapter or a
    hook comes."""
    return attention.binding.handle.kernels.module if applies(attention, layer, hidden_states, angles) else None


def linear(kernels: Any, x: torch.Tensor, modules: list[Any], norm: Any = None, modeling: Any = None) -> Any:
    """What linear layers give of [1, X], after a norm, [1, Y] each: together where they and the norm are plain."""
    weights = fused.linears(modules)
    plain = norm is None or (fused.is_norm(norm, modeling) and norm.weight.dtype == x.dtype)
    if not plain or weights is None or weights.weights[0].dtype != x.dtype:
        x = x[None] if norm is None else norm(x[None])
        return [module(x)[0].to(x.dtype) for module in modules]
    how = {} if norm is None else dict(norm=norm.weight, eps=norm.variance_epsilon)
    output = kernels.grouped_linear(x, *weights, **how)
    return output.split([weight.shape[0] for weight in weights.weights], dim=1)


def _index_weights(kernels: Any, hidden_states: torch.Tensor, proj: Any) -> torch.Tensor:
    """[1, I]. They are kept in fp32: products and sums are, too."""
    weights = fused.linears([proj], (torch.float32, *fused.DTYPES))
    if weights is None:
        return proj(hidden_states.to(proj.weight.dtype))[0]
    return kernels.grouped_linear(hidden_states[0], *weights)


def _column(attention: Any, like: torch.Tensor) -> Held:
    """Buffers of one column."""
    indexer = attention.indexer
    sizes = (attention.kv_lora_rank, attention.qk_rope_head_dim, *([] if indexer is None else [indexer.head_dim]))
    latents, ropes, *keys = (like.new_empty((1, 1, size)) for size in sizes)
    return Held(latents, ropes, keys[0] if keys else None, torch.ones(1, dtype=torch.int64, device=like.device))


def project(
    attention: Any,
    hidden_states: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    kernels: Any,
    overlap: Overlap,
    held: Held | None = None,
) -> Projected:
    """As `SparseMLA.project`, of one token for which `applies` holds. Its latent and keys go to `held` where that is
    given, and are its buffers then. The absorbed query may be under way beside the main stream: `overlap` is to be
    joined. It is forked before what the indexer asks, so that its weights are read while the indexer starts: behind the
    scorer it would have nothing beside it that reads much, and would end later.
    """
    indexer, modeling = attention.indexer, attention.modeling
    held = _column(attention, hidden_states) if held is None else held
    cos, sin = (angle[:, 0] for angle in angles)
    turns = dict(interleaved=attention.index_rotates == "neighbours")
    firsts = [attention.q_a_proj, attention.kv_a_proj_with_mqa, *([] if indexer is None else [indexer.wk])]
    seconds = [attention.q_b_proj, *([] if indexer is None else [indexer.wq_b])]
    if indexer is not None:
        with overlap.beside():
            weights = _index_weights(kernels, hidden_states, indexer.weights_proj)
    residual, compressed, *index_key = linear(kernels, hidden_states[0], firsts)
    overlap.hold(compressed, *index_key)
    with overlap.beside():  # the second product takes longer
        norm = attention.kv_a_layernorm
        into = (held.latents, held.ropes, held.end)
        kernels.latent_append(compressed, cos, sin, norm.weight, *into, eps=norm.variance_epsilon)
        if indexer is not None:
            norm = indexer.k_norm
            given = (index_key[0], cos, sin, norm.weight, norm.bias, held.index_keys, held.end)
            kernels.index_append(*given, eps=norm.eps, **turns)
    query, *index_query = linear(kernels, residual, seconds, attention.q_a_layernorm, modeling)
    overlap.join()

    sizes = (attention.qk_nope_head_dim, attention.qk_rope_head_dim)
    nope, turning = query.unflatten(1, (-1, sum(sizes))).split(sizes, dim=2)
    moved = attention.absorb_plainly(held.latents)
    if moved is None:
        absorbed = None
        rope, _ = modeling.apply_rotary_pos_emb_interleave(turning[:, :, None], turning[:, :1, None], *angles)
    else:
        overlap.hold(query)
        with overlap.beside():
            absorbed = kernels.absorb_queries(nope, turning, cos, sin, moved.up)[:, None]
        rope = absorbed[..., attention.kv_lora_rank :].transpose(1, 2)
    asked = None
    if indexer is not None:
        heads = index_query[0].unflatten(1, (-1, indexer.head_dim))
        found, shares = kernels.index_queries(heads, weights, cos, sin, share=indexer.n_heads**-0.5, **turns)
        asked = Index(found[:, None], shares[:, None], indexer.softmax_scale)
    states = (held.latents[:, None], held.ropes[:, None], asked, held.index_keys)
    return Projected(nope[:, :, None], rope, *states, absorbed)
