"""Where a cache, a model or a mask is used in a way that is easy to forget."""

import copy
import threading

import pytest
import torch
from models import SPARSE, greedy, left_pad, prompt, tiny_llama
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_sparse_prr import SparseCache, patch_model, patching, unpatch_model

pytestmark = pytest.mark.compat
PRR = dict(SPARSE, speculate=True)


@pytest.fixture(autouse=True)
def own_warnings(monkeypatch):
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())


@pytest.fixture
def model():
    model = tiny_llama()
    with patch_model(model, **PRR):
        yield model


def test_a_cache_filled_in_inference_mode_serves_every_mode(model):
    ids = prompt(150)
    cache = SparseCache(model)
    with torch.inference_mode():
        model(ids[:, :-1], past_key_values=cache)
        twin = copy.deepcopy(cache)
        twin.batch_repeat_interleave(2)
        twin.batch_select_indices([1])
    for held in (cache, twin):
        assert torch.equal(greedy(model, ids, past_key_values=held), greedy(model, ids))
        held.crop(-3)
    with torch.inference_mode():
        assert greedy(model, ids, tokens=4).shape == (1, 4)


def test_early_exit_drafts_match_greedy_search(model):
    ids = prompt(150)
    assert torch.equal(greedy(model, ids, assistant_early_exit=1), greedy(model, ids))


def test_generate_in_train_mode_without_a_cache_is_stock(model):
    ids = prompt(100)
    model.train()
    patched = greedy(model, ids)
    model.sparse_prr.unpatch()
    assert torch.equal(patched, greedy(model, ids))


def test_a_crop_into_the_prompt_of_the_last_forward_predicts_only_what_is_there(model):
    ids, handle = prompt(300), model.sparse_prr
    handle.unpatch()
    handle = patch_model(model, **PRR, trace=True)
    cache = SparseCache(model)
    cache.prompt_length = 296
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.crop(-150)
        cache.prompt_length = None
        handle.reset_stats()
        model(ids[:, 150:151], past_key_values=cache)
    for entry in handle.trace:
        assert int(entry.predicted.max()) < 150 // 16 - 1  # neither forced nor beyond the end


