"""`eval`, `hit-rates` and `train-tiny` on the command line: what they write and print, and what they refuse."""

import io
import json
import multiprocessing
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hf_sparse_prr.commands import app, eval_tables
from hf_sparse_prr.commands import evaluate as command
from hf_sparse_prr.demo.smollm2 import FetchError
from hf_sparse_prr.evidence.tasks import TASKS

EVAL = ["eval", "--model", "tiny:llama", "--length", "512", "--task", "needle_single", "--episodes", "2"]
GRID = [*EVAL, "--budget", "96,1/4", "--block-size", "16", "--dense-layers", "0", "--depth", "0,1"]


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def result(folder):
    return call(*GRID, "--output", folder, "--plots")


def test_eval_writes_every_cell_and_says_whether_prr_is_exact(folder, result):
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "results.json").read_text())
    assert len(found["cells"]) == 2 * (2 + 2 * 2) == len(list((folder / "cells").iterdir()))
    assert {cell["budget"] for cell in found["cells"]} == {0, 64, 96, 128}
    assert "PRR equals serial in all 4 cells: 8 answers, and every logit to the bit" in result.stdout
    assert "tiny:llama, 512 tokens: exact answers" in result.stdout
    rows = {line.strip().rpartition("  ")[0].split("100")[0].strip() for line in result.stdout.splitlines()}
    assert {"dense", "serial quest 96 16", "prr quest 128 16"} <= rows
    assert "forced 16" in result.stdout


def test_eval_draws_accuracy_by_budget_and_depth_by_length(folder, result):
    drawn = {path.name for path in (folder / "plots").iterdir()}
    assert drawn == {
        "tiny_llama-budget.png",
        *(
            f"tiny_llama-needle_single-{label}.png"
            for label in ("dense", "forced-16", "serial-quest-96-16", "serial-quest-1of4-16")
        ),
    }
    assert all((folder / "plots" / name).read_bytes()[:4] == b"\x89PNG" for name in drawn)


def test_eval_as_json_prints_nothing_else(folder, result):
    again = call(*GRID, "--output", folder, "--json")
    assert json.loads(again.stdout)["cells"] == json.loads((folder / "results.json").read_text())["cells"]


def test_a_difference_ends_with_1(folder, result):
    (cell,) = (folder / "cells").glob("*-0-prr-quest-96-16.json")
    held = cell.read_text()
    try:
        cell.write_text(json.dumps({**json.loads(held), "digest": ["0"]}))
        again = call(*GRID, "--output", folder)
    finally:
        cell.write_text(held)
    assert again.exit_code == 1
    assert "PRR DIFFERS from serial in 1 of 4 cells, this is a bug: tiny:llama needle_single 512" in again.stdout


