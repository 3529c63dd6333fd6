"""What generate() compiles over a preallocated cache: one graph a run, the tokens of eager steps within rounding."""

import copy

import pytest
import torch
from models import SPARSE, TOLERANCE, left_pad, prompt, tiny, tiny_llama
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.generation import CompileConfig

from hf_sparse_prr import SparseCache, patch_model
from hf_sparse_prr.compiled import why_not

pytestmark = pytest.mark.compat


class Whole(CompileConfig):
    """As generate() is asked to compile, on every device, and without a break."""

    def __init__(self):
        super().__init__()
        self.counter, self._compile_all_devices = CompileCounterWithBackend("aot_eager"), True

    def to_dict(self):
        return dict(backend=self.counter, fullgraph=True)

    def __eq__(self, other):
        return self is other


@pytest.fixture(autouse=True)
def forget():
    """No test finds what another compiled."""
    torch._dynamo.reset()


def generated(model, ids, tokens=40, **how):
    out = model.generate(
        ids, max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True, **how
    )
    return out.sequences, torch.stack(out.logits)


def check(model, ids, settings, tokens=40, length=256, **how):
    """(handle, config) of a compiled run, whose tokens are those of an eager one."""
    with patch_model(model, **settings, cuda_graph=False):
        expected = generated(model, ids, tokens, **how)
    config = Whole()
    with patch_model(model, **settings) as handle:
        cache = SparseCache(model, max_length=length)
        found = generated(model, ids, tokens, past_key_values=cache, compile_config=config, **how)
        torch.testing.assert_close(found[1], expected[1], **TOLERANCE[model.dtype])
        assert torch.equal(found[0], expected[0])
        assert cache.get_seq_length() == found[0].shape[1] - 1 == cache.tokens.length
        assert handle.stats()["steps"] == tokens - 1 == handle.compiled
    return handle, config, cache


@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4"])
def test_one_graph_also_across_the_budget(family, selector):
    settings = dict(SPARSE, dense_layers=1)
    if selector == "infllm_v2":
        settings = dict(settings, block_size=32, budget=160, selector=selector)
    handle, config, _ = check(tiny(family), prompt(settings["budget"] - 10), settings)
    assert config.counter.frame_count == 1
    assert "39 decode steps ran as generate() compiles them" in str(handle.report())


def test_rows_of_different_lengths():
    ids, mask = left_pad([prompt(90)[0], prompt(60, seed=1)[0]], extra=3)
    _, config, _ = check(tiny_llama(), ids, SPARSE, attention_mask=mask)
    assert config.counter.frame_count == 1


def test_eager_attention_implementation():
    model = tiny_llama()
    model.set_attn_implementation("eager")
    check(model, prompt(70), dict(SPARSE, dense_layers=1))


def test_speculation_is_off_in_it_and_selections_are_counted():
    handle, _, _ = check(tiny_llama(), prompt(100), dict(SPARSE, speculate=True))
    stats = handle.stats()
    assert stats["hit_rate"] is None and stats["selector_calls"] == 3 * 39 and stats["bytes_read"] > 0


def test_a_second_cache_of_the_length_and_a_second_turn_compile_nothing():
    model, config = tiny_llama(), Whole()
    with patch_model(model, **SPARSE):
        for length in (90, 75):
            cache = SparseCache(model, max_length=256)
            first, _ = generated(model, prompt(length), past_key_values=cache, compile_config=config)
        twin = copy.deepcopy(cache)
        assert config.counter.frame_count == 1
        turn = torch.cat([first, prompt(5, seed=4)], dim=1)
        compiled = generated(model, turn, past_key_values=cache, compile_config=config)
        assert config.counter.frame_count == 1
        eager = generated(model, turn, past_key_values=twin, disable_compile=True)
        assert torch.equal(compiled[0], eager[0])
        twin.crop(-50)
        cache.crop(-50)
        compiled = generated(model, turn, past_key_values=cache, compile_config=config)
        eager = generated(model, turn, past_key_values=twin, disable_compile=True)
        assert torch.equal(compiled[0], eager[0])
        cache = SparseCache(model, max_length=300)
        generated(model, prompt(), past_key_values=cache, compile_config=config)
        assert config.counter.frame_count <= 3


def test_a_full_cache_says_so_and_stays_as_it_was():
    model = tiny_llama()
    with patch_model(model, **SPARSE):
        cache = SparseCache(model, max_length=110)
        with pytest.raises(ValueError, match="at most max_length=110 tokens, got 111"):
            generated(model, prompt(100), past_key_values=cache, compile_config=Whole())
        assert cache.get_seq_length() == 110 == cache.tokens.length


@pytest.mark.parametrize(
    ("settings", "how", "copies", "reason"),
    [
        ({}, dict(max_length=None), 1, "the cache grows"),
        ({}, {}, 2, "beams"),
        (dict(trace=True), {}, 1, "trace=True"),
        (dict(semantics="superset"), {}, 1, "superset"),
        (dict(dense_length=500), {}, 1, "dense_length"),
        (dict(budget=None), {}, 1, "no layer selects"),
        ({}, {}, 1, None),
    ],
)
def test_what_is_not_compiled(settings, how, copies, reason):
    model = tiny_llama()
    with patch_model(model, **{**SPARSE, **settings}) as handle:
        found = why_not(handle, SparseCache(model, **{"max_length": 256, **how}), copies)
        assert found is reason is None or reason in found


def test_beams_and_growing_caches_run_as_ever():
    model, config = tiny_llama(), Whole()
    with patch_model(model, **SPARSE):
        plain = generated(model, prompt(), num_beams=2)[0]
        cache = SparseCache(model, max_length=256)
        found = generated(model, prompt(), num_beams=2, past_key_values=cache, compile_config=config)[0]
        assert torch.equal(found, plain)
        generated(model, prompt(), compile_config=config)
    assert config.counter.frame_count == 0


def test_an_unpatched_model_has_its_own_call_again():
    model = tiny_llama()
    with patch_model(model, **SPARSE):
        assert "get_compiled_call" in model.__dict__
    assert "get_compiled_call" not in model.__dict__


def test_a_step_that_fails_leaves_the_cache_as_it_was(monkeypatch):
    model = tiny_llama()
    with patch_model(model, **SPARSE) as handle:
        cache = SparseCache(model, max_length=256)
        out, _ = generated(model, prompt(100), 4, past_key_values=cache, disable_compile=True)
        expected = generated(model, out, 4, past_key_values=copy.deepcopy(cache), disable_compile=True)
        monkeypatch.setattr(
            type(model), "get_compiled_call", lambda self, config: lambda **given: (_ for _ in ()).throw(MemoryError())
        )
        call = model.get_compiled_call(None)
        with pytest.raises(MemoryError):
            call(input_ids=out[:, -1:], past_key_values=cache, attention_mask=None)
        assert cache.tokens.length == cache.get_seq_length() == 103 and not cache.in_compiled
        assert torch.equal(generated(model, out, 4, past_key_values=cache, disable_compile=True)[0], expected[0])
        assert handle.compiled == 0
