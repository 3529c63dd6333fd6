"""Where decode steps of generate() aren't captured, and what else may happen meanwhile."""

import copy
import pickle
import threading

import pytest
import torch
from graphs import GRAPHED, ON_GPU, TOKENS, twice, without_cuda
from models import SPARSE, greedy, prompt, tiny, tiny_llama
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from hf_sparse_prr import SparseCache, graph, patch_model
from hf_sparse_prr.experts import why_not_experts
from hf_sparse_prr.report import GraphReport

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    without_cuda(monkeypatch)


class Nested(LogitsProcessor):
    """Generates from another prompt, between two tokens of the first."""

    def __init__(self, model):
        self.model, self.ids = model, []

    def __call__(self, input_ids, scores):
        self.ids.append(greedy(self.model, prompt(120, seed=5), tokens=10))
        return scores


def test_another_generate_on_the_same_model_in_between():
    model = tiny_llama()
    with patch_model(model, **SPARSE, speculate=True) as handle:
        expected, other = greedy(model, prompt()), greedy(model, prompt(120, seed=5), tokens=10)
        nested = Nested(model)
        assert torch.equal(greedy(model, prompt(), logits_processor=LogitsProcessorList([nested])), expected)
        assert all(torch.equal(ids, other) for ids in nested.ids)
        assert handle.graphs.replayed == 2 * GRAPHED + 6  # of the inner ones none but the first alone
        assert (handle.graphs.reason, handle.graphs.beside) == (None, TOKENS)
        assert f"{TOKENS} calls of generate() ran during another and had none" in str(handle.report())


class Failing(BaseStreamer):
    left = 10

    def put(self, value):
        self.left -= 1
        if not self.left:
            raise KeyError("stop")

    def end(self):
        pass


def test_nothing_is_left_behind_after_an_exception():
    model = tiny_llama()
    with patch_model(model, **SPARSE) as handle:
        expected = greedy(model, prompt())
        cache = SparseCache(model)
        with pytest.raises(KeyError, match="stop"):
            greedy(model, prompt(), streamer=Failing(), past_key_values=cache)
        assert not any("forward" in layer.__dict__ for layer in model.model.layers)
        assert cache.prompt_length is None
        assert torch.equal(greedy(model, prompt()), expected)
        assert handle.graphs.captured == 3


def test_a_step_that_cannot_be_captured_runs_as_ever(monkeypatch):
    def refuse(run, output):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = tiny_llama()
    with patch_model(model, **SPARSE, speculate=True, cuda_graph=False):
        expected = greedy(model, prompt())
    monkeypatch.setattr(graph, "captured", refuse)
    with patch_model(model, **SPARSE, speculate=True) as handle:
        assert torch.equal(greedy(model, prompt()), expected)
        assert "decode steps run uncaptured, with the same bits" in handle.warnings["CUDA graph"]
        assert handle.graphs.captured == handle.graphs.replayed == 0
        assert handle.graphs.reason == ("the step can't be captured: operation not permitted when stream is capturing")
        assert "CUDA graphs of decode steps: off, because the step can't be captured" in str(handle.report())
        monkeypatch.setattr(graph, "captured", None)  # it isn't tried again
        assert torch.equal(greedy(model, prompt()), expected)
        assert handle.graphs.reason == handle.graphs.failed


def hooked(model):
    model.model.layers[2].mlp.register_forward_hook(lambda *_: None)


