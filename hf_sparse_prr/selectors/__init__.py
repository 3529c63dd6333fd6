"""Selectors: how keys are summarised into blocks and how blocks are scored. One small file each.

A selector is stateless. What it keeps per layer is a tuple of tensors [B, H, N, ..] which the cache grows, reorders,
crops and copies with everything else.
"""

from types import ModuleType
from typing import Protocol

import torch

from .quest import Quest


class Selector(Protocol):
    """What decode.py needs of a selector."""

    def allocate(self, keys: torch.Tensor, blocks: int) -> tuple[torch.Tensor, ...]:
        """Empty summaries [B, H, blocks, ..] for keys [B, H, T, D]."""

    def summarise(
        self,
        kernels: ModuleType,
        summaries: tuple[torch.Tensor, ...],
        keys: torch.Tensor,
        valid: torch.Tensor,
        start: torch.Tensor,
        begin: int,
        count: int,
        block_size: int,
    ) -> None:
        """Bring the blocks that hold columns begin .. begin + count - 1 up to date, in place."""

    def scores(
        self,
        kernels: ModuleType,
        query: torch.Tensor,
        summaries: tuple[torch.Tensor, ...],
        first: int,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """fp32 [B, H, N] for query [B, H, G, D]; NaN outside first .. last - 1 and for blocks without a token."""


SELECTORS: dict[str, Selector] = {"quest": Quest()}
