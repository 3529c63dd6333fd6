"""absorb_queries, absorb_values: each head's own product, rounded once."""

import numpy as np
import pytest
import torch

from .drawn import DTYPES, angles, some, wide

SHAPES = pytest.mark.parametrize(
    ("batch", "heads", "dim", "channels"), [(1, 3, 24, 64), (2, 2, 16, 70), (3, 1, 1, 1), (1, 2, 33, 130)]
)


def check(found, products, dtype):
    """products [.., terms] are exact: a unit in the last place of the sum, and fp32's sum, are allowed."""
    expected, size = products.sum(-1), np.abs(products).sum(-1)
    allowed = torch.finfo(dtype).eps * np.abs(expected) + 1e-6 * size + 1e-7
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert (np.abs(wide(found) - expected) <= allowed).all()


@DTYPES
@SHAPES
def test_queries_move_and_the_rest_is_rotated(ops, batch, heads, dim, channels, dtype):
    rng = np.random.default_rng(0)
    queries, ropes = some(rng, batch, heads, dim, dtype=dtype), some(rng, batch, heads, 6, dtype=dtype)
    up = some(rng, heads, dim, channels, dtype=dtype)
    cos, sin = angles(rng, batch, 6, dtype)
    output = ops.absorb_queries(queries, ropes, cos, sin, up)
    check(output[..., :channels], np.einsum("bhd,hdc->bhcd", wide(queries), wide(up)), dtype)
    c, s = cos[:, None, :3], sin[:, None, :3]
    one, two = ropes[..., 0::2], ropes[..., 1::2]  # rounded as transformers' functions do: to the bit
    assert torch.equal(output[..., channels:], torch.cat([one * c - two * s, two * c + one * s], dim=2))


def test_the_rest_turns_as_an_indexers_queries_do(ops):
    rng = np.random.default_rng(3)
    ropes, (cos, sin) = some(rng, 2, 5, 12, dtype=torch.float16), angles(rng, 1, 12, dtype=torch.float16)
    nothing = ropes[..., :0]
    output = ops.absorb_queries(nothing, ropes, cos, sin, torch.ones(5, 0, 0, dtype=torch.float16))
    asked, _ = ops.index_queries(ropes, torch.ones(2, 5), cos, sin, share=1.0, interleaved=True)
    assert torch.equal(output, asked)


@DTYPES
@SHAPES
def test_values_are_of_latents_that_were_rounded(ops, batch, heads, dim, channels, dtype):
    rng = np.random.default_rng(1)
    latents, down = some(rng, batch, heads, channels), some(rng, heads, dim, channels, dtype=dtype)
    output = ops.absorb_values(latents, down)
    check(output, np.einsum("bhc,hdc->bhdc", wide(latents.to(dtype)), wide(down)), dtype)
    assert torch.equal(output, ops.absorb_values(latents.to(dtype), down))


def test_views_and_rows_alone(ops):
    """Both matrices of a head lie in one weight; queries between their RoPE parts."""
    rng = np.random.default_rng(2)
    weight = some(rng, 3 * (8 + 12), 40)
    up, down = weight.unflatten(0, (3, 20)).split((8, 12), dim=1)
    queries, ropes = some(rng, 2, 3, 8 + 4).split((8, 4), dim=2)
    cos, sin = angles(rng, 1, 4)
    output = ops.absorb_queries(queries, ropes, cos, sin, up)
    whole = queries.contiguous(), ropes.contiguous(), cos.expand(2, 4), sin.repeat(2, 1), up.contiguous()
    assert torch.equal(output, ops.absorb_queries(*whole))
    assert torch.equal(output[1:], ops.absorb_queries(queries[1:], ropes[1:], cos, sin, up))
    latents = some(rng, 2, 40, 3).transpose(1, 2)
    values = ops.absorb_values(latents, down)
    assert torch.equal(values, ops.absorb_values(latents.contiguous(), down.contiguous()))
    assert torch.equal(values[:1], ops.absorb_values(latents[:1], down))


def test_what_is_not_finite_stays_in_its_head(ops):
    queries, ropes, up = torch.ones(1, 2, 5), torch.ones(1, 2, 2), torch.ones(2, 5, 9)
    queries[0, 0, 4] = float("inf")
    up[1, 0, 3] = float("nan")
    output = ops.absorb_queries(queries, ropes, *torch.ones(2, 1, 2), up)
    assert output[0, 0, :9].isinf().all()
    assert output[0, 1].isnan().nonzero().tolist() == [[3]]
    down = torch.ones(2, 3, 9)
    down[0, 2, 8] = float("nan")
    assert ops.absorb_values(torch.ones(1, 2, 9), down).isnan().nonzero().tolist() == [[0, 0, 2]]


def test_nothing(ops):
    ropes, still, quarter = torch.ones(1, 2, 4), torch.zeros(1, 4), torch.ones(1, 4)
    assert ops.absorb_queries(torch.ones(0, 2, 5), ropes[:0], still, still, torch.ones(2, 5, 9)).shape == (0, 2, 13)
    output = ops.absorb_queries(torch.ones(1, 2, 5), ropes, still, quarter, torch.ones(2, 5, 0))
    assert output.tolist() == [[[-1, -1, 1, 1]] * 2]
    assert ops.absorb_values(torch.ones(1, 2, 9), torch.ones(2, 0, 9)).shape == (1, 2, 0)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, torch.ones(2, 5), r"queries: expected \[B, H, D\], got \[2, 5\]"),
        (1, torch.ones(1, 3, 2), r"ropes: expected \[B, H, A\] = \[1, 2, ..\], got \[1, 3, 2\]"),
        (1, torch.ones(1, 2, 4), "cos: expected A = 4 channels, got 2"),
        (2, torch.ones(1, 2).half(), "cos: expected torch.float32, got torch.float16"),
        (3, torch.ones(2, 2), r"sin: expected \[B, A\] = \[1, 2\], got \[2, 2\]"),
        (4, torch.ones(2, 4, 9), r"up: expected \[H, D, C\] = \[2, 5, ..\], got \[2, 4, 9\]"),
        (4, torch.ones(2, 5, 9).half(), "up: expected torch.float32, got torch.float16"),
    ],
)
def test_queries_that_are_refused(ops, at, value, message):
    given = [torch.ones(1, 2, 5), torch.ones(1, 2, 2), torch.ones(1, 2), torch.ones(1, 2), torch.ones(2, 5, 9)]
    given[at] = value
    with pytest.raises(ValueError, match=message):
        ops.absorb_queries(*given)


@pytest.mark.parametrize(
    ("latents", "down", "message"),
    [
        (torch.ones(1, 2, 9).int(), torch.ones(2, 3, 9), "latents: expected torch.float32 or .*, got torch.int32"),
        (torch.ones(1, 2, 9), torch.ones(3, 3, 9), r"down: expected \[H, D', C\] = \[2, .., 9\], got \[3, 3, 9\]"),
        (torch.ones(1, 2, 9), None, "down: expected a tensor, got NoneType"),
    ],
)
def test_values_that_are_refused(ops, latents, down, message):
    with pytest.raises(ValueError, match=message):
        ops.absorb_values(latents, down)
