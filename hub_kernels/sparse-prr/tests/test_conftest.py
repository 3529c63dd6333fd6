"""What the environment asks of the tests, where it can't be had."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def conftest(request):
    (module,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if Path(getattr(plugin, "__file__", None) or "") == Path(__file__).with_name("conftest.py")
    )
    return module


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HF_SPARSE_PRR_TEST_DEVICE", "cuda", "expected cpu, or cuda where there is a GPU, got cuda"),
        ("HF_SPARSE_PRR_TEST_DEVICE", "gpu", "expected cpu, or cuda where there is a GPU, got gpu"),
        ("PRR_CASES", "abc", "expected an int >= 1, got abc"),
        ("PRR_CASES", "0", "expected an int >= 1, got 0"),
        ("TRITON_INTERPRET", "1", "expected triton to be installed, got none"),
    ],
)
def test_what_cannot_be_had_is_named(conftest, monkeypatch, name, value, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(conftest, "find_spec", lambda name: None)
    for held in ("HF_SPARSE_PRR_TEST_DEVICE", "PRR_CASES", "TRITON_INTERPRET"):
        monkeypatch.delenv(held, raising=False)
    conftest.check_environment()
    monkeypatch.setenv(name, value)
    with pytest.raises(pytest.UsageError, match=re.escape(f"{name}: {message}")):
        conftest.check_environment()


def test_a_folder_without_kernels_ends_the_run_with_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__).with_name("test_tally.py"))],
        env={**os.environ, "HF_SPARSE_PRR_TEST_KERNELS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    message = "HF_SPARSE_PRR_TEST_KERNELS: expected a kernel repo with a variant for this machine, got"
    assert done.stderr.strip() == f"ERROR: {message} {tmp_path}"
