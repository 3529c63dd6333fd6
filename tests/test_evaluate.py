"""An evaluation: cells are right, PRR's are compared with serial's, and a stopped run goes on."""

import json
import math
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_sparse_prr.evidence import cells as measuring
from hf_sparse_prr.evidence.cells import Case, TaskGroup, TextGroup
from hf_sparse_prr.evidence.evaluate import Grid, differing, evaluate
from hf_sparse_prr.evidence.settings import MODES, Setting, settings_for
from hf_sparse_prr.evidence.subjects import Subject, load_subject
from hf_sparse_prr.evidence.tasks import Sentences
from hf_sparse_prr.evidence.texts import TEXTS, text_of

SMALL = Grid(
    models=("tiny:llama",), tasks=("needle_multi_query",), lengths=(768,), episodes=3, budgets=("1/4",),
    block_sizes=(16,), dense_layers=0,
)  # fmt: skip


def quiet(done, total):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def found(folder):
    return evaluate(SMALL, folder)


def test_every_setting_is_a_cell(found):
    assert [cell["mode"] for cell in found["cells"]] == ["dense", "serial", "prr"]
    for cell in found["cells"]:
        assert cell["accuracy"] == sum(cell["right"]) / 3 == 1.0
        assert [len(answer) for answer in cell["answers"]] == [8, 8, 8]  # four answers of two bytes
    assert found["cells"][2]["hit_rate"] > 0 and found["cells"][1]["budget"] == 192
    assert differing(found["cells"]) == (1, [])


def test_a_difference_in_one_answer_or_one_bit_is_seen(found):
    dense, serial, prr = found["cells"]
    other = {**prr, "answers": [prr["answers"][0], prr["answers"][1], [1] * 8]}
    assert differing([dense, serial, other]) == (1, [other])
    other = {**prr, "digest": ["0" * 64]}
    assert differing([dense, serial, other]) == (1, [other])
    assert differing([dense, prr]) == (0, [])


def test_a_whole_run_is_only_read(found, folder, monkeypatch):
    monkeypatch.setattr(TaskGroup, "run", None)
    assert evaluate(SMALL, folder)["cells"] == found["cells"]


def test_a_stopped_run_loses_one_cell(found, folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "again")
    (stopped,) = (tmp_path / "again" / "cells").glob("*serial*")
    stopped.unlink()
    run, ran = TaskGroup.run, []

    def counted(self, setting, tell):
        ran.append(setting.mode)
        return run(self, setting, tell)

    monkeypatch.setattr(TaskGroup, "run", counted)
    assert evaluate(SMALL, tmp_path / "again")["cells"] == found["cells"]
    assert ran == ["serial"]


def test_a_pair_is_of_one_environment(found, folder, tmp_path):
    """A run that goes on with other threads has other bits of the same sums: PRR is held against a twin of its own."""
    for gone, kept in (("prr", "serial"), ("serial", "prr")):
        copied = tmp_path / gone
        shutil.copytree(folder, copied)
        (path,) = (copied / "cells").glob(f"*{kept}*")
        told = json.loads(path.read_text())
        path.write_text(json.dumps({**told, "environment": {**told["environment"], "threads": 99}, "digest": ["0"]}))
        next((copied / "cells").glob(f"*{gone}*")).unlink()
        assert evaluate(SMALL, copied)["cells"] == found["cells"]
        assert json.loads(path.read_text()) == told


def test_cells_of_other_weights_are_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "again")
    (path,) = (tmp_path / "again" / "cells").glob("*serial*")
    path.write_text(json.dumps({**json.loads(path.read_text()), "weights": "others"}))
    with pytest.raises(
        ValueError, match=r"serial.*json: expected results of the weights that were loaded, got others'"
    ):
        evaluate(SMALL, tmp_path / "again")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"serial.*json: expected a cell's results, got none; delete it"):
        evaluate(SMALL, tmp_path / "again")


def test_with_forced_blocks_alone_the_dense_layers_answer_or_nothing_does(tmp_path):
    """Two dense layers of the tiny models look everything up themselves; with one, what is selected counts."""
    for dense_layers, expected in ((2, 1.0), (1, 0.0)):
        grid = Grid(**{**SMALL.__dict__, "dense_layers": dense_layers, "modes": MODES})
        cells = evaluate(grid, tmp_path / str(dense_layers))["cells"]
        assert [cell["label"] for cell in cells] == ["dense", "forced-16", "serial-quest-192-16", "prr-quest-192-16"]
        assert [cell["accuracy"] for cell in cells] == [1.0, expected, 1.0, 1.0]
        assert cells[1]["selector_calls"] == cells[2]["selector_calls"]


