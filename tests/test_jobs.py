"""An evaluation by several processes: every case once, the same cells, and nothing lost when it is stopped."""

import threading
from dataclasses import replace
from multiprocessing import Value

import pytest

from hf_sparse_prr.evidence.evaluate import Grid
from hf_sparse_prr.evidence.jobs import Turns, run_jobs
from hf_sparse_prr.evidence.parts import evaluate_parts, files_of

SMALL = Grid(models=("tiny:llama",), tasks=("needle_single", "needle_multi_key", "recall"), lengths=(256,), episodes=2,
             budgets=("1/2",), block_sizes=(16,))  # fmt: skip
PARTS = {"few": SMALL, "all": replace(SMALL, dense_layers=0)}


def test_each_case_is_measured_by_one():
    counter, cases, taken = Value("i", 0), 200, [[], [], []]
    go = threading.Barrier(3)

    def work(mine):
        turns = Turns(counter)
        go.wait()
        mine += [case for case in range(cases) if turns()]

    workers = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted([*taken[0], *taken[1], *taken[2]]) == list(range(cases))


def test_one_process_takes_every_turn():
    turns = Turns(Value("i", 0))
    assert all(turns() for _ in range(5))


def test_a_stopped_run_goes_on_and_finds_what_one_process_does(tmp_path):
    class Stops:
        """As Ctrl-C does, once the first cell is there."""

        def __call__(self, stage, done, total):
            assert (stage, total) == ("cells", 18)
            if done:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(PARTS, tmp_path / "two", 2, Stops())
    wanted = files_of(PARTS, tmp_path / "two")
    assert any(path.is_file() for path in wanted)
    run_jobs(PARTS, tmp_path / "two", 2)
    assert all(path.is_file() for path in wanted)
    assert {path.name for part in PARTS for path in (tmp_path / "two" / part / "cells").glob("*.json")} == {
        path.name for path in wanted
    }
    assert evaluate_parts(PARTS, tmp_path / "two")["cells"] == evaluate_parts(PARTS, tmp_path / "one")["cells"]


def test_what_cannot_be_had_is_refused_before_a_process_starts(tmp_path):
    with pytest.raises(ValueError, match="length: expected at most 32768 for tiny:llama, got 65536"):
        run_jobs({"": replace(SMALL, lengths=(65536,))}, tmp_path, 2)
