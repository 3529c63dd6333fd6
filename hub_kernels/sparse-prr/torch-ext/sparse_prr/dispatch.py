"""Which of an op's implementations a call runs: by the device of its tensors."""

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

from . import cuda_kernels

P = ParamSpec("P")
R = TypeVar("R")
HAS_TRITON = find_spec("triton") is not None
INTERPRETS = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # tests: kernels without a GPU


@cache
def _runs_cuda_kernels(device: int) -> bool:
    return cuda_kernels.AVAILABLE and torch.cuda.get_device_capability(device)[0] == 9  # compiled for sm_90a alone


def backend() -> str:
    """What ops run on a CUDA GPU: "cuda" (compiled kernels where there are some, else Triton), "triton", or "reference"
    without either or without a GPU. "interpreter" where Triton's interpreter runs its kernels, on any device."""
    if INTERPRETS:
        return "interpreter"
    if not (HAS_TRITON and torch.cuda.is_available()):
        return "reference"
    return "cuda" if cuda_kernels.AVAILABLE and _runs_cuda_kernels(torch.cuda.current_device()) else "triton"


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Of a call's arguments or, of partials, their parts; None where there is none."""
    for value in (*args, *kwargs.values()):
        first = value[0] if isinstance(value, tuple) and value else value
        if isinstance(first, torch.Tensor):
            return first
    return None


def by_device(reference: Callable[P, R]) -> Callable[P, R]:
    """The op: its compiled kernel on a Hopper GPU, if this variant has one; its Triton kernel on a CUDA GPU, on that
    GPU; the reference on a CPU, or where there is no Triton. The device is that of the first tensor of the call; what
    isn't on it an op refuses."""

    @wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = _first_tensor(args, kwargs)
        if tensor is None or not (HAS_TRITON and (tensor.is_cuda or INTERPRETS)):
            return reference(*args, **kwargs)
        from . import triton_kernels  # here: importing the package must not need triton

        name = reference.__name__
        kernel = getattr(triton_kernels, name)
        if INTERPRETS:
            return kernel(*args, **kwargs)
        if hasattr(cuda_kernels, name) and _runs_cuda_kernels(tensor.get_device()):
            kernel = getattr(cuda_kernels, name)
        with torch.cuda.device(tensor.device):
            return kernel(*args, **kwargs)

    return op
