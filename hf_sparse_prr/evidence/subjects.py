"""Models that are evaluated: the tiny ones, SmolLM2 of the demo, or a path."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_prr.demo.loading import load_model
from hf_sparse_prr.demo.progress import Progress, silent
from hf_sparse_prr.demo.smollm2 import ensure_smollm2
from hf_sparse_prr.evidence.tasks import Bytes, Form, Sentences
from hf_sparse_prr.evidence.tiny import load_folder, load_tiny, of_bytes
from hf_sparse_prr.indexed import indexer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TINY = "tiny:"
SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Subject:
    """A model, in evaluation mode, and how tasks are put to it. tokenizer: None where a token is a byte."""

    name: str
    model: Any
    form: Form
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def indexed(self) -> bool:
        """Whether it selects tokens by an indexer of its own, so that no budget or block size applies."""
        return indexer_of(self.model.config) is not None

    @property
    def longest(self) -> int:
        """Tokens that it was made for."""
        return int(self.model.config.get_text_config(decoder=True).max_position_embeddings)

    @cached_property
    def fingerprint(self) -> str:
        """Of the weights: some of each tensor, so that a model trained again, under the same name, is another."""
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            few = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)]
            digest.update(f"{name} {list(tensor.shape)}".encode() + few.float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Ids, without special tokens."""
        return self.form.encode(text)


def load_subject(
    name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", progress: Progress = silent
) -> Subject:
    """`tiny:llama` and the like, `smollm2`, or the path of a model folder or GGUF file. A folder as `train-tiny` writes
    it, without a tokenizer and with 256 tokens, is read in bytes.

    Raises:
        ValueError: no such tiny model.  LoadError: the path holds no model.  FetchError: SmolLM2 can't be had.
    """
    if name.startswith(TINY):
        tiny: Any = load_tiny(name[len(TINY) :])
        tiny.to(device=torch.device(device), dtype=dtype)
        return Subject(name, tiny, Bytes(), None)
    if name != SMOLLM2 and of_bytes(Path(name)):
        trained: Any = load_folder(Path(name))
        return Subject(name, trained.to(device=torch.device(device), dtype=dtype), Bytes(), None)
    model, tokenizer = load_model(ensure_smollm2(progress) if name == SMOLLM2 else Path(name), dtype)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    placed: Any = model
    return Subject(name, placed.to(torch.device(device)), Sentences(encode, _opening(tokenizer)), tokenizer)


def _opening(tokenizer: Any) -> list[int]:
    """The special tokens before a text; models that were trained with them lose much without."""
    bare, whole = tokenizer("a", add_special_tokens=False).input_ids, list(tokenizer("a").input_ids)
    starts = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
    return whole[: starts[0]] if starts else []
