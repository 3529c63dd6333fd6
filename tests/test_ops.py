"""gvr_topk as the package exports it: the contract in small. How it is computed is tested with the kernels."""

import math

import pytest
import torch

from hf_sparse_prr import gvr_topk

INF, NAN = float("inf"), float("nan")


def oracle(scores, k, lengths=None):
    """The contract in plain Python: largest first, smaller index first, NaN never; then ascending, -1 padded."""
    rows = []
    for index, row in enumerate(scores.float().tolist()):
        length = len(row) if lengths is None else max(0, min(int(lengths[index]), len(row)))
        candidates = [i for i in range(length) if not math.isnan(row[i])]
        best = sorted(sorted(candidates, key=lambda i: (-row[i], i))[:k])
        rows.append(best + [-1] * (k - len(best)))
    return torch.tensor(rows, dtype=torch.int32).reshape(scores.shape[0], k)


def tied_scores(rows=4, columns=40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-4, 4, (rows, columns), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [0, 1, 7, 40, 45])
def test_the_largest_in_ascending_order_smallest_index_first_at_ties(dtype, k):
    scores = tied_scores(dtype=dtype)
    indices = gvr_topk(scores, k)
    assert indices.dtype == torch.int32
    assert indices.shape == (4, k)
    assert torch.equal(indices, oracle(scores, k))


@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        ([1.0, NAN, 3.0, NAN], 3, [0, 2, -1]),
        ([NAN, NAN], 1, [-1]),
        ([0.0, INF, 5.0, INF, INF], 2, [1, 3]),
        ([-INF, 1.0, -INF], 2, [0, 1]),
        ([-0.0, 0.0, -0.0, 0.0], 2, [0, 1]),
        ([-1.0, -0.0, 0.0], 1, [1]),
        ([1e-45, 0.0, 1e-45], 2, [0, 2]),
    ],
)
def test_special_values(row, k, expected):
    assert gvr_topk(torch.tensor([row]), k).tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_are_clamped_and_bound_the_candidates(dtype):
    scores, lengths = tied_scores(rows=6), torch.tensor([-4, 0, 3, 17, 40, 99], dtype=dtype)
    assert torch.equal(gvr_topk(scores, 7, lengths=lengths), oracle(scores, 7, lengths))


@pytest.mark.parametrize(
    "hint",
    [
        torch.zeros((4, 9), dtype=torch.int64),
        torch.full((4, 9), -1, dtype=torch.int32),
        torch.full((4, 9), torch.iinfo(torch.int64).max),
        torch.arange(36, dtype=torch.int16).view(4, 9),
        torch.empty((4, 0), dtype=torch.int32),
    ],
    ids=["zeros", "unused", "far out of range", "arbitrary", "empty"],
)
def test_no_hint_changes_the_result(hint):
    scores = tied_scores()
    assert torch.equal(gvr_topk(scores, 7, hint=hint), oracle(scores, 7))


def test_a_row_does_not_depend_on_the_others():
    scores = tied_scores()
    alone = torch.cat([gvr_topk(scores[i : i + 1], 7) for i in range(4)])
    assert torch.equal(gvr_topk(scores, 7), alone)


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, 3:], lambda x: x[::2], lambda x: x[:, ::2], lambda x: x.t(), lambda x: x[:1].expand(4, -1)],
    ids=["offset", "every other row", "every other column", "transposed", "expanded"],
)
def test_views_give_what_their_copies_give(view):
    scores = view(tied_scores())
    lengths = torch.arange(2 * scores.shape[0])[1::2]
    assert torch.equal(gvr_topk(scores, 3, lengths=lengths), oracle(scores, 3, lengths))


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (3, 0), (0, 0)])
def test_empty_scores(rows, columns):
    assert torch.equal(gvr_topk(torch.empty(rows, columns), 2), torch.full((rows, 2), -1, dtype=torch.int32))


def test_stats_come_with_the_same_indices():
    scores = tied_scores()
    indices, stats = gvr_topk(scores, 7, return_stats=True)
    assert torch.equal(indices, gvr_topk(scores, 7))
    assert all(field.shape == (4,) for field in stats)
    assert bool((stats.passes >= 1).all())
    assert bool((stats.passes <= 40).all())
    assert bool((stats.candidates >= 0).all())
    assert stats.fallback.dtype == torch.bool


def test_the_arguments_are_only_read():
    scores, lengths, hint = tied_scores(), torch.tensor([-4, 3, 40, 99]), torch.full((4, 2), -7)
    copies = [tensor.clone() for tensor in (scores, lengths, hint)]
    gvr_topk(scores, 7, lengths=lengths, hint=hint)
    assert all(torch.equal(now, before) for now, before in zip((scores, lengths, hint), copies, strict=True))


def test_scores_that_want_gradients_give_the_same_indices():
    scores = tied_scores()
    indices = gvr_topk(scores.clone().requires_grad_(), 7)
    assert torch.equal(indices, oracle(scores, 7))
    assert not indices.requires_grad


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("scores", {"scores": torch.zeros(4)}),
        ("scores", {"scores": torch.zeros(1, 4, 4)}),
        ("scores", {"scores": torch.zeros(4, 4, dtype=torch.float64)}),
        ("scores", {"scores": torch.zeros(4, 4, dtype=torch.int32)}),
        ("k", {"k": -1}),
        ("k", {"k": 2.0}),
        ("k", {"k": True}),
        ("lengths", {"lengths": torch.ones(3, dtype=torch.int32)}),
        ("lengths", {"lengths": torch.ones(4, 1, dtype=torch.int32)}),
        ("lengths", {"lengths": torch.ones(4)}),
        ("lengths", {"lengths": torch.ones(4, dtype=torch.int32, device="meta")}),
        ("hint", {"hint": torch.zeros(3, 2, dtype=torch.int32)}),
        ("hint", {"hint": torch.zeros(4, dtype=torch.int32)}),
        ("hint", {"hint": torch.zeros(4, 2)}),
        ("hint", {"hint": torch.zeros(4, 2, dtype=torch.int32, device="meta")}),
    ],
)
def test_what_the_contract_excludes_raises(name, arguments):
    with pytest.raises(ValueError, match=f"^{name}: expected .+, got "):
        gvr_topk(**{"scores": torch.zeros(4, 4), "k": 2, **arguments})
