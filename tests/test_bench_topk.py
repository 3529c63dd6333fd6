"""The top-k's benchmark: what it reports, and that it times nothing wrong."""

import json
from collections.abc import Callable
from io import StringIO
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from hf_sparse_prr import bench_topk as module
from hf_sparse_prr import bench_topk_time as times
from hf_sparse_prr import kernel_loader
from hf_sparse_prr.bench_time import Taken
from hf_sparse_prr.bench_topk import bench_topk, default_grid
from hf_sparse_prr.bench_topk_rows import STRATEGIES, Rows, strategies_of, takes_threshold
from hf_sparse_prr.bench_topk_time import Cell, Clock, Task, sets_of, wrong_rows
from hf_sparse_prr.commands import app, terminal, topk_tables

pytestmark = pytest.mark.compat
CPU = torch.device("cpu")
TINY: dict[str, Any] = dict(n=[96], k=[8], rows=[2], rounds=1)
HINTS = ["none", "random", "previous 0", "previous 0.3", "previous 0.6", "previous 0.95", "oracle"]


def kernels_that(threshold: bool, wrong: Callable[[torch.Tensor], torch.Tensor] = lambda found: found) -> ModuleType:
    """The reference kernels, with or without thresholds, whose top-k is changed by `wrong`."""
    real: Any = kernel_loader.resolve("reference").module
    made = ModuleType("made")
    for name in kernel_loader.OPS:
        setattr(made, name, getattr(real, name))

    def gvr_topk(scores, k, *, hint=None, lengths=None, return_stats=False):
        found, stats = real.gvr_topk(scores, k, hint=hint, lengths=lengths, return_stats=True)
        return (wrong(found), stats) if return_stats else wrong(found)

    def with_threshold(scores, k, *, hint=None, lengths=None, return_stats=False, threshold=None):
        assert threshold is None or (threshold.shape == scores.shape[:1] and threshold.dtype == torch.float32)
        return gvr_topk(scores, k, hint=hint, lengths=lengths, return_stats=return_stats)

    made.gvr_topk = with_threshold if threshold else gvr_topk  # type: ignore[attr-defined]
    if threshold:
        made.topk_threshold = lambda scores, k, *, lengths=None: (
            scores.float()
            .sort(  # type: ignore[attr-defined]
                dim=1, descending=True
            )
            .values[:, k]
        )
    return made


def test_thresholds_are_those_of_the_row_of_its_previous_step_and_of_another_one() -> None:
    pool, kernels = Rows("normal", 6, 300, 50, torch.float32, CPU, False), kernels_that(threshold=True)
    found = {name: pool.guesses(name, 20, kernels)["threshold"] for name in ("threshold", "predicted", "stale")}
    exact = pool.scores.sort(dim=1, descending=True).values[:, 20]
    assert torch.equal(found["threshold"], exact)
    assert 0 < (found["predicted"] - exact).abs().mean() < 0.5 < 5 < (found["stale"] - exact).mean()


