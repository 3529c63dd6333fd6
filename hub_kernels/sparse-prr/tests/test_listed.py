"""listed_attention: each query of a prompt over the tokens that it lists."""

from importlib import import_module

import numpy as np
import pytest
import torch

from .drawn import DTYPES, some

BOUND = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SCALE = 0.2


def problem(rng, batch, queries, heads, columns, sizes, slots, dtype):
    channels, rotated = sizes
    listed = [np.sort(rng.permutation(columns)[:slots]) for _ in range(batch * queries)]
    tokens = np.full((batch * queries, slots), -1, np.int32)
    for row, each in zip(tokens, listed, strict=True):
        row[: len(each)] = each
        row[rng.random(slots) < 0.2] = -1
    return (
        some(rng, batch, queries, heads, channels, dtype=dtype), some(rng, batch, queries, heads, rotated, dtype=dtype),
        some(rng, batch, columns, channels, dtype=dtype), some(rng, batch, columns, rotated, dtype=dtype),
        torch.tensor(tokens.reshape(batch, queries, slots)),
    )  # fmt: skip


def oracle(query, rope, latents, ropes, tokens, scale):
    """In float64, query by query."""
    query, rope, latents, ropes = (part.cpu().double().numpy() for part in (query, rope, latents, ropes))
    tokens = tokens.cpu().numpy()
    output = np.zeros(query.shape)
    for b, i in np.ndindex(*tokens.shape[:2]):
        at = tokens[b, i][tokens[b, i] >= 0]
        if not len(at):
            continue
        logits = scale * (query[b, i] @ latents[b, at].T + rope[b, i] @ ropes[b, at].T)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        output[b, i] = weights @ latents[b, at] / weights.sum(axis=1, keepdims=True)
    return output


@DTYPES
@pytest.mark.parametrize(
    ("batch", "queries", "heads", "columns", "sizes", "slots"),
    [
        (1, 3, 70, 200, (512, 64), 150),
        (2, 5, 3, 33, (20, 12), 40),
        (1, 1, 1, 1, (16, 16), 1),
        (1, 2, 16, 90, (80, 8), 64),
    ],
)
def test_each_query_over_what_it_lists(ops, batch, queries, heads, columns, sizes, slots, dtype):
    given = problem(np.random.default_rng(0), batch, queries, heads, columns, sizes, slots, dtype)
    output = ops.listed_attention(*given, scale=SCALE)
    assert output.dtype == dtype
    error = np.abs(output.cpu().double().numpy() - oracle(*given, SCALE)).max()
    assert error <= BOUND[dtype]


@DTYPES
def test_what_is_not_listed_is_not_read(ops, dtype, assert_same_bits):
    """Other rows are NaN or infinite; a query that lists nothing gives zeros."""
    given = problem(np.random.default_rng(1), 2, 4, 5, 60, (32, 16), 20, dtype)
    given[-1][1, 2] = -1
    expected = ops.listed_attention(*given, scale=SCALE)
    listed = torch.zeros(2, 61, dtype=torch.bool)
    listed.scatter_(1, torch.where(given[-1] >= 0, given[-1], 60).flatten(1).long(), True)
    for states, garbage in zip(given[2:4], (float("nan"), float("-inf")), strict=True):
        states.masked_fill_(~listed[:, :60, None], garbage)
    found = ops.listed_attention(*given, scale=SCALE)
    assert_same_bits(found, expected)
    assert (found[1, 2] == 0).all()
    assert not (found[1, 1] == 0).all()


def test_in_parts_it_has_the_bits_of_the_whole(ops, assert_same_bits):
    given = problem(np.random.default_rng(2), 1, 9, 18, 300, (64, 16), 128, torch.bfloat16)
    query, rope, *rest, tokens = given
    parts = [slice(0, 1), slice(1, 6), slice(6, 9)]
    found = [ops.listed_attention(query[:, p], rope[:, p], *rest, tokens[:, p], scale=SCALE) for p in parts]
    assert_same_bits(torch.cat(found, dim=1), ops.listed_attention(*given, scale=SCALE))


def test_views(ops, assert_same_bits):
    """As a prompt has them: heads first, latents and RoPE keys of one buffer, a list that is part of a wider one."""
    query, rope, latents, ropes, tokens = problem(np.random.default_rng(3), 2, 6, 5, 50, (32, 16), 24, torch.float16)
    expected = ops.listed_attention(query, rope, latents, ropes, tokens, scale=SCALE)
    turned = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, rope)]
    both = torch.cat([latents, ropes, latents], dim=2)
    wide = torch.cat([tokens, tokens], dim=2)
    views = (*turned, both[:, :, :32], both[:, :, 32:48], wide[:, :, :24])
    assert_same_bits(ops.listed_attention(*views, scale=SCALE), expected)
    reversed_slots = tokens.flip(2)
    torch.testing.assert_close(
        ops.listed_attention(query, rope, latents, ropes, reversed_slots, scale=SCALE), expected, rtol=0, atol=4e-3
    )


@pytest.mark.parametrize("kilobytes", [227, 163, 99, 64, 1])
def test_tiles_fit_the_shared_memory_that_there_is(ops, monkeypatch, kilobytes):
    """Hopper's, Ampere's, Ada's, Turing's, and too little for any, where the smallest are taken."""
    if not ops.dispatch.INTERPRETS:
        pytest.skip("the interpreter runs any tile; a GPU has its own memory")
    launch, kernel = (import_module(f"{ops.__name__}.triton_kernels.{name}") for name in ("launch", "listed"))
    chosen = []
    monkeypatch.setattr(launch, "shared_memory", lambda device: kilobytes * 2**10)
    first = launch.first_that_fits

    def noted(choices, bytes_of, device):
        chosen.append((first(choices, bytes_of, device), bytes_of))
        return chosen[-1][0]

    monkeypatch.setattr(kernel, "first_that_fits", noted)
    given = problem(np.random.default_rng(4), 1, 2, 70, 150, (512, 64), 100, torch.float16)
    output = ops.listed_attention(*given, scale=0.1)
    assert np.abs(output.double().numpy() - oracle(*given, 0.1)).max() <= BOUND[torch.float16]
    tile, bytes_of = chosen[0]
    assert bytes_of(*tile) < kilobytes * 2**10 or tile == kernel._HALF[-1]


@pytest.mark.parametrize("shape", [(1, 0, 2, 4), (0, 3, 2, 4), (1, 3, 0, 4), (1, 3, 2, 0)])
def test_of_nothing(ops, shape):
    batch, queries, heads, slots = shape
    tokens = torch.zeros(batch, queries, slots, dtype=torch.int32)
    parts = (torch.ones(batch, queries, heads, 32), torch.ones(batch, queries, heads, 16))
    found = ops.listed_attention(*parts, torch.ones(batch, 7, 32), torch.ones(batch, 7, 16), tokens, scale=1.0)
    assert found.shape == (batch, queries, heads, 32)
    assert (found == 0).all()
