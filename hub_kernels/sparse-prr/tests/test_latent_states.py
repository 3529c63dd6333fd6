"""latent_append, index_append, index_queries: norms and RoPE of one token, and its latent and keys where the device
says."""

import numpy as np
import pytest
import torch

from .drawn import DTYPES, angles, some, wide

BOUND = {torch.float32: 3e-6, torch.bfloat16: 0.03, torch.float16: 0.004}
COLUMNS = 11


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


def latent_problem(rng, batch, channels, rotated, dtype, rows=None):
    latents, ropes = (some(rng, batch, COLUMNS, size, dtype=dtype) for size in (channels, rotated))
    return (
        some(rng, batch, channels + rotated, dtype=dtype),
        *angles(rng, rows or batch, rotated, dtype),
        some(rng, channels, dtype=dtype),
        latents,
        ropes,
        torch.tensor(rng.integers(1, COLUMNS + 1, batch)),
    )


def key_problem(rng, batch, dim, rotated, dtype, rows=None):
    return (
        some(rng, batch, dim, dtype=dtype) + 0.5,
        *angles(rng, rows or batch, rotated, dtype),
        some(rng, dim, dtype=dtype),
        some(rng, dim, dtype=dtype),
        some(rng, batch, COLUMNS, dim, dtype=dtype),
        torch.tensor(rng.integers(1, COLUMNS + 1, batch)),
    )


def query_problem(rng, batch, heads, dim, rotated, dtype, rows=None):
    return (
        some(rng, batch, heads, dim, dtype=dtype),
        some(rng, batch, heads),
        *angles(rng, rows or batch, rotated, dtype),
    )


@DTYPES
@pytest.mark.parametrize(("batch", "channels", "rotated"), [(1, 64, 16), (3, 40, 6), (2, 1, 2)])
def test_latent_and_key_are_written(ops, batch, channels, rotated, dtype):
    rng = np.random.default_rng(0)
    given = latent_problem(rng, batch, channels, rotated, dtype)
    compressed, cos, sin, norm, latents, ropes, end = given
    untouched = latents.clone(), ropes.clone()
    assert ops.latent_append(*given, eps=1e-6) is None
    for row in range(batch):
        own, column = [wide(each[row]) for each in (cos, sin)], int(end[row]) - 1
        latent = wide(compressed[row, :channels])
        near(latents[row, column], latent / np.sqrt((latent**2).mean() + 1e-6) * wide(norm), dtype)
        near(ropes[row, column], turned(wide(compressed[row, channels:]), *own, True), dtype)
        for before, now in zip(untouched, (latents, ropes), strict=True):
            before[row, column] = now[row, column]
            assert torch.equal(before[row], now[row])


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("batch", "dim", "rotated"), [(1, 32, 16), (3, 20, 6), (2, 4, 4), (1, 16, 0)])
def test_the_indexers_key_is_written(ops, batch, dim, rotated, interleaved, dtype):
    rng = np.random.default_rng(1)
    given = key_problem(rng, batch, dim, rotated, dtype)
    key, cos, sin, norm, bias, keys, end = given
    before = keys.clone()
    assert ops.index_append(*given, eps=1e-6, interleaved=interleaved) is None
    for row in range(batch):
        own, column = [wide(each[row]) for each in (cos, sin)], int(end[row]) - 1
        x = wide(key[row])
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-6) * wide(norm) + wide(bias)
        near(keys[row, column], turned(x, *own, interleaved), dtype)
        before[row, column] = keys[row, column]
    assert torch.equal(before, keys)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "dim", "rotated"), [(1, 16, 32, 16), (3, 9, 20, 6), (2, 1, 4, 4), (1, 3, 16, 0), (1, 0, 16, 8)]
)
def test_the_indexers_queries_turn(ops, batch, heads, dim, rotated, interleaved, dtype):
    rng = np.random.default_rng(1)
    given = query_problem(rng, batch, heads, dim, rotated, dtype)
    queries, weights, cos, sin = given
    asked, shares = ops.index_queries(*given, share=0.25, interleaved=interleaved)
    assert asked.shape == (batch, heads, dim)
    assert torch.equal(shares, weights * 0.25)
    for row in range(batch):
        own = [wide(each[row]) for each in (cos, sin)]
        for head in range(heads):
            near(asked[row, head], turned(wide(queries[row, head]), *own, interleaved), dtype)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_rounds_as_modules_do(ops, dtype, interleaved):
    """To the bit what transformers' functions give: a cache may hold keys of either."""
    rng = np.random.default_rng(2)
    given = query_problem(rng, 2, 3, 32, 16, dtype)
    x, _, cos, sin = given
    c, s = cos[:, None], sin[:, None]
    if interleaved:
        one, two, c, s = x[..., 0:16:2], x[..., 1:16:2], c[..., :8], s[..., :8]
        first = torch.cat([one * c - two * s, two * c + one * s], dim=-1)
    else:
        first = x[..., :16] * c + torch.cat([-x[..., 8:16], x[..., :8]], dim=-1) * s
    asked, _ = ops.index_queries(*given, share=1.0, interleaved=interleaved)
    assert torch.equal(asked, torch.cat([first, x[..., 16:]], dim=-1))


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_key_turns_as_queries_do(ops, dtype, interleaved):
    """What a layer norm without a part in it gives is what a query of these channels gives."""
    rng = np.random.default_rng(2)
    key, cos, sin, _, _, keys, end = key_problem(rng, 2, 32, 16, dtype)
    zeros = torch.zeros_like(key[0])
    bias = some(rng, 32, dtype=dtype)  # all that is left behind a weight of 0
    ops.index_append(key, cos, sin, zeros, bias, keys, end, eps=1e-6, interleaved=interleaved)
    queries = bias.expand(2, 1, 32)
    asked, _ = ops.index_queries(queries, torch.ones(2, 1), cos, sin, share=1.0, interleaved=interleaved)
    assert torch.equal(keys[torch.arange(2), end - 1], asked[:, 0])


