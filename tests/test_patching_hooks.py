"""Patching before and after accelerate's hooks and PEFT's wrappers, and on the meta device."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from models import SPARSE, greedy, prompt, tiny_llama

from hf_sparse_prr import SparseCache, patch_model, unpatch_model

pytestmark = pytest.mark.compat
IDS = prompt(100)
CALLS = 3 * 23  # layers x decode steps of 24 new tokens, the first of which comes from the prompt


def attention_classes(model):
    return {type(layer.self_attn).__name__ for layer in model.model.layers}


def dispatch(model, folder):
    """On the CPU, the weights of one layer on disk."""
    names = [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(3)),
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    places = {name: "disk" if name == "model.layers.1" else "cpu" for name in names}
    dispatch_model(model, device_map=places, main_device="cpu", offload_dir=folder, force_hooks=True)
    assert model.model.layers[1].self_attn.q_proj.weight.is_meta
    assert hasattr(model.model.layers[0].self_attn, "_old_forward")


def offload(model, folder):
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta


HOOKS = pytest.mark.parametrize("hook", [dispatch, offload])


ORDER = pytest.mark.parametrize("first", ["patch", "hook"])


def patched_and_hooked(hook, first, folder):
    model = tiny_llama()
    steps = [lambda: patch_model(model, **SPARSE), lambda: hook(model, folder)]
    for step in steps if first == "patch" else reversed(steps):
        step()
    return model


@HOOKS
@ORDER
def test_the_sparse_forward_runs_before_and_after_hooks(hook, first, tmp_path, outputs):
    model = patched_and_hooked(hook, first, tmp_path)
    assert torch.equal(greedy(model, IDS), outputs.sparse)
    assert model.sparse_prr.stats()["selector_calls"] == CALLS
    unpatch_model(model)
    assert torch.equal(greedy(model, IDS), outputs.stock)
    remove_hook_from_submodules(model)
    assert torch.equal(greedy(model, IDS), outputs.stock)
    assert attention_classes(model) == {"LlamaAttention"}


@HOOKS
@ORDER
def test_hooks_that_went_leave_the_model_patched(hook, first, tmp_path, outputs):
    model = patched_and_hooked(hook, first, tmp_path)
    remove_hook_from_submodules(model)
    assert torch.equal(greedy(model, IDS), outputs.sparse)
    assert model.sparse_prr.stats()["selector_calls"] == CALLS
    unpatch_model(model)
    assert torch.equal(greedy(model, IDS), outputs.stock)


@HOOKS
def test_what_hooks_left_behind_does_not_hide_a_patch(hook, tmp_path, outputs):
    model = tiny_llama()
    hook(model, tmp_path)
    remove_hook_from_submodules(model)
    with patch_model(model, **SPARSE) as handle:
        assert torch.equal(greedy(model, IDS), outputs.sparse)
        assert handle.stats()["selector_calls"] == CALLS
    assert torch.equal(greedy(model, IDS), outputs.stock)


def test_hooks_still_fire_on_patched_attention(tmp_path):
    """A hook that is lost no longer brings the inputs to the layer's device."""
    model, fired = tiny_llama(), []
    dispatch(model, tmp_path)
    patch_model(model, **SPARSE)
    for layer in model.model.layers:
        hook = layer.self_attn._hf_hook
        hook.pre_forward = lambda module, *args, _old=hook.pre_forward, **kw: (
            fired.append(1) or _old(module, *args, **kw)
        )
    greedy(model, IDS)
    assert len(fired) == 3 * 24


# PEFT


@pytest.fixture
def lora():
    """Wraps a model with LoRA weights that change its output."""
    peft = pytest.importorskip("peft")

    def wrap(model):
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config).eval()

    return wrap


def test_patching_before_and_after_peft_is_the_same(lora, outputs):
    inner = tiny_llama()
    handle = patch_model(inner, **SPARSE)
    wrapped_later = lora(inner)
    wrapped_first = lora(tiny_llama())
    assert patch_model(wrapped_first, **SPARSE) is wrapped_first.sparse_prr
    assert wrapped_later.sparse_prr is handle is patch_model(wrapped_later, **SPARSE)
    new = [
        model.generate(input_ids=IDS, max_new_tokens=24, do_sample=False) for model in (wrapped_later, wrapped_first)
    ]
    assert torch.equal(*new)
    assert not torch.equal(new[0][:, 100:], outputs.sparse), "the LoRA weights must count"
    for model in (wrapped_later, wrapped_first):
        assert model.sparse_prr.stats()["selector_calls"] == CALLS


def test_peft_unpatches_to_stock(lora):
    model = lora(tiny_llama())
    stock = model.generate(input_ids=IDS, max_new_tokens=24, do_sample=False)
    keys = list(model.state_dict())
    with patch_model(model, **SPARSE):
        assert not torch.equal(model.generate(input_ids=IDS, max_new_tokens=24, do_sample=False), stock)
        assert list(model.state_dict()) == keys
    assert torch.equal(model.generate(input_ids=IDS, max_new_tokens=24, do_sample=False), stock)
    assert not hasattr(model, "sparse_prr")


def test_lora_merged_into_a_patched_model_stays_patched(lora):
    model = lora(tiny_llama())
    handle = patch_model(model, **SPARSE)
    expected = model.generate(input_ids=IDS, max_new_tokens=24, do_sample=False)
    merged = model.merge_and_unload()
    assert merged.sparse_prr is handle
    assert torch.equal(merged.generate(IDS, max_new_tokens=24, do_sample=False), expected)


# Meta


def test_weights_may_come_after_patching(outputs):
    weights, inverse = tiny_llama().state_dict(), tiny_llama().model.rotary_emb.inv_freq
    model = tiny_llama().to("meta")
    patch_model(model, **SPARSE)
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb.inv_freq = inverse
    assert torch.equal(greedy(model, IDS), outputs.sparse)


@pytest.mark.parametrize("warm", [False, True], ids=["empty cache", "warm cache"])
def test_a_forward_on_meta_raises_before_any_write(warm):
    model = tiny_llama()
    patch_model(model, **SPARSE)
    cache = SparseCache(model)
    with torch.no_grad():
        if warm:
            model(IDS, past_key_values=cache)
        model.to("meta")
        with pytest.raises(ValueError, match="meta"):
            model(prompt(1).to("meta"), past_key_values=cache)
    assert cache.get_seq_length() == (100 if warm else 0)
    assert [layer.length for layer in cache.layers] == [cache.get_seq_length()] * 3