def test_strategies_are_those_that_the_kernels_can() -> None:
    old, new = kernels_that(threshold=False), kernels_that(threshold=True)
    assert (takes_threshold(old), takes_threshold(new)) == (False, True)
    assert strategies_of(old, None, module.OVERLAPS) == HINTS
    assert strategies_of(new, None, (0.5,)) == ["none", "random", "previous 0.5", *STRATEGIES[3:]]
    assert not set(strategies_of(old, None, (0.5,))) & {"predicted", "threshold", "stale"}
    assert strategies_of(old, ("oracle", "none"), ()) == ["oracle", "none"]
    with pytest.raises(ValueError, match="strategies: expected kernels with topk_threshold for 'stale', got some"):
        strategies_of(old, ("none", "stale"), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reports_every_cell(dtype: torch.dtype) -> None:
    steps: list[tuple[str, int, int | None]] = []
    grid = dict(n=[96, 200], k=[8, 64], rows=[1, 3], kernels=kernels_that(threshold=True), rounds=1)
    found = bench_topk(**grid, dtype=dtype, progress=lambda *at: steps.append(at))
    found = json.loads(json.dumps(found))
    assert found["bench"] == "topk" and found["torch"] == torch.__version__
    assert found["dtype"] == str(dtype).removeprefix("torch.") and found["kernels"]["source"] == "module made"
    assert (found["timed_by"], found["bandwidth"], found["l2_bytes"]) == ("clock", None, None)
    assert (found["wrong"], found["left_out"]) == (0, [])
    shapes = [(n, k, rows) for n in (96, 200) for k in (8, 64) for rows in (1, 3)]
    assert [(cell["n"], cell["k"], cell["rows"]) for cell in found["cells"]] == shapes
    for cell in found["cells"]:
        assert (cell["cache"], cell["sets"], cell["floor_us"]) == ("warm", 4, None)
        assert cell["bytes"] == cell["rows"] * (dtype.itemsize * cell["n"] + 4 * cell["k"])
        assert (
            list(cell["strategies"])
            == found["strategies"]
            == [*HINTS[:-1], "predicted", "oracle", "threshold", "stale"]
        )
        for row in cell["strategies"].values():
            assert row["wrong"] == 0 < row["us"] and row["floor_share"] is None and row["spread"] >= 0
            assert row["to_topk"] == pytest.approx(row["us"] / cell["peers"]["torch.topk"])
            assert row["to_sort"] == pytest.approx(row["us"] / cell["peers"]["torch.sort"])
            assert row["gb_per_s"] == pytest.approx(cell["bytes"] / row["us"] / 1e3)
            assert (row["passes"], row["candidates"], row["fallback"]) == (1, cell["n"], 0)  # few enough to sort
    assert steps[0] == ("96 scores a row", 0, 8) and steps[-1] == ("200 scores a row", 7, 8)


def test_rows_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="expected rows of which 8 copies fit the memory, got 1 x 1099511627776"):
        bench_topk(n=[2**40], k=[1], rows=[1])


def test_statistics_are_those_of_the_search() -> None:
    (cell,) = bench_topk(n=[6000], k=[8], rows=[1], rounds=1, overlaps=[])["cells"]
    none, random = cell["strategies"]["none"], cell["strategies"]["random"]
    assert none["passes"] > 1 and none["fallback"] == 0 and 8 <= none["candidates"] <= 5120
    assert random["candidates"] != none["candidates"]


@pytest.mark.parametrize("scores", ["normal", "relu", "bits"])
def test_ragged_rows_are_exact_and_count_what_is_in_them(scores: str) -> None:
    (cell,) = bench_topk(**TINY, ragged=True, scores=scores)["cells"]
    lengths = Rows(scores, 8, 96, 8, torch.float32, CPU, True).lengths
    assert lengths is not None and lengths.min() >= 1 and lengths.max() <= 96 and len(lengths.unique()) > 3
    assert cell["bytes"] == pytest.approx(float(lengths.sum()) / 4 * 4 + 4 * 8 * 2)
    assert all(row["wrong"] == 0 for row in cell["strategies"].values())


def test_a_row_that_is_wrong_is_counted_and_its_call_not_timed() -> None:
    def other(found: torch.Tensor) -> torch.Tensor:
        found = found.clone()
        found[0, 0] = found[0, 0] + 1
        return found

    kernels = kernels_that(False, other)
    found = bench_topk(**TINY, kernels=kernels, strategies=["none", "oracle"])
    (cell,) = found["cells"]
    assert found["wrong"] == 8 and set(cell["peers"]) == {"torch.topk", "torch.sort"}
    for row in cell["strategies"].values():
        assert row["wrong"] == 4  # the first of each of four sets
        assert row["us"] is row["to_topk"] is row["to_sort"] is row["gb_per_s"] is row["floor_share"] is None


