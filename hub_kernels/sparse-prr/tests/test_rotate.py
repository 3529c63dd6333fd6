"""rotate_append: RoPE of one token's heads, and its key and value where the device says."""

import numpy as np
import pytest
import torch

from .drawn import DTYPES, some

EQUAL = dict(rtol=0, atol=0)


def problem(rng, batch, heads, group, dim, wide, turned, dtype, columns=20, angles=None):
    states = some(rng, batch, (group + 1) * heads * dim + heads * wide, dtype=dtype)
    angle = torch.tensor(rng.uniform(0, 6, (angles or batch, turned // 2)))
    cos, sin = (torch.cat([turn, turn], 1).to(dtype) for turn in (angle.cos(), angle.sin()))
    keys, values = (
        some(rng, batch, heads, columns, dim, dtype=dtype),
        some(rng, batch, heads, columns, wide, dtype=dtype),
    )
    end = torch.tensor(rng.integers(1, columns + 1, batch))
    return states, cos, sin, keys, values, end


def rotated(head, cos, sin, interleaved, norm, eps):
    """One head in float64, channel by channel; complex numbers that turn."""
    head = np.asarray(head, np.float64)
    if norm is not None:
        head = head / np.sqrt((head**2).mean() + eps) * norm
    half = len(cos) // 2
    out = head.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turn = complex(head[a], head[b]) * complex(cos[i], sin[i])
        out[a], out[b] = turn.real, turn.imag
    return out


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "group", "dim", "wide", "turned"),
    [(1, 2, 4, 64, 64, 64), (3, 1, 3, 48, 80, 16), (2, 2, 1, 16, 8, 0), (1, 3, 0, 32, 32, 32)],
)
def test_heads_turn_and_the_new_column_is_written(
    ops, batch, heads, group, dim, wide, turned, interleaved, normed, dtype
):
    rng = np.random.default_rng(0)
    states, cos, sin, keys, values, end = problem(rng, batch, heads, group, dim, wide, turned, dtype)
    norms = (some(rng, dim, dtype=dtype), some(rng, dim, dtype=dtype)) if normed else (None, None)
    expected_keys, expected_values = keys.clone(), values.clone()
    query = ops.rotate_append(
        states, cos, sin, keys, values, end, interleaved=interleaved, query_norm=norms[0], key_norm=norms[1], eps=1e-6
    )
    count = heads * group
    assert query.shape == (batch, count, dim)
    bound = {torch.float32: 2e-6, torch.bfloat16: 0.03, torch.float16: 0.004}[dtype]
    for row in range(batch):
        flat = states[row].cpu().double().numpy()
        own = [each[row].cpu().double().numpy() for each in (cos, sin)]
        column = int(end[row]) - 1
        for head in range(count + heads):
            norm = norms[head >= count]
            norm = None if norm is None else norm.cpu().double().numpy()
            wanted = rotated(flat[head * dim : (head + 1) * dim], *own, interleaved, norm, 1e-6)
            found = query[row, head] if head < count else keys[row, head - count, column]
            assert np.abs(found.cpu().double().numpy() - wanted).max() <= bound * max(1.0, np.abs(wanted).max())
        expected_keys[row, :, column] = keys[row, :, column]
        expected_values[row, :, column] = states[row, (count + heads) * dim :].view(heads, wide)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize("interleaved", [False, True])
@DTYPES
def test_rounds_as_modules_do(ops, dtype, interleaved):
    """What transformers' apply_rotary_pos_emb gives, in half precision to the bit: a cache may hold keys of either."""
    rng = np.random.default_rng(1)
    states, cos, sin, keys, values, end = problem(rng, 2, 2, 2, 32, 32, 16, dtype)
    x, part = states[:, : 4 * 32].unflatten(1, (4, 32)), slice(0, 16)
    c, s = (each[:, None] for each in (cos, sin))
    if interleaved:
        c, s = (each[..., :8].repeat_interleave(2, dim=-1) for each in (c, s))
        partner = torch.stack((-x[..., 1:16:2], x[..., 0:16:2]), dim=-1).flatten(-2)
    else:
        partner = torch.cat((-x[..., 8:16], x[..., :8]), dim=-1)
    expected = torch.cat([x[..., part] * c + partner * s, x[..., 16:]], dim=-1)
    query = ops.rotate_append(states, cos, sin, keys, values, end, interleaved=interleaved)
    torch.testing.assert_close(query, expected, **(dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else EQUAL))


def test_views_one_angle_for_all_and_any_integer(ops):
    rng = np.random.default_rng(2)
    states, cos, sin, keys, values, end = problem(rng, 2, 2, 2, 32, 16, 32, torch.float32, angles=1)
    views = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (keys, values)]
    wide = states.repeat_interleave(2, dim=1)[:, ::2]
    query = ops.rotate_append(wide, cos, sin, *views, end.int())
    assert torch.equal(query, ops.rotate_append(states, cos.repeat(2, 1), sin.repeat(2, 1), keys, values, end))
    assert torch.equal(views[0], keys)
    assert torch.equal(views[1], values)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("states", torch.ones(1, 30), r"states: expected \[B, G \* H \* D .* with H = 2, D = 8, D' = 8, got \[1, 30\]"),
        ("states", torch.ones(1, 40), r"states: expected \[B, G \* H \* D .*, got \[1, 40\]"),
        ("states", torch.ones(1, 48).half(), "states: expected torch.float32, got torch.float16"),
        ("cos", torch.ones(1, 6), r"sin: expected \[B, A\] = \[1, 6\], got \[1, 8\]"),
        ("cos", torch.ones(2, 8), r"cos: expected \[B, A\] = \[1, ..\], got \[2, 8\]"),
        ("values", torch.ones(1, 2, 9, 8), r"values: expected \[B, H, T, D'\] = \[1, 2, 10, ..\], got \[1, 2, 9, 8\]"),
        ("end", torch.ones(1), "end: expected torch.int8 or .*, got torch.float32"),
        ("query_norm", torch.ones(7), r"query_norm: expected \[D\] = \[8\], got \[7\]"),
    ],
)
def test_what_is_refused(ops, name, value, message):
    angle = torch.ones(1, 8)
    given = dict(states=torch.ones(1, 48), cos=angle, sin=angle, keys=torch.ones(1, 2, 10, 8))
    given = {**given, "values": torch.ones(1, 2, 10, 8), "end": torch.tensor([3]), name: value}
    before = given["keys"].clone()
    with pytest.raises(ValueError, match=message):
        ops.rotate_append(**given)
    assert torch.equal(given["keys"], before)


def test_a_buffer_without_a_column_is_refused(ops):
    none = torch.ones(1, 2, 0, 8)
    with pytest.raises(ValueError, match="keys: expected T >= 1 columns, got 0"):
        ops.rotate_append(torch.ones(1, 48), torch.ones(1, 8), torch.ones(1, 8), none, none, torch.tensor([1]))


@pytest.mark.parametrize("channels", [7, 10])
def test_channels_that_cannot_turn(ops, channels):
    angle = torch.ones(1, channels)
    buffer = torch.ones(1, 2, 10, 8)
    with pytest.raises(ValueError, match=rf"cos: expected an even number of at most D = 8 channels, got {channels}"):
        ops.rotate_append(torch.ones(1, 48), angle, angle, buffer, buffer, torch.tensor([3]))
