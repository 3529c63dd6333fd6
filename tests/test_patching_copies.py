"""Copies of a patched model: deepcopy and pickle give a patched model of its own, save_pretrained a stock one."""

import copy
import pickle

import pytest
import torch
from models import SPARSE, greedy, prompt, tiny_llama
from transformers import LlamaForCausalLM

from hf_sparse_prr import kernel_loader, patch_model

pytestmark = pytest.mark.compat
IDS = prompt(100)
COPY = pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)


def is_sparse(model):
    return type(model.model.layers[0].self_attn).__name__ == "SparseLlamaAttention"


@COPY
def test_a_copy_is_patched_with_a_handle_of_its_own(duplicate, outputs):
    model = tiny_llama()
    handle = patch_model(model, **SPARSE)
    greedy(model, IDS)
    twin = duplicate(model)
    assert twin.sparse_prr is not handle
    assert twin.sparse_prr.model is twin
    assert twin.sparse_prr.config == handle.config
    assert is_sparse(twin)
    assert twin.sparse_prr.stats()["steps"] == 0 < handle.stats()["steps"]
    done = handle.stats()
    assert torch.equal(greedy(twin, IDS), outputs.sparse)
    assert twin.sparse_prr.stats()["steps"] > 0
    assert handle.stats() == done
    twin.sparse_prr.unpatch()
    assert torch.equal(greedy(twin, IDS), outputs.stock)
    assert not is_sparse(twin)
    assert torch.equal(greedy(model, IDS), outputs.sparse)
    assert is_sparse(model)


@COPY
def test_a_copy_runs_on_its_own_weights(duplicate, outputs):
    model = tiny_llama()
    patch_model(model, **SPARSE)
    twin, other = duplicate(model), tiny_llama(seed=1)
    twin.load_state_dict(other.state_dict())
    patch_model(other, **SPARSE)
    assert torch.equal(greedy(twin, IDS), greedy(other, IDS))
    assert torch.equal(greedy(model, IDS), outputs.sparse)


@COPY
def test_a_copy_resolves_its_kernels_by_key(duplicate, monkeypatch):
    model = tiny_llama()
    patch_model(model, kernels="reference", **SPARSE)
    keys, resolve = [], kernel_loader.resolve
    monkeypatch.setattr(kernel_loader, "resolve", lambda key, strict: keys.append(key) or resolve(key))
    twin = duplicate(model)
    assert keys == ["reference"]
    assert twin.sparse_prr.kernels.source == "reference"


def test_a_saved_model_is_stock(tmp_path, outputs):
    model = tiny_llama()
    patch_model(model, **SPARSE)
    greedy(model, IDS)
    model.save_pretrained(tmp_path)
    assert "sparse" not in (tmp_path / "config.json").read_text().lower()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert not is_sparse(loaded)
    assert not hasattr(loaded, "sparse_prr")
    weights = model.state_dict()
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.state_dict().items())
    assert torch.equal(greedy(loaded, IDS), outputs.stock)
    assert is_sparse(model)
