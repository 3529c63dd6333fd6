"""Layers with a sliding window stay as transformers has them, also in the cache, and say why in the report."""

import contextlib
import copy
import pickle

import pytest
import torch
from models import SPARSE, TOLERANCE, greedy, left_pad, prompt, tiny
from transformers import DynamicCache

from hf_sparse_prr import SparseCache, SparseConfig, patch_model, patching
from hf_sparse_prr.hooks import cache_argument
from hf_sparse_prr.layer import SparseLayer

pytestmark = pytest.mark.compat
WINDOW = 48
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
BOTH_ORDERS = pytest.mark.parametrize("types", [MIXED, MIXED[::-1]], ids=["window first", "full first"])
GROWING_OR_NOT = pytest.mark.parametrize("max_length", [None, 300], ids=["growing", "preallocated"])


def sliding(model_type="qwen2", types=MIXED, **overrides):
    """Four layers; the first has a window where `types` is as it is."""
    if model_type != "qwen3_moe":  # all its layers or none
        overrides["layer_types"] = types
    return tiny(model_type, layers=4, use_sliding_window=True, sliding_window=WINDOW, **overrides)


@pytest.mark.filterwarnings("ignore:hf_sparse_prr")
@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_the_report_says_why_they_are_dense(model_type):
    with patch_model(sliding(model_type), **SPARSE) as handle:
        layers = handle.report().layers
    dense = [0, 1, 2, 3] if model_type == "qwen3_moe" else [0, 2]
    assert [layer.index for layer in layers if layer.status == "dense"] == dense
    assert {layers[index].reason for index in dense} == {"sliding window of 48 tokens"}


def test_a_model_without_a_layer_to_sparsify_says_so(monkeypatch):
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
    model = sliding("qwen3_moe")
    with pytest.warns(UserWarning, match="dense attention runs in every layer, because: sliding window of 48 tokens"):
        patch_model(model, **SPARSE).unpatch()
    with pytest.raises(RuntimeError, match="strict=True: stock dense attention runs in every layer"):
        patch_model(model, **SPARSE, strict=True)
    assert type(model.model.layers[0].self_attn).__name__ == "Qwen3MoeAttention"
    patch_model(model, budget=None, strict=True).unpatch()  # dense is what was asked for


