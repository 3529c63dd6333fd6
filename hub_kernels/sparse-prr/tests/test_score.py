"""quest_scores: the group's exact Quest bound, bit for bit whatever stands beside it."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .drawn import FORMATS, INTERPRETED

PROPERTY = settings(deadline=None, derandomize=True, max_examples=8 if INTERPRETED else 80)
INF, NAN = float("inf"), float("nan")


def make(seed, batch=2, heads=2, group=3, dim=64, blocks=5, dtype=torch.float32, integers=False):
    """(query, lower, upper), random and non-empty boxes."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.integers(-8, 9, shape) if integers else rng.standard_normal(shape)

    ends = np.sort(np.stack([draw(batch, heads, blocks, dim), draw(batch, heads, blocks, dim)]), axis=0)
    query = draw(batch, heads, group, dim)
    return tuple(torch.tensor(x, dtype=dtype) for x in (query, *ends))


def oracle(query, lower, upper, first, last, group_by="sum"):
    """(scores, summed magnitudes): head by head, the larger end of each channel's interval, summed exactly."""
    query, lower, upper = (x.double().cpu().numpy() for x in (query, lower, upper))
    batch, heads, group, _ = query.shape
    scores = np.full(lower.shape[:3], NAN)
    magnitude = np.zeros_like(scores)
    for b, h, n in itertools.product(range(batch), range(heads), range(lower.shape[2])):
        if n < first or n >= int(last[b]) or (lower[b, h, n] > upper[b, h, n]).all():
            continue
        terms = [np.maximum(query[b, h, g] * lower[b, h, n], query[b, h, g] * upper[b, h, n]) for g in range(group)]
        if group_by == "sum":
            scores[b, h, n] = math.fsum(np.ravel(terms))
        else:
            scores[b, h, n] = max(math.fsum(term) for term in terms)
        ends = np.maximum(np.abs(lower[b, h, n]), np.abs(upper[b, h, n]))
        magnitude[b, h, n] = (np.abs(query[b, h]) @ ends).sum()
    return scores, magnitude


@PROPERTY
@given(
    st.integers(0, 2**32),
    st.sampled_from(FORMATS),
    st.sampled_from([1, 2, 4, 7, 16]),
    st.sampled_from([1, 2, 63, 64, 80, 128, 256]),
    st.integers(0, 9),
    st.integers(-1, 6),
    st.lists(st.integers(-2, 12), min_size=2, max_size=2),
    st.sampled_from(["sum", "max"]),
)
def test_quest_scores_equals_the_sum_or_maximum_of_each_heads_bound(
    ops, assert_close, seed, dtype, group, dim, blocks, first, last, group_by
):
    query, lower, upper = make(seed, group=group, dim=dim, blocks=blocks, dtype=dtype)
    empty = torch.tensor(np.random.default_rng(seed).random(lower.shape[:3]) < 0.2)[..., None]
    lower, upper = lower.masked_fill(empty, INF), upper.masked_fill(empty, -INF)
    last = torch.tensor(last, dtype=torch.int32)
    scores = ops.quest_scores(query, lower, upper, first, last, group=group_by)
    assert scores.dtype == torch.float32
    expected, magnitude = oracle(query, lower, upper, first, last, group_by)
    assert_close(scores, expected, dtype, magnitude)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("dim", [1, 63, 64, 80, 256])
def test_quest_scores_of_integers_are_exact(ops, dim, group, dtype):
    inputs = make(dim + group, group=group, dim=dim, dtype=dtype, integers=True)
    last = torch.tensor([5, 4])
    scores = ops.quest_scores(*inputs, 1, last)
    np.testing.assert_array_equal(scores.double().cpu().numpy(), oracle(*inputs, 1, last)[0])


def test_quest_scores_refuses_another_group(ops):
    with pytest.raises(ValueError, match="group: expected 'sum' or 'max', got 'mean'"):
        ops.quest_scores(*make(0), 0, torch.tensor([5, 5]), group="mean")


def test_quest_scores_by_hand(ops):
    query = torch.tensor([[1.0, -2.0], [-3.0, 4.0]]).view(1, 1, 2, 2)
    lower, upper = torch.tensor([-1.0, 2.0]).view(1, 1, 1, 2), torch.tensor([5.0, 3.0]).view(1, 1, 1, 2)
    # head 0: 1*5 + -2*2 = 1; head 1: -3*-1 + 4*3 = 15
    assert ops.quest_scores(query, lower, upper, 0, torch.tensor([1])).tolist() == [[[16.0]]]
    assert ops.quest_scores(query, lower, upper, 0, torch.tensor([1]), group="max").tolist() == [[[15.0]]]


