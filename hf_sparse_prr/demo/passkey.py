"""A long text with a passkey in it: an island walk, written for this project, of any length.

The text is plain and comes round again and again, as that of the passkey tests in the literature does, and the
passkey is its only number: a model of 135M parameters finds it at 7K tokens. In richer prose a budget of 1024 can lose
it, where Quest's bound over a block of keys no longer singles out the right block. The prompt is raw text that ends
with "The pass key is": the model continues it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PASSKEY = "71432"
INTRODUCTION = (
    "There is one pass key hidden inside a long walk over an island. Find it and remember it. I will ask for it."
)
KEY_SENTENCES = " The pass key is {passkey}. Remember it. {passkey} is the pass key."
QUESTION = " What is the pass key? The pass key is"
_SENTENCES = (" The hill is green.", " The sea is blue.", " The sand is yellow.", " Off we go.", " Out and home again.")


def island() -> Iterator[str]:
    """Yield the sentences of the walk, round and round without end."""
    return cycle(_SENTENCES)


def passkey_prompt(
    tokenizer: PreTrainedTokenizerBase, tokens: int, depth: float, passkey: str = PASSKEY
) -> torch.Tensor:
    """Return ids [1, tokens]: the text with the passkey at `depth` (0 start, 1 end), then the question.

    The walk's beginning is cut to make the length exact, so the sentences around the key and the question stay whole.
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth: expected a number from 0 to 1, got {depth!r}")
    # What this tokenizer opens every text with, often nothing
    head = tokenizer("").input_ids + _encode(tokenizer, INTRODUCTION)
    key = _encode(tokenizer, KEY_SENTENCES.format(passkey=passkey))
    question = _encode(tokenizer, QUESTION)
    room = tokens - len(head) - len(key) - len(question)
    if room < 0:
        raise ValueError(f"tokens: expected at least {tokens - room} (all but the walk), got {tokens}")

    sentences: list[list[int]] = []
    length = 0
    for sentence in island():
        if length >= room:
            break
        sentences.append(_encode(tokenizer, sentence))
        length += len(sentences[-1])

    # Walk from the end: the key goes at the sentence boundary nearest to its depth, the front gives up the excess.
    after, behind = len(sentences), 0
    while after and behind + len(sentences[after - 1]) // 2 < (1.0 - depth) * room:
        after -= 1
        behind += len(sentences[after])
    before = [token for sentence in sentences[:after] for token in sentence]
    rest = [token for sentence in sentences[after:] for token in sentence]
    if length > room:
        before, rest = before[length - room :], rest[max(0, length - room - len(before)) :]
    return torch.tensor([head + before + key + rest + question])


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
