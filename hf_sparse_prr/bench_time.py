"""How long a call takes, a layer: on a CPU by its clock, all calls in turns; on a GPU from a CUDA graph of its own.

A call is given the index of a layer. Neighbouring calls take another layer, so that none finds its K/V in a cache.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

Call = Callable[[int], Any]
_TURN = 8  # calls of a turn, at the least
_STEPS = 32  # calls in a graph, at the least: its own start takes microseconds
_WARMUP = 3  # first replays of a graph, not timed
# Clock cycles, 2 ms at 2 GHz, that a GPU idles before a graph: by then the host has launched all of it. `_sleep` and no
# filling of a buffer: it moves nothing, and what is warm in a cache stays there
_HEAD_START = 4_000_000


class Taken(NamedTuple):
    """us: microseconds, a median.  spread: as `spread_of` what it is the median of, None where those are few."""

    us: float
    spread: float | None = None


def spread_of(times: Sequence[float]) -> float | None:
    """The interquartile range as a share of the median; None of fewer than four."""
    if len(times) < 4:
        return None
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / median


class Timer:
    """Milliseconds that a call takes, and its result: by events on a GPU, whose queue is empty when it starts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            result = call(*arguments)
            return 1e3 * (time.perf_counter() - begin), result
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            result = call(*arguments)
            last.record()
        last.synchronize()
        return first.elapsed_time(last), result


def busy_ms(call: Callable[[], Any], device: torch.device) -> float | None:
    """Milliseconds of a call in which a GPU works, on however many streams: the union of its kernels and copies, by
    torch's profiler. None on a CPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize(device)
    on_gpu = torch.autograd.DeviceType.CUDA
    ran = [each for each in seen.events() if each.device_type == on_gpu and not each.is_user_annotation]
    busy, until = 0.0, float("-inf")
    for begin, end in sorted((each.time_range.start, each.time_range.end) for each in ran):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1e-3 * busy


def in_turns(
    calls: dict[str, Call], layers: int, device: torch.device, rounds: int, progress: Callable[[int, int], None]
) -> dict[str, Taken]:
    """Of each call the median over `rounds` turns of the median of a turn, and the spread of all calls. One more turn
    warms up."""
    timed = Timer(device)
    turns: dict[str, list[list[float]]] = defaultdict(list)
    for done in range(rounds + 1):
        progress(done, rounds + 1)
        for name, call in calls.items():
            taken = [timed(call, step % layers)[0] for step in range(max(layers, _TURN) if done else layers)]
            if done:
                turns[name].append(taken)
    return {
        name: Taken(1e3 * statistics.median(map(statistics.median, each)), spread_of(list(chain(*each))))
        for name, each in turns.items()
    }


class Captured:
    """A call of every layer, again and again, in one CUDA graph.

    results: of the calls, in order; a replay writes them anew.  layers: what the results' order repeats after.
    steps: calls, at the least.
    """

    def __init__(self, call: Call, layers: int, device: torch.device, steps: int = _STEPS) -> None:
        self.layers, self._device = layers, device
        self._steps = layers * -(-steps // layers)
        with torch.cuda.device(device):
            main, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):  # what a call compiles and allocates once is no part of the graph
                for _ in range(2):
                    for layer in range(layers):
                        call(layer)
            main.wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.results = [call(step % layers) for step in range(self._steps)]

    def replay(self) -> None:
        """Run the graph, and wait for it."""
        self._graph.replay()
        torch.cuda.synchronize(self._device)

    def timed(self, replays: int, before: Callable[[], Any] = lambda: None) -> Taken:
        """A call's share: the median over `replays` replays, each timed by events around it. `before` each of them
        something else may be queued.

        Behind both a GPU idles before the first event. Launching a graph of hundreds of nodes takes the host longer
        than it takes the GPU to get to it: from an event at once, the wait for the launch would count as the calls' (20
        us of each step, of 12 steps a graph).
        """
        taken = []
        with torch.cuda.device(self._device):
            for _ in range(_WARMUP):
                self._graph.replay()
            for _ in range(replays):
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before()
                torch.cuda._sleep(_HEAD_START)
                first.record()
                self._graph.replay()
                last.record()
                last.synchronize()
                taken.append(1e3 * first.elapsed_time(last) / self._steps)
        return Taken(statistics.median(taken), spread_of(taken))
