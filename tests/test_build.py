"""hub_kernels/build.py: what it says where it can't build, and what it leaves then.

What it builds, test_kernel_sources.py loads."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "hub_kernels" / "build.py"
GENERAL = '[general]\nname = "a-b"\nversion = 1\nlicense = "x"\nbackends = ["cpu"]\n'
COMPILED = GENERAL + '[torch]\nsrc = []\n[torch.stable-abi]\ncuda = "2.10"\n'
build = runpy.run_path(str(SCRIPT))["build"]


@pytest.fixture
def repo(tmp_path):
    package = tmp_path / "torch-ext" / "a_b"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "build.toml").write_text(GENERAL)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "cuda", "message"),
    [
        ("", False, "build.toml: expected general.name, str, got None"),
        ("general = 3", False, "build.toml: expected general.name, str, got None"),
        (GENERAL.replace("1", '"1"'), False, "build.toml: expected general.version, int, got '1'"),
        (GENERAL.replace("backends", "backend"), False, "build.toml: expected general.backends, list, got None"),
        ("[general", False, r"build.toml: expected TOML, got Expected .* \(at"),
        (GENERAL.replace("a-b", "other"), False, "other: expected the sources of other, got no folder"),
        (GENERAL, True, "build.toml: expected torch.src, list, got None"),
        (COMPILED, True, "build.toml: expected kernel, dict, got None"),
        (
            COMPILED + "[kernel]\nx = 3\n",
            True,
            "build.toml: expected kernel.x with backend, src and cuda-capabilities, got 3",
        ),
    ],
)
def test_a_build_toml_that_cannot_be_built_is_named_and_the_last_build_kept(repo, text, cuda, message):
    (last,) = build(repo)
    (repo / "build.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        build(repo, cuda=cuda)
    assert last.is_dir() and not (repo / "build.new").exists()


def test_a_file_in_the_place_of_the_last_build_is_kept(repo):
    (repo / "build").write_text("mine")
    with pytest.raises(ValueError, match="build: expected a folder or nothing, got a file"):
        build(repo)
    assert (repo / "build").read_text() == "mine"


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (None, "build.py: --cuda: expected .*nvcc, got none; CUDA_HOME names the toolkit's folder"),
        ("exit 3", "build.py: nvcc failed, see above"),
    ],
)
def test_without_an_nvcc_that_works_nothing_is_left(repo, tool, said):
    """In a process of its own: torch looks for the toolkit when it's imported, and a build without CUDA never does."""
    (repo / "build.toml").write_text(COMPILED + "[kernel]\n")
    home = repo / "toolkit"
    if tool:
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "nvcc").write_text(f"#!/bin/sh\n{tool}\n")
        (home / "bin" / "nvcc").chmod(0o755)
    # A build of torch without CUDA has no version to name the variant by
    script = (
        f"import runpy, sys, torch; torch.version.cuda = '13.0'; sys.argv = ['build.py', {str(repo)!r}, '--cuda']; "
    )
    done = subprocess.run(
        [sys.executable, "-c", script + f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"],
        env={**os.environ, "CUDA_HOME": str(home), "PATH": str(home / "bin")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert re.fullmatch(said, done.stderr.strip().splitlines()[-1])
    assert "Traceback" not in done.stderr
    assert not (repo / "build.new").exists() and not (repo / "build").exists()
