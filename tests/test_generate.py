"""generate() on a patched Llama, mode by mode. Names follow transformers' GenerationTesterMixin."""

import copy

import pytest
import torch
from models import SPARSE, greedy, left_pad, prompt, tiny_llama
from transformers import DynamicCache

from hf_sparse_prr import SparseCache, patch_model
from hf_sparse_prr.hooks import cache_argument

pytestmark = pytest.mark.compat
SETTINGS = [dict(SPARSE), dict(SPARSE, speculate=True)]
BOTH = pytest.mark.parametrize("settings", SETTINGS, ids=["serial", "prr"])


def solo_step_by_step(model, ids, tokens, cache):
    """Greedy ids from one forward a token: what generate() has to equal."""
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits[:, -1]
        out = []
        for _ in range(tokens):
            out.append(logits.argmax(-1, keepdim=True))
            logits = model(out[-1], past_key_values=cache).logits[:, -1]
    return torch.cat(out, dim=1)


@BOTH
def test_greedy_generate(settings):
    model, ids = tiny_llama(), prompt(150)
    stock = greedy(model, ids)
    with patch_model(model, **settings) as handle:
        sparse = greedy(model, ids)
        assert torch.equal(sparse, solo_step_by_step(model, ids, 24, SparseCache(model)))
        assert not torch.equal(sparse, stock)
        assert handle.stats()["selector_calls"] == 3 * (23 + 24)
    assert torch.equal(greedy(model, ids), stock)


def test_serial_and_prr_generate_the_same_ids():
    model, ids = tiny_llama(), prompt(150, batch=3)
    out = []
    for settings in SETTINGS:
        with patch_model(model, **settings):
            out.append(greedy(model, ids, tokens=60))
    assert torch.equal(*out)


def test_budget_above_the_length_equals_stock():
    model, ids = tiny_llama(), prompt(150, batch=2)
    stock = model.generate(ids, max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True)
    with patch_model(model, budget=4096, speculate=True) as handle:
        out = model.generate(ids, max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True)
        assert handle.stats()["selector_calls"] == 0
    assert torch.equal(out.sequences, stock.sequences)
    assert all(torch.equal(a, b) for a, b in zip(out.logits, stock.logits, strict=True))


@BOTH
def test_sample_generate(settings):
    """The same seed draws the same ids, serial and speculative."""
    model, ids = tiny_llama(), prompt(150, batch=2)
    with patch_model(model, **dict(SPARSE)):
        torch.manual_seed(7)
        serial = model.generate(ids, max_new_tokens=16, do_sample=True, top_k=20, temperature=0.8)
    with patch_model(model, **settings):
        torch.manual_seed(7)
        assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=True, top_k=20, temperature=0.8), serial)


@BOTH
def test_left_padding_compatibility(settings):
    model = tiny_llama()
    rows = [prompt(length, seed=length)[0] for length in (150, 97, 20)]
    with patch_model(model, **settings):
        solo = torch.cat([greedy(model, row[None]) for row in rows])
        ids, mask = left_pad(rows, extra=5)
        assert torch.equal(greedy(model, ids, attention_mask=mask), solo)


@BOTH
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_continue_from_past_key_values(settings, name):
    """Three turns over one cache. Prompts attend densely, so a turn isn't a fresh prefill: compare with a loop."""
    model, first = tiny_llama(), prompt(150)
    turns = [prompt(9, seed=1), prompt(30, seed=2)]
    with patch_model(model, **settings):
        cache, text = SparseCache(model), first
        expected_cache = SparseCache(model)
        expected = solo_step_by_step(model, first, 12, expected_cache)
        text = model.generate(text, max_new_tokens=12, do_sample=False, **{name: cache})
        assert torch.equal(text[:, -12:], expected)
        assert cache.get_seq_length() == 150 + 11 and cache.prompt_length is None
        expected_cache.crop(-1)
        for turn in turns:
            tail = torch.cat([text[:, -1:], turn], dim=1)
            expected_cache.prompt_length = expected_cache.get_seq_length() + tail.shape[1]
            expected = solo_step_by_step(model, tail, 12, expected_cache)
            expected_cache.crop(-1)
            text = torch.cat([text, turn], dim=1)
            text = model.generate(text, max_new_tokens=12, do_sample=False, **{name: cache})
            assert torch.equal(text[:, -12:], expected)


@BOTH
def test_copied_prefix_continues_twice(settings):
    model, prefix = tiny_llama(), prompt(150)
    with patch_model(model, **settings):
        cache = SparseCache(model)
        with torch.no_grad():
            model(prefix[:, :-1], past_key_values=cache)
        for seed in (1, 2):
            ids = torch.cat([prefix, prompt(9, seed=seed)], dim=1)
            copied = copy.deepcopy(cache)
            assert torch.equal(greedy(model, ids, past_key_values=copied), greedy(model, ids))
            assert copied.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()
        assert cache.get_seq_length() == 149


@BOTH
@pytest.mark.parametrize("chunk", [1, 5, 16, 24, 99, 200])
def test_chunked_prefill(settings, chunk):
    model = tiny_llama()
    ids, mask = left_pad([prompt(150)[0], prompt(90, seed=1)[0]])
    with patch_model(model, **settings, trace=True) as handle:
        whole = greedy(model, ids, attention_mask=mask)
        trace = handle.trace
        handle.reset_stats()
        assert torch.equal(greedy(model, ids, attention_mask=mask, prefill_chunk_size=chunk), whole)
        assert len(trace) == len(handle.trace)
        assert all(torch.equal(a.selected, b.selected) for a, b in zip(trace, handle.trace, strict=True))


