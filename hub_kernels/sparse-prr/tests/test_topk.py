"""gvr_topk: exact, smallest index at ties, whatever the hint, the batch and the memory layout."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .drawn import FORMATS, INTERPRETED

PROPERTY = settings(deadline=None, derandomize=True, max_examples=8 if INTERPRETED else 150)
INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)
INF, NAN = float("inf"), float("nan")


def float_of_bits(bits) -> torch.Tensor:
    return torch.tensor(np.asarray(bits, np.uint32).view(np.int32)).view(torch.float32)


NEGATIVE_NAN = 0xFFC00000
HOSTILE_BITS = [
    *(0x00000000, 0x80000000),  # +0.0, -0.0
    *(0x7F800000, 0xFF800000),  # +inf, -inf
    *(0x7FC00000, NEGATIVE_NAN, 0x7F800001, 0xFFFFFFFF),  # NaN: quiet, negative, signalling, all ones
    *(0x00000001, 0x80000001, 0x007FFFFF),  # denormals
    *(0x7F7FFFFF, 0xFF7FFFFF),  # the largest finite floats
    *(0x3F800000, 0x3F800001, 0x3F7FFFFF, 0xBF800000),  # 1, its neighbours, -1
]


def oracle(scores: torch.Tensor, k: int, lengths=None) -> list[list[int]]:
    """Sort (-value, index) pairs, as the contract is worded. Python's -0.0 equals its 0.0."""
    result = []
    for r, row in enumerate(scores.double().tolist()):
        length = len(row) if lengths is None else min(max(int(lengths[r]), 0), len(row))
        pairs = sorted((-value, i) for i, value in enumerate(row[:length]) if not math.isnan(value))
        winners = sorted(i for _, i in pairs[:k])
        result.append(winners + [-1] * (k - len(winners)))
    return result


def check(ops, scores, k, *, lengths=None, hint=None):
    """Run, compare with the oracle, and see that no input was touched."""
    inputs = [x for x in (scores, lengths, hint) if x is not None]
    before = [x.clone() for x in inputs]
    indices = ops.gvr_topk(scores, k, hint=hint, lengths=lengths)
    assert indices.dtype == torch.int32
    assert indices.shape == (scores.shape[0], k)
    assert indices.tolist() == oracle(scores, k, lengths)
    for now, then in zip(inputs, before, strict=True):
        assert torch.equal(now.nan_to_num(nan=123.0), then.nan_to_num(nan=123.0))
        if now.is_floating_point():
            assert torch.equal(now.isnan(), then.isnan())
            assert torch.equal(now.signbit(), then.signbit())
    return indices


@st.composite
def score_tables(draw, max_rows=4, max_columns=40):
    rows, columns = draw(st.integers(0, max_rows)), draw(st.integers(0, max_columns))
    few = draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3))  # repeats make ties
    value = st.sampled_from(HOSTILE_BITS + few) | st.integers(0, 2**32 - 1)
    bits = draw(st.lists(value, min_size=rows * columns, max_size=rows * columns))
    return float_of_bits(bits).reshape(rows, columns).to(draw(st.sampled_from(FORMATS)))


def integers_in(dtype):
    info = torch.iinfo(dtype)
    return st.sampled_from([info.min, info.max, -1, 0, 1]) | st.integers(-5, 50) | st.integers(info.min, info.max)


# ---- the contract, on drawn inputs


@PROPERTY
@given(score_tables(), st.data())
def test_gvr_topk_equals_sorting(ops, scores, data):
    rows, columns = scores.shape
    k = data.draw(st.integers(0, columns + 3), label="k")
    lengths = hint = None
    if data.draw(st.booleans(), label="with lengths"):
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        lengths = torch.tensor(data.draw(st.lists(integers_in(dtype), min_size=rows, max_size=rows)), dtype=dtype)
    if data.draw(st.booleans(), label="with hint"):
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        width = data.draw(st.integers(0, 8))
        flat = data.draw(st.lists(integers_in(dtype), min_size=rows * width, max_size=rows * width))
        hint = torch.tensor(flat, dtype=dtype).reshape(rows, width)
    check(ops, scores, k, lengths=lengths, hint=hint)


