"""What runs while rows fit on a GPU, seen on a CPU: no cuDNN, no mask and no repeated heads where nothing is padded."""

import importlib
import math
from unittest import mock

import pytest
import torch
from models import SPARSE, TOLERANCE, left_pad, prompt, tiny, tiny_llama
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from hf_sparse_prr import SparseCache, dense, patch_model

pytestmark = pytest.mark.compat
DENSE = dict(budget=4096)
CUDNN, FLASH, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
MAX_LENGTH = pytest.mark.parametrize("max_length", [None, 400])
gqa = importlib.import_module("hf_sparse_prr.patches._gqa")


class Calls:
    """Each call of SDPA, and of the flash op aligned at the lower right, which no CPU has."""

    def __init__(self, monkeypatch):
        self.seen, self.sdpa = [], torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", self.record)
        monkeypatch.setattr(gqa, "on_gpu", lambda implementation, device: implementation == "sdpa")
        monkeypatch.setattr(dense, "flash_takes", lambda query, keys, values: True)
        monkeypatch.setattr(dense, "flash_lower_right", self.lower_right)

    def record(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        mask = None if attn_mask is None else tuple(attn_mask.shape)
        self.seen.append(("sdpa", mask, query.shape[1:3], key.shape[1:3], is_causal, _cur_sdpa_kernel_backends()))
        return self.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def lower_right(self, query, keys, values, scaling):
        self.seen.append(("flash", None, query.shape[1:3], keys.shape[1:3], True, _cur_sdpa_kernel_backends()))
        count, length = query.shape[2], keys.shape[2]
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        return self.sdpa(query, keys, values, seen, scale=scaling, enable_gqa=True).transpose(1, 2)

    def take(self):
        """What the layers of one forward did, alike: (op, mask, query [heads, tokens], K/V [heads, tokens], causal)."""
        seen, self.seen = self.seen, []
        assert seen and all(call == seen[0] for call in seen)
        assert CUDNN not in seen[0][5] and FLASH in seen[0][5]
        return seen[0][:5]


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def step(model, cache, ids, mask=None):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits


@MAX_LENGTH
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm4"])
def test_unpadded_there_is_no_mask_and_no_repeated_head(model_type, max_length, calls):
    model, ids = tiny(model_type), prompt(150, batch=2)
    chunks = [ids[:, :100], ids[:, 100:140], ids[:, 140:141], ids[:, 141:145]]
    stock_cache, seen = DynamicCache(), []
    stock = [step(model, stock_cache, chunk) for chunk in chunks]
    calls.seen.clear()
    with patch_model(model, **DENSE):
        cache = SparseCache(model, max_length=max_length)
        for chunk, expected in zip(chunks, stock, strict=True):
            torch.testing.assert_close(step(model, cache, chunk), expected, **TOLERANCE[torch.float32])
            seen.append(calls.take())
    assert seen == [
        ("sdpa", None, (4, 100), (2, 100), True),
        ("flash", None, (4, 40), (2, 140), True),
        ("sdpa", None, (4, 1), (2, 141), False),
        ("flash", None, (4, 4), (2, 145), True),
    ]
    assert CUDNN in _cur_sdpa_kernel_backends()


@MAX_LENGTH
def test_a_mask_of_ones_is_none(max_length, calls):
    model, ids = tiny_llama(), prompt(120, batch=2)
    with patch_model(model, **DENSE):
        cache, seen = SparseCache(model, max_length=max_length), []
        for begin, end in ((0, 60), (60, 100), (100, 101)):
            step(model, cache, ids[:, begin:end], torch.ones(2, end, dtype=torch.long))
            seen.append(calls.take())
    assert [(op, mask) for op, mask, *_ in seen] == [("sdpa", None), ("flash", None), ("sdpa", None)]


@MAX_LENGTH
def test_padded_tokens_are_packed_and_padded_prompts_stock(max_length, calls):
    model = tiny_llama()
    ids, mask = left_pad([prompt(100)[0], prompt(70, seed=1)[0]])
    chunks, stock_cache, seen = [(0, 80), (80, 99), (99, 100)], DynamicCache(), []
    stock = [step(model, stock_cache, ids[:, begin:end], mask[:, :end]) for begin, end in chunks]
    calls.seen.clear()
    with patch_model(model, **DENSE):
        cache = SparseCache(model, max_length=max_length)
        for (begin, end), expected in zip(chunks, stock, strict=True):
            logits = step(model, cache, ids[:, begin:end], mask[:, :end])
            torch.testing.assert_close(logits[0], expected[0], **TOLERANCE[torch.float32])
            real = mask[1, begin:end].bool()
            torch.testing.assert_close(logits[1, real], expected[1, real], **TOLERANCE[torch.float32])
            seen.append(calls.take())
    assert seen == [
        ("sdpa", (2, 1, 80, 80), (4, 80), (4, 80), False),
        ("sdpa", (2, 1, 19, 99), (4, 19), (4, 99), False),
        ("sdpa", (2, 1, 1, 100), (2, 2), (2, 100), False),
    ]


def test_what_flash_does_not_take_is_stock(calls, monkeypatch):
    monkeypatch.setattr(dense, "flash_takes", lambda query, keys, values: False)
    model, ids = tiny_llama(), prompt(60)
    with patch_model(model, **DENSE):
        cache = SparseCache(model)
        step(model, cache, ids[:, :50])
        calls.take()
        step(model, cache, ids[:, 50:])
        assert calls.take() == ("sdpa", (1, 1, 10, 60), (4, 10), (4, 60), False)


def test_a_mask_that_is_not_causal_stays(calls):
    """Neither dropped nor taken for a causal one, also where only some heads have it."""
    model, ids = tiny_llama(), prompt(40)
    visible = torch.ones(1, 4, 1, 41, dtype=torch.bool)
    visible[:, 1:, :, 5:20] = False
    prefix = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    prefix[:, :, :10, :10] = True
    stock_cache = DynamicCache()
    stock = [step_4d(model, stock_cache, ids, prefix), step_4d(model, stock_cache, ids[:, :1], visible)]
    calls.seen.clear()
    with patch_model(model, **DENSE):
        cache = SparseCache(model)
        assert torch.equal(step_4d(model, cache, ids, prefix), stock[0])
        assert calls.take()[1] == (1, 1, 40, 40)
        torch.testing.assert_close(step_4d(model, cache, ids[:, :1], visible), stock[1], **TOLERANCE[torch.float32])
        assert math.prod(calls.take()[1]) == 4 * 41  # transformers 5.24 packs the heads


def step_4d(model, cache, ids, mask):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


def test_a_mask_of_some_heads_in_a_preallocated_cache():
    model, ids, stock_cache = tiny_llama(), prompt(40), DynamicCache()
    visible = torch.ones(1, 4, 1, 64, dtype=torch.bool)
    visible[:, 1:, :, 5:20] = False
    visible[..., 41:] = False
    step(model, stock_cache, ids)
    stock = step_4d(model, stock_cache, ids[:, :1], visible[..., :41])
    with patch_model(model, **DENSE):
        cache = SparseCache(model, max_length=64)
        step(model, cache, ids)
        assert torch.equal(step_4d(model, cache, ids[:, :1], visible), stock)


@pytest.mark.parametrize("asked", [{"is_causal": True}, {"softcap": None}])
def test_arguments_that_only_stock_knows_go_to_stock(asked, calls):
    model, ids = tiny_llama(), prompt(60)
    with patch_model(model, **DENSE), torch.no_grad():
        cache = SparseCache(model)
        model(ids[:, :50], past_key_values=cache)
        calls.take()
        model(ids[:, 50:], past_key_values=cache, **asked)
        assert calls.take()[:2] == ("sdpa", (1, 1, 10, 60))


def test_a_layer_with_a_window_runs_without_cudnn(calls):
    model = tiny("qwen3", sliding_window=32, use_sliding_window=True, max_window_layers=1)
    with patch_model(model, **SPARSE):
        step(model, SparseCache(model), prompt(60))
    assert len(calls.seen) == 3
    assert all(CUDNN not in call[5] for call in calls.seen)
    assert CUDNN in _cur_sdpa_kernel_backends()


def test_other_implementations_and_devices_stay_as_they_are(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.version, "hip", None)
    assert dense.on_gpu("sdpa", gpu)
    assert not dense.on_gpu("sdpa", cpu)
    assert not any(dense.on_gpu(name, gpu) for name in ("eager", "flash_attention_2", "flex_attention"))
    with mock.patch.dict(dense.ALL_ATTENTION_FUNCTIONS._local_mapping, sdpa=modeling_llama.eager_attention_forward):
        assert not dense.on_gpu("sdpa", gpu)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not dense.on_gpu("sdpa", gpu)


@pytest.mark.parametrize(
    ("enabled", "inside"),
    [([CUDNN, FLASH, MATH], [FLASH, MATH]), ([FLASH], [FLASH]), ([MATH, CUDNN], [MATH]), ([CUDNN], [CUDNN]), ([], [])],
)
def test_what_the_user_disabled_stays_disabled(enabled, inside):
    for context in (dense._cudnn_off, dense._traceable):
        with sdpa_kernel(enabled):
            before = _cur_sdpa_kernel_backends()
            with context():
                assert set(_cur_sdpa_kernel_backends()) == set(inside)
            assert _cur_sdpa_kernel_backends() == before
            with pytest.raises(RuntimeError, match="inconsistent tensor size"), context():
                torch.ones(2) @ torch.ones(3)
            assert _cur_sdpa_kernel_backends() == before


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_it_compiles_without_a_graph_break(count, causal):
    module = tiny_llama().model.layers[0].self_attn
    query, keys, values = torch.randn(2, 4, count, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    mask = torch.ones(2, 1, count, 40, dtype=torch.bool).tril(40 - count)
    compiled = torch.compile(dense.gpu_attention, backend="eager", fullgraph=True)
    out = [
        attention(module, query, keys, values, mask, causal=causal, scaling=0.3, dropout=0.0)[0]
        for attention in (dense.gpu_attention, compiled)
    ]
    assert torch.equal(*out)
    assert CUDNN in _cur_sdpa_kernel_backends()
