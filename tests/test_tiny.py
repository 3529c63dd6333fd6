"""The tiny models of the package: there, small, loadable, and they answer."""

import pytest
import torch

from hf_sparse_prr.evidence.exact import episodes_of, forced_accuracy
from hf_sparse_prr.evidence.tasks import Bytes
from hf_sparse_prr.evidence.tiny import _MODELS, FAMILIES, load_tiny, trained

pytestmark = pytest.mark.compat


def test_four_families_have_weights_of_a_few_megabytes():
    assert set(trained()) == {"llama", "qwen3", "glm4", "deepseek_v32"}
    assert sum(path.stat().st_size for path in _MODELS.rglob("*")) < 15e6


@pytest.mark.parametrize("family", trained())
def test_a_model_answers(family):
    model = load_tiny(family)
    assert model.config.model_type == family and not model.training
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    episodes = episodes_of("needle_multi_key", Bytes(), 512, 4, seed=9)

    def logits(ids):
        return model(ids, use_cache=False).logits

    assert forced_accuracy(logits, episodes, torch.device("cpu"), rows=4) == 1.0


@pytest.mark.parametrize("family", ["gpt2", *(set(FAMILIES) - set(trained()))])
def test_weights_that_are_not_there_are_refused(family):
    with pytest.raises(ValueError, match=rf"family: expected one of llama, .*, got '{family}'"):
        load_tiny(family)
