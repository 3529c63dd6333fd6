"""Decode steps of generate() as graphs: the bits of eager steps, whatever the settings and the mode."""

import pytest
import torch
from graphs import BOTH, GRAPHED, MODES, ON_GPU, TOKENS, twice, without_cuda
from models import SPARSE, greedy, left_pad, prompt, tiny, tiny_llama

from hf_sparse_prr import SparseCache, graph, patch_model
from hf_sparse_prr.layer import SparseLayer
from hf_sparse_prr.report import GraphReport

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    without_cuda(monkeypatch)


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
    assert handle.graphs == GraphReport(reason="fewer than 8 tokens were to come")


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


@MODES
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
        assert handle.graphs.reason == graph._MOVED


def test_early_exit_drafts_run_as_ever():
    model = tiny_llama(layers=4)
    with patch_model(model, **SPARSE) as handle:
        plain = greedy(model, prompt())
        replayed = handle.graphs.replayed
        assert torch.equal(greedy(model, prompt(), assistant_early_exit=2), plain)
        assert handle.graphs.replayed == replayed
