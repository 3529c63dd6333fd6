"""The benchmark of layers with an indexer: what it reports, and that it stops where an output isn't stock's."""

import json

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_sparse_prr import bench_indexed as module
from hf_sparse_prr.bench_exact import ExactnessError
from hf_sparse_prr.bench_indexed import bench_indexed
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
    found = bench_indexed(shape, tokens=100, rounds=1, steps=2, prefill=90)
    assert found["bench"] == "layer" and found["kernels"]["source"] == "bundled"
    assert found["spread"] == {"stock": None, "serial": None, "prr": None}  # of two steps
    assert set(found["ms"]) == {"stock", "serial", "prr"} and found["ratio_to_stock"]["stock"] == 1
    assert found["error"] < 1e-5 and 0 < found["hit_rate"] <= 1
    # 40 of 100 tokens or more, and all index keys: 32 + 8 and 16 channels of 4 bytes
    assert found["kv_bytes_per_step"]["stock"] == 100 * 56 * 4
    serial = sum(40 * 40 * 4 + (101 + i) * 16 * 4 for i in range(5)) / 5
    assert found["kv_bytes_per_step"]["serial"] == serial
    assert set(found["prefill"]["ms"]) == {"stock", "sparse"} and found["prefill"]["error"] < 1e-5
    json.dumps(found)


def test_an_output_that_is_not_stocks_stops_it(monkeypatch):
    monkeypatch.setitem(module.TOLERANCE, torch.float32, -1.0)
    with pytest.raises(ExactnessError, match="serial: expected stock's output within -1"):
        bench_indexed("glm-5", tokens=100, rounds=1, steps=1)


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
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    refused = CliRunner().invoke(app, ["bench", "layer", *arguments])
    assert refused.exit_code == 2 and message in " ".join(refused.stderr.split())
    if "glm5" in arguments:
        assert "deepseek-v3.2, glm-5" in " ".join(refused.stderr.split())


def test_the_command_prints_a_table_and_json():
    shown = CliRunner().invoke(
        app, ["bench", "layer", "--shape", "glm-5", "--context", "100", "--rounds", "1", "--prefill", "60"]
    )
    assert shown.exit_code == 0, shown.output
    assert "glm-5: 4 heads, 100 tokens, 40 selected" in shown.output and "a prompt of 60 tokens" in shown.output
    found = json.loads(shown.output.strip().splitlines()[-1])
    assert found["shape"]["index_topk"] == 40
    assert found["command"].startswith(
        "hf-sparse-prr bench layer --shape glm-5 --context 100 --prefill 60 --selector auto"
    )
    assert found["command"] in shown.output.splitlines() and "budget" not in found["command"]
