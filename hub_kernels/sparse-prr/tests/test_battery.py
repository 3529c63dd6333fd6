"""gvr_topk on every fixture of five projects' top-k tests, and on some that nobody has: index lists, not sets.

The cases are made on the host and are the same for the reference, for Triton's interpreter and on a GPU; only there are
rows long. Each is compared with a stable sort (`battery.oracle`).
"""

from importlib import import_module
from itertools import product

import pytest
import torch

from .battery import (
    DEVICE,
    KS,
    LAYOUTS,
    ON_GPU,
    arena,
    case,
    drawing,
    fitting,
    memory,
    mixture,
    oracle,
    poisoned,
)
from .battery_hints import FEW, hints
from .battery_values import FITTED, ROWS, plateau
from .drawn import FORMATS, INTERPRETED

INF, NAN = float("inf"), float("nan")
HOW_MANY = 1 if INTERPRETED else 2  # rows of a kind
BUFFERS = ["k"] if INTERPRETED else ["k", "reference", 5120, 6144, 8192, 12_288]  # candidates that some kernel holds
COLUMNS = 4096 if INTERPRETED else 40_000 if ON_GPU else 12_000  # long enough for a kernel of long rows
COPIES = (1, 8, 40) if ON_GPU else (1,)  # of two rows: a kernel may take another way where there are many
BATCHES = [1, 16] if INTERPRETED else [1, 16, 30, 31, 64, 128, 129, 200, 256]
TIED = ("relu-100", "constant", "two-values", "quantised-8-head-300", "sawtooth", "zeros-of-both-signs", "inf-above-k")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="on a GPU only")
any_dtype = pytest.mark.parametrize("dtype", FORMATS, ids=str)


def on_device(tensor):
    return None if tensor is None else tensor.to(DEVICE)


def call(ops, scores, k, hint=None, lengths=None):
    """(winners on the host, statistics): inputs, and what lies between their rows, stay as they were."""
    scores, hint, lengths = on_device(scores), on_device(hint), on_device(lengths)
    rows, columns = scores.shape
    inputs = [memory(x) for x in (scores, hint, lengths) if x is not None]
    before = [x.clone() for x in inputs]
    stale = [torch.full(size, -7, dtype=torch.int32, device=DEVICE) for size in ((rows, k), (rows,), (rows,))]
    del stale  # the outputs will be given this memory
    found, stats = ops.gvr_topk(scores, k, hint=hint, lengths=lengths, return_stats=True)
    assert (found.dtype, found.shape, found.device) == (torch.int32, (rows, k), scores.device)
    assert [(x.dtype, x.shape) for x in stats] == [(x, (rows,)) for x in (torch.int32, torch.int32, torch.bool)]
    assert ((stats.passes >= 0) & (stats.passes <= 40)).all()
    assert ((stats.candidates >= 0) & (stats.candidates <= columns)).all()
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))
    return found.cpu(), stats


def check(ops, scores, k, expected, *, label="", **options):
    found, _ = call(ops, scores, k, **options)
    wrong = (found != expected).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        extra, lost = (
            sorted(set(a[wrong[0]].tolist()) - set(b[wrong[0]].tolist()))
            for a, b in ((found, expected), (expected, found))
        )
        pytest.fail(f"{label}: rows {wrong[:8]} differ; in the first, not expected {extra[:8]}, missing {lost[:8]}")


def hints_of(scores, k, names=None):
    with drawing("hints"):
        every = hints(scores.cpu(), k)
    return {name: every[name] for name in names or every}


def check_copies(ops, scores, k, expected, label, kinds):
    here = on_device(scores)
    for copies, (kind, hint) in product(COPIES, hints_of(scores, k, kinds).items()):
        known = None if hint is None else on_device(hint).repeat(copies, 1)
        expected_here = expected.repeat(copies, 1)
        check(ops, here.repeat(copies, 1), k, expected_here, hint=known, label=f"{label} {copies} times, {kind}")


def test_oracle_sorts_by_value_then_index():
    row = [1.0, NAN, -0.0, INF, 0.0, -INF, 1.0, -1e-45, 3e38, 0.0, INF]
    scores = torch.tensor([row, row], device="cpu")
    lengths = torch.tensor([99, 5], device="cpu")
    ranked = [3, 10, 8, 0, 6, 2, 4, 9, 7, 5]
    for k in range(13):
        winners = sorted(ranked[:k]), sorted([3, 0, 2, 4][:k])
        assert oracle(scores, k, lengths).tolist() == [x + [-1] * (k - len(x)) for x in winners]


