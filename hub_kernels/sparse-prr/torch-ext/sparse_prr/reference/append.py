"""New keys and values into a K/V buffer."""

import torch

from .check import FLOATS, INTEGERS, expect


def check_append_arguments(
    keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, end: torch.Tensor
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `append_states`."""
    expect("keys", keys, "B, H, T, D", (None,) * 4, FLOATS)
    (batch, heads, columns, dim), device = keys.shape, keys.device
    expect("values", values, "B, H, T, D'", (batch, heads, columns, None), FLOATS, device)
    expect("new_keys", new_keys, "B, H, Q, D", (batch, heads, None, dim), (keys.dtype,), device)
    count = new_keys.shape[2]
    expect("new_values", new_values, "B, H, Q, D'", (batch, heads, count, values.shape[3]), (values.dtype,), device)
    expect("end", end, "B", (batch,), INTEGERS, device)
    if count > columns:
        raise ValueError(f"new_keys: expected at most T = {columns} columns, got {count}")


def append_states(
    keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, end: torch.Tensor
) -> None:
    """Write each batch row's Q new columns, end - Q .. end - 1, in place.

    The column comes from the device, so that a captured step can be replayed while the row grows.

    Args:
        keys: [B, H, T, D].  values: [B, H, T, D'].  new_keys: [B, H, Q, D].  new_values: [B, H, Q, D'], same dtypes.
        end: [B] integer, Q .. T, which isn't checked: it is on the device. Columns of the buffers outside of the new
            ones are not touched.

    Raises:
        ValueError: shapes, dtypes or devices outside the above.
    """
    check_append_arguments(keys, values, new_keys, new_values, end)
    batch, _, count, _ = new_keys.shape
    columns = end.long()[:, None] - count + torch.arange(count, device=keys.device)
    rows = torch.arange(batch, device=keys.device)[:, None]
    for buffer, states in ((keys, new_keys), (values, new_values)):
        buffer[rows, :, columns] = states.transpose(1, 2)
