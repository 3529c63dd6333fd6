"""Answers of a model on a task, by one forward: greedy decoding is right exactly where every token is the likeliest."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from hf_sparse_prr.evidence.tasks import TASKS, Episode, Form


def episodes_of(task: str, form: Form, length: int, count: int, seed: int, depth: float | None = None) -> list[Episode]:
    """`count` episodes of a task with its default counts; the same for the same arguments."""
    streams = [random.Random(f"{seed} {task} {length} {depth} {each}") for each in range(count)]
    return [TASKS[task](form, stream, length, depth) for stream in streams]


@torch.no_grad()
def forced_accuracy(
    logits: Callable[[torch.Tensor], torch.Tensor], episodes: list[Episode], device: torch.device, rows: int = 1
) -> float:
    """Share of the episodes all of whose counting answers are right.

    logits: ids [B, T] to logits [B, T, V]; it is given `rows` episodes at a time, which must be of one length.
    """
    right = 0
    for begin in range(0, len(episodes), rows):
        chunk = episodes[begin : begin + rows]
        ids = torch.tensor([episode.ids for episode in chunk])
        chosen = logits(ids.to(device)).argmax(-1).cpu()
        for episode, own, found in zip(chunk, ids, chosen, strict=True):
            spans = episode.answers[-episode.scored :]
            right += all(torch.equal(found[start - 1 : end - 1], own[start:end]) for start, end in spans)
    return right / len(episodes)
