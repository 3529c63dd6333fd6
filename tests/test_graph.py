"""Decode steps of generate() as graphs. On a CPU what would be captured runs again instead, so that all of it but
CUDA's part is tested; on a GPU the graphs are real."""

import copy
import pickle
import threading

import pytest
import torch
from models import SPARSE, greedy, left_pad, prompt, tiny, tiny_llama
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from hf_sparse_prr import SparseCache, graph, patch_model
from hf_sparse_prr.layer import SparseLayer
from hf_sparse_prr.report import GraphReport

ON_GPU = torch.get_default_device().type == "cuda"
BOTH = pytest.mark.parametrize("speculate", [False, True], ids=["serial", "prr"])
TOKENS = 24
GRAPHED = (
    TOKENS - 1 - 3
)  # of a prompt over budget: two tokens to see that the state is one, one that is run and captured


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(graph, "DEVICES", ("cpu",))
        monkeypatch.setattr(graph, "captured", lambda run, output: (lambda: output.copy_(run()), 0))


def logits_of(model, ids, tokens=TOKENS, **kwargs):
    given = dict(max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True)
    out = model.generate(ids, **{**given, **kwargs})
    return out.sequences, torch.stack(out.logits)


def twice(model, ids, settings, tokens=TOKENS, **kwargs):
    """(handle, cache) of a run with graphs, whose ids and logits were those without, bit for bit."""
    with patch_model(model, **settings, cuda_graph=False) as handle:
        expected, stats = logits_of(model, ids, tokens, **kwargs), handle.stats()
        assert not handle.graphs.captured
    with patch_model(model, **settings) as handle:
        cache = SparseCache(model)
        found = logits_of(model, ids, tokens, past_key_values=cache, **kwargs)
        assert all(map(torch.equal, found, expected))
        assert handle.stats() == stats
        assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    return handle, cache


@BOTH
@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4"])
def test_logits_and_statistics_are_those_of_eager_steps(family, selector, speculate):
    if selector == "infllm_v2":
        settings = dict(SPARSE, block_size=32, budget=160, selector=selector, speculate=speculate)
    else:
        settings = dict(SPARSE, speculate=speculate)
    handle, _ = twice(tiny(family, layers=4), prompt(300, batch=2), settings)
    assert (handle.graphs.captured, handle.graphs.replayed, handle.graphs.reason) == (1, GRAPHED, None)
    assert f"1 captured, {GRAPHED} tokens replayed" in str(handle.report())


@BOTH
def test_dense_layers_run_as_ever(speculate):
    handle, _ = twice(tiny_llama(layers=5), prompt(), dict(SPARSE, dense_layers=2, speculate=speculate))
    assert handle.graphs.replayed == GRAPHED


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
@BOTH
def test_two_thousand_tokens(speculate):
    """Over several growths of the cache."""
    model = tiny_llama(layers=4, dtype=torch.bfloat16, max_position_embeddings=4096)
    handle, _ = twice(model, prompt(), dict(SPARSE, speculate=speculate), tokens=2000)
    assert handle.graphs.captured > 3 and handle.graphs.replayed > 1900


def test_one_layer_alone_is_not_captured():
    handle, _ = twice(tiny_llama(layers=2), prompt(), SPARSE)  # the leader and one more
    assert handle.graphs.captured == 0
    assert handle.graphs.reason == "fewer than two layers that select stand behind the others"


@BOTH
def test_growth_of_the_cache_captures_again(speculate, monkeypatch):
    monkeypatch.setattr(SparseLayer, "_room_for", lambda self, columns: columns + 20)
    handle, cache = twice(tiny_llama(), prompt(), dict(SPARSE, speculate=speculate), tokens=80)
    assert handle.graphs.captured >= 3
    assert handle.graphs.replayed > 40
    assert cache.get_seq_length() == 150 + 79


def test_graphs_that_do_not_pay_become_rarer(monkeypatch):
    monkeypatch.setattr(SparseLayer, "_room_for", lambda self, columns: columns + 6)
    handle, _ = twice(tiny_llama(), prompt(), SPARSE, tokens=100)
    assert handle.graphs.captured <= 3  # of 16 buffers


def test_a_few_tokens_are_not_worth_a_graph():
    handle, _ = twice(tiny_llama(), prompt(), SPARSE, tokens=8)
    assert handle.graphs == GraphReport()


