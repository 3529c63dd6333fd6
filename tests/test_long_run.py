"""Trained weights over a long run: PRR generates what serial decoding generates, each token's logits with its bits.

Some 40 minutes of one core: `pytest tests/test_long_run.py -m slow`. PRR_TOKENS sets how many tokens.
"""

import copy
import hashlib
import os

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_sparse_prr import patch_model
from hf_sparse_prr.demo.passkey import passkey_prompt

pytestmark = pytest.mark.xdist_group("smollm2")  # one copy of the weights
TOKENS = int(os.environ.get("PRR_TOKENS", "10000"))
PROMPT, BUDGET = 1100, 512


class Digests(LogitsProcessor):
    """A digest of the bits of each token's logits: themselves they would be 2 GB."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(hashlib.sha256(scores.cpu().numpy().tobytes()).hexdigest())
        return scores


def generated(model, ids, tokens, speculate):
    """(new ids, digests of their logits, statistics). Sampled: greedy text of a small model soon repeats itself and
    its blocks."""
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = None  # it doesn't stop
    digests = Digests()
    with patch_model(model, budget=BUDGET, speculate=speculate) as handle:
        torch.manual_seed(0)
        given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0)
        out = model.generate(ids, do_sample=True, logits_processor=LogitsProcessorList([digests]), **given)
        return out[0, ids.shape[1] :].tolist(), digests.seen, handle.stats()


@pytest.mark.slow
def test_prr_is_serial_over_ten_thousand_tokens(smollm2):
    model, tokenizer = smollm2
    ids = passkey_prompt(tokenizer, PROMPT, 0.5)
    serial, serial_digests, _ = generated(model, ids, TOKENS, speculate=False)
    prr, prr_digests, stats = generated(model, ids, TOKENS, speculate=True)
    assert len(prr) == len(prr_digests) == TOKENS
    assert len(set(prr_digests)) > 0.9 * TOKENS  # of tokens that differ
    assert prr_digests == serial_digests
    assert prr == serial
    assert 0 < stats["hit_rate"] < 1 and stats["repaired_blocks"] > 0  # some were predicted, and some missed