def test_a_budget_asked_for_twice_is_one_setting():
    found = settings_for(False, 4096, ["quest"], ["256", "512", "1/8"], [16], ["dense", "serial", "prr"])
    assert [setting.budget for setting in found] == [0, 256, 256, 512, 512]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(tasks=("needle_single", "passkey"), lengths=(200,), budgets=("128",)), r"length: expected at least \d+"),
        (dict(dense_layers=9), "dense_layers: expected at most 4, the model's layers, got 9"),
        (dict(selectors=("dsa",)), "selector: expected one of quest, infllm_v2, got 'dsa'"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_measured(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(TaskGroup, "run", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=message):
        evaluate(Grid(**{**SMALL.__dict__, **changes}), tmp_path)


def test_a_window_has_more_tokens_than_are_scored(reader):
    with pytest.raises(ValueError, match="text_tokens: expected at most 62 of 64, got 63"):
        TextGroup(reader, Case("text:typing", 64, None, 1), tokens=63)
    assert TextGroup(reader, Case("text:typing", 64, None, 1), tokens=62).run(Setting("dense"), quiet)["tokens"] == 62


def test_windows_begin_as_the_tokenizer_opens_a_text(reader):
    form = Sentences(reader.form.encode, [7, 8])
    group = TextGroup(Subject("opened", reader.model, form, _Letters()), Case("text:typing", 64, None, 2), tokens=8)
    text = list(text_of("typing").encode())
    assert [rows.ids.tolist() for rows in group._rows] == [[[7, 8, *text[:62]]], [[7, 8, *text[62:124]]]]


def test_the_folder_of_another_run_is_refused(found, folder):
    with pytest.raises(ValueError, match="output: expected a folder of the same run, got one with episodes 3, not 4"):
        evaluate(Grid(**{**SMALL.__dict__, "episodes": 4}), folder)


@pytest.mark.parametrize("family", ["qwen3", "glm4", "deepseek_v32", "glm_moe_dsa"])
def test_sparse_answers_as_dense_does(family, tmp_path):
    grid = Grid(models=(f"tiny:{family}",), tasks=("needle_multi_query",), lengths=(1024,), episodes=4,
                budgets=("1/4",), block_sizes=(16,))  # fmt: skip
    cells = evaluate(grid, tmp_path)["cells"]
    assert [cell["accuracy"] for cell in cells] == [1.0, 1.0, 1.0]
    assert differing(cells) == (1, [])
    assert cells[1]["selector_calls"] > 0


def test_answers_of_rows_with_other_layouts_stay_apart():
    """As a tokenizer makes them: answers of one length in bytes, of several in tokens."""
    subject = load_subject("tiny:llama")
    group = TaskGroup(subject, Case("needle_single", 512, None, 4))
    alike = TaskGroup(subject, Case("needle_single", 512, None, 4))
    alike._batches = [([index], measuring._rows(subject, [alike.episodes[index]])) for index in (2, 0, 3, 1)]
    for setting in (Setting("dense"), Setting("serial", "quest", 128, 16, 0)):
        assert group.run(setting, quiet)["answers"] == alike.run(setting, quiet)["answers"]


class _Letters:
    """Stands for a tokenizer: bytes."""


@pytest.fixture(scope="module")
def reader():
    tiny = load_subject("tiny:llama")
    return Subject("letters", tiny.model, tiny.form, _Letters())


def test_a_text_is_scored_against_dense(reader):
    group = TextGroup(reader, Case("text:typing", 512, None, 2), tokens=24)
    dense = group.run(Setting("dense"), quiet)
    assert dense["agreement"] == 1.0 and dense["kl"] == 0.0 and dense["tokens"] == 48
    ids = torch.tensor(list(text_of("typing").encode()[:1024])).view(2, 512)
    with torch.no_grad():
        logits = reader.model(ids, use_cache=False).logits[:, -25:-1]
    expected = cross_entropy(logits.flatten(0, 1), ids[:, -24:].flatten()).item()
    assert math.log(dense["perplexity"]) == pytest.approx(expected, rel=1e-4)
    sparse = group.run(Setting("serial", "quest", 128, 16, 0), quiet)
    assert sparse["kl"] > 0 and sparse["perplexity"] != dense["perplexity"]
    fitting = group.run(Setting("serial", "quest", 1024, 16, 0), quiet)
    assert fitting["kl"] == pytest.approx(0.0, abs=1e-6) and fitting["agreement"] == 1.0


def test_texts_are_for_models_with_a_tokenizer(reader):
    grid = Grid(models=("x",), tasks=(), texts=("typing",))
    assert [case.task for case in grid.cases(reader)] == ["text:typing"]
    assert not list(grid.cases(load_subject("tiny:llama")))


def test_what_is_not_there_is_refused(reader, tmp_path):
    with pytest.raises(ValueError, match=r"text: expected one of reference, .*, got 'novel'"):
        Grid(models=("x",), texts=("novel",))
    with pytest.raises(ValueError, match=r"task: expected one of needle_single, .*, got 'chess'"):
        Grid(models=("x",), tasks=("chess",))
    with pytest.raises(ValueError, match=r"length: expected at most 32768 for tiny:llama, got 65536"):
        evaluate(Grid(models=("tiny:llama",), lengths=(65536,)), tmp_path)
    with pytest.raises(ValueError, match=r"text:typing: expected at most \d+ tokens in all windows, got 4096000"):
        TextGroup(reader, Case("text:typing", 4096, None, 1000), tokens=8)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_long_and_real(name):
    text = text_of(name)
    assert len(text) > 60_000 and len(set(text.split())) > 1500
