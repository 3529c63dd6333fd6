"""What the documentation tells a user to run, runs, and shows what it says."""

import re
from pathlib import Path

import pytest
import torch
from models import greedy, prompt, tiny_llama
from transformers import AttentionInterface, AttentionMaskInterface

from hf_sparse_prr import patch_model

pytestmark = pytest.mark.compat
ROOT = Path(__file__).parents[1]


def code(name, contains):
    """The one Python block of a document that has these words."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)
    (found,) = [block for block in blocks if contains in block]
    return compile(found, name, "exec")


@pytest.fixture
def given():
    """A model and inputs that are over every budget of the recipes."""
    return {"model": tiny_llama(), "inputs": dict(input_ids=prompt(1100)), "needle": 500, "patch_model": patch_model}


def test_the_three_runs(given, capsys):
    exec(code("docs/quality.md", "answers = {}"), given)
    answers = given["answers"]
    stock = greedy(given["model"], given["inputs"]["input_ids"], tokens=64)
    assert torch.equal(answers["dense"][:, -64:], stock)
    assert torch.equal(answers["serial"], answers["prr"])
    assert not torch.equal(answers["serial"], answers["dense"])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["dense 0 []", "serial 63 []", "prr 63 []"]  # one of three layers is sparse


def test_which_heads_read_the_needle(given, capsys):
    given["settings"] = dict(budget=1024)
    exec(code("docs/quality.md", "needle // size"), given)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(re.fullmatch(r"\d 2 \[\[(True|False), (True|False)\]\]", line) for line in lines)


def test_the_registered_implementation(given):
    try:
        exec(code("README.md", "set_attn_implementation"), given)
        assert given["model"].config._attn_implementation == "hf_sparse_prr"
        assert greedy(given["model"], prompt(50), tokens=4).shape == (1, 4)
    finally:
        for registry in (AttentionInterface, AttentionMaskInterface):
            registry._global_mapping.pop("hf_sparse_prr", None)


def test_the_first_example(given):
    exec(code("README.md", "patch_model(model)  # after loading"), {**given, "inputs": dict(input_ids=prompt(20))})
    assert given["model"].sparse_prr.report().layers[2].status == "sparse"