# ---- rows


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_kind_under_every_threshold(ops, name):
    scores, k = case(name, rows=HOW_MANY)
    expected = oracle(scores, k)
    worst = torch.where(expected < 0, INF, scores.gather(1, expected.clamp(min=0).long())).amin(dim=1)
    here = on_device(scores)
    guesses = {"k-th": worst, "half": worst / 2, "twice": worst * 2 + 1, "zero": worst * 0}
    guesses |= {str(x): torch.full_like(worst, x) for x in (NAN, INF, -INF, 3e38)}
    found = {kind: on_device(guess.float()) for kind, guess in guesses.items()}
    found |= {f"{kind}, reach": torch.stack([guess, guess.abs() * 2], dim=1) for kind, guess in found.items()}
    found["sampled"] = ops.topk_threshold(here, k)
    for kind, threshold in found.items():
        winners = ops.gvr_topk(here, k, threshold=threshold)
        assert torch.equal(winners.cpu(), expected), kind


@any_dtype
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_kind_under_every_hint(ops, name, dtype):
    scores, k = case(name, dtype, rows=HOW_MANY)
    expected = oracle(scores, k)
    for kind, hint in hints_of(scores, k, FEW if INTERPRETED else None).items():
        check(ops, scores, k, expected, hint=hint, label=kind)
    if k <= scores.shape[1] and not scores.isnan().any():
        best = scores.gather(1, expected.long()).sort(dim=1, descending=True).values
        assert torch.equal(best, scores.topk(k).values)


