"""Several grids as one evaluation, each in a folder of its own; and the one that covers everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_sparse_prr.demo.progress import Progress, silent
from hf_sparse_prr.evidence.evaluate import Grid, cell_name, check_case, environment, evaluate, every
from hf_sparse_prr.evidence.settings import MODES
from hf_sparse_prr.evidence.subjects import TINY, Subject, load_subject
from hf_sparse_prr.evidence.texts import TEXTS
from hf_sparse_prr.evidence.tiny import tiny_config
from hf_sparse_prr.indexed import indexer_of

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_SHARES = ("1/16", "1/8", "1/4")
_SIZES = (16, 32, 64)


def full(models: tuple[str, ...], device: str = "cpu", dtype: str = "float32") -> dict[str, Grid]:
    """By name. Of tiny models: every task at 4K and 16K under both selectors, three budgets and three block sizes; a
    needle by depth and length; and all layers sparse, where no indexer selects. Of others: the passkey by depth and
    length, and long texts.

    64 episodes a task at 4K are 512 answers a setting, so that a point is five answers; 16 at 16K.
    """
    place: dict[str, Any] = dict(device=device, dtype=dtype, modes=MODES)
    tiny = tuple(name for name in models if name.startswith(TINY))
    others = tuple(name for name in models if name not in tiny)
    found: dict[str, Grid] = {}
    if tiny:
        whole = dict(models=tiny, selectors=("quest", "infllm_v2"), budgets=_SHARES, block_sizes=_SIZES, **place)
        found["4K"] = Grid(lengths=(4096,), episodes=64, **whole)
        found["16K"] = Grid(lengths=(16384,), episodes=16, **whole)
        needle = dict(tasks=("needle_multi_key",), depths=DEPTHS, lengths=(4096, 8192, 16384), **place)
        found["depth"] = Grid(models=tiny, episodes=16, block_sizes=(16,), **needle)
    blocks = tuple(name for name in tiny if indexer_of(tiny_config(name[len(TINY) :])) is None)
    if blocks:
        found["all-layers"] = Grid(models=blocks, episodes=64, block_sizes=(16, 32), dense_layers=0, **place)
    if others:
        lengths = (1024, 2048, 4096, 7168)
        passkey = dict(tasks=("passkey",), depths=DEPTHS, lengths=lengths, episodes=1, budgets=("1024",), **place)
        found["passkey"] = Grid(models=others, **passkey)
        texts = dict(tasks=(), texts=tuple(TEXTS), lengths=(4096,), budgets=_SHARES, **place)
        found["texts"] = Grid(models=others, **texts)
    return found


def evaluate_parts(
    parts: dict[str, Grid],
    folder: Path,
    progress: Progress = silent,
    load: Callable[..., Subject] = load_subject,
    mine: Callable[[], bool] = every,
) -> dict[str, Any]:
    """As `evaluate`, of each part in the folder of its name. Returns {"parts", "environment", "cells"}; a cell also
    says its part."""
    cells, device = [], "cpu"
    for name, grid in parts.items():
        found = evaluate(grid, folder / name, progress, load, mine)
        cells += [{"part": name, **cell} for cell in found["cells"]]
        device = grid.device
    asked = {name: grid.asked for name, grid in parts.items()}
    return {"parts": asked, "environment": environment(device), "cells": cells}


def files_of(parts: dict[str, Grid], folder: Path, progress: Progress = silent) -> list[Path]:
    """The file of every cell, whether it is there or not. What can't be had is refused here, before anything runs.

    Raises:
        ValueError: a setting or a length that can't be had, or a folder of another run.
    """

    found = []
    stores = {part: grid.store(folder / part) for part, grid in parts.items()}
    dtypes = {name: grid.dtype for grid in parts.values() for name in grid.models}
    for name, dtype in dtypes.items():
        subject = load_subject(name, getattr(torch, dtype), "cpu", progress)
        for part, grid in parts.items():
            for case in grid.cases(subject) if name in grid.models else ():
                check_case(subject, case, grid)
                for setting in grid.settings(subject, case.length):
                    found.append(stores[part].path(cell_name(subject, case, setting)))
    return found
