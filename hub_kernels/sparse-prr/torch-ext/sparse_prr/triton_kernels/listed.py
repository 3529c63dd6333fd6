"""Attention of a prompt's absorbed queries over listed latents: flash attention whose keys are gathered.

One query of DeepSeek-V3.2 reads 2.4 MB, as often as its heads are shared out, and takes 0.6 GFLOP. Decoding has
`latent.py`, whose weights go into the second product in two halves, for bits that don't depend on how heads and chunks
are shared out: half as many products again as here.
"""

import torch
import triton
import triton.language as tl

from ..reference.listed import check_listed_query
from .launch import first_that_fits, options, wait_for_previous
from .tile import padded

_LOG2_E = 1.4426950408889634
# Heads at most, slots, warps, stages; two tiles of slots are held where there are stages. DeepSeek-V3.2 takes 222 KB
_HALF = ((64, 64, 8, 3), (64, 32, 8, 3), (32, 32, 8, 3), (32, 16, 4, 3), (16, 16, 4, 1))
_FLOAT = ((16, 16, 4, 1),)


@triton.jit
def _listed(
    query, rope, latents, ropes, tokens, output, K, H, Q, groups, scale,
    q_b, q_q, q_h, q_c, p_b, p_q, p_h, p_a, l_b, l_t, l_c, r_b, r_t, r_a, t_b, t_q, t_k,
    C: tl.constexpr, A: tl.constexpr, CP: tl.constexpr, AP: tl.constexpr, HB: tl.constexpr, ST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """HB heads of one query. The heads of a query run next to each other: they read the same."""
    wait_for_previous(PDL)
    program = tl.program_id(0)
    row, h = program // groups, (program % groups) * HB + tl.arange(0, HB)
    b, i, inside = (row // Q).to(tl.int64), (row % Q).to(tl.int64), (h < H)[:, None]
    c, a = tl.arange(0, CP)[None, :], tl.arange(0, AP)[None, :]
    mine = tokens + b * t_b + i * t_q
    used = 0  # slots up to the last that is listed: an early token of a prompt leaves most of its list unused
    for begin in range(0, K, 1024):
        k = begin + tl.arange(0, 1024)
        token = tl.load(mine + k.to(tl.int64) * t_k, mask=k < K, other=-1)
        used = tl.maximum(used, tl.max(tl.where(token >= 0, k + 1, 0), axis=0))
    head = h[:, None].to(tl.int64)
    q = tl.load(query + b * q_b + i * q_q + head * q_h + c * q_c, mask=inside & (c < C), other=0.0)
    turned = tl.load(rope + b * p_b + i * p_q + head * p_h + a * p_a, mask=inside & (a < A), other=0.0)
    latents += b * l_b
    ropes += b * r_b
    peak, total = tl.full([HB], float("-inf"), tl.float32), tl.zeros([HB], tl.float32)
    mixed = tl.zeros([HB, CP], tl.float32)
    for first in range(0, used, ST):
        k = first + tl.arange(0, ST)
        token = tl.load(mine + k.to(tl.int64) * t_k, mask=k < K, other=-1).to(tl.int64)
        listed = token >= 0  # nothing else is read, so nothing else can leak
        at, there = token[:, None], listed[:, None]
        latent = tl.load(latents + at * l_t + c * l_c, mask=there & (c < C), other=0.0)
        angle = tl.load(ropes + at * r_t + a * r_a, mask=there & (a < A), other=0.0)
        logits = tl.dot(turned, tl.trans(angle), input_precision="ieee")
        logits = tl.dot(q, tl.trans(latent), logits, input_precision="ieee") * scale
        logits = tl.where(listed[None, :], logits, float("-inf"))
        top = tl.maximum(peak, tl.max(logits, axis=1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights, kept = tl.exp2(logits - safe[:, None]), tl.exp2(peak - safe)
        total = total * kept + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(latent.dtype), latent, mixed * kept[:, None], input_precision="ieee")
        peak = top
    result = tl.where(total[:, None] == 0, 0.0, mixed / tl.where(total == 0, 1.0, total)[:, None])
    to = output + ((b * Q + i) * H + h)[:, None] * C + c
    tl.store(to, result.to(output.dtype.element_ty), mask=inside & (c < C))


def listed_attention(
    query: torch.Tensor,
    rope: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    tokens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """As the reference. A program for each query and group of heads; how queries are split, or batched, changes no
    bit."""
    check_listed_query(query, rope, latents, ropes, tokens)
    batch, queries, heads, channels = query.shape
    rotated, slots = ropes.shape[2], tokens.shape[2]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if output.numel() == 0 or slots == 0:
        return output.zero_()
    row = (padded(channels) + padded(rotated)) * query.element_size()
    group, size, warps, stages = first_that_fits(
        _HALF if query.element_size() == 2 else _FLOAT,
        lambda group, size, _, stages: (group + size * min(2, stages)) * row,
        query.get_device(),
    )
    group = min(padded(heads), group)
    groups = triton.cdiv(heads, group)
    _listed[(batch * queries * groups,)](
        query, rope, latents, ropes, tokens, output, slots, heads, queries, groups, scale * _LOG2_E,
        *query.stride(), *rope.stride(), *latents.stride(), *ropes.stride(), *tokens.stride(),
        C=channels, A=rotated, CP=padded(channels), AP=padded(rotated), HB=group, ST=size,
        **options(query, num_warps=warps, num_stages=stages),
    )  # fmt: skip
    return output
