"""Copying: a span of random symbols in hay; its beginning is given, the rest is the answer."""

from __future__ import annotations

import random

from hf_sparse_prr.evidence.tasks.episode import Episode, Piece, assemble, depths, exchange
from hf_sparse_prr.evidence.tasks.forms import Form


def copying(
    form: Form,
    rng: random.Random,
    length: int,
    depth: float | None = None,
    parts: int = 24,
    given: int = 4,
    spans: int = 3,
    queries: int = 1,
) -> Episode:
    """`spans` of `parts` symbols each; of `queries` of them the first `given` are shown again. `depth`: the last's."""
    pieces, exchanges = [], []
    at = depths(rng, spans, queries - 1, depth)
    for span in range(spans):
        symbols = [form.part(rng) for _ in range(parts)]
        text = form.begin_span + "".join(symbols) + form.end
        pieces.append(Piece(form.encode(text), at[span], span == queries - 1))
        if span < queries:
            question = form.begin_span + "".join(symbols[:given])
            exchanges.append(exchange(form, question, text))
    return assemble(length, form.opening, pieces, exchanges, form.hay(rng))
