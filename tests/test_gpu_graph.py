"""A decode step in a CUDA graph: captured once, replayed while rows grow, with the bits of eager steps."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from hf_sparse_prr import SparseConfig, kernel_loader
from hf_sparse_prr.decode import decode_token, token_at
from hf_sparse_prr.layer import SparseLayer
from hf_sparse_prr.report import Statistics
from hf_sparse_prr.selectors import SELECTORS, Columns
from hf_sparse_prr.tokens import Step, Tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CONTEXT, STEPS = 500, 1000
BATCH, HEADS, GROUP, DIM = 2, 2, 4, 128
SCALE = DIM**-0.5


@pytest.fixture(autouse=True)
def on_the_gpu():
    before = torch.get_default_device()
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(before)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), dtype=torch.bfloat16)


class Run:
    """One layer with a padded row, and the tokens that follow its context."""

    def __init__(self, selector, speculate):
        config = SparseConfig(
            selector=selector, budget=256, block_size=32, dense_layers=0, speculate=speculate, ema=(0.4, 0.1, 0.25)
        )
        self.kernels = kernel_loader.resolve("auto").module
        self.layer, self.tokens, self.statistics = SparseLayer(max_length=CONTEXT + STEPS), Tokens(), Statistics(1)
        self.layer.plan = config.plan([""])[0]
        keys, values = (normal(seed, BATCH, HEADS, CONTEXT + STEPS, DIM) for seed in (0, 1))
        self.new = (keys[:, :, CONTEXT:], values[:, :, CONTEXT:])
        self.queries = normal(2, STEPS, BATCH, HEADS, GROUP, DIM)
        validity = torch.ones(BATCH, CONTEXT, dtype=torch.bool)
        validity[0, :75] = False
        self.layer.update(keys[:, :, :CONTEXT], values[:, :, :CONTEXT])
        self.tokens.commit(Step(0, CONTEXT, CONTEXT, validity), BATCH, CONTEXT + STEPS, keys.device)
        self.layer.summarise(self.kernels, self.tokens.on(keys.device))

    def decode(self, query):
        tokens, layer = self.tokens, self.layer
        token = token_at(tokens, tokens.length - 1, 0, layer.plan, query.device)
        return decode_token(layer, 0, query, token, self.kernels, SCALE, self.statistics, False)[0]

    def eager(self, step):
        """As a patched layer does it."""
        self.layer.update(*(states[:, :, step : step + 1] for states in self.new))
        self.tokens.commit(Step(CONTEXT + step, 1, 0), BATCH, self.layer.capacity, self.queries.device)
        self.layer.summarise(self.kernels, self.tokens.on(self.queries.device))
        return self.decode(self.queries[step])

    def capture(self):
        """(replay(step) -> output) after the first steps were eager. Lengths are read on the device alone."""
        query, new = self.queries[0].clone(), [states[:, :, :1].clone() for states in self.new]
        state = self.layer.memory.prior.map(torch.clone)
        output = torch.empty(BATCH, HEADS, GROUP, DIM)
        self.tokens.valid[:, self.tokens.length :] = True  # `end` hides what isn't there yet

        def step():
            tokens, layer, plan = self.tokens, self.layer, self.layer.plan
            tokens.shared.clear()
            tokens.end += 1
            self.kernels.append_states(layer.keys, layer.values, *new, tokens.end)
            columns = Columns(layer.keys, *tokens.on(query.device), 1)
            SELECTORS[plan.selector].summarise(self.kernels, layer.summaries, columns, plan)
            layer.memory.prior = state
            output.copy_(self.decode(query))
            for held, made in zip(tree_leaves(state), tree_leaves(layer.memory.prior), strict=True):
                if held is not None:
                    held.copy_(made)

        graph, before = torch.cuda.CUDAGraph(), self.tokens.end.clone()
        with torch.cuda.graph(graph):
            step()
        assert torch.equal(self.tokens.end, before)  # captured, not run

        def replay(at):
            query.copy_(self.queries[at])
            for held, states in zip(new, self.new, strict=True):
                held.copy_(states[:, :, at : at + 1])
            graph.replay()
            return output.clone()

        return replay


@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
@pytest.mark.parametrize("speculate", [False, True])
def test_replays_have_the_bits_of_eager_steps_as_rows_grow(selector, speculate):
    eager, captured = Run(selector, speculate), Run(selector, speculate)
    expected = [eager.eager(step) for step in range(STEPS)]
    for step in range(3):  # compile, and a first prior
        assert torch.equal(captured.eager(step), expected[step])
    replay = captured.capture()
    for step in range(3, STEPS):
        churn = [torch.full((97 * (step % 50 + 1),), float("nan")) for _ in range(4)]
        assert torch.equal(replay(step), expected[step]), step
        del churn
    assert torch.equal(captured.layer.keys, eager.layer.keys)
    counts = [run.statistics.layer(0) for run in (eager, captured)]
    assert counts[0]["hits"] == counts[1]["hits"] and counts[0]["blocks_read"] == counts[1]["blocks_read"]


def test_prr_equals_serial_over_many_steps():
    serial, parallel = Run("quest", False), Run("quest", True)
    assert all(torch.equal(serial.eager(step), parallel.eager(step)) for step in range(300))
    assert parallel.statistics.layer(0)["hits"] > 0


def test_a_users_stream_is_respected():
    expected = [Run("quest", True).eager(0)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = Run("quest", True)
        torch.cuda._sleep(2_000_000_000)  # what follows must wait for this stream, and for no other
        got = [run.eager(step) for step in range(20)]
        assert not stream.query()
    torch.cuda.current_stream().wait_stream(stream)
    other = Run("quest", True)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(other.eager(step), got[step]) for step in range(20))
