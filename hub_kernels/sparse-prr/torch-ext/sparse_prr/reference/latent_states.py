"""What a decode step of latent attention does between its projections and attention: norms, RoPE, and the new latent
and keys into the buffers. What depends on the first projections alone is apart, so that it runs beside the second."""

import torch

from .append import append_states
from .check import FLOATS, INTEGERS, expect, expect_column
from .linear import rms_norm
from .rotate import check_all_angles, check_angles, turned


def check_latent_append_arguments(
    compressed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    end: torch.Tensor,
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `latent_append`."""
    expect("latents", latents, "B, T, C", (None,) * 3, FLOATS)
    (batch, columns, channels), device, dtypes = latents.shape, latents.device, (latents.dtype,)
    expect_column("latents", columns)
    expect("ropes", ropes, "B, T, A", (batch, columns, None), dtypes, device)
    rotated = ropes.shape[2]
    expect("compressed", compressed, "B, C + A", (batch, channels + rotated), dtypes, device)
    check_all_angles(cos, sin, batch, rotated, latents)
    expect("norm", norm, "C", (channels,), dtypes, device)
    expect("end", end, "B", (batch,), INTEGERS, device)


def check_index_append_arguments(
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    bias: torch.Tensor,
    keys: torch.Tensor,
    end: torch.Tensor,
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `index_append`."""
    expect("keys", keys, "B, T, E", (None,) * 3, FLOATS)
    (batch, columns, dim), device, dtypes = keys.shape, keys.device, (keys.dtype,)
    expect_column("keys", columns)
    expect("key", key, "B, E", (batch, dim), dtypes, device)
    check_angles(cos, sin, batch, dim, keys)
    expect("norm", norm, "E", (dim,), dtypes, device)
    expect("bias", bias, "E", (dim,), dtypes, device)
    expect("end", end, "B", (batch,), INTEGERS, device)


def check_index_queries_arguments(
    queries: torch.Tensor, weights: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `index_queries`."""
    expect("queries", queries, "B, I, E", (None,) * 3, FLOATS)
    (batch, heads, dim), device = queries.shape, queries.device
    expect("weights", weights, "B, I", (batch, heads), FLOATS, device)
    check_angles(cos, sin, batch, dim, queries)


def latent_append(
    compressed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    end: torch.Tensor,
    *,
    eps: float,
) -> None:
    """One new token a batch row: its latent, after an RMS norm, and its RoPE key go to column end - 1 of the buffers.

    Channels 2i and 2i + 1 are rotated together, and come out as i and i + A/2. Rounded to the dtype where
    transformers' modules round: what the norm divides and what it scales, every product of RoPE, and their sum.

    Args:
        compressed: [B, C + A], latent and RoPE key side by side.
        cos, sin: [B, A] or [1, A]; both halves hold the same angles.  norm: [C], the norm's weight.
        latents: [B, T, C].  ropes: [B, T, A].  end: [B] integer, 1 .. T, which isn't checked: on the device.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_latent_append_arguments(compressed, cos, sin, norm, latents, ropes, end)
    latent, key = compressed.split((latents.shape[2], ropes.shape[2]), dim=1)
    latent, key = rms_norm(latent, norm, eps)[:, None, None], turned(key[:, None], cos, sin, True)[:, None]
    append_states(latents[:, None], ropes[:, None], latent, key, end)


def index_append(
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    bias: torch.Tensor,
    keys: torch.Tensor,
    end: torch.Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> None:
    """The indexer's key of one new token a batch row, after a layer norm and RoPE, goes to column end - 1 of `keys`.

    Rounded to the dtype where transformers' modules round: what the norm gives, every product of RoPE, and their sum.

    Args:
        key: [B, E].  cos, sin: [B, A] or [1, A], the first A channels are rotated; both halves hold the same angles.
        norm, bias: [E], of the layer norm (with `eps`).  keys: [B, T, E].
        end: [B] integer, 1 .. T, which isn't checked: on the device.
        interleaved: channels 2i and 2i + 1 are rotated together, and come out as i and i + A/2; else i and i + A/2 are.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_index_append_arguments(key, cos, sin, norm, bias, keys, end)
    wide = key.float()
    spread = wide - wide.mean(dim=1, keepdim=True)
    spread = spread * torch.rsqrt(spread.pow(2).mean(dim=1, keepdim=True) + eps)
    key = (spread * norm.float() + bias.float()).to(key.dtype)
    held, new = keys[:, None], turned(key[:, None], cos, sin, interleaved)[:, None]
    append_states(held, held[..., :0], new, new[..., :0], end)


def index_queries(
    queries: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    share: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the indexer asks of one new token a batch row, as `index_topk` takes it: its queries after RoPE, [B, I, E],
    and fp32 weights times `share`, [B, I].

    Rounded to the dtype where transformers' modules round: every product of RoPE, and their sum.

    Args:
        queries: [B, I, E].  weights: [B, I], any float dtype.
        cos, sin: [B, A] or [1, A], A channels of a head are rotated, the first ones; both halves hold the same angles.
        interleaved: as of `index_append`.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_index_queries_arguments(queries, weights, cos, sin)
    return turned(queries, cos, sin, interleaved), weights.float() * share
