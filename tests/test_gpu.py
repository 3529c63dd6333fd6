"""Decoding on a CUDA GPU: Triton kernels run, are named, agree with the references, and no step waits for the GPU."""

import importlib
from functools import partial

import pytest
import torch
from models import SPARSE, TOLERANCE, greedy, left_pad, prompt, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from hf_sparse_prr import SparseCache, dense, patch_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
INFLLM = dict(selector="infllm_v2", budget=256, block_size=32, dense_layers=0)
WIDE = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64)
NO_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MAX_LENGTH = pytest.mark.parametrize("max_length", [None, 8100])
gqa = importlib.import_module("hf_sparse_prr.patches._gqa")
BOTH = pytest.mark.parametrize("settings", [SPARSE, INFLLM], ids=["quest", "infllm_v2"])


@pytest.fixture(autouse=True)
def on_the_gpu():
    before = torch.get_default_device()
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(before)


def logits(model, cache, steps=20):
    with torch.no_grad():
        model(prompt(400, batch=2), past_key_values=cache)
        tokens = prompt(steps, batch=2, seed=1)
        rows = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(steps)]
    return torch.cat(rows, dim=1)


@BOTH
def test_kernels_run_and_are_named_and_agree_with_the_references(settings):
    model, seen = tiny("llama"), []
    for kernels, backends in (("auto", ("triton", "cuda")), ("reference", ("reference",))):
        with patch_model(model, **settings, kernels=kernels, speculate=True) as handle:
            assert handle.report().backend in backends  # "cuda" with LOCAL_KERNELS at a compiled variant
            seen.append(logits(model, SparseCache(model)))
    torch.testing.assert_close(*seen, **TOLERANCE[torch.float32])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1), (16, 1)])
def test_prr_equals_serial_bitwise(settings, dtype, heads):
    shape = dict(num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=64)
    model, seen = tiny("llama", dtype=dtype, **shape), []
    for speculate in (False, True):
        with patch_model(model, **settings, speculate=speculate, spec_ratio=1.5) as handle:
            seen.append(logits(model, SparseCache(model)))
            assert handle.stats()["selector_calls"] == 60
    assert torch.equal(*seen)


@BOTH
@pytest.mark.parametrize("speculate", [False, True])
def test_a_step_does_not_wait_for_the_gpu(settings, speculate):
    model = tiny("llama", dtype=torch.bfloat16)
    with patch_model(model, **settings, speculate=speculate, ema=(0.4, 0.1, 0.25)), torch.no_grad():
        cache = SparseCache(model)
        logits(model, cache, steps=3)
        hidden = torch.randn(2, 1, 32, dtype=torch.bfloat16)
        embeddings = model.model.rotary_emb(hidden, torch.tensor([[400], [400]]))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(40):
                for layer in model.model.layers:
                    layer.self_attn(hidden, embeddings, None, cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert cache.get_seq_length() == 443


def test_generate_runs_on_the_kernels():
    model, ids = tiny("qwen3"), prompt(200, batch=2)
    with patch_model(model, **SPARSE, speculate=True):
        sparse = greedy(model, ids)
    assert sparse.shape == (2, 24)
    assert not torch.equal(sparse, greedy(model, ids))


class Ops(TorchDispatchMode):
    """Names of the ops that run, and the bytes of the largest tensor that one of them makes."""

    def __init__(self):
        super().__init__()
        self.attention, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        held = {tensor.untyped_storage().data_ptr() for tensor in given}
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if "attention" in name:
            self.attention.add(name)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max(
            [self.largest, *(leaf.nbytes for leaf in made if leaf.untyped_storage().data_ptr() not in held)]
        )
        return out


FLASH, EFFICIENT = {"_scaled_dot_product_flash_attention"}, {"_scaled_dot_product_efficient_attention"}


@pytest.fixture
def attended(monkeypatch):
    """(ops, bytes of the largest tensor made, of the query, of the keys) of each call of dense attention."""
    seen = []

    def record(module, query, keys, *args, **kwargs):
        with Ops() as ops:
            out = dense.gpu_attention(module, query, keys, *args, **kwargs)
        seen.append((ops.attention, ops.largest, query.nbytes, keys.nbytes))
        return out

    monkeypatch.setattr(gqa, "gpu_attention", record)
    return seen


def last_logits(model, cache, ids, mask=None):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]


