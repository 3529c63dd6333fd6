"""Scores of an indexer: a float64 oracle, and what must change no bit."""

from importlib import import_module

import numpy as np
import pytest
import torch

from .drawn import FORMATS, INTERPRETED

INF, NAN = float("inf"), float("nan")
B, T = 2, 70


def draw(seed, *sizes, dtype=torch.float32):
    return torch.tensor(np.random.default_rng(seed).standard_normal(sizes), dtype=dtype)


@pytest.fixture(params=FORMATS, ids=str)
def dtype(request):
    return request.param


def index_problem(dtype, queries=5, heads=3, dim=16):
    query, keys = draw(0, B, queries, heads, dim, dtype=dtype), draw(1, B, T, dim, dtype=dtype)
    valid = torch.tensor(np.random.default_rng(3).random((B, T)) > 0.2)
    end = torch.tensor([[0, 1, 33, T - 1, T]])[:, :queries]
    return query, draw(2, B, queries, heads), keys, valid, end


def test_index_scores_equal_float64(ops, dtype, assert_close):
    query, weights, keys, valid, end = index_problem(dtype)
    q, w, k = (x.double().cpu().numpy() for x in (query, weights, keys))
    products = np.einsum("bqie,bte->bqit", q, k) * 0.25
    expected = (np.maximum(products, 0) * w[..., None]).sum(2)
    magnitude = (np.abs(products) * np.abs(w[..., None])).sum(2)
    seen = valid.cpu().numpy()[:, None] & (np.arange(T) < end.cpu().numpy()[..., None])
    scores = ops.index_scores(query, weights, keys, valid, end, scale=0.25)
    assert scores.dtype == torch.float32
    assert_close(scores, np.where(seen, expected, NAN), dtype, magnitude=magnitude)


def test_index_scores_do_not_depend_on_what_is_not_seen(ops, dtype, assert_same_bits):
    query, weights, keys, valid, end = index_problem(dtype)
    together = ops.index_scores(query, weights, keys, valid, end, scale=0.25)
    keys = keys.clone()
    keys[~valid] = NAN
    assert_same_bits(ops.index_scores(query, weights, keys, valid, end, scale=0.25), together)


@pytest.mark.parametrize("end", [0, 1, 33, 64, T - 1])
def test_one_query_reads_nothing_behind_its_end(ops, dtype, end, assert_same_bits):
    """As in a buffer that has room for more tokens than it holds."""
    query, weights, keys, valid, _ = index_problem(dtype, queries=1)
    ends, hidden = torch.full((B, 1), end), keys.clone()
    hidden[:, end:] = NAN
    scores = ops.index_scores(query, weights, keys, valid, ends, scale=0.25)
    assert scores[:, :, end:].isnan().all()
    assert_same_bits(ops.index_scores(query, weights, hidden, valid, ends, scale=0.25), scores)
    chosen, found = ops.index_topk(query, weights, hidden, valid, ends, 9, scale=0.25)
    assert_same_bits(found, scores)
    assert bool((chosen < max(end, 0)).all())


@pytest.mark.skipif(INTERPRETED, reason="numpy's matmul, which the interpreter takes, changes bits with its shape")
def test_index_scores_do_not_depend_on_neighbours(ops, dtype, assert_same_bits):
    """One query has tiles of its own."""
    query, weights, keys, valid, end = index_problem(dtype)
    together = ops.index_scores(query, weights, keys, valid, end, scale=0.25)
    for b in range(B):
        for q in range(query.shape[1]):
            part = (x[b : b + 1, q : q + 1] for x in (query, weights))
            alone = ops.index_scores(*part, keys[b : b + 1], valid[b : b + 1], end[:, q : q + 1], scale=0.25)
            assert_same_bits(alone[0, 0], together[b, q])


