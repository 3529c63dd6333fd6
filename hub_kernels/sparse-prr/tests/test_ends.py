"""Rows of one batch that end at different columns: each has the bits it has alone."""

import pytest
import torch

from .drawn import INTERPRETED

DTYPE, HEADS = (torch.float16, 1) if INTERPRETED else (torch.bfloat16, 2)
SIZE, BLOCKS, GROUP, DIM = 16, 7, 3, 64
COLUMNS = BLOCKS * SIZE + 3
NAN = float("nan")
# An ordinary row, a full one, none at all, one token, one that ends with a block, two blocks of holes
START = [0, 3, 9, 20, 5, 0]
END = [37, COLUMNS, 9, 21, 5 + 4 * SIZE, 2 * SIZE + 1]
COUNTS = (1, 20, COLUMNS)


@pytest.fixture
def states():
    """query, keys, values, valid, start, end; NaN where nothing is attended."""
    torch.manual_seed(0)
    batch = len(END)
    query, keys, values = (torch.randn(batch, HEADS, n, DIM).to(DTYPE) for n in (GROUP, COLUMNS, COLUMNS))
    start, end, t = torch.tensor(START), torch.tensor(END), torch.arange(COLUMNS)
    valid = torch.rand(batch, COLUMNS) > 0.2
    valid[5, : 2 * SIZE] = False
    ignored = ~valid | (t < start[:, None]) | (t >= end[:, None])
    keys, values = (x.masked_fill(ignored[:, None, :, None], NAN) for x in (keys, values))
    return query, keys, values, valid, start.int(), end


@pytest.fixture
def blocks():
    """int32 [B, H, K]: every block that a row has begun, -1 last."""
    there = -(-(torch.tensor(END) - torch.tensor(START)) // SIZE)
    n = torch.arange(BLOCKS)
    return n.where(n < there[:, None], -1).int()[:, None].expand(-1, HEADS, -1).contiguous()


def row(tensors, index):
    return tuple(x[index : index + 1] for x in tensors)


def check(assert_same_bits, batched, alone):
    """`alone(row)` gives what `batched` has in that row."""
    for index in range(len(END)):
        assert_same_bits(row(batched, index), tuple(alone(index)))


def test_block_partials_of_a_row_are_those_it_has_alone(ops, states, blocks, assert_same_bits):
    options = dict(scale=DIM**-0.5, block_size=SIZE)

    def run(*tensors):
        *inputs, end, listed = tensors
        return ops.block_partials(*inputs, listed, end, **options)

    found = run(*states, blocks)
    check(assert_same_bits, found, lambda index: run(*row((*states, blocks), index)))
    for index, (first, end) in enumerate(zip(START, END, strict=True)):
        begins = range(first, first + BLOCKS * SIZE, SIZE)
        seen = [bool(states[3][index, t : max(t, min(t + SIZE, end))].any()) for t in begins]
        assert (found.total[index, 0, :, 0] > 0).tolist() == seen


@pytest.mark.parametrize("predicted", ["nothing", "all", "every other one"])
def test_repair_merge_of_a_row_is_what_it_is_alone(ops, states, blocks, assert_same_bits, predicted):
    options = dict(scale=DIM**-0.5, block_size=SIZE)
    guess = {"nothing": blocks[:, :, :0], "all": blocks.flip(2), "every other one": blocks[:, :, ::2]}[predicted]

    def run(*tensors):
        *inputs, end, selected, predicted = tensors
        partials = ops.block_partials(*inputs, predicted, end, **options)
        return (ops.repair_merge(*inputs, selected, end, predicted, partials, **options),)

    found = run(*states, blocks, guess)
    check(assert_same_bits, found, lambda index: run(*row((*states, blocks, guess), index)))
    assert_same_bits(found, run(*states, blocks, blocks[:, :, :0]))
    assert found[0].isfinite().all()
    assert not found[0][2].any()


@pytest.mark.parametrize("count", COUNTS)
def test_summaries_of_a_row_are_those_it_has_alone(ops, states, assert_same_bits, count):
    _, keys, _, valid, start, end = states

    def run(*tensors):
        keys, valid, start, end = tensors
        summaries = [torch.full((len(keys), HEADS, BLOCKS + 1, DIM), 7.0, dtype=DTYPE) for _ in range(2)]
        ops.update_summaries(keys, valid, start, *summaries, end, count, SIZE)
        return tuple(summaries)

    found = run(keys, valid, start, end)
    check(assert_same_bits, found, lambda index: run(*row((keys, valid, start, end), index)))
    assert (found[0][2] == 7).all()  # a row without tokens has no block to bring up to date


@pytest.mark.parametrize("count", COUNTS)
def test_compressed_keys_of_a_row_are_those_it_has_alone(ops, states, assert_same_bits, count):
    _, keys, _, valid, start, end = states

    def run(*tensors):
        keys, valid, start, end = tensors
        means = torch.full((len(keys), HEADS, BLOCKS + 1, 2, DIM), 7.0, dtype=DTYPE)
        filled = torch.zeros((len(keys), HEADS, BLOCKS + 1, 2), dtype=torch.bool)
        ops.compress_keys(keys, valid, start, means, filled, end, count, window=16, stride=8)
        return means, filled

    found = run(keys, valid, start, end)
    check(assert_same_bits, found, lambda index: run(*row((keys, valid, start, end), index)))
    assert (found[0][2] == 7).all()
