"""The benchmark of whole tokens: what it reports, and that it times nothing wrong."""

import dataclasses
import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import made_up
from rich.console import Console
from typer.testing import CliRunner, Result

from hf_sparse_prr import bench_prompt, bench_token, budget
from hf_sparse_prr.bench_exact import ExactnessError
from hf_sparse_prr.bench_prompt import FEW, Prompt
from hf_sparse_prr.commands import app, plots, terminal, token_tables
from hf_sparse_prr.report import GraphReport
from hf_sparse_prr.shapes import shape

pytestmark = pytest.mark.compat
SMALL: dict[str, Any] = dict(contexts=[150], layers=3, budget=96, block_size=16, tokens=4, rounds=1)
COMMAND = "token --context 150 --layers 3 --budget 96 --block-size 16 --tokens 4 --rounds 1".split()
ROW = {
    "ms", "gpu_ms", "min", "spread", "first_ms", "tokens_per_s", "peak_bytes", "hit_rate", "graphs", "weight_bytes",
    "cache_bytes", "floor_share", "ratio_to_dense", "choice",
}  # fmt: skip
NO_GRAPHS = dataclasses.asdict(GraphReport())


class Clock:
    """In place of the clock: 5 ms for a call, 2 ms for each new token, and 0.01 ms for each one it is given."""

    calls: list[tuple[torch.Size, int]]

    def __init__(self, device: torch.device) -> None:
        Clock.calls = []

    def __call__(self, call: Callable[..., Any], cache: Any, ids: torch.Tensor, count: int, *more: Any) -> Any:
        Clock.calls.append((ids.shape, count))
        given = ids.shape[1] - int(cache.get_seq_length())
        return 5 + 2 * count + 0.01 * given, call(cache, ids, count, *more)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_prompt, "Timer", Clock)


def run(**settings: Any) -> dict[str, Any]:
    return json.loads(json.dumps(bench_token.bench_token(**{**SMALL, **settings})))


def test_reports_every_setting() -> None:
    steps: list[tuple[str, int, int | None]] = []
    found = run(contexts=[150, 180], rounds=4, progress=lambda *at: steps.append(at))
    assert found["bench"] == "token" and found["torch"] == torch.__version__
    assert found["shape"] == {"name": "smollm2", "layers": 3, "batch": 1}
    assert (found["selector"], found["budget"], found["block_size"]) == ("quest", 96, 16)
    assert (found["tokens"], found["rounds"], found["prefill"], found["bandwidth"]) == (4, 4, False, None)
    assert found["kernels"]["backend"] == "reference" and found["kernels"]["fallback"] is None
    assert [each["context"] for each in found["contexts"]] == [150, 180]
    for each in found["contexts"]:
        assert each["exact"] == {"tokens": FEW + 4, "same_bits": ["serial", "prr"]}
        assert list(each["settings"]) == ["dense", "serial", "prr"]
        for name, row in each["settings"].items():
            assert set(row) == ROW
            assert row["ms"] == row["min"] == pytest.approx(2) and row["spread"] == pytest.approx(0)
            assert row["first_ms"] == pytest.approx(7.01) and row["tokens_per_s"] == pytest.approx(500)
            assert row["ratio_to_dense"] == pytest.approx(1)
            assert row["peak_bytes"] is row["floor_share"] is row["gpu_ms"] is None  # no GPU
            assert row["graphs"] == (None if name == "dense" else NO_GRAPHS)
        assert each["settings"]["serial"]["hit_rate"] is None and 0 < each["settings"]["prr"]["hit_rate"] <= 1
    assert steps[:6] == [("150 tokens: dense", done, 5) for done in range(5)] + [("150 tokens: serial", 0, 5)]


def test_every_call_continues_the_same_context() -> None:
    run(rounds=2, settings=["prr"])
    assert Clock.calls == [(torch.Size([1, 151]), count) for count in (FEW + 4, *2 * (1, FEW, FEW + 4))]


