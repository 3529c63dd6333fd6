"""Decoding on a CUDA GPU: Triton kernels run, are named, agree with the references, and no step waits for the GPU."""

import pytest
import torch
from models import SPARSE, TOLERANCE, greedy, prompt, tiny

from hf_sparse_prr import SparseCache, patch_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
INFLLM = dict(selector="infllm_v2", budget=256, block_size=32, dense_layers=0)
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
    for kernels, backend in (("auto", "triton"), ("reference", "reference")):
        with patch_model(model, **settings, kernels=kernels, speculate=True) as handle:
            assert handle.report().backend == backend
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
