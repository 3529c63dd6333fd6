"""Time `gvr_topk` by row length, k, rows and guess, beside torch.topk and torch.sort on the same rows. No call is timed
before each of its rows was seen to equal a stable sort."""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import kernel_loader
from .bench import bandwidth_of, described, machine, measured_kernels
from .bench_topk_rows import SCORES, Rows, strategies_of
from .bench_topk_time import Cell, Clock, Task, sets_of, wrong_rows

FULL = tuple(2**power for power in range(12, 21))  # row lengths of the full grid
OVERLAPS = (0.0, 0.3, 0.6, 0.95)
CACHES = ("warm", "cold", "both")
_COPIES = 8  # of a cell's scores: sets of them, and what a sort makes
_TIMED = ("us", "spread", "to_topk", "to_sort", "gb_per_s", "floor_share")


def default_grid(device: str, ablation: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Row lengths, k and rows: of decode steps, one of them for an ablation; on a CPU few and short ones."""
    on_gpu = torch.device(device).type == "cuda"
    if ablation:
        return (2**17 if on_gpu else 2**14,), (2048,), (1,)
    if on_gpu:
        return (2**13, 2**15, 2**17, 2**19), (64, 512, 1024, 2048), (1, 4, 16, 64, 128)
    return (2**13, 2**15), (512, 2048), (1, 4)


def _memory(device: str) -> int:
    """Bytes that are free on a GPU, or that the machine has."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Guessed:
    """The top-k of one k from rows with each strategy's guesses."""

    def __init__(self, pool: Rows, k: int, strategies: Sequence[str], kernels: ModuleType) -> None:
        self.pool, self.k, self._op = pool, k, kernels.gvr_topk
        self.winners = pool.winners(k)
        self.guesses = {name: pool.guesses(name, k, kernels) for name in strategies}

    def _ours(self, name: str, rows: int, sets: int) -> Callable[..., Any]:
        """`gvr_topk` of a set of rows, by its index."""
        given = dict(self.guesses[name])
        if self.pool.lengths is not None:
            given["lengths"] = self.pool.lengths
        scores, op, k = self.pool.scores.split(rows), self._op, self.k
        keywords = [{key: value[i * rows : (i + 1) * rows] for key, value in given.items()} for i in range(sets)]
        return lambda index, **more: op(scores[index], k, **keywords[index], **more)

    def measure(self, cell: Cell, sets: int, clock: Clock, bandwidth: float | None) -> dict[str, Any]:
        """One cell: exactness, then the times of what is exact and of the peers, which read whole rows."""
        scores = self.pool.scores.split(cell.rows)
        winners = self.winners[: sets * cell.rows]
        peers = {
            "torch.topk": Task(lambda index: torch.topk(scores[index], self.k, dim=1, sorted=False)),
            "torch.sort": Task(lambda index: torch.sort(scores[index], dim=1, descending=True, stable=True)),
        }
        tasks, rows = {}, {}
        for name in self.guesses:
            call = self._ours(name, cell.rows, sets)
            results, stats = zip(*(call(index, return_stats=True) for index in range(sets)), strict=True)
            plain = [call(index) for index in range(sets)]
            wrong = max(wrong_rows(results, winners), wrong_rows(plain, winners))
            means = {
                field: float(torch.cat([getattr(each, field) for each in stats]).double().mean())
                for field in ("passes", "candidates", "fallback")
            }
            rows[name] = {"wrong": wrong, **dict.fromkeys(_TIMED), **means}
            if not wrong:
                tasks[name] = Task(call, winners)
        taken = clock({**peers, **tasks}, sets, cell.cache)
        entries = self.pool.scores[: sets * cell.rows]
        read = entries.numel() if self.pool.lengths is None else int(self.pool.lengths[: len(entries)].sum())
        size = read / sets * entries.element_size() + 4 * cell.k * cell.rows
        floor = None if bandwidth is None else 1e6 * size / bandwidth
        for name in tasks:
            (us, spread), wrong = taken[name]
            rows[name]["wrong"] = wrong
            if not wrong:
                ratios = [us / taken[peer][0].us for peer in peers]
                share = None if floor is None else floor / us
                rows[name].update(zip(_TIMED, (us, spread, *ratios, size / us / 1e3, share), strict=True))
        return {
            **cell._asdict(),
            "sets": sets,
            "bytes": size,
            "floor_us": floor,
            "peers": {name: taken[name][0].us for name in peers},
            "peers_spread": {name: taken[name][0].spread for name in peers},
            "strategies": rows,
        }


def check_arguments(
    n: Sequence[int],
    k: Sequence[int],
    rows: Sequence[int],
    device: str,
    scores: str,
    overlaps: Sequence[float],
    cache: str,
    strategies: Sequence[str] | None,
    kernels: str | Path | ModuleType,
) -> tuple[kernel_loader.Kernels, list[str]]:
    """The kernels and the names of strategies that arguments of `bench_topk` mean. ValueError or KernelError for what
    can't be."""
    for name, values in (("n", n), ("k", k), ("rows", rows)):
        if not values or min(values) < 1:
            raise ValueError(f"{name}: expected numbers >= 1, got {min(values) if values else 'none'}")
    if max(k) > min(n):
        raise ValueError(f"k: expected at most n={min(n)}, got {max(k)}")
    if 4 * max(n) * max(rows) > _memory(device) // _COPIES:
        raise ValueError(
            f"n and rows: expected rows of which {_COPIES} copies fit the memory, got {max(rows)} x {max(n)}"
        )
    if scores not in SCORES:
        raise ValueError(f"scores: expected one of {', '.join(SCORES)}, got {scores!r}")
    if cache not in CACHES:
        raise ValueError(f"cache: expected one of {', '.join(CACHES)}, got {cache!r}")
    if cache != "warm" and torch.device(device).type != "cuda":
        raise ValueError(f"cache: expected warm on a CPU, got {cache!r}")
    loaded = measured_kernels(kernels)
    return loaded, strategies_of(loaded.module, strategies, overlaps)


@torch.no_grad()
def bench_topk(
    n: Sequence[int],
    k: Sequence[int],
    rows: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    scores: str = "normal",
    ragged: bool = False,
    overlaps: Sequence[float] = OVERLAPS,
    cache: str = "warm",
    strategies: Sequence[str] | None = None,
    kernels: str | Path | ModuleType = "auto",
    rounds: int | None = None,
    limit: float | None = None,
    progress: Callable[[str, int, int | None], None] = lambda *_: None,
) -> dict[str, Any]:
    """Microseconds of a top-k in every cell of the grid, for each strategy, with its ratio to the two peers.

    On a GPU a time is the median of replays of a CUDA graph over its calls; elsewhere of calls in turns. Warm calls
    take turns with as many sets of rows as fit the L2, at most 4; before rows of a cold one come again, 256 MiB of
    others are read. Guesses are made before and aren't timed. A strategy of which a row is wrong has no time.

    Args:
        scores: one of `SCORES`.
        ragged: rows of 1 .. N entries, by lengths on the device; floors count what is in them, peers read the rest too.
        overlaps: of the strategy "previous" with the winners.
        cache: "warm", and on a GPU "cold" or "both".
        strategies: of `STRATEGIES`; by default all that the kernels can.
        kernels: as in `SparseConfig`; only "auto" may fall back, which "kernels" of the result says.
        rounds: turns of each call, by default 5; on a GPU replays of each graph, by default 20, fewer for slow ones.
        limit: seconds after which no further cell begins; "left_out" names those that didn't.
        progress: called with (stage, done, total or None).

    Raises:
        ValueError: a grid, scores, cache or strategy that can't be.
        KernelError: kernels that can't be loaded.
    """
    begin, where = time.perf_counter(), torch.device(device)
    loaded, names = check_arguments(n, k, rows, device, scores, overlaps, cache, strategies, kernels)
    clock, bandwidth = Clock(where, rounds), bandwidth_of(where)
    caches = [each for each in CACHES[:2] if cache in (each, "both")]
    total, done = len(n) * len(k) * len(rows) * len(caches), itertools.count()
    found: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for length in n:
        shapes = [Cell(length, *rest) for rest in itertools.product(k, rows, caches)]
        cells = {cell: sets_of(cell, dtype.itemsize, clock.l2) for cell in shapes}
        most = max(cell.rows * count for cell, count in cells.items())
        pool = guessed = None
        for cell, sets in cells.items():
            progress(f"{length} scores a row", next(done), total)
            late = limit is not None and time.perf_counter() - begin > limit
            if late or not sets:
                reason = f"over {limit:g} s" if sets else "larger than the L2: cold only"
                left_out.append({**cell._asdict(), "reason": reason})
                continue
            pool = pool or Rows(scores, most, length, max(k), dtype, where, ragged)
            if guessed is None or guessed.k != cell.k:
                guessed = Guessed(pool, cell.k, names, loaded.module)
            found.append(guessed.measure(cell, sets, clock, bandwidth))
            clock.give_back()
    return {
        "bench": "topk",
        **machine(device, dtype),
        "bandwidth": bandwidth,
        "l2_bytes": clock.l2,
        "timed_by": "CUDA graph" if clock.on_gpu else "clock",
        "kernels": described(loaded),
        "scores": scores,
        "ragged": ragged,
        "rounds": clock.rounds,
        "strategies": names,
        "wrong": sum(row["wrong"] for cell in found for row in cell["strategies"].values()),
        "cells": found,
        "left_out": left_out,
        "seconds": time.perf_counter() - begin,
    }
