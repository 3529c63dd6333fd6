"""Make the prompt of a user's own text and question, cut to what the model can take."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def text_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, question: str, limit: int | None, chat: bool = False
) -> tuple[torch.Tensor, int]:
    """Return ids [1, T] of the text followed by the question, and how many tokens of the text's end were cut.

    `limit` bounds T (None: no bound). `chat` sends both as one user message in the tokenizer's chat template.
    """
    if chat and not tokenizer.chat_template:
        raise ValueError("chat: expected a tokenizer with a chat template, got one without")

    def render(body: str) -> list[int]:
        whole = f"{body.rstrip()}\n\n{question}"
        if not chat:
            return _ids(tokenizer(whole))
        return encode_chat(tokenizer, [{"role": "user", "content": whole}])

    ids = render(text)
    if not ids:
        raise ValueError("prompt: expected at least one token, got none: the model's folder may have no tokenizer")
    if limit is None or len(ids) <= limit:
        return torch.tensor([ids]), 0
    body = _ids(tokenizer(text, add_special_tokens=False))
    keep = len(body)
    while len(ids) > limit:  # more than once only where cutting a word in two makes tokens of its own
        keep -= len(ids) - limit
        if keep <= 0:
            raise ValueError(f"context: expected more than the {len(render(''))} tokens of the question, got {limit}")
        ids = render(decode(tokenizer, body[:keep]))
    return torch.tensor([ids]), len(body) - keep


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids of a chat in the tokenizer's template, up to where the answer begins."""
    return _ids(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True))


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of one sequence, without special tokens."""
    return cast(str, tokenizer.decode(ids, skip_special_tokens=True))  # a list of str only for a list of sequences


def _ids(encoded: object) -> list[int]:
    ids: list[int] = encoded["input_ids"]  # type: ignore[index]
    return ids
