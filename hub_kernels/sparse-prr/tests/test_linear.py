"""grouped_linear: what modules called one after the other give, rounding included."""

import numpy as np
import pytest
import torch

from .drawn import CUT, DTYPES, some, wide


def rounded(value, dtype):
    return torch.tensor(value, device="cpu").to(dtype).double().numpy()


def check(output, x, weights, biases=None, norm=None, eps=0.0, gated=False, residual=None):
    """Against float64 that is rounded where the contract says so. Allowed are one unit in the last place of what is
    rounded last, the same of the largest product (an input that is rounded the other way), and fp32's sum."""
    dtype = weights[0].dtype
    unit = torch.finfo(dtype).eps
    x = rounded(wide(x), dtype)
    if norm is not None:
        x = rounded(x / np.sqrt((x**2).mean(1, keepdims=True) + eps), dtype)
        x = rounded(x * wide(norm), dtype)
    parts, errors = [], []
    for at, weight in enumerate(weights):
        products = x[:, None] * wide(weight)
        part = products.sum(2) + (0.0 if biases is None else wide(biases[at]))
        sizes = np.abs(products)
        largest = sizes.max(2, initial=0.0) if norm is not None else 0.0
        parts.append(part)
        errors.append(unit * (np.abs(part) + 2 * largest) + 1e-6 * (sizes.sum(2) + 1e-3))
    if gated:
        expected = parts[0] / (1 + np.exp(-parts[0])) * parts[1]
        allowed = 1.2 * errors[0] * np.abs(parts[1]) + errors[1] * np.abs(parts[0]) + 3 * unit * np.abs(expected) + 1e-6
    else:
        expected, allowed = np.concatenate(parts, 1), np.concatenate(errors, 1)
    if residual is not None:
        expected = expected + wide(residual)
        allowed = allowed + unit * np.abs(expected)
    assert output.dtype == dtype
    assert output.shape == expected.shape
    assert (np.abs(wide(output) - expected) <= allowed).all()


@DTYPES
@pytest.mark.parametrize(
    ("batch", "channels", "rows"),
    [(1, 512, (64, 16, 16)), (3, 300, (5,)), (1, 1, (1, 1)), (2, 257, (33, 7)), (1, 5000, (9,)), (2, 64, (0, 3))],
)
def test_linear_layers_side_by_side(ops, batch, channels, rows, dtype):
    rng = np.random.default_rng(0)
    x, weights = some(rng, batch, channels, dtype=dtype), [some(rng, count, channels, dtype=dtype) for count in rows]
    biases = [some(rng, count, dtype=dtype) for count in rows]
    norm, residual = some(rng, channels, dtype=dtype), some(rng, batch, sum(rows), dtype=dtype)
    for how in ({}, {"biases": biases}, {"norm": norm, "eps": 1e-5}, {"residual": residual, "biases": biases}):
        check(ops.grouped_linear(x, weights, **how), x, weights, **how)


@DTYPES
@pytest.mark.parametrize(("batch", "channels", "rows"), [(1, 512, 48), (2, 100, 13)])
def test_a_gate(ops, batch, channels, rows, dtype):
    rng = np.random.default_rng(1)
    x, both = some(rng, batch, channels, dtype=dtype) / channels**0.5, some(rng, 2 * rows, channels, dtype=dtype)
    weights = both[:rows], both[rows:]  # one fused weight, as GLM has it
    norm, biases = some(rng, channels, dtype=dtype), tuple(some(rng, 2, rows, dtype=dtype))
    for how in ({}, {"norm": norm, "eps": 1e-6}, {"biases": biases}):
        check(ops.grouped_linear(x, weights, gated=True, **how), x, weights, gated=True, **how)


@CUT
def test_wide_inputs_are_rounded_first(ops):
    rng = np.random.default_rng(2)
    x, weight = some(rng, 1, 128), some(rng, 24, 128, dtype=torch.bfloat16)
    assert torch.equal(ops.grouped_linear(x, [weight]), ops.grouped_linear(x.bfloat16(), [weight]))