def test_a_norm_rounds_twice(ops):
    rng = np.random.default_rng(3)
    given = latent_problem(rng, 2, 64, 8, torch.float16)
    x, norm = given[0][:, :64].float(), given[3]
    expected = norm * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)).half()
    ops.latent_append(*given, eps=1e-6)
    found = given[4][torch.arange(2), given[6] - 1]
    close = (found - expected).abs() <= 2e-3 * expected.abs()  # a root that is rounded the other way: rarely
    assert (found == expected).float().mean() > 0.9
    assert close.all()


def strided(x):
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def test_views_one_angle_for_all_and_any_integer(ops):
    rng = np.random.default_rng(4)  # halves: torch sums fp32 views in another order
    for given, op, at, how in (
        (latent_problem(rng, 2, 40, 8, torch.float16, rows=1), ops.latent_append, 1, dict(eps=1e-6)),
        (key_problem(rng, 2, 24, 8, torch.float16, rows=1), ops.index_append, 1, dict(eps=1e-6, interleaved=False)),
    ):
        other = [*map(strided, given[:-1]), given[-1].int()]
        repeated = [*given[:at], *(each.repeat(2, 1) for each in given[at : at + 2]), *given[at + 2 :]]
        op(*other, **how)
        op(*repeated, **how)
        for found, expected in zip(other[-3:-1], given[-3:-1], strict=True):
            assert torch.equal(found, expected)
    given = query_problem(rng, 2, 9, 24, 8, torch.float16, rows=1)
    repeated = [*given[:2], *(each.repeat(2, 1) for each in given[2:])]
    how = dict(share=0.5, interleaved=False)
    for found, expected in zip(
        ops.index_queries(*map(strided, given), **how), ops.index_queries(*repeated, **how), strict=True
    ):
        assert torch.equal(found, expected)


def test_nan_stays_in_its_head_and_row(ops):
    rng = np.random.default_rng(5)
    given = key_problem(rng, 2, 16, 8, torch.float32)
    given[0][1, 3] = float("nan")
    ops.index_append(*given, eps=1e-6, interleaved=True)
    assert given[5][torch.arange(2), given[6] - 1].isnan().all(1).tolist() == [False, True]
    given = query_problem(rng, 2, 3, 16, 8, torch.float32)
    given[0][0, 1, 0], given[1][1, 0] = float("nan"), float("inf")
    asked, shares = ops.index_queries(*given, share=1.0, interleaved=True)
    assert asked.isnan().any(2).tolist() == [[False, True, False], [False] * 3]
    assert shares.isinf().sum() == 1


