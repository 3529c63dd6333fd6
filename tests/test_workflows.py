"""The workflow files: YAML, with commands that there are."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")  # comes with transformers
ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
    commands = "\n".join(step.get("run", "") for step in steps)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", commands):
        assert re.search(rf"\b{target}\b.*:", makefile)
    assert ".ci/run" not in commands or (ROOT / ".ci/run").is_file()


def test_the_tests_and_the_kernels_have_one():
    assert [path.name for path in FILES] == ["ci.yml", "kernels.yml"]


def test_ci_hands_its_torch_on():
    """make takes TORCH from the environment, since it is set with ?=."""
    assert (
        "TORCH" in yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]["steps"][-1]["env"]
    )
    assert re.search(r"^TORCH\s+\?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
