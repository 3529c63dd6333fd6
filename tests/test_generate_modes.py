"""The modes of generate() beyond greedy: each equals what it should, or says why not."""

import copy

import pytest
import torch
from models import SPARSE, greedy, left_pad, prompt, tiny_llama
from transformers import CompileConfig, DynamicCache, StaticCache, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_sparse_prr import SparseCache, patch_model, patching
from hf_sparse_prr.hooks import cache_argument

pytestmark = pytest.mark.compat
PRR = dict(SPARSE, speculate=True)


@pytest.fixture
def model():
    model = tiny_llama()
    with patch_model(model, **PRR):
        yield model


def test_num_return_sequences_equals_a_batch_of_copies(model):
    ids = prompt(150)
    sampled = dict(max_new_tokens=12, do_sample=True, top_k=10)
    torch.manual_seed(3)
    several = model.generate(ids, num_return_sequences=3, **sampled)
    torch.manual_seed(3)
    assert torch.equal(several, model.generate(ids.repeat(3, 1), **sampled))
    assert len({tuple(row) for row in several.tolist()}) > 1


def test_a_prefilled_cache_is_expanded_for_return_sequences_and_beams(model):
    ids = prompt(150)
    cache = SparseCache(model)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    for settings in (dict(do_sample=True, num_return_sequences=3), dict(do_sample=False, num_beams=3)):
        own = copy.deepcopy(cache)
        torch.manual_seed(5)
        out = model.generate(ids, max_new_tokens=12, past_key_values=own, **settings)
        torch.manual_seed(5)
        assert torch.equal(out, model.generate(ids, max_new_tokens=12, **settings))
        assert own.tokens.batch == 3


def test_beam_sample_generate(model):
    ids = prompt(150, batch=2)
    beams = dict(num_beams=3, do_sample=True, top_k=20, max_new_tokens=12)
    out = []
    for speculate in (True, False):
        model.sparse_prr.unpatch()
        patch_model(model, **SPARSE, speculate=speculate)
        torch.manual_seed(11)
        out.append(model.generate(ids, **beams))
    assert torch.equal(*out)


def test_use_cache_false_is_stock(model):
    ids = prompt(100)
    sparse = greedy(model, ids, tokens=4, use_cache=False)
    model.sparse_prr.unpatch()
    assert torch.equal(sparse, greedy(model, ids, tokens=4, use_cache=False))


def test_inputs_embeds(model):
    ids = prompt(150)
    embeds = model.get_input_embeddings()(ids)
    out = model.generate(inputs_embeds=embeds, max_new_tokens=24, do_sample=False)
    assert torch.equal(out[:, -24:], greedy(model, ids))


def test_streamer_gets_every_token(model):
    class Collect(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.extend(value.flatten().tolist())

        def end(self):
            self.seen.append("end")

    ids, streamer = prompt(150), Collect()
    new = greedy(model, ids, streamer=streamer)
    assert streamer.seen == [*ids[0].tolist(), *new[0].tolist(), "end"]


def test_stopping_criteria_and_logits_processors(model):
    ids = prompt(150)
    whole = greedy(model, ids)

    def stop(input_ids, scores, **_):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 157)

    short = model.generate(ids, max_new_tokens=24, do_sample=False, stopping_criteria=StoppingCriteriaList([stop]))
    assert torch.equal(short[:, 150:], whole[:, :7])
    banned = model.generate(ids, max_new_tokens=24, do_sample=False, bad_words_ids=[[int(whole[0, 3])]])
    assert int(whole[0, 3]) not in banned[0, 150:].tolist()


@pytest.mark.parametrize("make", [DynamicCache, StaticCache], ids=["dynamic", "static"])
@pytest.mark.filterwarnings("ignore:hf_sparse_prr")
def test_a_cache_of_the_users_own_is_stock(model, make):
    ids = prompt(150)

    def cache():
        return make(config=model.config) if make is DynamicCache else make(config=model.config, max_cache_len=200)

    name = cache_argument()
    patched = greedy(model, ids, **{name: cache()})
    model.sparse_prr.unpatch()
    assert torch.equal(patched, greedy(model, ids, **{name: cache()}))