def test_eval_says_where_nothing_was_selected_and_nothing_was_drawn(tmp_path):
    result = call(*EVAL, "--budget", "512", "--block-size", "16", "--no-forced", "--plots", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert "all 1 cells: 2 answers, and every logit to the bit; in 1 of them nothing was selected" in " ".join(
        result.stdout.split()
    )
    assert "forced" not in result.stdout
    assert "nothing drawn: figures need two budgets, or two depths or lengths with --depth" in result.stderr


def test_a_table_of_all_tasks_fits_a_terminal():
    labels = ["dense", "forced-32", "serial-infllm_v2-512-32", "prr-quest-16384-128"]
    cells = [
        {"task": task, "label": label, "accuracy": 1.0, "hit_rate": 0.5, "depth": None}
        for label in labels
        for task in TASKS
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(eval_tables.accuracy_table(cells))
    shown = console.file.getvalue()
    assert "…" not in shown and shown.count("50.0%") == 4
    assert {"infllm", "serial", "forced", "16384"} <= set(shown.split())


def test_eval_shows_the_environments_that_cells_were_measured_in():
    here, there = {"threads": 1}, {"threads": 2}
    cells = [{"environment": here}, {"environment": there}, {}, {"environment": here}]
    assert eval_tables.environments({"environment": there, "cells": cells}) == [here, there]
    assert eval_tables.environments({"environment": there, "cells": []}) == [there]


def test_eval_in_full_shows_each_part(tmp_path, monkeypatch):
    full = command.parts_of_all

    def small(models, device, dtype):
        fewer = dict(tasks=("needle_single",), episodes=2, budgets=("1/4", "1/2"), block_sizes=(16,))
        parts = full(models, device, dtype)
        wanted = {"4K": dict(lengths=(512,)), "depth": dict(lengths=(512, 640), depths=(0.0, 1.0))}
        return {name: replace(parts[name], **fewer, **more) for name, more in wanted.items()}

    monkeypatch.setattr(command, "parts_of_all", small)
    result = call("eval", "--full", "--model", "tiny:llama", "--output", tmp_path, "--plots")
    assert result.exit_code == 0, result.output
    assert "4K: tiny:llama, 512 tokens: exact answers" in result.stdout
    assert "depth: tiny:llama, 640 tokens: exact answers" in result.stdout
    assert "PRR equals serial in all 12 cells: 24 answers" in result.stdout
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found["parts"]) == {"4K", "depth"} and found["parts"]["4K"]["dtype"] == "float32"
    assert {"4K/tiny_llama-budget.png", "depth/tiny_llama-needle_single-dense.png"} <= {
        str(path.relative_to(tmp_path / "plots")) for path in (tmp_path / "plots").rglob("*.png")
    }


def test_jobs_measure_before_the_cells_are_read(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "run_jobs", lambda parts, folder, jobs, bar: seen.append((list(parts), folder, jobs)))
    assert call(*EVAL, "--budget", "1/4", "--jobs", 3, "--output", tmp_path).exit_code == 0
    assert seen == [([""], tmp_path, 3)]


def test_a_killed_process_ends_with_one_line_and_loses_no_cell(tmp_path, monkeypatch):
    def kill(bar, stage, done, total):
        if stage == "cells":
            os.kill(min(process.pid for process in multiprocessing.active_children()), signal.SIGKILL)

    monkeypatch.setattr(command.Bar, "__call__", kill)
    killed = call(*EVAL, "--budget", "1/4", "--jobs", 2, "--output", tmp_path)
    assert killed.exit_code == 2
    assert "signal SIGKILL); what is measured is kept: run it again" in killed.stderr


@pytest.mark.parametrize(
    "error", ["torch.OutOfMemoryError: CUDA out of memory. Tried to ..", "ValueError: something else"]
)
def test_a_process_out_of_memory_ends_with_one_line(tmp_path, monkeypatch, error):
    def fail(*_):
        raise command.ProcessRaisedException(f"Traceback ..\n{error}", 1, 1234)

    monkeypatch.setattr(command, "run_jobs", fail)
    ended = call(*EVAL, "--budget", "1/4", "--jobs", 2, "--output", tmp_path)
    if "OutOfMemory" in error:
        assert ended.exit_code == 2
        assert (
            "got one that was ended (out of memory); what is measured is kept: run it again, with fewer" in ended.stderr
        )
    else:
        assert isinstance(ended.exception, command.ProcessRaisedException)


@pytest.mark.parametrize("option, value", [("--task", "recall"), ("--episodes", "32"), ("--dense-layers", "0")])
def test_full_stands_alone(tmp_path, option, value):
    refused = call("eval", "--full", option, value, "--output", tmp_path)
    assert refused.exit_code == 2
    assert f"{option}: expected nothing beside --full, which chooses it, got a value" in refused.stderr


def test_the_verdict_counts_answers():
    cell = {"model": "m", "task": "t", "length": 1, "depth": None, "selector": "q", "budget": 1, "block_size": 1}
    cells = [{**cell, "mode": mode, "digest": ["a"], "answers": [[1], [2]]} for mode in ("serial", "prr")]
    assert eval_tables.verdict(cells) == "PRR equals serial in all 1 cells: 2 answers, and every logit to the bit"
    assert eval_tables.verdict(cells[:1]) == "PRR is compared with serial nowhere: no cell of both"


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["--task", "chess"], 2, "task: expected one of needle_single"),
        (["--depth", "2"], 2, "--depth: expected numbers from 0 to 1, or any, got 2.0"),
        (["--depth", "deep"], 2, "--depth: expected numbers from 0 to 1"),
        (["--speculate", "maybe"], 2, "--speculate: expected off, on, got 'maybe'"),
        (["--budget", "half"], 2, "budget: expected tokens like 512, or a share of the length like 1/8, got 'half'"),
        (["--budget", "16"], 2, "budget: expected None or an int >= 128"),
        (["--length", "64K"], 2, "length: expected at most 32768 for tiny:llama, got 65536"),
        (["--model", "tiny:gpt2"], 2, "family: expected one of llama"),
        (["--model", "no/such"], 3, "no/such: no such file or folder"),
        (["--device", "tpu"], 2, "--device: expected cpu, cuda"),
        (["--output", "/dev/null/eval"], 2, "--output: expected a file that can be written, got /dev/null/eval"),
    ],
)
def test_eval_refuses_in_one_line(tmp_path, arguments, code, words):
    usual = {"--model": "tiny:llama", "--length": 512, "--episodes": 1, "--output": tmp_path} | {
        arguments[0]: arguments[1]
    }
    refused = call("eval", *(word for option in usual.items() for word in option))
    assert refused.exit_code == code, refused.output
    assert refused.stderr.splitlines()[-1].startswith("error: ") and words in refused.stderr
    assert not [*tmp_path.glob("cells/*")]  # nothing was measured before