def test_a_users_module_that_cannot_be_imported_is_shared_by_copies_and_not_pickled():
    import pickle
    import types

    import hf_sparse_prr.bundled as bundled

    module = types.ModuleType("not_importable")
    module.__dict__.update({name: getattr(bundled, name) for name in bundled.__all__})
    model = tiny_llama()
    patch_model(model, **PRR, kernels=module)
    assert copy.deepcopy(SparseCache(model)).sparse_config.kernels is module
    assert copy.deepcopy(model).sparse_prr.kernels.module is module
    with pytest.raises(
        ValueError, match=r"expected a module that sys\.modules holds to pickle it, got 'not_importable'"
    ):
        pickle.dumps(model)


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_max_length_is_bit_equal_to_a_dynamic_cache_while_rows_fit(head_dim, dtype, padded):
    model = tiny_llama(layers=1, head_dim=head_dim, dtype=dtype)
    ids, mask = left_pad([prompt(100)[0], prompt(100 - 30 * padded, seed=1)[0]])
    stock = greedy(model, ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config))
    caches = DynamicCache(config=model.config), SparseCache(model.config, max_length=400)
    twin = copy.deepcopy(model)
    with patch_model(twin, budget=4096), torch.no_grad():
        assert torch.equal(greedy(twin, ids, attention_mask=mask, past_key_values=copy.deepcopy(caches[1])), stock)
        for begin, end in [(0, 100), *((t, t + 1) for t in range(100, 110))]:
            mask = torch.nn.functional.pad(mask, (0, end - mask.shape[1]), value=1)
            given = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, begin:end])
            tokens = ids if begin == 0 else prompt(1, batch=2, seed=begin)
            logits = [
                one(tokens, past_key_values=cache, **given).logits
                for one, cache in zip((model, twin), caches, strict=True)
            ]
            assert torch.equal(*logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_holes_stay_hidden_where_no_mask_comes(implementation):
    """Dense layers, fitting rows and selecting rows alike."""
    model = tiny_llama(attn_implementation=implementation)
    ids, mask = left_pad([prompt(60)[0], prompt(30, seed=1)[0]])
    with patch_model(model, **dict(SPARSE, dense_layers=1)), torch.no_grad():
        caches = [SparseCache(model) for _ in range(2)]
        for cache in caches:
            model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
        for step in range(30):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            token, positions = prompt(1, batch=2, seed=step), (mask.cumsum(1) - 1)[:, -1:]
            told = model(token, attention_mask=mask, position_ids=positions, past_key_values=caches[0]).logits
            untold = model(token, position_ids=positions, past_key_values=caches[1]).logits
            assert torch.equal(told, untold)


def test_a_mask_that_is_too_narrow_is_refused(model):
    cache = SparseCache(model)
    with torch.no_grad():
        model(prompt(150), past_key_values=cache)
        valid = cache.tokens.valid.clone()
        with pytest.raises(ValueError, match="attention_mask: expected one of 151 columns that has a new token"):
            model(prompt(1), attention_mask=torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    assert cache.get_seq_length() == 150
    assert torch.equal(cache.tokens.valid, valid)


def test_a_model_and_its_inner_model_share_one_patch(model):
    assert patch_model(model.model, **PRR) is model.sparse_prr
    unpatch_model(model.model)
    assert "sparse_prr" not in model.__dict__
    patch_model(model.model, **PRR)
    with pytest.raises(ValueError, match="expected an unpatched model, got one whose LlamaModel is"):
        patch_model(model, **PRR)
    unpatch_model(model)
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"


def test_two_threads_generate_with_one_model(model):
    """A is between its prompt and its cache while B starts and ends."""
    entered, leave = threading.Event(), threading.Event()
    caches = [SparseCache(model), SparseCache(model)]

    class Wait(BaseStreamer):
        def put(self, value):
            entered.set()
            leave.wait(60)

        def end(self):
            pass

    def slow():
        greedy(model, prompt(100), tokens=3, past_key_values=caches[0], streamer=Wait())

    thread = threading.Thread(target=slow)
    thread.start()
    assert entered.wait(60)
    greedy(model, prompt(90), tokens=3, past_key_values=caches[1])
    leave.set()
    thread.join(60)
    assert [cache.prompt_length for cache in caches] == [None, None]
    assert [cache.get_seq_length() for cache in caches] == [102, 92]


def test_continuous_batching_is_named(model):
    settings = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=-1)
    with pytest.warns(UserWarning, match="stock dense attention runs, because the cache is a Paged"):
        model.generate_batch(inputs=[prompt(100)[0].tolist()], generation_config=settings)


def test_generate_never_compiles_a_cache_that_grows(model):
    cache, seen = SparseCache(model), []
    original = type(model)._valid_auto_compile_criteria

    def spy(self, model_kwargs, generation_config):
        seen.append(generation_config.disable_compile)
        return original(self, model_kwargs, generation_config)

    type(model)._valid_auto_compile_criteria = spy
    try:
        greedy(model, prompt(100), tokens=3, past_key_values=cache)
    finally:
        type(model)._valid_auto_compile_criteria = original
    assert seen[-1]  # when generate() decides


@pytest.mark.parametrize("make", [lambda: SparseCache(None), lambda: patch_model(None), lambda: unpatch_model("x")])
def test_not_a_model(make):
    with pytest.raises(TypeError, match="expected a transformers model"):
        make()


def test_an_unpatched_handle_is_no_context(model):
    handle = model.sparse_prr
    handle.unpatch()
    with pytest.raises(RuntimeError, match="expected a patched model"), handle:
        pass


def test_an_endless_budget_with_a_trace():
    model = tiny_llama()
    with patch_model(model, budget=10**30, trace=True) as handle:
        greedy(model, prompt(50), tokens=3)
        assert len(handle.trace) == 2
