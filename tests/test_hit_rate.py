"""Trained weights: how much of what InfLLM-v2 selects the EMA predicts, from the product's own statistics."""

from pydoc_data import topics

import pytest
import torch

from hf_sparse_prr import patch_model

pytestmark = pytest.mark.xdist_group("smollm2")  # one copy of the weights


def test_the_ema_predicts_infllm_v2_on_a_long_text(smollm2):
    """192 sampled tokens after 7000 of Python's language reference; 16 selectable blocks of 64 and 3 forced ones."""
    model, tokenizer = smollm2
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :7000]
    settings = dict(selector="infllm_v2", budget=1216, speculate=True, spec_ratio=1.5, ema=(0.4, 0.1, 0.25))
    with patch_model(model, **settings) as handle:
        torch.manual_seed(0)
        asked = dict(max_new_tokens=193, min_new_tokens=193, do_sample=True)
        model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        stats, layers = handle.stats(), handle.report().layers
    assert layers[2].settings["block_size"] == 64 and layers[2].settings["predicted_blocks"] == 24
    assert stats["steps"] == 192
    assert stats["hit_rate_weighted"] >= 0.97
    assert stats["hit_rate"] >= 0.93
