"""What the compiled `index_topk` takes its winners from: candidates that a scorer leaves, against the reference.

Needs a Hopper GPU and a compiled variant: python hub_kernels/build.py hub_kernels/sparse-prr --cuda
"""

from importlib import import_module

import pytest
import torch

from .test_cuda_topk import GARBAGE, INF, NAN, ROWS, compiled, cuda, reference, table  # noqa: F401, the fixtures too

SHAPES = [4097, 8192, 16_385, 40_001, 131_072, 131_073, 300_001]  # up to a step of a program, two, a few


def left_by_a_scorer(order_keys, scores, threshold, lengths=None):
    """`Candidates` of any row: counts [R, tiles + 1], and keys and columns of what reaches the threshold, in order."""
    rows, columns = scores.shape
    tile = 64 * -(-columns // (256 * 64))
    tiles = -(-columns // tile)
    hit = scores >= threshold[:, :1]
    if lengths is not None:
        hit &= torch.arange(columns, device="cuda") < lengths[:, None]
    hit = torch.nn.functional.pad(hit, (0, tiles * tile - columns)).view(rows, tiles, tile)
    entries = torch.full((rows, tiles, tile, 2), GARBAGE, dtype=torch.int32, device="cuda")
    row, at, inside = hit.nonzero(as_tuple=True)
    column = at * tile + inside
    slot = (hit.cumsum(dim=2) - 1)[row, at, inside]
    entries[row, at, slot, 0] = order_keys(scores)[row, column].int()
    entries[row, at, slot, 1] = column.int()
    return torch.nn.functional.pad(hit.sum(dim=2, dtype=torch.int32), (0, 1)), entries


def refined(ops, scores, k, threshold, candidates, lengths=None):
    rows = scores.shape[0]
    indices = torch.full((rows, k), GARBAGE, dtype=torch.int32, device="cuda")
    counted = torch.full((rows,), GARBAGE, dtype=torch.int32, device="cuda")
    fallback = torch.ones(rows, dtype=torch.bool, device="cuda")
    ops.topk_candidates(indices, counted, fallback, scores, lengths, threshold, *candidates)
    return indices, counted, fallback


@pytest.fixture(scope="module")
def index(compiled):  # noqa: F811
    return import_module(f"{compiled.__name__}.cuda_kernels.index")


@pytest.fixture(scope="module")
def order_keys(compiled):  # noqa: F811
    signed = import_module(f"{compiled.__name__}.reference.gvr").order_keys
    return lambda scores: signed(scores) ^ torch.iinfo(torch.int32).min


def guesses(scores, k, cuda):  # noqa: F811
    """Thresholds [rows, 2], good and useless."""
    finite = scores.nan_to_num(-INF, INF, -INF)
    kth = finite.kthvalue(max(scores.shape[1] - k - k // 3, 1), dim=1).values
    top = finite.amax(dim=1)
    yield torch.stack((kth, top), dim=1)
    yield torch.stack((kth, kth), dim=1)  # no entry is said to be above it
    yield torch.stack((top, top), dim=1)
    yield cuda.topk_threshold(scores, k)
    for value in (0.0, INF, -INF, NAN):
        yield torch.full((len(scores), 2), value, device="cuda")


@pytest.mark.parametrize("columns", SHAPES)
def test_candidates_are_refined_as_the_reference_does(index, cuda, reference, order_keys, columns):  # noqa: F811
    scores = table(ROWS, columns)
    lengths = torch.tensor([columns, columns - 7, 2500, 0] * 5, device="cuda")[: len(scores)]
    for k in (1, 64, 2048, 4096):
        for limits in (None, lengths):
            expected = reference.gvr_topk(scores, k, lengths=limits)
            for threshold in guesses(scores, k, cuda):
                left = left_by_a_scorer(order_keys, scores, threshold, limits)
                found, _, _ = refined(index.ops, scores, k, threshold, left, limits)
                assert torch.equal(found, expected), (k, limits is None, threshold)


@pytest.mark.parametrize("crowded", [40, 3000])
def test_winners_may_stand_together(index, cuda, reference, order_keys, crowded):  # noqa: F811
    """More of a tile than a warp has lanes, and more than all of its registers."""
    scores = table(["normal"] * 4, 131_072)
    scores[:, 70_000 : 70_000 + crowded] += 9
    threshold = torch.stack((scores.kthvalue(131_072 - 2999, dim=1).values, scores.amax(dim=1)), dim=1)
    left = left_by_a_scorer(order_keys, scores, threshold)
    found, counted, fallback = refined(index.ops, scores, 2048, threshold, left)
    assert torch.equal(found, reference.gvr_topk(scores, 2048))
    assert not fallback.any() and counted.tolist() == [3000] * 4


@pytest.mark.parametrize("leaves", [2048, 2049, 4096, 4097, 8192, 8193])
def test_any_number_of_candidates(index, reference, order_keys, leaves):  # noqa: F811
    """As many as winners, half of what a thread holds and all of it, and one more each."""
    scores = table(["normal"] * 4, 131_072)
    threshold = torch.stack((scores.kthvalue(131_073 - leaves, dim=1).values, scores.amax(dim=1)), dim=1)
    left = left_by_a_scorer(order_keys, scores, threshold)
    assert left[0].sum(dim=1).tolist() == [leaves] * 4
    found, counted, fallback = refined(index.ops, scores, 2048, threshold, left)
    assert torch.equal(found, reference.gvr_topk(scores, 2048))
    assert fallback.all() if leaves > 8192 else not fallback.any() and counted.tolist() == [leaves] * 4


def test_a_bad_threshold_is_told(index, order_keys):
    scores = table(["normal"] * 2, 40_001)
    for value in (5.0, -5.0, NAN):  # too few, more than fit, none
        threshold = torch.full((2, 2), value, device="cuda")
        left = left_by_a_scorer(order_keys, scores, threshold)
        assert refined(index.ops, scores, 512, threshold, left)[2].all()


@pytest.mark.parametrize("columns", [*SHAPES, 524_288])
def test_all_blocks_of_a_row_collect_again(index, cuda, reference, order_keys, columns):  # noqa: F811
    """A few rows have several blocks each, which sample the row where the guess was bad; of ties all of it is read."""
    for first in range(0, len(ROWS), 4):
        scores = table(list(ROWS)[first : first + 4], columns)
        lengths = torch.tensor([columns, columns - 7, 2500, 0], device="cuda")[: len(scores)]
        for limits, k in ((None, 64), (None, 2048), (lengths, 2048)):
            expected = reference.gvr_topk(scores, k, lengths=limits)
            for value in (INF, NAN, -1e38):
                threshold = torch.full((len(scores), 2), value, device="cuda")
                left = left_by_a_scorer(order_keys, scores, threshold, limits)
                found, _, _ = refined(index.ops, scores, k, threshold, left, limits)
                assert torch.equal(found, expected), (first, k, limits is None, value)


@pytest.mark.parametrize("columns", [*SHAPES, 524_288, 524_289])
def test_the_scorer_leaves_what_reaches_the_threshold(index, compiled, order_keys, columns):  # noqa: F811
    """Counts, and keys and columns in order, of two rows whose winners lie evenly and in one place."""
    scorer = import_module(f"{compiled.__name__}.triton_kernels.index")
    draw = torch.Generator("cuda").manual_seed(columns)
    query = torch.randn(2, 1, 4, 64, generator=draw, device="cuda").bfloat16()
    keys = torch.randn(2, columns, 64, generator=draw, device="cuda").bfloat16()
    keys[1, columns // 2 : columns // 2 + 3000] = query[1, 0, :1]
    weights, end = torch.ones(2, 1, 4, device="cuda"), torch.tensor([[columns], [columns - 9]], device="cuda")
    valid = torch.rand(2, columns, generator=draw, device="cuda") > 0.1
    asked = (query, weights, keys, valid, end)
    scores, _ = scorer.score_tokens(*asked, 0.1, None)
    threshold = torch.tensor([[2.0, 9.0], [1.0, 9.0]], device="cuda")
    chosen, again = index.index_topk(*asked, 2048, scale=0.1, threshold=threshold)
    expected = import_module(f"{compiled.__name__}.reference").gvr_topk(scores[:, 0], 2048)
    assert torch.equal(chosen[:, 0], expected) and torch.equal(again.view(torch.int32), scores.view(torch.int32))
    if columns > 512 << 10:  # more than leave candidates
        return
    again, (counts, entries) = scorer.score_tokens(*asked, 0.1, threshold)
    assert torch.equal(again.view(torch.int32), scores.view(torch.int32))
    expected, places = left_by_a_scorer(order_keys, scores[:, 0], threshold)
    assert torch.equal(counts, expected)
    there = torch.arange(entries.shape[2], device="cuda") < counts[:, :-1, None]
    assert torch.equal(entries[there], places[there])


def test_index_topk_replays_over_new_queries_and_thresholds(index, cuda, reference):  # noqa: F811
    query = torch.randn(1, 1, 8, 64, device="cuda").bfloat16()
    keys = torch.randn(1, 131_072, 64, device="cuda").bfloat16()
    weights, valid = torch.ones(1, 1, 8, device="cuda"), torch.ones(1, 131_072, dtype=torch.bool, device="cuda")
    end, threshold = torch.tensor([[131_072]], device="cuda"), torch.full((1, 2), 1e9, device="cuda")

    def call():
        return index.index_topk(query, weights, keys, valid, end, 2048, scale=0.1, threshold=threshold)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runs = [call() for _ in range(6)]
    for turn in range(6):
        query.copy_(torch.randn(1, 1, 8, 64, device="cuda"))
        graph.replay()
        for chosen, scores in runs:
            assert torch.equal(chosen[:, 0], reference.gvr_topk(scores[:, 0], 2048)), turn
        if turn % 3:  # good for a query like this one, of any other unknown
            threshold.copy_(cuda.topk_threshold(runs[0][1][:, 0], 2048))