def test_wrong_rows_of_sets_that_come_again() -> None:
    winners = torch.arange(12, dtype=torch.int32).view(6, 2)
    sets = list(winners.split(2))
    assert wrong_rows([*sets, *sets], winners) == 0
    assert wrong_rows([sets[0], sets[2], sets[2]], winners) == 2
    assert wrong_rows([sets[0] + torch.tensor([[0, 1], [0, 0]]), *sets[1:]], winners) == 1
    assert wrong_rows([each[:, :1] for each in sets], winners) == 6


def test_after_the_limit_no_cell_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    found = bench_topk(n=[96, 128], k=[8], rows=[1, 2], rounds=1, limit=2, strategies=["none"])
    assert [cell["rows"] for cell in found["cells"]] == [1, 2]
    assert [(cell["n"], cell["rows"], cell["reason"]) for cell in found["left_out"]] == [
        (128, 1, "over 2 s"),
        (128, 2, "over 2 s"),
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(n=[]), "n: expected numbers >= 1, got none"),
        (dict(rows=[1, 0]), "rows: expected numbers >= 1, got 0"),
        (dict(k=[8, 97]), "k: expected at most n=96, got 97"),
        (dict(scores="cauchy"), "scores: expected one of normal, beta, .*, got 'cauchy'"),
        (dict(cache="hot"), "cache: expected one of warm, cold, both, got 'hot'"),
        (dict(cache="both"), "cache: expected warm on a CPU, got 'both'"),
        (dict(overlaps=[1.5]), r"overlap: expected a number from 0 to 1, got 1\.5"),
        (dict(strategies=["psychic"]), "strategies: expected some of none, random, .*, got 'psychic'"),
        (dict(kernels=ModuleType("empty")), "kernels from empty could not be loaded"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, kernel_loader.KernelError), match=message):
        bench_topk(**{**TINY, **changes})


def test_sets_are_warm_within_the_l2_and_cold_beyond_it() -> None:
    l2 = 50 * 2**20
    assert sets_of(Cell(8192, 64, 1, "warm"), 4, l2) == 4
    assert sets_of(Cell(131072, 64, 64, "warm"), 4, l2) == 1
    assert sets_of(Cell(131072, 64, 128, "warm"), 4, l2) == 0
    assert sets_of(Cell(8192, 64, 1, "warm"), 4, None) == 4
    assert sets_of(Cell(8192, 64, 1, "cold"), 4, l2) == 64  # and something else is read between the replays
    assert sets_of(Cell(131072, 64, 16, "cold"), 4, l2) == 32
    assert sets_of(Cell(524288, 64, 128, "cold"), 4, l2) == 2


class _Replayed:
    """In place of `Captured`, which needs a GPU: results of the calls, changed by `error`."""

    error = 0
    made: list[tuple[int, int]]

    def __init__(self, call: Callable[[int], Any], layers: int, device: torch.device, steps: int) -> None:
        self._call, self._layers = call, layers
        self.made.append((layers, steps))
        self.results = [call(step % layers) for step in range(layers * -(-steps // layers))]

    def replay(self) -> None:
        self.results = [each + self.error for each in self.results]

    def timed(self, replays: int, before: Callable[[], Any]) -> Taken:
        return Taken(float(replays))


@pytest.mark.parametrize("eager, layers, steps, replays", [(0.05, 6, 64, 20), (1.0, 4, 4, 20), (20.0, 2, 2, 4)])
def test_graphs_take_milliseconds_and_are_checked(
    eager: float, layers: int, steps: int, replays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "Captured", _Replayed)
    monkeypatch.setattr(times, "Timer", lambda device: lambda call, *arguments: (eager, call(*arguments)))
    _Replayed.made = []
    clock = Clock(CPU, 20)
    winners = torch.arange(24, dtype=torch.int32).view(12, 2)
    task, peer = Task(lambda index: winners.split(2)[index], winners), Task(lambda index: (winners, winners))
    assert clock.replayed(task, 6, "cold") == (Taken(replays), 0)
    monkeypatch.setattr(_Replayed, "error", 1)
    assert clock.replayed(peer, 6, "warm") == (Taken(replays), 0)  # of a peer nothing is kept or checked
    taken, wrong = clock.replayed(task, 6, "warm")
    assert taken.us == replays and wrong >= 2 * layers
    assert _Replayed.made == [(layers, steps)] * 3


def test_a_wrong_replay_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "__call__", lambda self, tasks, sets, cache: dict.fromkeys(tasks, (Taken(5.0), 3)))
    found = bench_topk(**TINY, strategies=["none"])
    row = found["cells"][0]["strategies"]["none"]
    assert (found["wrong"], row["wrong"], row["us"]) == (3, 3, None)


def test_floor_shares_are_of_the_known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bandwidth_of", lambda device: 4.8e12)
    (cell,) = bench_topk(**TINY, strategies=["none"])["cells"]
    assert cell["floor_us"] == pytest.approx((4 * 96 * 2 + 4 * 8 * 2) / 4.8e6)
    assert cell["strategies"]["none"]["floor_share"] == cell["floor_us"] / cell["strategies"]["none"]["us"]


def test_grids() -> None:
    n, k, rows = default_grid("cuda:1", False)
    assert (n, k, rows) == ((8192, 32768, 131072, 524288), (64, 512, 1024, 2048), (1, 4, 16, 64, 128))
    assert default_grid("cuda", True) == ((131072,), (2048,), (1,))
    assert all(max(k) <= min(n) for ablation in (False, True) for n, k, _ in [default_grid("cpu", ablation)])
    assert module.FULL[0] == 4096 and module.FULL[-1] == 1048576 and len(module.FULL) == 9


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "topk", *(str(argument) for argument in arguments)])


