"""update_summaries: a block's box is a pure function of its valid keys, however and in whatever order they arrived."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .drawn import FORMATS, PROPERTY, UNTOUCHED, at, chunkings

INF, NAN = float("inf"), float("nan")


def make_keys(rng, batch, heads, columns, dim, dtype):
    keys = torch.tensor(rng.standard_normal((batch, heads, columns, dim)), dtype=dtype)
    keys[torch.tensor(rng.random(keys.shape) < 0.02)] = 0.0
    keys[torch.tensor(rng.random(keys.shape) < 0.02)] = -0.0
    return keys


def run(ops, keys, valid, start, block_size, chunks, poison=NAN):
    """Append in chunks to buffers that hold `poison` behind the newest token; (lower, upper) as they end up."""
    batch, heads, columns, dim = keys.shape
    shape = (batch, heads, columns // block_size + 2, dim)
    lower, upper = (torch.full(shape, UNTOUCHED, dtype=keys.dtype) for _ in range(2))
    buffer = torch.full_like(keys, poison)
    begin = 0
    for count in chunks:
        buffer[:, :, begin : begin + count] = keys[:, :, begin : begin + count]
        ops.update_summaries(buffer, valid, start, lower, upper, at(begin + count, buffer), count, block_size)
        begin += count
    return lower, upper


def oracle(keys, valid, start, block_size, end, blocks):
    """Token after token, widen the box of its block if it is valid. Blocks that no column reaches: untouched."""
    keys = keys.double().cpu().numpy()
    batch, heads, _, dim = keys.shape
    lower = np.full((batch, heads, blocks, dim), UNTOUCHED)
    upper = lower.copy()
    for b in range(batch):
        first = int(start[b])
        for column in range(first, end):
            block = (column - first) // block_size
            if (column - first) % block_size == 0:
                lower[b, :, block], upper[b, :, block] = INF, -INF
            if valid[b, column]:
                lower[b, :, block] = np.minimum(lower[b, :, block], keys[b, :, column])
                upper[b, :, block] = np.maximum(upper[b, :, block], keys[b, :, column])
    return lower, upper


def assert_equals_oracle(result, *arguments):
    for actual, expected in zip(result, oracle(*arguments, result[0].shape[2]), strict=True):
        np.testing.assert_array_equal(actual.double().cpu().numpy(), expected)


@PROPERTY
@given(st.data())
def test_update_summaries_in_any_chunks_equals_one_pass_and_numpy(ops, assert_same_bits, data):
    block_size = data.draw(st.sampled_from([16, 32, 64, 128]), label="block size")
    dim = data.draw(st.sampled_from([1, 63, 64, 80]), label="dim")
    dtype = data.draw(st.sampled_from(FORMATS))
    batch, heads = data.draw(st.integers(1, 3), label="batch"), data.draw(st.integers(1, 2), label="heads")
    total = data.draw(st.integers(1, 3 * block_size + 5), label="tokens")
    start = torch.tensor(
        data.draw(st.lists(st.integers(0, total + 3), min_size=batch, max_size=batch), label="start"),
        dtype=data.draw(st.sampled_from([torch.int32, torch.int64])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    columns = total + data.draw(st.integers(0, 20), label="room")
    keys = make_keys(rng, batch, heads, columns, dim, dtype)
    valid = torch.tensor(rng.random((batch, columns)) < data.draw(st.sampled_from([0.0, 0.1, 0.8, 1.0])))
    valid[:, total:] = True  # the bit of a column that isn't there yet says nothing
    keys[~valid[:, None].expand(-1, heads, -1)] = NAN
    before_start = torch.arange(columns) < start[:, None]
    keys[before_start[:, None].expand(-1, heads, -1)] = NAN
    valid[before_start] = True

    whole = run(ops, keys, valid, start, block_size, [total])
    assert_equals_oracle(whole, keys, valid, start, block_size, total)
    assert_same_bits(whole, run(ops, keys, valid, start, block_size, data.draw(chunkings(total)), poison=-INF))


@pytest.mark.parametrize("dtype", FORMATS)
def test_update_summaries_one_by_one_equals_one_pass(ops, assert_same_bits, dtype):
    rng = np.random.default_rng(0)
    keys = make_keys(rng, 2, 2, 70, 63, dtype)
    valid, start = torch.tensor(rng.random((2, 70)) < 0.7), torch.tensor([0, 19])
    keys[~valid[:, None].expand(-1, 2, -1)] = NAN
    whole = run(ops, keys, valid, start, 16, [70])
    assert_equals_oracle(whole, keys, valid, start, 16, 70)
    assert_same_bits(whole, run(ops, keys, valid, start, 16, [1] * 70))


@pytest.mark.parametrize("dtype", FORMATS)
def test_update_summaries_of_signed_zeros_have_the_same_bits_in_any_chunks(ops, assert_same_bits, dtype):
    """-0.0 and +0.0 are equal, so either may be the minimum: always the same one."""
    rng = np.random.default_rng(0)
    valid, start = torch.ones(1, 64, dtype=torch.bool), torch.tensor([0])
    for dim in (1, 7, 16, 33):
        keys = torch.tensor(rng.choice([0.0, -0.0], (1, 3, 64, dim)), dtype=dtype)
        whole = run(ops, keys, valid, start, 16, [64])
        for chunks in ([16] * 4, [1] * 64, [5, 40, 19]):
            assert_same_bits(whole, run(ops, keys, valid, start, 16, chunks))
        for head in range(3):
            alone = run(ops, keys[:, head : head + 1], valid, start, 16, [64])
            assert_same_bits(alone, tuple(box[:, head : head + 1] for box in whole))


@PROPERTY
@given(st.integers(0, 2**32), st.integers(1, 90), st.integers(0, 90), st.integers(0, 60), st.sampled_from([16, 32]))
def test_update_summaries_after_crop_and_append_equals_one_pass(ops, assert_same_bits, seed, total, keep, more, size):
    keep = min(keep, total)
    end = keep + more
    rng = np.random.default_rng(seed)
    old, new = make_keys(rng, 2, 1, 150, 5, torch.float32), make_keys(rng, 2, 1, 150, 5, torch.float32)
    valid, start = torch.tensor(rng.random((2, 150)) < 0.8), torch.tensor(rng.integers(0, 40, 2))

    lower, upper = run(ops, old, valid, start, size, [total])
    buffer = old.clone()
    buffer[:, :, keep:end] = new[:, :, keep:end]
    buffer[:, :, end:] = NAN  # also what the dropped tokens left behind
    valid[:, keep:] = torch.tensor(rng.random((2, 150 - keep)) < 0.8)
    ops.update_summaries(buffer, valid, start, lower, upper, at(keep + more, buffer), more, size)

    expected = run(ops, buffer, valid, start, size, [end])
    for b in range(2):
        # blocks of the kept part and those that the new columns reach; behind them the crop left old ones
        live = -(-max(0, end - int(start[b])) // size) if more else max(0, keep - int(start[b])) // size
        for actual, wanted in zip((lower, upper), expected, strict=True):
            assert_same_bits(actual[b, :, :live], wanted[b, :, :live])


def test_update_summaries_does_not_touch_other_blocks_or_its_inputs(ops):
    rng = np.random.default_rng(1)
    keys, valid = make_keys(rng, 2, 2, 128, 3, torch.float32), torch.ones(2, 128, dtype=torch.bool)
    start = torch.tensor([0, 8], dtype=torch.int32)
    lower, upper = torch.full((2, 2, 10, 3), UNTOUCHED), torch.full((2, 2, 10, 3), UNTOUCHED)
    copies = [x.clone() for x in (keys, valid, start)]
    ops.update_summaries(keys, valid, start, lower, upper, at(49, keys), 9, 16)  # columns 40 .. 48
    for box in (lower, upper):
        assert (box != UNTOUCHED).all(dim=-1).any(dim=1)[0].nonzero().flatten().tolist() == [2, 3]
        assert (box != UNTOUCHED).all(dim=-1).any(dim=1)[1].nonzero().flatten().tolist() == [2]
    for now, then in zip((keys, valid, start), copies, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("count", [0, -1])
def test_update_summaries_of_no_columns_changes_nothing(ops, count):
    keys, valid = torch.ones(1, 1, 32, 4), torch.ones(1, 32, dtype=torch.bool)
    lower, upper = torch.full((1, 1, 3, 4), UNTOUCHED), torch.full((1, 1, 3, 4), UNTOUCHED)
    ops.update_summaries(keys, valid, torch.tensor([0]), lower, upper, at(20 + count, keys), count, 16)
    assert (lower == UNTOUCHED).all()
    assert (upper == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_update_summaries_block_without_tokens_is_an_empty_box(ops, dtype):
    keys = torch.full((2, 2, 48, 7), NAN, dtype=dtype)
    valid = torch.zeros(2, 48, dtype=torch.bool)
    valid[1, 20], keys[1, :, 20] = True, 3.0
    lower, upper = run(ops, keys, valid, torch.tensor([0, 0]), 16, [48])
    assert (lower[0, :, :3] == INF).all()
    assert (upper[0, :, :3] == -INF).all()
    assert (lower[1, :, [0, 2]] == INF).all()
    assert (upper[1, :, [0, 2]] == -INF).all()
    assert (lower[1, :, 1] == 3.0).all()
    assert (upper[1, :, 1] == 3.0).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("nan", [NAN, -NAN])
def test_update_summaries_nan_key_makes_its_channel_nan(ops, nan, dtype):
    keys = torch.ones(1, 2, 32, 5, dtype=dtype)
    keys[0, 1, 18, 3] = nan
    lower, upper = run(ops, keys, torch.ones(1, 32, dtype=torch.bool), torch.tensor([0]), 16, [10, 22])
    for box in (lower, upper):
        assert box[:, :, :2].isnan().nonzero().tolist() == [[0, 1, 1, 3]]
        assert box[:, :, :2].nan_to_num(1.0).eq(1.0).all()


def test_update_summaries_infinite_keys_bound_the_box(ops):
    keys = torch.zeros(1, 1, 16, 2)
    keys[0, 0, 3, 0], keys[0, 0, 5, 1] = INF, -INF
    lower, upper = run(ops, keys, torch.ones(1, 16, dtype=torch.bool), torch.tensor([0]), 16, [16])
    assert lower[0, 0, 0].tolist() == [0.0, -INF]
    assert upper[0, 0, 0].tolist() == [INF, 0.0]


@pytest.mark.parametrize("begin", [0, 5, 37, 60])
def test_update_summaries_row_that_has_not_begun_is_left_alone(ops, begin):
    """A padded batch row's first real token may still be to come; a neighbour's columns are not its own."""
    keys, valid = torch.ones(3, 1, 96, 4), torch.ones(3, 96, dtype=torch.bool)
    start = torch.tensor([0, 64, 200])
    keys[1, :, :64], keys[2] = NAN, NAN
    lower, upper = torch.full((3, 1, 9, 4), UNTOUCHED), torch.full((3, 1, 9, 4), UNTOUCHED)
    ops.update_summaries(keys, valid, start, lower, upper, at(70, keys), 70 - begin, 16)
    assert (lower[1, 0, 0] == 1).all()
    assert (lower[1, 0, 1:] == UNTOUCHED).all()
    assert (lower[2] == UNTOUCHED).all()
    assert (lower[0, 0, begin // 16 : 5] == 1).all()
    assert (upper[0, 0, 5:] == UNTOUCHED).all()


def test_update_summaries_before_any_row_has_begun(ops):
    """A chunk of left-padded prompts may lie before every row's first real token."""
    keys, valid = torch.full((2, 2, 64, 4), NAN), torch.zeros(2, 64, dtype=torch.bool)
    lower, upper = torch.full((2, 2, 5, 4), UNTOUCHED), torch.full((2, 2, 5, 4), UNTOUCHED)
    ops.update_summaries(keys, valid, torch.tensor([40, 50]), lower, upper, at(32, keys), 32, 16)
    assert (lower == UNTOUCHED).all()
    assert (upper == UNTOUCHED).all()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_update_summaries_last_column_of_the_buffer(ops, block_size):
    """The last block sticks out of the buffer."""
    rng = np.random.default_rng(3)
    columns = 2 * block_size + 3
    keys, valid = make_keys(rng, 2, 1, columns, 4, torch.float32), torch.ones(2, columns, dtype=torch.bool)
    valid[0, -1], keys[0, :, -1] = False, NAN
    start = torch.tensor([1, 0])
    assert_equals_oracle(run(ops, keys, valid, start, block_size, [columns]), keys, valid, start, block_size, columns)


