"""Models with an indexer of their own in generate(), on every cache, and under settings that can't be."""

import contextlib
import copy
import pickle

import pytest
import torch
from latents import LENGTH, forward, full_layers, padded
from models import greedy, left_pad, prompt, tiny
from transformers import DynamicCache, StaticCache

from hf_sparse_prr import SparseCache, patch_model, patching
from hf_sparse_prr.config import SparseConfig
from hf_sparse_prr.hooks import cache_argument
from hf_sparse_prr.patches import INDEXED

pytestmark = pytest.mark.compat


@pytest.fixture(params=INDEXED)
def model(request):
    return tiny(request.param)


MODES = {
    "greedy": {},
    "sampled": dict(do_sample=True, top_k=20),
    "beams": dict(num_beams=3),
    "beam sampling": dict(num_beams=2, do_sample=True, top_k=10),
    "several sequences": dict(num_return_sequences=2, do_sample=True, top_k=10),
    "chunked prefill": dict(prefill_chunk_size=77),
    "prompt lookup": dict(prompt_lookup_num_tokens=4),
    "assisted": {},
    "preallocated": {},
    "static": dict(cache_implementation="static"),
    "no cache": dict(use_cache=False),
    "eager": {},
}


@pytest.mark.parametrize("mode", list(MODES))
def test_every_mode_generates_the_ids_of_stock(model, mode, monkeypatch):
    """The prompt repeats itself, so that drafts are accepted and rejected."""
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
    piece = prompt(50)
    ids = torch.cat([piece, piece, prompt(20, seed=3), piece[:, :15]], dim=1)
    asked, out = {"do_sample": False, "max_new_tokens": 20, **MODES[mode]}, []
    if mode == "assisted":
        asked["assistant_model"] = tiny(model.config.model_type, seed=1, layers=2)
    if mode == "eager":
        model.set_attn_implementation("eager")
    torch.manual_seed(7)
    out.append(model.generate(ids, **asked))
    foreign = mode in ("static", "no cache")
    for speculate in (False, True):
        with patch_model(model, speculate=speculate) as handle:
            if mode == "preallocated":
                asked[cache_argument()] = SparseCache(model, max_length=300)
            torch.manual_seed(7)
            said = pytest.warns(UserWarning, match="StaticCache") if mode == "static" else contextlib.nullcontext()
            monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
            with said:
                out.append(model.generate(ids, **asked))
            assert (handle.stats()["selector_calls"] > 0) != foreign
    for other in out[1:]:
        assert torch.equal(out[0], other)


def test_left_padded_batches_generate_the_ids_of_stock(model):
    ids, mask = padded()
    expected = greedy(model, ids, attention_mask=mask)
    with patch_model(model, speculate=True):
        assert torch.equal(greedy(model, ids, attention_mask=mask), expected)


def verbs(model, cache):
    """Every verb of the cache, with decode tokens between them: their logits."""
    seen, name = [], prompt(3, batch=3, seed=3)

    def feed(tokens):
        for i in range(tokens.shape[1]):
            seen.append(forward(model, tokens[:, i : i + 1], cache).logits)

    feed(name)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    feed(prompt(2, batch=3, seed=4))
    cache.crop(-1)
    feed(prompt(3, batch=3, seed=5))
    cache.crop(-5)
    feed(prompt(2, batch=3, seed=6))
    cache.batch_repeat_interleave(2)
    feed(prompt(2, batch=6, seed=7))
    cache.batch_select_indices(torch.tensor([5, 1, 3]))
    cache = copy.deepcopy(cache)
    feed(prompt(2, batch=3, seed=8))
    cache = pickle.loads(pickle.dumps(cache))
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    feed(prompt(2, batch=3, seed=9))
    cache.crop(-30)
    feed(prompt(3, batch=3, seed=11))
    return cache, torch.cat([logits.flatten() for logits in seen])


def test_every_cache_verb_moves_all_side_state(model):
    """PRR and serial see the same bits, and both what stock sees."""
    ids, mask = left_pad([prompt(LENGTH)[0], prompt(LENGTH - 37, seed=1)[0], prompt(LENGTH - 9, seed=2)[0]])
    outputs = []
    for speculate in (False, True):
        with patch_model(model, speculate=speculate):
            cache = SparseCache(model)
            forward(model, ids, cache, mask)
            cache, logits = verbs(model, cache)
            outputs.append(logits)
            for layer, full in zip(cache.layers, full_layers(model), strict=True):
                assert layer.indexed == (layer.length if full else 0)
            cache.reset()
            assert all(layer.index_keys is None and layer.indexed == 0 for layer in cache.layers)
            forward(model, ids[:1], cache)
    assert torch.equal(*outputs)


def test_an_unpatched_model_runs_stock_on_a_sparse_cache(model):
    ids, mask = padded()
    expected = greedy(model, ids, attention_mask=mask)
    for max_length in (None, 300):
        cache = SparseCache(model.config, max_length=max_length)
        assert torch.equal(greedy(model, ids, attention_mask=mask, **{cache_argument(): cache}), expected)


