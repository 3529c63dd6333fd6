"""Lists of blocks, and the hint that RoPE alone gives."""

import math

import pytest
import torch
from models import SPARSE, greedy, left_pad, prompt, tiny_llama

from hf_sparse_prr import patch_model
from hf_sparse_prr.blocks import rope_blocks

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("start", [0, 13])
def test_rope_blocks_are_the_best_of_a_plain_sum_of_cosines(start):
    frequencies = [1e4 ** (-2 * i / 16) for i in range(8)]
    column, size = 500, 16
    scores = {}
    for block in range(1, 25):
        distance = column - (start + block * size + (size - 1) / 2)
        scores[block] = sum(math.cos(distance * frequency) for frequency in frequencies)
    expected = set(sorted(scores, key=lambda block: -scores[block])[:6])
    found = rope_blocks(torch.tensor(frequencies), torch.tensor([start]), column, size, 1, torch.tensor([25]), 6)
    assert set(found[0, 0].tolist()) == expected


def test_rope_blocks_of_a_short_row_are_unused():
    found = rope_blocks(torch.ones(4), torch.tensor([0, 0]), 500, 16, 1, torch.tensor([3, 0]), 4)
    assert sorted(found[0, 0].tolist()) == [-1, -1, 1, 2]
    assert found[1, 0].tolist() == [-1] * 4


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize("rope", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("speculate", [False, True])
def test_no_hint_changes_what_is_generated(rope, speculate, monkeypatch):
    """All kinds of hints reach the top-k (a small buffer makes it search), and none changes a token."""
    model = tiny_llama(**({} if rope is None else {"rope_parameters": rope}))
    ids, mask = left_pad([prompt(400)[0], prompt(130, seed=1)[0]])
    out, seen = {}, {}
    for hint in ("none", "previous", "predicted", "rope"):
        with patch_model(model, **SPARSE, hint=hint, speculate=speculate) as handle:
            module, hints = handle.kernels.module, []
            original = module.select_blocks

            def spy(scores, forced, k, *, hint=None, original=original, hints=hints, **kwargs):
                hints.append(hint)
                return original(scores, forced, k, hint=hint, **kwargs)

            monkeypatch.setattr(module, "select_blocks", spy)
            topk = original.__wrapped__.__globals__["gvr_topk"].__globals__
            monkeypatch.setitem(topk, "buffer_size", lambda k: k)
            out[hint] = greedy(model, ids, tokens=12, attention_mask=mask)
            seen[hint] = [given for given in hints if given is not None]
            monkeypatch.undo()
    assert all(torch.equal(out["none"], ids) for ids in out.values())
    assert not seen["none"]
    assert all(len(seen[hint]) >= 3 * 10 for hint in ("previous", "predicted", "rope"))
    if rope is not None:
        frequencies = model.model.rotary_emb.inv_freq
        plain = tiny_llama().model.rotary_emb.inv_freq
        assert not torch.allclose(frequencies, plain)
