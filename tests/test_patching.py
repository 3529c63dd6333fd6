"""patch_model and unpatch_model: one instance, all of its layers or none, and back again as if nothing had been."""

import inspect
import types

import pytest
import torch
from models import SPARSE, VOCABULARY, greedy, prompt, tiny_llama
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaModel,
    StoppingCriteria,
    __version__,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_sparse_prr import SparseCache, SparseConfig, kernel_loader, patch_model, patching, unpatch_model

pytestmark = pytest.mark.compat
IDS = prompt(100)


def state(model):
    """Everything patching could leave behind: class and instance attributes of every module."""
    return {name: (type(module), dict(module.__dict__)) for name, module in model.named_modules()}


def assert_untouched(model, before):
    assert not hasattr(model, "sparse_prr")
    for name, (cls, attributes) in state(model).items():
        assert cls is before[name][0], name
        assert attributes.keys() == before[name][1].keys(), name
        assert all(value is before[name][1][key] for key, value in attributes.items()), name


def is_sparse(model):
    """Whether all attention layers are patched; they must agree."""
    names = {type(module).__name__ for module in model.modules() if isinstance(module, LlamaAttention)}
    assert len(names) == 1, names
    return names == {"SparseLlamaAttention"}


# One instance


def test_only_this_instance_is_patched(outputs):
    classes = (LlamaForCausalLM, LlamaModel, LlamaAttention)
    attributes = [dict(vars(cls)) for cls in classes]
    model, twin = tiny_llama(), tiny_llama()
    before = state(twin)
    handle = patch_model(model, **SPARSE)
    assert is_sparse(model)
    assert model.sparse_prr is handle
    assert torch.equal(greedy(model, IDS), outputs.sparse)
    assert_untouched(twin, before)
    assert torch.equal(greedy(twin, IDS), outputs.stock)
    assert [dict(vars(cls)) for cls in classes] == attributes


def test_weights_and_their_names_stay():
    model = tiny_llama()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    patch_model(model, **SPARSE)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


@pytest.mark.parametrize("first", ["patch", "cast"])
def test_patching_before_or_after_a_cast_is_the_same(first):
    expected = tiny_llama(dtype=torch.bfloat16)
    patch_model(expected, **SPARSE)
    model = tiny_llama()
    steps = [lambda: patch_model(model, **SPARSE), lambda: model.to(torch.bfloat16)]
    for step in steps if first == "patch" else reversed(steps):
        step()
    assert torch.equal(greedy(model, IDS), greedy(expected, IDS))


def test_tied_weights_stay_tied():
    model = tiny_llama(tie_word_embeddings=True)
    keys = list(model.state_dict())
    patch_model(model, **SPARSE)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert list(model.state_dict()) == keys
    expected = tiny_llama(tie_word_embeddings=True)
    patch_model(expected, **SPARSE)
    assert torch.equal(greedy(model, IDS), greedy(expected, IDS))


def test_a_base_model_without_generate():
    full = tiny_llama()
    model = full.model
    with patch_model(model, **SPARSE) as handle, torch.no_grad():
        cache = SparseCache(model)
        for ids in (IDS, prompt(1, seed=1)):
            model(ids, past_key_values=cache)
        assert handle.stats()["selector_calls"] == 3
        assert "generate" not in model.__dict__
    assert not is_sparse(full)


# Handles


def test_the_same_settings_give_the_same_handle():
    model = tiny_llama()
    handle = patch_model(model, **SPARSE)
    assert patch_model(model, SparseConfig(**SPARSE)) is handle
    assert patch_model(model, SparseConfig(budget=96, block_size=16), budget=80, dense_layers=0) is handle
    assert handle.config == SparseConfig(**SPARSE)


def test_other_settings_raise_and_change_nothing(outputs):
    model = tiny_llama()
    handle = patch_model(model, **SPARSE)
    with pytest.raises(ValueError, match="it is patched with, budget=80, got budget=96; unpatch first"):
        patch_model(model, **{**SPARSE, "budget": 96})
    assert model.sparse_prr is handle
    assert torch.equal(greedy(model, IDS), outputs.sparse)


def test_an_unknown_override_lists_the_fields():
    model = tiny_llama()
    before = state(model)
    with pytest.raises(TypeError, match=r"unknown setting block;.*budget.*block_size.*trace"):
        patch_model(model, block=16)
    assert_untouched(model, before)


