"""Layers with a sliding window stay as transformers has them, also in the cache, and say why in the report."""

import copy
import pickle

import pytest
import torch
from models import SPARSE, greedy, left_pad, prompt, tiny
from transformers import DynamicCache

from hf_sparse_prr import SparseCache, patch_model, patching
from hf_sparse_prr.hooks import cache_argument
from hf_sparse_prr.layer import SparseLayer

pytestmark = pytest.mark.compat
WINDOW = 48
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


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
        cache = SparseCache(model, max_length=max_length)
        assert cache.is_compileable == (max_length is not None)
        out = model.generate(ids, **asked, **{cache_argument(): cache})
    assert torch.equal(out.sequences, stock.sequences)
    if max_length is None:
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


def test_verbs_move_them_too():
    model, tokens = sliding(), prompt(4, batch=2, seed=2)

    def decode(cache, rows):
        with torch.no_grad():
            return torch.cat([model(tokens[rows, i : i + 1], past_key_values=cache).logits for i in range(4)], dim=1)

    with patch_model(model, **SPARSE, speculate=True), torch.no_grad():
        cache = SparseCache(model)
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


def test_a_crop_that_a_window_refuses_changes_nothing():
    """transformers' window has dropped what a crop would bring back, unless it was told to record."""
    model = sliding(types=MIXED[::-1])  # a full layer first
    with patch_model(model, **SPARSE), torch.no_grad():
        cache = SparseCache(model)
        model(prompt(150), past_key_values=cache)
        with pytest.raises(RuntimeError, match="does not track past states"):
            cache.crop(-3)
        assert [layer.get_seq_length() for layer in cache.layers] == [150] * 4
        assert cache.tokens.length == 150
        cache.activate_past_recording()
        model(prompt(5, seed=1), past_key_values=cache)
        cache.crop(-3)
        assert [layer.get_seq_length() for layer in cache.layers] == [152] * 4


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