def test_update_summaries_takes_strided_keys_and_boxes(ops, assert_same_bits):
    rng = np.random.default_rng(4)
    keys, valid = make_keys(rng, 2, 3, 50, 8, torch.float32), torch.tensor(rng.random((2, 50)) < 0.8)
    start = torch.tensor([0, 7])
    expected = run(ops, keys, valid, start, 16, [50])
    layouts = {
        "tokens first": keys.transpose(1, 2).contiguous().transpose(1, 2),
        "channels last": keys.transpose(2, 3).contiguous().transpose(2, 3),
        "part of a buffer": torch.cat([keys, keys], dim=2)[:, :, :50],
        "every other channel": keys.repeat_interleave(2, dim=3)[..., ::2],
    }
    for name, view in layouts.items():
        assert not view.is_contiguous(), name
        wide = torch.full((2, 3, 5, 16), UNTOUCHED)
        lower, upper = wide[..., :8], wide[..., 8:]
        masks = valid.t().contiguous().t()
        ops.update_summaries(view, masks, start.repeat_interleave(2)[::2], lower, upper, at(50, view), 50, 16)
        assert_same_bits((lower.clone(), upper.clone()), expected)


def test_update_summaries_takes_expanded_heads(ops, assert_same_bits):
    keys = make_keys(np.random.default_rng(5), 2, 1, 40, 4, torch.float32).expand(-1, 3, -1, -1)
    valid, start = torch.ones(2, 40, dtype=torch.bool), torch.tensor([0, 0])
    boxes = []
    for view in (keys, keys.contiguous()):
        lower, upper = torch.full((2, 3, 4, 4), UNTOUCHED), torch.full((2, 3, 4, 4), UNTOUCHED)
        ops.update_summaries(view, valid, start, lower, upper, at(40, view), 40, 16)
        boxes.append((lower, upper))
    assert_same_bits(*boxes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_update_summaries_takes_any_integer_start(ops, assert_same_bits, dtype):
    """`start` is [B] integer: arithmetic on it must not happen in a narrow type."""
    rng = np.random.default_rng(6)
    keys, valid = make_keys(rng, 1, 1, 300, 4, torch.float32), torch.ones(1, 300, dtype=torch.bool)
    expected = run(ops, keys, valid, torch.tensor([100]), 16, [300])
    assert_same_bits(run(ops, keys, valid, torch.tensor([100], dtype=dtype), 16, [300]), expected)


def test_update_summaries_row_does_not_depend_on_its_batch(ops, assert_same_bits):
    rng = np.random.default_rng(8)
    keys, valid = make_keys(rng, 3, 2, 60, 9, torch.float32), torch.tensor(rng.random((3, 60)) < 0.6)
    start = torch.tensor([0, 21, 5])
    together = run(ops, keys, valid, start, 16, [25, 35])
    for b in range(3):
        row = slice(b, b + 1)
        alone = run(ops, keys[row], valid[row], start[row], 16, [60])
        assert_same_bits(alone, tuple(box[row] for box in together))
