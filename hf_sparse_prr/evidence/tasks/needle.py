"""Needles in hay, after RULER (arXiv 2404.06654): statements with a key and a value, and questions for some of them."""

from __future__ import annotations

import random

from hf_sparse_prr.evidence.tasks.episode import Episode, Piece, assemble, depths, exchange
from hf_sparse_prr.evidence.tasks.forms import Form


def needle_single(form: Form, rng: random.Random, length: int, depth: float | None = None) -> Episode:
    """One key with one value, at `depth` (None: anywhere)."""
    return _needles(form, rng, length, depth, keys=1, queries=1)


def needle_multi_key(
    form: Form, rng: random.Random, length: int, depth: float | None = None, keys: int = 8, queries: int = 1
) -> Episode:
    """Several keys, one of which is asked for."""
    return _needles(form, rng, length, depth, keys, queries)


def needle_multi_query(
    form: Form, rng: random.Random, length: int, depth: float | None = None, keys: int = 8, queries: int = 4
) -> Episode:
    """Several keys, of which `queries` are asked for, one after the other: all must be right. `depth`: the first's."""
    return _needles(form, rng, length, depth, keys, queries, scored=queries)


def needle_multi_value(
    form: Form,
    rng: random.Random,
    length: int,
    depth: float | None = None,
    values: int = 4,
    keys: int = 4,
    queries: int = 1,
) -> Episode:
    """Several values of one key, all asked for. They are numbered, so that one answer is right and not any order.

    Other keys have one value each. `depth` is that of the first value; the others are anywhere.
    """
    pieces, exchanges = [], []
    names = form.keys(rng, keys + queries)
    for key in names[queries:]:
        pieces.append(Piece(form.encode(form.question(key) + form.value(rng) + form.end), rng.random()))
    for number, key in enumerate(names[:queries]):
        last = number == queries - 1
        statements = [form.numbered(key, index) + form.value(rng) + form.end for index in range(1, values + 1)]
        at = depths(rng, values, 0, depth if last else None)
        pieces += [Piece(form.encode(text), place, last) for text, place in zip(statements, at, strict=True)]
        exchanges.append(exchange(form, form.numbered(key, 1), *statements))
    return assemble(length, form.opening, pieces, exchanges, form.hay(rng))


def _needles(
    form: Form, rng: random.Random, length: int, depth: float | None, keys: int, queries: int, scored: int = 1
) -> Episode:
    chosen = [(key, form.value(rng)) for key in form.keys(rng, keys)]
    asked = rng.sample(range(keys), queries)
    first = asked[-scored]
    at = depths(rng, keys, first, depth)
    pieces = [
        Piece(form.encode(form.question(key) + value + form.end), place, index == first)
        for index, ((key, value), place) in enumerate(zip(chosen, at, strict=True))
    ]
    questions = [(form.question(chosen[index][0]), chosen[index][1]) for index in asked]
    exchanges = [exchange(form, question, question + value + form.end) for question, value in questions]
    return assemble(length, form.opening, pieces, exchanges, form.hay(rng), scored)