def repetitive_prompt():
    """A prompt whose n-grams recur, so that lookup drafts are proposed, accepted and rejected."""
    return torch.cat([prompt(40), prompt(40), prompt(40), prompt(20, seed=3), prompt(40)[:, :15]], dim=1)


@BOTH
@pytest.mark.parametrize("drafts", [1, 3, 10])
def test_prompt_lookup_decoding_matches_greedy_search(settings, drafts):
    model, ids = tiny_llama(), repetitive_prompt()
    with patch_model(model, **settings, trace=True) as handle:
        plain = greedy(model, ids, tokens=30)
        expected = {(entry.step, entry.layer): entry for entry in handle.trace}
        handle.reset_stats()
        assert torch.equal(greedy(model, ids, tokens=30, prompt_lookup_num_tokens=drafts), plain)
        seen = {(entry.step, entry.layer) for entry in handle.trace}
        assert len(seen) == len(handle.trace)  # rejected drafts left no entry
        for entry in handle.trace:
            assert torch.equal(entry.selected, expected[entry.step, entry.layer].selected)
            assert torch.equal(entry.predicted, expected[entry.step, entry.layer].predicted)


@BOTH
def test_assisted_decoding_matches_greedy_search(settings):
    model, ids = tiny_llama(), prompt(150)
    other, close = tiny_llama(seed=1, layers=1), tiny_llama()
    with patch_model(model, **settings):
        plain = greedy(model, ids, tokens=30)
        for assistant in (other, close):
            assert torch.equal(greedy(model, ids, tokens=30, assistant_model=assistant), plain)
        with patch_model(close, **settings):
            assert torch.equal(greedy(model, ids, tokens=30, assistant_model=close), plain)


@BOTH
def test_beam_search_generate(settings):
    """Beams carry their own side state: equal to a run in which it is made anew at every step."""
    model = tiny_llama()
    ids, mask = left_pad([prompt(150)[0], prompt(110, seed=1)[0]])
    beams = dict(num_beams=3, max_new_tokens=20, do_sample=False, attention_mask=mask)
    with patch_model(model, **settings):
        out = model.generate(ids, **beams)

        class Forgetful(SparseCache):
            def reorder_cache(self, beam_idx):
                super().reorder_cache(beam_idx)
                for layer in self.layers:
                    layer.forget_blocks()

        assert torch.equal(out, model.generate(ids, past_key_values=Forgetful(model), **beams))
    assert not torch.equal(out, model.generate(ids, **beams))


def test_generate_clears_prompt_length_on_an_exception():
    model, ids = tiny_llama(), prompt(100)
    with patch_model(model, **SPARSE):
        cache = SparseCache(model)

        def stop(*_):
            assert cache.prompt_length == 100
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, max_new_tokens=5, past_key_values=cache, stopping_criteria=[stop])
        assert cache.prompt_length is None


def test_max_length_cache_generates_the_same_ids():
    model, ids = tiny_llama(), prompt(150)
    with patch_model(model, **SPARSE, speculate=True):
        growing = greedy(model, ids)
        cache = SparseCache(model, max_length=180)
        assert cache.is_compileable and cache.get_max_length() == 180
        assert torch.equal(greedy(model, ids, past_key_values=cache), growing)
        assert cache.layers[0].keys.shape[2] == 180
        small = SparseCache(model, max_length=160)
        with pytest.raises(ValueError, match="at most max_length=160"):
            greedy(model, ids, past_key_values=small)


def test_an_unpatched_model_runs_stock_on_a_sparse_cache():
    model, ids = tiny_llama(), prompt(150)
    assert torch.equal(
        greedy(model, ids, past_key_values=SparseCache(model)),
        greedy(model, ids, past_key_values=DynamicCache(config=model.config)),
    )


def test_eager_attention_decodes_the_same_ids():
    model = tiny_llama()
    ids, mask = left_pad([prompt(150)[0], prompt(110, seed=1)[0]])
    with patch_model(model, **SPARSE):
        sdpa = greedy(model, ids, attention_mask=mask)
        model.set_attn_implementation("eager")
        assert torch.equal(greedy(model, ids, attention_mask=mask), sdpa)


def test_a_padded_second_turn_leaves_holes_that_are_never_selected():
    model = tiny_llama()
    with patch_model(model, **SPARSE, trace=True) as handle:
        cache = SparseCache(model)
        first = prompt(120, batch=2)
        hole, mask = left_pad([prompt(50, seed=1)[0], prompt(4, seed=2)[0]])
        full = torch.cat([torch.ones_like(first), mask], dim=1)
        ids = torch.cat([first, hole], dim=1)
        with torch.no_grad():
            model(first, past_key_values=cache)
        positions = (full.cumsum(1) - 1).clamp(min=0)[:, 120:-1]
        with torch.no_grad():
            model(hole[:, :-1], attention_mask=full[:, :-1], position_ids=positions, past_key_values=cache)
        name = cache_argument()
        model.generate(ids, attention_mask=full, max_new_tokens=20, do_sample=False, **{name: copy.deepcopy(cache)})
        assert cache.tokens.valid[1, 120:166].any().item() is False
        for entry in handle.trace:
            chosen = {block for head in entry.selected[1].tolist() for block in head if block >= 0}
            assert chosen and not chosen & {8, 9}  # columns 128-159 are holes in row 1


def test_fully_padded_row_is_finite_and_disturbs_nobody():
    model, row = tiny_llama(), prompt(120)[0]
    ids, mask = left_pad([row, row[:0]])
    with patch_model(model, **SPARSE, speculate=True):
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert all(logits.isfinite().all() for logits in out.logits)
        assert torch.equal(out.sequences[:1, 120:], greedy(model, row[None], tokens=12))
