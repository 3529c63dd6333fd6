"""Launch parameters that were measured on a GPU, by its name: one JSON file each, or the defaults.

Which file: the one that is committed here, in `tuned/`; else the one that `hf-sparse-prr tune` left in the user's cache
folder. In this order, so that two machines with a GPU of a committed name run the same kernels. It is read when a
device is first used and never again.

An op's parameters hold for every shape: chosen by N or batch, a row's bits would depend on them. Between two
parameters, that is between two GPUs or before and after tuning, these bits can differ, in the order of a sum (read off
the layouts that Triton 3.6 compiles for sm_90):

    quest          BN, num_warps: the sum over D, where a tile is too small for 16-byte loads by every thread; not at
                   D = 128 in bfloat16 from 16 blocks on
    window_logits  BW: which windows a partial sum of the softmax holds; num_warps: the order within it
    window_shares  nothing: a sum over query heads, one after the other
    merge          DS: the sum over ranks
    select         nothing: it compares integers
    ema_step       nothing: minimum, maximum and elementwise
    linear, gate   all but STAGES: which products a thread sums, and in which order threads are summed
    ways           nothing: which of the compiled ways of `gvr_topk` finds the same indices (`cuda_kernels/topk.py`)

Serial decoding and PRR run the same parameters on one device, so they stay equal. What attention over a block is
(`tile.py`: WARPS, the tokens held at a time) isn't tuned: three kernels have to agree on it to the bit.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Table = dict[str, dict[str, int]]

DEFAULTS: Table = {
    "quest": {"BN": 32, "num_warps": 4},  # blocks of a program
    "window_logits": {"BW": 128, "num_warps": 4},  # windows of a program
    "window_shares": {"BN": 32, "num_warps": 4},
    "merge": {"DS": 32},  # channels of a program
    "select": {"num_warps": 16},  # of a program that holds a full chunk
    "ema_step": {"CHUNK": 512, "num_warps": 8},  # blocks of a program
    # Channels out of a program; those into it that come ahead, and at a time; such tiles in flight
    "linear": {"BY": 8, "AHEAD": 512, "BX": 256, "STAGES": 4, "num_warps": 4},
    "gate": {"BY": 4, "AHEAD": 512, "BX": 256, "STAGES": 4, "num_warps": 4},  # of both weights
    # The longest row that goes whole, without a guess and with one; the most rows in tiles, and behind one guess each
    "ways": {"ROW": 8192, "ROW_GUESSED": 4096, "TILES": 2, "GUESSED": 128},
}
_LIMITS = {
    "BN": (16, 1024),
    "BW": (16, 1024),
    "BX": (64, 2048),
    "AHEAD": (64, 4096),
    "DS": (16, 256),
    "CHUNK": (128, 4096),
    "num_warps": (1, 32),
}
_LIMITS |= {"BY": (1, 64), "STAGES": (1, 8)}
_LIMITS |= {"ROW": (1024, 2**20), "ROW_GUESSED": (1024, 2**20), "TILES": (1, 64), "GUESSED": (1, 256)}
_COMMITTED = Path(__file__).parent / "tuned"

_tables: dict[int, Table] = {}  # by device index, -1 the CPU


def file_name(gpu: str) -> str:
    """Of a GPU that torch calls `gpu`."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in gpu) + ".json"


def user_folder() -> Path:
    """Where `hf-sparse-prr tune` writes."""
    return Path(os.environ.get("HF_SPARSE_PRR_CACHE") or Path.home() / ".cache" / "hf_sparse_prr") / "tuned"


def read(path: Path) -> Table:
    """The parameters in a file, the defaults for an op that it doesn't have.

    Raises:
        ValueError: the file isn't JSON, or has another op, parameter or number than there may be.
    """

    remedy = "delete it, or run `hf-sparse-prr tune` again"

    def check(fine: bool, expected: str, got: Any) -> None:
        if not fine:
            raise ValueError(f"{path}: expected {expected}, got {got!r}; {remedy}")

    try:
        found = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}; {remedy}") from error
    ops: Any = found.get("config") if isinstance(found, dict) else None
    check(isinstance(ops, dict), 'an object "config"', ops)
    for op, values in ops.items():
        check(op in DEFAULTS, f"one of {', '.join(DEFAULTS)}", op)
        named = isinstance(values, dict) and values.keys() == DEFAULTS[op].keys()
        check(named, f"{list(DEFAULTS[op])} of {op}", values)
        for name, value in values.items():
            least, most = _LIMITS[name]
            fine = type(value) is int and least <= value <= most and value & (value - 1) == 0
            check(fine, f"{op}'s {name} to be a power of two from {least} to {most}", value)
    return {op: dict(ops.get(op, values)) for op, values in DEFAULTS.items()}


def committed(gpu: str) -> Path | None:
    """The file that this repo has for a GPU."""
    path = _COMMITTED / file_name(gpu)
    return path if path.is_file() else None


def users(gpu: str) -> Path | None:
    """The file that `hf-sparse-prr tune` left for a GPU; None too where a home or a folder can't be looked into."""
    try:
        path = user_folder() / file_name(gpu)
        return path if path.is_file() else None
    except (OSError, RuntimeError):
        return None


def load(gpu: str) -> Table:
    """The parameters of a GPU; the defaults, and a warning, without a file or with one of the user's that is broken or
    of another version: no step fails for want of speed."""
    path = committed(gpu)
    if path is not None:
        return read(path)
    why, path = f"no tuned configuration for {gpu!r}", users(gpu)
    if path is not None:
        try:
            return read(path)
        except ValueError as error:
            why = f"the tuned configuration for {gpu!r} can't be used ({error})"
    warnings.warn(
        f"sparse-prr: {why}, so the defaults run: as exact, maybe slower. Remedy: `hf-sparse-prr tune` measures one in "
        "a minute or two",
        stacklevel=2,
    )
    return {op: dict(values) for op, values in DEFAULTS.items()}


def config(op: str, tensor: torch.Tensor) -> dict[str, int]:
    """Launch parameters of `op` on the tensor's device. Not to be changed by the caller."""
    device = tensor.get_device()
    table = _tables.get(device)
    if table is None:
        table = _tables[device] = load(torch.cuda.get_device_name(device)) if tensor.is_cuda else DEFAULTS
    return table[op]


@contextmanager
def trying(device: int, table: Table) -> Iterator[None]:
    """Launch with `table` on a device: how a candidate is measured."""
    before = _tables.get(device)
    _tables[device] = table
    try:
        yield
    finally:
        if before is None:
            del _tables[device]
        else:
            _tables[device] = before
