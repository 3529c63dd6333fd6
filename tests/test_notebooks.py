"""Every notebook runs from top to bottom with small settings, and is stored with its outputs and without an error."""

import os
from pathlib import Path

import pytest
import torch
from texts import save_llama

nbclient = pytest.importorskip("nbclient", reason="needs the notebooks extra")
nbformat = pytest.importorskip("nbformat", reason="needs the notebooks extra")
pytest.importorskip("matplotlib", reason="needs the notebooks extra")
pytest.importorskip("ipykernel", reason="needs the notebooks extra")

FOLDER = Path(__file__).parents[1] / "notebooks"
SMALL = {
    "01_quickstart": dict(context=400, settings=dict(budget=96, block_size=16)),
    "02_long_context": dict(
        context=400,
        depths=(0.1, 0.9),
        budgets=(64, 96),
        block_sizes=(16, 32),
        traced=dict(budget=96, block_size=16),
        traced_layer=0,
        traced_tokens=4,
        asked=dict(
            models=("tiny:llama",), tasks=("recall",), lengths=(512,), budgets=("1/4",), block_sizes=(16,), episodes=1
        ),
    ),
    "03_where_the_time_goes": dict(
        context=1024,
        budget=256,
        rounds=1,
        steps=6,
        profiled=(1024, 2048),
        prompt_tokens=600,
        new_tokens=4,
        device="cpu",
    ),
    "04_own_family_or_selector": dict(length=120),
    "05_several_gpus": dict(context=300, depths=(0.2, 0.8), options=("--budget", "96", "--block-size", "16", "--cpu")),
}
LAUNCHES = "05_several_gpus"
NAMES = [
    pytest.param(name, marks=[pytest.mark.xdist_group("sharded")] if name == LAUNCHES else []) for name in SMALL
]  # one launch at a time
pytestmark = pytest.mark.skipif(torch.get_default_device().type == "cuda", reason="small settings are for a CPU")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


def parameters(notebook):
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    return cell


def drawn(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_each_notebook_is_listed_and_run_here():
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    assert names == sorted(SMALL)
    readme = (FOLDER / "README.md").read_text()
    assert all(f"]({name}.ipynb)" in readme for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_with_small_settings(name, llama):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    cell, plots = parameters(notebook), drawn(notebook)
    given = dict(SMALL[name])
    if "model_folder" in cell.source:
        given["model_folder"] = str(llama)
    for key, value in given.items():
        assert f"{key}" in cell.source, f"{key} is no parameter of {name}"
        cell.source += f"\n{key} = {value!r}"
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()  # raises where a cell does
    assert drawn(notebook) == plots > 0


@pytest.mark.parametrize("name", SMALL)
def test_it_is_stored_as_it_ran(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "stored from one run"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
