"""The ablation: what its settings compute, what it says of them, and that it times nothing wrong."""

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_sparse_prr import bench_ablation as module
from hf_sparse_prr.bench_ablation import SETTINGS, bench_ablation
from hf_sparse_prr.bench_exact import ExactnessError
from hf_sparse_prr.commands import app, terminal

pytestmark = pytest.mark.compat
SMALL = dict(shapes=["smollm2"], contexts=[1024], budget=512, rounds=1, steps=3, device="cpu", dtype=torch.float32)
COMMAND = ["bench", "ablation", "--shape", "smollm2", "--context", "1K", "--budget", "512", "--rounds", "1"]


def only(**given):
    (shape,) = bench_ablation(**{**SMALL, **given})["shapes"]
    (each,) = shape["contexts"]
    return each


def test_settings_rates_and_errors():
    each = only(hits=(0.5, 0.75))
    assert list(each["settings"]) == list(SETTINGS)
    assert all(row["us"] > 0 for row in each["settings"].values()) and each["predict_us"] > 0
    assert each["rates"] == {"last": pytest.approx(0.5, abs=0.05), "ema": pytest.approx(0.75, abs=0.05), "whole": 0.0}
    errors = {name: row["error"] for name, row in each["settings"].items()}
    assert errors["S2"] > errors["S3"] > 0.01 and errors["serial"] == errors["S1"] == errors["exact"] == 0


def test_s1_is_the_mean_of_its_two_ways_by_how_often_the_selection_is_the_same(monkeypatch):
    each = only(hits=(1.0, 1.0))
    assert each["rates"]["whole"] == 1.0
    assert {row["error"] for row in each["settings"].values()} == {0.0}  # nothing is attended to in vain
    taken = {module._MISS: 3.0, module._HIT: 1.0, "serial": 2.0, "S2": 5.0, "S3": 5.0, "exact": 5.0, "predict": 1.0}
    monkeypatch.setattr(module, "in_turns", lambda calls, *_: {name: module.Taken(taken[name]) for name in calls})
    assert only(hits=(1.0, 1.0))["settings"]["S1"]["us"] == 1.0
    assert only(hits=(0.5, 0.5))["settings"]["S1"]["us"] == 3.0
    assert only(hits=(0.5, 0.5))["settings"]["exact"]["to_serial"] == 2.5


def test_a_wrong_result_is_not_timed(monkeypatch):
    true = module.Works.merged
    monkeypatch.setattr(module.Works, "merged", lambda *given: true(*given) * (1 + 1e-6))
    with pytest.raises(ExactnessError, match="the output of exact at 1024 tokens: expected the bits of serial"):
        only(hits=(0.5, 0.5))


def test_the_command_prints_a_table_a_shape_and_json():
    result = CliRunner().invoke(app, [*COMMAND, "--selector", "infllm_v2", "--hits", "0.5,0.75"])
    assert result.exit_code == 0, result.output
    *lines, last = result.stdout.splitlines()
    shown, document = "\n".join(lines), json.loads(last)
    for words in ("smollm2", "S1: last blocks", "S2: S1 + repair", "S3: S2 + EMA", "ours: S3 + exact", "in no bit"):
        assert words in shown
    assert "…" not in shown and document["command"] in shown and document["selector"] == "infllm_v2"
    again = CliRunner().invoke(app, [*document["command"].split()[1:], "--json"])
    assert (
        json.loads(again.stdout)["shapes"][0]["contexts"][0]["rates"] == document["shapes"][0]["contexts"][0]["rates"]
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--hits", "0.5"], ("--hits", "two numbers")),
        (["--hits", "0.5,2"], ("hit_rate", "0 to 1", "2")),
        (["--shape", "gpt2"], ("shape", "gpt2")),
        (["--context", "100"], ("context", "100")),
    ],
)
def test_the_command_refuses_what_cannot_be(arguments, words):
    result = CliRunner().invoke(app, [*COMMAND, *arguments])
    assert result.exit_code == terminal.EXIT_USAGE, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line
