"""The ops of models with an indexer as torch.compile sees them: as in traced_ops.py, where the table is."""

import torch
from torch import Tensor
from torch.library import custom_op

from .bundled.reference.check import integer
from .bundled.reference.index import check_index_arguments
from .bundled.reference.latent import check_latent_arguments
from .traced_ops import KERNELS


@custom_op("hf_sparse_prr::index_scores", mutates_args=())
def index_scores(
    kernels: str, query: Tensor, weights: Tensor, keys: Tensor, valid: Tensor, end: Tensor, scale: float
) -> Tensor:
    return KERNELS[kernels].index_scores(query, weights, keys, valid, end, scale=scale).contiguous()


def _scores(query: Tensor, weights: Tensor, keys: Tensor, valid: Tensor, end: Tensor) -> Tensor:
    check_index_arguments(query, weights, keys, valid, end)
    return query.new_empty((*query.shape[:2], keys.shape[1]), dtype=torch.float32)


@index_scores.register_fake
def _(kernels: str, query: Tensor, weights: Tensor, keys: Tensor, valid: Tensor, end: Tensor, scale: float) -> Tensor:
    return _scores(query, weights, keys, valid, end)


@custom_op("hf_sparse_prr::index_topk", mutates_args=())
def index_topk(
    kernels: str,
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    valid: Tensor,
    end: Tensor,
    k: int,
    scale: float,
    hint: Tensor | None = None,
    threshold: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    compute = KERNELS[kernels].index_topk
    chosen, scores = compute(query, weights, keys, valid, end, k, scale=scale, hint=hint, threshold=threshold)
    return chosen.contiguous(), scores.contiguous()


@index_topk.register_fake
def _(
    kernels: str,
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    valid: Tensor,
    end: Tensor,
    k: int,
    scale: float,
    hint: Tensor | None = None,
    threshold: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, weights, keys, valid, end)
    return scores.new_empty((*scores.shape[:2], integer("k", k, 0)), dtype=torch.int32), scores


@custom_op("hf_sparse_prr::latent_attention", mutates_args=())
def latent_attention(
    kernels: str,
    query: Tensor,
    latents: Tensor,
    ropes: Tensor,
    tokens: Tensor,
    predicted: Tensor,
    held: Tensor | None,
    scale: float,
) -> Tensor:
    return KERNELS[kernels].latent_attention(query, latents, ropes, tokens, predicted, held, scale=scale).contiguous()


@latent_attention.register_fake
def _(
    kernels: str,
    query: Tensor,
    latents: Tensor,
    ropes: Tensor,
    tokens: Tensor,
    predicted: Tensor,
    held: Tensor | None,
    scale: float,
) -> Tensor:
    check_latent_arguments(query, latents, ropes, tokens, predicted, held)
    return query.new_empty((*query.shape[:3], latents.shape[2]), dtype=torch.float32)
