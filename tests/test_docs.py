"""What the documentation tells a user to run, runs, and shows what it says."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from models import greedy, prompt, tiny_llama
from transformers import AttentionInterface, AttentionMaskInterface

from hf_sparse_prr import bundled, patch_model

pytestmark = pytest.mark.compat
ROOT = Path(__file__).parents[1]


def blocks(name):
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def code(name, contains):
    """The one Python block of a document that has these words."""
    (found,) = [block for block in blocks(name) if contains in block]
    return compile(found, name, "exec")


def bare(op):
    """A call of an op with its parameters' names and defaults."""
    signature = inspect.signature(op)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return f"{op.__name__}{signature.replace(parameters=parameters, return_annotation=signature.empty)}"


@pytest.mark.parametrize("name", bundled.__all__)
def test_the_card_has_every_op_as_it_is_called(name):
    card, op = (ROOT / "hub_kernels/sparse-prr/CARD.md").read_text(), getattr(bundled, name)
    if isinstance(op, type):
        assert f"`{name}({', '.join(op._fields)})`" in card
    else:
        assert f"`{bare(op) if callable(op) else name}`" in card


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


@pytest.fixture
def unregistered():
    """What a test registers is taken away after it."""
    yield
    for registry in (AttentionInterface, AttentionMaskInterface):
        registry._global_mapping.pop("hf_sparse_prr", None)


def test_the_registered_implementation(given, unregistered):
    exec(code("README.md", "set_attn_implementation"), given)
    assert given["model"].config._attn_implementation == "hf_sparse_prr"
    assert greedy(given["model"], prompt(50), tokens=4).shape == (1, 4)


def test_the_readme_runs_from_top_to_bottom(unregistered):
    ids = prompt(60)
    turns = {"turn_1": dict(input_ids=ids[:, :50]), "turn_2": dict(input_ids=ids)}
    given = {"model": tiny_llama(), "inputs": turns["turn_1"]}
    given |= {name: dict(turn, max_new_tokens=4) for name, turn in turns.items()}
    for block in blocks("README.md"):
        exec(compile(block, "README.md", "exec"), given)
    assert given["cache"].get_seq_length() == 63
    assert given["model"].config._attn_implementation == "hf_sparse_prr"


def test_the_quality_recipe_runs_from_top_to_bottom_on_a_patched_model(given):
    patch_model(given["model"])
    for block in blocks("docs/quality.md"):
        exec(compile(block, "docs/quality.md", "exec"), given)
    assert torch.equal(given["answers"]["serial"], given["answers"]["prr"])


def test_the_first_example(given):
    exec(code("README.md", "patch_model(model)  # after loading"), {**given, "inputs": dict(input_ids=prompt(20))})
    assert given["model"].sparse_prr.report().layers[2].status == "sparse"
