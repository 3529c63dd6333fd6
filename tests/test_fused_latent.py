"""Tokens of latent attention whose linear parts are fused: what the modules give, but for rounding, and the same bits
captured or not."""

import pytest
import torch
from graphs import BOTH, GRAPHED, ON_GPU, logits_of, twice, without_cuda
from latents import LENGTH, padded
from models import TOLERANCE, greedy, prompt, tiny

from hf_sparse_prr import SparseCache, fused, fused_latent, patch_model
from hf_sparse_prr.patches import INDEXED

pytestmark = pytest.mark.compat
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
FAMILIES = pytest.mark.parametrize("family", INDEXED)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    without_cuda(monkeypatch)
    if not ON_GPU:
        monkeypatch.setattr(fused, "DEVICES", ("cpu",))


@pytest.fixture
def calls(monkeypatch):
    """Layers of the fused tokens."""
    layers, run = [], fused_latent.project

    def count(attention, *args):
        layers.append(attention.layer_idx)
        return run(attention, *args)

    monkeypatch.setattr(fused_latent, "project", count)
    return layers


def half(family, dtype=torch.bfloat16, **settings):
    """As a model is loaded: the weights of index heads stay in fp32."""
    model = tiny(family, dtype=dtype, **settings)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.weights_proj.float()
    return model


def one_token(model, **settings):
    """Logits and the layers of the cache after a prompt and a token."""
    with patch_model(model, cuda_graph=False, **settings):
        cache = SparseCache(model)
        logits = logits_of(model, prompt(LENGTH), 2, past_key_values=cache)[1]
    return logits, cache.layers


@HALVES
@FAMILIES
def test_logits_and_states_are_those_of_the_modules(family, dtype, calls):
    model = half(family, dtype)
    expected, layers = one_token(model, fused_layers=False)
    assert not calls
    logits, others = one_token(model)
    assert calls == [0, 1, 2]
    assert torch.equal(logits[0], expected[0])  # the prompt's
    scale = float(expected.abs().max())
    # On a GPU products by modules and ours sum in other orders: units in the last place of queries, and so near ties
    bound = {name: value * (2.5 if logits.is_cuda else 1) for name, value in TOLERANCE[dtype].items()}
    torch.testing.assert_close(logits / scale, expected / scale, **bound)
    for layer, other in zip(layers, others, strict=True):
        for held, found in zip(layer.buffers(), other.buffers(), strict=True):
            if held is not None and held.is_floating_point() and held.dtype == dtype:
                torch.testing.assert_close(found, held, **bound)


@FAMILIES
@pytest.mark.parametrize("plain", [False, True], ids=["weights in fp32", "weights in half"])
def test_the_first_layers_states_are_the_modules_to_rounding(family, plain):
    """The same hidden states, so that all that differs is the order of sums: units in the last place."""
    model = tiny(family, dtype=torch.bfloat16) if plain else half(family)
    seen = []
    for on in (True, False):
        with patch_model(model, fused_layers=on, cuda_graph=False):
            cache = SparseCache(model)
            greedy(model, prompt(LENGTH), tokens=2, past_key_values=cache)
            layer = cache.layers[0]
            seen.append([layer.keys[0, 0, LENGTH], layer.values[0, 0, LENGTH], layer.index_keys[0, LENGTH]])
    for found, expected in zip(*seen, strict=True):
        assert (found == expected).float().mean() > 0.7
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


@BOTH
@FAMILIES
def test_captured_steps_have_the_bits_of_eager_ones(family, speculate, calls):
    handle, _ = twice(half(family, layers=4), prompt(LENGTH), dict(speculate=speculate))
    assert (handle.graphs.captured, handle.graphs.replayed, handle.graphs.fused) == (1, GRAPHED, 4)
    assert "linear parts fused in 4 layers" in str(handle.report())
    assert set(calls) == {0, 1, 2, 3}


@FAMILIES
@pytest.mark.parametrize("graphs", [False, True])
def test_prr_is_serial_to_the_bit(family, graphs):
    model, found = half(family), []
    for speculate in (False, True):
        with patch_model(model, speculate=speculate, cuda_graph=graphs):
            found.append(logits_of(model, prompt(LENGTH), 8)[1])
    assert torch.equal(*found)


