"""Side streams: who shares one. What they order is tested on a GPU, in test_gpu_graph.py."""

import threading
import weakref
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
