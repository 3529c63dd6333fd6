"""What the battery's cases share: sizes that fit what is under test, seeded drawing on the host, the oracle, layouts.

The rows of scores are in battery_values.py, the hints in battery_hints.py.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from .battery_values import ROWS
from .drawn import INTERPRETED

DEVICE = torch.get_default_device()
ON_GPU = DEVICE.type == "cuda"
LIMIT = 2**23 if ON_GPU else 4096 if INTERPRETED else 33_000  # entries of a row
KS = (1, 64, 512, 1000, 1024, 2048, 4096)

_INTEGERS = {2: torch.int16, 4: torch.int32}


@contextmanager
def drawing(seed: str) -> Iterator[None]:
    """Tensors are made on the host and drawn from a seed, whatever device the tests run on."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(zlib.crc32(seed.encode()))
        yield


def fitting(*columns: int) -> list[int]:
    """Those of the lengths that are tried here."""
    return [n for n in columns if n <= LIMIT]


def case(
    name: str, dtype: torch.dtype = torch.float32, *, rows: int = 2, columns: int | None = None, k: int | None = None
) -> tuple[torch.Tensor, int]:
    """(scores [R, N], k): rows of one kind, as published or in another size; never longer than LIMIT."""
    row = ROWS[name]
    columns = min(columns or row.columns, LIMIT)
    k = k or (row.k if columns >= row.columns else min(row.k, columns // 2))
    with drawing(name):
        return torch.stack([row.make(columns, k) for _ in range(rows)]).to(dtype), k


def mixture(rows: int, columns: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[R, N]: neighbours that have nothing in common, eight kinds of rows one after the other."""
    kinds = ("normal", "relu-100", "constant", "one-bin", "nan-scattered", "ascending", "random-bits", "three-inf")
    with drawing("mixture"):
        table = torch.stack([ROWS[kind].make(columns, k) for kind in kinds])
        return table[torch.arange(rows) % len(kinds)].to(dtype)


def oracle(scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """int32 [R, k] on the host: a stable sort of every row by value, in float64, entries that don't count last.

    numpy compares -0.0 and 0.0 as equal, and sorts NaN behind everything.
    """
    values = scores.double().cpu().numpy()
    rows, columns = values.shape
    gone = np.isnan(values)
    if lengths is not None:
        gone |= np.arange(columns) >= lengths.long().cpu().numpy()[:, None]
    order = np.argsort(np.where(gone, np.nan, -values), axis=1, kind="stable")[:, :k]
    winners = np.sort(np.where(np.take_along_axis(gone, order, axis=1), columns, order), axis=1)
    padded = np.full((rows, k), columns)
    padded[:, : winners.shape[1]] = winners
    return torch.tensor(np.where(padded == columns, -1, padded), dtype=torch.int32, device="cpu")


def poisoned(scores: torch.Tensor, lengths: torch.Tensor, poison: float) -> torch.Tensor:
    """The same scores; what must not be read would win."""
    with drawing("poison"):
        beyond = torch.arange(scores.shape[1]) >= lengths.long()[:, None]
        return scores.masked_fill(beyond, torch.tensor(poison).to(scores.dtype).item())


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor lies in, also what is not the tensor's, as integers."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((size,), (1,), 0)
    return whole.view(_INTEGERS[whole.element_size()]) if whole.is_floating_point() else whole


def arena(table: torch.Tensor, stride: int, offset: int = 0, step: int = 1) -> torch.Tensor:
    """The table's rows `stride` entries apart, the first behind `offset` entries; the memory between would win."""
    rows, columns = table.shape
    size = offset + rows * stride + columns * step + 64
    view = table.new_full((size,), 3e4).as_strided((rows, columns), (stride, step), offset)
    return view.copy_(table)


LAYOUTS = {
    "contiguous": lambda table: table,
    "stride-odd": lambda table: arena(table, table.shape[1] + 1),
    "stride-wide": lambda table: arena(table, 2 * table.shape[1] + 64),
    **{
        f"base-misaligned-{by}": lambda table, by=by: arena(table, -(-table.shape[1] // 8) * 8, by)
        for by in (1, 2, 3, 4, 7)
    },
    "window-of-columns": lambda table: arena(table, table.shape[1] + 333, 33),
    "rows-overlap": lambda table: table.flatten().as_strided((len(table) + 1, table.shape[1] - 68), (17, 1), 3),
    "one-row-for-all": lambda table: table[:1].expand(len(table), -1),
    "every-other-row": lambda table: table[::2],
    "transposed": lambda table: table.t().contiguous().t(),
    "every-other-column": lambda table: arena(table, 2 * table.shape[1] + 1, 1, step=2),
}
