"""Kernels under torch.compile: registered ops that are what the kernels are, and one graph for a decode step."""

import shutil
import subprocess
import sys
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import hf_sparse_prr.bundled as kernels
from hf_sparse_prr import gvr_topk, traced_ops
from hf_sparse_prr.config import DEFAULT_EMA, SparseConfig
from hf_sparse_prr.decode import decode_token, prefill_token, token_at
from hf_sparse_prr.layer import SparseLayer
from hf_sparse_prr.ops import traceable
from hf_sparse_prr.overlap import Overlap
from hf_sparse_prr.report import Statistics
from hf_sparse_prr.tokens import Tokens

BATCH, HEADS, GROUP, DIM, SIZE, FREE, PREDICTED = 2, 2, 2, 16, 32, 3, 4
NAN = float("nan")
OPS = traced_ops.Ops(traced_ops.key_of(kernels), kernels)
NAMES = (
    "append_states update_summaries compress_keys quest_scores infllm_scores gvr_topk select_blocks block_partials "
    "merge_partials repair_merge ema_step tally"
).split()


@pytest.fixture(autouse=True)
def forget():
    """No test finds what another compiled."""
    torch._dynamo.reset()


def ids(rows):
    """int32 [B, H, n], the same list for every row and head."""
    return torch.tensor(rows, dtype=torch.int32).expand(BATCH, HEADS, -1).contiguous()


