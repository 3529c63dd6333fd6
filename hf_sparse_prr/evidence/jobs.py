"""An evaluation by several processes, which share one GPU or the cores.

A token of a tiny model costs the host milliseconds and the GPU a fraction of one, so several decode at a time. Each
process goes through all cases in the same order and measures those whose number it drew; cells are files, so nothing
else need pass between them, and one that is stopped loses the cell at work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_sparse_prr.demo.progress import Progress, silent
from hf_sparse_prr.evidence.evaluate import Grid
from hf_sparse_prr.evidence.parts import evaluate_parts, files_of

_LOOK = 0.5  # seconds between two looks at the folder


class Turns:
    """Whether the next case is this process's. counter: a `multiprocessing.Value` of int that all of them share, the
    number of the next case that nobody drew."""

    def __init__(self, counter: Any) -> None:
        self._counter, self._next, self._drawn = counter, 0, -1

    def __call__(self) -> bool:
        if self._drawn < self._next:
            with self._counter.get_lock():
                self._drawn = self._counter.value
                self._counter.value += 1
        self._next += 1
        return self._drawn == self._next - 1


def _work(index: int, parts: dict[str, Grid], folder: Path, counter: Any) -> None:
    torch.set_num_threads(1)
    evaluate_parts(parts, folder, mine=Turns(counter))


def run_jobs(parts: dict[str, Grid], folder: Path, jobs: int, progress: Progress = silent) -> None:
    """Measure what isn't in `folder` yet, by `jobs` processes, each with models of its own.

    They end with this one: when it is interrupted, and when one of them fails.

    Raises:
        ValueError: what can't be had.  torch.multiprocessing.ProcessRaisedException: a process failed.
        torch.multiprocessing.ProcessExitedException: one was killed.
    """
    from torch.multiprocessing import get_context, start_processes

    wanted = files_of(parts, folder, progress)
    counter = get_context("spawn").Value("i", 0)
    running = start_processes(_work, (parts, folder, counter), jobs, join=False, start_method="spawn")
    try:
        while not running.join(timeout=_LOOK):
            progress("cells", sum(path.is_file() for path in wanted), len(wanted))
    finally:
        for process in running.processes:
            process.terminate()
        for process in running.processes:
            process.join()
