"""Load a model and its tokenizer from a folder or a GGUF file, with errors that say what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoadError(RuntimeError):
    """The path holds no model that can be loaded; the message says what was expected."""


def check_path(path: Path) -> None:
    """Raise `LoadError` unless `path` is a model folder or a GGUF file; reads no weights."""
    if not path.exists():
        raise LoadError(f"{path}: no such file or folder; expected a model folder (with config.json) or a .gguf file")
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
            hint = f"; it holds {found}: pass that file itself" if found else ""
            raise LoadError(f"{path}: expected a model folder with a config.json, got one without{hint}")
    else:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise LoadError(
                f"{path}: expected a GGUF file (it would begin with b'GGUF'), got one that begins with {magic!r}"
            )


def load_model(path: Path | str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return (model, tokenizer) from a model folder, or from a GGUF file whose weights are dequantised to `dtype`.

    Nothing is looked up on the network.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = Path(path)
    check_path(path)
    folder, source, quantization = path, {}, {}
    if path.is_file():
        # Without dequantize=True the weights stay in their GGUF blocks, and saving such a model is refused.
        folder, source = path.parent, {"gguf_file": path.name}
        quantization = {"quantization_config": GgufConfig(dequantize=True)}
    try:
        with no_foreign_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **source)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, **source, **quantization
            )
    except ImportError as error:  # a GGUF file without the `gguf` package
        raise LoadError(f"{path}: {error}. Remedy: pip install 'hf_sparse_prr[demo]'") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise LoadError(f"{path}: transformers could not load it: {error}") from error
    return model.eval(), tokenizer


def load_any(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """As `load_model`, of a folder or a file; what is neither is a name on the Hub, fetched there if need be."""
    if Path(name).exists() or name.endswith(".gguf"):
        return load_model(Path(name), dtype)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with no_foreign_bars():
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise LoadError(f"{name}: no file or folder, and transformers could not fetch and load it: {error}") from error
    return model.eval(), tokenizer


@contextmanager
def no_foreign_bars() -> Iterator[None]:
    """Keep transformers' own progress bars off the terminal: the caller shows one."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
