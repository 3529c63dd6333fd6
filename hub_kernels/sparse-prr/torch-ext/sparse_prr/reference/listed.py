"""Attention of a prompt's absorbed queries over listed tokens: latents serve as keys and as values (MLA, arXiv
2405.04434)."""

import torch

from .check import expect
from .latent import check_listed_arguments, gather_tokens

_HELD = 2**24  # gathered numbers that are held at a time, 64 MB in fp32


def check_listed_query(
    query: torch.Tensor, rope: torch.Tensor, latents: torch.Tensor, ropes: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `listed_attention`."""
    check_listed_arguments(latents, ropes, tokens)
    (batch, queries, _), device, dtypes = tokens.shape, latents.device, (latents.dtype,)
    expect("query", query, "B, Q, H, C", (batch, queries, None, latents.shape[2]), dtypes, device)
    expect("rope", rope, "B, Q, H, A", (batch, queries, query.shape[2], ropes.shape[2]), dtypes, device)


def listed_attention(
    query: torch.Tensor,
    rope: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    tokens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * (query . latents + rope . ropes)) latents over the listed tokens, [B, Q, H, C] in their dtype:
    what `latent_attention` gives, but for weights that are rounded to that dtype before the product with the latents,
    as stock attention rounds them. Sums are fp32.

    Args:
        query: [B, Q, H, C], absorbed.  rope: [B, Q, H, A].  latents: [B, T, C].  ropes: [B, T, A].  All in one dtype.
        tokens: int32 [B, Q, K], in any order, -1 = unused; others are below T, which isn't checked.

    Returns:
        0 where nothing is listed.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_listed_query(query, rope, latents, ropes, tokens)
    batch, queries, _, channels = query.shape
    output, asked = torch.empty(query.shape, dtype=query.dtype, device=query.device), torch.cat([query, rope], dim=3)
    step = max(1, _HELD // max(1, batch * tokens.shape[2] * asked.shape[3]))
    for begin in range(0, queries, step):
        part = slice(begin, begin + step)
        rows, unused = gather_tokens(latents, ropes, tokens[:, part]).float(), (tokens[:, part] < 0)[:, :, None]
        logits = ((asked[:, part].float() @ rows.mT) * scale).masked_fill(unused, float("-inf"))
        peak = logits.amax(dim=3, keepdim=True) if logits.shape[3] else logits.new_zeros((*logits.shape[:3], 1))
        weights = torch.exp(logits - peak.masked_fill(peak == float("-inf"), 0.0))
        total = weights.sum(dim=3, keepdim=True)
        mixed = weights.to(query.dtype).float() @ rows[..., :channels]
        output[:, part] = torch.where(total == 0, 0.0, mixed / total)
    return output
