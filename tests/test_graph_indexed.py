"""Decode steps of models with an indexer as graphs: the bits of eager steps, shared selections, buffers that move."""

import pytest
import torch
from graphs import BOTH, GRAPHED, MODES, TOKENS, twice, without_cuda
from latents import LENGTH, padded
from models import greedy, left_pad, prompt, tiny

from hf_sparse_prr import SparseCache, graph, patch_model
from hf_sparse_prr.layer import SparseLayer
from hf_sparse_prr.patches import INDEXED
from hf_sparse_prr.predictor import Expected, Prior

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    without_cuda(monkeypatch)


@pytest.fixture(params=INDEXED)
def model(request):
    """The second and fourth layer of GLM-MoE-DSA share a selection: the first tail layer is given one, too."""
    return tiny(request.param, layers=4)


@BOTH
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_logits_and_statistics_are_those_of_eager_steps(model, experts, speculate):
    model.set_experts_implementation(experts)
    handle, cache = twice(model, prompt(LENGTH, batch=2), dict(speculate=speculate))
    assert (handle.graphs.captured, handle.graphs.replayed, handle.graphs.reason) == (1, GRAPHED, None)
    assert f"1 captured, {GRAPHED} tokens replayed" in str(handle.report())
    for layer in cache.layers:
        assert layer.indexed == (layer.length if layer.index_keys is not None else 0)


@pytest.mark.parametrize("hint", ["predicted", "previous", "none"])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_hints_and_predictions_of_any_width(model, hint, ratio):
    """Twice as many as are selected, and at first more than there are tokens."""
    settings = dict(speculate=True, spec_ratio=ratio, hint=hint)
    handle, _ = twice(model, prompt(70), settings)
    assert handle.graphs.replayed == GRAPHED and handle.stats()["hit_rate"] > 0


@BOTH
def test_layers_that_share_read_the_last_selection(speculate):
    """Three of four: all that is captured attends to what the uncaptured first layer has selected."""
    model = tiny("glm_moe_dsa", layers=4, indexer_types=["full", "shared", "shared", "shared"])
    handle, cache = twice(model, prompt(LENGTH), dict(speculate=speculate))
    assert handle.graphs.replayed == GRAPHED + 1  # none of them leaves anything to the next token
    assert [calls > 0 for calls in handle.recorder.statistics_of(cache).selector_calls] == [True, False, False, False]


@BOTH
def test_growth_of_the_cache_captures_again(model, speculate, monkeypatch):
    monkeypatch.setattr(SparseLayer, "_room_for", lambda self, columns: columns + 20)
    handle, cache = twice(model, prompt(LENGTH), dict(speculate=speculate), tokens=70)
    assert handle.graphs.captured >= 3 and handle.graphs.replayed > 30
    assert cache.get_seq_length() == LENGTH + 69


@BOTH
def test_rows_of_different_lengths(model, speculate):
    ids, mask = left_pad([prompt(LENGTH)[0], prompt(LENGTH - 37, seed=1)[0]], extra=3)
    handle, _ = twice(model, ids, dict(speculate=speculate), attention_mask=mask)
    assert handle.graphs.replayed == GRAPHED


def test_graphs_begin_when_every_row_has_outgrown_the_selection(model):
    ids, mask = padded()  # the third row has 30 tokens, 40 are selected
    handle, _ = twice(model, ids, {}, attention_mask=mask)
    assert 0 < handle.graphs.replayed < GRAPHED


@pytest.mark.parametrize("pretend", [[], ["kv_b_proj"]], ids=["plain", "wrapped"])
def test_projections_that_are_no_plain_linear(model, pretend):
    """What is absorbed is asked of the module, in the graph too."""
    for layer in model.model.layers:
        for name in pretend:
            setattr(layer.self_attn, name, torch.nn.Sequential(getattr(layer.self_attn, name)))
    handle, _ = twice(model, prompt(LENGTH), {})
    assert handle.graphs.replayed == GRAPHED


def _leaves(prior):
    return [leaf for each in prior for leaf in (each if isinstance(each, Expected) else (each,))]


