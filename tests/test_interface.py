"""register_attention: an unpatched model gives the ids of a patched one, and stock SDPA's where nothing may select."""

import copy
import gc
import warnings

import pytest
import torch
from models import SPARSE, greedy, left_pad, prompt, tiny, tiny_llama
from registered import clean_registries, logits_of, register, switched  # noqa: F401
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
)

import hf_sparse_prr
from hf_sparse_prr import SparseCache, SparseConfig, interface, kernel_loader, patch_model, register_attention
from hf_sparse_prr.interface import NAME
from hf_sparse_prr.patches import FAMILIES, INDEXED
from hf_sparse_prr.patches._gqa import SparseGQA

pytestmark = pytest.mark.compat
SELECTORS = ("quest", "infllm_v2")


def three_ways(make, ids, generate=None, **settings):
    """New ids of the stock model, the patched one and the unpatched one under the registered attention."""
    stock = greedy(make(), ids, **(generate or {}))
    with patch_model(make(), **{**SPARSE, **settings}, speculate=False) as handle:
        patched = greedy(handle.model, ids, **(generate or {}))
    register(**settings)
    return stock, patched, greedy(switched(make()), ids, **(generate or {}))


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - INDEXED))
def test_ids_are_those_of_a_patched_model(model_type, selector):
    ids = prompt(120, batch=2)
    stock, patched, ours = three_ways(lambda: tiny(model_type), ids, selector=selector)
    assert torch.equal(patched, ours)
    assert not torch.equal(stock, ours)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_left_padding_and_static_caches(selector, cache):
    """One row outgrew its budget before, one does on the way, one fits; a static cache hides the rest of its buffer."""
    ids, mask = left_pad([prompt(length, seed=length)[0] for length in (140, 70, 30)], extra=5)
    register(selector=selector)
    model = switched(tiny_llama())
    ours = greedy(model, ids, attention_mask=mask, cache_implementation=cache)
    stock = greedy(tiny_llama(), ids, attention_mask=mask)
    with patch_model(tiny_llama(), **SPARSE, selector=selector, speculate=False) as handle:
        assert torch.equal(ours, greedy(handle.model, ids, attention_mask=mask))
    assert [bool((a == b).all()) for a, b in zip(ours, stock, strict=True)] == [False, False, True]


@pytest.mark.parametrize("selector", SELECTORS)
def test_static_cache_without_a_mask(selector):
    model, ids = tiny_llama(), prompt(120)
    for sparse_prefill in (False, True):
        register(selector=selector, sparse_prefill=sparse_prefill)
        ours = greedy(switched(model), ids, cache_implementation="static")
        settings = dict(selector=selector, speculate=False, sparse_prefill=sparse_prefill)
        with patch_model(tiny_llama(), **SPARSE, **settings) as handle:
            assert torch.equal(ours, greedy(handle.model, ids))


def test_beams():
    stock, patched, ours = three_ways(tiny_llama, prompt(120), dict(num_beams=2))
    assert torch.equal(patched, ours) and not torch.equal(stock, ours)


def test_sparse_prefill():
    stock, patched, ours = three_ways(tiny_llama, prompt(100), sparse_prefill=True)
    _, _, dense_prompt = three_ways(tiny_llama, prompt(100))
    assert torch.equal(patched, ours)
    assert not torch.equal(stock, ours) and not torch.equal(dense_prompt, ours)


@pytest.mark.parametrize(
    "settings", [dict(dense_length=110), dict(group="max"), dict(sink_blocks=0, local_blocks=1), dict(dense_layers=2)]
)
def test_other_settings(settings):
    stock, patched, ours = three_ways(tiny_llama, prompt(100), **settings)
    assert torch.equal(patched, ours) and not torch.equal(stock, ours)


@pytest.mark.parametrize("settings", [dict(budget=160), dict(budget=None), dict(dense_layers=3)])
def test_what_fits_is_bit_equal_to_sdpa(settings):
    ids, chunks = prompt(120, batch=2), [100, 1, 3, 16]
    stock = logits_of(tiny_llama(), ids, chunks)
    register(**settings)
    assert torch.equal(logits_of(switched(tiny_llama()), ids, chunks), stock)


