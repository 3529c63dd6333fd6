"""tally: what a step did, counted as a person would."""

import numpy as np
import pytest
import torch


def oracle(selected, free, predicted, importance, first, last):
    numbers = np.zeros((*free.shape[:2], 7))
    for b, h in np.ndindex(*free.shape[:2]):
        kept, best, guess = ({n for n in ids[b, h].tolist() if n >= 0} for ids in (selected, free, predicted))
        hits = best & guess
        numbers[b, h, :5] = [
            len(kept) + len(guess - best),
            max(int(last[b]) - first, 0),
            len(hits),
            len(best),
            len(guess),
        ]
        if importance is not None:
            total = sum(float(importance[b, h, n]) for n in best)
            if total > 0 and guess:
                numbers[b, h, 5:] = [sum(float(importance[b, h, n]) for n in hits) / total, 1]
    return numbers


def lists(rng, shape, blocks, slots):
    """int32 [*shape, slots]: distinct ascending ids, -1 last."""
    ids = np.full((*shape, slots), -1)
    for at in np.ndindex(*shape):
        count = int(rng.integers(0, min(slots, blocks) + 1))
        ids[at][:count] = np.sort(rng.choice(blocks, count, replace=False))
    return torch.tensor(ids, dtype=torch.int32)


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize(
    ("slots", "guesses"), [(13, 13), (1, 40), (70, 200), (5, 0), (70, 300), (1100, 257), (3, 511), (3000, 4200)]
)
def test_tally_counts(ops, slots, guesses, scored):
    rng, blocks = np.random.default_rng(slots), 1210 if slots < 1210 else 5000
    free, predicted = lists(rng, (3, 2), blocks, slots), lists(rng, (3, 2), blocks, guesses)
    must = torch.tensor([blocks, blocks + 1], dtype=torch.int32).expand(3, 2, 2)
    selected = torch.cat([must, free], dim=2)  # in any order
    importance = torch.tensor(rng.random((3, 2, blocks)), dtype=torch.float32) if scored else None
    if scored:
        importance[0, 0] = 0.0
    arguments = (selected, free, predicted, importance, 1, torch.tensor([150, 0, 9]))
    numbers = torch.zeros((3, 2, 7), dtype=torch.float64)
    for times in (1, 2):
        assert ops.tally(numbers, *arguments) is None
        np.testing.assert_allclose(numbers.cpu().numpy(), times * oracle(*arguments), rtol=1e-12)


def test_tally_of_nothing(ops):
    nothing = torch.zeros((2, 2, 0), dtype=torch.int32)
    numbers = torch.zeros((2, 2, 7), dtype=torch.float64)
    ops.tally(numbers, nothing, nothing, nothing, torch.zeros(2, 2, 0), 1, torch.tensor([0, 0]))
    assert not numbers.any()