SMALL = ("--n", "96,128", "--k", 8, "--rows", 1, "--rows", 2, "--rounds", 1, "--overlap", "0.5,0.95")


def test_the_command_prints_tables_and_json_as_the_last_line() -> None:
    result = call(*SMALL, "--ragged", "--kernels", "reference", "--strategies", "none,previous")
    assert result.exit_code == 0, result.output
    *lines, last = result.stdout.splitlines()
    document, shown = json.loads(last), "\n".join(lines)
    assert [(cell["n"], cell["rows"]) for cell in document["cells"]] == [(96, 1), (96, 2), (128, 1), (128, 2)]
    for words in (
        "N 96, k 8", "N 128, k 8", "1 row, warm", "2 rows, warm", "wrong", "torch.topk", "torch.sort", "previous 0.95",
        "passes", "fallback", "normal scores, ragged rows", "kernels: reference (reference)", document["command"],
    ):  # fmt: skip
        assert words in shown
    assert "…" not in shown and "left out" not in shown
    again = call(*document["command"].split()[3:], "--json")
    assert again.exit_code == 0 and len(again.stdout.splitlines()) == 1
    repeated = json.loads(again.stdout)
    assert repeated["command"] == document["command"] and repeated["strategies"] == document["strategies"]


def test_an_ablation_compares_guesses_of_one_shape() -> None:
    result = call("--ablation", "--n", "8K", "--k", 64, "--rows", 1, "--rounds", 1, "--overlap", "0.6")
    assert result.exit_code == 0, result.output
    *lines, last = result.stdout.splitlines()
    shown = "\n".join(lines)
    order = [shown.index(f" {name} ") for name in ("none", "random", "previous 0.6", "oracle")]
    assert order == sorted(order) and "/none" in shown and "N 8192, k 64, rows 1" in shown
    assert json.loads(last)["command"].endswith("--ablation")


def test_what_is_left_out_is_said() -> None:
    result = call(*SMALL, "--limit-time", 0)
    assert result.exit_code == 0, result.output
    assert "left out, over 0 s (4, N x k x rows): 96 x 8 x 1 warm, 96 x 8 x 2 warm, 128" in result.stdout
    assert len(json.loads(result.stdout.splitlines()[-1])["left_out"]) == 4
    assert call("--ablation", "--limit-time", 0).exit_code == 0