def compiled_model(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")


def replaced(model):
    model.model.layers[2].forward = model.model.layers[2].forward


@pytest.mark.parametrize(
    ("change", "settings", "kwargs", "reason"),
    [
        (None, dict(cuda_graph=False), {}, "cuda_graph=False"),
        (None, dict(trace=True), {}, "trace=True keeps tensors of every token"),
        (None, dict(semantics="superset"), {}, "semantics='superset' depends on what is remembered"),
        (None, dict(hint="rope"), {}, "hint='rope' is worked out on the host"),
        (hooked, {}, {}, "a hook on LlamaMLP"),
        (compiled_model, {}, {}, "the forward of a LlamaForCausalLM was replaced"),
        pytest.param(
            compiled_layers,
            {},
            {},
            "a LlamaDecoderLayer is compiled",
            marks=pytest.mark.skipif(ON_GPU, reason="a layer compiled by the user isn't claimed to run on a GPU"),
        ),
        (replaced, {}, {}, "the forward of a LlamaDecoderLayer was replaced"),
        (
            None,
            {},
            dict(output_hidden_states=True, return_dict_in_generate=True),
            "hidden states or attentions are asked for",
        ),
    ],
)
def test_why_there_are_no_graphs(change, settings, kwargs, reason):
    model = tiny_llama()
    if change is not None:
        change(model)
    with patch_model(model, **SPARSE, **settings) as handle:
        model.generate(prompt(), max_new_tokens=12, do_sample=False, **kwargs)
        assert (handle.graphs.reason, handle.graphs.captured) == (reason, 0)
        assert f"CUDA graphs of decode steps: off, because {reason}" in str(handle.report())


EXPERTS = ["qwen2_moe", "qwen3_moe", "glm4_moe"]


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_that_are_ops_are_captured(family, experts):
    model = tiny(family)
    model.set_experts_implementation(experts)
    handle, _ = twice(model, prompt(), dict(SPARSE, speculate=True))
    assert handle.graphs.replayed == GRAPHED


class Quantised(torch.nn.Module):
    """Experts whose weights aren't floating-point ones."""

    def __init__(self, experts):
        super().__init__()
        self.config, self._apply_gate = experts.config, experts._apply_gate
        self.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_that_are_not_known_to_be_ops_have_none(family):
    model = tiny(family)
    experts = model.model.layers[2].mlp.experts
    for change, reason in (
        (None, "experts_implementation='eager': batched_mm and grouped_mm can be captured"),
        (Quantised(experts), "the weights of Quantised are quantised"),
        (torch.nn.Identity(), "Identity are experts of a class that isn't known"),
    ):
        if change is None:
            model.set_experts_implementation("eager")
        else:
            model.set_experts_implementation("batched_mm")
            model.model.layers[2].mlp.experts = change
        with patch_model(model, **SPARSE) as handle:
            if change is None:
                greedy(model, prompt())
                assert handle.graphs.reason == reason and not handle.graphs.captured
            assert why_not_experts(model.model.layers) == reason


def test_steps_outside_of_generate_run_as_ever():
    model = tiny_llama()
    with patch_model(model, **SPARSE) as handle, torch.no_grad():
        cache = SparseCache(model)
        model(prompt(), past_key_values=cache)
        for _ in range(6):
            model(prompt(1), past_key_values=cache)
        assert handle.graphs == GraphReport()


def test_autocast_inside_of_the_forward():
    """Its weights are cast once a forward, and freed with it."""
    model = tiny_llama()
    stock = type(model).forward

    def cast(self, *args, **kwargs):
        with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
            return stock(self, *args, **kwargs)

    type(model).forward, out = cast, []
    try:
        for on in (False, True):
            with patch_model(model, **SPARSE, cuda_graph=on) as handle:
                out.append(greedy(model, prompt()))
    finally:
        type(model).forward = stock
    assert torch.equal(*out)
    assert (handle.graphs.captured, handle.graphs.reason) == (0, "autocast is on")


def test_hidden_states_once_do_not_turn_graphs_off():
    model = tiny_llama()
    with patch_model(model, **SPARSE) as handle:
        kwargs = dict(output_hidden_states=True, return_dict_in_generate=True)
        model.generate(prompt(), max_new_tokens=12, do_sample=False, **kwargs)
        assert not handle.graphs.captured
        greedy(model, prompt())
        assert (handle.graphs.captured, handle.graphs.reason) == (1, None)


def test_what_the_tail_returns_may_be_kept():
    model, kept = tiny_llama(), []
    for on in (False, True):
        with patch_model(model, **SPARSE, cuda_graph=on):
            kept.append([])
            hook = model.model.norm.register_forward_pre_hook(lambda _, args: kept[-1].append(args[0]))
            greedy(model, prompt())
            hook.remove()
    assert all(map(torch.equal, *kept))


class Acting(BaseStreamer):
    """Does something at the tenth token."""

    def __init__(self, act):
        self.act, self.left = act, 10

    def put(self, value):
        self.left -= 1
        if not self.left:
            self.act()

    def end(self):
        pass


def test_unpatched_by_a_streamer():
    model, out = tiny_llama(), []
    for on in (False, True):
        handle = patch_model(model, **SPARSE, cuda_graph=on)
        out.append(greedy(model, prompt(), streamer=Acting(handle.unpatch)))
    assert torch.equal(*out)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_meanwhile_is_whole(how):
    model, copies = tiny_llama(), []
    with patch_model(model, **SPARSE) as handle:
        expected = greedy(model, prompt())
        greedy(model, prompt(), streamer=Acting(lambda: copies.append(how(model))))
        assert handle.graphs.captured == 2
    (twin,) = copies
    assert torch.equal(greedy(twin, prompt()), expected)


def test_threads_that_start_at_once():
    model, out = tiny_llama(layers=8), {}
    with patch_model(model, **SPARSE, speculate=True) as handle:
        prompts = [prompt(150 + at) for at in range(3)]  # the default device is each thread's own
        expected = [greedy(model, ids) for ids in prompts]
        start = threading.Barrier(3)

        def work(at):
            start.wait()
            out[at] = greedy(model, prompts[at])

        threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(out[at], expected[at]) for at in range(3))
        assert not any("forward" in layer.__dict__ for layer in model.model.layers)
        assert not graph._RUNNING
        assert not handle.graphs.failed
