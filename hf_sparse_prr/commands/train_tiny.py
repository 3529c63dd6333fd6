"""`hf-sparse-prr train-tiny`: make the tiny models that the evidence rests on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.commands.arguments import check_device, words_of, writable
from hf_sparse_prr.commands.terminal import EXIT_USAGE, Bar, CommandError, one_line_errors
from hf_sparse_prr.evidence.making import make
from hf_sparse_prr.evidence.tasks import TASKS
from hf_sparse_prr.evidence.tiny import FAMILIES
from hf_sparse_prr.evidence.training import Plan, Progress


def train_tiny(
    output: Annotated[Path, typer.Option(help="A folder; each family gets one in it.")] = Path("tiny"),
    family: Annotated[list[str] | None, typer.Option(help=f"{', '.join(FAMILIES)}; all where none is given.")] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of training, at most, a family.")] = 6.0,
    seed: Annotated[int, typer.Option(help="Of the data and the first weights.")] = 0,
    episodes: Annotated[
        int, typer.Option(min=1, help="Measured of each task and length, an eighth at 16K. On a CPU take few.")
    ] = 128,
    workers: Annotated[int, typer.Option(min=0, help="Processes that draw the data.")] = 3,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cuda",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the JSON: what each training.json holds.")
    ] = False,
) -> None:
    """Train a tiny byte-level model of each family to retrieve over up to 16K, and measure it.

    Each folder holds model.safetensors (3 MB), config.json, a card and the log of its training.

    Exit codes: 0 done, 2 wrong argument, 130 stopped.
    """
    out, notes = Console(), Console(stderr=True)
    with one_line_errors(notes):
        check_device(device)
        names = words_of("--family", family) or list(FAMILIES)
        for name in names:
            if name not in FAMILIES:
                raise CommandError(f"--family: expected {', '.join(FAMILIES)}, got {name!r}", EXIT_USAGE)
            writable(output / name / "config.json")  # before minutes of training
        plan = replace(Plan(), seed=seed, workers=workers)
        made = []
        for name in names:
            with Bar(notes) as bar:

                def tell(progress: Progress, bar: Bar = bar, name: str = name) -> None:
                    bar(f"{name}: {progress.phase}, loss {progress.loss:.3f}", progress.steps, None)

                def measuring(stage: str, done: int, total: int | None, bar: Bar = bar, name: str = name) -> None:
                    bar(f"{name}: {stage}", done, total)

                place = output / name
                found = make(
                    name, place, minutes, torch.device(device), plan, tell, episodes=episodes, measuring=measuring
                )
            made.append(found)
            if as_json:
                continue
            table = Table("task", *found["accuracy"], title=f"{name}: exact answers by length")
            for task in TASKS:
                table.add_row(task, *(f"{shares[task]:.1%}" for shares in found["accuracy"].values()))
            out.print(table)
            out.print(f"written to {output / name}", soft_wrap=True, highlight=False, markup=False)
        if as_json:
            print(json.dumps(made))