def test_bytes_are_those_of_weights_and_of_what_is_read() -> None:
    (each,) = run(batch=2)["contexts"]
    rows = each["settings"]
    hidden, intermediate, vectors = 576, 1536, 2 * 3 * 64  # key and value of 3 KV heads
    layer = 2 * hidden * hidden + hidden * vectors + 3 * hidden * intermediate + 2 * hidden
    weights = 4 * (3 * layer + hidden + 49152 * hidden)  # the embedding is the output's
    assert {row["weight_bytes"] for row in rows.values()} == {weights}
    whole = 2 * 4 * vectors * 150  # of a layer
    assert rows["dense"]["cache_bytes"] == 3 * whole
    selected = 2 * 4 * vectors * 96  # of one layer: two are dense
    assert 2 * whole + selected < rows["serial"]["cache_bytes"] < rows["prr"]["cache_bytes"] < 3 * whole
    assert rows["dense"]["tokens_per_s"] == pytest.approx(1000)  # both rows'


@pytest.mark.parametrize("name, tied", [("smollm2", True), ("qwen3-14b", False)])
def test_an_embedding_is_read_where_it_is_the_output_as_well(name: str, tied: bool) -> None:
    config = shape(name).config(
        1, vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4, head_dim=8
    )
    model = bench_token.AutoModelForCausalLM.from_config(config)
    everything = sum(weight.nbytes for weight in model.parameters())
    assert bench_token._weight_bytes(model) == everything - (0 if tied else 4 * 64 * config.hidden_size)


def test_a_floor_is_what_is_read_over_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_token, "bandwidth_of", lambda device: 1e12)
    found = run()
    row = found["contexts"][0]["settings"]["serial"]
    assert row["floor_share"] == pytest.approx((row["weight_bytes"] + row["cache_bytes"]) / 1e12 / 2e-3)
    shown = tables(found)
    assert "of floor" in shown and "peak" not in shown


def tables(found: dict[str, Any]) -> str:
    out = StringIO()
    token_tables.show(Console(file=out, width=120), {"command": "the command", **found})
    return out.getvalue()


def test_graphs_and_peaks_are_shown_where_there_are_any() -> None:
    found = run(settings=["serial"])
    (each,) = found["contexts"]
    row = each["settings"]["serial"]
    assert "CUDA graphs" not in tables(found)
    row.update(peak_bytes=3 * 2**29, graphs={"captured": 2, "replayed": 9, "bytes": 2**20, "reason": None})
    each["settings"]["eager"] = dict(row, graphs={**NO_GRAPHS, "reason": "cuda_graph=False"})
    shown = tables(found)
    assert "serial sparse: CUDA graphs of decode steps: 2 captured, 9 tokens replayed, 1 MiB" in shown
    assert "serial, no graphs: CUDA graphs of decode steps: off, because cuda_graph=False" in shown
    assert "peak GiB" in shown and "1.5" in shown


def test_the_gpus_time_is_of_calls_after_those_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(call: Callable[[], Any], device: torch.device) -> float:
        before = len(Clock.calls)
        call()
        ((_, count),) = Clock.calls[before:]
        return 1 + 0.75 * count

    assert "GPU" not in tables(run(settings=["serial"]))
    monkeypatch.setattr(bench_prompt, "busy_ms", busy)
    found = run(settings=["serial"], rounds=2)
    assert found["contexts"][0]["settings"]["serial"]["gpu_ms"] == pytest.approx(0.75)
    assert [count for _, count in Clock.calls] == [FEW + 4, *2 * (1, FEW, FEW + 4), FEW, FEW + 4]
    assert "TPOT GPU" in " ".join(tables(found).split()) and "0.75" in tables(found)


@pytest.mark.parametrize("selector, dtype", [("quest", torch.bfloat16), ("infllm_v2", torch.float32)])
def test_a_prompt_is_computed_when_asked(selector: str, dtype: torch.dtype) -> None:
    found = run(prefill=True, selector=selector, dtype=dtype, block_size=64, budget=320, contexts=[400], rounds=1)
    (each,) = found["contexts"]
    assert found["prefill"] and each["exact"]["same_bits"] == ["serial", "prr"]
    for row in each["settings"].values():
        assert row["first_ms"] == pytest.approx(7 + 4)  # 400 tokens, and the first new one
    assert Clock.calls[:2] == [(torch.Size([1, 400]), 1)] * 2 and Clock.calls[2] == (torch.Size([1, 401]), FEW + 4)
    assert "TTFT" in tables(found) and "a computed prompt" in tables(found)


@pytest.mark.parametrize("prefill", [False, True])
def test_dense_is_compared_where_the_context_fits_the_budget(prefill: bool) -> None:
    fitting = dict(contexts=[150 - FEW - 4 - 50], budget=112, rounds=1, prefill=prefill)
    (each,) = run(**fitting)["contexts"]
    assert each["exact"]["same_bits"] == ["dense", "serial", "prr"]
    assert len({row["cache_bytes"] for row in each["settings"].values()}) == 1
    assert each["settings"]["prr"]["hit_rate"] is None  # nothing was selected
    (each,) = run(**fitting, dtype=torch.bfloat16)["contexts"]
    assert each["exact"]["same_bits"] == ["serial", "prr"]