@pytest.mark.parametrize("config", [{"budget": 80}, "quest", 80])
def test_a_config_of_another_type_says_what_is_expected(config):
    with pytest.raises((TypeError, ValueError), match="SparseConfig"):
        patch_model(tiny_llama(), config)


def test_unpatching_restores_everything_and_is_idempotent(outputs):
    model = tiny_llama()
    before = state(model)
    handle = patch_model(model, **SPARSE)
    handle.unpatch()
    assert_untouched(model, before)
    for undo in (handle.unpatch, lambda: unpatch_model(model), lambda: unpatch_model(tiny_llama())):
        undo()
    assert_untouched(model, before)
    assert torch.equal(greedy(model, IDS), outputs.stock)
    patch_model(model, **{**SPARSE, "budget": 96})
    unpatch_model(model)
    assert_untouched(model, before)


def test_an_old_handle_leaves_a_new_patch_alone(outputs):
    model = tiny_llama()
    old = patch_model(model, **{**SPARSE, "budget": 96})
    old.unpatch()
    new = patch_model(model, **SPARSE)
    old.unpatch()
    assert model.sparse_prr is new
    assert is_sparse(model)
    assert torch.equal(greedy(model, IDS), outputs.sparse)


@pytest.mark.parametrize("already", [False, True], ids=["fresh", "patched before"])
@pytest.mark.parametrize("fails", [False, True], ids=["", "exception"])
def test_the_with_that_patched_unpatches(already, fails):
    model = tiny_llama()
    if already:
        patch_model(model, **SPARSE)
    try:
        with patch_model(model, **SPARSE) as handle:
            assert handle is model.sparse_prr
            assert is_sparse(model)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert is_sparse(model) == hasattr(model, "sparse_prr") == already


def test_nested_withs_unpatch_at_the_outermost():
    model = tiny_llama()
    before = state(model)
    with patch_model(model, **SPARSE):
        with patch_model(model, **SPARSE):
            with model.sparse_prr:
                pass
            assert is_sparse(model)
        assert is_sparse(model)
    assert_untouched(model, before)


# All or none


def test_an_unknown_model_type_lists_the_known_ones():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=VOCABULARY, n_positions=32))
    with pytest.raises(ValueError, match=r"model_type: expected one of .*\bllama\b.*, got 'gpt2'"):
        patch_model(model)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("qwen3_next", "Qwen3-Next: most of its layers are linear attention"),
        ("deepseek_v2", "DeepSeek-V2: .*MLA.* without an indexer"),
        ("deepseek_v3", "DeepSeek-V3: .*MLA.* without an indexer"),
        ("glm4_moe_lite", "GLM-4-MoE-Lite: .*MLA.* without an indexer"),
        ("deepseek_v4", "DeepSeek-V4: selects tokens with an indexer of its own"),
    ],
)
def test_a_known_model_that_cannot_be_served_is_named(model_type, why):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, num_hidden_layers=1))
    with pytest.raises(ValueError, match=rf"expected one of .*qwen3_moe, got '{model_type}' \({why}"):
        patch_model(model)
    assert not any("binding" in module.__dict__ for module in model.modules())


def test_a_model_of_another_library_is_refused():
    with pytest.raises(ValueError, match="expected a transformers model, got Linear"):
        patch_model(nn.Linear(2, 2))


def with_parameters(change):
    """LlamaAttention.forward as a transformers with other parameters would have it."""
    stock = inspect.signature(LlamaAttention.forward)

    def forward(self, *args, **kwargs):
        raise AssertionError("never called")

    forward.__signature__ = stock.replace(parameters=change(list(stock.parameters.values())))
    return forward


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attention_mask", lambda known: [p.replace(name="zmask") if p.name == "attention_mask" else p for p in known]),
        ("alibi", lambda known: [*known[:-1], inspect.Parameter("alibi", inspect.Parameter.KEYWORD_ONLY), known[-1]]),
        ("position_embeddings", lambda known: [p for p in known if p.name != "position_embeddings"]),
    ],
    ids=["renamed", "added", "removed"],
)
def test_a_forward_with_other_parameters_is_refused(name, change, monkeypatch):
    model = tiny_llama()
    before = state(model)
    monkeypatch.setattr(LlamaAttention, "forward", with_parameters(change))
    with pytest.raises(ValueError, match=r"LlamaAttention\.forward") as caught:
        patch_model(model, **SPARSE)
    assert repr(name) in str(caught.value)
    assert __version__ in str(caught.value)
    assert_untouched(model, before)