def test_wide_numbers_fit_a_terminal_of_80_columns() -> None:
    row = {"wrong": 128, "us": 123456.7, "to_topk": 12345.6, "to_sort": 1234.5, "gb_per_s": 4321.0, "floor_share": 0.9}
    row |= {"passes": 34.5, "candidates": 524288.0, "fallback": 1.0}
    row |= {"spread": 0.3}
    blank = dict.fromkeys(("us", "spread", "to_topk", "to_sort", "gb_per_s", "floor_share"))
    cell = {"n": 2**20, "k": 2048, "rows": 128, "peers": {"torch.topk": 12.3, "torch.sort": 0.123456}}
    cell["peers_spread"] = {"torch.topk": 0.1, "torch.sort": None}
    strategies = {"previous 0.95": row, "none": row | blank}
    cells = [{**cell, "cache": each, "strategies": strategies} for each in ("warm", "cold")]
    found = {"device": "GPU", "threads": 1, "torch": "2", "triton": None, "dtype": "float32", "bandwidth": 1.0}
    found |= {"kernels": {"backend": "cuda", "source": "x", "fallback": "none there"}, "scores": "normal", "rounds": 1}
    found |= {"ragged": False, "timed_by": "CUDA graph", "command": "it", "cells": cells}
    found |= {"strategies": ["none", "previous 0.95"]}
    found["left_out"] = [{**cell, "cache": "warm", "reason": "larger than the L2: cold only"}] * 20
    for ablation in (False, True):
        out = StringIO()
        topk_tables.show(Console(file=out, width=80), found, ablation)
        shown = out.getvalue()
        assert "…" not in shown and "none there" in shown and "9 more (in the JSON)" in shown
        assert " 123457 " in shown and " - " in shown
        assert "noisy: in 2 of 8 times" in shown.replace("\n", " ")
        assert ("/none: the time" in shown, "/topk, /sort: the time" in shown, "floor: " in shown) == (
            (True, False, False) if ablation else (False, True, True)
        )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--n", "many"], ("--n", "16K", "'many'")),
        (["--n", "64", "--k", "65"], ("k", "n=64", "65")),
        (["--overlap", "often"], ("--overlap", "0 to 1", "often")),
        (["--overlap", "2"], ("overlap", "0 to 1", "2")),
        (["--scores", "cauchy"], ("scores", "lognormal", "cauchy")),
        (["--cache", "both"], ("cache", "warm on a CPU", "both")),
        (["--strategies", "psychic"], ("strategies", "oracle", "psychic")),
        (["--dtype", "int8"], ("--dtype", "bfloat16", "int8")),
        (["--device", "abacus"], ("--device", "cuda:1", "abacus")),
        (["--kernels", "no/such/folder"], ("no/such/folder", "Remedy")),
        (["--n", ","], ("--n: expected at least one", "','")),
        (["--full", "--n", "96"], ("--full", "no --n")),
        (["--full", "--ablation"], ("--full", "no --ablation")),
        (["--ablation", "--k", "8,16"], ("--ablation", "one --n, --k and --rows", "1, 2 and 1")),
    ],
)
def test_the_command_refuses_what_cannot_be(arguments: list[str], words: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == terminal.EXIT_USAGE and result.stdout == "", result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line


def test_the_command_reports_wrong_rows_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(
        module=kernels_that(False, lambda found: found.flip(1)), source="made", backend="reference", fallback=None
    )
    monkeypatch.setattr(kernel_loader, "resolve", lambda key, strict: loaded)
    result = call(*SMALL, "--strategies", "none")
    assert result.exit_code == terminal.EXIT_DIFFERENT
    assert "error: expected the rows of a stable sort, got 24 others" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["wrong"] == 24


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_times_are_those_of_graphs() -> None:
    found = bench_topk([4096], [64], [1, 4], device="cuda", cache="both", rounds=3)
    assert found["timed_by"] == "CUDA graph" and found["wrong"] == 0
    assert [(cell["rows"], cell["cache"]) for cell in found["cells"]] == [
        (1, "warm"), (1, "cold"), (4, "warm"), (4, "cold"),
    ]  # fmt: skip
    assert all(0 < row["us"] < 1000 for cell in found["cells"] for row in cell["strategies"].values())
