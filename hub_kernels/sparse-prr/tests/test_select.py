"""select_blocks: the best blocks and the forced ones, in one ascending list."""

import numpy as np
import pytest
import torch

NAN, INF = float("nan"), float("inf")


def oracle(scores, forced, k):
    """Lists of (selected, free) a row, by Python's stable sort."""
    rows = []
    for b, heads in enumerate(scores.tolist()):
        for h, row in enumerate(heads):
            there = [n for n, value in enumerate(row) if value == value]
            free = sorted(sorted(there, key=lambda n: -row[n])[:k])
            must = [n for n in forced[b, h if forced.shape[1] > 1 else 0].tolist() if n >= 0]
            rows.append((sorted(must + free), free))
    return rows


def check(ops, scores, forced, k, **hint):
    selected, free = ops.select_blocks(scores, forced, k, **hint)
    assert selected.dtype == free.dtype == torch.int32
    assert selected.shape == (*scores.shape[:2], forced.shape[2] + k)
    assert free.shape == (*scores.shape[:2], k)
    found = zip(selected.flatten(0, 1).tolist(), free.flatten(0, 1).tolist(), strict=True)
    for got, expected in zip(found, oracle(scores, forced, k), strict=True):
        for ids, wanted in zip(got, expected, strict=True):
            assert ids == wanted + [-1] * (len(ids) - len(wanted))
    return selected, free


def problem(rng, batch, heads, blocks, sinks, local, ties=False):
    """Scores that are NaN for sinks and last blocks, and those as forced ids, some of them missing."""
    scores = rng.integers(0, 3, (batch, heads, blocks)) if ties else rng.standard_normal((batch, heads, blocks))
    scores = torch.tensor(scores, dtype=torch.float32)
    scores[torch.tensor(rng.random(scores.shape) < 0.1)] = INF
    scores[torch.tensor(rng.random(scores.shape) < 0.1)] = -INF
    ids = [*range(sinks), *range(blocks - local, blocks)]
    scores[:, :, ids] = NAN
    forced = torch.tensor(ids, dtype=torch.int32).repeat(batch, 1, 1)
    forced[torch.tensor(rng.random(forced.shape) < 0.2)] = -1
    return scores, forced


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("blocks", "sinks", "local", "k"), [
    (64, 1, 2, 13), (20, 1, 2, 17), (20, 1, 2, 40), (300, 0, 1, 61), (300, 5, 9, 1), (70, 2, 3, 0), (600, 1, 33, 500),
])  # fmt: skip
def test_select_blocks_equals_a_stable_sort(ops, blocks, sinks, local, k, ties):
    rng = np.random.default_rng(blocks + k)
    check(ops, *problem(rng, 2, 3, blocks, sinks, local, ties), k)


def test_select_blocks_of_forced_ids_between_and_a_list_a_head(ops):
    rng = np.random.default_rng(3)
    scores = torch.tensor(rng.standard_normal((2, 2, 40)), dtype=torch.float32)
    forced = torch.tensor([[[3, 17, -1, 39], [0, 1, 2, 3]], [[-1, -1, -1, -1], [5, -1, 7, 20]]], dtype=torch.int32)
    for b, h in np.ndindex(2, 2):
        scores[b, h, forced[b, h][forced[b, h] >= 0].long()] = NAN
    check(ops, scores, forced, 9)


def test_select_blocks_without_forced_ids_or_scores(ops):
    rng = np.random.default_rng(4)
    scores, forced = problem(rng, 2, 2, 50, 1, 2)
    check(ops, scores, forced[:, :, :0], 7)
    check(ops, torch.full_like(scores, NAN), forced, 7)
    check(ops, scores[:, :, :0], torch.full_like(forced, -1), 7)


def test_select_blocks_takes_views_and_any_hint(ops):
    rng = np.random.default_rng(5)
    scores, forced = problem(rng, 2, 4, 64, 1, 2)
    wide = torch.full((4, 2, 128), INF)
    view = wide.transpose(0, 1)[..., ::2]
    view.copy_(scores)
    plain = check(ops, view, forced.expand(-1, 4, -1), 11)
    hinted = check(ops, view, forced, 11, hint=torch.full((2, 4, 3), 12345, dtype=torch.int32))
    assert all(torch.equal(*pair) for pair in zip(plain, hinted, strict=True))


def test_ascending_puts_unused_slots_last(ops):
    blocks = torch.tensor([[[5, -1, 2], [-1, -1, 0]]], dtype=torch.int32)
    assert ops.ascending(blocks).tolist() == [[[2, 5, -1], [0, -1, -1]]]
