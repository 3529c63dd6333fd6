"""Lists of block ids: int32 [B, H, K], ascending, -1 in unused slots, which come last."""

from types import ModuleType

import torch

_NO_BLOCK = torch.iinfo(torch.int32).max


def top_blocks(kernels: ModuleType, scores: torch.Tensor, k: int, hint: torch.Tensor | None = None) -> torch.Tensor:
    """The k best-scored blocks of each KV head, from scores [B, H, N]; a NaN score is never among them."""
    hints = None if hint is None else hint.flatten(0, 1)
    return kernels.gvr_topk(scores.flatten(0, 1), k, hint=hints).view(*scores.shape[:2], k)


def ascending(blocks: torch.Tensor) -> torch.Tensor:
    """Block ids in order, -1 last."""
    ordered = blocks.masked_fill(blocks < 0, _NO_BLOCK).sort(dim=-1).values
    return ordered.masked_fill(ordered == _NO_BLOCK, -1)
