"""Attention of a prompt's queries to the tokens that each has selected, over expanded keys and values."""

import torch

from .check import BOOL, FLOATS, expect, integer


def check_masked_arguments(
    nope: torch.Tensor,
    rope: torch.Tensor,
    keys: torch.Tensor,
    key_ropes: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    begin: int,
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `masked_attention`."""
    expect("nope", nope, "B, H, Q, D", (None,) * 4, FLOATS)
    (batch, heads, count, dim), device, dtypes = nope.shape, nope.device, (nope.dtype,)
    expect("rope", rope, "B, H, Q, A", (batch, heads, count, None), dtypes, device)
    expect("keys", keys, "B, H, T, D", (batch, heads, None, dim), dtypes, device)
    columns = keys.shape[2]
    expect("key_ropes", key_ropes, "B, T, A", (batch, columns, rope.shape[3]), dtypes, device)
    expect("values", values, "B, H, T, D'", (batch, heads, columns, None), dtypes, device)
    expect("seen", seen, "B, Q, T", (batch, count, columns), BOOL, device)
    integer("begin", begin, 0)


def masked_attention(
    nope: torch.Tensor,
    rope: torch.Tensor,
    keys: torch.Tensor,
    key_ropes: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    begin: int,
    *,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * (nope . keys + rope . key_ropes)) values over the columns that a query sees up to its own,
    [B, Q, H, D'] in their dtype; 0 for a query that sees none. Weights are rounded to that dtype before the product
    with the values, sums are fp32.

    Args:
        nope: [B, H, Q, D].  rope: [B, H, Q, A].  keys: [B, H, T, D].  key_ropes: [B, T, A], every head's.
        values: [B, H, T, D'].  seen: bool [B, Q, T].  begin: the first query's own column; the i-th one's is begin + i.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_masked_arguments(nope, rope, keys, key_ropes, values, seen, begin)
    own = torch.arange(begin, begin + nope.shape[2], device=nope.device)
    seen = (seen & (torch.arange(keys.shape[2], device=nope.device) <= own[:, None]))[:, None]
    logits = nope.float() @ keys.float().transpose(2, 3) + rope.float() @ key_ropes.float().transpose(1, 2)[:, None]
    logits = (logits * scale).masked_fill(~seen, float("-inf"))
    peak = logits.amax(dim=3, keepdim=True) if logits.shape[3] else logits.new_zeros((*logits.shape[:3], 1))
    weights = torch.exp(logits - peak.masked_fill(peak == float("-inf"), 0.0))
    output = weights.to(values.dtype).float() @ values.masked_fill(~seen.any(dim=2)[..., None], 0).float()
    total = weights.sum(dim=3, keepdim=True)
    return torch.where(total == 0, 0.0, output / total).to(values.dtype).transpose(1, 2)