@any_dtype
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_kind_end_anywhere(ops, name, dtype):
    scores, k = case(name, dtype, rows=HOW_MANY)
    with drawing(name):
        lengths = torch.randint(k // 2, scores.shape[1] + 1, (HOW_MANY,)).int()
    scores = poisoned(scores, lengths, 3e38)
    expected = oracle(scores, k, lengths)
    for kind, hint in hints_of(scores, k, ("none", "random")).items():
        check(ops, scores, k, expected, hint=hint, lengths=lengths, label=kind)


@any_dtype
@pytest.mark.parametrize("columns", fitting(4096, 8192, 16_384, 65_536, 131_072))
@pytest.mark.parametrize("name", FITTED)
def test_fitted_distributions(ops, name, columns, dtype):
    """With a tenth of the rows short, and hints that were half or nine tenths right."""
    rows = 2 if INTERPRETED else 10
    for k in (512, 1024, 2048):
        scores = case(name, dtype, rows=rows, columns=columns, k=k)[0]
        lengths = torch.tensor([k // 2] + [columns] * (rows - 1), device="cpu")
        expected = oracle(scores, k, lengths)
        for kind, hint in hints_of(scores, k, ("half-right", "nearly-right")[:HOW_MANY]).items():
            check(ops, scores, k, expected, hint=hint, lengths=lengths, label=f"{k} {kind}")


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("size", BUFFERS)
@pytest.mark.parametrize("above", [0, 100, "distinct"])
@pytest.mark.parametrize("k", [1, 512, 2048] if INTERPRETED else [1, 512, 2048, 4096])
def test_as_many_candidates_as_a_buffer_holds(ops, k, above, size, extra):
    """Or one more or less: equal ones, equal ones below larger ones, neighbours."""
    if size == "reference":
        size = import_module(f"{ops.__name__}.reference.gvr").buffer_size(k)
    count = (k if size == "k" else size) + extra
    larger = 0 if above == "distinct" else min(above, k - 1, count)
    for columns, dtype in product([count + 1000] + [131_072] * ON_GPU, FORMATS[:1] if above == "distinct" else FORMATS):
        with drawing(f"{k} {above} {count}"):
            scores = torch.stack([plateau(columns, count, larger, above == "distinct") for _ in range(HOW_MANY)])
        scores = scores.to(dtype)
        expected = oracle(scores, k)
        check_copies(ops, scores, k, expected, f"{columns} {dtype}", ("none", "half-right", "bottom")[: 1 + HOW_MANY])


@any_dtype
@pytest.mark.parametrize("k", KS)
def test_every_k_at_the_edges_of_published_sizes(ops, k, dtype):
    short = fitting(k + 1, 4096, 4099, 4111, 8192, 8193, 8320, 16_384, 16_385, 16_387)
    for n in short + fitting(65_535, 65_536, 65_537, 131_072, 131_075, 131_076, 262_143, 262_144):
        for name in ("normal", "relu-1000"):
            scores = case(name, dtype, rows=1, columns=n, k=k)[0]
            check(ops, scores, k, oracle(scores, k), label=f"{n} {name}")


@needs_gpu
@any_dtype
@pytest.mark.parametrize("columns", [65_536, 131_072, 262_144])
def test_long_rows_of_every_kind(ops, columns, dtype):
    for name in ROWS:
        scores, k = case(name, dtype, columns=columns)
        check_copies(ops, scores, k, oracle(scores, k), name, FEW)


# ---- lengths


@any_dtype
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("poison", [3e38, 1e9, INF, NAN])
def test_nothing_at_or_past_the_length_is_a_candidate(ops, poison, integer, dtype):
    k, columns = 512, COLUMNS
    ends = [-1, 0, 1, k - 16, k - 1, k, k + 1, 2500, columns - 1, columns, columns + 1, torch.iinfo(integer).max]
    lengths = torch.tensor(ends, dtype=integer, device="cpu")
    scores = case("normal", dtype, rows=len(ends), columns=columns)[0]
    scores[4::4, 7:300] = INF  # in reach of some
    scores = poisoned(scores, lengths, poison)
    expected = oracle(scores, k, lengths)
    assert (expected >= 0).sum(dim=1).tolist() == [min(k, max(0, min(end, columns))) for end in ends]
    for layout in (scores, arena(on_device(scores), columns + 9)):  # behind the last column too
        for kind, hint in hints_of(scores, k, ("none", "longer-row")).items():
            check(ops, layout, k, expected, hint=hint, lengths=lengths, label=kind)


MIXES = {
    "uniform": lambda rows, n: torch.randint(1, n + 1, (rows,)),
    "lognormal": lambda rows, n: torch.exp(torch.randn(rows) + 6.5).long().clamp(1, n),
    "bimodal": lambda rows, n: torch.where(torch.rand(rows) < 0.5, n // 64, n),
    "causal": lambda rows, n: n - rows + 1 + torch.arange(rows),
    "zero-to-full": lambda rows, n: torch.linspace(0, n, rows).long(),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("rows", BATCHES)
def test_batches_of_any_size_and_mix_of_lengths(ops, rows, mix):
    k, columns = (128, 1024) if INTERPRETED else (1024, 65_536) if ON_GPU else (512, 6000)
    scores = mixture(rows, columns, k)
    with drawing(mix):
        lengths = MIXES[mix](rows, columns)
    scores = poisoned(scores, lengths, 1e9)
    check(ops, scores, k, oracle(scores, k, lengths), lengths=lengths)


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_rows_of_several_new_tokens(ops, next_n, ratio):
    """Each sees one token more than the one before; a score stands for `ratio` tokens. One hint serves all."""
    k, columns, requests = 1024, COLUMNS, 2 if INTERPRETED else 4
    base = case("normal", rows=requests, columns=columns)[0]
    row = torch.arange(requests * next_n, device="cpu")
    request, token = row // next_n, row % next_n
    scores = torch.stack([base[r].roll(t + 1) for r, t in zip(request.tolist(), token.tolist(), strict=True)])
    tokens = ratio * columns - request % 3  # not a multiple of the ratio
    lengths = (tokens - next_n + token + 1) // ratio
    scores = poisoned(scores, lengths, 3e38)
    expected = oracle(scores, k, lengths)
    previous = hints_of(base, k, ("half-right",))["half-right"][request]
    moved = previous + (token[:, None] + 1 if ratio == 1 else 0)
    for hint in (previous, moved):
        check(ops, scores, k, expected, hint=hint, lengths=lengths)


@pytest.mark.parametrize(
    "rows, columns, k", [(0, 0, 0), (0, 0, 5), (0, 700, 5), (3, 0, 0), (3, 0, 5), (3, 7, 0), (3, 7, 9)]
)
def test_nothing_to_select_from_or_less_than_k(ops, rows, columns, k):
    scores = torch.arange(rows * columns, device="cpu").float().view(rows, columns)
    for lengths in (None, torch.zeros(rows, dtype=torch.int32, device="cpu")):
        for hint in (None, torch.zeros((rows, 4), dtype=torch.int64, device="cpu")):
            check(ops, scores, k, oracle(scores, k, lengths), hint=hint, lengths=lengths)


# ---- the result depends on the row alone


def test_neighbours_order_and_what_ran_before_change_nothing(ops):
    k = 1024
    scores = mixture(8, COLUMNS, k)
    expected = oracle(scores, k)
    for row in range(8):
        check(ops, scores[row : row + 1], k, expected[row : row + 1], label=f"row {row} alone")
    with drawing("order"):
        order = torch.randperm(8)
    check(ops, scores[order], k, expected[order], label="in another order")
    for other in (k // 2, 3 * k):  # state left behind
        check(ops, scores[:2].flip(1), other, oracle(scores[:2].flip(1), other), label="between")
        check(ops, scores, k, expected, label="after others")
    found = [ops.gvr_topk(on_device(scores), k) for _ in range(50 if ON_GPU else 2)]
    assert all(torch.equal(x.cpu(), expected) for x in found)


@any_dtype
@pytest.mark.parametrize("name", TIED)
def test_ties_go_to_the_first_wherever_they_stand(ops, name, dtype):
    """Without the oracle: what is larger than the k-th moves along with a permutation, and ties don't."""
    scores, k = case(name, dtype, rows=1)
    with drawing(name):
        orders = [torch.arange(scores.shape[1]), torch.arange(scores.shape[1]).flip(0), torch.randperm(scores.shape[1])]
    larger = set()
    for order in orders:
        row = scores[0, order]
        found = call(ops, row[None], k)[0][0].long()
        assert (found.diff() > 0).all()
        kth = row[found].min()
        chosen = torch.zeros_like(row, dtype=torch.bool).index_fill(0, found, True)
        above, equal = row > kth, row == kth
        assert above.sum() < k <= (above | equal).sum()
        assert torch.equal(chosen, above | (equal & (equal.cumsum(0) <= k - above.sum())))
        larger.add(frozenset(order[above].tolist()))
    assert len(larger) == 1


@any_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_any_layout(ops, layout, dtype):
    k = 512
    for copies in COPIES:
        view = LAYOUTS[layout](on_device(mixture(4 * copies, COLUMNS, k, dtype)))
        rows, columns = view.shape
        ends = torch.tensor([columns, columns // 2, columns + 700, 0, k], device="cpu").int()
        for lengths in (None, ends.repeat(copies)[:rows]):
            check(ops, view, k, oracle(view, k, lengths), lengths=lengths, label=f"{rows} rows")


@any_dtype
@pytest.mark.parametrize("k", [512, 2048])
@pytest.mark.parametrize("columns", fitting(4096, 16_384, 65_536, 262_144))
def test_plain_scores_take_the_fast_path(ops, columns, k, dtype):
    """Asserted by the statistics. The reference has its guess from a hint alone, and one step to correct it."""
    names, known = ["normal", "uniform"], ["half-right"]
    if import_module(f"{ops.__name__}.dispatch").HAS_TRITON and (ON_GPU or INTERPRETED):
        names, known = names + list(FITTED), known + ["none"]
    for name in names:
        scores, _ = case(name, dtype, rows=2 * COPIES[-1], columns=columns, k=k)
        for (kind, hint), copies in product(hints_of(scores, k, known).items(), COPIES):
            rows = slice(2 * copies)
            _, stats = call(ops, scores[rows], k, hint if hint is None else hint[rows])
            assert not stats.fallback.any(), f"{name} {kind}, {2 * copies} rows"


# ---- on a GPU only

LARGE = [(64, 262_144), (64, 2**20), (2048, 131_072), (4096, 200_000), (1, 2**22), (2, 2**22 + 1), (1, 6_000_000)]


@needs_gpu
@pytest.mark.parametrize("rows, columns", LARGE)
def test_large_batches_and_rows(ops, rows, columns):
    """Sixteen rows over and over."""
    k, which = 2048, torch.arange(rows, device="cpu") % 16
    few, _ = case("normal", rows=min(rows, 16), columns=columns, k=k)
    found = ops.gvr_topk(on_device(few)[on_device(which)], k)
    assert torch.equal(found.cpu(), oracle(few, k)[which])


@needs_gpu
def test_a_replayed_graph_follows_scores_and_lengths(ops):
    if ops.backend == "reference":
        pytest.skip("the reference waits for the GPU")
    k, columns = 2048, 65_536
    host = mixture(8, columns, k)
    scores, hint = on_device(host), on_device(hints_of(host, k, ("random",))["random"])
    lengths = torch.full((8,), columns, dtype=torch.int32, device=DEVICE)
    ops.gvr_topk(scores, k, hint=hint, lengths=lengths)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.gvr_topk(scores, k, hint=hint, lengths=lengths)
    for step, end in enumerate((columns, 700, 40_000, 0, k + 1, columns)):
        fresh = host.roll(step, 0)
        ends = (end + torch.arange(8, device="cpu")).int()
        scores.copy_(fresh)
        lengths.copy_(ends)
        found.fill_(-7)
        graph.replay()
        assert torch.equal(found.cpu(), oracle(fresh, k, ends)), end


@needs_gpu
def test_streams_side_by_side(ops):
    k = 2048
    tables = [mixture(8, 131_072, k).roll(shift, 1) for shift in range(4)]
    ready, streams = [on_device(x) for x in tables], [torch.cuda.Stream() for _ in tables]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for scores, stream in zip(ready, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(ops.gvr_topk(scores, k))
    torch.cuda.synchronize()
    expected = [oracle(x, k) for x in tables]
    assert all(torch.equal(x.cpu(), expected[i % 4]) for i, x in enumerate(found))


@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="two GPUs")
def test_a_device_that_is_not_the_current_one(ops):
    scores = mixture(8, 16_387, 1024)
    found = ops.gvr_topk(scores.to("cuda:1"), 1024)
    assert found.device == torch.device("cuda:1")
    assert torch.equal(found.cpu(), oracle(scores, 1024))
