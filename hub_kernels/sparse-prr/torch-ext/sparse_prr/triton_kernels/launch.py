"""How a kernel follows the one before it: programmatic dependent launch, where the GPU has it.

A kernel's launch then overlaps the end of the one before: 0.45 us saved on a bare edge of a CUDA graph, 0.6-0.8
where it has something to set up. Every kernel waits before it touches memory and only then lets the next one start, so
what any earlier kernel wrote is there to read, and what one still reads is never overwritten.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """First in every kernel but those of the two below."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_only(PDL: tl.constexpr):
    """First in a kernel that calls `let_next_start` itself."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Late in a kernel before one that fills the GPU once: its programs stay where they are put, and those that come
    while another kernel holds places are put unevenly. The last ones then end late: of a layer's four linear calls
    136 us against 112, of the one behind attention 16 against 11."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def _has_pdl(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def options(tensor: torch.Tensor, **others: Any) -> dict[str, Any]:
    """Keyword arguments of a launch on the tensor's device."""
    if tensor.is_cuda and _has_pdl(tensor.get_device()):
        return {"PDL": True, "launch_pdl": True, **others}
    return {"PDL": False, **others}


@cache
def shared_memory(device: int) -> int:
    """Bytes that a program can have; -1 is the interpreter's device, where Hopper's are taken."""
    if device < 0:
        return 227 * 2**10
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def first_that_fits(choices: Sequence[tuple[int, ...]], bytes_of: Callable[..., int], device: int) -> tuple[int, ...]:
    """The first of the choices, best first, whose tiles fit in shared memory; the last one where none does."""
    room = shared_memory(device) - 2**10  # what reductions take
    return next((choice for choice in choices if bytes_of(*choice) <= room), choices[-1])
