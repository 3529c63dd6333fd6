"""The matrices by which a projection of latents moves into queries and outputs, whatever the module is."""

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn


class Absorbed(NamedTuple):
    """up: [H, key channels, C], what turns a head's queries into queries of latents.  down: [H, value channels, C],
    what turns attended latents into its values; with a batch dimension in front where rows differ.  shift: what is
    added to values, [B, 1, H, value channels] or None. What is added to keys shifts all logits of a query alike."""

    up: torch.Tensor
    down: torch.Tensor
    shift: torch.Tensor | None

    def moved(self, nope: torch.Tensor) -> torch.Tensor:
        """[B, Q, H, C] of queries without their RoPE part, [B, H, Q, key channels]."""
        return torch.einsum("bhqn,bhnc->bqhc" if self.up.dim() == 4 else "bhqn,hnc->bqhc", nope, self.up)

    def queries(self, nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """[B, Q, H, C + A] of queries in two parts, [B, H, Q, key channels] and [B, H, Q, A], post-RoPE."""
        return torch.cat([self.moved(nope), rope.transpose(1, 2)], dim=-1)

    def values(self, latents: torch.Tensor, kernels: Any = None) -> torch.Tensor:
        """[B, Q, H, value channels] of attended latents [B, Q, H, C]. kernels: of a token whose linear parts are
        fused."""
        if kernels is not None and self.down.dim() == 3 and self.shift is None:
            values: torch.Tensor = kernels.absorb_values(latents[:, 0], self.down)[:, None]
            return values
        how = "bqhc,bhvc->bqhv" if self.down.dim() == 4 else "bqhc,hvc->bqhv"
        values = torch.einsum(how, latents.to(self.down.dtype), self.down)
        return values if self.shift is None else values + self.shift


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its weight is all that it applies, here and whole: no wrapper, hook, bias, shard, quantised or offloaded
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


def plainly_absorbed(
    linear: nn.Module, latents: torch.Tensor, key_channels: int, value_channels: int
) -> Absorbed | None:
    """As `absorbed`, of a projection that is plain and where its latents are; None of any other."""
    if not is_plain(linear) or linear.weight.dtype != latents.dtype or linear.weight.device != latents.device:
        return None
    sizes = [key_channels, value_channels]
    up, down = linear.weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return Absorbed(up, down, None)


def absorbed(linear: nn.Module, latents: torch.Tensor, key_channels: int, value_channels: int) -> Absorbed:
    """Of a projection of latents [B, .., C] to each head's key and value; its heads are those of this process under
    tensor parallelism. A module that isn't plain is asked: it is called on the unit vectors and on 0, for each row of
    the batch, which may have adapters of its own, and each time, for nothing says when an adapter or a hook changes."""
    plain = plainly_absorbed(linear, latents, key_channels, value_channels)
    if plain is not None:
        return plain
    sizes = [key_channels, value_channels]
    batch, channels = latents.shape[0], latents.shape[-1]
    asked = torch.eye(channels + 1, channels, dtype=latents.dtype, device=latents.device)  # the last row is 0
    answer = linear(asked.expand(batch, -1, -1)).unflatten(2, (-1, sum(sizes)))
    up, down = (answer[:, :-1] - answer[:, -1:]).permute(0, 2, 3, 1).split(sizes, dim=2)
    return Absorbed(up, down, answer[:, -1:, :, key_channels:])
