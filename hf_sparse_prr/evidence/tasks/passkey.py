"""The passkey test (arXiv 2305.16300) in the words of this project's demo: five digits in an island walk."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hf_sparse_prr.demo.passkey import INTRODUCTION, KEY_SENTENCES, QUESTION, island
from hf_sparse_prr.evidence.tasks.episode import Episode, Piece, assemble, depths, exchange
from hf_sparse_prr.evidence.tasks.forms import Form


def passkey(form: Form, rng: random.Random, length: int, depth: float | None = None) -> Episode:
    """A key of five digits, at `depth` (None: anywhere).

    Two sentences stand between a key at depth 1 and the question: after "48213 is the pass key. What is the pass key?
    The pass key is", and with one of them in between, SmolLM2 goes on with "the pass key"; with two it answers.
    """
    key = f"{rng.randrange(10000, 100000)}"
    piece = Piece(form.encode(KEY_SENTENCES.format(passkey=key)), depths(rng, 1, 0, depth)[0], True)
    asked = exchange(form, QUESTION, f"{QUESTION} {key}")
    apart = 0 if depth is None else 2
    return assemble(length, [*form.opening, *form.encode(INTRODUCTION)], [piece], [asked], _walk(form), apart=apart)


def _walk(form: Form) -> Iterator[list[int]]:
    encoded = {}
    for sentence in island():
        if sentence not in encoded:
            encoded[sentence] = form.encode(sentence)
        yield encoded[sentence]
