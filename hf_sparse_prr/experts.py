"""Which implementations of a model's experts a CUDA graph can hold."""

from collections.abc import Iterable
from typing import Any

import torch

# Routers of all families are torch ops on the device. Of transformers' implementations of the experts themselves these
# two are as well ("grouped_mm" is "batched_mm" on a GPU while generate() decodes); "eager" loops over the experts that
# were hit, which it reads on the host, and the others are kernels of the Hub that weren't tried.
_CAPTURED = ("batched_mm", "grouped_mm")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # quantised ones have implementations of their own


def why_not_experts(decoders: Iterable[Any]) -> str | None:
    """Why the experts of these decoder layers would be those of one token for ever, None where they wouldn't."""
    named = (pair for decoder in decoders if decoder is not None for pair in decoder.named_modules())
    for experts in (module for name, module in named if name.rpartition(".")[2] == "experts"):
        kind = type(experts).__name__
        if not (hasattr(experts, "_apply_gate") and hasattr(experts, "config")):  # what transformers' decorator gives
            return f"{kind} are experts of a class that isn't known"
        implementation = experts.config._experts_implementation
        if implementation not in _CAPTURED:
            return f"experts_implementation={implementation!r}: {' and '.join(_CAPTURED)} can be captured"
        if any(parameter.dtype not in _DTYPES for parameter in experts.parameters()):
            return f"the weights of {kind} are quantised"
    return None
