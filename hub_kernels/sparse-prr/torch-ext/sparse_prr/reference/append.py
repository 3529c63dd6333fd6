"""New keys and values into a K/V buffer."""

import torch


def append_states(
    keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, end: torch.Tensor
) -> None:
    """Write each batch row's Q new columns, end - Q .. end - 1, in place.

    The column comes from the device, so that a captured step can be replayed while the row grows.

    Args:
        keys: [B, H, T, D].  values: [B, H, T, D'].  new_keys: [B, H, Q, D].  new_values: [B, H, Q, D'], same dtypes.
        end: [B] integer, Q .. T; columns of the buffers outside of the new ones are not touched.
    """
    batch, _, count, _ = new_keys.shape
    columns = end.long()[:, None] - count + torch.arange(count, device=keys.device)
    rows = torch.arange(batch, device=keys.device)[:, None]
    for buffer, states in ((keys, new_keys), (values, new_values)):
        buffer[rows, :, columns] = states.transpose(1, 2)