@PROPERTY
@given(score_tables(), st.integers(0, 12), st.randoms(use_true_random=False))
def test_gvr_topk_row_does_not_depend_on_its_batch(ops, scores, k, random):
    together = ops.gvr_topk(scores, k)
    order = list(range(scores.shape[0]))
    random.shuffle(order)
    assert torch.equal(ops.gvr_topk(scores[order], k), together[order])
    for r in range(scores.shape[0]):
        assert torch.equal(ops.gvr_topk(scores[r : r + 1], k), together[r : r + 1])


@PROPERTY
@given(score_tables(), st.integers(0, 12), st.integers(0, 12))
def test_gvr_topk_smaller_k_is_a_subset(ops, scores, a, b):
    small, large = sorted((a, b))
    few, many = ops.gvr_topk(scores, small).tolist(), ops.gvr_topk(scores, large).tolist()
    for x, y in zip(few, many, strict=True):
        assert set(x) - {-1} <= set(y)


@PROPERTY
@given(score_tables(), st.integers(0, 12), st.integers(0, 45))
def test_gvr_topk_length_equals_cutting_the_row(ops, scores, k, length):
    lengths = torch.full((scores.shape[0],), length)
    assert torch.equal(ops.gvr_topk(scores, k, lengths=lengths), ops.gvr_topk(scores[:, :length], k))


@PROPERTY
@given(score_tables(), st.integers(0, 12), st.integers(1, 20))
def test_gvr_topk_columns_that_are_nan_change_nothing(ops, scores, k, extra):
    padding = torch.full((scores.shape[0], extra), NAN, dtype=scores.dtype)
    assert torch.equal(ops.gvr_topk(torch.cat([scores, padding], dim=1), k), ops.gvr_topk(scores, k))


# ---- the contract, case by case


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        pytest.param([1.0, 3.0, 2.0], 2, [1, 2], id="ascending-indices"),
        pytest.param([5.0, 1.0, 5.0, 5.0], 2, [0, 2], id="tie-smallest-index"),
        pytest.param([1.0, 2.0, 1.0, 1.0], 2, [0, 1], id="tie-at-the-kth-only"),
        pytest.param([-1.0, 0.0, -0.0, 0.0], 1, [1], id="zeros-plus-first"),
        pytest.param([-1.0, -0.0, 0.0, 0.0], 1, [1], id="zeros-minus-first"),
        pytest.param([-0.0, 0.0, -0.0, 0.0], 3, [0, 1, 2], id="zeros-mixed"),
        pytest.param([1.0, INF, 2.0], 1, [1], id="inf-largest"),
        pytest.param([-INF, 1.0, -INF], 2, [0, 1], id="minus-inf-selectable"),
        pytest.param([-INF, -INF, -INF], 2, [0, 1], id="minus-inf-only"),
        pytest.param([NAN, -INF, NAN], 2, [1, -1], id="nan-never"),
        pytest.param([-NAN, 1.0, NAN], 3, [1, -1, -1], id="negative-nan-never"),
        pytest.param([NAN, NAN], 2, [-1, -1], id="nan-only"),
        pytest.param([1.0, 2.0], 0, [], id="k0"),
        pytest.param([2.0, 1.0], 2, [0, 1], id="kN"),
        pytest.param([2.0, 1.0], 4, [0, 1, -1, -1], id="k-above-N"),
        pytest.param([], 2, [-1, -1], id="N0"),
        pytest.param([], 0, [], id="N0-k0"),
        pytest.param([-3.0], 1, [0], id="N1"),
    ],
)
def test_gvr_topk_case(ops, row, k, expected, dtype):
    assert check(ops, torch.tensor([row], dtype=dtype).reshape(1, len(row)), k).tolist() == [expected]


@pytest.mark.parametrize("bits", [0x7FC00000, NEGATIVE_NAN, 0x7F800001, 0xFF800001, 0xFFFFFFFF])
def test_gvr_topk_never_selects_any_nan_payload(ops, bits):
    scores = float_of_bits([bits, 0xFF800000, bits, 0x7F800000])[None]
    assert scores.isnan().tolist() == [[True, False, True, False]]
    assert ops.gvr_topk(scores, 4).tolist() == [[1, 3, -1, -1]]