@PROPERTY
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 8]), st.sampled_from([1, 16, 80]))
def test_quest_scores_bounds_every_key_exactly_on_integers(ops, seed, group, dim):
    rng = np.random.default_rng(seed)
    keys = torch.tensor(rng.integers(-9, 10, (2, 2, 4, 16, dim)), dtype=torch.float32)
    query = torch.tensor(rng.integers(-9, 10, (2, 2, group, dim)), dtype=torch.float32)
    scores = ops.quest_scores(query, keys.amin(dim=3), keys.amax(dim=3), 0, torch.tensor([4, 4]))
    dots = torch.einsum("bhgd,bhnsd->bhns", query.double(), keys.double())
    assert (scores.double() >= dots.amax(dim=-1)).all()
    if dim == 1 and group == 1:
        assert torch.equal(scores.double(), dots.amax(dim=-1))


@pytest.mark.parametrize("dtype", FORMATS)
def test_quest_scores_bounds_every_key_of_update_summaries(ops, assert_close, dtype):
    rng = np.random.default_rng(0)
    keys = torch.tensor(rng.standard_normal((2, 2, 64, 80)), dtype=dtype)
    query = torch.tensor(rng.standard_normal((2, 2, 4, 80)), dtype=dtype)
    lower, upper = torch.full((2, 2, 4, 80), NAN, dtype=dtype), torch.full((2, 2, 4, 80), NAN, dtype=dtype)
    valid, start = torch.ones(2, 64, dtype=torch.bool), torch.tensor([0, 0])
    ops.update_summaries(keys, valid, start, lower, upper, torch.full_like(start, 64), 64, 16)
    scores = ops.quest_scores(query, lower, upper, 0, torch.tensor([4, 4])).double()
    dots = torch.einsum("bhgd,bhnsd->bhns", query.double(), keys.view(2, 2, 4, 16, 80).double())
    assert (scores * (1 + 1e-5) >= dots.amax(dim=-1)).all()


def test_quest_scores_are_nan_outside_first_to_last(ops):
    query, lower, upper = make(1, batch=4, blocks=6)
    for dtype in (torch.int32, torch.int64):
        scores = ops.quest_scores(query, lower, upper, 2, torch.tensor([0, 2, 4, 99], dtype=dtype))
        scored = [sorted(set(row.nonzero()[:, 1].tolist())) for row in ~scores.isnan()]
        assert scored == [[], [], [2, 3], [2, 3, 4, 5]]


def test_quest_scores_are_nan_for_empty_blocks_only(ops, assert_same_bits):
    query, lower, upper = make(2, blocks=6)
    full = ops.quest_scores(query, lower, upper, 0, torch.tensor([6, 6]))
    lower[1, :, 3], upper[1, :, 3] = INF, -INF
    scores = ops.quest_scores(query, lower, upper, 0, torch.tensor([6, 6]))
    assert scores.isnan().nonzero().tolist() == [[1, 0, 3], [1, 1, 3]]
    assert_same_bits(scores[~scores.isnan()], full[~scores.isnan()])


def test_quest_scores_of_empty_blocks_are_nan_also_for_queries_of_both_signs(ops):
    """Heads of both signs in every channel: the arithmetic alone would say -inf, which may be selected."""
    query = torch.tensor([[1.0, -2.0], [-3.0, 4.0]]).view(1, 1, 2, 2)
    lower, upper = torch.full((1, 1, 3, 2), INF), torch.full((1, 1, 3, 2), -INF)
    assert ops.quest_scores(query, lower, upper, 0, torch.tensor([3])).isnan().all()


def test_quest_scores_of_a_zero_query_keep_empty_blocks_nan(ops):
    query, lower, upper = make(3)
    lower[:, :, 1], upper[:, :, 1] = INF, -INF
    scores = ops.quest_scores(torch.zeros_like(query), lower, upper, 0, torch.tensor([5, 5]))
    assert scores.isnan()[:, :, 1].all()
    assert (scores[:, :, [0, 2, 3, 4]] == 0).all()


@pytest.mark.parametrize("channel", [0, 63])
def test_quest_scores_of_a_nan_box_are_nan(ops, channel):
    """A NaN key: never selected, whichever channel it is in, and whatever the query says about it."""
    query, lower, upper = make(4)
    query[..., channel] = 0.0
    lower[0, 1, 2, channel] = upper[0, 1, 2, channel] = NAN
    scores = ops.quest_scores(query, lower, upper, 0, torch.tensor([5, 5]))
    assert scores.isnan().nonzero().tolist() == [[0, 1, 2]]