@BOTH
def test_side_state_afterwards_is_that_of_eager_steps(model, speculate):
    caches = []
    for on in (True, False):
        with patch_model(model, speculate=speculate, cuda_graph=on) as handle:
            cache = SparseCache(model)
            given = dict(max_new_tokens=TOKENS, do_sample=False, past_key_values=cache)
            ids = model.generate(prompt(LENGTH), **given)
            again = model.generate(torch.cat([ids, prompt(5, seed=3)], dim=1), **given)
            assert (handle.graphs.replayed > GRAPHED) == on
            caches.append((cache, again))
    (graphed, ids), (eager, expected) = caches
    assert torch.equal(ids, expected)
    assert graphed.decode_columns == eager.decode_columns
    for layer, other in zip(graphed.layers, eager.layers, strict=True):
        end = layer.length
        assert end == other.length == graphed.get_seq_length()
        assert torch.equal(layer.keys[:, :, :end], other.keys[:, :, :end])
        assert torch.equal(layer.values[:, :, :end], other.values[:, :, :end])
        assert (layer.index_keys is None) == (other.index_keys is None)
        if layer.index_keys is None:
            assert layer.memory.prior is other.memory.prior is None
            continue
        assert torch.equal(layer.index_keys[:, :end], other.index_keys[:, :end])
        priors = (each.memory.prior._replace(threshold=None).widened(each.capacity, 40) for each in (layer, other))
        for x, y in zip(*map(_leaves, priors), strict=True):
            assert x is y is None or torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_a_prior_is_widened_by_what_was_never_scored():
    ids, level = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[0.5, float("nan"), 1.0]]])
    prior = Prior(ids, level, torch.ones(1, 1, 3), Expected(ids, ids))
    wide = prior.widened(5, 4)
    assert wide.level[0, 0].nan_to_num(7.0).tolist() == [0.5, 7.0, 1.0, 7.0, 7.0]
    assert wide.trend[0, 0].tolist() == [1, 1, 1, 0, 0]
    assert all(each[0, 0].tolist() == [1, 2, -1, -1] for each in wide.expected)
    assert wide.winners is ids and prior.widened(3, 2).level is level
    serial = Prior(ids)
    assert serial.widened(9, 9) is serial


@MODES
@BOTH
def test_modes_of_generate(model, how, speculate):
    out = []
    for on in (False, True):
        with patch_model(model, speculate=speculate, cuda_graph=on) as handle:
            torch.manual_seed(3)
            out.append(model.generate(prompt(LENGTH), max_new_tokens=TOKENS, **how))
    assert torch.equal(*out)
    graphed = "temperature" in how or "num_return_sequences" in how
    assert (handle.graphs.replayed > 0) == graphed
    if "num_beams" in how:
        assert handle.graphs.reason == graph._MOVED


def test_a_crop_of_the_last_token_leaves_no_prior_of_it(model):
    with patch_model(model, speculate=True) as handle:
        cache = SparseCache(model)
        greedy(model, prompt(LENGTH), past_key_values=cache)
        assert handle.graphs.replayed
        cache.crop(-1)
        assert cache.layers[0].memory.prior is not None  # the first layer ran as ever
        assert all(layer.memory.prior is None for layer in cache.layers[1:])
        assert all(layer.indexed in (0, LENGTH + TOKENS - 2) for layer in cache.layers)


@pytest.mark.parametrize(
    ("settings", "experts", "reason"),
    [
        (dict(cuda_graph=False), "batched_mm", "cuda_graph=False"),
        (dict(trace=True), "batched_mm", "trace=True keeps tensors of every token"),
        (dict(hint="rope"), "batched_mm", "hint='rope' is worked out on the host"),
        ({}, "eager", "experts_implementation='eager': batched_mm and grouped_mm can be captured"),
    ],
)
def test_why_there_are_no_graphs(model, settings, experts, reason):
    model.set_experts_implementation(experts)
    with patch_model(model, **settings) as handle:
        greedy(model, prompt(LENGTH), tokens=12)
        assert (handle.graphs.reason, handle.graphs.captured) == (reason, 0)


def test_two_layers_are_too_few():
    model = tiny("deepseek_v32", layers=2)
    with patch_model(model) as handle:
        greedy(model, prompt(LENGTH), tokens=12)
        assert handle.graphs.reason == "fewer than two layers that select stand behind the others"
