"""The matrices by which a projection of latents moves into queries and outputs, whatever the module is."""

from typing import TypeGuard

import torch
from torch import nn


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its weight is the matrix that it applies, here and whole: no wrapper, hook, shard, quantised or offloaded
    weight."""
    return (
        type(linear) is nn.Linear
        and "forward" not in linear.__dict__
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and type(linear.weight) in (nn.Parameter, torch.Tensor)
        and not linear.weight.is_meta
        and linear.bias is None
    )


def matrix_of(linear: nn.Module, like: torch.Tensor) -> torch.Tensor:
    """[out, in] that the module applies to activations like `like` [.., in]; its rows are those of this process under
    tensor parallelism. A module that isn't plain is asked: it is called on the unit vectors, each time, for nothing
    says when an adapter or a hook changes."""
    if is_plain(linear) and linear.weight.dtype == like.dtype and linear.weight.device == like.device:
        return linear.weight
    return linear(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)).mT


def absorbed(
    linear: nn.Module, like: torch.Tensor, key_channels: int, value_channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a projection of latents [.., C] to each head's key and value: what turns the head's queries into queries of
    latents, [H, key channels, C], and attended latents into its values, [H, value channels, C]."""
    matrix = matrix_of(linear, like).unflatten(0, (-1, key_channels + value_channels))
    up, down = matrix.split([key_channels, value_channels], dim=1)
    return up, down
