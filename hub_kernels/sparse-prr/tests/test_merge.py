"""merge_partials, slots_of, repair_merge: the same bits for any prediction, and they are those of attention."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .drawn import FORMATS, INTERPRETED

PROPERTY = settings(deadline=None, derandomize=True, max_examples=8 if INTERPRETED else 50)
INF, NAN = float("inf"), float("nan")


def attention(problem, selected):
    """(output, summed magnitudes), float64: one softmax over the tokens of all selected blocks."""
    query, keys, values = (x.double().cpu().numpy() for x in (problem.query, problem.keys, problem.values))
    batch, heads, group, dim = query.shape
    output, magnitude = np.zeros((batch, heads, group, dim)), np.zeros((batch, heads, group, dim))
    for b, h in itertools.product(range(batch), range(heads)):
        columns = [t for block in selected[b, h].tolist() for t in problem.columns(b, block)]
        if not columns:
            continue
        for g in range(group):
            logits = [problem.scale * float(np.dot(query[b, h, g], keys[b, h, t])) for t in columns]
            weights = np.array([math.exp(x - max(logits)) for x in logits])
            weights /= math.fsum(weights)
            output[b, h, g] = weights @ values[b, h, columns]
            magnitude[b, h, g] = weights @ np.abs(values[b, h, columns])
    return output, magnitude


def padded(rows, shape, length) -> torch.Tensor:
    """Lists of block ids as int32 [B, H, length], -1 behind them."""
    return torch.tensor([row + [-1] * (length - len(row)) for row in rows], dtype=torch.int32).view(*shape, length)


def draw_lists(rng, problem, most):
    """For each batch row and head some distinct blocks, ascending."""
    rows = problem.query.shape[0] * problem.query.shape[1]
    return [sorted(rng.permutation(problem.blocks)[: rng.integers(0, most + 1)].tolist()) for _ in range(rows)]


def nothing(problem) -> torch.Tensor:
    return torch.full((*problem.query.shape[:2], 0), -1, dtype=torch.int32)


# ---- repair_merge


def predictions(rng, problem, selected):
    """Name -> lists, from nothing to everything."""
    everything = list(range(problem.blocks))
    return {
        "one unused slot": [[]] * len(selected),
        "exactly right": selected,
        "everything": [everything] * len(selected),
        "all wrong": [sorted(set(everything) - set(row)) for row in selected],
        "behind the end": [[problem.blocks, problem.blocks + 3]] * len(selected),
        "half": [row[::2] for row in selected],
        "random": draw_lists(rng, problem, problem.blocks),
        "random subset and wrong": [
            sorted({x for x in row if rng.random() < 0.5} | set(rng.permutation(everything)[:2].tolist()))
            for row in selected
        ],
        "shuffled": [rng.permutation(everything).tolist() for _ in selected],
        "other rows": selected[::-1],
    }


@PROPERTY
@given(
    st.integers(0, 2**32),
    st.sampled_from(FORMATS),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([1, 63, 64, 80]),
    st.sampled_from([1, 3, 8]),
    st.integers(1, 200),
    st.sampled_from([0.0, 0.3, 0.97]),
)
def test_repair_merge_has_the_same_bits_for_any_prediction(
    ops, make_problem, assert_close, assert_same_bits, seed, dtype, block_size, dim, group, tokens, holes
):
    rng = np.random.default_rng(seed)
    problem = make_problem(seed, dtype=dtype, block_size=block_size, dim=dim, group=group, tokens=tokens, holes=holes)
    lists = draw_lists(rng, problem, problem.blocks)
    longest = max(map(len, lists))
    selected = padded(lists, (2, 2), longest)
    serial = problem.repair_merge(selected, nothing(problem))
    expected, magnitude = attention(problem, selected)
    assert serial.dtype == torch.float32
    assert np.isfinite(expected).all()
    assert_close(serial, expected, dtype, magnitude)

    for name, rows in predictions(rng, problem, lists).items():
        length = max(map(len, rows)) + int(rng.integers(name == "one unused slot", 4))
        predicted = padded(rows, (2, 2), length)
        wider = padded(lists, (2, 2), longest + int(rng.integers(0, 6)))
        assert_same_bits(problem.repair_merge(wider, predicted), serial)


def test_repair_merge_needs_no_partials_of_nothing(ops, make_problem, assert_same_bits):
    problem = make_problem(1)
    selected = padded([[0, 2]] * 4, (2, 2), 3)
    inputs = (problem.query, problem.keys, problem.values, problem.valid, problem.start, selected, problem.ends)
    options = dict(scale=problem.scale, block_size=problem.block_size)
    output = ops.repair_merge(*inputs, selected[:, :, :0], None, **options)
    assert_same_bits(output, problem.repair_merge(selected, nothing(problem)))
    with pytest.raises(ValueError, match=r"partials: expected those of 3 predicted blocks, got None"):
        ops.repair_merge(*inputs, selected, None, **options)


@pytest.mark.parametrize("dtype", FORMATS)
def test_repair_merge_drops_wrong_partials_unread(ops, make_problem, assert_same_bits, dtype):
    """Blocks of P outside A are dropped, not multiplied by zero."""
    problem = make_problem(1, tokens=200, dtype=dtype)
    selected = padded([[0, 3, 7, 8]] * 4, (2, 2), 5)
    predicted = padded([[1, 3, 4, 8]] * 4, (2, 2), 6)
    serial = problem.repair_merge(selected, nothing(problem))
    partials = problem.partials(predicted)
    for field in partials:
        field[:, :, [0, 2, 4, 5]] = NAN
    assert_same_bits(problem.repair_merge(selected, predicted, partials), serial)


def test_repair_merge_takes_what_was_predicted(ops, make_problem):
    """Blocks of P inside A are not computed again: other partials for them show up in the result."""
    problem = make_problem(2, tokens=200)
    selected = padded([[0, 3, 7]] * 4, (2, 2), 3)
    predicted = padded([[3]] * 4, (2, 2), 1)
    partials = problem.partials(predicted)
    partials.output.fill_(0.0)
    partials.total.fill_(1.0)
    partials.peak.fill_(1e4)
    assert (problem.repair_merge(selected, predicted, partials) == 0).all()


def test_repair_merge_does_not_modify_its_inputs(ops, make_problem):
    problem = make_problem(3, tokens=200)
    selected, predicted = padded([[0, 3, 7]] * 4, (2, 2), 4), padded([[2, 3]] * 4, (2, 2), 3)
    partials = problem.partials(predicted)
    inputs = [selected, predicted, *partials, problem.query, problem.keys, problem.values, problem.valid]
    copies = [x.clone() for x in inputs]
    problem.repair_merge(selected, predicted, partials)
    for now, then in zip(inputs, copies, strict=True):
        assert torch.equal(now.nan_to_num(), then.nan_to_num())


def test_repair_merge_row_does_not_depend_on_its_batch(ops, make_problem, assert_same_bits):
    rng = np.random.default_rng(4)
    problem = make_problem(4, batch=3, tokens=260, group=4, dim=80)
    selected = padded(draw_lists(rng, problem, 9), (3, 2), 9)
    predicted = padded(draw_lists(rng, problem, 9), (3, 2), 9)
    together = problem.repair_merge(selected, predicted)
    for b, h in itertools.product(range(3), range(2)):
        row = (slice(b, b + 1), slice(h, h + 1))
        alone = problem.alone(b, h)
        used = selected[row][selected[row] >= 0].view(1, 1, -1)
        assert_same_bits(alone.repair_merge(used, nothing(alone)), together[row])


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("predicted", [0, 3])
def test_repair_merge_of_nothing_is_zero(ops, make_problem, length, predicted):
    problem = make_problem(5, dim=7)
    output = problem.repair_merge(padded([[]] * 4, (2, 2), length), padded([[0, 1][:predicted]] * 4, (2, 2), predicted))
    assert output.shape == problem.query.shape
    assert (output == 0).all()


def test_repair_merge_of_blocks_without_tokens_is_zero(ops, make_problem):
    problem = make_problem(6, holes=0.0)
    problem.valid[0] = False
    problem.keys[0], problem.values[0] = NAN, NAN
    selected = padded([[0, 1, 2]] * 4, (2, 2), 3)
    for rows in ([[]] * 4, [[0, 2]] * 4):
        output = problem.repair_merge(selected, padded(rows, (2, 2), 2))
        assert (output[0] == 0).all()
        assert output[1].isfinite().all()
        assert (output[1] != 0).any()


def test_repair_merge_over_all_blocks_equals_dense_attention(ops, make_problem, assert_close):
    problem = make_problem(7, batch=1, heads=2, group=4, tokens=150, start=[0], holes=0.0)
    dense = torch.nn.functional.scaled_dot_product_attention(
        problem.query.double(), problem.keys[:, :, :150].double(), problem.values[:, :, :150].double()
    )
    selected = torch.arange(10, dtype=torch.int32).expand(1, 2, -1)
    assert_close(problem.repair_merge(selected, nothing(problem)), dense.cpu().numpy(), torch.float32, 1.0)


def test_repair_merge_of_huge_logits_is_finite_and_the_same(ops, make_problem, assert_same_bits):
    problem = make_problem(8, tokens=200)
    problem.query.mul_(1e4)
    selected, predicted = padded([[0, 3, 7, 8]] * 4, (2, 2), 4), padded([[3, 7]] * 4, (2, 2), 2)
    serial = problem.repair_merge(selected, nothing(problem))
    assert serial.isfinite().all()
    assert_same_bits(problem.repair_merge(selected, predicted), serial)


def test_repair_merge_does_not_care_which_slots_were_predicted(ops, make_problem, assert_same_bits):
    """All 2^5 splits of the selection into predicted and repaired."""
    problem = make_problem(9, batch=1, heads=1, tokens=200, group=2)
    blocks = [0, 2, 5, 6, 11]
    selected = padded([blocks], (1, 1), 5)
    serial = problem.repair_merge(selected, nothing(problem))
    for chosen in itertools.product([False, True], repeat=5):
        rows = [[x for x, c in zip(blocks, chosen, strict=True) if c]]
        assert_same_bits(problem.repair_merge(selected, padded(rows, (1, 1), 6)), serial)


# ---- merge_partials


def random_partials(ops, seed, slots, spread=5.0, batch=2, heads=2, group=3, dim=7):
    rng = np.random.default_rng(seed)
    shape = (batch, heads, slots, group)
    peak = torch.tensor(rng.standard_normal(shape) * spread, dtype=torch.float32)
    total = torch.tensor(1 + 15 * rng.random(shape), dtype=torch.float32)
    output = torch.tensor(rng.standard_normal((*shape, dim)) * 4, dtype=torch.float32)
    empty = torch.tensor(rng.random(shape[:3]) < 0.2)
    return ops.Partials(
        output.masked_fill(empty[..., None, None], 0.0),
        peak.masked_fill(empty[..., None], -INF),
        total.masked_fill(empty[..., None], 0.0),
    )


def merged(partials):
    """(output, summed magnitudes) in float64, slot after slot."""
    output, peak, total = (x.double().cpu().numpy() for x in partials)
    batch, heads, slots, group, dim = output.shape
    result, magnitude = np.zeros((batch, heads, group, dim)), np.zeros((batch, heads, group, dim))
    for b, h, g in itertools.product(range(batch), range(heads), range(group)):
        used = [i for i in range(slots) if peak[b, h, i, g] > -INF]
        top = max((peak[b, h, i, g] for i in used), default=0.0)
        weights = [math.pow(2, peak[b, h, i, g] - top) for i in used]
        norm = math.fsum(w * total[b, h, i, g] for w, i in zip(weights, used, strict=True))
        for w, i in zip(weights, used, strict=True):
            result[b, h, g] += w * output[b, h, i, g] / norm
            magnitude[b, h, g] += w * np.abs(output[b, h, i, g]) / norm
    return result, magnitude


@PROPERTY
@given(st.integers(0, 2**32), st.integers(0, 70), st.sampled_from([0.0, 5.0, 200.0, 1e4]), st.sampled_from([1, 7, 64]))
def test_merge_partials_equals_the_weighted_mean(ops, assert_close, seed, slots, spread, dim):
    partials = random_partials(ops, seed, slots, spread, dim=dim)
    copies = [x.clone() for x in partials]
    output = ops.merge_partials(partials)
    assert output.dtype == torch.float32
    assert output.shape == (2, 2, 3, dim)
    expected, magnitude = merged(partials)
    assert_close(output, expected, torch.float32, magnitude)
    for now, then in zip(partials, copies, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 13, 33])
@pytest.mark.parametrize("padding", [1, 2, 3, 31, 64])
def test_merge_partials_padding_changes_no_bit(ops, assert_same_bits, slots, padding):
    partials = random_partials(ops, slots, slots)
    fills = ops.Partials(0.0, -INF, 0.0)
    wider = ops.Partials(
        *(
            torch.cat([x, torch.full((*x.shape[:2], padding, *x.shape[3:]), fill)], dim=2)
            for x, fill in zip(partials, fills, strict=True)
        )
    )
    assert_same_bits(ops.merge_partials(wider), ops.merge_partials(partials))


def test_merge_partials_of_one_slot_is_its_mean(ops, assert_same_bits):
    partials = random_partials(ops, 0, 1)
    used = partials.total > 0
    output = ops.merge_partials(partials)
    wanted = partials.output / partials.total[..., None]
    assert_same_bits(output[used[:, :, 0]], wanted[used])
    assert (output[~used[:, :, 0]] == 0).all()


def test_merge_partials_in_another_slot_order_is_close(ops, assert_close):
    partials = random_partials(ops, 1, 21)
    order = torch.tensor(np.random.default_rng(1).permutation(21))
    shuffled = ops.Partials(*(x[:, :, order] for x in partials))
    expected, magnitude = merged(partials)
    assert_close(ops.merge_partials(shuffled), expected, torch.float32, magnitude)


@pytest.mark.parametrize("slots", [0, 1, 5])
def test_merge_partials_of_empty_slots_is_zero(ops, slots):
    shape = (2, 1, slots, 3)
    empty = ops.Partials(torch.zeros(*shape, 4), torch.full(shape, -INF), torch.zeros(shape))
    output = ops.merge_partials(empty)
    assert output.shape == (2, 1, 3, 4)
    assert output.dtype == torch.float32
    assert (output == 0).all()


def test_merge_partials_one_empty_query_head_disturbs_nobody(ops, assert_same_bits):
    partials = random_partials(ops, 2, 6)
    expected = ops.merge_partials(partials)
    partials.output[0, 1], partials.peak[0, 1], partials.total[0, 1] = 0.0, -INF, 0.0
    output = ops.merge_partials(partials)
    assert (output[0, 1] == 0).all()
    expected[0, 1] = 0.0
    assert_same_bits(output, expected)


def test_merge_partials_bits_do_not_depend_on_batch_or_layout(ops, assert_same_bits):
    partials = random_partials(ops, 3, 13, dim=33)
    expected = ops.merge_partials(partials)
    for b, h in itertools.product(range(2), range(2)):
        row = (slice(b, b + 1), slice(h, h + 1))
        assert_same_bits(ops.merge_partials(ops.Partials(*(x[row] for x in partials))), expected[row])
    slots_first = ops.Partials(*(x.transpose(0, 2).contiguous().transpose(0, 2) for x in partials))
    assert_same_bits(ops.merge_partials(slots_first), expected)
    channels_first = partials._replace(output=partials.output.transpose(2, 4).contiguous().transpose(2, 4))
    assert_same_bits(ops.merge_partials(channels_first), expected)


# ---- slots_of


@PROPERTY
@given(st.data())
def test_slots_of_equals_list_index(ops, data):
    shape = (data.draw(st.integers(0, 2)), data.draw(st.integers(1, 2)))
    length, among = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))
    rows = shape[0] * shape[1]

    def draw(n):
        ids = st.integers(-2, 6) | st.sampled_from([torch.iinfo(torch.int32).max, torch.iinfo(torch.int32).min])
        return data.draw(st.lists(st.lists(ids, min_size=n, max_size=n), min_size=rows, max_size=rows))

    blocks, places = draw(length), draw(among)
    expected = [
        [there.index(x) if x >= 0 and x in there else -1 for x in row]
        for row, there in zip(blocks, places, strict=True)
    ]
    tensors = (torch.tensor(x, dtype=torch.int32).view(*shape, n) for x, n in ((blocks, length), (places, among)))
    slots = ops.slots_of(*tensors)
    assert slots.dtype == torch.int64
    assert slots.shape == (*shape, length)
    assert slots.view(rows, length).tolist() == expected


def test_slots_of_by_hand(ops):
    blocks = torch.tensor([[[2, 5, 9, -1]], [[0, 1, -1, -1]]], dtype=torch.int32)
    among = torch.tensor([[[0, 5, 7, 9, -1]], [[-1, -1, -1, -1, -1]]], dtype=torch.int32)
    assert ops.slots_of(blocks, among).tolist() == [[[-1, 1, 3, -1]], [[-1, -1, -1, -1]]]
