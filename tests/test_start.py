"""First weights of the tiny models: head i of the first layer looks at the token i + 1 before."""

import sys

import pytest
import torch

from hf_sparse_prr.evidence.start import look_back
from hf_sparse_prr.evidence.tiny import FAMILIES, tiny_config, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_the_first_layer_look_back(family, monkeypatch):
    model = tiny_model(family)
    look_back(model)
    model.set_attn_implementation("eager")
    modeling = sys.modules[type(model).__module__]
    attend, weights = modeling.eager_attention_forward, []

    def keep(*args, **kwargs):
        output = attend(*args, **kwargs)
        weights.append(output[1])
        return output

    monkeypatch.setattr(modeling, "eager_attention_forward", keep)
    with torch.no_grad():
        model(torch.randint(1, 256, (1, 200), generator=torch.Generator().manual_seed(0)), use_cache=False)
    for head, seen in enumerate(weights[0][0]):
        hits = seen.argmax(-1)[20:] == torch.arange(20, 200) - head - 1
        assert hits.float().mean() > 0.6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_is_tiny(family):
    assert tiny_model(family).num_parameters() < 2.5e6
    assert tiny_model(family).config.model_type == family


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match=r"family: expected one of llama, qwen3, .*, got 'gpt2'"):
        tiny_config("gpt2")
