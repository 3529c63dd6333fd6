"""The benchmark of layers with an indexer: what it reports, and that it stops where an output isn't stock's."""

import json

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_sparse_prr import bench_captured
from hf_sparse_prr import bench_indexed as module
from hf_sparse_prr.bench_exact import ExactnessError
from hf_sparse_prr.bench_indexed import bench_indexed
from hf_sparse_prr.bench_time import Taken
from hf_sparse_prr.commands import app

pytestmark = pytest.mark.compat
SMALL = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=20, index_topk=40, index_n_heads=16, index_head_dim=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make = AutoConfig.for_model
    monkeypatch.setattr(module.AutoConfig, "for_model", lambda kind, **sizes: make(kind, **{**sizes, **SMALL}))


@pytest.mark.parametrize("shape", module.SHAPES)
def test_it_reports_what_it_measured(shape):
    found = bench_indexed(shape, [100, 120], rounds=1, steps=2, prefill=[90, 60], stock_prefill=60)
    assert found["bench"] == "layer" and found["kernels"]["source"] == "bundled"
    for each, tokens in zip(found["contexts"], (100, 120), strict=True):
        assert each["tokens"] == tokens and each["captured"] is None
        assert each["spread"] == {"stock": None, "serial": None, "prr": None}  # of two steps
        assert set(each["ms"]) == {"stock", "serial", "prr"} and each["ratio_to_stock"]["stock"] == 1
        assert each["error"] < 1e-5 and 0 < each["hit_rate"] <= 1
        # 40 of the tokens, and all index keys: 32 + 8 and 16 channels of 4 bytes
        assert each["kv_bytes_per_step"]["stock"] == tokens * 56 * 4
        serial = sum(40 * 40 * 4 + (tokens + 1 + i) * 16 * 4 for i in range(5)) / 5
        assert each["kv_bytes_per_step"]["serial"] == serial
    long, short = found["prefill"]
    assert set(long["ms"]) == {"sparse"} and long["error"] is None
    assert set(short["ms"]) == {"stock", "sparse"} and short["error"] < 1e-5
    assert short["peak_bytes"] == {"stock": None, "sparse": None}
    json.dumps(found)


def without_cuda(monkeypatch):
    """What would be captured runs instead."""

    class Run:
        def __init__(self, call, layers, device, steps):
            self.results = [call(step % layers) for step in range(steps)]

        def timed(self, replays, before):
            for _ in range(replays):
                before()
            return Taken(2.0, 0.1)

    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    monkeypatch.setattr(bench_captured, "captured", lambda run, output: (lambda: output.copy_(run()), 0))
    monkeypatch.setattr(bench_captured, "Captured", Run)


@pytest.mark.parametrize("shape", module.SHAPES)
def test_captured_steps_have_the_bits_of_eager_ones(shape, monkeypatch):
    without_cuda(monkeypatch)
    found = bench_indexed(shape, [100], rounds=1, steps=6)
    (each,) = found["contexts"]
    assert set(each["captured"]) == {"serial", "prr"}
    for name, row in each["captured"].items():
        assert (row["us"], row["spread"], row["floor_us"], row["floor_share"]) == (2.0, 0.1, None, None)
        assert row["bytes"] == each["kv_bytes_per_step"][name] + each["weight_bytes"]


def test_a_captured_step_of_other_bits_stops_it(monkeypatch):
    without_cuda(monkeypatch)
    monkeypatch.setattr(bench_captured, "captured", lambda run, output: (lambda: output.copy_(run() + 1e-3), 0))
    with pytest.raises(ExactnessError, match="serial, captured: expected the bits of eager steps, got a difference"):
        bench_indexed("glm-5", [100], rounds=1, steps=3)


def test_the_floor_is_what_reading_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = {"kv_bytes_per_step": {"prr": 23e6}, "weight_bytes": 400e6}
    row = bench_captured.shares(Taken(150.0, None), found, "prr", torch.device("cuda"))
    assert row["bytes"] == 423e6 and row["floor_us"] == pytest.approx(100.0)
    assert row["floor_share"] == pytest.approx(2 / 3)
    assert row["beyond_weights_us"] == pytest.approx(150 - 400 / 4.23)


def test_an_output_that_is_not_stocks_stops_it(monkeypatch):
    monkeypatch.setitem(module.TOLERANCE, torch.float32, -1.0)
    with pytest.raises(ExactnessError, match="by modules: expected stock's output within -1"):
        bench_indexed("glm-5", [100], rounds=1, steps=1)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape: expected one of deepseek-v3.2, glm-5, got 'r1'"):
        bench_indexed("r1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "glm-5", "--context", "40"], "expected more than the 40 that a query selects, got 40"),
        (["--shape", "glm-5", "--context", "100", "--selector", "quest"], "they are the model's"),
        (["--shape", "glm-5", "--budget", "10"], "expected no --selector, --budget, --heads"),
        (["--shape", "glm-5", "--prefill", "x"], "--prefill: expected tokens like 16384, 16K or 1M, got 'x'"),
        (["--shape", "glm5"], "--shape: expected one of"),
        (["--prefill", "1K"], "--prefill: expected a shape with an indexer, got 'smollm2'"),
        (["--context", "8K,16K"], "--context: expected one with smollm2, got 2"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    refused = CliRunner().invoke(app, ["bench", "layer", *arguments])
    assert refused.exit_code == 2 and message in " ".join(refused.stderr.split())
    if "glm5" in arguments:
        assert "deepseek-v3.2, glm-5" in " ".join(refused.stderr.split())


def test_the_command_prints_tables_and_json(monkeypatch):
    without_cuda(monkeypatch)
    arguments = ["--shape", "glm-5", "--context", "100,110", "--rounds", "1", "--prefill", "60", "--prefill", "70"]
    shown = CliRunner().invoke(app, ["bench", "layer", *arguments, "--stock-prefill", "64"])
    assert shown.exit_code == 0, shown.output
    assert "glm-5: 4 heads, 40 tokens selected" in shown.output
    assert "110 tokens: steps in a CUDA graph" in shown.output and "a prompt of 70 tokens: sparse" in shown.output
    assert "times as fast" in shown.output and "captured steps have the bits of eager ones" in shown.output
    found = json.loads(shown.output.strip().splitlines()[-1])
    assert found["shape"]["index_topk"] == 40
    assert found["command"].startswith(
        "hf-sparse-prr bench layer --shape glm-5 --context 100,110 --prefill 60,70 --stock-prefill 64 --selector auto"
    )
    assert found["command"] in shown.output.splitlines() and "budget" not in found["command"]
