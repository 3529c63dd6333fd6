"""Which tokens select: dense_length keeps short rows dense, sparse_prefill lets prompt tokens select as well."""

import pytest
import torch
from models import SPARSE, TOLERANCE, greedy, left_pad, prompt, tiny, tiny_llama

from hf_sparse_prr import SparseCache, patch_model

pytestmark = pytest.mark.compat
INFLLM = dict(selector="infllm_v2", budget=160, block_size=32, dense_layers=0)
BOTH = pytest.mark.parametrize("settings", [SPARSE, INFLLM], ids=["quest", "infllm_v2"])


def all_logits(model, ids, mask=None, chunks=None):
    """Of every token, the prompt in the given chunks: [B, T, V]."""
    cache, out, begin = SparseCache(model), [], 0
    for count in chunks or [ids.shape[1]]:
        end = begin + count
        given = None if mask is None else mask[:, :end]
        positions = None if mask is None else (given.cumsum(1) - 1).clamp(min=0)[:, begin:end]
        with torch.no_grad():
            step = model(ids[:, begin:end], attention_mask=given, position_ids=positions, past_key_values=cache)
        out.append(step.logits)
        begin = end
    return torch.cat(out, dim=1)


@BOTH
def test_dense_length_keeps_rows_dense_above_their_budget(settings):
    model, ids = tiny_llama(), prompt(190)
    stock = greedy(model, ids, tokens=20)
    with patch_model(model, **settings, dense_length=300) as handle:
        assert torch.equal(greedy(model, ids, tokens=20), stock)
        assert handle.stats()["selector_calls"] == 0
        assert handle.report().layers[0].settings["dense_length"] == 300
    with patch_model(model, **settings, dense_length=200, trace=True) as handle:
        greedy(model, ids, tokens=20)
        selecting = {entry.step for entry in handle.trace if int(entry.selected.max()) >= 0}
        assert selecting == set(range(9, 19))  # token 200 is decode token 9; 199 tokens are fewer than 200


def test_dense_length_counts_from_each_rows_first_token():
    model = tiny_llama()
    ids, mask = left_pad([prompt(190)[0], prompt(150, seed=1)[0]])
    with patch_model(model, **SPARSE, dense_length=180, trace=True) as handle:
        greedy(model, ids, tokens=8, attention_mask=mask)
    for entry in handle.trace:
        assert int(entry.selected[0].max()) >= 0
        assert int(entry.selected[1].max()) == -1


@BOTH
@pytest.mark.parametrize("model_type", ["llama", "glm4_moe"])
def test_a_sparse_prompt_equals_decoding_it(settings, model_type):
    """Each prompt token that outgrew its budget selects as if it were decoded."""
    model = tiny(model_type)
    ids, mask = left_pad([prompt(230)[0], prompt(200, seed=1)[0]])
    fits = settings["budget"]
    with patch_model(model, **settings):
        one_by_one = all_logits(model, ids, mask, [fits, *[1] * (230 - fits)])
    with patch_model(model, **settings, sparse_prefill=True, trace=True) as handle:
        whole = all_logits(model, ids, mask)
        assert handle.trace == [] and handle.stats()["steps"] == 0
        torch.testing.assert_close(whole[0], one_by_one[0], **TOLERANCE[torch.float32])
        torch.testing.assert_close(whole[1, 30:], one_by_one[1, 30:], **TOLERANCE[torch.float32])
        for chunks in ([230 - 17, 17], [100, 100, 30], [40] * 5 + [30]):
            again = all_logits(model, ids, mask, chunks)
            torch.testing.assert_close(again[0], whole[0], **TOLERANCE[torch.float32])
            torch.testing.assert_close(again[1, 30:], whole[1, 30:], **TOLERANCE[torch.float32])
        handle.unpatch()
    with patch_model(model, **settings):
        dense = all_logits(model, ids, mask)
    assert (whole[0, fits:] - dense[0, fits:]).abs().max() > 0.1
    assert torch.equal(whole[:, :fits], dense[:, :fits])


@BOTH
def test_generating_after_a_sparse_prompt(settings):
    """Serial and PRR agree, however the prompt was chunked, and it isn't what a dense prompt leads to."""
    model, ids, out = tiny_llama(), prompt(230, batch=2), []
    for speculate in (False, True):
        with patch_model(model, **settings, speculate=speculate, sparse_prefill=True):
            out += [greedy(model, ids), greedy(model, ids, prefill_chunk_size=50)]
    assert all(torch.equal(ids, out[0]) for ids in out)
    with patch_model(model, **settings):
        assert not torch.equal(greedy(model, ids), out[0])
