"""What options of the benchmarks mean, and what they can't be: each refusal is one line and exit code 2."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_sparse_prr.bench_exact import ExactnessError
from hf_sparse_prr.commands.terminal import EXIT_DIFFERENT, EXIT_USAGE, CommandError
from hf_sparse_prr.kernel_loader import KernelError


@contextmanager
def one_line_refusals() -> Iterator[None]:
    """What a benchmark raises as a `CommandError`: a wrong result, what can't be measured, too small a memory."""
    try:
        yield
    except ExactnessError as error:
        raise CommandError(error, EXIT_DIFFERENT) from error
    except (ValueError, KernelError) as error:
        raise CommandError(error, EXIT_USAGE) from error
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator: " not in str(error):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        message = f"expected sizes that fit the memory, got none for {asked[1] if asked else 'one more tensor'}"
        raise CommandError(message, EXIT_USAGE) from error


def dtype_of(name: str | None, device: str) -> torch.dtype:
    name = name or ("float32" if device == "cpu" else "bfloat16")
    if name not in ("float32", "bfloat16", "float16"):
        raise CommandError(f"--dtype: expected float32, bfloat16 or float16, got {name!r}", EXIT_USAGE)
    return getattr(torch, name)


def tokens_of(text: str, option: str = "--context", what: str = "tokens") -> int:
    """16384, 16K or 1M."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if found is None:
        raise CommandError(f"{option}: expected {what} like 16384, 16K or 1M, got {text!r}", EXIT_USAGE)
    return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]]


def rate_of(text: str) -> float | None:
    """None for natural."""
    if text == "natural":
        return None
    try:
        return float(text)
    except ValueError as error:
        message = f"--hit-rate: expected a number from 0 to 1, or natural, got {text!r}"
        raise CommandError(message, EXIT_USAGE) from error


def words_of(option: str, texts: list[str] | None) -> list[str]:
    """Of an option that is repeated, or has commas; each once; none if it wasn't given."""
    words = [word for text in texts or () for word in text.split(",") if word]
    if texts and not words:
        raise CommandError(f"{option}: expected at least one, got {','.join(texts)!r}", EXIT_USAGE)
    return list(dict.fromkeys(words))


def numbers_of(option: str, texts: list[str] | None) -> list[int]:
    return list(dict.fromkeys(tokens_of(word, option, "numbers") for word in words_of(option, texts)))


def rates_of(option: str, texts: list[str] | None) -> list[float | None]:
    return list(dict.fromkeys(rate_of(word) for word in words_of(option, texts)))


def shares_of(option: str, texts: list[str] | None) -> list[float]:
    try:
        return list(dict.fromkeys(float(word) for word in words_of(option, texts)))
    except ValueError as error:
        message = f"{option}: expected numbers from 0 to 1, got {','.join(texts or ())!r}"
        raise CommandError(message, EXIT_USAGE) from error


def pair_of(option: str, text: str) -> tuple[float, float]:
    """Two numbers, like 0.86,0.89."""
    try:
        first, second = map(float, text.split(","))
    except ValueError as error:
        raise CommandError(f"{option}: expected two numbers like 0.86,0.89, got {text!r}", EXIT_USAGE) from error
    return first, second


def positives_of(option: str, texts: list[str] | None) -> list[float]:
    """Numbers above 0."""
    words = words_of(option, texts)
    try:
        numbers = list(dict.fromkeys(float(word) for word in words))
    except ValueError as error:
        raise CommandError(f"{option}: expected numbers above 0, got {','.join(words)!r}", EXIT_USAGE) from error
    if any(not number > 0 for number in numbers):
        raise CommandError(f"{option}: expected numbers above 0, got {','.join(words)!r}", EXIT_USAGE)
    return numbers


def writable(path: Path, option: str = "--output") -> Path:
    """The file beside it that is written first; its folder is made."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.touch()
        new.unlink()
    except OSError as error:
        raise CommandError(
            f"{option}: expected a file that can be written, got {path} ({error})", EXIT_USAGE
        ) from error
    return new


def folder_at(path: Path, option: str = "--output") -> None:
    """Make the folder where it isn't there; a refusal where no file can be written in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CommandError(
            f"{option}: expected a folder that can be written to, got {path} ({error})", EXIT_USAGE
        ) from error


def check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise CommandError(f"--device: expected cpu, cuda, cuda:1, .., got {device!r}", EXIT_USAGE) from error
    if kind not in ("cpu", "cuda"):
        raise CommandError(f"--device: expected cpu, cuda, cuda:1, .., got {device!r}", EXIT_USAGE)
    if kind == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"--device: expected one that is there, got {device!r} without a CUDA GPU", EXIT_USAGE)


def command_of(name: str, options: list[tuple[str, Any]]) -> str:
    """The command line that runs `bench NAME` again. None is left out, True is a flag, a sequence has commas."""
    words = ["hf-sparse-prr", "bench", name]
    for key, value in options:
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words += [f"--{key}"] if value is True else [f"--{key}", text]
    return shlex.join(words)
