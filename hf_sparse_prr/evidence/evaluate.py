"""Every case under every setting, cell by cell, and what the cells say together."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_sparse_prr.config import SparseConfig
from hf_sparse_prr.demo.progress import Progress, silent
from hf_sparse_prr.evidence.cells import QUESTION, SEED, Case, TaskGroup, TextGroup
from hf_sparse_prr.evidence.forced import FORCED
from hf_sparse_prr.evidence.settings import Setting, settings_for
from hf_sparse_prr.evidence.store import Store
from hf_sparse_prr.evidence.subjects import Subject, load_subject
from hf_sparse_prr.evidence.tasks import TASKS
from hf_sparse_prr.evidence.texts import text_of
from hf_sparse_prr.selectors import SELECTORS


@dataclass(frozen=True)
class Grid:
    """What is evaluated; `hf-sparse-prr eval --help` says what each means."""

    models: tuple[str, ...]
    tasks: tuple[str, ...] = tuple(TASKS)
    lengths: tuple[int, ...] = (4096,)
    depths: tuple[float | None, ...] = (None,)
    texts: tuple[str, ...] = ()
    text_tokens: int = 128
    episodes: int = 32
    windows: int = 2
    selectors: tuple[str, ...] = ("quest",)
    budgets: tuple[str, ...] = ("1/8",)
    block_sizes: tuple[int, ...] = (32,)
    modes: tuple[str, ...] = ("dense", "serial", "prr")
    dense_layers: int | str = "auto"
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
        for text in self.texts:
            text_of(text)

    def cases(self, subject: Subject) -> Iterator[Case]:
        """Texts are for models with a tokenizer: the tiny ones never saw any."""
        for length in self.lengths:
            for task in self.tasks:
                for depth in self.depths:
                    yield Case(task, length, depth, self.episodes)
            if subject.tokenizer is not None:
                for text in self.texts:
                    yield Case(f"text:{text}", length, None, self.windows)

    def settings(self, subject: Subject, length: int) -> list[Setting]:
        sizes, modes = list(self.block_sizes), list(self.modes)
        chosen = (list(self.selectors), list(self.budgets), sizes, modes, self.dense_layers)
        return settings_for(subject.indexed, length, *chosen)

    @property
    def asked(self) -> dict[str, Any]:
        """As JSON, with what else a cell depends on."""
        return {**{name: _plain(value) for name, value in asdict(self).items()}, "question": QUESTION, "seed": SEED}

    def store(self, folder: Path) -> Store:
        """More models, tasks, lengths or settings may be added to a folder; what a cell holds may not change."""
        fixed = ("episodes", "windows", "text_tokens", "dense_layers", "dtype", "device", "question", "seed")
        return Store(folder, {name: self.asked[name] for name in fixed})


def every() -> bool:
    """Measures each case: there is but one process."""
    return True


def evaluate(
    grid: Grid,
    folder: Path,
    progress: Progress = silent,
    load: Callable[..., Subject] = load_subject,
    mine: Callable[[], bool] = every,
) -> dict[str, Any]:
    """Run what of the grid isn't in `folder` yet. Returns {"grid", "environment", "cells"}; a cell says its model,
    task, length, depth and setting, and what `TaskGroup.run` or `TextGroup.run` found.

    mine: asked once a case, in order; a case that another process measures is left out.

    Raises:
        ValueError: a setting or a length that can't be had, or a folder of another run.
    """
    store = grid.store(folder)
    cells = []
    for name in grid.models:
        subject = load(name, getattr(torch, grid.dtype), grid.device, progress)
        for case in grid.cases(subject):  # all of them before the first is measured
            check_case(subject, case, grid)
        for case in grid.cases(subject):
            if mine():
                cells += _group(subject, case, grid, store, progress)
    return {"grid": grid.asked, "environment": environment(grid.device), "cells": cells}


def check_case(subject: Subject, case: Case, grid: Grid) -> None:
    """ValueError for a length or a setting that can't be had."""
    if case.length > subject.longest:
        raise ValueError(f"length: expected at most {subject.longest} for {subject.name}, got {case.length}")
    for setting in grid.settings(subject, case.length):
        if setting.mode not in ("dense", FORCED):
            _check_setting(subject, setting)
    group_of(subject, case, grid)  # too short a length for a task, too little of a text


def _check_setting(subject: Subject, setting: Setting) -> None:
    layers = subject.model.config.get_text_config(decoder=True).num_hidden_layers
    if isinstance(setting.dense_layers, int) and setting.dense_layers > layers:
        raise ValueError(f"dense_layers: expected at most {layers}, the model's layers, got {setting.dense_layers}")
    if not subject.indexed and setting.selector not in SELECTORS:
        raise ValueError(f"selector: expected one of {', '.join(SELECTORS)}, got {setting.selector!r}")
    SparseConfig(**setting.overrides())


def group_of(subject: Subject, case: Case, grid: Grid) -> TaskGroup | TextGroup:
    """What a case is made of; no prompt is read yet."""
    if case.task.startswith("text:"):
        return TextGroup(subject, case, grid.text_tokens)
    return TaskGroup(subject, case)


def _group(subject: Subject, case: Case, grid: Grid, store: Store, progress: Progress) -> list[dict[str, Any]]:
    """A case under all settings. The prompts are read when the first cell is missing."""
    group: TaskGroup | TextGroup | None = None
    found: list[dict[str, Any]] = []
    here = environment(grid.device)
    about = {"environment": here, "weights": subject.fingerprint}
    for setting in grid.settings(subject, case.length):
        key = cell_name(subject, case, setting)

        def measure(setting: Setting = setting) -> dict[str, Any]:
            nonlocal group
            stage = f"{subject.name} {case.label} {setting.label}"
            progress(stage, 0, None)
            if group is None:
                group = group_of(subject, case, grid)
            return group.run(setting, lambda done, total: progress(stage, done, total))

        cell = store.cell(key, measure, about)
        if setting.mode == "prr" and found and found[-1]["mode"] == "serial" and _apart(found[-1], cell):
            # A run that went on elsewhere, or with other threads, where a float32 sum has other bits: no bug of PRR's
            if cell.get("environment") != here:
                cell = store.cell(key, measure, about, again=True)
            if found[-1].get("environment") != here:
                twin = setting.serial
                again = store.cell(cell_name(subject, case, twin), partial(measure, twin), about, again=True)
                found[-1] = {**found[-1], **again}
        found.append({"model": subject.name, **case._asdict(), **setting._asdict(), "label": setting.label, **cell})
    return found


def _apart(serial: dict[str, Any], prr: dict[str, Any]) -> bool:
    """Whether the two were measured in different environments."""
    return bool(serial.get("environment") != prr.get("environment"))


def cell_name(subject: Subject, case: Case, setting: Setting) -> str:
    key = f"{subject.name}-{case.label}-{setting.label}"
    return "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in key)


def differing(cells: Sequence[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """(how many PRR cells have a serial twin, those of them whose logits differ from it in any bit)."""
    twins = {_key(cell): cell for cell in cells if cell["mode"] == "serial"}
    pairs = [(cell, twins[_key(cell)]) for cell in cells if cell["mode"] == "prr" and _key(cell) in twins]
    return len(pairs), [cell for cell, twin in pairs if _answers(cell) != _answers(twin)]


def _answers(cell: dict[str, Any]) -> tuple[Any, Any]:
    return cell["digest"], cell.get("answers")


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    names = ("part", "model", "task", "length", "depth", "selector", "budget", "block_size")
    return tuple(cell.get(name) for name in names)


def environment(device: str) -> dict[str, Any]:
    return {
        "machine": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
