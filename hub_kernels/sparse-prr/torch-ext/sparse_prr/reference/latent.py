"""Attention of absorbed queries over listed tokens: latents serve as keys and as values (MLA, arXiv 2405.04434)."""

import torch

from .check import FLOATS, INT32, expect
from .merge import slots_of

_HELD = 2**23  # gathered numbers that are held at a time, 64 MB


def check_listed_arguments(latents: torch.Tensor, ropes: torch.Tensor, tokens: torch.Tensor) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `gather_tokens`."""
    expect("latents", latents, "B, T, C", (None,) * 3, FLOATS)
    (batch, columns, _), device = latents.shape, latents.device
    expect("ropes", ropes, "B, T, A", (batch, columns, None), (latents.dtype,), device)
    expect("tokens", tokens, "B, Q, K", (batch, None, None), INT32, device)


def check_latent_arguments(
    query: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    tokens: torch.Tensor,
    predicted: torch.Tensor,
    held: torch.Tensor | None,
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `latent_attention`."""
    check_listed_arguments(latents, ropes, tokens)
    (batch, queries, _), device, dtypes = tokens.shape, latents.device, (latents.dtype,)
    width = latents.shape[2] + ropes.shape[2]
    expect("query", query, "B, Q, H, C + A", (batch, queries, None, width), dtypes, device)
    expect("predicted", predicted, "B, Q, P", (batch, queries, None), INT32, device)
    guesses = predicted.shape[2]
    if held is not None:
        expect("held", held, "B, Q, P, C + A", (batch, queries, guesses, width), dtypes, device)
    elif guesses:
        raise ValueError(f"held: expected the rows of {guesses} predicted tokens, got None")


def gather_tokens(latents: torch.Tensor, ropes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[B, Q, K, C + A]: latent and RoPE key of each listed token; zeros in unused slots.

    Args:
        latents: [B, T, C].  ropes: [B, T, A] in its dtype.  tokens: int32 [B, Q, K], -1 = unused, in any order; others
            are below T, which isn't checked.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_listed_arguments(latents, ropes, tokens)
    row = torch.arange(tokens.shape[0], device=tokens.device)[:, None, None]
    at = tokens.long().clamp(min=0)
    rows = torch.cat([latents[row, at], ropes[row, at]], dim=-1)
    return rows.masked_fill(tokens[..., None] < 0, 0)


def _repaired(
    latents: torch.Tensor,
    ropes: torch.Tensor,
    tokens: torch.Tensor,
    predicted: torch.Tensor,
    held: torch.Tensor | None,
) -> torch.Tensor:
    """As `gather_tokens`, reading only what a prediction doesn't hold."""
    if held is None or predicted.shape[2] == 0:
        return gather_tokens(latents, ropes, tokens)
    slots = slots_of(tokens, predicted)
    found = held.gather(2, slots.clamp(min=0)[..., None].expand(*slots.shape, held.shape[3]))
    missing = gather_tokens(latents, ropes, tokens.masked_fill(slots >= 0, -1))
    return torch.where((slots >= 0)[..., None], found, missing)


def latent_attention(
    query: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    tokens: torch.Tensor,
    predicted: torch.Tensor,
    held: torch.Tensor | None,
    *,
    scale: float,
) -> torch.Tensor:
    """softmax(scale q . [latent, rope]) latent over the listed tokens. What was predicted changes no bit.

    Computed in float64 and rounded once: how the queries are split, and what else is in the batch, changes nothing that
    float32 keeps.

    Args:
        query: [B, Q, H, C + A].  latents: [B, T, C].  ropes: [B, T, A].  All in one dtype.
        tokens: int32 [B, Q, K], ascending, -1 = unused; others are below T, which isn't checked.
        predicted: int32 [B, Q, P], in any order, whose rows are in `held`, [B, Q, P, C + A], from `gather_tokens`;
            P = 0 and None without a prediction.

    Returns:
        fp32 [B, Q, H, C]; 0 where nothing is listed.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_latent_arguments(query, latents, ropes, tokens, predicted, held)
    batch, queries, heads, _ = query.shape
    channels, slots = latents.shape[2], tokens.shape[2]
    output = query.new_empty((batch, queries, heads, channels), dtype=torch.float32)
    step = max(1, _HELD // max(1, batch * slots * (channels + ropes.shape[2])))
    for begin in range(0, queries, step):
        part = slice(begin, begin + step)
        early = None if held is None else held[:, part]
        rows = _repaired(latents, ropes, tokens[:, part], predicted[:, part], early).double()
        logits = (query[:, part].double() @ rows.mT) * scale
        logits = logits.masked_fill((tokens[:, part] < 0)[:, :, None], float("-inf"))
        weights = torch.softmax(logits, dim=3)
        weights = weights.masked_fill((tokens[:, part] < 0).all(dim=2)[..., None, None], 0.0)
        output[:, part] = weights @ rows[..., :channels]
    return output
