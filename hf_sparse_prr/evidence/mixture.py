"""What the tiny models are trained on: all tasks, with many questions a sequence, for each answer is a lesson.

Batch `index` of `seed` is the same whichever process draws it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from hf_sparse_prr.evidence.tasks import TASKS, Bytes, Episode
from hf_sparse_prr.evidence.tasks.forms import SYMBOLS

# How often a task is drawn. Repeating is a drill, no task: looking up what followed before is learnt from it first
WEIGHTS = {
    "repeating": 5,
    "recall": 5,
    "copying": 3,
    "needle_multi_key": 3,
    "needle_multi_query": 1,
    "needle_multi_value": 3,
    "tracking": 3,
    "needle_single": 1,
    "passkey": 1,
}
_NAMES = tuple(WEIGHTS)
_SYMBOLS = SYMBOLS + "#=>[; "
# Bytes that a task takes at least, with a little hay
_SHORTEST = {
    "repeating": 24,
    "recall": 24,
    "copying": 48,
    "needle_multi_key": 64,
    "needle_multi_query": 96,
    "needle_multi_value": 128,
    "tracking": 128,
    "needle_single": 24,
    "passkey": 256,
}
_ROWS = 512
_DRILLED = 128  # bytes over which repeating is rare


class Batch(NamedTuple):
    """ids: int64 [B, T].  answers: bool [B, T], true where a token belongs to an answer.  tasks: int64 [B], indices of
    `WEIGHTS`."""

    ids: torch.Tensor
    answers: torch.Tensor
    tasks: torch.Tensor


def draw(name: str, rng: random.Random, length: int) -> Episode:
    """An episode of a task as it is trained: sometimes with one question, most often with as many as make sense."""
    if name == "repeating":
        return _repeating(rng, length)
    task, form = TASKS[name], Bytes()
    many = rng.random() < 0.8
    if name == "recall":
        return task(form, rng, length, queries=rng.randint(1, length // 14) if many else 1)
    if name == "copying":
        parts = rng.randint(12, max(12, min(length // 6, 96)))
        spans = rng.randint(1, max(1, length // (4 * parts)))
        return task(form, rng, length, parts=parts, spans=spans, queries=rng.randint(1, spans) if many else 1)
    if name in ("needle_multi_key", "needle_multi_query"):
        keys = rng.randint(4, max(4, length // 24)) if many else min(8, length // 16)
        return task(form, rng, length, keys=keys, queries=rng.randint(1, keys) if many else min(4, keys))
    if name == "needle_multi_value":
        queries = rng.randint(1, max(1, length // 128)) if many else 1
        return task(form, rng, length, keys=rng.randint(0, 2), values=rng.randint(2, 4), queries=queries)
    if name == "tracking":
        chains = rng.randint(1, max(1, length // 100)) if many else min(3, max(1, length // 60))
        return task(form, rng, length, hops=rng.randint(2, 4), chains=chains, queries=rng.randint(1, chains))
    return task(form, rng, length)


def _repeating(rng: random.Random, length: int) -> Episode:
    """Random symbols, again and again; from the second time on they are answers."""
    period = rng.randint(min(8, length // 4), length // 2)
    once = [ord(symbol) for symbol in rng.choices(_SYMBOLS, k=period)]
    ids = (once * (length // period + 1))[:length]
    return Episode(ids, [(period, length)], 1, [0])


def names_for(length: int) -> tuple[str, ...]:
    """The tasks that fit so many tokens."""
    return tuple(name for name in _NAMES if length >= _SHORTEST[name])


def make_batch(seed: int, index: int, rows: int, length: int) -> Batch:
    rng = random.Random(f"{seed} {index}")
    names = names_for(length)
    weights = [WEIGHTS[name] if name != "repeating" or length <= _DRILLED else 1 for name in names]
    chosen = rng.choices(names, weights, k=rows)
    episodes = [draw(name, rng, length) for name in chosen]
    answers = torch.zeros((rows, length), dtype=torch.bool)
    for row, episode in enumerate(episodes):
        for start, end in episode.answers:
            answers[row, start:end] = True
    ids = torch.tensor([episode.ids for episode in episodes])
    return Batch(ids, answers, torch.tensor([_NAMES.index(name) for name in chosen]))


class Mixture(Dataset[Batch]):
    """Batches of `tokens` bytes, or of 512 rows, from number `first` on; they take turns at `lengths`."""

    def __init__(self, seed: int, first: int, tokens: int, lengths: tuple[int, ...]) -> None:
        self.seed, self.first, self.tokens, self.lengths = seed, first, tokens, lengths

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Batch:
        length = self.lengths[index % len(self.lengths)]
        return make_batch(self.seed, self.first + index, min(_ROWS, max(1, self.tokens // length)), length)


def batches(seed: int, first: int, tokens: int, lengths: tuple[int, ...], workers: int) -> Iterator[Batch]:
    """workers: processes that draw ahead; 0 draws in this one."""
    data = Mixture(seed, first, tokens, lengths)
    ahead = 4 if workers else None
    return iter(DataLoader(data, batch_size=None, num_workers=workers, prefetch_factor=ahead))