class State:
    """A layer of `columns` columns whose rows start at 0 and 5, and hold `end` of them."""

    def __init__(self, columns=256, end=200, dtype=torch.float32):
        torch.manual_seed(0)
        blocks, shape = columns // SIZE, (BATCH, HEADS, columns, DIM)
        self.keys, self.values = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        self.start, self.end = torch.tensor([0, 5]), torch.full((BATCH,), end)
        self.valid = torch.arange(columns) >= self.start[:, None]
        self.valid[0, 40:50] = False
        box = torch.zeros((BATCH, HEADS, blocks, DIM), dtype=dtype)
        self.quest = (box, box.clone())
        means = torch.zeros((BATCH, HEADS, blocks, SIZE // 16, DIM), dtype=dtype)
        self.infllm = (means, torch.zeros(means.shape[:-1], dtype=torch.bool))
        self.level = torch.full((BATCH, HEADS, blocks), NAN)
        self.trend = torch.zeros_like(self.level)
        self.ema = torch.tensor(DEFAULT_EMA).repeat(BATCH, 1)
        self.numbers = torch.zeros((BATCH, HEADS, 7), dtype=torch.float64)
        self.predicted = ids([1, 3, -1, -1])
        self.query = torch.randn((BATCH, HEADS, GROUP, DIM), dtype=dtype)
        self.new = torch.randn((2, BATCH, HEADS, 1, DIM), dtype=dtype)

    def summarised(self):
        """The same, with summaries of what it holds."""
        grid, count = (self.keys, self.valid, self.start), int(self.end[0])
        kernels.update_summaries(*grid, *self.quest, self.end, count, SIZE)
        kernels.compress_keys(*grid, *self.infllm, self.end, count, window=32, stride=16)
        return self

    def tensors(self):
        """Everything it has."""
        return [*vars(self).values()]


def arguments(name, state, first, last):
    """(args, kwargs) of a kernel; blocks first .. last - 1 are scored."""
    if name not in ("update_summaries", "compress_keys"):
        state.summarised()
    grid, attend = (state.keys, state.valid, state.start), dict(scale=0.25, block_size=SIZE)
    data = (state.query, state.keys, state.values, state.valid, state.start)
    partials = kernels.block_partials(*data, state.predicted, state.end, **attend)
    scores = kernels.quest_scores(state.query, *state.quest, first, last)
    length, importance = state.end - state.start, kernels.normalise(scores)
    return {
        "append_states": ((state.keys, state.values, *state.new, state.end), {}),
        "update_summaries": ((*grid, *state.quest, state.end, 40, SIZE), {}),
        "compress_keys": ((*grid, *state.infllm, state.end, 40), dict(window=32, stride=16)),
        "quest_scores": ((state.query, *state.quest, first, last), dict(group="max")),
        "infllm_scores": ((state.query, *state.infllm, first, last, length), dict(scale=0.25, stride=16)),
        "gvr_topk": ((scores.flatten(0, 1), FREE), dict(hint=state.predicted.flatten(0, 1))),
        "select_blocks": ((scores, ids([0, 6]), FREE), dict(hint=state.predicted)),
        "block_partials": ((*data, state.predicted, state.end), attend),
        "merge_partials": ((partials,), {}),
        "repair_merge": ((*data, ids([0, 2, 3]), state.end, state.predicted, partials), attend),
        "ema_step": ((scores, state.level, state.trend, state.ema, first, last), {}),
        "tally": ((state.numbers, ids([0, 1, 2]), ids([1, 2]), state.predicted, importance, first, last), {}),
    }[name]


def bits(result):
    """What the tensors of a result hold, as bytes."""
    if isinstance(result, torch.Tensor):
        return [(result.dtype, tuple(result.shape), result.flatten().view(torch.uint8).tolist())]
    return [] if result is None else [tensor for part in result for tensor in bits(part)]


@pytest.fixture
def calls(monkeypatch):
    """(op, args, kwargs) of every registered op that is called."""
    made = []

    class Recorded:
        def __getattr__(self, name):
            op = getattr(torch.ops.hf_sparse_prr, name).default
            return lambda *args, **kwargs: made.append((op, args, kwargs)) or op(*args, **kwargs)

    monkeypatch.setattr(traced_ops, "_OPS", Recorded())
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_its_kernel(name, dtype):
    ours, theirs, last = State(dtype=dtype), State(dtype=dtype), torch.tensor([5, 4])
    args, kwargs = arguments(name, ours, 1, last)
    expected_args, _ = arguments(name, theirs, 1, last)
    before = bits(ours.tensors())
    result, expected = getattr(OPS, name)(*args, **kwargs), getattr(kernels, name)(*expected_args, **kwargs)
    assert type(result) is type(expected)
    assert bits(result) == bits(expected)
    assert bits(ours.tensors()) == bits(theirs.tensors())
    assert (bits(ours.tensors()) == before) == (expected is not None)  # it writes, or it returns something


@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_registered_as_it_behaves(name, calls):
    state = State(end=256)
    state.level = torch.rand_like(state.level)
    args, kwargs = arguments(name, state, 0, torch.tensor([8, 8]))  # opcheck takes no two NaN for equal
    getattr(OPS, name)(*args, **kwargs)
    (call,) = calls
    torch.library.opcheck(*call)


def test_top_k_with_statistics_is_registered_as_it_behaves(calls):
    scores, lengths = torch.randn(3, 40), torch.tensor([3, 40, 0])
    indices, stats = OPS.gvr_topk(scores, 5, lengths=lengths, return_stats=True)
    expected, expected_stats = kernels.gvr_topk(scores, 5, lengths=lengths, return_stats=True)
    assert bits([indices, stats]) == bits([expected, expected_stats])
    assert stats._fields == expected_stats._fields
    (call,) = calls
    torch.library.opcheck(*call)


def empty(name, state):
    """The same with nothing in it: no block, no slot, no hint."""
    none, last = torch.zeros((BATCH, HEADS, 0)), torch.zeros(BATCH, dtype=torch.int64)
    data = (state.query, state.keys, state.values, state.valid, state.start)
    attend, nothing = dict(scale=0.25, block_size=SIZE), none.int()
    return {
        "quest_scores": ((state.query, *(box[:, :, :0] for box in state.quest), 0, last), {}),
        "infllm_scores": (
            (state.query, *(t[:, :, :0] for t in state.infllm), 0, last, last),
            dict(scale=1.0, stride=16),
        ),
        "gvr_topk": ((none.flatten(0, 1), FREE), {}),
        "select_blocks": ((none, nothing, FREE), {}),
        "block_partials": ((*data, nothing, state.end), attend),
        "merge_partials": ((kernels.block_partials(*data, nothing, state.end, **attend),), {}),
        "repair_merge": ((*data, ids([0, -1]), state.end, nothing, None), attend),
        "ema_step": ((none, none, none, state.ema, 0, last), {}),
        "tally": ((state.numbers, nothing, nothing, nothing, None, 0, last), {}),
    }[name]


@pytest.mark.parametrize("name", NAMES[3:])
def test_an_op_on_nothing(name, calls):
    args, kwargs = empty(name, State().summarised())
    expected = getattr(kernels, name)(*args, **kwargs)
    assert bits(getattr(OPS, name)(*args, **kwargs)) == bits(expected)
    (call,) = calls
    torch.library.opcheck(*call)


def test_outputs_are_as_the_fakes_say_whatever_the_strides():
    level = torch.rand(HEADS, 8, BATCH).permute(2, 0, 1)
    step = OPS.ema_step(level, level, level, torch.tensor(DEFAULT_EMA).repeat(BATCH, 1), 0, torch.tensor([8, 8]))
    assert all(tensor.is_contiguous() for tensor in step)


def test_keys_name_a_module_for_good():
    modules = [types.ModuleType("twin") for _ in range(3)]
    keys = [traced_ops.key_of(module) for module in modules]
    assert keys == ["twin", "twin#2", "twin#3"]
    assert [traced_ops.key_of(module) for module in modules] == keys


def test_eager_code_calls_the_module_itself():
    assert traceable(kernels) is kernels


def test_nothing_is_registered_before_the_first_trace(tmp_path):
    code = "import sys; from hf_sparse_prr import decode, ops; print('hf_sparse_prr.traced_ops' in sys.modules)"
    # Elsewhere: in the repository's root its sources would be found first, without what the wheel maps into them
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "False\n"


def decode_step(module, state, selector, speculate, query, new, end):
    """A decode step of one layer that reads its lengths from the device."""
    ops, start = traceable(module), state.start
    ops.append_states(state.keys, state.values, *new, end)
    newest = (end - 1 - start) // SIZE
    last, forced = newest, torch.stack([torch.zeros_like(newest), newest], dim=1).int()[:, None]
    if selector == "quest":
        ops.update_summaries(state.keys, state.valid, start, *state.quest, end, 1, SIZE)
        scores = ops.quest_scores(query, *state.quest, 1, last)
    else:
        ops.compress_keys(state.keys, state.valid, start, *state.infllm, end, 1, window=32, stride=16)
        scores = ops.infllm_scores(query, *state.infllm, 1, last, end - start, scale=0.25, stride=16)
    data, attend = (query, state.keys, state.values, state.valid, start), dict(scale=0.25, block_size=SIZE)
    early, partials = state.predicted[:, :, :0], None
    if speculate:
        early = state.predicted
        partials = ops.block_partials(*data, early, end, **attend)
    selected, free = ops.select_blocks(scores, forced, FREE, hint=state.predicted)
    output = ops.repair_merge(*data, selected, end, early, partials, **attend)
    level, trend, expected, importance = ops.ema_step(scores, state.level, state.trend, state.ema, 1, last)
    ops.tally(state.numbers, selected, free, early, importance, 1, last)
    predicted = ops.gvr_topk(expected.flatten(0, 1), PREDICTED).view(BATCH, HEADS, PREDICTED)
    repaired = (ops.slots_of(selected, early) < 0).sum()
    return output, level, trend, predicted, repaired


def steps(step, selector, speculate, columns, begin, count):
    """The results of `count` steps, and all that they left behind."""
    state = State(columns, begin).summarised()
    grows = {"keys": 2, "values": 2, "valid": 1, "level": 2, "trend": 2}
    for name, dim in grows.items():
        torch._dynamo.mark_dynamic(getattr(state, name), dim)
    for tensor in (*state.quest, *state.infllm):
        torch._dynamo.mark_dynamic(tensor, 2)
    results = []
    for index in range(count):
        end = torch.full((BATCH,), begin + 1 + index)
        output, level, trend, predicted, repaired = step(
            kernels, state, selector, speculate, state.query + index, state.new + index, end
        )
        state.level.copy_(level)
        state.trend.copy_(trend)
        state.predicted.copy_(predicted)
        results += [output.clone(), predicted.clone(), repaired.clone()]
    return bits(results), bits(state.tensors())


def check_one_graph(backend, selector, speculate):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(decode_step, fullgraph=True, backend=counter)
    arrangements = [(256, 180, 5), (384, 300, 2), (512, 90, 2)]  # columns of the buffer, the first length, steps
    for arrangement in arrangements:
        expected = steps(decode_step, selector, speculate, *arrangement)
        assert steps(compiled, selector, speculate, *arrangement) == expected
    assert counter.frame_count == 1
    targets = {str(node.target) for node in counter.graphs[0].graph.nodes if node.op == "call_function"}
    used = 9 if speculate else 8
    assert sum("hf_sparse_prr" in target for target in targets) == used


@pytest.mark.parametrize("speculate", [False, True], ids=["serial", "prr"])
@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
def test_a_decode_step_is_one_graph_while_it_grows(selector, speculate):
    check_one_graph("aot_eager", selector, speculate)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
def test_a_decode_step_is_one_graph_of_inductor(selector):
    check_one_graph("inductor", selector, True)


def test_a_compiled_step_has_no_side_stream():
    def step(x):
        overlap = Overlap(torch.device("cuda"))  # would be an error where there is none
        with overlap.beside():
            x = x + 1
        overlap.join()
        return x

    counter = CompileCounterWithBackend("eager")
    assert torch.compile(step, fullgraph=True, backend=counter)(torch.zeros(2)).tolist() == [1, 1]
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiled_op_writes_in_every_mode(mode):
    state, expected = State(), State().summarised()
    grid = ("keys", "valid", "start")

    def summarise(state):
        traceable(kernels).update_summaries(
            *(getattr(state, name) for name in grid), *state.quest, state.end, count=200, block_size=SIZE
        )

    with mode():
        torch.compile(summarise, fullgraph=True, backend="aot_eager")(state)
    assert bits(state.quest) == bits(expected.quest)


def test_another_module_is_another_graph():
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda module, x: traceable(module).gvr_topk(x, 3), fullgraph=True, backend=counter)
    scores, other = torch.randn(2, 9), types.ModuleType("other")
    other.gvr_topk = lambda scores, k, **_: torch.full((len(scores), k), 7, dtype=torch.int32)
    assert torch.equal(compiled(kernels, scores), kernels.gvr_topk(scores, 3))
    assert compiled(other, scores).unique().tolist() == [7]
    assert torch.equal(compiled(kernels, scores), kernels.gvr_topk(scores, 3))
    assert counter.frame_count == 2


def test_the_public_top_k_is_one_graph():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gvr_topk, fullgraph=True, backend=counter)
    for columns in (40, 50, 60):
        scores = torch.randn(3, columns)
        torch._dynamo.mark_dynamic(scores, 1)
        lengths = torch.tensor([0, 7, columns])
        assert torch.equal(compiled(scores, 5, lengths=lengths), gvr_topk(scores, 5, lengths=lengths))
    assert counter.frame_count == 1


