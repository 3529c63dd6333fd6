"""Sums whose bits depend on the summed values alone, not on how many other sums are taken at the same time."""

import torch


def fixed_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` of a contiguous tensor, in an order that the length of `dim` alone decides.

    On a CPU torch's own sum is that (checked by the tests). On a GPU its reduction is laid out by the number of
    outputs, so there the halves are added to each other until one is left.
    """
    if x.device.type == "cpu":
        return x.sum(dim=dim)
    length = x.shape[dim]
    if length == 0:
        return x.sum(dim=dim)
    while length > 1:
        half = length // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, length - half, half)
        x = folded if length % 2 == 0 else torch.cat([folded, x.narrow(dim, half, 1)], dim=dim)
        length = x.shape[dim]
    return x.squeeze(dim)


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` >= 0 by adding neighbours until one is left. Zeros at the end change nothing, nor the order."""
    even, odd = ((slice(None),) * dim + (slice(first, None, 2),) for first in (0, 1))
    while x.shape[dim] > 1:
        if x.shape[dim] % 2:
            x = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim=dim)
        x = x[even] + x[odd]
    return x.select(dim, 0)
