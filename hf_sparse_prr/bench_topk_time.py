"""How long top-ks of one shape take over sets of rows, in the L2 or from memory; replays of a graph are checked."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .bench_time import Call, Captured, Taken, Timer, in_turns

ROUNDS, REPLAYS = 5, 20
_WARM = 4  # sets of rows that warm calls take turns with
_COLD = 2**28  # bytes: of rows before one comes again, and of what is read between two replays of a graph
_STEPS = 64  # calls in a graph, at the most: the rows of so many are read from memory, however few bytes they are
_GRAPH_MS, _ALL_MS = 4.0, 150.0  # of a graph and of its replays, about: launches of eager calls are counted in


class Cell(NamedTuple):
    """One shape: `rows` rows of `n` scores, `k` winners each, "warm" or "cold"."""

    n: int
    k: int
    rows: int
    cache: str


class Task(NamedTuple):
    """What is timed in turn over sets of rows. winners: int32 [P, k] that it has to give, None for a peer."""

    call: Call
    winners: torch.Tensor | None = None


def sets_of(cell: Cell, size: int, l2: int | None) -> int:
    """Sets of rows that calls take turns with, of scores of `size` bytes: 0 if not even one fits an L2 of so many."""
    taken = cell.rows * cell.n * size
    if cell.cache == "cold":
        return min(max(-(-_COLD // taken), 2), _STEPS)
    return _WARM if l2 is None else min(_WARM, l2 // taken)


def wrong_rows(results: Sequence[torch.Tensor], winners: torch.Tensor) -> int:
    """Rows of results [R, k], of one set after the other and then again, that aren't the winners [P, k]."""
    wrong = torch.zeros((), dtype=torch.int64, device=winners.device)
    rows = len(results[0])
    sets = len(winners) // rows
    for index, result in enumerate(results):
        expected = winners[index % sets * rows :][:rows]
        if result.shape != expected.shape:
            return len(winners)
        wrong += (result != expected).any(dim=1).sum()
    return int(wrong)


class Clock:
    """Times of calls, and how many rows of a graph's replay are wrong.

    rounds: turns of each call, on a GPU replays of its graph.
    """

    def __init__(self, device: torch.device, rounds: int | None) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.rounds = rounds or (REPLAYS if self.on_gpu else ROUNDS)
        self.l2 = torch.cuda.get_device_properties(device).L2_cache_size if self.on_gpu else None
        self._other = torch.zeros(_COLD // 4, device=device) if self.on_gpu else torch.zeros(0)

    def _between(self, cache: str) -> Callable[[], Any]:
        """What is queued before a replay: a cold one finds other bytes in the L2."""
        return self._other.sum if cache == "cold" else lambda: None

    def give_back(self) -> None:
        """What graphs held, each of which keeps memory of its own."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def __call__(self, tasks: dict[str, Task], sets: int, cache: str) -> dict[str, tuple[Taken, int]]:
        if self.on_gpu:
            return {name: self.replayed(task, sets, cache) for name, task in tasks.items()}
        calls = {name: task.call for name, task in tasks.items()}
        times = in_turns(calls, sets, self.device, self.rounds, lambda *_: None)
        return {name: (taken, 0) for name, taken in times.items()}

    def replayed(self, task: Task, sets: int, cache: str) -> tuple[Taken, int]:
        """Of a CUDA graph of so many calls as take milliseconds. The peers' results are dropped: they are large."""
        timed = Timer(self.device)
        call = task.call if task.winners is not None else lambda index: (task.call(index), None)[1]
        eager = min(timed(call, step % sets)[0] for step in range(3))
        steps = min(max(round(_GRAPH_MS / eager), 2), _STEPS)
        turns = min(sets, steps)
        captured = Captured(call, turns, self.device, steps)
        wrong = 0
        if task.winners is not None:
            captured.replay()
            wrong = wrong_rows(captured.results, task.winners[: turns * len(captured.results[0])])
        replays = min(max(round(_ALL_MS / (eager * max(steps, turns))), 3), self.rounds)
        return captured.timed(replays, self._between(cache)), wrong
