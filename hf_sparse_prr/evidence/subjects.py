"""Models that are evaluated: the tiny ones, SmolLM2 of the demo, or a path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_prr.demo.loading import load_model
from hf_sparse_prr.demo.progress import Progress, silent
from hf_sparse_prr.demo.smollm2 import ensure_smollm2
from hf_sparse_prr.evidence.tasks import Bytes, Form, Sentences
from hf_sparse_prr.evidence.tiny import load_tiny
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

    def encode(self, text: str) -> list[int]:
        """Ids, without special tokens."""
        return self.form.encode(text)


def load_subject(
    name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", progress: Progress = silent
) -> Subject:
    """`tiny:llama` and the like, `smollm2`, or the path of a model folder or GGUF file.

    Raises:
        ValueError: no such tiny model.  LoadError: the path holds no model.  FetchError: SmolLM2 can't be had.
    """
    if name.startswith(TINY):
        tiny: Any = load_tiny(name[len(TINY) :])
        tiny.to(device=torch.device(device), dtype=dtype)
        return Subject(name, tiny, Bytes(), None)
    model, tokenizer = load_model(ensure_smollm2(progress) if name == SMOLLM2 else Path(name), dtype)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    placed: Any = model
    return Subject(name, placed.to(torch.device(device)), Sentences(encode), tokenizer)
