"""latent_append, index_append: norms and RoPE of one token, and its latent and keys where the device says."""

import os

import numpy as np
import pytest
import torch

CUT = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter cuts bfloat16, not rounds")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=CUT), torch.float16])
BOUND = {torch.float32: 3e-6, torch.bfloat16: 0.03, torch.float16: 0.004}
COLUMNS = 11


def some(rng, *shape, dtype=torch.float32):
    return torch.tensor(rng.standard_normal(shape), dtype=dtype)


def angles(rng, rows, rotated, dtype):
    angle = torch.tensor(rng.uniform(0, 6, (rows, rotated // 2)))
    return [torch.cat([turn, turn], 1).to(dtype) for turn in (angle.cos(), angle.sin())]


def wide(tensor):
    return tensor.cpu().double().numpy()


def turned(head, cos, sin, interleaved):
    """One head in float64, channel by channel; complex numbers that turn."""
    half = len(cos) // 2
    out = np.array(head, np.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turn = complex(head[a], head[b]) * complex(cos[i], sin[i])
        out[i], out[i + half] = turn.real, turn.imag
    return out


def near(found, wanted, dtype):
    assert found.dtype == dtype
    assert np.abs(wide(found) - wanted).max(initial=0.0) <= BOUND[dtype] * max(1.0, np.abs(wanted).max(initial=0.0))


def latent_problem(rng, batch, heads, channels, rotated, dtype, rows=None):
    latents, ropes = (some(rng, batch, COLUMNS, size, dtype=dtype) for size in (channels, rotated))
    return (
        some(rng, batch, heads, rotated, dtype=dtype),
        some(rng, batch, channels + rotated, dtype=dtype),
        *angles(rng, rows or batch, rotated, dtype),
        some(rng, channels, dtype=dtype),
        latents,
        ropes,
        torch.tensor(rng.integers(1, COLUMNS + 1, batch)),
    )


def index_problem(rng, batch, heads, dim, rotated, dtype, rows=None):
    return (
        some(rng, batch, heads * dim, dtype=dtype),
        some(rng, batch, dim, dtype=dtype) + 0.5,
        some(rng, batch, heads),
        *angles(rng, rows or batch, rotated, dtype),
        some(rng, dim, dtype=dtype),
        some(rng, dim, dtype=dtype),
        some(rng, batch, COLUMNS, dim, dtype=dtype),
        torch.tensor(rng.integers(1, COLUMNS + 1, batch)),
    )


@DTYPES
@pytest.mark.parametrize(
    ("batch", "heads", "channels", "rotated"), [(1, 16, 64, 16), (3, 9, 40, 6), (2, 1, 1, 2), (1, 0, 32, 8)]
)
def test_queries_turn_and_latent_and_key_are_written(ops, batch, heads, channels, rotated, dtype):
    rng = np.random.default_rng(0)
    given = latent_problem(rng, batch, heads, channels, rotated, dtype)
    queries, compressed, cos, sin, norm, latents, ropes, end = given
    untouched = latents.clone(), ropes.clone()
    output = ops.latent_append(*given, eps=1e-6)
    assert output.shape == (batch, heads, rotated)
    for row in range(batch):
        own, column = [wide(each[row]) for each in (cos, sin)], int(end[row]) - 1
        for head in range(heads):
            near(output[row, head], turned(wide(queries[row, head]), *own, True), dtype)
        latent = wide(compressed[row, :channels])
        near(latents[row, column], latent / np.sqrt((latent**2).mean() + 1e-6) * wide(norm), dtype)
        near(ropes[row, column], turned(wide(compressed[row, channels:]), *own, True), dtype)
        for before, now in zip(untouched, (latents, ropes), strict=True):
            before[row, column] = now[row, column]
            assert torch.equal(before[row], now[row])


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "dim", "rotated"), [(1, 16, 32, 16), (3, 9, 20, 6), (2, 1, 4, 4), (1, 3, 16, 0), (1, 0, 16, 8)]
)
def test_the_indexers_queries_turn_and_its_key_is_written(ops, batch, heads, dim, rotated, interleaved, dtype):
    rng = np.random.default_rng(1)
    given = index_problem(rng, batch, heads, dim, rotated, dtype)
    queries, key, weights, cos, sin, norm, bias, keys, end = given
    before = keys.clone()
    asked, shares = ops.index_append(*given, eps=1e-6, share=0.25, interleaved=interleaved)
    assert asked.shape == (batch, heads, dim)
    assert torch.equal(shares, weights * 0.25)
    for row in range(batch):
        own, column = [wide(each[row]) for each in (cos, sin)], int(end[row]) - 1
        for head in range(heads):
            near(asked[row, head], turned(wide(queries[row, head * dim : (head + 1) * dim]), *own, interleaved), dtype)
        x = wide(key[row])
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-6) * wide(norm) + wide(bias)
        near(keys[row, column], turned(x, *own, interleaved), dtype)
        before[row, column] = keys[row, column]
    assert torch.equal(before, keys)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_rounds_as_modules_do(ops, dtype, interleaved):
    """To the bit what transformers' functions give: a cache may hold keys of either."""
    rng = np.random.default_rng(2)
    given = index_problem(rng, 2, 3, 32, 16, dtype)
    queries, _, _, cos, sin, *_ = given
    x, c, s = queries.unflatten(1, (3, 32)), cos[:, None], sin[:, None]
    if interleaved:
        one, two, c, s = x[..., 0:16:2], x[..., 1:16:2], c[..., :8], s[..., :8]
        first = torch.cat([one * c - two * s, two * c + one * s], dim=-1)
    else:
        first = x[..., :16] * c + torch.cat([-x[..., 8:16], x[..., :8]], dim=-1) * s
    asked, _ = ops.index_append(*given, eps=1e-6, share=1.0, interleaved=interleaved)
    assert torch.equal(asked, torch.cat([first, x[..., 16:]], dim=-1))


def test_a_norm_rounds_twice(ops):
    rng = np.random.default_rng(3)
    given = latent_problem(rng, 2, 1, 64, 8, torch.float16)
    x, norm = given[1][:, :64].float(), given[4]
    expected = norm * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)).half()
    ops.latent_append(*given, eps=1e-6)
    found = given[5][torch.arange(2), given[7] - 1]
    close = (found - expected).abs() <= 2e-3 * expected.abs()  # a root that is rounded the other way: rarely
    assert (found == expected).float().mean() > 0.9
    assert close.all()