def test_no_row(ops):
    rng = np.random.default_rng(6)
    assert ops.latent_append(*latent_problem(rng, 0, 16, 8, torch.float32), eps=0.0) is None
    assert ops.index_append(*key_problem(rng, 0, 16, 8, torch.float32), eps=0.0, interleaved=True) is None
    given = query_problem(rng, 0, 2, 16, 8, torch.float32)
    assert ops.index_queries(*given, share=1.0, interleaved=True)[0].shape == (0, 2, 16)


def test_heads_without_a_channel_have_weights(ops):
    given = query_problem(np.random.default_rng(6), 2, 3, 0, 0, torch.float32)
    asked, shares = ops.index_queries(*given, share=2.0, interleaved=True)
    assert asked.shape == (2, 3, 0)
    assert torch.equal(shares, given[1] * 2)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.ones(1, 16), r"compressed: expected \[B, C \+ A\] = \[1, 24\], got \[1, 16\]"),
        (0, torch.ones(1, 24).half(), "compressed: expected torch.float32, got torch.float16"),
        (1, torch.ones(1, 6), r"sin: expected \[B, A\] = \[1, 6\], got \[1, 8\]"),
        (1, torch.ones(2, 8), r"cos: expected \[B, A\] = \[1, ..\], got \[2, 8\]"),
        (3, torch.ones(8), r"norm: expected \[C\] = \[16\], got \[8\]"),
        (5, torch.ones(1, 10, 8), r"ropes: expected \[B, T, A\] = \[1, 11, ..\], got \[1, 10, 8\]"),
        (6, torch.ones(1), "end: expected torch.int8 or .*, got torch.float32"),
        (4, None, "latents: expected a tensor, got NoneType"),
        (4, torch.ones(1, 0, 16), "latents: expected T >= 1 columns, got 0"),
    ],
)
def test_latents_that_are_refused(ops, at, value, message):
    given = list(latent_problem(np.random.default_rng(7), 1, 16, 8, torch.float32))
    before, given[at] = given[4].clone(), value
    with pytest.raises(ValueError, match=message):
        ops.latent_append(*given, eps=0.0)
    if at != 4:
        assert torch.equal(given[4], before)


@pytest.mark.parametrize("channels", [6, 7])
def test_angles_of_other_channels(ops, channels):
    given = list(latent_problem(np.random.default_rng(7), 1, 16, 8, torch.float32))
    given[1] = given[2] = torch.ones(1, channels)
    with pytest.raises(ValueError, match=rf"cos: expected .* channels, got {channels}"):
        ops.latent_append(*given, eps=0.0)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.ones(1, 8), r"key: expected \[B, E\] = \[1, 16\], got \[1, 8\]"),
        (1, torch.ones(1, 18), r"sin: expected \[B, A\] = \[1, 18\], got \[1, 8\]"),
        (3, torch.ones(16).half(), "norm: expected torch.float32, got torch.float16"),
        (4, None, "bias: expected a tensor, got NoneType"),
        (5, torch.ones(1, 16), r"keys: expected \[B, T, E\], got \[1, 16\]"),
        (5, torch.ones(1, 0, 16), "keys: expected T >= 1 columns, got 0"),
        (6, torch.tensor([1, 2]), r"end: expected \[B\] = \[1\], got \[2\]"),
    ],
)
def test_index_keys_that_are_refused(ops, at, value, message):
    given = list(key_problem(np.random.default_rng(8), 1, 16, 8, torch.float32))
    given[at] = value
    with pytest.raises(ValueError, match=message):
        ops.index_append(*given, eps=0.0, interleaved=True)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.ones(1, 32), r"queries: expected \[B, I, E\], got \[1, 32\]"),
        (1, torch.ones(1, 2).int(), "weights: expected torch.float32 or .*, got torch.int32"),
        (1, torch.ones(1, 3), r"weights: expected \[B, I\] = \[1, 2\], got \[1, 3\]"),
        (2, torch.ones(1, 8).half(), "cos: expected torch.float32, got torch.float16"),
        (3, torch.ones(1, 6), r"sin: expected \[B, A\] = \[1, 8\], got \[1, 6\]"),
    ],
)
def test_index_queries_that_are_refused(ops, at, value, message):
    given = list(query_problem(np.random.default_rng(9), 1, 2, 16, 8, torch.float32))
    given[at] = value
    with pytest.raises(ValueError, match=message):
        ops.index_queries(*given, share=1.0, interleaved=True)
