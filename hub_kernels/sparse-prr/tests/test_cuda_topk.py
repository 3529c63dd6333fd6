"""The compiled top-k and select_blocks, index by index against the reference.

Needs a Hopper GPU and a compiled variant: python hub_kernels/build.py hub_kernels/sparse-prr --cuda
"""

from importlib import import_module
from pathlib import Path

import kernels
import numpy as np
import pytest
import torch

REPO = Path(__file__).parents[1]
INF, NAN = float("inf"), float("nan")
GARBAGE = 0x5A5A5A5A
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, 2, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 8192]
LENGTHS += [16383, 16384, 16385, 65536, 70001]


@pytest.fixture(scope="module")
def compiled():
    """The package of the compiled variant, as `kernels` picks it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    if not any(REPO.glob("build/*/*.abi3.so")):
        pytest.skip("no compiled variant: python hub_kernels/build.py hub_kernels/sparse-prr --cuda")
    package = kernels.get_local_kernel(REPO)
    assert import_module(f"{package.__name__}.cuda_kernels").AVAILABLE
    return package


@pytest.fixture(scope="module")
def cuda(compiled):
    return import_module(f"{compiled.__name__}.cuda_kernels.topk")


@pytest.fixture(scope="module")
def reference(compiled):
    return import_module(f"{compiled.__name__}.reference")


def bits(values) -> np.ndarray:
    return np.asarray(values).astype(np.uint32).view(np.float32)


ROWS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "uniform": lambda rng, n: rng.random(n),
    "all-equal": lambda rng, n: np.full(n, 0.25),
    "four-values": lambda rng, n: rng.integers(0, 4, n),
    "mostly-nan": lambda rng, n: np.where(rng.random(n) < 0.9, NAN, rng.standard_normal(n)),
    "all-nan": lambda rng, n: np.full(n, NAN),
    "infinities": lambda rng, n: rng.choice([INF, -INF, 0.0, 1.0], n),
    "minus-infinity": lambda rng, n: np.where(rng.random(n) < 0.97, -INF, 1.0),
    "zeros-of-both-signs": lambda rng, n: rng.choice([0.0, -0.0], n),
    "denormals": lambda rng, n: bits(rng.integers(0, 99, n) | rng.choice([0, 0x80000000], n)),
    "any-bits": lambda rng, n: bits(rng.integers(0, 2**32, n)),
    "one-bin": lambda rng, n: bits(0x3F800000 + rng.permutation(n)),
    "two-clusters": lambda rng, n: np.where(rng.random(n) < 0.02, 1e30, 1 + rng.random(n) * 1e-6),
    "outlier": lambda rng, n: np.r_[1 + rng.random(n) * 1e-6, 1e30][1:],
    "sawtooth": lambda rng, n: np.arange(n) % 64,
    "geometric": lambda rng, n: np.ldexp(1.0, 120 - np.arange(n) % 250),
    "ascending": lambda rng, n: np.arange(n),
    "descending": lambda rng, n: -np.arange(n),
}


def table(names, columns, dtype=torch.float32, seed=0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    rows = [np.asarray(ROWS[name](rng, columns), np.float32) for name in names]
    return torch.tensor(np.stack(rows), device="cuda").to(dtype)


def check(cuda, reference, scores, k, lengths=None):
    """Both kernels write over garbage; `candidates` counts the entries at or above the k-th."""
    rows = scores.shape[0]
    indices = torch.full((rows, k), GARBAGE, dtype=torch.int32, device="cuda")
    candidates = torch.full((rows,), GARBAGE, dtype=torch.int32, device="cuda")
    cuda.ops.gvr_topk(indices, candidates, scores, lengths)
    found = indices.cpu()
    expected = reference.gvr_topk(scores.cpu(), k, lengths=None if lengths is None else lengths.cpu())
    wrong = (found != expected).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong}: expected {expected[wrong[0]].tolist()[:8]}, got {found[wrong[0]].tolist()[:8]}"
    if k:
        for row, ids, seen in zip(scores.float().cpu(), expected, candidates.tolist(), strict=True):
            assert seen >= int((ids >= 0).sum())
            if lengths is None:
                chosen = row[ids[ids >= 0].long()]
                assert seen == (int((row >= chosen.min()).sum()) if len(chosen) else 0)
    return found


@pytest.mark.parametrize("columns", LENGTHS)
def test_rows_of_any_kind_and_length(cuda, reference, columns):
    scores = table(ROWS, columns, seed=columns)
    for k in sorted({0, 1, 16, 61, 257, 509, 2048, max(columns - 1, 0), columns, columns + 3}):
        if k <= columns + 509:
            check(cuda, reference, scores, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [33, 700, 2048, 8192, 20000])
def test_dtypes(cuda, reference, columns, dtype):
    for k in (1, 61, 509):
        check(cuda, reference, table(ROWS, columns, dtype), k)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("columns", [1, 300, 2048, 16385])
def test_ragged_lengths(cuda, reference, columns, dtype):
    info = torch.iinfo(dtype)
    lengths = [info.min, -1, 0, 1, 2, 31, 32, 33, 61, 62, columns // 2, columns - 1, columns, columns + 1, info.max]
    lengths = torch.tensor(lengths * 2, dtype=dtype, device="cuda")
    scores = table(["normal"] * 15 + ["four-values"] * 15, columns)
    for k in (1, 61, 509):
        check(cuda, reference, scores, k, lengths)
        check(cuda, reference, scores[::3], k, lengths[::3])


def test_views_of_rows(cuda, reference):
    wide = table(["normal", "infinities", "four-values", "mostly-nan"] * 2, 3001)
    for view in (
        wide[:, 3:],
        wide[1::2, :-5],
        wide[:1].expand(5, -1),
        wide[:, 7:8],
        wide.flatten()[1:6001].view(2, -1),
    ):
        check(cuda, reference, view, 61)
    for view in (wide.t(), wide[:, ::2]):  # copied by the wrapper
        assert torch.equal(cuda.gvr_topk(view, 5).cpu(), reference.gvr_topk(view.cpu(), 5))


def test_an_odd_k_of_a_long_row(cuda, reference):
    scores = table(["normal", "four-values", "all-equal", "one-bin"], 300_001)
    for k in (3, 2048, 65536):
        check(cuda, reference, scores, k)


# ---- select_blocks


def selection(columns, heads, slots, seed, shared=False):
    """Scores that are NaN where forced; forced ids ascending with -1 between, some behind the row."""
    rng = np.random.default_rng(seed)
    scores = table(rng.choice(list(ROWS), 2 * heads), columns, seed=seed).reshape(2, heads, columns).clone()
    forced = np.full((2, 1 if shared else heads, slots), -1, np.int32)
    for b, h in np.ndindex(forced.shape[:2]):
        there = rng.integers(0, min(slots, columns + 2) + 1)
        ids = np.sort(rng.choice(columns + 2, there, replace=False))
        forced[b, h, np.sort(rng.choice(slots, there, replace=False)) if there else []] = ids
        scores[b, slice(None) if shared else h, ids[ids < columns]] = NAN
    return scores, torch.tensor(forced, device="cuda")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("slots", [0, 1, 3, 32, 33, 64, 130])
@pytest.mark.parametrize("columns", [0, 1, 33, 257, 2048, 4097, 8192, 16385])
def test_forced_blocks_are_merged(cuda, reference, columns, slots, shared):
    scores, forced = selection(columns, 3, slots, columns + slots, shared)
    for k in (0, 1, 61, columns + 3):
        selected = torch.full((2, 3, slots + k), GARBAGE, dtype=torch.int32, device="cuda")
        free = torch.full((2, 3, k), GARBAGE, dtype=torch.int32, device="cuda")
        cuda.ops.select_blocks(selected, free, scores, forced)
        expected = reference.select_blocks(scores.cpu(), forced.cpu(), k)
        assert torch.equal(free.cpu(), expected[1])
        assert torch.equal(selected.cpu(), expected[0])


def test_select_blocks_takes_views(cuda, reference):
    scores, forced = selection(700, 4, 3, 1, shared=True)
    for view in (scores.transpose(0, 1).contiguous().transpose(0, 1), scores.repeat(1, 1, 2)[..., 700:]):
        for list_view in (forced, forced.expand(-1, 4, -1), forced.repeat(1, 1, 2)[..., ::2]):
            expected = reference.select_blocks(view.cpu(), list_view.cpu(), 61)
            found = cuda.select_blocks(view, list_view, 61)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


# ---- the same every time, and in a graph


def test_a_hundred_runs_are_equal(cuda):
    scores, forced = selection(8192, 8, 3, 5)
    first = cuda.select_blocks(scores, forced, 509)
    for _ in range(100):
        again = cuda.select_blocks(scores, forced, 509)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("columns", [512, 2048, 65536])
def test_a_replayed_graph_sees_new_scores(cuda, reference, columns):
    scores, forced = selection(columns, 4, 3, 6)
    cuda.select_blocks(scores, forced, 61)
    graph, written = torch.cuda.CUDAGraph(), torch.zeros_like(scores)
    with torch.cuda.graph(graph):  # behind a kernel that writes the scores: launched early, read late
        written.copy_(scores)
        written.mul_(1.0)
        selected, free = cuda.select_blocks(written, forced, 61)
    for seed in range(5):
        fresh = torch.tensor(np.random.default_rng(seed).standard_normal(scores.shape, np.float32), device="cuda")
        scores.copy_(torch.where(scores.isnan(), NAN, fresh))
        graph.replay()
        expected = reference.select_blocks(scores.cpu(), forced.cpu(), 61)
        assert torch.equal(selected.cpu(), expected[0])
        assert torch.equal(free.cpu(), expected[1])


def test_nothing_waits_for_the_gpu(cuda):
    scores, forced = selection(2048, 4, 3, 7)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda.select_blocks(scores, forced, 61)
        cuda.gvr_topk(scores[0], 61, lengths=torch.zeros(4, dtype=torch.int32, device="cuda"), return_stats=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_refused_tensors(cuda):
    scores = torch.zeros(2, 8, device="cuda")
    with pytest.raises(ValueError, match="scores: expected"):
        cuda.gvr_topk(scores.double(), 1)
    with pytest.raises(ValueError, match="forced: expected"):
        cuda.select_blocks(scores[None], torch.zeros(1, 1, 3, dtype=torch.int64, device="cuda"), 1)


@pytest.mark.parametrize("columns", [8193, 16_385, 131_072, 131_075, 300_001, 1_100_001])
@pytest.mark.parametrize("way", [1, 2, 3], ids=["tiles", "guessed", "stream"])
def test_every_way_finds_what_the_reference_does(cuda, reference, way, columns):
    scores = table(ROWS, columns)
    lengths = torch.tensor([columns, columns - 7, 5000, 2500, 0] * 4, device="cuda")[: len(scores)]
    for k in (1, 64, 2048, 4096):
        expected = reference.gvr_topk(scores, k, lengths=lengths)
        sampled = cuda.topk_threshold(scores, k, lengths=lengths)
        guesses = [None, sampled, sampled[:, 0], sampled * 3 + 1, sampled * 0 - 1, torch.full_like(sampled, NAN)]
        for threshold in guesses:
            found = cuda.gvr_topk(scores, k, lengths=lengths, threshold=threshold, way=way)
            assert torch.equal(found, expected), (k, threshold)
        if way == cuda.GUESSED:
            hint = torch.randint(-5, columns + 5, (len(scores), k), device="cuda")
            for each in (expected, hint):
                assert torch.equal(cuda.gvr_topk(scores, k, lengths=lengths, hint=each, way=way), expected), k


def test_a_good_threshold_takes_the_fast_path(cuda):
    for columns in (9000, 131_072):
        scores = table(["normal"] * 4, columns)
        for way in (1, 2, 3):
            for threshold in (None, cuda.topk_threshold(scores, 512)):
                _, stats = cuda.gvr_topk(scores, 512, threshold=threshold, return_stats=True, way=way)
                assert not stats.fallback.any() and (stats.passes == 1).all() and (stats.candidates < 8192).all()


def test_ways_replay_over_new_scores_lengths_and_thresholds(cuda, reference):
    scores, lengths = table(["normal"] * 3, 50_000), torch.tensor([50_000, 4_000, 9], device="cuda")
    threshold = cuda.topk_threshold(scores, 2048)
    for way in (1, 2, 3):
        cuda.gvr_topk(scores, 2048, lengths=lengths, threshold=threshold, way=way)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = cuda.gvr_topk(scores, 2048, lengths=lengths, threshold=threshold, way=way)
        for seed in range(4):
            scores.copy_(table(["normal", "four-values", "any-bits"], 50_000, seed=seed))
            lengths.copy_(torch.tensor([1 + 12_000 * seed, 50_000, 3 * seed], device="cuda"))
            threshold.copy_(threshold * (1 + seed % 2))
            found.fill_(GARBAGE)
            graph.replay()
            assert torch.equal(found, reference.gvr_topk(scores, 2048, lengths=lengths))