def test_what_eager_refuses_is_refused_in_a_trace():
    scores, elsewhere = torch.randn(1, 70), torch.zeros(1, device="meta")
    compiled = torch.compile(lambda x, t: gvr_topk(x, 6, threshold=t), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="threshold: expected device cpu, got meta"):
        compiled(scores, elsewhere)
    with pytest.raises(RuntimeError, match="k: expected an int >= 0, got -1"):
        torch.compile(lambda x: gvr_topk(x, -1), fullgraph=True, backend="aot_eager")(scores)


@pytest.mark.parametrize(("change", "message"), [
    (lambda query, box, last: (query[0], box, last), r"query: expected \[B, H, G, D\], got \[2, 4, 16\]"),
    (lambda query, box, last: (query, box[..., :8], last), r"lower: expected .* = \[1, 2, .., 16\], got"),
    (lambda query, box, last: (query, box, last.expand(3)), r"last: expected \[B\] = \[1\], got \[3\]"),
])  # fmt: skip
def test_a_compiled_op_refuses_what_does_not_fit(change, message):
    quest = lambda query, box, last: traceable(kernels).quest_scores(query, box, box, 0, last)  # noqa: E731
    with pytest.raises(ValueError, match=message):
        torch.compile(quest, fullgraph=True, backend="aot_eager")(
            *change(torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 5, 16), torch.zeros(1).int())
        )