@pytest.mark.parametrize("columns", [0, 1, 5])
@pytest.mark.parametrize("k", [0, 1, 7])
def test_gvr_topk_without_rows(ops, columns, k):
    indices, stats = ops.gvr_topk(torch.zeros(0, columns), k, return_stats=True)
    assert indices.shape == (0, k)
    assert indices.dtype == torch.int32
    assert all(field.shape == (0,) for field in stats)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gvr_topk_clamps_lengths(ops, dtype):
    info = torch.iinfo(dtype)
    lengths = torch.tensor([info.min, -1, 0, 1, 3, 4, 5, info.max], dtype=dtype)
    scores = torch.tensor([1.0, 4.0, 2.0, 8.0]).repeat(len(lengths), 1)
    expected = [[-1, -1], [-1, -1], [-1, -1], [0, -1], [1, 2], [1, 3], [1, 3], [1, 3]]
    assert check(ops, scores, 2, lengths=lengths).tolist() == expected


@pytest.mark.parametrize("poison", [3e38, INF, NAN, -NAN])
def test_gvr_topk_never_reads_past_the_length(ops, poison):
    scores = torch.linspace(-1, 1, 600).repeat(3, 1)
    lengths = torch.tensor([496, 511, 1])
    scores[torch.arange(600) >= lengths[:, None]] = poison
    check(ops, scores, 512, lengths=lengths)


def test_gvr_topk_is_the_same_twice(ops):
    scores = torch.tensor(np.random.default_rng(0).integers(0, 5, (4, 5000)), dtype=torch.float32)
    assert torch.equal(ops.gvr_topk(scores, 700), ops.gvr_topk(scores, 700))


# ---- rows that broke other kernels (sizes and patterns of the published test suites)


def uniform(rng, *shape):
    return rng.random(shape, np.float32)


def relu_sparse(rng, positives):
    """A plateau of 0.0 with few positive entries, fewer than k."""
    scores = np.zeros((2, 8192), np.float32)
    for row in scores:
        row[rng.permutation(8192)[:positives]] = uniform(rng, positives) + 0.1
    return scores


def tie_plateau(rng, ties):
    scores = uniform(rng, 1, 12000) - 2
    scores[:, rng.permutation(12000)[:ties]] = 1.0
    scores[:, rng.permutation(12000)[:100]] = 2.0
    return scores


def one_bin(rng, first, count, shuffled=True):
    """Neighbouring floats: distinct in fp32, one bin for any histogram of their top bits."""
    bits = np.uint32(first) + np.arange(count, dtype=np.uint32)
    return (rng.permutation(bits) if shuffled else bits).view(np.float32)[None]


def flood(rng, value, count):
    scores = uniform(rng, 2, 4096)
    for row in scores:
        row[rng.permutation(4096)[:count]] = value
    return scores


def outlier_and_cluster(rng):
    scores = 1 + uniform(rng, 1, 4096) * np.float32(1e-6)
    scores[0, 3000] = 1e30
    return scores