def test_views_one_angle_for_all_and_any_integer(ops):
    rng = np.random.default_rng(4)

    def strided(x):
        return x.repeat_interleave(2, dim=-1)[..., ::2]

    given = latent_problem(rng, 2, 9, 40, 8, torch.float32, rows=1)
    other = [*map(strided, given[:7]), given[7].int()]
    repeated = [*given[:2], *(each.repeat(2, 1) for each in given[2:4]), *given[4:]]
    assert torch.equal(ops.latent_append(*other, eps=1e-6), ops.latent_append(*repeated, eps=1e-6))
    assert torch.equal(other[5], given[5])
    assert torch.equal(other[6], given[6])
    given = index_problem(rng, 2, 9, 24, 8, torch.float32, rows=1)
    other = [*map(strided, given[:8]), given[8].int()]
    repeated = [*given[:3], *(each.repeat(2, 1) for each in given[3:5]), *given[5:]]
    how = dict(eps=1e-6, share=0.5, interleaved=False)
    for found, expected in zip(ops.index_append(*other, **how), ops.index_append(*repeated, **how), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(other[7], given[7])


def test_nan_stays_in_its_head_and_row(ops):
    rng = np.random.default_rng(5)
    given = index_problem(rng, 2, 3, 16, 8, torch.float32)
    given[0][0, 16], given[1][1, 3], given[2][1, 0] = float("nan"), float("nan"), float("inf")
    asked, shares = ops.index_append(*given, eps=1e-6, share=1.0, interleaved=True)
    assert asked.isnan().any(2).tolist() == [[False, True, False], [False] * 3]
    assert shares.isinf().sum() == 1
    columns = given[8] - 1
    assert given[7][torch.arange(2), columns].isnan().all(1).tolist() == [False, True]


def test_no_row(ops):
    rng = np.random.default_rng(6)
    assert ops.latent_append(*latent_problem(rng, 0, 2, 16, 8, torch.float32), eps=0.0).shape == (0, 2, 8)
    given = index_problem(rng, 0, 2, 16, 8, torch.float32)
    assert ops.index_append(*given, eps=0.0, share=1.0, interleaved=True)[0].shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.ones(1, 2, 6), r"queries: expected \[B, H, A\] = \[1, .., 8\], got \[1, 2, 6\]"),
        (0, torch.ones(1, 2, 8).half(), "queries: expected torch.float32, got torch.float16"),
        (1, torch.ones(1, 16), r"compressed: expected \[B, C \+ A\] = \[1, 24\], got \[1, 16\]"),
        (2, torch.ones(1, 6), r"sin: expected \[B, A\] = \[1, 6\], got \[1, 8\]"),
        (2, torch.ones(2, 8), r"cos: expected \[B, A\] = \[1, ..\], got \[2, 8\]"),
        (4, torch.ones(8), r"norm: expected \[C\] = \[16\], got \[8\]"),
        (6, torch.ones(1, 10, 8), r"ropes: expected \[B, T, A\] = \[1, 11, ..\], got \[1, 10, 8\]"),
        (7, torch.ones(1), "end: expected torch.int8 or .*, got torch.float32"),
        (5, None, "latents: expected a tensor, got NoneType"),
    ],
)
def test_latents_that_are_refused(ops, at, value, message):
    given = list(latent_problem(np.random.default_rng(7), 1, 2, 16, 8, torch.float32))
    before, given[at] = given[5].clone(), value
    with pytest.raises(ValueError, match=message):
        ops.latent_append(*given, eps=0.0)
    if given[5] is not None:
        assert torch.equal(given[5], before)


