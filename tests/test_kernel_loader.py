"""Where kernels come from, and that a step never looks for them."""

import json
import shutil
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
from models import SPARSE, greedy, prompt, tiny_llama

from hf_sparse_prr import kernel_loader, patch_model

OPS = [
    "block_partials",
    "ema_predict",
    "ema_update",
    "gvr_topk",
    "merge_partials",
    "normalise",
    "quest_scores",
    "repair_merge",
    "slots_of",
    "topk_threshold",
    "update_summaries",
]


@pytest.fixture(autouse=True)
def nothing_resolved_before():
    kernel_loader._resolve.cache_clear()
    yield
    kernel_loader._resolve.cache_clear()


def copy_kernels(target: Path) -> Path:
    """A copy of the bundled kernel repo, to change."""
    with resources.as_file(resources.files("hf_sparse_prr.bundled")) as folder:
        return shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))


def append(path: Path, line: str) -> None:
    path.write_text(f"{path.read_text()}\n{line}\n")


def test_auto_is_the_bundled_copy():
    kernels = kernel_loader.resolve("auto")
    assert (kernels.source, kernels.version) == ("bundled", kernel_loader.VERSION)
    if not torch.cuda.is_available():
        assert kernels.backend == "reference"


@pytest.mark.parametrize("key", ["auto", "reference"])
def test_every_op_is_there(key):
    module = kernel_loader.resolve(key).module
    assert set(OPS) <= set(module.__all__)
    assert all(callable(getattr(module, name)) for name in OPS)


def test_a_key_is_resolved_once():
    assert kernel_loader.resolve("auto") is kernel_loader.resolve("auto")


def test_the_reference_needs_no_kernels_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    kernels = kernel_loader.resolve("reference")
    assert (kernels.source, kernels.backend) == ("reference", "reference")
    assert kernels.module.gvr_topk(torch.tensor([[1.0, 3.0, 2.0]]), 2).tolist() == [[1, 2]]


def test_the_metadata_says_the_version_that_is_loaded():
    metadata = json.loads(resources.files("hf_sparse_prr.bundled").joinpath("metadata.json").read_text())
    assert (metadata["name"], metadata["version"]) == (kernel_loader.REPO_ID.split("/")[1], kernel_loader.VERSION)


@pytest.mark.parametrize("variant", [".", "build/torch-cpu"], ids=["variant", "repo"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_loaded_from_there(variant, kind, tmp_path):
    repo = tmp_path / "repo"
    append(copy_kernels(repo / variant) / "__init__.py", f"mark = {str(repo)!r}")
    kernels = kernel_loader.resolve(kind(repo))
    assert (kernels.module.mark, kernels.source) == (str(repo), str(repo))


def test_a_path_uses_its_own_files_also_after_the_bundled_copy(tmp_path):
    kernel_loader.resolve("auto")
    append(copy_kernels(tmp_path / "repo") / "reference" / "topk.py", "gvr_topk = lambda *_, **__: 'from the path'")
    own = kernel_loader.resolve(tmp_path / "repo")
    assert own.module.gvr_topk(torch.zeros(1, 1), 1) == "from the path"
    assert kernel_loader.resolve("auto").module.gvr_topk(torch.zeros(1, 1), 1).tolist() == [[0]]


@pytest.mark.parametrize("exists", [True, False], ids=["empty", "missing"])
def test_a_folder_without_kernels_is_named(exists, tmp_path):
    folder = tmp_path / "folder"
    if exists:
        folder.mkdir()
    with pytest.raises(kernel_loader.KernelError, match=str(folder)):
        kernel_loader.resolve(folder)


def test_the_reason_why_a_kernel_does_not_import_is_not_hidden(tmp_path):
    append(copy_kernels(tmp_path / "repo") / "__init__.py", "raise ImportError('undefined symbol: _ZN3c10')")
    with pytest.raises(kernel_loader.KernelError, match=r"undefined symbol: _ZN3c10.*ABI mismatch"):
        kernel_loader.resolve(tmp_path / "repo")


def test_a_patched_model_runs_on_the_kernels_it_was_given(tmp_path):
    ids = prompt(100)
    with patch_model(tiny_llama(), **SPARSE) as handle:
        expected = greedy(handle.model, ids)
    copy = copy_kernels(tmp_path / "repo")
    append(copy / "__init__.py", "calls = []\nselect = select_blocks")
    append(
        copy / "__init__.py",
        "def select_blocks(*args, **kwargs):\n    calls.append(1)\n    return select(*args, **kwargs)",
    )
    with patch_model(tiny_llama(), kernels=copy, **SPARSE) as handle:
        assert torch.equal(greedy(handle.model, ids), expected)
        assert len(handle.kernels.module.calls) == handle.stats()["selector_calls"] > 0
        assert handle.report().kernels == {"source": str(copy), "version": kernel_loader.VERSION}


def test_a_step_never_resolves(monkeypatch):
    model = tiny_llama()
    handle = patch_model(model, speculate=True, **SPARSE)

    def resolve(key, strict=False):
        raise AssertionError(f"resolve({key!r}) inside a step")

    monkeypatch.setattr(kernel_loader, "resolve", resolve)
    greedy(model, prompt(100))
    assert handle.stats()["selector_calls"] > 0
