"""infllm_scores: exact softmax shares of compressed keys, summed over the group, maximum of a block's windows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .drawn import FORMATS, INTERPRETED

PROPERTY = settings(deadline=None, derandomize=True, max_examples=8 if INTERPRETED else 80)
INF, NAN = float("inf"), float("nan")


def make(seed, batch=2, heads=2, group=3, dim=64, blocks=5, windows=4, dtype=torch.float32, gaps=0.1):
    """(query, means, filled); the first window of a row is never filled, as no window ends in its first 16 tokens."""
    rng = np.random.default_rng(seed)
    query = torch.tensor(rng.standard_normal((batch, heads, group, dim)), dtype=dtype)
    means = torch.tensor(rng.standard_normal((batch, heads, blocks, windows, dim)), dtype=dtype)
    filled = torch.tensor(rng.random((batch, 1, blocks, windows)) >= gaps).repeat(1, heads, 1, 1)
    filled[:, :, :1, :1] = False
    return query, means.masked_fill(~filled[..., None], 0.0), filled


def score(ops, problem, first, last, length, scale=0.125):
    return ops.infllm_scores(*problem, first, torch.tensor(last), torch.tensor(length), scale=scale, stride=16)


def oracle(problem, first, last, length, scale=0.125):
    query, means, filled = (x.double().cpu().numpy() for x in problem)
    batch, heads, blocks, windows, _ = means.shape
    scores = np.full((batch, heads, blocks), NAN)
    ends = (np.arange(blocks * windows) + 1) * 16
    for b in range(batch):
        for h in range(heads):
            seen = (filled[b, h].reshape(-1) > 0) & (ends <= length[b])
            if not seen.any():
                continue
            logits = query[b, h] @ means[b, h].reshape(blocks * windows, -1)[seen].T * scale
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares = np.full(blocks * windows, -INF)
            shares[seen] = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
            for n in range(max(first, 0), min(blocks, last[b])):
                best = shares[n * windows : (n + 1) * windows].max()
                scores[b, h, n] = NAN if best == -INF else best
    return scores


@PROPERTY
@given(
    st.integers(0, 2**32),
    st.sampled_from(FORMATS),
    st.sampled_from([1, 2, 4, 7, 16]),
    st.sampled_from([1, 63, 64, 128, 256]),
    st.integers(0, 9),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(-1, 6),
    st.lists(st.integers(-2, 12), min_size=2, max_size=2),
    st.lists(st.integers(-5, 700), min_size=2, max_size=2),
)
def test_infllm_scores_equal_numpy(ops, assert_close, seed, dtype, group, dim, blocks, windows, first, last, length):
    problem = make(seed, group=group, dim=dim, blocks=blocks, windows=windows, dtype=dtype)
    scores = score(ops, problem, first, last, length)
    assert scores.dtype == torch.float32
    # A share's relative error is its logit's absolute one: a dot product of `dim` terms in fp32
    expected = oracle(problem, first, last, length)
    assert_close(scores, expected, dtype, np.abs(np.nan_to_num(expected)) * 4)


def test_infllm_scores_by_hand(ops):
    """Two heads, three windows, of which the last is the query's future."""
    query = torch.tensor([[1.0], [-1.0]]).view(1, 1, 2, 1)
    means = torch.tensor([0.0, 1.0, 3.0, 50.0]).view(1, 1, 2, 2, 1)
    filled = torch.tensor([False, True, True, True]).view(1, 1, 2, 2)
    scores = ops.infllm_scores(query, means, filled, 0, torch.tensor([2]), torch.tensor([63]), scale=1.0, stride=16)
    share = 1 / (1 + np.exp(2.0))  # window 1 against window 2 for q = 1; mirrored for q = -1
    np.testing.assert_allclose(scores.double().cpu().numpy(), [[[share + (1 - share)] * 2]], rtol=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_infllm_scores_of_a_bad_window_cost_its_block_alone(ops, bad):
    problem = make(3, gaps=0.0)
    query, means, _ = problem
    good = score(ops, problem, 0, [5, 5], [320, 320])
    means[0, 1, 2, 1] = bad * query[0, 1, 0].sign().nan_to_num(1)  # the first head's logit is NaN or +inf
    scores = score(ops, problem, 0, [5, 5], [320, 320])
    assert scores.isnan().nonzero().tolist() == [[0, 1, 2]]
    assert torch.equal(scores[1], good[1])
    assert scores[0, 1, [0, 1, 3, 4]].isfinite().all()


def test_infllm_scores_of_a_window_at_minus_infinity_are_zero(ops):
    query, means, filled = make(4, group=1, gaps=0.0)
    means[0, 0, 2] = -INF * query[0, 0, 0].sign()
    scores = score(ops, (query, means, filled), 0, [5, 5], [320, 320])
    assert scores[0, 0, 2] == 0.0
    assert scores.isfinite().all()


def test_infllm_scores_of_huge_logits_are_shares(ops):
    query, means, filled = make(5, gaps=0.0)
    scores = score(ops, (query * 1e4, means * 1e4, filled), 0, [5, 5], [320, 320])
    assert scores.isfinite().all() and (scores <= 3).all() and scores.amax(dim=-1).gt(0.99).all()


def test_infllm_scores_hide_the_future(ops, assert_same_bits):
    """Drafts are summarised before the first of them is scored: windows past the query don't exist for it."""
    problem = make(6, blocks=6, gaps=0.0)
    seen = score(ops, problem, 0, [2, 2], [200, 137])
    query, means, filled = (x.clone() for x in problem)
    for row, length in enumerate([200, 137]):
        means[row].flatten(1, 2)[:, length // 16 :] = NAN
    assert_same_bits(score(ops, (query, means, filled), 0, [2, 2], [200, 137]), seen)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("dim", [1, 63, 64, 128])
def test_infllm_scores_bits_depend_on_the_row_alone(ops, assert_same_bits, dim, group, dtype):
    """Not on the batch, nor on the other KV heads, nor on how many blocks there is room for."""
    query, means, filled = make(7, batch=3, group=group, dim=dim, blocks=13, dtype=dtype)
    last, length = [11, 9, 3], [801, 644, 230]
    scores = score(ops, (query, means, filled), 1, last, length)
    for row in range(3):
        one = slice(row, row + 1)
        alone = score(ops, (query[one], means[one], filled[one]), 1, last[one], length[one])
        assert_same_bits(alone, scores[one])
        head = score(ops, (query[one, 1:], means[one, 1:], filled[one, 1:]), 1, last[one], length[one])
        assert_same_bits(head, scores[one, 1:])
    room = torch.nn.functional.pad(means, (0, 0, 0, 0, 0, 50)), torch.nn.functional.pad(filled, (0, 0, 0, 50))
    assert_same_bits(score(ops, (query, *room), 1, last, length)[:, :, :13], scores)


def test_infllm_scores_take_views(ops, assert_same_bits):
    query, means, filled = make(8)
    expected = score(ops, (query, means, filled), 0, [5, 4], [320, 300])
    views = (
        query.transpose(1, 2).contiguous().transpose(1, 2),
        means.transpose(3, 4).contiguous().transpose(3, 4),
        filled.transpose(2, 3).contiguous().transpose(2, 3),
    )
    assert not any(view.is_contiguous() for view in views)
    assert_same_bits(score(ops, views, 0, [5, 4], [320, 300]), expected)


def test_infllm_scores_without_blocks_or_windows(ops):
    assert score(ops, make(9, blocks=0), 0, [0, 0], [5, 5]).shape == (2, 2, 0)
    assert score(ops, make(9), 0, [5, 5], [15, 0]).isnan().all()


def test_infllm_scores_do_not_modify_their_inputs(ops):
    problem = make(10)
    copies = [x.clone() for x in problem]
    score(ops, problem, 0, [5, 3], [320, 200])
    for now, then in zip(problem, copies, strict=True):
        assert torch.equal(now, then)
