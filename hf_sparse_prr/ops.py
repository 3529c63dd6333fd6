"""Ops for direct use, over the bundled kernels."""

from typing import Any

import torch

from . import kernel_loader


def gvr_topk(
    scores: torch.Tensor,
    k: int,
    *,
    hint: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_stats: bool = False,
) -> Any:
    """The k largest entries of each row as ascending indices, exact and deterministic.

    Args:
        scores: [R, N] float32, bfloat16 or float16. -0.0 equals +0.0, +inf is largest, NaN is never selected.
        k: how many; k > N pads.
        hint: [R, M] integers of any content; changes the speed, never the result.
        lengths: [R] integers, clamped to [0, N]; entries at or past them are never candidates.
        return_stats: return (indices, TopKStats) instead.

    Returns:
        int32 [R, k], unused slots -1 and last. At the k-th value the smallest index wins. The result is a function of
        (scores, k, lengths) alone (GVR, arXiv 2604.22312).

    Raises:
        ValueError: shapes, dtypes, devices or k outside the above.
    """
    topk = kernel_loader.resolve("auto").module.gvr_topk
    return topk(scores, k, hint=hint, lengths=lengths, return_stats=return_stats)