def test_views_and_rows_alone(ops):
    rng = np.random.default_rng(3)
    wide, base = some(rng, 3, 200), some(rng, 40, 160)
    x, weight = wide[:, ::2], base[::2, 10:110]
    residual = some(rng, 20, 3).T
    norm = some(rng, 200)[::2]
    whole = (each.contiguous() for each in (x, weight, norm, residual))
    expected = (lambda x, weight, norm, residual: ops.grouped_linear(x, [weight], norm=norm, residual=residual))(*whole)
    assert torch.equal(ops.grouped_linear(x, [weight], norm=norm, residual=residual), expected)
    alone = [ops.grouped_linear(x[i : i + 1], [weight], norm=norm, residual=residual[i : i + 1]) for i in range(3)]
    assert torch.equal(torch.cat(alone), expected)


def test_infinities_and_nan_stay_in_their_rows(ops):
    x, weight = torch.ones(1, 70), torch.ones(3, 70)
    weight[0, 4], weight[1, 69] = float("inf"), float("nan")
    output = ops.grouped_linear(x, [weight])[0].tolist()
    assert output[0] == float("inf")
    assert output[1] != output[1]
    assert output[2] == 70


def test_zeros_through_a_norm(ops):
    output = ops.grouped_linear(torch.zeros(1, 64), [torch.ones(2, 64)], norm=torch.ones(64), eps=1e-6)
    assert output.tolist() == [[0.0, 0.0]]


def test_no_row_and_no_channel(ops):
    assert ops.grouped_linear(torch.ones(0, 8), [torch.ones(3, 8)]).shape == (0, 3)
    assert ops.grouped_linear(torch.ones(2, 8), [torch.ones(0, 8)]).shape == (2, 0)


X, W = torch.ones(1, 8), torch.ones(4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(8)}, r"x: expected \[B, X\], got \[8\]"),
        ({"x": torch.ones(1, 8).int()}, "x: expected torch.float32 or .*, got torch.int32"),
        ({"weights": []}, "weights: expected 1 to 3, got 0"),
        ({"weights": [W] * 4}, "weights: expected 1 to 3, got 4"),
        ({"gated": True}, "weights: expected 2, a gate's and what it gates, got 1"),
        ({"weights": [W, W[:3]], "gated": True}, r"weights\[1\]: expected \[Y, X\] = \[4, 8\], got \[3, 8\]"),
        ({"weights": [torch.ones(4, 7)]}, r"weights\[0\]: expected \[Y, X\] = \[.., 8\], got \[4, 7\]"),
        ({"weights": [W, W.half()]}, r"weights\[1\]: expected torch.float32, got torch.float16"),
        ({"weights": [W.int()]}, r"weights\[0\]: expected torch.float32 or .*, got torch.int32"),
        ({"weights": [torch.ones(8, 4).T]}, r"weights\[0\]: expected rows without gaps, got strides \(1, 4\)"),
        ({"weights": [None]}, r"weights\[0\]: expected a tensor, got NoneType"),
        ({"biases": []}, "biases: expected 1, got 0"),
        ({"biases": [torch.ones(5)]}, r"biases\[0\]: expected \[Y\] = \[4\], got \[5\]"),
        ({"norm": torch.ones(4)}, r"norm: expected \[X\] = \[8\], got \[4\]"),
        ({"residual": torch.ones(1, 3)}, r"residual: expected \[B, Y\] = \[1, 4\], got \[1, 3\]"),
    ],
)
def test_what_is_refused(ops, change, message):
    given = {"x": X, "weights": [W], **change}
    with pytest.raises(ValueError, match=message):
        ops.grouped_linear(given.pop("x").to(torch.get_default_device()), given.pop("weights"), **given)
