"""The search behind gvr_topk: exact on every fixture that broke a kernel somewhere, whatever the hint, in few counts.

The oracle is a stable descending sort of the scores, compared as index lists. Rows longer than the candidate buffer
make the search run; a small buffer makes it run on short rows too.
"""

import os

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

CASES = int(
    os.environ.get("GVR_CASES", "60" if os.environ.get("TRITON_INTERPRET") else "600")
)  # 20000 before a release


def stable(scores, k, lengths=None):
    """int32 [R, k] by a stable sort: an independent reading of the contract."""
    rows = []
    for index, row in enumerate(scores.double()):
        length = len(row) if lengths is None else max(0, min(len(row), int(lengths[index])))
        row = row[:length]
        real = (~row.isnan()).nonzero().flatten()
        order = (row[real] + 0.0).sort(descending=True, stable=True).indices[:k]
        chosen = real[order].sort().values.to(torch.int32)
        rows.append(torch.nn.functional.pad(chosen, (0, k - len(chosen)), value=-1))
    return torch.stack(rows) if rows else torch.empty((0, k), dtype=torch.int32)


@pytest.fixture
def searches(ops):
    """Skips what is about the reference's search; the Triton kernel takes five passes whatever the hint."""
    if torch.empty(0).is_cuda or os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the radix kernel has no search to look at")


@pytest.fixture
def small_buffer(ops, monkeypatch):
    """Candidates that a threshold may leave: set it to what a test likes."""

    def use(size):
        monkeypatch.setitem(ops.gvr_topk.__wrapped__.__globals__, "buffer_size", lambda k: max(k, size))

    return use


