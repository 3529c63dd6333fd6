"""compress_keys: windows of keys averaged into the block they end in, the same however the tokens arrived."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .drawn import FORMATS, PROPERTY, UNTOUCHED, at, chunkings

INF, NAN = float("inf"), float("nan")


def empty(keys, block_size, stride=16, extra=0):
    """(means, filled) full of garbage, with room for every column."""
    batch, heads, columns, dim = keys.shape
    shape = (batch, heads, -(-columns // block_size) + 1 + extra, block_size // stride)
    return torch.full((*shape, dim), UNTOUCHED, dtype=keys.dtype), torch.ones(shape, dtype=torch.bool)


def run(ops, keys, valid, start, block_size, chunks, window=32, stride=16):
    means, filled = empty(keys, block_size, stride)
    begin = 0
    for count in chunks:
        ops.compress_keys(
            keys, valid, start, means, filled, at(begin + count, keys), count, window=window, stride=stride
        )
        begin += count
    return means, filled


def oracle(keys, valid, start, block_size, end, window=32, stride=16):
    """{(row, head, block, slot): (mean, summed magnitudes)} of the windows that are complete and hold a token."""
    expected = {}
    for row, first in enumerate(start.tolist()):
        for begin in range(0, end - first - window + 1, stride):
            tokens = [t for t in range(first + begin, first + begin + window) if valid[row, t]]
            if not tokens:
                continue
            last = begin + window - 1
            block, slot = last // block_size, last % block_size // stride
            for head in range(keys.shape[1]):
                held = keys[row, head, tokens].double().cpu().numpy()
                expected[row, head, block, slot] = held.mean(axis=0), np.abs(held).mean(axis=0)
    return expected


def assert_equals_oracle(assert_close, result, keys, valid, start, block_size, end, **windows):
    means, filled = result
    expected = oracle(keys, valid, start, block_size, end, **windows)
    live = torch.zeros_like(filled)
    for row, first in enumerate(start.tolist()):
        live[row, :, : -(-max(0, end - first) // block_size)] = True
    assert {tuple(index) for index in (filled & live).nonzero().tolist()} == set(expected)
    # Half precision rounds the mean once more, when it is stored
    slack = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[means.dtype]
    for index, (mean, magnitude) in expected.items():
        assert_close(means[index], mean, means.dtype, magnitude + slack / 1e-5 * np.abs(mean))


@PROPERTY
@given(st.data())
def test_compress_keys_in_any_chunks_equals_one_pass_and_numpy(ops, assert_close, assert_same_bits, data):
    block_size = data.draw(st.sampled_from([16, 32, 64, 128]), label="block size")
    dim = data.draw(st.sampled_from([1, 63, 64, 80]), label="dim")
    dtype = data.draw(st.sampled_from(FORMATS))
    total = data.draw(st.integers(1, 3 * block_size + 40), label="tokens")
    start = torch.tensor(data.draw(st.lists(st.integers(0, total + 3), min_size=2, max_size=2), label="start"))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    columns = total + data.draw(st.integers(0, 20), label="room")
    keys = torch.tensor(rng.standard_normal((2, 2, columns, dim)), dtype=dtype)
    valid = torch.tensor(rng.random((2, columns)) < data.draw(st.sampled_from([0.0, 0.1, 0.8, 1.0])))
    ignored = ~valid | (torch.arange(columns) >= total) | (torch.arange(columns) < start[:, None])
    keys = keys.masked_fill(ignored[:, None, :, None], NAN)
    valid[torch.arange(columns) < start[:, None]] = True  # bits there say nothing
    valid[:, total:] = True
    whole = run(ops, keys, valid, start, block_size, [total])
    assert_equals_oracle(assert_close, whole, keys, valid, start, block_size, total)
    pieces = run(ops, keys, valid, start, block_size, data.draw(chunkings(total)))
    for row in range(2):
        live = -(-max(0, total - int(start[row])) // block_size)
        for one, other in zip(whole, pieces, strict=True):
            assert_same_bits(one[row, :, :live], other[row, :, :live])


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (32, 16), (48, 16), (32, 32), (64, 16)])
def test_compress_keys_of_other_windows(ops, assert_close, window, stride):
    rng = np.random.default_rng(0)
    keys = torch.tensor(rng.standard_normal((2, 2, 200, 8)), dtype=torch.float32)
    valid, start = torch.tensor(rng.random((2, 200)) < 0.8), torch.tensor([0, 23])
    shape = dict(window=window, stride=stride)
    result = run(ops, keys, valid, start, 64, [90, 110], **shape)
    assert_equals_oracle(assert_close, result, keys, valid, start, 64, 200, **shape)


@pytest.mark.parametrize("window", [0, 8, 24, -16])
def test_compress_keys_refuses_a_window_that_is_no_multiple_of_the_stride(ops, window):
    keys, valid = torch.zeros(1, 1, 40, 2), torch.ones(1, 40, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"window: expected a positive multiple of stride=16, got {window}"):
        ops.compress_keys(keys, valid, torch.tensor([0]), *empty(keys, 16), at(40, keys), 40, window=window, stride=16)


def test_compress_keys_of_a_block_never_hold_a_later_key(ops, assert_same_bits):
    """Whatever follows a block leaves its windows as they are: no window reaches past its end."""
    rng = np.random.default_rng(1)
    keys = torch.tensor(rng.standard_normal((1, 2, 256, 8)), dtype=torch.float32)
    valid, start = torch.ones(1, 256, dtype=torch.bool), torch.tensor([0])
    before = run(ops, keys, valid, start, 64, [128])
    keys[:, :, 128:] = 1e30
    after = run(ops, keys, valid, start, 64, [256])
    for one, other in zip(before, after, strict=True):
        assert_same_bits(one[:, :, :2], other[:, :, :2])


@PROPERTY
@given(st.integers(0, 2**32), st.integers(1, 200), st.integers(0, 200), st.integers(1, 90), st.sampled_from([16, 64]))
def test_compress_keys_after_crop_and_append_equals_one_pass(ops, assert_same_bits, seed, total, keep, more, size):
    keep = min(keep, total)
    rng = np.random.default_rng(seed)
    old, new = (torch.tensor(rng.standard_normal((2, 1, 300, 5)), dtype=torch.float32) for _ in range(2))
    valid, start = torch.tensor(rng.random((2, 300)) < 0.8), torch.tensor(rng.integers(0, 40, 2))
    means, filled = run(ops, old, valid, start, size, [total])
    buffer = old.clone()
    buffer[:, :, keep : keep + more] = new[:, :, keep : keep + more]
    buffer[:, :, keep + more :] = NAN
    valid[:, keep:] = torch.tensor(rng.random((2, 300 - keep)) < 0.8)
    ops.compress_keys(buffer, valid, start, means, filled, at(keep + more, buffer), more, window=32, stride=16)
    expected = run(ops, buffer, valid, start, size, [keep + more])
    for row in range(2):
        live = -(-max(0, keep + more - int(start[row])) // size)
        for actual, wanted in zip((means, filled), expected, strict=True):
            assert_same_bits(actual[row, :, :live], wanted[row, :, :live])


def test_compress_keys_does_not_touch_other_blocks_or_its_inputs(ops):
    keys, valid = torch.ones(2, 2, 256, 3), torch.ones(2, 256, dtype=torch.bool)
    start = torch.tensor([0, 8], dtype=torch.int32)
    means, filled = empty(keys, 32)
    copies = [x.clone() for x in (keys, valid, start)]
    ops.compress_keys(keys, valid, start, means, filled, at(73, keys), 9, window=32, stride=16)  # columns 64 .. 72
    touched = (means != UNTOUCHED).all(dim=-1).any(dim=-1).any(dim=1)
    assert [row.nonzero().flatten().tolist() for row in touched] == [[2], [1, 2]]
    for now, then in zip((keys, valid, start), copies, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("count", [0, -1])
def test_compress_keys_of_no_columns_changes_nothing(ops, count):
    keys, valid = torch.ones(1, 1, 64, 4), torch.ones(1, 64, dtype=torch.bool)
    means, filled = empty(keys, 16)
    ops.compress_keys(keys, valid, torch.tensor([0]), means, filled, at(20 + count, keys), count, window=32, stride=16)
    assert (means == UNTOUCHED).all()
    assert filled.all()


def test_compress_keys_row_that_has_not_begun_is_left_alone(ops):
    keys, valid = torch.full((2, 1, 128, 4), NAN), torch.ones(2, 128, dtype=torch.bool)
    means, filled = empty(keys, 16)
    ops.compress_keys(keys, valid, torch.tensor([100, 128]), means, filled, at(100, keys), 100, window=32, stride=16)
    assert (means == UNTOUCHED).all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_compress_keys_spreads_a_bad_key_over_its_windows_and_channel_only(ops, garbage):
    keys = torch.ones(1, 2, 128, 5)
    keys[0, 1, 40, 3] = garbage  # in windows 16..47 and 32..63: both end in block 0 of 64
    means, filled = run(ops, keys, torch.ones(1, 128, dtype=torch.bool), torch.tensor([0]), 64, [128])
    bad = ~means[:, :, :2].isfinite()
    assert bad.nonzero().tolist() == [[0, 1, 0, 2, 3], [0, 1, 0, 3, 3]]
    assert filled[:, :, :2].flatten(2).tolist() == [[[False, *[True] * 7]] * 2]
    assert means[:, :, :2][filled[:, :, :2]].nan_to_num(1, 1, 1).eq(1).all()


def test_compress_keys_takes_strided_keys_and_summaries(ops, assert_same_bits):
    rng = np.random.default_rng(4)
    keys = torch.tensor(rng.standard_normal((2, 3, 90, 8)), dtype=torch.float32)
    valid, start = torch.tensor(rng.random((2, 90)) < 0.8), torch.tensor([0, 7])
    expected = run(ops, keys, valid, start, 32, [90])
    for view in (
        keys.transpose(1, 2).contiguous().transpose(1, 2),
        keys.transpose(2, 3).contiguous().transpose(2, 3),
        torch.cat([keys, keys], dim=2)[:, :, :90],
        keys.repeat_interleave(2, dim=3)[..., ::2],
    ):
        assert not view.is_contiguous()
        means, filled = empty(keys, 32)
        wide = torch.cat([means, means], dim=-1)
        ops.compress_keys(view, valid, start, wide[..., 8:], filled, at(90, view), 90, window=32, stride=16)
        for row, first in enumerate(start.tolist()):
            live = -(-(90 - first) // 32)
            assert_same_bits(wide[row, :, :live, :, 8:], expected[0][row, :, :live])
            assert_same_bits(filled[row, :, :live], expected[1][row, :, :live])
        assert (wide[..., :8] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_compress_keys_takes_any_integer_start(ops, assert_same_bits, dtype):
    keys, valid = torch.rand(1, 1, 300, 4), torch.ones(1, 300, dtype=torch.bool)
    one, other = (run(ops, keys, valid, torch.tensor([100], dtype=t), 16, [300]) for t in (torch.int64, dtype))
    assert_same_bits(one, other)


def test_compress_keys_row_does_not_depend_on_its_batch(ops, assert_same_bits):
    rng = np.random.default_rng(8)
    keys = torch.tensor(rng.standard_normal((3, 2, 150, 9)), dtype=torch.float32)
    valid, start = torch.tensor(rng.random((3, 150)) < 0.6), torch.tensor([0, 21, 5])
    together = run(ops, keys, valid, start, 32, [70, 80])
    for row in range(3):
        one = slice(row, row + 1)
        alone = run(ops, keys[one], valid[one], start[one], 32, [150])
        live = -(-(150 - int(start[row])) // 32)
        for a, b in zip(alone, together, strict=True):
            assert_same_bits(a[:, :, :live], b[one, :, :live])
