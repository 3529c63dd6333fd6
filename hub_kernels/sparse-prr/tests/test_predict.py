"""normalise, ema_update, ema_predict: the formulas of the paper, one scalar at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)
INF, NAN = float("inf"), float("nan")
HUGE = 3.4e38


def scalars(limit, infinities=True):
    special = [NAN, 0.0, -0.0, 1.0, 1e-40, -1e-40] + ([INF, -INF] if infinities else [])
    return st.sampled_from(special) | st.floats(-limit, limit, width=32)


def normalised(row: list[float]) -> list[float]:
    """I = (raw - min) / (max - min) over the finite scores; +inf is 1, -inf is 0, NaN stays."""
    finite = [x for x in row if math.isfinite(x)]
    result = []
    for x in row:
        if math.isnan(x):
            result.append(NAN)
        elif math.isinf(x):
            result.append(1.0 if x > 0 else 0.0)
        elif max(finite) == min(finite):
            result.append(0.0)
        else:
            result.append((x - min(finite)) / (max(finite) - min(finite)))
    return result


class Block:
    """One block's level and trend, in Python floats."""

    def __init__(self, level=NAN, trend=0.0):
        self.level, self.trend = level, trend

    def predict(self, gamma):
        return self.level + gamma * self.trend

    def update(self, importance, alpha, beta):
        if math.isnan(importance):
            return
        if math.isnan(self.level):
            self.level, self.trend = importance, 0.0
            return
        self.trend = beta * (importance - self.level) + (1 - beta) * self.trend
        self.level = alpha * importance + (1 - alpha) * self.level


# ---- normalise


@PROPERTY
@given(st.lists(scalars(2.0**100), min_size=1, max_size=12))
def test_normalise_equals_a_scalar_loop(ops, assert_close, row):
    scores = torch.tensor([row], dtype=torch.float32)
    importance = ops.normalise(scores)
    assert importance.dtype == torch.float32
    assert importance.shape == scores.shape
    assert_close(importance, [normalised(scores[0].tolist())], torch.float32)
    seen = importance[~importance.isnan()]
    assert ((seen >= 0) & (seen <= 1)).all()
    assert torch.equal(importance.isnan(), scores.isnan())


@PROPERTY
@given(st.lists(scalars(2.0**100, infinities=False), min_size=2, max_size=12))
def test_normalise_reaches_both_ends_and_keeps_order(ops, row):
    scores = torch.tensor([row], dtype=torch.float32)
    kept = ~scores.isnan()
    raw, importance = scores[kept].tolist(), ops.normalise(scores)[kept].tolist()
    if raw and min(raw) < max(raw):
        assert min(importance) == 0.0
        assert max(importance) == 1.0
        assert {importance[i] for i, x in enumerate(raw) if x == min(raw)} == {0.0}
        assert {importance[i] for i, x in enumerate(raw) if x == max(raw)} == {1.0}
    ordered = [y for _, y in sorted(zip(raw, importance, strict=True))]
    assert ordered == sorted(ordered)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param([1.0, 3.0, 2.0], [0.0, 1.0, 0.5], id="plain"),
        pytest.param([-4.0, 0.0, NAN, 4.0], [0.0, 0.5, NAN, 1.0], id="nan-stays"),
        pytest.param([2.5, 2.5, 2.5], [0.0, 0.0, 0.0], id="all-equal"),
        pytest.param([0.0, -0.0], [0.0, 0.0], id="zeros"),
        pytest.param([7.0], [0.0], id="single"),
        pytest.param([NAN, 7.0, NAN], [NAN, 0.0, NAN], id="single-scored"),
        pytest.param([INF, 1.0, 3.0, -INF], [1.0, 0.0, 1.0, 0.0], id="infinities"),
        pytest.param([INF, 2.0, 2.0], [1.0, 0.0, 0.0], id="inf-over-equal"),
        pytest.param([INF], [1.0], id="only-inf"),
        pytest.param([-INF, NAN], [0.0, NAN], id="only-minus-inf"),
        pytest.param([INF, -INF], [1.0, 0.0], id="only-infinities"),
        pytest.param([NAN, NAN], [NAN, NAN], id="only-nan"),
        pytest.param([-NAN, 1.0, 2.0], [NAN, 0.0, 1.0], id="negative-nan"),
        pytest.param([0.0, 1e-45, 3e-45], [0.0, 0.5, 1.0], id="denormal"),
    ],
)
def test_normalise_case(ops, row, expected):
    np.testing.assert_array_equal(ops.normalise(torch.tensor([[row]])).tolist(), [[expected]])


@pytest.mark.parametrize("row", [[-HUGE, 0.0, HUGE], [-3e38, 3e38], [-2e38, 1e38, 2e38]])
def test_normalise_of_a_span_beyond_fp32_stays_in_range(ops, assert_close, row):
    """max - min may overflow although every score is finite."""
    scores = torch.tensor([row])
    assert_close(ops.normalise(scores), [normalised(scores[0].tolist())], torch.float32)


