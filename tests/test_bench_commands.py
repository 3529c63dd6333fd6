"""`bench segment` and `bench layer` on the command line: what they print, and what they refuse and how."""

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from hf_sparse_prr import kernel_loader
from hf_sparse_prr.commands import app, terminal
from hf_sparse_prr.commands import bench as commands
from hf_sparse_prr.commands.tables import machine_line, noise_lines

pytestmark = pytest.mark.compat
LAYER = ["layer", "--context", "600", "--budget", "256", "--rounds", "1"]


def refused(result: Result, code: int, *words: str) -> None:
    """The command ended with `code` and one line on stderr that has every one of the words; stdout is empty."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line
    assert result.stdout == ""


SEGMENT = ["segment", "--shape", "smollm2", "--context", "1024", "--budget", "512", "--rounds", "1"]


def call_bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def test_bench_segment_prints_tables_and_json_as_the_last_line() -> None:
    result = call_bench(*SEGMENT, "--context", 1030)
    assert result.exit_code == 0, result.output
    *lines, last = result.stdout.splitlines()
    document = json.loads(last)
    assert [each["context"] for each in document["contexts"]] == [1024, 1030]
    shown = "\n".join(lines)
    for words in (
        "1024 tokens", "1030 tokens", "dense SDPA", "serial sparse", "select", "partials", "merge", "predict", "append",
        "PRR, hits", "repair, hits", "(natural)", "9 heads over 3 KV heads of 64", "PRR equals serial bit for bit",
        "kernels: reference (bundled)", document["command"],
    ):  # fmt: skip
        assert words in shown
    assert "…" not in shown  # nothing is cut off
    again = call_bench(*document["command"].split()[2:], "--json")
    assert json.loads(again.stdout)["contexts"][1]["natural"] == document["contexts"][1]["natural"]


def test_bench_segment_prints_only_json_when_asked() -> None:
    options = ("--hit-rate", 1, "--hit-rate", "natural", "--layers", 2, "--kernels", "reference", "--json")
    result = call_bench(*SEGMENT, "--context", "1K", "--selector", "infllm_v2", *options)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["bench"], document["selector"], document["block_size"]) == ("segment", "infllm_v2", 64)
    assert [each["context"] for each in document["contexts"]] == [1024]  # given twice
    assert list(document["contexts"][0]["settings"])[3:] == ["prr 1", "prr natural"]
    assert document["kernels"]["source"] == "reference" and document["contexts"][0]["layers"] == 2
    assert "--hit-rate 1,natural" in document["command"] and "--kernels reference" in document["command"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--shape", "gpt2"], ("shape", "qwen3-32b", "smollm2", "gpt2")),
        (["--selector", "best"], ("selector", "'quest'", "'infllm_v2'", "best")),
        (["--block-size", "17"], ("block_size", "'auto', 16, 32, 64, 128", "17")),
        (["--context", "100"], ("context", "1024 .. 1048576", "100")),
        (["--context", "many"], ("--context", "16K", "many")),
        (["--hit-rate", "2"], ("hit_rate", "0 to 1", "2")),
        (["--hit-rate", "often"], ("--hit-rate", "natural", "often")),
        (["--hit-rate", "1,often"], ("--hit-rate", "natural", "often")),
        (["--kernels", "no/such/folder"], ("no/such/folder", "Remedy")),
        (["--dtype", "int8"], ("--dtype", "bfloat16", "int8")),
        (["--device", "abacus"], ("--device", "cuda:1", "abacus")),
    ],
)
def test_bench_segment_refuses_what_cannot_be(arguments: list[str], words: tuple[str, ...]) -> None:
    result = call_bench(*SEGMENT, *arguments)
    refused(result, terminal.EXIT_USAGE, *words)


def test_bench_segment_times_nothing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernel_loader.resolve("auto").module
    real = module.repair_merge
    monkeypatch.setattr(module, "repair_merge", lambda *args, **kwargs: real(*args, **kwargs) * 1.01)
    result = call_bench(*SEGMENT)
    assert result.exit_code == terminal.EXIT_DIFFERENT and result.stdout == ""
    assert "error: output of step 0: expected within" in result.stderr


def test_bench_layer_refuses_a_cache_that_fits_the_budget() -> None:
    refused(call_bench("layer", "--context", 512, "--budget", 1024), terminal.EXIT_USAGE, "tokens", "1024", "512")


def test_bench_layer_takes_a_shape() -> None:
    small = ("--tokens", 600, "--budget", 256, "--rounds", 1, "--heads", 8, "--kv-heads", 2, "--head-dim", 16)
    result = call_bench("layer", "--shape", "glm-z1-9b", "--selector", "infllm_v2", *small, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["shape"]["name"], document["shape"]["heads"]) == ("glm-z1-9b", 8)
    assert document["selector"] == "infllm_v2"
    *lines, last = call_bench("layer", *small[2:], "--context", "1K").stdout.splitlines()
    assert json.loads(last)["shape"]["tokens"] == 1024
    assert "ms a step" in "\n".join(lines) and "1024 tokens" in "\n".join(lines)
    refused(call_bench("layer", "--shape", "gpt2"), terminal.EXIT_USAGE, "shape", "glm-4-9b", "gpt2")


def test_lists_are_repeated_or_have_commas() -> None:
    with_commas = call_bench(*SEGMENT, "--context", "1030,1K", "--hit-rate", "0.5,1", "--json")
    repeated = call_bench(*SEGMENT, "--context", 1030, "--hit-rate", 0.5, "--hit-rate", 1, "--json")
    found = [json.loads(result.stdout) for result in (with_commas, repeated)]
    assert found[0]["command"] == found[1]["command"] and "--context 1024,1030" in found[0]["command"]
    assert [each["context"] for each in found[0]["contexts"]] == [1024, 1030]
    assert list(found[0]["contexts"][0]["settings"])[3:] == ["prr 0.5", "prr 1"]


def test_a_forced_hit_rate_is_said_to_be_rounded() -> None:
    shown = call_bench(*SEGMENT, "--hit-rate", "0.5,1").stdout
    assert "PRR, hits 46.2%" in shown and "are rounded to whole blocks, of 13 by score" in shown
    assert "rounded" not in call_bench(*SEGMENT, "--hit-rate", 1).stdout


@pytest.mark.parametrize("arguments", [["segment"], ["layer"], ["layer", "--shape", "glm-5"], ["topk"], ["token"]])
def test_only_the_kernels_that_were_asked_for_are_measured(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(repo_id: str, source: str) -> None:
        raise ValueError(
            f"Kernel repository {repo_id!r} could not verify publisher trust status. Set trust_remote_code"
        )

    kernel_loader._resolve.cache_clear()
    monkeypatch.setattr(kernel_loader, "_from_hub", missing)
    for asked in ("foo/bar", "hub"):
        result = call_bench(*arguments, "--kernels", asked)
        refused(result, terminal.EXIT_USAGE, "could not be loaded", "Remedy: check the name and the network")
        assert "trust_remote_code" not in result.stderr


def test_kernels_of_auto_may_fall_back_and_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"{kernel_loader.REPO_ID}={tmp_path / 'nowhere'}")
    for command in (SEGMENT, LAYER):
        result = call_bench(*command)
        assert result.exit_code == 0, result.output
        *lines, last = result.stdout.splitlines()
        kernels = json.loads(last)["kernels"]
        assert kernels["source"] == "bundled" and kernels["fallback"] in lines


MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2.00 GiB. Error code 12"),
]


@pytest.mark.parametrize("error", MEMORY, ids=["GPU", "CPU"])
@pytest.mark.parametrize("name", ["segment", "layer", "topk", "token"])
def test_too_small_a_memory_is_one_line(name: str, error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(commands, f"bench_{name}", full)
    refused(call_bench(name), terminal.EXIT_USAGE, "expected sizes that fit the memory, got none for 2.00 GiB")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(commands, "bench_layer", broken)
    assert str(call_bench("layer").exception) == "a bug"


def test_bench_layer_refuses_what_cannot_be() -> None:
    refused(call_bench("layer", "--head-dim", 63), terminal.EXIT_USAGE, "head_dim: expected an even number, got 63")
    refused(call_bench("layer", "--kernels", "no/such/folder"), terminal.EXIT_USAGE, "no/such/folder", "Remedy")


def test_bench_layer_says_what_ran_and_how_to_run_it_again() -> None:
    result = call_bench(*LAYER, "--kernels", "reference")
    *lines, last = result.stdout.splitlines()
    found = json.loads(last)
    assert found["bench"] == "layer" and set(found["spread"]) == {"stock", "serial", "prr"}
    assert found["kernels"] == {"source": "reference", "backend": "reference", "fallback": None}
    assert found["command"] in lines and "kernels: reference (reference)" in lines[0]
    again = call_bench(*found["command"].split()[2:], "--json")
    assert again.exit_code == 0, again.output
    same = json.loads(again.stdout)
    assert (same["shape"], same["hit_rate"], same["command"]) == (found["shape"], found["hit_rate"], found["command"])


def test_noise_is_said_where_there_is_some() -> None:
    assert noise_lines({"serial": 0.1, "prr": 0.25, "dense": None}) == []
    (line,) = noise_lines({"serial": 0.3, "prr": 0.5, "dense": 0.0})
    assert line.startswith("noisy: in 2 of 3 times") and "25% of the median (prr: 50%); OMP_NUM_THREADS=1" in line


def test_one_thread_is_one_thread() -> None:
    found = {"device": "x86", "threads": 1, "torch": "2", "triton": None, "dtype": "float32"}
    found["kernels"] = {"backend": "cuda", "source": "x"}
    assert machine_line(found) == "x86, 1 thread, torch 2, triton none, float32, kernels: cuda (x)"
    assert "2 threads," in machine_line(found | {"threads": 2})
