"""Which of an op's two implementations a call runs: by the device of its tensors."""

import os
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
HAS_TRITON = find_spec("triton") is not None
INTERPRETS = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # tests: kernels without a GPU


def by_device(reference: Callable[P, R]) -> Callable[P, R]:
    """The op: its Triton kernel on a CUDA GPU, on that GPU; the reference on a CPU, or where there is no Triton."""

    @wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = args[0] if args else next(iter(kwargs.values()))
        if isinstance(tensor, tuple):
            tensor = tensor[0]
        if not isinstance(tensor, torch.Tensor) or not (HAS_TRITON and (tensor.is_cuda or INTERPRETS)):
            return reference(*args, **kwargs)
        from . import triton_kernels  # here: importing the package must not need triton

        kernel = getattr(triton_kernels, reference.__name__)
        if INTERPRETS:
            return kernel(*args, **kwargs)
        with torch.cuda.device(tensor.device):
            return kernel(*args, **kwargs)

    return op
