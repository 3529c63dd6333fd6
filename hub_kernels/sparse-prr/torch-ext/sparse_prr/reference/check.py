"""What ops require of their arguments, as far as the host knows it: nothing here reads a device.

A kernel indexes by the sizes of its first argument, so another that doesn't fit would be read beyond its end. A tensor
takes 0.3 us, 0.9 us where it has a size that may be any (one CPU thread). dynamo can trace all of it.
"""

from operator import index
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FP32, INT32, BOOL = (torch.float32,), (torch.int32,), (torch.bool,)


def _fits(shape: torch.Size, sizes: tuple[int | None, ...]) -> bool:
    if len(shape) != len(sizes):
        return False
    for size, expected in zip(shape, sizes, strict=True):  # noqa: SIM110 - `all` of a generator takes twice as long
        if expected is not None and size != expected:
            return False
    return True


def expect(
    name: str,
    tensor: Any,
    letters: str,
    sizes: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """ValueError unless it's a strided tensor of these sizes, in one of the dtypes, on that device. None is any.

    letters: of the shape, as docstrings have them.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.shape != sizes and not _fits(tensor.shape, sizes):  # most have no size that may be any
        known = ", ".join(".." if size is None else str(size) for size in sizes)
        values = "" if all(size is None for size in sizes) else f" = [{known}]"
        raise ValueError(f"{name}: expected [{letters}]{values}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    expect_place(name, tensor, device)


def expect_place(name: str, tensor: torch.Tensor, device: torch.device | None) -> None:
    """ValueError unless the tensor is strided and on that device (None: any)."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: expected a strided tensor, got {tensor.layout}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")


def expect_rows(valid: Any, start: Any, end: Any, batch: int, columns: int, device: torch.device) -> None:
    """`expect` for where the tokens of batch rows are: valid bool [B, T], start and end integer [B]."""
    expect("valid", valid, "B, T", (batch, columns), BOOL, device)
    expect("start", start, "B", (batch,), INTEGERS, device)
    expect("end", end, "B", (batch,), INTEGERS, device)


def expect_column(name: str, columns: int) -> None:
    """ValueError for a buffer without any column, into which one is to be written."""
    if columns == 0:
        raise ValueError(f"{name}: expected T >= 1 columns, got 0")


def size_or_1(tensor: Any, dim: int, size: int) -> int:
    """What to expect along `dim` of a tensor that may have 1 there, for all, instead of `size`."""
    return 1 if isinstance(tensor, torch.Tensor) and tensor.shape[dim : dim + 1] == (1,) else size


def integer(name: str, value: Any, least: int) -> int:
    """The value as an int, NumPy's too; ValueError for anything else, and below `least`."""
    if type(value) is int and value >= least:
        return value
    try:  # a bool and a tensor are integers to Python; the tensor would be read
        number = least - 1 if isinstance(value, (bool, torch.Tensor)) else index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name}: expected an int >= {least}, got {value!r}")
    return number