def test_a_cache_of_another_model_is_refused_before_any_write(model):
    other = tiny(model.config.model_type, index_topk=60)
    glm = model.config.model_type == "glm_moe_dsa"
    sharing = tiny("glm_moe_dsa", layers=3)
    sharing.config.indexer_types = ["full", "full", "shared"]
    with patch_model(model), patch_model(tiny("llama")) as llama:
        for cache in (SparseCache(other), SparseCache(llama.model), *([SparseCache(sharing.config)] if glm else [])):
            with pytest.raises(ValueError, match=r"cache: expected one for a model with Indexer\(topk=40.*, got"):
                forward(model, prompt(30), cache)
            assert cache.get_seq_length() == 0
        cache = SparseCache(model)
        with pytest.raises(ValueError, match=r"cache: expected one for a model with no indexer, got one for Indexer"):
            forward(llama.model, prompt(30), cache)
        assert cache.get_seq_length() == 0


def test_an_indexer_that_selects_another_number_than_the_config_says_is_refused(model):
    model.config.index_topk = 20
    with pytest.raises(ValueError, match=r"index_topk: expected the config's 20, got 40 in a layer"):
        patch_model(model)


@pytest.mark.parametrize("foreign", [DynamicCache, StaticCache])
def test_a_foreign_cache_is_stock_and_said_once(model, foreign, monkeypatch):
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
    ids = prompt(LENGTH)

    def make():
        static = foreign is StaticCache
        return foreign(config=model.config, max_cache_len=LENGTH + 30) if static else foreign(config=model.config)

    expected = greedy(model, ids, **{cache_argument(): make()})
    with patch_model(model), pytest.warns(UserWarning, match=foreign.__name__) as said:
        assert torch.equal(greedy(model, ids, **{cache_argument(): make()}), expected)
    assert len(said) == 1


def test_gradients_without_a_sparse_cache_are_stock(model):
    ids, seen = prompt(60), []
    for patched in (False, True):
        with patch_model(model) if patched else contextlib.nullcontext():
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            seen.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(selector="quest"), "selector: expected 'auto' or 'dsa'.*, got 'quest'"),
        (dict(dense_layers=1), "dense_layers: expected 'auto' or 0.*, got 1"),
        (dict(semantics="superset"), "semantics: expected 'exact'.*, got 'superset'"),
    ],
)
def test_settings_that_contradict_the_models_rule_are_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        patch_model(model, **settings)
    assert not any("binding" in module.__dict__ for module in model.modules())


def test_a_model_without_an_indexer_refuses_dsa():
    assert SparseConfig(selector="dsa").selector == "dsa"
    with pytest.raises(ValueError, match=r"selector: expected one of 'auto', 'quest'.*no indexer, got 'dsa'"):
        patch_model(tiny("llama"), selector="dsa")


@pytest.mark.parametrize("name", ["kv_a_layernorm", "indexer.k_norm"])
def test_an_attention_without_a_part_we_know_is_refused(model, name):
    part = model.model.layers[2].self_attn.get_submodule(name.rpartition(".")[0])
    setattr(part, name.rpartition(".")[2], None)
    with pytest.raises(ValueError, match=rf"expected submodules .*, got no {name}"):
        patch_model(model)


def test_the_budget_is_not_the_models_business(model):
    """`budget` and block settings say nothing of tokens: None too."""
    ids = prompt(LENGTH)
    expected = greedy(model, ids)
    for settings in (dict(budget=None), dict(budget=64, block_size=16), dict(selector="dsa")):
        with patch_model(model, **settings) as handle:
            assert torch.equal(greedy(model, ids), expected)
            assert handle.stats()["selector_calls"] > 0


def test_states_that_do_not_continue_the_index_are_refused(model):
    with patch_model(model):
        cache = SparseCache(model)
        forward(model, prompt(30), cache)
        held = cache.layers[0].index_keys
        cache.layers[0].index_keys = held.double()
        with pytest.raises(ValueError, match=r"index keys: expected .* in torch.float64"):
            forward(model, prompt(1), cache)
        assert cache.get_seq_length() == 30 and all(layer.length == 30 for layer in cache.layers)
        cache.layers[0].index_keys = held
        forward(model, prompt(1), cache)


def test_hints_change_nothing(model):
    ids, seen = prompt(LENGTH), []
    for hint in ("predicted", "previous", "rope", "none"):
        with patch_model(model, hint=hint, speculate=True):
            seen.append(greedy(model, ids))
    assert all(torch.equal(seen[0], other) for other in seen[1:])


def test_the_mask_hook_goes_with_the_patch(model):
    old = patch_model(model)
    old.unpatch()
    with patch_model(model):
        old.unpatch()
        assert len(model.model._forward_pre_hooks) == 1
        twin = copy.deepcopy(model)
        assert torch.equal(greedy(twin, prompt(60)), greedy(model, prompt(60)))
    assert not model.model._forward_pre_hooks and not model.model._forward_pre_hooks_with_kwargs
    twin.sparse_prr.unpatch()
    assert not twin.model._forward_pre_hooks
