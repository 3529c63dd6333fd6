"""Variable tracking, after RULER (arXiv 2404.06654): who holds, in the end, what the first one was given."""

from __future__ import annotations

import random
from itertools import pairwise

from hf_sparse_prr.evidence.tasks.episode import Episode, Piece, assemble, depths, exchange
from hf_sparse_prr.evidence.tasks.forms import Form


def tracking(
    form: Form,
    rng: random.Random,
    length: int,
    depth: float | None = None,
    hops: int = 4,
    chains: int = 3,
    queries: int = 1,
) -> Episode:
    """Chains of `hops` links each, scattered in order; of `queries` of them all links are asked for, one by one.

    `depth` is that of the first link of the last chain asked for; its others follow at random places behind it.
    """
    names = form.keys(rng, chains * (hops + 1))
    pieces, exchanges = [], []
    for chain in range(chains):
        held = names[chain * (hops + 1) : (chain + 1) * (hops + 1)]
        links = [form.link(a) + form.name(b) + form.end for a, b in pairwise(held)]
        last = chain == queries - 1
        at = depths(rng, hops, 0, depth if last else None)
        at = [at[0], *sorted(at[0] + (1.0 - at[0]) * each for each in at[1:])] if last and depth else sorted(at)
        pieces += [Piece(form.encode(text), place, last) for text, place in zip(links, at, strict=True)]
        if chain < queries:
            exchanges.append(exchange(form, form.link(held[0]), *links))
    return assemble(length, form.opening, pieces, exchanges, form.hay(rng))