@MAX_LENGTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_layers_and_prompts_are_flash_without_a_mask_or_repeated_heads(dtype, max_length, attended):
    model, ids = tiny("llama", dtype=dtype, **WIDE), prompt(4100, batch=2)
    chunks = [ids[:, :2000], ids[:, 2000:4000], *ids[:, 4000:4003].split(1, dim=1), ids[:, 4003:4010]]
    caches = DynamicCache(), DynamicCache()
    stock = [last_logits(model, caches[0], chunk) for chunk in chunks]
    exact = tiny("llama", **WIDE)
    exact.load_state_dict(model.state_dict())
    truth = [last_logits(exact, caches[1], chunk) for chunk in chunks]
    with patch_model(model, budget=8192):
        cache = SparseCache(model, max_length=max_length)
        ours = [last_logits(model, cache, chunk) for chunk in chunks]
    errors = [max((a - b).abs().max() for a, b in zip(rows, truth, strict=True)) for rows in (ours, stock)]
    assert errors[0] <= 2 * errors[1]
    assert len(attended) == 3 * len(chunks)
    for ops, largest, query, _ in attended:
        assert ops == FLASH
        assert largest <= query  # the output: a mask [Q, T] and repeated keys are larger


@MAX_LENGTH
def test_padded_steps_repeat_no_heads_and_no_kernel_is_cudnns(max_length, attended):
    model = tiny("llama", dtype=torch.bfloat16, **WIDE)
    ids, mask = left_pad([prompt(4001)[0], prompt(3000, seed=1)[0]])
    with patch_model(model, budget=8192), Ops() as ops:
        cache = SparseCache(model, max_length=max_length)
        for begin, end in ((0, 2000), (2000, 4000), (4000, 4001)):
            last_logits(model, cache, ids[:, begin:end], mask[:, :end])
    assert ops.attention == EFFICIENT
    assert len(attended) == 9
    for _, largest, _, keys in attended[-3:]:
        assert largest < keys / 8


def test_a_layer_with_a_window_is_not_cudnns():
    window = dict(sliding_window=64, use_sliding_window=True, max_window_layers=1)
    model = tiny("qwen3", dtype=torch.bfloat16, **WIDE, **window)
    with patch_model(model, **SPARSE), Ops() as ops:
        cache = SparseCache(model)
        for chunk in prompt(203).split(200, dim=1):
            last_logits(model, cache, chunk)
    assert ops.attention and ops.attention <= FLASH | EFFICIENT


def test_it_is_stock_to_the_bit_where_stock_is_flash():
    model, ids, seen = tiny("llama", dtype=torch.bfloat16, **WIDE), prompt(605, batch=2), []
    for patched in (False, True):
        if patched:
            patch_model(model, budget=8192)
        cache = SparseCache(model) if patched else DynamicCache()
        with sdpa_kernel(NO_CUDNN):
            seen.append([last_logits(model, cache, chunk) for chunk in (ids[:, :600], *ids[:, 600:].split(1, dim=1))])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@MAX_LENGTH
def test_a_dense_step_copies_no_keys_or_values(max_length):
    model, ids = tiny("llama", dtype=torch.bfloat16, **WIDE), prompt(8001, batch=4)
    with patch_model(model, budget=16384):
        cache = SparseCache(model, max_length=max_length)
        last_logits(model, cache, ids[:, :8000])
        last_logits(model, cache, ids[:, 8000:])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        last_logits(model, cache, ids[:, 8000:])
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < (cache.layers[0].keys.nbytes + cache.layers[0].values.nbytes) / 8


@pytest.mark.parametrize("count", [1, 5, 300])
def test_dense_attention_compiles_and_does_not_wait_for_the_gpu(count):
    module = tiny("llama", dtype=torch.bfloat16, **WIDE).model.layers[0].self_attn
    query, keys, values = (torch.randn(2, heads, 300, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    inputs = (module, query[:, :, -count:], keys, values, None)
    attention = partial(dense.gpu_attention, causal=True, scaling=0.125, dropout=0.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = attention(*inputs)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compiled = torch.compile(attention, backend="eager", fullgraph=True)(*inputs)[0]
    assert torch.equal(compiled, eager)
    visible = torch.ones(count, 300, dtype=torch.bool).tril(300 - count)
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(tensor.float() for tensor in inputs[1:4]), attn_mask=visible, scale=0.125, enable_gqa=True
        )
    torch.testing.assert_close(eager.float(), expected.transpose(1, 2), **TOLERANCE[torch.bfloat16])