def test_a_long_call_is_a_prompt_and_a_short_one_selects():
    ids = prompt(120)
    register()
    ours, stock = switched(tiny_llama()), tiny_llama()
    assert torch.equal(logits_of(ours, ids, [100, 17, 3])[:, :117], logits_of(stock, ids, [100, 17, 3])[:, :117])
    differs = logits_of(ours, ids, [100, 16, 4]) != logits_of(stock, ids, [100, 16, 4])
    assert differs.any(dim=2)[0].tolist() == [False] * 100 + [True] * 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("pads", [(0, 0, 0), (0, 37, 100)])
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_call_is_bit_equal_to_the_decode_path(selector, pads, dtype, monkeypatch):
    """Each attention output of a patched model, before o_proj, against the function given the same q, K and V."""
    model = tiny_llama(dtype=dtype)
    ids, mask = left_pad([prompt(150 - pad, seed=pad)[0] for pad in pads])
    attention, queries, checked = register(selector=selector), {}, []
    project = SparseGQA.project

    def record(self, *args):
        queries[self.layer_idx] = project(self, *args)
        return queries[self.layer_idx]

    def compare(module, inputs):
        query, length = queries[module.layer_idx][0], cache.tokens.length
        layer, columns = cache.layers[module.layer_idx], torch.arange(length)
        own = columns[length - query.shape[2] :, None]
        seen = (cache.tokens.valid[:, None, None, :length] & (columns <= own)) if mask.min() == 0 else None
        for given in (seen, None if seen is None else torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)):
            if given is None and query.shape[2] > 1:  # SDPA's convention: without a mask these are the first tokens
                given = (columns <= own)[None, None]
            views = (layer.keys[:, :, :length], layer.values[:, :, :length])
            ours, weights = attention(module, query, *views, given, scaling=module.scaling)
            assert torch.equal(ours.flatten(2), inputs[0]) and weights is None
        checked.append(query.shape[2])

    monkeypatch.setattr(SparseGQA, "project", record)
    with patch_model(model, **SPARSE, selector=selector, speculate=False), torch.no_grad():
        cache = SparseCache(model)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for begin, end in [(0, 138), (138, 142), *((i, i + 1) for i in range(142, 150))]:
            if begin == 138:
                for layer in model.model.layers:
                    layer.self_attn.o_proj.register_forward_pre_hook(
                        lambda _, inputs, module=layer.self_attn: compare(module, inputs)
                    )
            model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
            )
    assert checked == [4] * 3 + [1] * 24


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_sdpa(training):
    """Over the budget, at a prompt that would select and in a decode step."""
    ids, gradients = prompt(120), []
    register(sparse_prefill=True)
    for model in (tiny_llama(), switched(tiny_llama())):
        model.train(training)
        logits_of(model, ids, [119, 1], grad=True).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_training_mode_is_stock_without_gradients_too():
    ids, model = prompt(120), tiny_llama().train()
    stock = logits_of(model, ids, [119, 1])
    register()
    assert torch.equal(logits_of(switched(model), ids, [119, 1]), stock)


def test_every_way_to_name_it(tmp_path, outputs):
    ids = prompt(100)
    register()
    live = switched(tiny_llama())
    assert torch.equal(greedy(live, ids), outputs.sparse)
    assert torch.equal(greedy(copy.deepcopy(live), ids), outputs.sparse)
    live.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert torch.equal(greedy(LlamaForCausalLM.from_pretrained(tmp_path).eval(), ids), outputs.stock)
    named = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME).eval()
    assert torch.equal(greedy(named, ids), outputs.sparse)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), attn_implementation=NAME).eval()
    made.load_state_dict(live.state_dict())
    assert torch.equal(greedy(made, ids), outputs.sparse)
    live.set_attn_implementation("sdpa")
    assert torch.equal(greedy(live, ids), outputs.stock)


def test_a_compiled_model(outputs):
    register()
    model = switched(tiny_llama())
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(greedy(model, prompt(100), tokens=24), outputs.sparse)