def test_quest_scores_without_blocks(ops):
    query, lower, upper = make(5, blocks=0)
    assert ops.quest_scores(query, lower, upper, 0, torch.tensor([0, 0])).shape == (2, 2, 0)


def test_quest_scores_does_not_modify_its_inputs(ops):
    inputs = [*make(6), torch.tensor([5, 3])]
    copies = [x.clone() for x in inputs]
    ops.quest_scores(*inputs[:3], 1, inputs[3])
    for now, then in zip(inputs, copies, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("dim", [1, 63, 64, 80, 128])
def test_quest_scores_bits_depend_on_one_block_and_its_query_alone(ops, assert_same_bits, dim, group, dtype):
    query, lower, upper = make(7, batch=3, heads=2, group=group, dim=dim, blocks=37, dtype=dtype)
    last = torch.tensor([37, 37, 37])
    scores = ops.quest_scores(query, lower, upper, 0, last)
    for b, h in itertools.product(range(3), range(2)):
        row = (slice(b, b + 1), slice(h, h + 1))
        assert_same_bits(ops.quest_scores(query[row], lower[row], upper[row], 0, last[:1]), scores[row])
    for n, m in ((0, 1), (36, 37), (5, 22), (8, 24)):
        part = ops.quest_scores(query, lower[:, :, n:m], upper[:, :, n:m], 0, last)
        assert_same_bits(part, scores[:, :, n:m])
        assert_same_bits(ops.quest_scores(query, lower, upper, n, torch.full((3,), m))[:, :, n:m], scores[:, :, n:m])
    assert_same_bits(
        ops.quest_scores(*(x.repeat(8, 1, 1, 1) for x in (query, lower, upper)), 0, last.repeat(8))[-3:], scores
    )


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 3e38])
def test_quest_scores_bits_do_not_depend_on_neighbours(ops, assert_same_bits, garbage):
    query, lower, upper = make(8, batch=3, blocks=9)
    last = torch.tensor([9, 9, 9])
    expected = ops.quest_scores(query, lower, upper, 0, last)[1, 1, 4]
    mine = torch.zeros(3, 2, 9, 1, dtype=torch.bool)
    mine[1, 1, 4] = True
    other_query = query.clone().fill_(garbage)
    other_query[1, 1] = query[1, 1]
    other_lower, other_upper = lower.where(mine, garbage), upper.where(mine, garbage)
    assert_same_bits(ops.quest_scores(other_query, other_lower, other_upper, 0, last)[1, 1, 4], expected)


def relayout(x, order):
    """The same values, their dimensions laid out in memory in another order."""
    return x.permute(order).contiguous().permute(np.argsort(order).tolist())


@pytest.mark.parametrize("which", ["query", "lower", "upper", "all"])
@pytest.mark.parametrize(("group", "dim"), [(4, 80), (16, 63), (7, 128)])
def test_quest_scores_bits_do_not_depend_on_memory_layout(ops, assert_same_bits, group, dim, which):
    inputs = dict(zip(("query", "lower", "upper"), make(9, group=group, dim=dim, heads=3, blocks=6), strict=True))
    last = torch.tensor([6, 6])
    expected = ops.quest_scores(*inputs.values(), 0, last)
    for order in itertools.permutations(range(4)):
        views = {name: relayout(x, order) if which in (name, "all") else x for name, x in inputs.items()}
        assert_same_bits(ops.quest_scores(*views.values(), 0, last), expected)


def test_quest_scores_takes_views(ops, assert_same_bits):
    query, lower, upper = make(10, heads=1, blocks=8)
    expected = ops.quest_scores(query, lower, upper, 0, torch.tensor([8, 6]))
    assert_same_bits(
        ops.quest_scores(
            torch.cat([query, query], dim=3)[..., :64],
            torch.cat([lower, upper], dim=3)[..., :64],
            upper.repeat_interleave(2, dim=2)[:, :, ::2],
            0,
            torch.tensor([8, 0, 6, 0])[::2],
        ),
        expected,
    )
    shared = lower.expand(-1, 3, -1, -1), upper.expand(-1, 3, -1, -1)
    scores = ops.quest_scores(query.expand(-1, 3, -1, -1), *shared, 0, torch.tensor([8, 6]))
    for head in range(3):
        assert_same_bits(scores[:, head : head + 1], expected)
