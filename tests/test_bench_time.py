"""How long a GPU works during a call: the union of what torch's profiler saw; and what a graph's events are around."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hf_sparse_prr import bench_time
from hf_sparse_prr.bench_time import Captured, busy_ms

pytestmark = pytest.mark.compat
GPU = torch.device("cuda")
CUDA, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


def event(start: float, end: float, device: torch.autograd.DeviceType = CUDA, annotation: bool = False):
    return SimpleNamespace(
        time_range=SimpleNamespace(start=start, end=end), device_type=device, is_user_annotation=annotation
    )


@pytest.fixture
def profiled(monkeypatch):
    """Stands in for the profiler: what it saw is given, and `done` says in which order things happened."""
    seen = SimpleNamespace(events=[], done=[])

    class Profile:
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            seen.done.append("begin")
            return self

        def __exit__(self, *_):
            seen.done.append("end")

        def events(self):
            return seen.events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.done.append("wait"))
    return seen


def call(profiled):
    return busy_ms(lambda: profiled.done.append("call"), GPU)


def test_kernels_beside_each_other_count_once(profiled):
    profiled.events = [
        event(5000, 6000), event(0, 1000), event(500, 1500), event(600, 700),  # two streams, in no order
        event(0, 9000, device=CPU), event(0, 9000, annotation=True),
    ]  # fmt: skip
    assert call(profiled) == pytest.approx(2.5)
    assert profiled.done == ["begin", "call", "wait", "end"]  # what is queued is in the profile


def test_kernels_that_touch_add_up_and_none_take_nothing(profiled):
    assert call(profiled) == 0
    profiled.events = [event(1000, 1250), event(1250, 1500)]
    assert call(profiled) == pytest.approx(0.5)


def test_a_cpu_has_none(profiled):
    assert busy_ms(lambda: profiled.done.append("call"), torch.device("cpu")) is None
    assert profiled.done == []


def test_events_are_around_a_graph_that_was_launched_before_the_gpu_got_to_it(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def synchronize(self):
            done.append("wait")

        def elapsed_time(self, last):
            return 0.6  # ms

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(("idle", cycles)))
    graph = Captured.__new__(Captured)
    graph._graph, graph._device, graph._steps = SimpleNamespace(replay=lambda: done.append("graph")), GPU, 12
    taken = graph.timed(4, lambda: done.append("before"))
    assert taken.us == pytest.approx(50)
    assert taken.spread == 0
    warmup = ["graph"] * bench_time._WARMUP
    assert done == warmup + 4 * ["before", ("idle", bench_time._HEAD_START), "event", "graph", "event", "wait"]
