"""tp_plan="auto" over two processes: each has half of the KV heads and selects for them; ids are those of one."""

import pytest
import torch
from models import SPARSE, VOCABULARY, greedy, prompt, tiny
from sharded import PROMPT, shard
from transformers import AutoModelForCausalLM

from hf_sparse_prr import patch_model

pytestmark = [
    pytest.mark.compat,
    pytest.mark.xdist_group("sharded"),  # one launch at a time: two may pick one port
    pytest.mark.skipif(torch.get_default_device().type == "cuda", reason="gloo computes on a CPU; test_two_gpus.py"),
]
TYPES = ("llama", "qwen3", "glm4")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """{model type: (folder, [rank 0, rank 1])} of one launch."""
    folders = [tmp_path_factory.mktemp(model_type) for model_type in TYPES]
    for model_type, folder in zip(TYPES, folders, strict=True):
        tiny(model_type, vocab_size=VOCABULARY + 1).save_pretrained(folder)  # to be divided by two
    return dict(zip(TYPES, zip(folders, shard(*folders), strict=True), strict=True))


@pytest.mark.parametrize("model_type", TYPES)
def test_two_processes_generate_the_ids_of_one(model_type, sharded):
    folder, ranks = sharded[model_type]
    model, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), prompt(PROMPT)
    stock = greedy(model, ids).tolist()
    with patch_model(model, **SPARSE, speculate=True, trace=True) as handle:
        patched, trace = greedy(model, ids).tolist(), handle.trace
    assert patched != stock, "a test that can't tell them apart"
    for rank in ranks:
        assert rank["sharded"] and rank["stock"] == stock and rank["patched"] == patched
    for entry, first, second in zip(trace, *(rank["selected"] for rank in ranks), strict=True):
        found = torch.cat([torch.tensor(first), torch.tensor(second)], dim=1)  # KV heads in the order of the ranks
        assert torch.equal(found.int(), entry.selected)


@pytest.mark.parametrize("model_type", TYPES)
def test_what_was_saved_while_sharded_and_patched_is_the_model(model_type, sharded):
    folder, _ = sharded[model_type]
    model, saved = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, folder / "saved"))
    assert saved.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in model.state_dict().items())
    assert saved.config.to_dict() == model.config.to_dict() | {"_name_or_path": saved.config.to_dict()["_name_or_path"]}
