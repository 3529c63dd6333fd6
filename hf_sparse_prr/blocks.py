"""Lists of block ids: int32 [B, H, K], ascending, -1 in unused slots, which come last."""

from types import ModuleType

import torch


def top_blocks(kernels: ModuleType, scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best-scored blocks of each KV head, from scores [B, H, N]; a NaN score is never among them."""
    return kernels.gvr_topk(scores.flatten(0, 1), k).view(*scores.shape[:2], k)


def rope_blocks(
    inv_freq: torch.Tensor, start: torch.Tensor, column: int, block_size: int, first: int, last: torch.Tensor, k: int
) -> torch.Tensor:
    """The k blocks that RoPE favours by distance alone, [B, 1, k]: a query equal to its key scores
    sum_i cos(distance * frequency_i), a Toeplitz matrix that needs no data (GVR, arXiv 2604.22312). In any order.

    inv_freq: the model's own frequencies, YaRN's or others' scaling included. Blocks first .. last - 1 ([B]) count,
    each by its centre.
    """
    blocks = torch.arange(column // block_size + 1, device=start.device)
    centre = start[:, None] + blocks * block_size + (block_size - 1) / 2
    distance = (column - centre).float()
    scores = torch.cos(distance[..., None] * inv_freq.to(start.device).float()).sum(dim=-1)
    outside = (blocks < first) | (blocks >= last[:, None])
    best = scores.masked_fill(outside, float("-inf")).topk(min(k, len(blocks)), dim=1)
    return best.indices.masked_fill(best.values == float("-inf"), -1).to(torch.int32)[:, None]