@pytest.mark.filterwarnings("ignore:hf_sparse_prr")
def test_the_static_implementation_is_stock(model):
    ids = prompt(150)
    patched = greedy(model, ids, cache_implementation="static")
    model.sparse_prr.unpatch()
    assert torch.equal(patched, greedy(model, ids, cache_implementation="static"))


def test_a_compiled_forward_over_a_static_cache_says_that_it_is_stock(model, monkeypatch):
    """On a GPU generate() compiles it by itself; its layers can't speak from there."""
    ids, compiled = prompt(150), CompileConfig(backend="eager")
    compiled._compile_all_devices = True  # a CPU's, too
    asked = dict(cache_implementation="static", compile_config=compiled)
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
    with pytest.warns(UserWarning, match="the cache is a StaticCache"):
        patched = greedy(model, ids, **asked)
    model.sparse_prr.unpatch()
    assert torch.equal(patched, greedy(model, ids, **asked))
    patch_model(model, strict=True, budget=10_000)  # nothing would be sparse
    assert torch.equal(patched, greedy(model, ids, **asked))
    model.sparse_prr.unpatch()
    patch_model(model, strict=True, **SPARSE)
    with pytest.raises(RuntimeError, match="the cache is a StaticCache"):
        greedy(model, ids, **asked)


def test_attentions_of_sparse_tokens_are_full_width_and_sum_to_one(model):
    """Weights only on what was attended to; rows that fit their budget have the stock ones."""
    model.set_attn_implementation("eager")
    ids, mask = left_pad([prompt(150)[0], prompt(60, seed=1)[0]])
    model.sparse_prr.unpatch()
    stock = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=2,
        do_sample=False,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    with patch_model(model, **PRR, trace=True) as handle:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False, output_attentions=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        plain = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(out.sequences, plain)
    torch.testing.assert_close(out.attentions[1][0][1], stock.attentions[1][0][1])
    for entry in handle.trace[: 5 * 3]:
        weights = out.attentions[entry.step + 1][entry.layer]
        assert weights.shape == (2, 4, 1, 151 + entry.step)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 1))
        for head in range(4):
            blocks = {block for block in entry.selected[0, head // 2].tolist() if block >= 0}
            seen = {column // 16 for column in weights[0, head, 0].nonzero().flatten().tolist()}
            assert seen == blocks


def test_attentions_under_sdpa_are_refused_and_nothing_is_written(model):
    cache = SparseCache(model)
    with pytest.raises(ValueError, match=r"expected the eager attention implementation, got 'sdpa'"), torch.no_grad():
        model(prompt(20), past_key_values=cache, output_attentions=True)
    assert cache.get_seq_length() == 0


def test_gradients_are_stock_without_a_sparse_cache(model):
    ids = prompt(60, batch=2)
    model.train()
    model(ids, labels=ids).loss.backward()
    patched = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.sparse_prr.unpatch()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert all(torch.equal(parameter.grad, patched[name]) for name, parameter in model.named_parameters())


def test_gradient_checkpointing_is_stock(model):
    ids = prompt(60)
    model.gradient_checkpointing_enable()
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_five_runs_do_not_grow_memory(model):
    import gc
    import weakref

    ids, alive = prompt(150), []
    original = SparseCache.__init__

    def watched(self, *args, **kwargs):
        original(self, *args, **kwargs)
        alive.append(weakref.ref(self))

    SparseCache.__init__ = watched
    try:
        counts = []
        for _ in range(5):
            greedy(model, ids)
            gc.collect()
            counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    finally:
        SparseCache.__init__ = original
    assert [ref() for ref in alive] == [None] * 5
    assert counts[4] <= counts[1]
