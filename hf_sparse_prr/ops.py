"""Ops: for direct use, over the bundled kernels, and as torch.compile sees them."""

from types import ModuleType
from typing import Any

import torch

from . import kernel_loader


def traceable(kernels: ModuleType) -> Any:
    """Kernels for code that may be compiled: the module itself, called directly (through the dispatcher an op takes
    some 10 us longer), and in a trace its registered ops."""
    if not torch.compiler.is_compiling():
        return kernels
    from . import traced_latent, traced_ops  # noqa: F401 - here: registering them must not cost an import anything

    return traced_ops.Ops(traced_ops.key_of(kernels), kernels)


def gvr_topk(
    scores: torch.Tensor,
    k: int,
    *,
    hint: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_stats: bool = False,
    threshold: torch.Tensor | None = None,
) -> Any:
    """The k largest entries of each row as ascending indices, exact and deterministic.

    Args:
        scores: [R, N] float32, bfloat16 or float16. -0.0 equals +0.0, +inf is largest, NaN is never selected.
        k: how many; k > N pads.
        hint: [R, M] integers of any content; changes the speed, never the result.
        lengths: [R] integers, clamped to [0, N]; entries at or past them are never candidates.
        return_stats: return (indices, TopKStats) instead.
        threshold: fp32 [R] or [R, 2], a score that somewhat more than k entries are expected to reach, and one that few
            do; as the hint, and before it.

    Returns:
        int32 [R, k], unused slots -1 and last. At the k-th value the smallest index wins. The result is a function of
        (scores, k, lengths) alone (GVR, arXiv 2604.22312).

    Raises:
        ValueError: shapes, dtypes, devices or k outside the above.
    """
    if torch.compiler.is_compiling():
        from . import traced_ops  # as in `traceable`

        topk = traced_ops.Ops(traced_ops.key_of_auto()).gvr_topk
    else:
        topk = kernel_loader.resolve("auto").module.gvr_topk
    return topk(scores, k, hint=hint, lengths=lengths, return_stats=return_stats, threshold=threshold)