@FAMILIES
def test_a_row_that_fits_is_fused_too(family, calls):
    model = half(family)
    with patch_model(model, fused_layers=False):
        expected = logits_of(model, prompt(20), 2)[1]
    with patch_model(model):
        found = logits_of(model, prompt(20), 2)[1]
    assert calls == [0, 1, 2]
    scale = float(expected.abs().max())
    torch.testing.assert_close(found / scale, expected / scale, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(
    ("settings", "kwargs"),
    [(dict(fused_layers=False), {}), ({}, dict(num_beams=2)), ({}, dict(rows=True))],
    ids=["off", "beams", "rows"],
)
def test_other_tokens_go_through_the_modules(settings, kwargs, calls):
    ids, mask = padded() if kwargs.pop("rows", False) else (prompt(LENGTH), None)
    with patch_model(half("deepseek_v32"), **settings) as handle:
        greedy(handle.model, ids, tokens=3, attention_mask=mask, **kwargs)
    assert not calls


def test_float32_and_autocast_stay_with_the_modules(calls):
    model = tiny("deepseek_v32")
    with patch_model(model):
        greedy(model, prompt(LENGTH), tokens=3)
    model = half("deepseek_v32")
    with patch_model(model), torch.autocast(model.device.type, torch.bfloat16):
        greedy(model, prompt(LENGTH), tokens=3)
    assert not calls


class Wrapped(torch.nn.Module):
    """As an adapter or a quantised layer is."""

    def __init__(self, inner):
        super().__init__()
        self.weight, self.bias, self.inner = inner.weight, getattr(inner, "bias", None), inner
        self.variance_epsilon, self.eps, self.calls = 1e-6, 1e-6, 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * 1.5


LINEARS = ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"]
LINEARS += ["indexer.wk", "indexer.wq_b", "indexer.weights_proj"]
NORMS = ["q_a_layernorm", "kv_a_layernorm", "indexer.k_norm"]


@pytest.mark.parametrize("name", LINEARS + NORMS)
@FAMILIES
def test_what_is_not_plain_is_called_as_a_module(family, name, calls):
    model = half(family)
    parent, _, last = ("self_attn." + name).rpartition(".")
    parent = model.model.layers[0].get_submodule(parent)
    wrapped = Wrapped(getattr(parent, last))
    setattr(parent, last, wrapped)
    expected, _ = one_token(model, fused_layers=False)
    before = wrapped.calls
    found, _ = one_token(model)
    assert wrapped.calls == 2 * before
    assert calls == [0, 1, 2][name in NORMS[1:] :]  # without these norms, the layer's own parts
    scale = float(expected.abs().max())
    torch.testing.assert_close(found / scale, expected / scale, **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("name", LINEARS + NORMS)
def test_hooks_are_called(name):
    model, seen = half("deepseek_v32"), []
    module = model.model.layers[0].self_attn.get_submodule(name)
    module.register_forward_hook(lambda *_: seen.append(1))
    with patch_model(model, cuda_graph=False):
        cache = SparseCache(model)
        greedy(model, prompt(LENGTH), tokens=2, past_key_values=cache)
        before = len(seen)
        greedy(model, prompt(LENGTH + 1), tokens=2)
    assert before >= 2
    assert len(seen) == 2 * before


def test_a_hook_on_all_modules_is_called(calls):
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model = half("deepseek_v32")
        with patch_model(model, cuda_graph=False):
            greedy(model, prompt(LENGTH), tokens=2)
    finally:
        hook.remove()
    assert not calls
    assert seen.count(model.model.layers[0].self_attn.q_a_proj) == 2


def test_a_projection_with_a_bias():
    """Query and latent have one, index keys haven't: one after the other."""
    model = half("deepseek_v32", attention_bias=True)
    expected, _ = one_token(model, fused_layers=False)
    found, _ = one_token(model)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found / scale, expected / scale, **TOLERANCE[torch.bfloat16])
