"""What tiny models are trained on: marked answers, batches that depend on their number alone."""

import random

import pytest
import torch

from hf_sparse_prr.evidence.mixture import WEIGHTS, batches, draw, make_batch, names_for
from hf_sparse_prr.evidence.tasks import TASKS


def test_every_task_is_trained():
    assert set(TASKS) < set(WEIGHTS)
    assert set(names_for(256)) == set(WEIGHTS)
    assert set(names_for(48)) == {"repeating", "recall", "copying", "needle_single"}


@pytest.mark.parametrize("length", [48, 128, 256, 1024])
def test_every_task_that_fits_can_be_drawn(length):
    rng = random.Random(0)
    for name in names_for(length):
        for _ in range(30):
            found = draw(name, rng, length)
            assert len(found.ids) == length and found.answers[-1][1] == length


def test_a_batch_marks_answers_and_depends_on_its_number_alone():
    first, again, other = make_batch(0, 7, 4, 256), make_batch(0, 7, 4, 256), make_batch(0, 8, 4, 256)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.answers, again.answers)
    assert not torch.equal(first.ids, other.ids)
    assert first.answers[:, -1].all() and not first.answers[:, 0].any()


def test_repeating_is_answered_by_what_came_before():
    found = draw("repeating", random.Random(0), 96)
    ((period, end),) = found.answers
    assert end == 96 and 1 < period <= 48
    assert found.ids[period:] == found.ids[: 96 - period]


@pytest.mark.parametrize("workers", [0, 2])
def test_lengths_take_turns_whoever_draws(workers):
    stream = batches(0, 10, 1024, (64, 128), workers)
    for number, length in ((10, 64), (11, 128), (12, 64)):
        found = next(stream)
        assert found.ids.shape == (1024 // length, length)
        assert torch.equal(found.ids, make_batch(0, number, 1024 // length, length).ids)