def test_one_setting_has_nothing_to_be_compared_with() -> None:
    (each,) = run(settings=["dense"], rounds=1)["contexts"]
    assert each["exact"]["same_bits"] == []
    (each,) = run(settings=["prr"], rounds=1)["contexts"]
    assert each["exact"]["same_bits"] == [] and each["settings"]["prr"]["ratio_to_dense"] is None


@pytest.mark.parametrize(
    "first, ids, message",
    [
        (True, True, f"prr: expected the ids of serial, got others from token {FEW + 4} of row 0 on"),
        (True, False, "the logits of prr: expected the bits of serial, got a difference of 1"),
        (False, True, "prr, called again: expected the ids of its first call, got others from token 1 of row 0 on"),
    ],
)
def test_nothing_wrong_is_timed(first: bool, ids: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Prompt._generate

    def wrong(prompt: Prompt, cache: Any, given: torch.Tensor, count: int, logits: bool = False) -> Any:
        """In a setting's first call, or in the others, PRR gives another last token, or another logit for it."""
        out = real(prompt, cache, given, count, logits)
        handle = getattr(prompt.model, "sparse_prr", None)
        if handle is not None and handle.config.speculate is True and logits == first:
            if ids:
                out.sequences[0, -1] += 1
            else:
                out.logits[-1][0, 7] += 1
        return out

    monkeypatch.setattr(Prompt, "_generate", wrong)
    result = call(*COMMAND)
    assert result.exit_code == terminal.EXIT_DIFFERENT and result.stdout == ""
    assert message in result.stderr
    with pytest.raises(ExactnessError, match=message):
        run()


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(shape="gpt2"), r"shape: expected one of .*smollm2, got 'gpt2'"),
        (dict(contexts=[150, 0]), "context: expected 1 .. 1048576 tokens, got 0"),
        (dict(contexts=[2**20 + 1]), "context: expected 1 .. 1048576 tokens, got 1048577"),
        (dict(layers=0), "layers: expected 1 .. 30, as smollm2 has, got 0"),
        (dict(layers=31), "layers: expected 1 .. 30, as smollm2 has, got 31"),
        (
            dict(settings=["serial", "eager"]),
            "settings: expected some of dense, static, serial, prr, auto, and eager, compiled, preallocated on a GPU, "
            "got 'eager'",
        ),
        (dict(budget=16), "budget: expected"),
        (dict(block_size=17), "block_size: expected"),
    ],
)
def test_refuses_what_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**settings)


def test_eager_is_for_a_gpu_and_settings_keep_their_order() -> None:
    check = bench_token.check_arguments
    assert check("smollm2", [1], None, None, "cuda")[1] == ["dense", "serial", "prr", "eager"]
    assert check("smollm2", [1], ["eager", "dense"], 30, "cuda")[1] == ["dense", "eager"]
    assert bench_token.SETTINGS["eager"] == {"speculate": False, "cuda_graph": False}
    assert check("smollm2", [1], ["auto", "static"], None, "cuda")[1] == ["static", "auto"]
    with pytest.raises(ValueError, match=r"settings: expected some of dense, static, .*, preallocated, got 'paged'"):
        check("smollm2", [1], ["paged"], None, "cuda")


def test_static_caches_and_the_profiles_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "find", lambda key: made_up(key, best=0.3, worst=0.9))
    monkeypatch.setattr(bench_token, "_ON_GPU", ("eager", "compiled"))  # compiled elsewhere it runs as ever
    (each,) = run(settings=["dense", "static", "serial", "auto", "preallocated"], tokens=24)["contexts"]
    rows = each["settings"]
    assert list(rows) == ["dense", "static", "serial", "auto", "preallocated"]
    assert each["exact"]["same_bits"] == ["serial", "auto"]
    assert rows["auto"]["hit_rate"] > 0 and "on, spec_ratio" in rows["auto"]["choice"]
    assert rows["static"]["cache_bytes"] == rows["dense"]["cache_bytes"] and rows["static"]["graphs"] is None
    assert rows["preallocated"]["choice"] is None


