"""The products by which a decode step moves queries to latents, and attended latents to values (MLA, arXiv
2405.04434)."""

import torch

from .check import FLOATS, expect
from .rotate import check_all_angles, turned


def check_query_arguments(
    queries: torch.Tensor, ropes: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, up: torch.Tensor
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `absorb_queries`."""
    expect("queries", queries, "B, H, D", (None,) * 3, FLOATS)
    (batch, heads, dim), device, dtypes = queries.shape, queries.device, (queries.dtype,)
    expect("ropes", ropes, "B, H, A", (batch, heads, None), dtypes, device)
    check_all_angles(cos, sin, batch, ropes.shape[2], queries)
    expect("up", up, "H, D, C", (heads, dim, None), dtypes, device)


def check_value_arguments(latents: torch.Tensor, down: torch.Tensor) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `absorb_values`."""
    expect("latents", latents, "B, H, C", (None,) * 3, FLOATS)
    (_, heads, channels), device = latents.shape, latents.device
    expect("down", down, "H, D', C", (heads, None, channels), FLOATS, device)


def absorb_queries(
    queries: torch.Tensor, ropes: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """Queries of latents, [B, H, C + A]: each head's query times its own matrix, and behind it its part that RoPE
    rotates, rotated as `latent_append` does.

    A sum over D is fp32, in the implementation's order, and rounded once; the same for every batch row.

    Args:
        queries: [B, H, D], what isn't rotated.  ropes: [B, H, A], what is to be.  up: [H, D, C], in one dtype.
        cos, sin: [B, A] or [1, A]; both halves hold the same angles.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_query_arguments(queries, ropes, cos, sin, up)
    moved = (queries.float()[..., None] * up.float()).sum(dim=2)  # no matmul: its bits change with the shape
    return torch.cat([moved.to(up.dtype), turned(ropes, cos, sin, True)], dim=2)


def absorb_values(latents: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Values [B, H, D'] in the dtype of `down` of what each head attended to: its own matrix times its latent.

    The latent is rounded to that dtype first; a sum over C is fp32, in the implementation's order, and rounded once.

    Args:
        latents: [B, H, C], any float dtype.  down: [H, D', C].

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_value_arguments(latents, down)
    rounded = latents.to(down.dtype).float()
    return (rounded[:, :, None] * down.float()).sum(dim=3).to(down.dtype)