def test_one_layer_with_other_parameters_refuses_them_all():
    class OtherAttention(LlamaAttention):
        forward = with_parameters(lambda known: known[:-1])

    model = tiny_llama()
    model.model.layers[2].self_attn.__class__ = OtherAttention
    before = state(model)
    with pytest.raises(ValueError, match=r"OtherAttention\.forward.*'kwargs'"):
        patch_model(model, **SPARSE)
    assert_untouched(model, before)


def test_a_subclass_of_a_known_attention_is_refused():
    class MyAttention(LlamaAttention):
        pass

    model = tiny_llama()
    model.model.layers[1].self_attn.__class__ = MyAttention
    before = state(model)
    with pytest.raises(ValueError, match="expected LlamaAttention modules, got MyAttention"):
        patch_model(model, **SPARSE)
    assert_untouched(model, before)


def test_a_layer_without_attention_is_refused():
    model = tiny_llama()
    model.model.layers[1].self_attn = nn.Identity()
    before = state(model)
    with pytest.raises(ValueError, match="expected an attention module for each of 3 layers, got 2"):
        patch_model(model, **SPARSE)
    assert_untouched(model, before)


@pytest.mark.parametrize("bound", [True, False], ids=["bound method", "function"])
def test_somebody_elses_forward_on_an_instance_is_refused(bound):
    def forward(self, *args, **kwargs):
        raise AssertionError("never called")

    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(forward, attention) if bound else forward
    before = state(model)
    with pytest.raises(ValueError, match="forward"):
        patch_model(model, **SPARSE)
    assert_untouched(model, before)


def test_settings_the_model_cannot_meet_patch_nothing(tmp_path):
    model = tiny_llama()
    before = state(model)
    with pytest.raises(ValueError, match="dense_layers"):
        patch_model(model, dense_layers=4)
    with pytest.raises(kernel_loader.KernelError):
        patch_model(model, kernels=tmp_path / "nowhere")
    assert_untouched(model, before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_half_way_leaves_the_model_stock(error, monkeypatch, outputs):
    model, real, calls = tiny_llama(), patching._set_class, []

    def set_class(module, cls):
        calls.append(module)
        if len(calls) == 2:
            raise error("half way")
        real(module, cls)

    before = state(model)
    monkeypatch.setattr(patching, "_set_class", set_class)
    with pytest.raises(error, match="half way"):
        patch_model(model, **SPARSE)
    assert_untouched(model, before)
    assert torch.equal(greedy(patch_model(model, **SPARSE).model, IDS), outputs.sparse)


# generate()


def test_generate_keeps_its_signature():
    model = tiny_llama()
    signature = inspect.signature(model.generate)
    patch_model(model, **SPARSE)
    assert inspect.signature(model.generate) == signature


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_a_cache_by_either_name(name, outputs):
    model = tiny_llama()
    patch_model(model, **SPARSE)
    cache = SparseCache(model)
    assert torch.equal(greedy(model, IDS, **{name: cache}), outputs.sparse)
    assert cache.get_seq_length() == IDS.shape[1] + 23


def test_a_generate_of_the_users_is_called_and_comes_back(outputs):
    model, calls = tiny_llama(), []
    stock = model.generate
    own = model.generate = lambda *args, **kwargs: calls.append(1) or stock(*args, **kwargs)
    with patch_model(model, **SPARSE):
        assert torch.equal(greedy(model, IDS), outputs.sparse)
    assert calls == [1]
    assert model.generate is own


@pytest.mark.parametrize("fails", [False, True])
def test_the_prompt_length_is_set_while_generating_only(fails):
    seen, model = [], tiny_llama()

    class Watch(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(cache.prompt_length)
            if fails:
                raise KeyboardInterrupt
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    patch_model(model, **SPARSE)
    cache = SparseCache(model)
    try:
        greedy(model, IDS, tokens=3, past_key_values=cache, stopping_criteria=[Watch()])
    except KeyboardInterrupt:
        assert fails
    assert set(seen) == {IDS.shape[1]}
    assert cache.prompt_length is None
