"""The tiny models of the package: there, small, loadable, and they answer."""

import json

import pytest
import torch

from hf_sparse_prr.evidence.exact import episodes_of, forced_accuracy
from hf_sparse_prr.evidence.making import card
from hf_sparse_prr.evidence.tasks import Bytes
from hf_sparse_prr.evidence.tiny import _MODELS, FAMILIES, load_tiny, trained

pytestmark = pytest.mark.compat


def test_every_family_has_weights_of_a_few_megabytes_and_a_card():
    assert set(trained()) == set(FAMILIES) == {"llama", "qwen3", "glm4", "deepseek_v32", "glm_moe_dsa"}
    for family in FAMILIES:
        assert (_MODELS / family / "model.safetensors").stat().st_size < 5e6
        card = (_MODELS / family / "README.md").read_text()
        assert all(word in card for word in ("license: apache-2.0", "**Data.**", "**Training.**", "**Accuracy**"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_card_says_what_was_measured(family):
    found = json.loads((_MODELS / family / "training.json").read_text())
    assert card(found) == (_MODELS / family / "README.md").read_text()
    assert found["episodes"] >= 64 and set(found["accuracy"]) == {"1024", "4096", "16384"}


@pytest.mark.parametrize("family", trained())
def test_a_model_answers(family):
    model = load_tiny(family)
    assert model.config.model_type == family and not model.training
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    episodes = episodes_of("needle_multi_key", Bytes(), 512, 4, seed=9)

    def logits(ids):
        return model(ids, use_cache=False).logits

    assert forced_accuracy(logits, episodes, torch.device("cpu"), rows=4) == 1.0


def test_weights_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"family: expected one of llama, .*, got 'gpt2'"):
        load_tiny("gpt2")
