"""What a decode step does between its projections and attention: RoPE, and the new key and value into the buffer."""

import torch

from .append import append_states
from .check import FLOATS, INTEGERS, expect, expect_column, size_or_1
from .linear import rms_norm


def check_angles(
    cos: torch.Tensor, sin: torch.Tensor, batch: int, most: int, like: torch.Tensor, letter: str = ""
) -> None:
    """Raise ValueError for cosines and sines, [B, A] or [1, A], that can't rotate heads of `most` channels."""
    expect("cos", cos, "B, A", (size_or_1(cos, 0, batch), None), (like.dtype,), like.device)
    expect("sin", sin, "B, A", tuple(cos.shape), (like.dtype,), like.device)
    if cos.shape[1] % 2 or cos.shape[1] > most:
        raise ValueError(f"cos: expected an even number of at most {letter}{most} channels, got {cos.shape[1]}")


def check_all_angles(cos: torch.Tensor, sin: torch.Tensor, batch: int, rotated: int, like: torch.Tensor) -> None:
    """The same for heads whose `rotated` channels are all rotated."""
    check_angles(cos, sin, batch, rotated, like)
    if cos.shape[1] != rotated:
        raise ValueError(f"cos: expected A = {rotated} channels, got {cos.shape[1]}")


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [B, heads, dim] rotated in its first A channels. The first of each pair come first, then the second."""
    half = cos.shape[1] // 2
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        one, two = turning[..., 0::2], turning[..., 1::2]
    else:
        one, two = turning[..., :half], turning[..., half:]
    c, s = cos[:, None, :half], sin[:, None, :half]
    return torch.cat([one * c - two * s, two * c + one * s, rest], dim=-1)


def check_rotate_arguments(
    states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    end: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
) -> int:
    """Query heads. Raise ValueError for what the host can tell is outside the contract of `rotate_append`."""
    expect("keys", keys, "B, H, T, D", (None,) * 4, FLOATS)
    (batch, heads, columns, dim), device, dtypes = keys.shape, keys.device, (keys.dtype,)
    expect_column("keys", columns)
    expect("values", values, "B, H, T, D'", (batch, heads, columns, None), dtypes, device)
    expect("states", states, "B, Y", (batch, None), dtypes, device)
    queries = states.shape[1] - heads * (dim + values.shape[3])
    if dim == 0 or queries < 0 or queries % max(heads * dim, 1):
        raise ValueError(
            f"states: expected [B, G * H * D + H * D + H * D'] with H = {heads}, D = {dim}, D' = {values.shape[3]}, "
            f"got {list(states.shape)}"
        )
    check_angles(cos, sin, batch, dim, keys, "D = ")
    expect("end", end, "B", (batch,), INTEGERS, device)
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            expect(name, norm, "D", (dim,), dtypes, device)
    return queries // dim


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [B, heads, D] rotated in its first A channels."""
    half = cos.shape[1] // 2
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        cos, sin = (angle[:, :half].repeat_interleave(2, dim=1) for angle in (cos, sin))
        partner = torch.stack((-turning[..., 1::2], turning[..., 0::2]), dim=-1).flatten(-2)
    else:
        partner = torch.cat((-turning[..., half:], turning[..., :half]), dim=-1)
    return torch.cat([turning * cos[:, None] + partner * sin[:, None], rest], dim=-1)


def rotate_append(
    states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    end: torch.Tensor,
    *,
    interleaved: bool = False,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """The query of one new token a batch row after RoPE, [B, H*G, D]; its key, after RoPE, and its value go to column
    end - 1 of the buffers. Rounded to the dtype after every product and sum, as transformers' modules round: to the bit
    in half precision, while in float32 a product and its sum may be rounded as one.

    Args:
        states: [B, G * H * D + H * D + H * D'], what the projections of query, key and value gave, side by side.
        cos, sin: [B, A] or [1, A], A channels of a head are rotated, the first ones; both halves hold the same angles.
        keys: [B, H, T, D].  values: [B, H, T, D'].  end: [B] integer, 1 .. T, which isn't checked: on the device.
        interleaved: channels 2i and 2i + 1 are rotated together; else i and i + A/2.
        query_norm, key_norm: [D], weights of an RMS norm (with `eps`) over each head before it is rotated.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    count = check_rotate_arguments(states, cos, sin, keys, values, end, query_norm, key_norm)
    heads, dim = keys.shape[1], keys.shape[3]
    wide, batch = values.shape[3], states.shape[0]
    query, key, value = states.split((count * dim, heads * dim, heads * wide), dim=1)
    query, key, value = (
        part.reshape(batch, number, size)
        for part, number, size in ((query, count, dim), (key, heads, dim), (value, heads, wide))
    )
    if query_norm is not None:
        query = rms_norm(query, query_norm, eps)
    if key_norm is not None:
        key = rms_norm(key, key_norm, eps)
    query, key = (_turned(part, cos, sin, interleaved) for part in (query, key))
    append_states(keys, values, key[:, :, None], value[:, :, None], end)
    return query
