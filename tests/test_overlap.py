"""Side streams: who shares one. What they order is tested on a GPU, in test_gpu_graph.py."""

import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hf_sparse_prr import overlap


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(overlap, "_LOCAL", threading.local())


def main(number, index=0):
    return SimpleNamespace(device=torch.device("cuda", index), cuda_stream=number)


def test_a_main_stream_keeps_its_side():
    assert overlap.side_of(main(7)) is overlap.side_of(main(7))


def test_other_streams_and_other_devices_have_others():
    assert len({id(overlap.side_of(each)) for each in (main(7), main(8), main(7, index=1))}) == 3


def test_what_is_late_has_a_stream_of_its_own():
    step, late = (overlap.side_of(main(7), purpose) for purpose in ("step", "late"))
    assert late is not step
    assert late is overlap.side_of(main(7), "late")


def test_other_threads_have_others():
    """A shared one's memory, freed by a thread, could be given to the other while the main stream still reads it."""
    found = [overlap.side_of(main(0))]
    thread = threading.Thread(target=lambda: found.append(overlap.side_of(main(0))))
    thread.start()
    thread.join()
    assert found[0] is not found[1]


def test_on_a_cpu_everything_runs_in_order():
    side = overlap.Overlap(torch.device("cpu"))
    with side.beside():
        pass
    side.join()


def test_what_is_held_is_let_go_when_the_streams_join():
    side, held = overlap.Overlap(torch.device("cpu")), torch.zeros(1)
    seen = weakref.ref(held)
    side.hold(held, None)
    del held
    assert seen() is not None
    side.join()
    assert seen() is None


def test_what_late_work_reads_is_held_until_it_is_joined():
    late, read = overlap.Late(), torch.zeros(1)
    seen, done = weakref.ref(read), []
    with late.behind(torch.device("cpu"), (read, None)):
        done.append("remembered")
    with late.last():
        done.append("copied")
    del read
    assert seen() is not None
    late.join()
    assert seen() is None
    assert done == ["remembered", "copied"]


def test_nothing_late():
    late = overlap.Late()
    with late.last():
        pass
    late.join()


class Recorded:
    """A stream that says what waited for what, and what ran on it."""

    def __init__(self, name, log):
        self.name, self.log, self.device, self.cuda_stream = name, log, torch.device("cuda"), 1

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def test_late_work_waits_for_the_main_stream_and_what_is_last_for_late_work_alone(monkeypatch):
    log = []
    current, side = Recorded("main", log), Recorded("late", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(overlap, "side_of", lambda stream, purpose: side if purpose == "late" else None)

    @contextmanager
    def on(stream):
        log.append(f"on {stream.name}")
        yield
        log.append("back")

    monkeypatch.setattr(torch.cuda, "stream", on)
    late = overlap.Late()
    for _ in range(2):
        with late.behind(torch.device("cuda")):
            log.append("counts")
    with late.last():
        log.append("copies")
    late.join()
    layer = ["late waits for main", "on late", "counts", "back"]
    assert log == [*layer, *layer, "on late", "copies", "back", "main waits for late"]