def test_normalise_without_blocks(ops):
    assert ops.normalise(torch.zeros(2, 3, 0)).shape == (2, 3, 0)


def test_normalise_treats_each_row_alone(ops, assert_same_bits):
    scores = torch.tensor(np.random.default_rng(0).standard_normal((3, 2, 37)), dtype=torch.float32)
    scores[0, 0, ::3], scores[1, 1], scores[2, 0, 4] = NAN, NAN, INF
    together, copy = ops.normalise(scores), scores.clone()
    for b in range(3):
        for h in range(2):
            assert_same_bits(ops.normalise(scores[b : b + 1, h : h + 1]), together[b : b + 1, h : h + 1])
            assert_same_bits(ops.normalise(scores[b, h]), together[b, h])
    padded = torch.cat([scores, torch.full((3, 2, 9), NAN)], dim=2)
    assert_same_bits(ops.normalise(padded)[..., :37].contiguous(), together)
    assert_same_bits(ops.normalise(scores.transpose(0, 2).contiguous().transpose(0, 2)), together)
    assert_same_bits(scores, copy)


# ---- ema_update and ema_predict


@PROPERTY
@given(st.data())
def test_ema_update_and_predict_equal_scalar_loops_over_steps(ops, assert_close, data):
    shape = tuple(data.draw(st.integers(1, 3)) for _ in range(3))
    unit = st.floats(0, 1, width=32)
    ema = torch.tensor(data.draw(st.lists(st.tuples(unit, unit, unit), min_size=shape[0], max_size=shape[0])))
    level, trend = torch.full(shape, NAN), torch.zeros(shape)
    blocks = {index: Block() for index in np.ndindex(shape)}
    cell = st.just(NAN) | unit
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        flat = data.draw(st.lists(cell, min_size=len(blocks), max_size=len(blocks)))
        importance = torch.tensor(flat, dtype=torch.float32).view(shape)
        copies = [x.clone() for x in (level, trend, importance, ema)]
        new_level, new_trend = ops.ema_update(level, trend, importance, ema)
        for now, then in zip((level, trend, importance, ema), copies, strict=True):
            assert torch.equal(now.nan_to_num(-1), then.nan_to_num(-1))
        level, trend = new_level, new_trend
        for index, block in blocks.items():
            alpha, beta, _ = ema[index[0]].tolist()
            block.update(float(importance[index]), alpha, beta)
        predicted = ops.ema_predict(level, trend, ema)
        for actual, wanted in (
            (level, lambda block, _: block.level),
            (trend, lambda block, _: block.trend),
            (predicted, lambda block, index: block.predict(float(ema[index[0], 2]))),
        ):
            expected = np.array([wanted(block, index) for index, block in blocks.items()]).reshape(shape)
            assert_close(actual, expected, torch.float32, 1.0)


def state(*values):
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1)


def test_ema_update_by_hand(ops):
    """Dyadic numbers, so exact. The trend moves by the old level."""
    ema = torch.tensor([[0.5, 0.25, 0.75]])
    level, trend = ops.ema_update(state(0.5, 0.25), state(0.5, -1.0), state(1.0, 0.25), ema)
    assert trend.flatten().tolist() == [0.25 * 0.5 + 0.75 * 0.5, -0.75]
    assert level.flatten().tolist() == [0.75, 0.25]
    assert ops.ema_predict(level, trend, ema).flatten().tolist() == [0.75 + 0.75 * 0.5, 0.25 - 0.75 * 0.75]


def test_ema_update_new_block_starts_at_its_first_importance(ops):
    level, trend = ops.ema_update(state(NAN, NAN), state(0.0, 9.0), state(0.75, NAN), torch.tensor([[0.5, 0.5, 0.5]]))
    np.testing.assert_array_equal(level.flatten().tolist(), [0.75, NAN])
    assert trend.flatten().tolist() == [0.0, 9.0]


@pytest.mark.parametrize("stale", [NAN, INF, 5.0])
def test_ema_update_new_block_forgets_any_trend(ops, stale):
    level, trend = ops.ema_update(state(NAN), state(stale), state(0.5), torch.tensor([[0.5, 0.5, 0.5]]))
    assert level.item() == 0.5
    assert trend.item() == 0.0


def test_ema_update_nan_importance_changes_no_bit(ops, assert_same_bits):
    rng = np.random.default_rng(1)
    level, trend, importance = (torch.tensor(rng.random((2, 3, 20)), dtype=torch.float32) for _ in range(3))
    level[0, 0, :5], importance[:, :, ::2] = NAN, NAN
    trend[0, 1, 2] = -0.0
    new = ops.ema_update(level, trend, importance, torch.tensor([[0.4, 0.1, 0.25], [1.0, 1.0, 0.0]]))
    assert_same_bits(tuple(x[:, :, ::2] for x in new), (level[:, :, ::2], trend[:, :, ::2]))
    assert (new[0][:, :, 1::2] != level[:, :, 1::2]).all()