def test_an_infinite_key_scores_as_it_does(ops, dtype):
    query, weights, keys, valid, end = index_problem(dtype)
    keys, valid, end = keys.clone(), torch.ones_like(valid), torch.full_like(end, T)
    keys[:, 7, 0] = INF
    expected = (torch.einsum("bqie,bte->bqit", query.double(), keys.double()) * 0.25).relu() * weights.double()[
        ..., None
    ]
    scores = ops.index_scores(query, weights, keys, valid, end, scale=0.25)
    assert torch.equal(scores[:, :, 7].double().nan_to_num(-5), expected.sum(2)[:, :, 7].nan_to_num(-5))
    assert scores[:, :, :7].isfinite().all() and scores[:, :, 8:].isfinite().all()


def test_index_scores_of_nothing(ops):
    query, weights, keys, valid, end = index_problem(torch.float32)
    assert ops.index_scores(query[:, :0], weights[:, :0], keys, valid, end[:, :0], scale=1.0).shape == (B, 0, T)
    assert ops.index_scores(query, weights, keys[:, :0], valid[:, :0], end, scale=1.0).shape == (B, 5, 0)
    nan = query.clone()
    nan[0, 2] = NAN
    assert ops.index_scores(nan, weights, keys, valid, end, scale=1.0)[0, 2].isnan().all()


@pytest.mark.skipif(not INTERPRETED, reason="the Triton kernel alone; on a GPU test_cuda_index.py")
@pytest.mark.parametrize("columns", [64, 65, 200, 700, 2048])  # steps of a program: 1, 2, 4, 11, 32
def test_a_scorer_leaves_what_reaches_a_threshold(ops, columns, monkeypatch, assert_same_bits):
    scorer = import_module(f"{ops.__name__}.triton_kernels.index")
    order_keys = import_module(f"{ops.__name__}.reference.gvr").order_keys
    query, keys = draw(0, B, 1, 3, 16), draw(1, B, columns, 16)
    valid = torch.tensor(np.random.default_rng(3).random((B, columns)) > 0.2)
    asked = (query, draw(2, B, 1, 3), keys, valid, torch.tensor([[columns], [columns - 7]]), 0.3)
    scores = scorer.score_tokens(*asked, None)[0]
    monkeypatch.setattr(scorer, "TILES", 1)
    assert_same_bits(scorer.score_tokens(*asked, None)[0], scores)
    for guess in (0.5, -INF, NAN):
        again, (counts, entries) = scorer.score_tokens(*asked, torch.full((B, 2), guess))
        assert_same_bits(again, scores)
        for b in range(B):
            expected = (scores[b, 0] >= guess).nonzero()[:, 0]
            left = entries[b, 0, : counts[b, 0]]
            assert torch.equal(left[:, 1].long(), expected)
            assert_same_bits(left[:, 0], order_keys(scores[b, 0, expected]) ^ torch.iinfo(torch.int32).min)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("guess", [None, -INF, 0.5, 1e9, NAN], ids=str)
def test_index_topk_is_the_top_k_of_the_scores(ops, dtype, queries, guess, assert_same_bits):
    query, weights, keys, valid, end = index_problem(dtype, queries)
    end = end + 20  # 20 columns at least; some aren't valid
    threshold = None if guess is None else torch.full((B * queries, 2), guess)
    chosen, scores = ops.index_topk(query, weights, keys, valid, end, 9, scale=0.25, threshold=threshold)
    assert_same_bits(scores, ops.index_scores(query, weights, keys, valid, end, scale=0.25))
    expected = ops.gvr_topk(scores.flatten(0, 1), 9)
    assert chosen.dtype == torch.int32 and torch.equal(chosen.flatten(0, 1), expected)


def test_index_topk_of_nothing(ops):
    query, weights, keys, valid, end = index_problem(torch.float32)
    chosen, scores = ops.index_topk(query[:, :0], weights[:, :0], keys, valid, end[:, :0], 3, scale=1.0)
    assert chosen.shape == (B, 0, 3) and scores.shape == (B, 0, T)
    chosen, _ = ops.index_topk(query, weights, keys[:, :0], valid[:, :0], end, 3, scale=1.0)
    assert chosen.unique().tolist() == [-1]
    assert ops.index_topk(query, weights, keys, valid, end, 0, scale=1.0)[0].shape == (B, 5, 0)