def test_the_last_registration_counts(outputs):
    ids = prompt(100)
    register()
    model = switched(tiny_llama())
    assert torch.equal(greedy(model, ids), outputs.sparse)
    register_attention()  # 4096 tokens: everything fits
    assert torch.equal(greedy(model, ids), outputs.stock)
    register()
    register()
    assert torch.equal(greedy(model, ids), outputs.sparse)
    assert sum(name == NAME for name in AttentionInterface._global_mapping) == 1
    with patch_model(tiny_llama(), **{**SPARSE, "budget": 64}) as handle:
        tighter = greedy(handle.model, ids)
    register(budget=64)
    assert torch.equal(greedy(model, ids), tighter) and not torch.equal(tighter, outputs.sparse)


def test_it_keeps_no_model_alive():
    attention = register()
    model = switched(tiny_llama())
    greedy(model, prompt(100), tokens=2)
    assert len(attention._plans) == 3
    del model
    gc.collect()
    assert len(attention._plans) == 0


def test_it_is_public_and_lazy():
    assert "register_attention" in hf_sparse_prr.__all__ and "register_attention" in dir(hf_sparse_prr)
    assert NAME not in AttentionInterface._global_mapping


@pytest.mark.parametrize(
    "layer_types", [["full_attention", "sliding_attention", "full_attention"], ["sliding_attention"] * 3]
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_sliding_layers_stay_as_they_are(model_type, layer_types):
    def make():
        return tiny(model_type, use_sliding_window=True, sliding_window=48, layer_types=layer_types)

    stock, patched, ours = three_ways(make, prompt(120))
    assert torch.equal(patched, ours)
    assert torch.equal(stock, ours) == ("full_attention" not in layer_types)


def test_refused_settings():
    for settings, message in (
        (dict(speculate=True), "speculate: expected False or 'auto' for register_attention, got True"),
        (dict(trace=True), "trace: expected False for register_attention, got True"),
        (dict(semantics="superset"), "semantics: expected 'exact' for register_attention, got 'superset'"),
    ):
        with pytest.raises(ValueError, match=message):
            register_attention(SparseConfig(**settings))
    for config in (dict(budget=80), 80, SparseConfig):
        with pytest.raises(TypeError, match="config: expected a SparseConfig, got"):
            register_attention(config)
    assert NAME not in AttentionInterface._global_mapping and NAME not in AttentionMaskInterface._global_mapping


def test_kernels_that_fall_back_are_said_once(monkeypatch):
    original = kernel_loader.resolve
    monkeypatch.setattr(
        kernel_loader, "resolve", lambda *args: original(*args)._replace(fallback="kernels could not be loaded")
    )
    with pytest.warns(UserWarning, match="hf_sparse_prr: kernels could not be loaded"):
        register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()


def test_kernels_that_fail_register_nothing(tmp_path):
    with pytest.raises(kernel_loader.KernelError, match="could not be loaded"):
        register_attention(SparseConfig(kernels=tmp_path))
    assert NAME not in AttentionInterface._global_mapping


def test_more_dense_layers_than_the_model_has():
    register(dense_layers=4)
    with pytest.raises(ValueError, match="dense_layers: expected at most 3"):
        greedy(switched(tiny_llama()), prompt(100), tokens=2)


def test_cross_attention_stays_dense():
    """It has a layer number and no causality of its own."""

    class Cross(torch.nn.Module):
        layer_idx, config = 2, tiny_llama().config

    register(budget=64, block_size=16, dense_layers=0, strict=True)
    assert interface.ALL_ATTENTION_FUNCTIONS[NAME].plan(Cross()).status == "dense"


def test_a_patched_model_keeps_a_stock_implementation():
    """The registered function would select by its own settings where the patch means stock attention."""
    register_attention()
    model = tiny_llama(attn_implementation=NAME)
    refused = pytest.raises(ValueError, match="attn_implementation: expected a stock one on a patched model, got")
    with refused:
        patch_model(model, **SPARSE)
    model.set_attn_implementation("sdpa")
    with patch_model(model, **SPARSE), torch.no_grad():
        cache = SparseCache(model)
        model(prompt(100), past_key_values=cache)
        model.set_attn_implementation(NAME)
        with refused:
            model(prompt(1), past_key_values=cache)
        assert cache.get_seq_length() == 100
