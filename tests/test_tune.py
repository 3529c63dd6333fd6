"""`hf-sparse-prr tune`: what it refuses, and what it writes and says once measured."""

import contextlib
import json
from importlib import import_module, resources
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from hf_sparse_prr.commands import app, terminal, tune
from hf_sparse_prr.kernel_loader import resolve

GPU = "NVIDIA Test-1000"
KERNELS = resolve("auto").module.__name__


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tune", *(str(argument) for argument in arguments)])


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == terminal.EXIT_USAGE, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_without_a_gpu_is_one_line() -> None:
    refused(call(), "expected a CUDA GPU and Triton", "without a CUDA GPU")


def test_file_that_cannot_be_written_comes_before_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(call("--output", tmp_path / "file" / "mine.json"), "--output: expected a file that can be written")
    refused(call("--output", "/"), "--output: expected a file that can be written", "it is a folder")


def test_device_that_is_not_a_gpu_is_refused() -> None:
    refused(call("--device", "cpu"), "--device: expected cuda", "'cpu'", "only GPU kernels are tuned")
    refused(call("--device", "gpu?"), "--device: expected cuda", "'gpu?'")


def test_installed_package_has_the_committed_files() -> None:
    folder = resources.files("hf_sparse_prr.bundled") / "triton_kernels" / "tuned"
    assert json.loads((folder / "NVIDIA_H200.json").read_text())["gpu"] == "NVIDIA H200"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU by name, and the choices that measuring it would give."""
    pytest.importorskip("triton")
    measuring = import_module(f"{KERNELS}.tune")
    tuned = import_module(f"{KERNELS}.triton_kernels.tuned")
    case = "llama 32K"
    chosen = {op: measuring.Choice(values, {case: 4.0}, {case: 4.0}, []) for op, values in tuned.DEFAULTS.items()}
    chosen["merge"] = measuring.Choice({"DS": 64}, {case: 4.0}, {case: 3.0}, ["{'DS': 16}: another result, llama"])
    monkeypatch.setattr(measuring, "tune", lambda gpu, progress: chosen)
    monkeypatch.setattr(tune, "_gpu", lambda name: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setenv("HF_SPARSE_PRR_CACHE", str(tmp_path / "cache"))


def test_choices_go_to_the_file_that_the_kernels_read(measured: None, tmp_path: Path) -> None:
    tuned = import_module(f"{KERNELS}.triton_kernels.tuned")
    result = call()
    assert result.exit_code == 0, result.output
    path = tmp_path / "cache" / "tuned" / "NVIDIA_Test-1000.json"
    assert json.loads(path.read_text())["ratio_to_defaults"]["merge"] == 0.75
    assert tuned.load(GPU) == {**tuned.DEFAULTS, "merge": {"DS": 64}}
    said = " ".join(result.stdout.split())
    assert all(words in said for words in ("DS=64", "25.0%", "merge: not taken, {'DS': 16}: another result"))
    assert "committed" not in said


def test_output_names_another_file(measured: None, tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.json"
    assert call("--output", path).exit_code == 0
    assert json.loads(path.read_text())["gpu"] == GPU
    assert not (tmp_path / "cache").exists()


def test_file_that_cannot_be_written_is_refused_before_measuring(measured: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(call("--output", tmp_path / "file" / "mine.json"), "--output: expected a file that can be written")
    refused(call("--output", tmp_path), "--output: expected a file that can be written", "it is a folder")


def test_committed_file_of_the_gpu_is_mentioned(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    result = call()
    assert result.exit_code == 0
    assert "this GPU has a committed file, which comes first" in " ".join(result.stdout.split())