@pytest.mark.parametrize("channels", [6, 7])
def test_angles_of_other_channels(ops, channels):
    given = list(latent_problem(np.random.default_rng(7), 1, 2, 16, 8, torch.float32))
    given[2] = given[3] = torch.ones(1, channels)
    with pytest.raises(ValueError, match=rf"cos: expected .* channels, got {channels}"):
        ops.latent_append(*given, eps=0.0)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.ones(1, 31), r"queries: expected \[B, I \* E\] = \[1, 32\], got \[1, 31\]"),
        (1, torch.ones(1, 8), r"key: expected \[B, E\] = \[1, 16\], got \[1, 8\]"),
        (2, torch.ones(1, 2).int(), "weights: expected torch.float32 or .*, got torch.int32"),
        (3, torch.ones(1, 18), r"sin: expected \[B, A\] = \[1, 18\], got \[1, 8\]"),
        (5, torch.ones(16).half(), "norm: expected torch.float32, got torch.float16"),
        (6, None, "bias: expected a tensor, got NoneType"),
        (7, torch.ones(1, 16), r"keys: expected \[B, T, E\], got \[1, 16\]"),
        (8, torch.tensor([1, 2]), r"end: expected \[B\] = \[1\], got \[2\]"),
    ],
)
def test_index_keys_that_are_refused(ops, at, value, message):
    given = list(index_problem(np.random.default_rng(8), 1, 2, 16, 8, torch.float32))
    given[at] = value
    with pytest.raises(ValueError, match=message):
        ops.index_append(*given, eps=0.0, share=1.0, interleaved=True)
