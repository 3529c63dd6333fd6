"""Trained weights: SmolLM2-135M finds a passkey in a long text, sparse as well as dense, and PRR changes no token."""

import copy

import pytest
import torch

from hf_sparse_prr import SparseCache, patch_model
from hf_sparse_prr.demo.passkey import PASSKEY, passkey_prompt
from hf_sparse_prr.hooks import cache_argument

pytestmark = pytest.mark.xdist_group("smollm2")  # one copy of the weights
BUDGET = 1024
SMALL_SHARE = dict(budget=BUDGET, selector="infllm_v2", block_size=32, speculate=False)  # docs/quality.md


def prefill(model, ids):
    """All but the last token, by the stock model; a copy serves each setting."""
    cache = SparseCache(model.config)
    with torch.inference_mode():
        for chunk in ids[:, :-1].split(512, dim=1):
            model(chunk, **{cache_argument(): cache}, logits_to_keep=1)
    return cache


def answer(model, ids, cache, tokens, **settings):
    """(new ids, statistics) of greedy decoding with these settings."""
    with patch_model(model, **settings) as handle:
        given = {cache_argument(): copy.deepcopy(cache)}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **given)
        return out[0, ids.shape[1] :].tolist(), handle.stats()


@pytest.mark.parametrize("depth", [0.25, 0.75])
@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 7168])
def test_the_passkey_is_found(smollm2, tokens, depth):
    model, tokenizer = smollm2
    ids = passkey_prompt(tokenizer, tokens, depth)
    assert ids.shape[1] == tokens
    cache = prefill(model, ids)
    dense, _ = answer(model, ids, cache, 7, budget=None)
    assert PASSKEY in tokenizer.decode(dense)
    serial, stats = answer(model, ids, cache, 7, budget=BUDGET, speculate=False)
    assert PASSKEY in tokenizer.decode(serial)
    assert stats["selector_calls"] == 28 * 6  # the last prompt token attends densely
    parallel, stats = answer(model, ids, cache, 7, budget=BUDGET, speculate=True)
    assert parallel == serial
    assert stats["hit_rate"] > 0.5
    assert PASSKEY in tokenizer.decode(answer(model, ids, cache, 7, **SMALL_SHARE)[0])


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 7168])
def test_sparse_finds_what_dense_finds(smollm2, tokens, depth):
    """As a user asks: generate() reads the prompt, and what comes after it is sparse."""
    model, tokenizer = smollm2
    ids = passkey_prompt(tokenizer, tokens, depth)
    cache = prefill(model, ids)
    found = {}
    for name, settings in {"dense": dict(budget=None), "quest": dict(budget=BUDGET), "infllm_v2": SMALL_SHARE}.items():
        speculate = [False] if name == "dense" else [False, True]
        serial, *parallel = (answer(model, ids, cache, 7, **{**settings, "speculate": on})[0] for on in speculate)
        assert all(ids == serial for ids in parallel)
        found[name] = PASSKEY in tokenizer.decode(serial)
    assert found["infllm_v2"] >= found["dense"]
    if (tokens, depth) != (7168, 0.0):  # there Quest in blocks of 32 loses some keys, this one too: docs/results.md
        assert found["quest"] >= found["dense"]


def test_a_key_at_the_beginning_of_7k_tokens_is_found_with_what_is_advised_for_a_small_share(smollm2):
    """Quest in its blocks of 32 loses half of such keys."""
    model, tokenizer = smollm2
    ids = passkey_prompt(tokenizer, 7168, 0.0, "43793")
    cache = prefill(model, ids)
    assert "43793" in tokenizer.decode(answer(model, ids, cache, 7, budget=None)[0])
    found, stats = answer(model, ids, cache, 7, **SMALL_SHARE)
    assert "43793" in tokenizer.decode(found)
    assert stats["selector_calls"] == 28 * 6


def test_serial_and_prr_agree_for_200_tokens(smollm2):
    model, tokenizer = smollm2
    ids = passkey_prompt(tokenizer, 2048, 0.5)[:, :-4]  # without the question: the text goes on
    cache = prefill(model, ids)
    serial, _ = answer(model, ids, cache, 200, budget=BUDGET, speculate=False)
    parallel, stats = answer(model, ids, cache, 200, budget=BUDGET, speculate=True)
    assert len(serial) == 200
    assert parallel == serial
    assert stats["repaired_blocks"] > 0
