"""Results on disk: each cell once, whole, and of one run."""

import json

import pytest

from hf_sparse_prr.evidence.store import Store, write

ABOUT = {"weights": "those"}


def cell():
    return {"digest": ["0"]}


def test_a_cell_is_measured_once(tmp_path):
    store, calls = Store(tmp_path, {"seed": 1}), []

    def measure():
        calls.append(1)
        return {"accuracy": 0.5, **cell()}

    kept = {"accuracy": 0.5, **cell(), **ABOUT}
    assert store.cell("a", measure, ABOUT) == store.cell("a", measure, ABOUT) == kept
    assert Store(tmp_path, {"seed": 1}).cell("a", measure, ABOUT) == kept and len(calls) == 1
    assert store.cell("a", measure, ABOUT, again=True) == kept and len(calls) == 2
    with pytest.raises(ValueError, match="expected results of the weights that were loaded, got others'"):
        store.cell("a", measure, {"weights": "others"})
    assert store.path("a").is_file() and not store.path("b").exists()


def test_an_interrupted_cell_leaves_the_others(tmp_path):
    store = Store(tmp_path, {"seed": 1})
    store.cell("a", cell, ABOUT)

    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.cell("b", stopped, ABOUT)
    assert sorted(path.name for path in (tmp_path / "cells").iterdir()) == ["a.json"]


def test_a_half_written_file_is_not_taken_for_a_cell(tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_sparse_prr.evidence.store.os.replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "b.json", {"accuracy": 1.0})
    assert not [*tmp_path.iterdir()]


def test_a_folder_of_another_run_is_refused(tmp_path):
    Store(tmp_path, {"episodes": 8, "seed": 1}).cell("a", cell, ABOUT)
    with pytest.raises(ValueError, match=r"output: expected a folder of the same run, got one with episodes 8, not 32"):
        Store(tmp_path, {"episodes": 32, "seed": 1})
    assert json.loads((tmp_path / "run.json").read_text()) == {"episodes": 8, "seed": 1}


def test_a_run_without_a_cell_binds_nobody(tmp_path):
    """One that was refused for its model, say."""
    Store(tmp_path, {"episodes": 8})
    Store(tmp_path, {"episodes": 32})
    assert json.loads((tmp_path / "run.json").read_text()) == {"episodes": 32}


def test_a_run_that_another_one_overtook_is_refused_at_its_first_cell(tmp_path):
    late = Store(tmp_path, {"episodes": 16})
    Store(tmp_path, {"episodes": 8}).cell("a", cell, ABOUT)
    with pytest.raises(ValueError, match=r"got one with episodes 8, not 16"):
        late.cell("b", cell, ABOUT)
    assert not late.path("b").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "expected JSON, got Expecting"), ("[]", "expected a JSON object, got list")],
)
def test_files_that_are_something_else_are_named(tmp_path, text, message):
    store = Store(tmp_path, {"seed": 1})
    store.cell("a", cell, ABOUT)
    store.path("a").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json: {message}.*; delete it"):
        store.cell("a", cell, ABOUT)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=rf"run\.json: {message}.*; delete it"):
        Store(tmp_path, {"seed": 1})
