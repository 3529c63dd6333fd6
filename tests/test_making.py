"""A made model: what is on disk is what was measured, and the card says so."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_sparse_prr.evidence.making import card, make, measure
from hf_sparse_prr.evidence.tasks import TASKS
from hf_sparse_prr.evidence.tiny import load_tiny, tiny_model, trained
from hf_sparse_prr.evidence.training import Plan

SMALL = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2)
PLAN = Plan(lengths=(48,), tokens=512, steps=2, decay=2, warm_up=2, sparse=2, sparse_lengths=(96,), workers=0)
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen3", "glm_moe_dsa"])
def test_a_folder_holds_weights_card_and_log(tmp_path, family):
    indexed = dict(index_topk=64, indexer_types=["full", "shared"]) if family == "glm_moe_dsa" else {}
    found = make(family, tmp_path, 0.02, CPU, PLAN, lambda _: None, (512,), 2, {**SMALL, **indexed})
    assert json.loads((tmp_path / "training.json").read_text()) == json.loads(json.dumps(found))
    assert set(found["accuracy"]["512"]) == set(TASKS)
    held = (tmp_path / "README.md").read_text()
    assert held == card(found) and "looking at the token i + 1" in held and "| recall | " in held
    assert ("reading what the indexer selects" in held) == (family == "glm_moe_dsa")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert measure(loaded, CPU, (512,), 2) == found["accuracy"]
    assert (tmp_path / "model.safetensors").stat().st_size < 2**20


def test_the_measure_tells_a_trained_model_from_an_untrained_one():
    good, bad = measure(load_tiny("llama"), CPU, (512,), 4), measure(tiny_model("llama"), CPU, (512,), 4)
    assert sum(good["512"].values()) >= 0.9 * len(TASKS)
    assert sum(bad["512"].values()) == 0.0


@pytest.mark.parametrize("family", trained())
def test_a_card_in_the_package_is_that_of_its_log(family):
    from hf_sparse_prr.evidence.tiny import _MODELS

    found = json.loads((_MODELS / family / "training.json").read_text())
    assert (_MODELS / family / "README.md").read_text() == card(found)
    assert found["parameters"] == load_tiny(family).num_parameters()
    assert found["log"][-1]["steps"] <= found["steps"]