HOSTILE_ROWS = {
    "relu-sparse-3": (lambda rng: relu_sparse(rng, 3), 512),
    "relu-sparse-100": (lambda rng: relu_sparse(rng, 100), 512),
    "relu-sparse-1000": (lambda rng: relu_sparse(rng, 1000), 512),
    "relu-of-normal": (lambda rng: np.maximum(rng.standard_normal((2, 8192)) - 1.28, 0), 2048),
    "all-equal": (lambda rng: np.full((2, 5000), 0.25), 512),
    "all-minus-inf": (lambda rng: np.full((2, 700), -INF), 512),
    "ten-finite-rest-minus-inf": (lambda rng: np.r_[np.full(690, -INF), np.arange(10)][None], 512),
    "one-bin": (lambda rng: one_bin(rng, 0x3F800000, 65536), 1024),
    "one-bin-ascending": (lambda rng: one_bin(rng, 0x3F800000, 16512, shuffled=False), 1024),
    "one-bin-pivot": (lambda rng: one_bin(rng, 0x3805ED27, 20000), 1024),
    "descending": (lambda rng: -np.arange(4096.0)[None], 512),
    "ascending": (lambda rng: np.arange(4096.0)[None], 512),
    "tie-plateau-6000": (lambda rng: tie_plateau(rng, 6000), 2048),
    "tie-plateau-exactly-k": (lambda rng: tie_plateau(rng, 2048), 2048),
    "tie-plateau-k-plus-1": (lambda rng: tie_plateau(rng, 2049), 2048),
    "tie-heavy": (lambda rng: (np.arange(8192) % 64 / 64)[None], 1024),
    "two-values": (lambda rng: rng.integers(0, 2, (2, 4096)), 1000),
    "quantised-8": (lambda rng: rng.integers(0, 8, (2, 16384)), 2048),
    "relu-quantised": (lambda rng: np.round(np.maximum(rng.standard_normal((2, 8192)), 0) * 32) / 32, 1024),
    "huge": (lambda rng: rng.choice([-3e38, 3e38, 0.0], (2, 4096)), 1500),
    "huge-range": (lambda rng: (rng.random((2, 4096)) - 0.5) * 6.5e38, 512),
    "denormal": (lambda rng: rng.integers(0, 2000, (2, 4096)).astype(np.uint32).view(np.float32), 512),
    "denormal-both-signs": (
        lambda rng: (
            (rng.integers(0, 99, (2, 4096), np.uint32) | rng.choice([0, 0x80000000], (2, 4096)))
            .astype(np.uint32)
            .view(np.float32)
        ),
        512,
    ),
    "inf-above-k": (lambda rng: flood(rng, INF, 700), 512),
    "inf-below-k": (lambda rng: flood(rng, INF, 300), 512),
    "nan-most": (lambda rng: flood(rng, NAN, 4000), 512),
    "huge-flood": (lambda rng: flood(rng, 3e38, 700), 512),
    "zeros-of-both-signs": (lambda rng: rng.choice([0.0, -0.0], (2, 4096)), 512),
    "outlier-and-cluster": (outlier_and_cluster, 512),
    "random-bits": (lambda rng: rng.integers(0, 2**32, (2, 4096), np.uint32).view(np.float32), 512),
    "lognormal": (lambda rng: rng.lognormal(-4.12, 2.55, (2, 8192)).clip(max=17.28), 512),
    "logistic": (lambda rng: rng.logistic(1.46, 1, (2, 8192)).clip(-0.47, 12.32), 512),
    "N-is-k-plus-1": (lambda rng: uniform(rng, 3, 513), 512),
}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_gvr_topk_on_hostile_rows(ops, name, dtype):
    build, k = HOSTILE_ROWS[name]
    rng = np.random.default_rng(7)
    scores = torch.tensor(np.ascontiguousarray(build(rng)).astype(np.float32)).to(dtype)
    rows, columns = scores.shape
    hint = torch.tensor(rng.integers(0, columns, (rows, k)))
    plain = check(ops, scores, k, hint=hint)
    assert torch.equal(ops.gvr_topk(scores, k), plain)
    lengths = torch.tensor(rng.integers(columns // 2, columns + 1, rows))
    check(ops, scores, k, lengths=lengths)


def test_gvr_topk_value_multiset_equals_torch_topk(ops):
    scores = torch.tensor(np.random.default_rng(3).standard_normal((4, 9000)).round(2), dtype=torch.float32)
    chosen = scores.gather(1, ops.gvr_topk(scores, 512).long()).sort(dim=1, descending=True).values
    assert torch.equal(chosen, scores.topk(512).values)


# ---- memory layout


def misaligned(table: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind an allocation's start."""
    buffer = torch.empty(table.numel() + 1, dtype=table.dtype)
    buffer[1:] = table.flatten()
    return buffer[1:].view(table.shape)


LAYOUTS = {
    "columns-from-3": lambda table: table[:, 3:],
    "columns-middle": lambda table: table[:, 1:-4],
    "every-other-row": lambda table: table[::2],
    "every-other-column": lambda table: table[:, ::2],
    "transposed": lambda table: table.t(),
    "expanded": lambda table: table[:1].expand(4, -1),
    "expanded-columns": lambda table: table[:, :1].expand(-1, 9),
    "misaligned": misaligned,
    "overlapping-rows": lambda table: table.flatten().as_strided((5, 8), (3, 1)),
    "of-3d": lambda table: table.repeat(2, 1, 1)[1],
}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gvr_topk_takes_any_view(ops, layout, dtype):
    table = torch.tensor(np.random.default_rng(1).integers(-9, 9, (6, 33)), dtype=dtype)
    table[0, 5], table[2, 7], table[4, 4] = NAN, INF, -INF
    view = LAYOUTS[layout](table)
    before = table.clone()
    for k in (0, 1, 5, view.shape[1], view.shape[1] + 2):
        assert torch.equal(check(ops, view, k), ops.gvr_topk(view.contiguous(), k))
    assert torch.equal(table.nan_to_num(99), before.nan_to_num(99))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gvr_topk_takes_sliced_lengths_and_hints(ops, dtype):
    rng = np.random.default_rng(2)
    scores = torch.tensor(rng.standard_normal((4, 20)), dtype=torch.float32)
    lengths = torch.tensor([99, 3, 99, 0, 99, 20, 99, 7], dtype=dtype)[1::2]
    hint = torch.tensor(rng.integers(-3, 25, (6, 8)), dtype=dtype).t()[1::2]
    assert not lengths.is_contiguous()
    assert not hint.is_contiguous()
    check(ops, scores, 6, lengths=lengths, hint=hint)
    check(ops, scores, 6, lengths=lengths[:1].expand(4), hint=hint[:1].expand(4, -1))


# ---- hints


def hints(scores: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    rows, columns = scores.shape
    rng = np.random.default_rng(5)
    best = torch.tensor(oracle(scores, k))
    nan_columns = [row.isnan().nonzero().flatten().tolist() for row in scores]
    return {
        "oracle": best,
        "oracle-shifted": best + 1,
        "half-right": torch.cat([best[:, : k // 2], torch.zeros(rows, k - k // 2, dtype=torch.int64)], dim=1),
        "bottom": torch.tensor(oracle(-scores, k)),
        "random": torch.tensor(rng.integers(0, columns, (rows, k))),
        "random-int32": torch.tensor(rng.integers(0, columns, (rows, k)), dtype=torch.int32),
        "other-rows": best.flip(0),
        "out-of-range": torch.tensor(rng.integers(columns, columns + 100, (rows, k))),
        "negative": torch.tensor(rng.integers(-100, 0, (rows, k))),
        "all-minus-one": torch.full((rows, k), -1, dtype=torch.int32),
        "minus-one-tail": torch.cat([best[:, :5], torch.full((rows, k - 5), -1)], dim=1),
        "nan-positions": torch.tensor([(found * k)[:k] for found in nan_columns]),
        "duplicates": best[:, :1].repeat(1, k),
        "int64-extremes": torch.tensor([INT64.min, INT64.max]).repeat(rows, k),
        "int32-extremes": torch.tensor([INT32.min, INT32.max], dtype=torch.int32).repeat(rows, k),
        "low-32-bits-in-range": torch.tensor([2**32, 2**33 + 1]).repeat(rows, k),
        "uint8": torch.tensor(rng.integers(0, 255, (rows, 4)), dtype=torch.uint8),
        "empty": torch.zeros(rows, 0, dtype=torch.int64),
        "one": torch.zeros(rows, 1, dtype=torch.int64),
        "longer-than-the-row": torch.tensor(rng.integers(0, columns, (rows, 2 * columns))),
    }


@pytest.mark.parametrize("kind", ["normal", "plateau", "equal"])
def test_gvr_topk_hint_never_changes_the_result(ops, kind):
    rng = np.random.default_rng(4)
    table = {
        "normal": rng.standard_normal((3, 700)),
        "plateau": np.maximum(rng.standard_normal((3, 700)) - 1.5, 0),
        "equal": np.ones((3, 700)),
    }[kind]
    scores = torch.tensor(table, dtype=torch.float32)
    scores[:, 13::100] = NAN
    lengths = torch.tensor([700, 350, 40])
    for k in (10, 64, 690):
        expected, cut = oracle(scores, k), oracle(scores, k, lengths)
        for name, hint in hints(scores, k).items():
            before = hint.clone()
            assert ops.gvr_topk(scores, k, hint=hint).tolist() == expected, name
            assert ops.gvr_topk(scores, k, hint=hint, lengths=lengths).tolist() == cut, name
            assert torch.equal(hint, before), name