def test_a_model_that_cannot_be_fetched_ends_with_4(tmp_path, monkeypatch):
    def fails(*_):
        raise FetchError("no network")

    monkeypatch.setattr(command, "evaluate_parts", fails)
    refused = call(*EVAL, "--output", tmp_path)
    assert refused.exit_code == 4 and "no network" in refused.stderr


def test_hit_rates_writes_its_data(tmp_path):
    output, trace = tmp_path / "h.json", tmp_path / "t.safetensors"
    options = ["--length", 512, "--steps", 32, "--budget", "1/4", "--block-size", 16, "--output", output]
    result = call("hit-rates", *options, "--trace", trace)
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())
    assert found["free_blocks"] == 5 and list(found["layers"]) == ["2", "3"] and trace.is_file()
    assert found["command"].startswith("hf-sparse-prr") and "tiny:llama: hit rates, 512 tokens and 32" in result.stdout
    assert json.loads(call("hit-rates", *options, "--json").stdout)["layers"] == found["layers"]


def test_hit_rates_of_an_indexer_are_of_tokens(tmp_path):
    options = ["--model", "tiny:deepseek_v32", "--length", 640, "--steps", 32, "--output", tmp_path / "h.json"]
    result = call("hit-rates", *options)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "h.json").read_text())
    assert found["selected_tokens"] == 512 and found["selector"] == "dsa" and "free_blocks" not in found
    assert "512 tokens selected a step" in result.stdout and "topic changes at step 16" in result.stdout
    refused = call("hit-rates", *options, "--trace", tmp_path / "t.safetensors")
    assert refused.exit_code == 2 and "--trace: expected none for tiny:deepseek_v32" in refused.stderr


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--selector", "chess", "--selector: expected one of quest, infllm_v2"),
        ("--trace", "/dev/null/x", "--trace: expected a file that can be written, got /dev/null/x"),
    ],
)
def test_hit_rates_refuses_before_a_model_is_read(tmp_path, monkeypatch, option, value, words):
    monkeypatch.setattr("hf_sparse_prr.commands.hit_rates.load_subject", lambda *_: pytest.fail("read a model"))
    refused = call("hit-rates", "--output", tmp_path / "it.json", option, value)
    assert refused.exit_code == 2 and words in refused.stderr.replace("\n", " ")


@pytest.mark.parametrize("option", [("--budget", "1024"), ("--budget", "1/4", "--dense-layers", "4")])
def test_hit_rates_refuses_what_selects_nothing(tmp_path, option):
    options = ["--length", 512, "--steps", 32, "--block-size", 16, "--output", tmp_path / "h.json", *option]
    refused = call("hit-rates", *options)
    assert refused.exit_code == 2
    assert "expected a layer that selects from 544 tokens, got none under" in refused.stderr.replace("\n", " ")


def test_train_tiny_makes_a_model_in_seconds(tmp_path, monkeypatch):
    from hf_sparse_prr.commands import train_tiny
    from hf_sparse_prr.evidence.making import make
    from hf_sparse_prr.evidence.training import Plan

    def small(*arguments, **options):
        overrides = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2)
        return make(*arguments, measured=(512,), overrides=overrides, **options)

    monkeypatch.setattr(train_tiny, "make", small)
    monkeypatch.setattr(train_tiny, "Plan", lambda: Plan(lengths=(48,), tokens=512, steps=2, decay=2))
    options = ["--minutes", 0.02, "--episodes", 1, "--device", "cpu", "--workers", 0, "--output", tmp_path]
    result = call("train-tiny", "--family", "llama", *options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "llama" / "model.safetensors").is_file() and (tmp_path / "llama" / "README.md").is_file()
    assert all(task in result.stdout for task in TASKS) and "llama: measuring 512" in result.stderr
    assert json.loads((tmp_path / "llama" / "training.json").read_text())["episodes"] == 1
    (found,) = json.loads(call("train-tiny", "--family", "llama", *options, "--json").stdout)
    assert found == json.loads((tmp_path / "llama" / "training.json").read_text())


def test_train_tiny_refuses_a_folder_before_it_trains():
    refused = call("train-tiny", "--family", "llama", "--device", "cpu", "--output", "/dev/null/tiny")
    assert refused.exit_code == 2 and "--output: expected a file that can be written" in refused.stderr


def test_train_tiny_refuses_a_family_that_is_not_there(tmp_path):
    refused = call("train-tiny", "--family", "gpt2", "--device", "cpu", "--output", tmp_path)
    assert refused.exit_code == 2 and "--family: expected llama, qwen3" in refused.stderr