def test_growth_under_inference_mode(monkeypatch):
    monkeypatch.setattr(SparseLayer, "_room_for", lambda self, columns: columns + 20)
    with torch.inference_mode():
        handle, _ = twice(tiny_llama(), prompt(), SPARSE, tokens=60)
    assert handle.graphs.captured >= 2


@BOTH
def test_rows_of_different_lengths(speculate):
    ids, mask = left_pad([prompt(150)[0], prompt(110, seed=1)[0]], extra=3)
    handle, _ = twice(tiny_llama(), ids, dict(SPARSE, speculate=speculate), attention_mask=mask)
    assert handle.graphs.replayed == GRAPHED


@BOTH
def test_graphs_begin_when_every_row_has_outgrown_its_budget(speculate):
    ids, mask = left_pad([prompt(90)[0], prompt(70, seed=1)[0]])
    handle, _ = twice(tiny_llama(), ids, dict(SPARSE, speculate=speculate), attention_mask=mask)
    assert 0 < handle.graphs.replayed < GRAPHED


@BOTH
def test_side_state_afterwards_is_that_of_eager_steps(speculate):
    settings, caches = dict(SPARSE, speculate=speculate), []
    for on in (True, False):
        model = tiny_llama()
        with patch_model(model, **settings, cuda_graph=on):
            cache = SparseCache(model)
            ids = model.generate(prompt(), max_new_tokens=TOKENS, do_sample=False, past_key_values=cache)
            again = model.generate(
                torch.cat([ids, prompt(5, seed=3)], dim=1),
                max_new_tokens=TOKENS,
                do_sample=False,
                past_key_values=cache,
            )
            caches.append((cache, again))
    (graphed, ids), (eager, expected) = caches
    assert torch.equal(ids, expected)
    assert graphed.decode_columns == eager.decode_columns
    for layer, other in zip(graphed.layers, eager.layers, strict=True):
        end = layer.length
        assert end == other.length == graphed.get_seq_length()
        assert torch.equal(layer.keys[:, :, :end], other.keys[:, :, :end])
        for a, b in zip(layer.memory.prior, other.memory.prior, strict=True):
            for x, y in zip(*(each if isinstance(each, tuple) else (each,) for each in (a, b)), strict=True):
                assert x is y is None or torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_a_crop_of_the_last_token_leaves_no_prior_of_it():
    model = tiny_llama()
    with patch_model(model, **SPARSE, speculate=True) as handle:
        cache = SparseCache(model)
        greedy(model, prompt(), past_key_values=cache)
        assert handle.graphs.replayed
        cache.crop(-1)
        assert [layer.memory.prior is None for layer in cache.layers] == [False, True, True]  # the leader ran as ever


@pytest.mark.parametrize(
    "how",
    [
        dict(num_beams=3, do_sample=False),
        dict(do_sample=True, top_k=20, temperature=0.8),
        dict(do_sample=True, num_return_sequences=2),
        dict(do_sample=False, prompt_lookup_num_tokens=3),
    ],
    ids=["beams", "sampling", "sequences", "lookup"],
)
@BOTH
def test_modes_of_generate(how, speculate):
    model, out = tiny_llama(), []
    for on in (False, True):
        with patch_model(model, **SPARSE, speculate=speculate, cuda_graph=on) as handle:
            torch.manual_seed(3)
            out.append(model.generate(prompt(), max_new_tokens=TOKENS, **how))
    assert torch.equal(*out)
    graphed = "temperature" in how or "num_return_sequences" in how
    assert (handle.graphs.replayed > 0) == graphed
    if "num_beams" in how:
        assert handle.graphs.reason == "no token followed another with the same buffers in which every row selects"


def test_early_exit_drafts_run_as_ever():
    model = tiny_llama(layers=4)
    with patch_model(model, **SPARSE) as handle:
        plain = greedy(model, prompt())
        replayed = handle.graphs.replayed
        assert torch.equal(greedy(model, prompt(), assistant_early_exit=2), plain)
        assert handle.graphs.replayed == replayed


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


def test_models_with_experts_have_none():
    model = tiny("qwen3_moe")
    with patch_model(model, **SPARSE) as handle:
        greedy(model, prompt())
        assert handle.graphs.reason == "experts are chosen on the host"


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
        expected = [greedy(model, prompt(150 + at)) for at in range(3)]
        start = threading.Barrier(3)

        def work(at):
            start.wait()
            out[at] = greedy(model, prompt(150 + at))

        threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(out[at], expected[at]) for at in range(3))
        assert not any("forward" in layer.__dict__ for layer in model.model.layers)
        assert not graph._RUNNING
        assert not handle.graphs.failed
