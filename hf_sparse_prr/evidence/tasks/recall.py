"""Associative recall (arXiv 2312.04927): statements all over, no hay between them; some keys are asked for."""

from __future__ import annotations

import random

from hf_sparse_prr.evidence.tasks.episode import Episode, Piece, assemble, check_depth, exchange
from hf_sparse_prr.evidence.tasks.forms import Form


def recall(
    form: Form, rng: random.Random, length: int, depth: float | None = None, keys: int | None = None, queries: int = 1
) -> Episode:
    """keys: how many; None: as many as fit, and as the form has. The last question is for the one at `depth`."""
    check_depth(depth)
    fitting = keys is None
    if keys is None:
        width = max(len(form.encode(form.question(key) + form.value(rng) + form.end)) for key in form.keys(rng, 8))
        keys = max(queries, min(length // width - queries, form.most_keys))
    chosen = [(key, form.value(rng)) for key in form.keys(rng, keys)]
    if fitting:  # the width was that of some
        widths = [len(form.encode(form.question(key) + value + form.end)) for key, value in chosen]
        room = length - len(form.opening) - queries * max(widths)
        while keys > queries and sum(widths[:keys]) > room:
            keys -= 1
        chosen = chosen[:keys]
    asked = rng.sample(range(keys), queries)
    if depth is not None:
        place = min(int(depth * keys), keys - 1)
        asked = [index for index in asked if index != place][: queries - 1] + [place]
    pieces = [
        Piece(form.encode(form.question(key) + value + form.end), index / keys, index == asked[-1])
        for index, (key, value) in enumerate(chosen)
    ]
    questions = [(form.question(chosen[index][0]), chosen[index][1]) for index in asked]
    exchanges = [exchange(form, question, question + value + form.end) for question, value in questions]
    return assemble(length, form.opening, pieces, exchanges, form.hay(rng))
