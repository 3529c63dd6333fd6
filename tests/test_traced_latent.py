"""Ops of models with an indexer under torch.compile: what the kernels are, and one graph for a decode step."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import hf_sparse_prr.bundled as kernels
from hf_sparse_prr import traced_latent, traced_ops
from hf_sparse_prr.config import SparseConfig
from hf_sparse_prr.decode import decode_step
from hf_sparse_prr.indexed import IndexedLayer, Indexer
from hf_sparse_prr.latent import Index, LatentAttention, token_of
from hf_sparse_prr.ops import traceable
from hf_sparse_prr.report import Statistics
from hf_sparse_prr.tokens import Tokens

B, T, HEADS, CHANNELS, ROTATED, INDEX_HEADS, DIM, TOPK = 2, 90, 3, 8, 4, 4, 8, 20
OPS = traced_ops.Ops(traced_ops.key_of(kernels), kernels)
NAMES = ("index_scores", "index_topk", "latent_attention")


@pytest.fixture(autouse=True)
def forget():
    """No test finds what another compiled."""
    torch._dynamo.reset()


def arguments(name, queries=3, dtype=torch.float32, slots=5, guessed=2):
    """(args, kwargs) of a kernel."""
    torch.manual_seed(0)
    keys, valid = torch.randn(B, T, DIM, dtype=dtype), torch.rand(B, T) > 0.2
    index = (torch.randn(B, queries, INDEX_HEADS, DIM, dtype=dtype), torch.randn(B, queries, INDEX_HEADS), keys, valid)
    index += (torch.full((B, queries), T),)
    latents, ropes = (torch.randn(B, T, size, dtype=dtype) for size in (CHANNELS, ROTATED))
    query = torch.randn(B, queries, HEADS, CHANNELS + ROTATED, dtype=dtype)
    tokens = torch.randint(T, (B, queries, slots)).sort(dim=2).values.int()
    early = tokens[:, :, :guessed].contiguous()
    held = kernels.gather_tokens(latents, ropes, early) if guessed else None
    guess = torch.full((B * queries, 2), 0.3)
    return {
        "index_scores": (index, dict(scale=0.3)),
        "index_topk": ((*index, slots), dict(scale=0.3, hint=tokens.flatten(0, 1), threshold=guess)),
        "latent_attention": ((query, latents, ropes, tokens, early, held), dict(scale=0.3)),
    }[name]


def same(found, expected):
    pairs = zip(*((each,) if isinstance(each, torch.Tensor) else each for each in (found, expected)), strict=True)
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) and x.dtype == y.dtype for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_its_kernel(name, dtype):
    args, kwargs = arguments(name, dtype=dtype)
    assert same(getattr(OPS, name)(*args, **kwargs), getattr(kernels, name)(*args, **kwargs))


@pytest.mark.parametrize(("queries", "slots"), [(3, 5), (1, 5), (0, 5), (3, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_registered_as_it_behaves(name, queries, slots):
    args, kwargs = arguments(name, queries, slots=slots, guessed=min(slots, 2))
    if name != "latent_attention":  # opcheck takes no two NaN for equal
        args = (*args[:3], torch.ones_like(args[3]), *args[4:])
    torch.library.opcheck(getattr(torch.ops.hf_sparse_prr, name).default, (OPS._key, *args), kwargs)


@pytest.mark.parametrize(
    ("name", "at", "message"),
    [
        ("index_scores", 1, r"weights: expected \[B, Q, I\] = \[2, 3, 4\], got"),
        ("index_topk", 2, r"keys: expected \[B, T, E\] = \[2, .., 8\], got"),
        ("latent_attention", 2, r"ropes: expected \[B, T, A\] = \[2, 90, ..\], got"),
    ],
)
def test_what_eager_refuses_is_refused_in_a_trace(name, at, message):
    args, kwargs = arguments(name)
    args = (*args[:at], args[at][:1], *args[at + 1 :])

    def call(*args):
        return getattr(traceable(kernels), name)(*args, **kwargs)

    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            run(*args)


class Segment:
    """A layer with an indexer that holds T tokens in buffers of fixed size, and takes more."""

    def __init__(self, speculate):
        torch.manual_seed(0)
        self.layer, self.tokens = IndexedLayer(max_length=128), Tokens()
        self.layer.plan = SparseConfig(speculate=speculate).plan([""], Indexer(TOPK, (False,)))[0]
        self.statistics, self.calls = Statistics(1), 0
        self.append(T)

    def append(self, count=1):
        """`count` tokens, as the host appends them."""
        self.layer.update(torch.randn(B, 1, count, CHANNELS), torch.randn(B, 1, count, ROTATED))
        self.layer.update_indexer(torch.randn(B, count, DIM))
        step = self.tokens.plan(None, B, count, self.tokens.length + count, T)
        self.tokens.commit(step, B, self.layer.capacity, torch.device("cpu"))

    def asked(self):
        """What the next token asks: index and absorbed query. And it as layers see it, but for the host's numbers: a
        compiled step that keeps them would be compiled for each."""
        self.append()
        index = Index(torch.randn(B, 1, INDEX_HEADS, DIM), torch.randn(B, 1, INDEX_HEADS), 0.3)
        query = torch.randn(B, 1, HEADS, CHANNELS + ROTATED)
        token = token_of(self.tokens, self.tokens.length - 1, 0, TOPK, query.device)
        return index, query, token._replace(column=0)


def step(segment, index, query, token):
    attention = LatentAttention(segment.layer, index, query, token, traceable(kernels), 0.25, on_device=True)
    return decode_step(attention, 0, segment.statistics, False)


def results(run, speculate):
    segment = Segment(speculate)
    with torch.no_grad():
        found = [run(segment, *segment.asked()) for _ in range(6)]
    return [each.clone() for pair in found for each in pair], segment.statistics.layer(0)


@pytest.mark.parametrize("speculate", [False, True], ids=["serial", "prr"])
def test_a_decode_step_is_one_graph(speculate):
    counter = CompileCounterWithBackend("aot_eager")
    found, counts = results(torch.compile(step, fullgraph=True, backend=counter), speculate)
    expected, expected_counts = results(step, speculate)
    assert all(map(torch.equal, found, expected)) and counts == expected_counts
    assert counter.frame_count == 2  # the first token has nothing to go by
    targets = {str(node.target) for node in counter.graphs[-1].graph.nodes if node.op == "call_function"}
    assert {name for name in NAMES if any(name in target for target in targets)} == {"index_topk", "latent_attention"}


def test_they_are_registered_beside_the_others():
    assert traced_latent.KERNELS is traced_ops.KERNELS
