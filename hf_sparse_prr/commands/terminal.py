"""What every subcommand shares: exit codes, errors of one line, and a progress bar on stderr."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

EXIT_DIFFERENT = 1  # the runs that must agree do not
EXIT_USAGE = 2  # an argument, a setting or an input file is wrong
EXIT_MODEL = 3  # the model cannot be loaded or is not supported
EXIT_FETCH = 4  # the demo's model could not be fetched
EXIT_STOPPED = 130  # Ctrl-C, as shells count it


class Commands(typer.Typer):
    """Commands whose help fills the terminal: a docstring's lines end where the source's do."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        take = super().command

        def add(function: Any) -> Any:
            paragraphs = inspect.cleandoc(function.__doc__).split("\n\n")
            return take(name, help="\n\n".join(" ".join(each.split()) for each in paragraphs), **options)(function)

        return add


class CommandError(Exception):
    """Ends a command with one line and an exit code."""

    def __init__(self, message: object, code: int) -> None:
        super().__init__(str(message))
        self.code = code


@contextmanager
def one_line_errors(console: Console) -> Iterator[None]:
    """Turn `CommandError` and Ctrl-C into a line on `console` and an exit code; our own bugs keep their traceback."""
    try:
        yield
    except CommandError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(error.code) from error
    except KeyboardInterrupt as error:
        console.print("stopped; nothing half-written is left behind")
        raise typer.Exit(EXIT_STOPPED) from error


class Bar:
    """A `hf_sparse_prr.demo.progress.Progress` on a terminal: one bar, for the stage at work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._task: tuple[str, TaskID] | None = None
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[steps]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        steps = "" if total is None else f"{done}/{total}"
        if self._task is None or self._task[0] != stage:
            if self._task is not None:
                self._bars.remove_task(self._task[1])
            self._task = stage, self._bars.add_task(stage, total=total, steps=steps)
            if not self._console.is_terminal:  # a log gets one line a stage in place of the bar
                self._console.print(f"{stage} ...")
        self._bars.update(self._task[1], completed=done, total=total, steps=steps)
