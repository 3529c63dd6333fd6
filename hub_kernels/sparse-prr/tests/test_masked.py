"""masked_attention: each query over the columns that it sees, up to its own."""

from importlib import import_module

import numpy as np
import pytest
import torch

from .drawn import DTYPES, some

BOUND = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def problem(rng, batch, heads, count, columns, dims, dtype, share=0.3):
    dim, turned, wide = dims
    seen = torch.tensor(rng.random((batch, count, columns)) < share)
    return (
        some(rng, batch, heads, count, dim, dtype=dtype), some(rng, batch, heads, count, turned, dtype=dtype),
        some(rng, batch, heads, columns, dim, dtype=dtype), some(rng, batch, columns, turned, dtype=dtype),
        some(rng, batch, heads, columns, wide, dtype=dtype), seen,
    )  # fmt: skip


def oracle(nope, rope, keys, key_ropes, values, seen, begin, scale):
    """In float64, query by query."""
    parts = [part.cpu().double().numpy() for part in (nope, rope, keys, key_ropes, values)]
    nope, rope, keys, key_ropes, values = parts
    seen = seen.cpu().numpy()
    batch, heads, count, _ = nope.shape
    output = np.zeros((batch, count, heads, values.shape[3]))
    for b in range(batch):
        for i in range(count):
            columns = [t for t in np.flatnonzero(seen[b, i]) if t <= begin + i]
            if not columns:
                continue
            for h in range(heads):
                logits = scale * (keys[b, h, columns] @ nope[b, h, i] + key_ropes[b, columns] @ rope[b, h, i])
                weights = np.exp(logits - logits.max())
                output[b, i, h] = weights @ values[b, h, columns] / weights.sum()
    return output


@DTYPES
@pytest.mark.parametrize(
    ("batch", "heads", "count", "columns", "dims", "begin"),
    [(1, 2, 130, 200, (128, 64, 128), 70), (2, 3, 5, 33, (16, 8, 20), 28), (1, 1, 1, 1, (24, 24, 16), 0),
     (2, 1, 40, 300, (64, 16, 32), 10)],
)  # fmt: skip
def test_each_query_over_what_it_sees(ops, batch, heads, count, columns, dims, begin, dtype):
    given = problem(np.random.default_rng(0), batch, heads, count, columns, dims, dtype)
    output = ops.masked_attention(*given, begin, scale=0.2)
    assert output.dtype == dtype
    error = np.abs(output.cpu().double().numpy() - oracle(*given, begin, 0.2)).max()
    assert error <= BOUND[dtype]


def test_a_query_that_sees_nothing_gives_nothing(ops):
    given = problem(np.random.default_rng(1), 1, 2, 20, 40, (16, 16, 16), torch.float32)
    given[-1][:, 3] = False
    output = ops.masked_attention(*given, 20, scale=0.5)
    assert (output[:, 3] == 0).all()
    assert not (output[:, 4] == 0).any()


def test_later_columns_are_not_read(ops):
    """Whatever stands behind a query's own column, and whatever a mask says of it."""
    given = problem(np.random.default_rng(2), 1, 1, 4, 60, (16, 16, 16), torch.float32, share=1.0)
    before = ops.masked_attention(*given, 10, scale=0.5)
    given[2][:, :, 14:], given[4][:, :, 14:] = 9.0, 9.0
    assert torch.equal(ops.masked_attention(*given, 10, scale=0.5), before)


def test_views(ops):
    nope, rope, keys, key_ropes, values, seen = problem(
        np.random.default_rng(3), 2, 3, 10, 50, (32, 16, 32), torch.float32
    )
    expected = ops.masked_attention(nope, rope, keys, key_ropes, values, seen, 40, scale=0.3)
    turned = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (nope, rope, keys, values)]
    both = torch.cat([keys, values], dim=3)
    found = ops.masked_attention(turned[0], turned[1], both[..., :32], key_ropes, both[..., 32:], seen, 40, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kilobytes", [227, 163, 99, 64, 1])
def test_tiles_fit_the_shared_memory_that_there_is(ops, monkeypatch, kilobytes):
    """Hopper's, Ampere's, Ada's, Turing's, and too little for any, where the smallest are taken."""
    if not ops.dispatch.INTERPRETS:
        pytest.skip("the interpreter runs any tile; a GPU has its own memory")
    launch, kernel = (import_module(f"{ops.__name__}.triton_kernels.{name}") for name in ("launch", "masked"))
    chosen = []
    monkeypatch.setattr(launch, "shared_memory", lambda device: kilobytes * 2**10)
    first = launch.first_that_fits

    def noted(choices, bytes_of, device):
        chosen.append((first(choices, bytes_of, device), bytes_of))
        return chosen[-1][0]

    monkeypatch.setattr(kernel, "first_that_fits", noted)
    given = problem(np.random.default_rng(4), 1, 1, 130, 150, (192, 64, 256), torch.float16)
    output = ops.masked_attention(*given, 20, scale=0.1)
    assert np.abs(output.double().numpy() - oracle(*given, 20, 0.1)).max() <= BOUND[torch.float16]
    tile, bytes_of = chosen[0]
    assert bytes_of(*tile) < kilobytes * 2**10 or tile == kernel._HALF[-1]


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (1, torch.ones(1, 2, 3, 8), r"rope: expected \[B, H, Q, A\] = \[1, 2, 4, ..\], got \[1, 2, 3, 8\]"),
        (2, torch.ones(1, 2, 9, 17), r"keys: expected \[B, H, T, D\] = \[1, 2, .., 16\], got \[1, 2, 9, 17\]"),
        (3, torch.ones(1, 8, 8), r"key_ropes: expected \[B, T, A\] = \[1, 9, 8\], got \[1, 8, 8\]"),
        (4, torch.ones(1, 2, 9, 16).half(), "values: expected torch.float32, got torch.float16"),
        (5, torch.ones(1, 4, 9), "seen: expected torch.bool, got torch.float32"),
        (6, -1, "begin: expected an int >= 0, got -1"),
    ],
)
def test_what_is_refused(ops, at, value, message):
    given = [torch.ones(1, 2, 4, 16), torch.ones(1, 2, 4, 8), torch.ones(1, 2, 9, 16), torch.ones(1, 9, 8)]
    given += [torch.ones(1, 2, 9, 16), torch.ones(1, 4, 9, dtype=torch.bool), 5]
    given[at] = value
    with pytest.raises(ValueError, match=message):
        ops.masked_attention(*given, scale=1.0)
