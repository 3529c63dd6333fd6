"""block_partials: each slot is attention over one block, the same bits in any list, batch and layout."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .drawn import FORMATS, INTERPRETED

PROPERTY = settings(deadline=None, derandomize=True, max_examples=8 if INTERPRETED else 50)
INF, NAN = float("inf"), float("nan")


def oracle(problem, blocks):
    """Slot by slot in float64: (output, peak, total, summed magnitudes of output), natural exponentials."""
    query, keys, values = (x.double().cpu().numpy() for x in (problem.query, problem.keys, problem.values))
    _, _, group, dim = query.shape
    output = np.zeros((*blocks.shape, group, dim))
    peak, total = np.full((*blocks.shape, group), -INF), np.zeros((*blocks.shape, group))
    magnitude = np.zeros_like(output)
    for (b, h, i), block in np.ndenumerate(blocks.cpu().numpy()):
        columns = problem.columns(b, int(block))
        if not columns:
            continue
        for g in range(group):
            logits = [problem.scale * float(np.dot(query[b, h, g], keys[b, h, t])) for t in columns]
            weights = np.array([math.exp(x - max(logits)) for x in logits])
            peak[b, h, i, g] = max(logits) / math.log(2)
            total[b, h, i, g] = math.fsum(weights)
            output[b, h, i, g] = weights @ values[b, h, columns]
            magnitude[b, h, i, g] = weights @ np.abs(values[b, h, columns])
    return output, peak, total, magnitude


def check(problem, blocks, assert_close):
    result = problem.partials(blocks)
    output, peak, total, magnitude = oracle(problem, blocks)
    assert np.isfinite(output).all()
    assert (np.isfinite(peak) == (total > 0)).all()
    assert all(field.dtype == torch.float32 for field in result)
    # the error of a logit is in units of the products that were summed
    products = (
        problem.query.double().norm(dim=-1)[:, :, None]
        * problem.keys.double().nan_to_num(0, 0, 0).norm(dim=-1).amax(dim=-1)[:, :, None, None]
    )
    assert_close(result.peak, peak, problem.dtype, (products * problem.scale * 2).cpu().numpy())
    assert_close(result.total, total, problem.dtype)
    assert_close(result.output, output, problem.dtype, magnitude)
    return result


def lists(problem, rng, length):
    """Random block lists: any order, duplicates, unused slots anywhere, blocks behind the end."""
    shape = (*problem.query.shape[:2], length)
    return torch.tensor(rng.integers(-1, problem.blocks + 2, shape), dtype=torch.int32)


@PROPERTY
@given(
    st.integers(0, 2**32),
    st.sampled_from(FORMATS),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([1, 2, 63, 64, 80, 128, 256]),
    st.sampled_from([1, 2, 3, 5, 16]),
    st.integers(0, 300),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.3, 0.95]),
)
def test_block_partials_equals_attention_over_each_block(
    ops, make_problem, assert_close, seed, dtype, block_size, dim, group, tokens, length, holes
):
    problem = make_problem(
        seed, block_size=block_size, dim=dim, group=group, tokens=tokens, holes=holes, dtype=dtype, heads=1
    )
    check(problem, lists(problem, np.random.default_rng(seed), length), assert_close)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_partials_over_whole_and_last_partial_block(ops, make_problem, assert_close, block_size, dtype):
    shape = {"block_size": block_size, "tokens": 2 * block_size + 3, "start": [0, 5]}
    problem = make_problem(0, **shape, holes=0.0, room=0, dtype=dtype)
    blocks = torch.arange(3, dtype=torch.int32).expand(2, 2, 3)
    result = check(problem, blocks, assert_close)
    assert len(problem.columns(0, 2)) == 3
    assert problem.columns(1, 2) == []
    assert (result.peak[1, :, 2] == -INF).all()


def test_block_partials_by_hand(ops, make_problem):
    """Two tokens with base-2 logits 3 and 1: weights 1 and 1/4."""
    problem = make_problem(0, batch=1, heads=1, group=1, dim=2, tokens=2, start=[0], holes=0.0, room=0)
    problem.query[:] = torch.tensor([1.0, 0.0]) / problem.scale * math.log(2)
    problem.keys[:] = torch.tensor([[3.0, 9.0], [1.0, -9.0]])
    problem.values[:] = torch.tensor([[8.0, 0.0], [4.0, 100.0]])
    output, peak, total = problem.partials(torch.zeros(1, 1, 1, dtype=torch.int32))
    assert output.flatten().tolist() == pytest.approx([9.0, 25.0], rel=1e-6)
    assert peak.item() == pytest.approx(3.0, rel=1e-6)
    assert total.item() == pytest.approx(1.25, rel=1e-6)


def test_block_partials_is_three_named_fp32_tensors(ops, make_problem):
    problem = make_problem(0, group=3, dim=7, dtype=torch.bfloat16)
    result = problem.partials(torch.zeros(2, 2, 4, dtype=torch.int32))
    assert isinstance(result, ops.Partials)
    assert result._fields == ("output", "peak", "total")
    assert [tuple(x.shape) for x in result] == [(2, 2, 4, 3, 7), (2, 2, 4, 3), (2, 2, 4, 3)]


@pytest.mark.parametrize("dtype", FORMATS)
def test_block_partials_unused_slots_are_empty(ops, make_problem, dtype):
    problem = make_problem(1, dtype=dtype)
    problem.valid[1] = False
    blocks = torch.full((2, 2, 5), -1, dtype=torch.int32)
    blocks[0, 0, 2], blocks[1] = 0, torch.arange(5)
    output, peak, total = problem.partials(blocks)
    used = torch.zeros(2, 2, 5, dtype=torch.bool)
    used[0, 0, 2] = True
    assert (output[~used] == 0).all()
    assert (peak[~used] == -INF).all()
    assert (total[~used] == 0).all()
    assert peak[used].isfinite().all()
    assert (total[used] >= 1).all()


@pytest.mark.parametrize("unused", [-1, -2, torch.iinfo(torch.int32).min])
def test_block_partials_any_negative_id_is_unused(ops, make_problem, assert_same_bits, unused):
    problem = make_problem(2)
    blocks = torch.full((2, 2, 3), -1, dtype=torch.int32)
    assert_same_bits(problem.partials(blocks.masked_fill(blocks < 0, unused)), problem.partials(blocks))


def test_block_partials_ids_behind_the_end_are_empty(ops, make_problem):
    problem = make_problem(3, tokens=100, block_size=16)
    far = [problem.blocks, problem.blocks + 5, 2**20, torch.iinfo(torch.int32).max]
    output, peak, total = problem.partials(torch.tensor(far, dtype=torch.int32).expand(2, 2, 4))
    assert (output == 0).all()
    assert (peak == -INF).all()
    assert (total == 0).all()


@pytest.mark.parametrize("tokens", [0, 40])
def test_block_partials_of_an_empty_list(ops, make_problem, tokens):
    problem = make_problem(4, tokens=tokens, dim=6, group=2, room=0)
    result = problem.partials(torch.zeros(2, 2, 0, dtype=torch.int32))
    assert [tuple(x.shape) for x in result] == [(2, 2, 0, 2, 6), (2, 2, 0, 2), (2, 2, 0, 2)]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 6e4])
def test_block_partials_never_sees_what_is_not_attended(ops, make_problem, assert_same_bits, garbage, dtype):
    problem = make_problem(5, dtype=dtype, tokens=90, room=20)
    blocks = torch.arange(problem.blocks, dtype=torch.int32).expand(2, 2, -1)
    expected = problem.partials(blocks)
    assert expected.output.isfinite().all()
    at = torch.arange(problem.keys.shape[2])
    ignored = ~problem.valid | (at >= problem.end) | (at < problem.start[:, None])
    problem.valid[:, problem.end :] = True
    problem.keys.masked_fill_(ignored[:, None, :, None], garbage)
    problem.values.masked_fill_(ignored[:, None, :, None], garbage)
    assert_same_bits(problem.partials(blocks), expected)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("holes", [0.0, 0.4])
@pytest.mark.parametrize("value", [INF, -INF])
def test_block_partials_infinite_value_is_summed_as_one(ops, make_problem, value, holes, dtype):
    """An attended infinity makes its channel infinite, not NaN, whether or not the block has holes or ends early."""
    problem = make_problem(16, tokens=42, start=[0, 0], holes=holes, dtype=dtype)
    blocks = torch.arange(3, dtype=torch.int32).expand(2, 2, -1)
    expected = problem.partials(blocks).output
    for b, block in itertools.product(range(2), range(3)):
        for column in problem.columns(b, block)[:1]:
            problem.values[b, :, column, 5] = value
    output = problem.partials(blocks).output
    assert (output[..., 5] == value).all()
    others = torch.arange(64) != 5
    assert torch.equal(output[..., others], expected[..., others])


def test_block_partials_end_hides_later_tokens(ops, make_problem, assert_close):
    problem = make_problem(6, tokens=100, holes=0.0)
    blocks = torch.arange(problem.blocks, dtype=torch.int32).expand(2, 2, -1)
    for end in (0, 1, 31, 32, 33, 100):
        shorter = replace(problem, end=end)
        check(shorter, blocks, assert_close)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_block_partials_of_huge_logits_do_not_overflow(ops, make_problem, size):
    """Integer base-2 logits, so the oracle is exact: the peak to the bit, weights powers of two."""
    rng = np.random.default_rng(0)
    problem = make_problem(7, batch=1, heads=1, group=2, dim=1, tokens=64, start=[0], holes=0.0, room=0)
    problem = replace(problem, scale=math.log(2))
    problem.query[:] = torch.tensor([1.0, -1.0])[:, None]
    logits = torch.tensor(rng.integers(-3, 4, 64) + rng.choice([-size, size], 64), dtype=torch.float32)
    problem.keys[0, 0, :, 0] = logits
    problem.values[:] = torch.tensor(rng.integers(-9, 9, (64, 1)), dtype=torch.float32)
    output, peak, total = problem.partials(torch.arange(4, dtype=torch.int32).view(1, 1, 4))
    for g, sign in enumerate((1, -1)):
        tiles = sign * logits.double().view(4, 16)
        weights = 2 ** (tiles - tiles.amax(dim=1, keepdim=True))
        assert torch.equal(peak[0, 0, :, g].double(), tiles.amax(dim=1))
        torch.testing.assert_close(total[0, 0, :, g].double(), weights.sum(dim=1), rtol=1e-5, atol=0)
        wanted = (weights * problem.values[0, 0, :, 0].double().view(4, 16)).sum(dim=1)
        torch.testing.assert_close(output[0, 0, :, g, 0].double(), wanted, rtol=1e-5, atol=1e-4)


def test_block_partials_does_not_modify_its_inputs(ops, make_problem):
    problem = make_problem(8)
    blocks = lists(problem, np.random.default_rng(8), 4)
    inputs = [problem.query, problem.keys, problem.values, problem.valid, problem.start, blocks]
    copies = [x.clone() for x in inputs]
    problem.partials(blocks)
    for now, then in zip(inputs, copies, strict=True):
        assert torch.equal(now.nan_to_num(), then.nan_to_num())


# ---- bits


@PROPERTY
@given(
    st.integers(0, 2**32),
    st.sampled_from(FORMATS),
    st.sampled_from([16, 64, 128]),
    st.sampled_from([1, 5, 63, 64, 80, 256]),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(1, 12),
)
def test_block_partials_slot_has_the_bits_of_its_block_alone(
    ops, make_problem, assert_same_bits, seed, dtype, block_size, dim, group, length
):
    rng = np.random.default_rng(seed)
    problem = make_problem(seed, block_size=block_size, dim=dim, group=group, tokens=3 * block_size - 2, dtype=dtype)
    blocks = lists(problem, rng, length)
    together = problem.partials(blocks)
    for b, h in itertools.product(range(2), range(2)):
        row = problem.alone(b, h)
        i = int(rng.integers(0, length))
        alone = row.partials(blocks[b : b + 1, h : h + 1, i : i + 1])
        assert_same_bits(alone, tuple(x[b : b + 1, h : h + 1, i : i + 1] for x in together))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("dim", "group"), [(1, 1), (63, 7), (80, 4), (128, 8), (256, 1)])
def test_block_partials_order_and_duplicates_change_no_bit(ops, make_problem, assert_same_bits, dim, group, dtype):
    problem = make_problem(9, dim=dim, group=group, tokens=200, dtype=dtype)
    once = torch.arange(problem.blocks, dtype=torch.int32)
    expected = problem.partials(once.expand(2, 2, -1))
    order = np.random.default_rng(9).integers(0, problem.blocks, 40)
    mixed = problem.partials(once[order].expand(2, 2, -1))
    assert_same_bits(mixed, tuple(x[:, :, order] for x in expected))


@pytest.mark.skipif(INTERPRETED, reason="numpy's matmul, which the interpreter takes, changes bits with its shape")
@pytest.mark.parametrize(("group", "fewer", "heads"), [(8, 1, (0, 3, 7)), (16, 9, (0, 7))])
def test_block_partials_query_head_has_the_bits_of_a_smaller_group(
    ops, make_problem, assert_same_bits, group, fewer, heads
):
    """Up to 8 query heads, and from 9 on: the products lie the other way round there."""
    problem = make_problem(10, group=group, dim=80)
    blocks = torch.arange(4, dtype=torch.int32).expand(2, 2, -1)
    together = problem.partials(blocks)
    for g in heads:
        alone = replace(problem, query=problem.query[:, :, g : g + fewer]).partials(blocks)
        assert_same_bits(alone, tuple(x[:, :, :, g : g + fewer] for x in together))


def test_block_partials_neighbours_may_hold_nan(ops, make_problem, assert_same_bits):
    problem = make_problem(11, batch=3, group=4)
    blocks = lists(problem, np.random.default_rng(11), 6)
    expected = tuple(x[1, 1] for x in problem.partials(blocks))
    for tensor in (problem.query, problem.keys, problem.values):
        mine = tensor[1, 1].clone()
        tensor.fill_(NAN)
        tensor[1, 1] = mine
    assert_same_bits(tuple(x[1, 1] for x in problem.partials(blocks)), expected)


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_block_partials_bits_do_not_depend_on_the_number_of_threads(ops, make_problem, assert_same_bits, threads):
    """Wide enough that a CPU reduction is split over threads."""
    problem = make_problem(12, batch=1, heads=1, group=1, dim=256, block_size=128, tokens=1024, holes=0.0)
    blocks = torch.arange(7, dtype=torch.int32).view(1, 1, -1)
    expected = problem.partials(blocks)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = problem.partials(blocks)
        alone = problem.partials(blocks[:, :, 3:4])
    finally:
        torch.set_num_threads(before)
    assert_same_bits(together, expected)
    assert_same_bits(alone, tuple(x[:, :, 3:4] for x in expected))


def relayout(x, order):
    """The same values, their dimensions laid out in memory in another order."""
    return x.permute(order).contiguous().permute(np.argsort(order).tolist())


@pytest.mark.parametrize("which", ["query", "keys", "values"])
@pytest.mark.parametrize(("dim", "group", "dtype"), [(80, 4, torch.float32), (63, 7, torch.bfloat16)])
def test_block_partials_bits_do_not_depend_on_memory_layout(
    ops, make_problem, assert_same_bits, dim, group, dtype, which
):
    problem = make_problem(13, dim=dim, group=group, dtype=dtype)
    blocks = lists(problem, np.random.default_rng(13), 6)
    expected = problem.partials(blocks)
    for order in itertools.permutations(range(4)):
        view = relayout(getattr(problem, which), order)
        assert_same_bits(replace(problem, **{which: view}).partials(blocks), expected)


def test_block_partials_takes_views(ops, make_problem, assert_same_bits):
    problem = make_problem(14, heads=1)
    blocks = lists(problem, np.random.default_rng(14), 5)
    expected = problem.partials(blocks)
    wide = torch.cat([problem.keys, problem.values], dim=3)
    views = {
        "keys": wide[..., :64],
        "values": wide[..., 64:],
        "valid": problem.valid.repeat_interleave(2, dim=1)[:, ::2],
        "start": problem.start.long().repeat_interleave(2)[::2],
        "query": problem.query.repeat_interleave(2, dim=2)[:, :, ::2],
    }
    every_other = blocks.repeat_interleave(2, dim=2)[..., ::2]
    assert_same_bits(replace(problem, **views).partials(every_other), expected)
    shared = {name: getattr(problem, name).expand(-1, 3, -1, -1) for name in ("query", "keys", "values")}
    heads = replace(problem, **shared).partials(blocks.expand(-1, 3, -1))
    for h in range(3):
        assert_same_bits(tuple(x[:, h : h + 1] for x in heads), tuple(expected))


def test_block_partials_with_every_token_in_one_batch_row_invalid(ops, make_problem):
    """A fully padded batch row gives finite output and disturbs nobody."""
    problem = make_problem(15, holes=0.0)
    problem.valid[0] = False
    problem.keys[0], problem.values[0] = NAN, NAN
    blocks = torch.arange(3, dtype=torch.int32).expand(2, 2, -1)
    output, peak, total = problem.partials(blocks)
    assert (output[0] == 0).all()
    assert (peak[0] == -INF).all()
    assert (total[0] == 0).all()
    assert output[1].isfinite().all()
    assert peak[1].isfinite().all()
