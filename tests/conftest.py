"""HF_SPARSE_PRR_TEST_DEVICE=cuda runs the tests of decoding on a GPU: the default device is set for all of them."""

import os
import types

import pytest
import torch

if device := os.environ.get("HF_SPARSE_PRR_TEST_DEVICE"):
    torch.set_default_device(device)


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) of SmolLM2-135M-Instruct in float32."""
    from hf_sparse_prr.demo.loading import load_model
    from hf_sparse_prr.demo.smollm2 import FetchError, ensure_smollm2

    try:
        return load_model(ensure_smollm2(), torch.float32)
    except FetchError as error:
        pytest.skip(f"SmolLM2 can't be fetched: {error}")


@pytest.fixture(scope="session")
def outputs():
    """New ids of the stock model and of the patched one. They differ, so a test can tell which one ran."""
    from models import SPARSE, greedy, prompt, tiny_llama

    from hf_sparse_prr import patch_model

    ids = prompt(100)
    stock = greedy(tiny_llama(), ids)
    with patch_model(tiny_llama(), **SPARSE) as handle:
        sparse = greedy(handle.model, ids)
    assert not torch.equal(stock, sparse)
    return types.SimpleNamespace(stock=stock, sparse=sparse)
