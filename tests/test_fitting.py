"""Decode tokens that fit their budget: stock to the bit, by the short way that layers behind the first one take."""

import pytest
import torch
from graphs import ON_GPU, logits_of, without_cuda
from models import SPARSE, greedy, left_pad, prompt, tiny

from hf_sparse_prr import SparseCache, fused, patch_model
from hf_sparse_prr.fitting import Fitting
from hf_sparse_prr.fused import FusedLayer

pytestmark = [pytest.mark.compat, pytest.mark.skipif(ON_GPU, reason="stock takes other kernels there")]
FAMILIES = ["llama", "qwen2", "qwen3", "glm", "glm4", "qwen3_moe", "glm4_moe"]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    without_cuda(monkeypatch)
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))


@pytest.fixture
def short(monkeypatch):
    """Layers that went the short way: in `Fitting.attend`, and those of them that went past their modules."""
    attended, past = [], []
    attend, fit = Fitting.attend, FusedLayer.fit

    def count(self, module, *args):
        attended.append(module.layer_idx)
        return attend(self, module, *args)

    def count_past(self, *args, **kwargs):
        output = fit(self, *args, **kwargs)
        past.extend([] if output is None else [self.decoder.self_attn.layer_idx])
        return output

    monkeypatch.setattr(Fitting, "attend", count)
    monkeypatch.setattr(FusedLayer, "fit", count_past)
    return attended, past


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_stock_to_the_bit(family, dtype, short):
    model, ids = tiny(family, layers=3, dtype=dtype), prompt(60)
    expected, logits = logits_of(model, ids, 6)
    with patch_model(model, **SPARSE) as handle:
        found, other = logits_of(model, ids, 6)
        assert handle.stats()["selector_calls"] == 0
    assert torch.equal(found, expected)
    assert torch.equal(other, logits)
    attended, past = short
    assert attended == [1, 2] * 5
    plain = dtype == torch.bfloat16 and "moe" not in family
    assert past == (attended if plain else [])


def test_rows_leave_it_when_they_outgrow_their_budget(short):
    model, ids = tiny("llama", layers=3), prompt(SPARSE["budget"] - 4)
    with patch_model(model, **SPARSE) as handle:
        greedy(model, ids, tokens=10)
        assert handle.stats()["selector_calls"] == 3 * 5
    assert short[0] == [1, 2] * 4


@pytest.mark.parametrize("settings", [dict(trace=True), dict(budget=None)], ids=["trace", "dense"])
def test_traced_steps_go_the_long_way_and_dense_ones_the_short(settings, short):
    model, ids = tiny("llama", layers=3), prompt(60)
    stock = greedy(model, ids, tokens=4)
    with patch_model(model, **{**SPARSE, "dense_layers": 0, **settings}) as handle:
        assert torch.equal(greedy(model, ids, tokens=4), stock)
        assert len(handle.trace) == (9 if "trace" in settings else 0)
    assert short[0] == ([] if "trace" in settings else [1, 2] * 3)


def test_padded_rows_go_the_long_way(short):
    model = tiny("llama", layers=3)
    ids, mask = left_pad([prompt(60)[0], prompt(40, seed=1)[0]])
    stock = greedy(model, ids, tokens=4, attention_mask=mask)
    with patch_model(model, **SPARSE):
        assert torch.equal(greedy(model, ids, tokens=4, attention_mask=mask), stock)
    assert short == ([], [])


def test_batches_and_growing_buffers(short):
    model, ids = tiny("llama", layers=3), torch.cat([prompt(60), prompt(60, seed=1)])
    stock = greedy(model, ids, tokens=4)
    with patch_model(model, **SPARSE):
        cache = SparseCache(model)
        assert torch.equal(greedy(model, ids, tokens=4, past_key_values=cache), stock)
        assert short[0] == [1, 2] * 3
        cache.layers[1].keys = cache.layers[1].keys[:, :, : cache.layers[1].length].clone()  # it has no more room
        cache.layers[1].values = cache.layers[1].values[:, :, : cache.layers[1].length].clone()
        for _ in range(2):
            with torch.no_grad():
                model(stock[:, -1:], past_key_values=cache)
    assert short[0] == [1, 2] * 3 + [2] + [1, 2]


def test_states_of_another_dtype_are_refused():
    model, ids = tiny("llama", layers=2), prompt(20)
    with patch_model(model, **SPARSE), torch.no_grad():
        cache = SparseCache(model)
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        model.model.layers[1].self_attn.k_proj.half()
        model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda _, args: (args[0].half(),))
        model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda *args: args[-1].half())
        with pytest.raises(ValueError, match=r"key states: expected .* in torch.float32"):
            model(ids[:, :1], past_key_values=cache)


def test_a_buffer_of_other_rows_is_refused():
    model, ids = tiny("llama", layers=3), prompt(20)
    with patch_model(model, **SPARSE), torch.no_grad():
        cache = SparseCache(model)
        model(ids, past_key_values=cache)
        cache.layers[1].batch_repeat_interleave(2)  # one row would be written to both
        with pytest.raises(ValueError, match=r"key states: expected \[B, H, D\] = \[2, 2, 8\] .*, got \[1, 2, 8\]"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_other_modes_of_torch_go_the_long_way(mode, short):
    model, ids = tiny("llama", layers=3), prompt(20)
    with patch_model(model, **SPARSE), mode():
        cache = SparseCache(model)
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        assert not cache.layers[2].keys.is_inference()
        assert not cache.layers[2].keys.requires_grad
    assert short[0] == []


def test_hooks_are_called(short):
    model, ids = tiny("llama", layers=3, dtype=torch.bfloat16), prompt(60)
    called = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: called.append(1))
    with patch_model(model, **SPARSE):
        greedy(model, ids, tokens=4)
    assert len(called) == 4
    assert short[1] == [2] * 3


@pytest.mark.parametrize("change", ["hook", "forward"])
def test_an_activation_that_does_something_else_is_called(change, short):
    model, ids = tiny("llama", layers=3, dtype=torch.bfloat16), prompt(60)
    activation = model.model.layers[1].mlp.act_fn
    if change == "hook":
        activation.register_forward_hook(lambda *given: given[-1] * 0.5)
    else:
        activation.forward = torch.relu
    expected = logits_of(model, ids, 4)
    with patch_model(model, **SPARSE):
        assert all(map(torch.equal, logits_of(model, ids, 4), expected))
    assert short[1] == [2] * 3