def test_ema_coefficients_belong_to_their_batch_row(ops, assert_same_bits):
    rng = np.random.default_rng(2)
    level, trend, importance = (torch.tensor(rng.random((3, 2, 11)), dtype=torch.float32) for _ in range(3))
    ema = torch.tensor([[0.2, 0.1, 0.0], [0.8, 0.5, 0.75], [0.4, 0.1, 0.25]])
    together = (*ops.ema_update(level, trend, importance, ema), ops.ema_predict(level, trend, ema))
    for b in range(3):
        row = slice(b, b + 1)
        update = ops.ema_update(level[row], trend[row], importance[row], ema[row])
        alone = (*update, ops.ema_predict(level[row], trend[row], ema[row]))
        assert_same_bits(alone, tuple(x[row] for x in together))


def test_ema_extremes_of_the_coefficients(ops):
    level, trend, importance = state(0.25, 0.5), state(0.125, -0.5), state(1.0, 0.0)
    kept_level, kept_trend = ops.ema_update(level, trend, importance, torch.tensor([[0.0, 0.0, 0.0]]))
    assert torch.equal(kept_level, level)
    assert torch.equal(kept_trend, trend)
    latest, difference = ops.ema_update(level, trend, importance, torch.tensor([[1.0, 1.0, 0.0]]))
    assert torch.equal(latest, importance)
    assert torch.equal(difference, importance - level)
    assert torch.equal(ops.ema_predict(level, trend, torch.tensor([[0.5, 0.5, 0.0]])), level)


def test_ema_predict_is_nan_for_a_block_never_scored(ops):
    predicted = ops.ema_predict(state(NAN, 0.5), state(0.0, 0.25), torch.tensor([[0.4, 0.1, 0.5]]))
    np.testing.assert_array_equal(predicted.flatten().tolist(), [NAN, 0.625])


def test_ema_predict_a_steady_block_predicts_itself(ops):
    ema = torch.tensor([[0.4, 0.1, 0.25]])
    level, trend = state(NAN, NAN), state(0.0, 0.0)
    for _ in range(20):
        level, trend = ops.ema_update(level, trend, state(0.5, 1.0), ema)
    assert ops.ema_predict(level, trend, ema).flatten().tolist() == pytest.approx([0.5, 1.0], abs=1e-6)


def test_ema_without_blocks(ops):
    nothing, ema = torch.zeros(2, 3, 0), torch.zeros(2, 3)
    assert ops.ema_predict(nothing, nothing, ema).shape == (2, 3, 0)
    assert all(x.shape == (2, 3, 0) for x in ops.ema_update(nothing, nothing, nothing, ema))


# ---- ema_step


@pytest.mark.parametrize("blocks", [1, 37, 1500, 16385, 20000])
def test_ema_step_has_the_bits_of_its_three_parts(ops, assert_same_bits, blocks):
    rng = np.random.default_rng(blocks)
    scores, level, trend = (torch.tensor(rng.standard_normal((3, 2, blocks)), dtype=torch.float32) for _ in range(3))
    for tensor, values in ((scores, (NAN, INF, -INF)), (level, (NAN,))):
        for value in values:
            tensor[torch.tensor(rng.random(tensor.shape) < 0.1)] = value
    scores[0, 0], scores[0, 1], scores[1, 0, blocks // 2 :] = NAN, 3.0, 3e38
    ema, last = torch.tensor(rng.random((3, 3)), dtype=torch.float32), torch.tensor([blocks, 0, blocks // 2])
    step = ops.ema_step(scores, level, trend, ema, 1, last)
    importance = ops.normalise(scores)
    state = ops.ema_update(level, trend, importance, ema)
    at = torch.arange(blocks)
    outside = (at < 1) | (at >= last[:, None])
    expected = ops.ema_predict(*state, ema).masked_fill(outside[:, None], NAN)
    assert_same_bits(tuple(step), (*state, expected, importance))


def test_ema_step_takes_views(ops, assert_same_bits):
    rng = np.random.default_rng(0)
    wide = torch.tensor(rng.standard_normal((2, 40, 3)), dtype=torch.float32)
    scores, ema, last = wide.transpose(1, 2), torch.full((2, 3), 0.4), torch.tensor([40, 9])
    plain = ops.ema_step(scores.contiguous(), scores.contiguous(), scores.contiguous(), ema, 0, last)
    assert_same_bits(tuple(ops.ema_step(scores, scores, scores, ema, 0, last)), tuple(plain))
