"""`hf-sparse-prr doctor` tells the truth, needs no network, and its exit code says whether something is in the way."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_sparse_prr import doctor, kernel_loader
from hf_sparse_prr.commands import app


@pytest.fixture(autouse=True)
def fresh():
    kernel_loader._resolve.cache_clear()
    yield
    kernel_loader._resolve.cache_clear()


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_good_machine():
    result = run("--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["problems"] == []
    assert found["kernels"][0] == {
        "asked": "auto", "loads": True, "source": "bundled", "backend": "reference", "why_not": None,
    }  # fmt: skip
    assert found["packages"]["transformers"]["supported"]
    assert "llama" in found["model_types"]
    text = run()
    assert text.exit_code == 0
    assert "bundled, backend reference" in text.stdout


def test_without_kernels_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    result = run("--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [source["loads"] for source in found["kernels"]] == [False, True]
    assert "pip install" in found["problems"][0]
    assert "problem:" in run().stdout


def test_what_is_wanted_is_what_the_package_requires():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    required = re.search(r"\ndependencies = \[\n(.*?)\]", text, flags=re.DOTALL)[1]
    wanted = {name: doctor._package(name)["wanted"] for name in doctor.RANGES}
    assert wanted == dict(re.findall(r'"(\w+)(>=.*?)"', required))


def test_local_kernels_of_another_repo_is_noted_and_is_no_problem(monkeypatch):
    assert doctor.diagnose()["notes"] == []
    monkeypatch.setenv("LOCAL_KERNELS", "foo/bar=/somewhere")
    result = run()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "LOCAL_KERNELS=foo/bar=/somewhere" in lines
    (note,) = [line for line in lines if line.startswith("note: ")]
    assert "names no copy of hf-sparse-prr/sparse-prr: 'auto' is the bundled one" in note


def test_a_malformed_local_kernels_is_a_problem_that_has_its_name(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", "foo")
    result = run("--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["notes"] == []
    assert found["problems"][0].startswith("kernels from LOCAL_KERNELS=foo could not be loaded")


def test_an_unsupported_version_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: {"transformers": "5.30.0"}.get(name, "99.0"))
    found = doctor.diagnose()
    assert "transformers: expected >=5.17,<5.25, got 5.30.0" in found["problems"]


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("0.17.2", (0, 17, 2)), ("5.24.0.dev0", (5, 24, 0))]
)
def test_versions_are_compared_as_numbers(text, numbers):
    assert doctor._numbers(text) == numbers


def test_bench_layer_times_all_three(tmp_path):
    result = CliRunner().invoke(
        app, ["bench", "layer", "--tokens", "400", "--budget", "160", "--rounds", "1", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["ms"]) == {"stock", "serial", "prr"}
    assert 0 < found["kv_bytes_per_step"]["serial"] < found["kv_bytes_per_step"]["stock"]
    assert CliRunner().invoke(app, ["bench", "layer", "--budget", "10"]).exit_code == 2