def fitted(kind, generator, rows, columns):
    """Distributions fitted on real layers (TRT-LLM's indexer tests), clipped to what was seen there."""
    uniform = torch.rand((rows, columns), generator=generator, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    if kind == "logistic":
        return (-0.47 + 1.46 * torch.log(uniform / (1 - uniform))).clamp(-20, 12.32).float()
    if kind == "weibull":
        return (-3.04 + 1.57 * ((-torch.log(1 - uniform)) ** (1 / 14) * 6 - 4)).clamp(max=12.3).float()
    normal = torch.randn((rows, columns), generator=generator, dtype=torch.float64)
    if kind == "lognormal":
        return (-4.12 + 2.55 * torch.exp(normal * 0.6)).clamp(max=17.28).float()
    return (-0.75 + 1.9 * normal).clamp(max=13.6).float()


def relu_plateau(generator, rows, columns, positive):
    """A few positive scores over a plateau of exact zeros wider than any buffer."""
    scores = torch.zeros((rows, columns))
    for row in scores:
        row[torch.randperm(columns, generator=generator)[:positive]] = torch.rand(positive, generator=generator) + 0.1
    return scores


def one_bin(rows, columns, base=0x3F800000):
    """Distinct values that share one bin of a coarse fp16 histogram."""
    return (torch.arange(columns, dtype=torch.int32) + base).view(torch.float32).expand(rows, -1).clone()


def fixtures():
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(20000, generator=generator)
    normal = torch.randn((2, 16387), generator=generator)
    yield "normal", normal, 512
    for kind in ("logistic", "lognormal", "weibull", "clipped"):
        yield kind, fitted(kind, generator, 2, 16384), 1024
    for positive in (3, 100, 1000):
        yield f"relu {positive}", relu_plateau(generator, 2, 32768, positive), 2048
    yield "relu 100 of 8320", relu_plateau(generator, 1, 8320, 100), 2048
    yield "constant", torch.full((2, 9000), 0.25), 2048
    yield "two values", (torch.arange(9000) % 2).float().expand(2, -1).clone(), 1024
    yield "half -0.0", torch.where(torch.arange(9000) % 2 == 0, 0.0, -0.0).expand(2, -1).clone(), 700
    yield "one bin", one_bin(1, 65536), 1024
    yield "one bin shuffled", one_bin(1, 20000)[:, shuffled], 1024
    yield "pivot mismatch", one_bin(1, 20000, 0x3805ED27), 1024
    yield "step 2^-22", (1.0 + torch.arange(20000) * 2.0**-22)[shuffled][None], 2048
    yield "ascending", torch.arange(9000.0)[None], 512
    yield "descending", -torch.arange(9000.0)[None], 512
    yield "quantised 4", (torch.arange(20000) % 4).float()[None], 512
    yield "relu quantised 1/32", (normal.relu() * 32).round() / 32, 2048
    yield "1.0 plateau, 2.0 tail", torch.cat([torch.ones(9000), torch.full((300,), 2.0)])[None], 512
    yield "huge", torch.where(normal > 0, 3e38, -3e38) * normal.abs().clamp(max=1), 2048
    yield "outlier and cluster", torch.cat([torch.tensor([1e30]), 1 + torch.arange(9000) * 1e-7])[None], 2048
    yield "denormals", (torch.arange(9000, dtype=torch.int32) % 700).view(torch.float32)[None], 2048
    yield "more +inf than k", torch.where(normal > 0.2, float("inf"), normal), 512
    yield "three +inf", normal.index_fill(1, torch.tensor([5, 700, 9000]), float("inf")), 512
    yield "mostly -inf", torch.where(torch.arange(16387) % 1700 == 0, normal, -float("inf")), 512
    yield "all -inf", torch.full((1, 9000), -float("inf")), 512
    yield "all NaN", torch.full((1, 9000), float("nan")), 512
    yield "NaN every other", torch.where(torch.arange(16387) % 2 == 0, normal, float("nan")), 2048
    yield "fewer real than k", torch.where(torch.arange(16387) < 100, normal, float("nan")), 512
    buffer = 5120
    for extra in (-1, 0, 1):
        plateau = torch.cat([torch.full((buffer + extra,), 1.0), -torch.rand(4000, generator=generator)])
        yield f"plateau of buffer{extra:+d}", plateau[torch.randperm(len(plateau), generator=generator)][None], 512
    exactly = torch.cat([torch.full((512,), 2.0), torch.rand(8000, generator=generator)])
    yield "count exactly k", exactly[torch.randperm(len(exactly), generator=generator)][None], 512
    yield "bits", torch.randint(-(2**31), 2**31 - 1, (2, 9000), generator=generator).int().view(torch.float32), 1024


with torch.device("cpu"):  # generators of one device, whatever the tests run on
    FIXTURES = {name: (scores, k) for name, scores, k in fixtures()}


def fixture(name):
    """(scores, k) on the device under test."""
    scores, k = FIXTURES[name]
    return scores.to(torch.get_default_device()), k


def hints_for(scores, k):
    """Every kind of hint, most of them hostile."""
    with torch.device("cpu"):
        hints = cpu_hints_for(scores.cpu(), k)
    return {kind: None if hint is None else hint.to(scores.device) for kind, hint in hints.items()}


def cpu_hints_for(scores, k):
    rows, columns = scores.shape
    order = scores.nan_to_num(-1e38, 3e38, -3e38).argsort(dim=1, descending=True)
    generator = torch.Generator().manual_seed(1)
    random = torch.randint(0, columns, (rows, k), generator=generator)
    return {
        "none": None,
        "oracle": order[:, :k],
        "previous": torch.cat([order[:, : k // 2], random[:, : k - k // 2]], dim=1),
        "bottom": order[:, -k:],
        "random": random,
        "all zero": torch.zeros((rows, k), dtype=torch.int64),
        "all max": order[:, :1].expand(-1, k),
        "all -1": torch.full((rows, k), -1, dtype=torch.int32),
        "half duplicated": random[:, : k // 2].repeat(1, 2),
        "-1 tail": torch.cat([order[:, : k // 4], torch.full((rows, k - k // 4), -1)], dim=1),
        "another row's": order[:, :k].flip(0),
        "far outside": torch.randint(-(2**62), 2**62, (rows, k), generator=generator),
        "one": order[:, :1],
        "empty": torch.empty((rows, 0), dtype=torch.int64),
        "NaN positions": scores.isnan().to(torch.uint8).argsort(dim=1, descending=True)[:, :k],
    }


@pytest.mark.parametrize("name", FIXTURES)
def test_gvr_topk_is_exact_on_every_fixture_under_every_hint(ops, name):
    scores, k = fixture(name)
    expected = stable(scores, k)
    for kind, hint in hints_for(scores, k).items():
        found, stats = ops.gvr_topk(scores, k, hint=hint, return_stats=True)
        assert torch.equal(found, expected), kind
        assert int(stats.passes.max()) <= 36, kind


@pytest.mark.parametrize("name", ["normal", "logistic", "relu 100", "one bin shuffled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gvr_topk_in_half_precision(ops, name, dtype):
    scores, k = fixture(name)
    scores = scores.to(dtype)
    for hint in hints_for(scores.float(), k).values():
        assert torch.equal(ops.gvr_topk(scores, k, hint=hint), stable(scores, k))


@pytest.mark.parametrize("next_n", [2, 3])
def test_gvr_topk_of_several_query_tokens_with_one_hint_moved_along(ops, searches, next_n):
    """Rows are shifted copies, as several new tokens make them; the last step's winners move by the row's offset."""
    base = fixture("normal")[0][:1, :16000]
    scores = torch.stack([base[0].roll(offset + 1) for offset in range(next_n)])
    lengths = torch.tensor([16000 - next_n + offset + 1 for offset in range(next_n)])
    known = hints_for(base, 1024)["previous"][0]
    moved = torch.stack([known + offset + 1 for offset in range(next_n)])
    found, stats = ops.gvr_topk(scores, 1024, hint=moved, lengths=lengths, return_stats=True)
    assert torch.equal(found, stable(scores, 1024, lengths))
    assert not stats.fallback.any()
    assert int(stats.passes.max()) <= 3


def test_a_good_hint_takes_the_fast_path(ops, searches):
    """Asserted by statistics: no guard, one or two counts and the collect."""
    scores, k = fixture("normal")
    _, stats = ops.gvr_topk(scores, k, hint=hints_for(scores, k)["previous"], return_stats=True)
    assert not stats.fallback.any()
    assert int(stats.passes.max()) <= 3
    assert bool((stats.candidates >= k).all())
    assert bool((stats.candidates <= 5120).all())


def test_a_bad_hint_is_made_up_for_by_a_sample(ops, searches):
    scores, k = fixture("normal")
    for hint in (hints_for(scores, k)["one"], None):
        _, stats = ops.gvr_topk(scores, k, hint=hint, return_stats=True)
        assert not stats.fallback.any() and int(stats.passes.max()) <= 5


def test_a_bad_hint_and_a_bad_sample_take_the_guard(ops, searches):
    scores, k = fixture("normal")
    columns, number = scores.shape[1], torch.arange(2048)
    scores = scores.clone()
    scores[:, (number // 4 * columns // 512) // 4 * 4 + number % 4] = -100.0  # all that the sample sees
    found, stats = ops.gvr_topk(scores, k, hint=hints_for(scores, k)["one"], return_stats=True)
    assert torch.equal(found, stable(scores, k))
    assert stats.fallback.all()


def test_a_plateau_ends_the_search_in_one_count_when_it_is_hit(ops, searches):
    scores, k = fixture("constant")
    _, stats = ops.gvr_topk(scores, k, hint=torch.zeros((2, k), dtype=torch.int64), return_stats=True)
    assert stats.passes.tolist() == [2, 2]
    assert stats.candidates.tolist() == [0, 0]


@st.composite
def problems(draw):
    """Short rows full of ties, infinities and NaN, a buffer, lengths, and a hint of anything."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    values = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 1e-45]),
        st.floats(width=32),
        st.integers(-3, 3).map(float),
    )
    scores = torch.tensor(draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))).view(rows, columns)
    k = draw(st.integers(0, columns + 3))
    width = draw(st.integers(0, 6))
    entries = st.one_of(st.integers(-2, columns + 1), st.integers(-(2**63), 2**63 - 1))
    hint = draw(st.none() | st.lists(entries, min_size=rows * width, max_size=rows * width))
    lengths = draw(st.none() | st.lists(st.integers(-5, columns + 5), min_size=rows, max_size=rows))
    return (
        scores,
        k,
        None if hint is None else torch.tensor(hint, dtype=torch.int64).view(rows, width),
        None if lengths is None else torch.tensor(lengths),
        draw(st.integers(1, 12)),
    )


@hypothesis.settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(problems())
def test_gvr_topk_equals_the_stable_sort(ops, small_buffer, problem):
    scores, k, hint, lengths, size = problem
    small_buffer(size)
    before = scores.clone()
    found, stats = ops.gvr_topk(scores, k, hint=hint, lengths=lengths, return_stats=True)
    assert torch.equal(found, stable(scores, k, lengths))
    assert torch.equal(found, ops.gvr_topk(scores, k, lengths=lengths))
    assert int(stats.passes.max()) <= 40
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))