def test_growth_is_a_line_where_there_are_three_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(contexts=[150, 200, 300], settings=["dense", "serial"])
    for each, ms in zip(found["contexts"], (2.5, 3.0, 4.4), strict=True):
        each["settings"]["serial"]["ms"] = ms
    base, slope, farthest = token_tables.growth(found)["serial"]
    assert token_tables.growth(found)["dense"] == pytest.approx((2.0, 0.0, 0.0), abs=1e-6)
    assert slope == pytest.approx(0.0128571, rel=1e-4) and 0.01 < farthest < 0.05 and base + 150 * slope < 2.5
    assert "growth of serial sparse: " in tables(found) and "off that line" in tables(found)
    assert token_tables.growth(run()) == {} and "growth" not in tables(run())
    for each, ms in zip(found["contexts"], (1.0, 2.0, 4.0), strict=True):
        each["settings"]["dense"]["gpu_ms"] = ms  # goes before what the host took
    assert token_tables.growth(found)["dense"] == pytest.approx((-2.0, 0.02, 0.0), abs=1e-6)
    pytest.importorskip("matplotlib")
    plots.plot_growth(found, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: drawn.extend(self.axes[0].lines))
    plots.plot_growth({**found, "bandwidth": 1e9}, tmp_path / "growth.png")
    lines = {line.get_label(): line for line in drawn}
    read = [each["settings"]["serial"]["cache_bytes"] for each in found["contexts"]]
    assert read == sorted(set(read))  # metadata, and whole K/V in dense layers
    assert list(lines["serial sparse: its bytes"].get_ydata()) == pytest.approx(
        [2.5 + (b - read[0]) / 1e6 for b in read]
    )


def test_a_time_that_noise_hides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "__call__", lambda self, generate, *args: (5.0, generate(*args)))
    with pytest.raises(ValueError, match="tokens: expected more, whose time shows, got 4 in 0 ms each"):
        run(settings=["dense"])


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def test_the_command_prints_a_table_and_json_as_the_last_line() -> None:
    result = call(*COMMAND, "--context", 160)
    assert result.exit_code == 0, result.output
    *lines, last = result.stdout.splitlines()
    document, shown = json.loads(last), "\n".join(lines)
    assert [each["context"] for each in document["contexts"]] == [150, 160]
    for words in (
        "150 tokens, random K/V: ms a token (TPOT)", "160 tokens", "dense, stock", "serial sparse", "PRR",
        "first token", "to dense", "3 layers of random weights, batch 1; quest, budget 96 in blocks of 16",
        "PRR hit rate",
        f"serial, prr: ids and logits of {FEW + 4} tokens are equal, bit for bit", document["command"],
    ):  # fmt: skip
        assert words in shown
    assert "…" not in shown and "of floor" not in shown and "CUDA graphs" not in shown
    again = call(*document["command"].split()[2:], "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["contexts"] == document["contexts"]


def test_the_command_takes_what_the_device_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def taken(*args: Any) -> None:
        seen.append(args[:-1])
        raise ValueError("expected a machine, got none")

    monkeypatch.setattr("hf_sparse_prr.commands.bench.bench_token", taken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arguments in ([], ["--device", "cuda"], ["--device", "cuda", "--settings", "dense,prr", "--prefill"]):
        assert call("token", *arguments).exit_code == terminal.EXIT_USAGE
    cpu, gpu, chosen = seen
    assert cpu[:8] == ("smollm2", [2**11], "quest", 1024, 64, 1, 8, torch.float32)
    assert gpu[:8] == ("llama-3.1-8b", [2**15, 2**17], "quest", 4096, 64, 1, 32, torch.bfloat16)
    assert gpu[8:] == ("cuda", None, None, False, 5, "auto")
    assert chosen[10:12] == (["dense", "prr"], True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_graphs_are_captured_and_eager_is_equal() -> None:
    found = run(contexts=[1200], layers=4, device="cuda", dtype=torch.bfloat16)
    (each,) = found["contexts"]
    assert each["exact"]["same_bits"] == ["serial", "prr", "eager"]
    rows = each["settings"]
    for name in ("serial", "prr"):
        assert rows[name]["graphs"]["captured"] and rows[name]["graphs"]["replayed"]
    assert rows["eager"]["graphs"]["reason"] == "cuda_graph=False" and not rows["eager"]["graphs"]["captured"]
    assert all(row["peak_bytes"] > row["weight_bytes"] for row in rows.values())