@pytest.mark.filterwarnings("ignore:hf_sparse_prr")
@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("max_length", [None, 200])
def test_while_rows_fit_it_is_stock_to_the_bit(model_type, max_length):
    model = sliding(model_type)
    ids, mask = left_pad([prompt(120)[0], prompt(90, seed=1)[0]])
    asked = dict(
        attention_mask=mask, max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    stock = model.generate(ids, **asked)
    with patch_model(model, budget=4096, dense_layers=0):
        given = {}
        if model_type != "qwen3_moe":  # it has no full layer: generate() takes transformers' own cache
            given[cache_argument()] = SparseCache(model, max_length=max_length)
        out = model.generate(ids, **asked, **given)
    assert torch.equal(out.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(out.logits, stock.logits, strict=True))


@pytest.mark.parametrize("mode", [{}, dict(num_beams=3), dict(prompt_lookup_num_tokens=4), dict(prefill_chunk_size=40)])
def test_the_others_are_sparse(mode):
    model, piece = sliding(), prompt(50)
    ids = torch.cat([piece, piece, piece, piece[:, :20]], dim=1)
    stock, out = greedy(model, ids), []
    for speculate in (False, True):
        with patch_model(model, **SPARSE, speculate=speculate) as handle:
            out.append(model.generate(ids, max_new_tokens=24, do_sample=False, **mode)[:, -24:])
            stats = handle.stats()
            if "num_beams" not in mode:
                assert torch.equal(out[-1], greedy(model, ids))
        assert [layer["selector_calls"] > 0 for layer in stats["layers"]] == [False, True, False, True]
    assert torch.equal(*out)
    assert not torch.equal(out[0], stock)


def test_left_padding_and_batches():
    model = sliding()
    rows = [prompt(length, seed=length)[0] for length in (150, 97, 20)]
    with patch_model(model, **SPARSE, speculate=True):
        solo = torch.cat([greedy(model, row[None]) for row in rows])
        ids, mask = left_pad(rows, extra=5)
        assert torch.equal(greedy(model, ids, attention_mask=mask), solo)


def test_the_windows_keep_only_what_they_need():
    model = sliding()
    with patch_model(model, **SPARSE), torch.no_grad():
        cache = SparseCache(model)
        model(prompt(150), past_key_values=cache)
    assert [isinstance(layer, SparseLayer) for layer in cache.layers] == [False, True, False, True]
    assert [layer.keys.shape[2] for layer in cache.layers if not isinstance(layer, SparseLayer)] == [WINDOW - 1] * 2


@BOTH_ORDERS
@GROWING_OR_NOT
def test_verbs_move_them_too(types, max_length):
    model, tokens = sliding(types=types), prompt(4, batch=2, seed=2)

    def decode(cache, rows):
        with torch.no_grad():
            return torch.cat([model(tokens[rows, i : i + 1], past_key_values=cache).logits for i in range(4)], dim=1)

    with patch_model(model, **SPARSE, speculate=True), torch.no_grad():
        cache = SparseCache(model, max_length=max_length)
        cache.crop(0)  # nothing there
        model(prompt(150, batch=2), past_key_values=cache)
        expected = decode(copy.deepcopy(cache), slice(None))
        for turned in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            turned.reorder_cache(torch.tensor([1, 0]))
            assert torch.equal(decode(turned, [1, 0]), expected[[1, 0]])
        repeated = copy.deepcopy(cache)
        repeated.batch_repeat_interleave(2)
        repeated.batch_select_indices(torch.tensor([1, 2]))
        assert torch.equal(decode(repeated, slice(None)), expected)
        cache.reset()
        assert cache.get_seq_length() == 0
        model(prompt(150, batch=2), past_key_values=cache)
        assert torch.equal(decode(cache, slice(None)), expected)


@BOTH_ORDERS
@GROWING_OR_NOT
def test_a_crop_is_refused_or_right(types, max_length):
    """transformers' window has dropped what a crop would bring back, unless it was told to record."""
    model = sliding(types=types)
    with patch_model(model, **SPARSE), torch.no_grad():
        caches = [SparseCache(model, max_length=max_length) for _ in range(2)]
        for cache in caches:
            model(prompt(150), past_key_values=cache)
        cache, expected = caches
        cache.crop(0)
        with pytest.raises(RuntimeError, match="crop: expected at most 0 tokens, got 3: a sliding window of 48 tokens"):
            cache.crop(-3)
        assert [layer.get_seq_length() for layer in cache.layers] == [150] * 4
        assert cache.tokens.length == 150
        cache.activate_past_recording()
        model(prompt(5, seed=1), past_key_values=cache)
        cache.crop(-3)
        assert [layer.get_seq_length() for layer in cache.layers] == [152] * 4
        model(prompt(5, seed=1)[:, :2], past_key_values=expected)
        logits = [model(prompt(1, seed=4), past_key_values=each).logits for each in caches]
        torch.testing.assert_close(*logits, **TOLERANCE[torch.float32])


@BOTH_ORDERS
@pytest.mark.parametrize(("prompt_length", "crops"), [(60, [5, 20]), (60, [5, 7]), (150, [3, 3]), (40, [3, 20])])
def test_crop_after_crop_is_refused_or_right(types, prompt_length, crops):
    model, ids, held = sliding(types=types), prompt(prompt_length), prompt_length
    with patch_model(model, **SPARSE), torch.no_grad():
        cache = SparseCache(model)
        cache.activate_past_recording()
        model(ids, past_key_values=cache)
        for number in crops:
            with contextlib.suppress(RuntimeError):
                cache.crop(-number)
                held -= number
            assert [layer.get_seq_length() for layer in cache.layers] == [held] * 4
        fresh = SparseCache(model)
        model(ids[:, :held], past_key_values=fresh)
        logits = [model(prompt(1, seed=9), past_key_values=each).logits for each in (cache, fresh)]
        torch.testing.assert_close(*logits, **TOLERANCE[torch.float32])


@BOTH_ORDERS
def test_a_crop_of_more_than_there_is_empties_it(types):
    model = sliding(types=types)
    with patch_model(model, **SPARSE), torch.no_grad():
        cache = SparseCache(model)
        cache.activate_past_recording()
        model(prompt(30), past_key_values=cache)
        cache.crop(-200)
        assert [layer.get_seq_length() for layer in cache.layers] == [0] * 4
        model(prompt(30), past_key_values=cache)
        cache.reset()
        assert all(layer.record_past for layer in cache.layers if not isinstance(layer, SparseLayer))


@BOTH_ORDERS
def test_an_unpatched_model_with_gradients_stores_none(types):
    model = sliding(types=types)
    cache = SparseCache(model)
    assert torch.is_grad_enabled()
    model(prompt(60), past_key_values=cache)
    assert not any(layer.keys.requires_grad or layer.values.requires_grad for layer in cache.layers)
    copy.deepcopy(cache)


def refusals(model):
    """(what is given beside a cache of 100 of at most 120 tokens and one row, the error, its message)."""
    one = prompt(1)
    odd = torch.ones(1, 1, 3, 120, dtype=torch.bool).tril(100)
    odd[..., 50] = torch.tensor([True, False, True])  # a tree: not causal x validity
    window = torch.ones(1, 1, 3, WINDOW + 2, dtype=torch.bool)
    masks = {"full_attention": odd, "sliding_attention": window}
    return {
        "batch": (dict(input_ids=prompt(1, batch=3)), ValueError, "expected"),
        "length": (dict(input_ids=prompt(40)), ValueError, "at most max_length=120 tokens, got 140"),
        "narrow mask": (dict(input_ids=one, attention_mask=torch.ones(1, 1).long()), ValueError, "attention_mask"),
        "4D mask": (dict(input_ids=one, attention_mask=torch.ones(1, 1, 1, 7, dtype=torch.bool)), Exception, ""),
        "strict": (dict(input_ids=prompt(3), attention_mask=masks), RuntimeError, "strict=True"),
    }


@BOTH_ORDERS
@pytest.mark.parametrize("what", ["batch", "length", "narrow mask", "4D mask", "strict"])
def test_a_refused_input_leaves_every_layer_as_it_was(types, what):
    model = sliding(types=types)
    with patch_model(model, **SPARSE, strict=True), torch.no_grad():
        cache = SparseCache(model, max_length=120)
        model(prompt(100), past_key_values=cache)
        twin = copy.deepcopy(cache)
        given, error, message = refusals(model)[what]
        with pytest.raises(error, match=message):
            model(**given, past_key_values=cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [100] * 4
        logits = [model(prompt(1), past_key_values=each).logits for each in (cache, twin)]
    assert torch.equal(*logits)


@BOTH_ORDERS
def test_a_cache_for_something_else_is_refused_untouched(types):
    model = sliding(types=types)
    strangers = {
        "expected the settings of the model": SparseCache(model, sparse_config=SparseConfig(budget=320)),
        r"expected sliding window of 48 tokens in layer \d, got full attention": SparseCache(tiny("qwen2", layers=4)),
        "in layer 0, got (full attention|sliding window of 48)": SparseCache(sliding(types=types[::-1])),
        "key states: expected .* in torch.bfloat16": SparseCache(model.config),
    }
    strangers["key states: expected .* in torch.bfloat16"].layers[0].update(*[torch.zeros(1, 2, 0, 8).bfloat16()] * 2)
    with patch_model(model, **SPARSE), torch.no_grad():
        for message, cache in strangers.items():
            with pytest.raises(ValueError, match=message):
                model(prompt(20), past_key_values=cache)
            assert [layer.get_seq_length() for layer in cache.layers] == [0] * 4


@BOTH_ORDERS
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_known_padding_stays_hidden_where_no_mask_comes(types, implementation):
    model = sliding(types=types, attn_implementation=implementation)
    ids, mask = left_pad([prompt(60)[0], prompt(30, seed=1)[0]])
    with patch_model(model, **SPARSE), torch.no_grad():
        caches = [SparseCache(model) for _ in range(2)]
        for cache in caches:
            model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
        for step in range(40):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            token, positions = prompt(1, batch=2, seed=step), (mask.cumsum(1) - 1)[:, -1:]
            told = model(token, attention_mask=mask, position_ids=positions, past_key_values=caches[0]).logits
            untold = model(token, position_ids=positions, past_key_values=caches[1]).logits
            torch.testing.assert_close(told, untold, **TOLERANCE[torch.float32])


@BOTH_ORDERS
def test_a_short_row_in_a_foreign_cache_is_not_named(types):
    model = sliding(types=types)
    ids, mask = left_pad([prompt(40)[0]], extra=100)
    with patch_model(model, **SPARSE, strict=True):
        model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False,
            **{cache_argument(): DynamicCache(config=model.config)},
        )  # fmt: skip
        with pytest.raises(RuntimeError, match=r"strict=True: .*DynamicCache"):
            greedy(model, prompt(150), tokens=4, **{cache_argument(): DynamicCache(config=model.config)})


@BOTH_ORDERS
def test_early_exit_drafts(types):
    model, ids = sliding(types=types), prompt(150)
    with patch_model(model, **SPARSE):
        plain = greedy(model, ids)
        assert torch.equal(greedy(model, ids, assistant_early_exit=1), plain)


@GROWING_OR_NOT
def test_beams_over_a_prefilled_cache(max_length):
    model, ids = sliding(), prompt(150)
    with patch_model(model, **SPARSE):
        cache = SparseCache(model, max_length=max_length)
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache)
        asked = dict(num_beams=3, max_new_tokens=12, do_sample=False)
        out = model.generate(ids, **asked, **{cache_argument(): cache})
        assert torch.equal(out, model.generate(ids, **asked))


def test_a_model_without_full_attention_has_no_sparse_cache():
    model = sliding("qwen3_moe")
    with pytest.raises(ValueError, match="expected a layer of full attention, got only sliding window of 48 tokens"):
        SparseCache(model)


def test_an_interrupted_forward_is_noticed():
    """A window before the first full layer has been written when the mask is refused."""
    model = sliding()
    with patch_model(model, **SPARSE), torch.no_grad():
        cache = SparseCache(model)
        model(prompt(100), past_key_values=cache)
        cache.layers[0].update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
        with pytest.raises(ValueError, match=r"expected layers of one length, got \[100, 101\]"):
            model(prompt(1), past_key_values=cache)


def test_an_unpatched_model_runs_stock_on_it():
    model, ids = sliding(), prompt(150)
    stock = greedy(model, ids, **{cache_argument(): DynamicCache(config=model.config)})
    assert torch.equal(greedy(model, ids, **{cache_argument(): SparseCache(model.config)}), stock)