class Segment:
    """A layer of fixed size that holds 1024 columns, and takes more."""

    def __init__(self, selector, speculate):
        torch.manual_seed(0)
        settings = dict(selector=selector, budget=256, dense_layers=0, ema=DEFAULT_EMA, speculate=speculate)
        self.layer, self.tokens = SparseLayer(max_length=1088), Tokens()
        self.layer.plan = SparseConfig(**settings).plan([""])[0]
        self.append(1024)

    def append(self, count=1):
        """`count` columns, and the query of the last."""
        keys, values = torch.randn(2, BATCH, HEADS, count, DIM)
        step = self.tokens.plan(None, BATCH, count, self.tokens.length + count, 1024)
        self.layer.update(keys, values)
        self.tokens.commit(step, BATCH, self.layer.capacity, keys.device)
        self.layer.summarise(kernels, self.tokens.on(keys.device))
        token = token_at(self.tokens, self.tokens.length - 1, 0, self.layer.plan, keys.device)
        # The host's numbers change from token to token; a compiled step that keeps them would be compiled for each
        return torch.randn(BATCH, HEADS, GROUP, DIM), token._replace(column=0)


@torch.no_grad()
def decoded(decode, selector, speculate):
    """What `decode_token` gives in six steps, and its statistics."""
    segment, counters, results = Segment(selector, speculate), Statistics(1), []
    for _ in range(6):
        query, token = segment.append()
        results.append(decode(segment.layer, 0, query, token, kernels, 0.25, counters, False))
    return bits(results), counters.layer(0)


@pytest.mark.parametrize("speculate", [False, True], ids=["serial", "prr"])
@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
def test_decode_token_is_one_graph(selector, speculate):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode_token, fullgraph=True, backend=counter)
    assert decoded(compiled, selector, speculate) == decoded(decode_token, selector, speculate)
    assert counter.frame_count == 2  # the first token has nothing to go by


def test_prefill_token_is_one_graph():
    segment, counter = Segment("quest", False), CompileCounterWithBackend("aot_eager")
    call = (segment.layer, *segment.append(), kernels, 0.25)
    compiled = torch.compile(prefill_token, fullgraph=True, backend=counter)
    assert bits(compiled(*call)) == bits(prefill_token(*call))
    assert counter.frame_count == 1
