"""Every way to load a kernel repo, and each way it fails: one message, its remedy, no retry, no network offline.

What huggingface_hub reads at import (offline mode, cache folder) needs a process of its own: those tests run a script.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from importlib import resources
from pathlib import Path

import pytest
import torch
from models import SPARSE, greedy, prompt, tiny_llama

from hf_sparse_prr import SparseConfig, kernel_loader, patch_model, patching

REPO = kernel_loader.REPO_ID
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    kernel_loader._resolve.cache_clear()
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
    yield
    kernel_loader._resolve.cache_clear()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The kernel repo with its build/, made by the publishing script."""
    repo = tmp_path_factory.mktemp("kernels") / "sparse-prr"
    shutil.copytree(ROOT / "hub_kernels" / "sparse-prr", repo, ignore=shutil.ignore_patterns("build", "__pycache__"))
    runpy.run_path(str(ROOT / "hub_kernels" / "build.py"))["build"](repo)
    return repo


def hub_cache(folder: Path, built: Path) -> Path:
    """What the Hub's cache looks like after `get_kernel(REPO, version=1)` was online once."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = folder / f"kernels--{REPO.replace('/', '--')}"
    shutil.copytree(built / "build", home / "snapshots" / commit / "build")
    (home / "refs").mkdir()
    for ref in ("v1", "main"):
        (home / "refs" / ref).write_text(commit)
    return folder


def run(code: str, **environment: str) -> str:
    """Run a script in a process where every socket is refused; its last line of output."""
    prelude = """
        import socket, warnings
        def refuse(*args, **kwargs):
            print("SOCKET", flush=True)
            raise OSError("no network in this test")
        socket.socket.connect = refuse
        socket.getaddrinfo = refuse
        import torch
        from hf_sparse_prr import kernel_loader
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "LOCAL_KERNELS")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT / "tests",
        env={**kept, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


DESCRIBE = """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernels = kernel_loader.resolve({key!r})
    print(kernels.source, "|", kernels.fallback)
    print(kernels.module.gvr_topk(torch.tensor([[1.0, 3.0]]), 1).tolist())
"""


def test_the_build_has_a_variant_for_each_backend_and_ids_of_its_own(built):
    variants = sorted((built / "build").iterdir())
    assert [variant.name for variant in variants] == ["torch-cpu", "torch-cuda"]
    metadata = [json.loads((variant / "metadata.json").read_text()) for variant in variants]
    with resources.as_file(resources.files("hf_sparse_prr.bundled")) as folder:
        bundled = json.loads((folder / "metadata.json").read_text())
    assert len({entry["id"] for entry in [*metadata, bundled]}) == 3
    for entry in metadata:
        assert (entry["name"], entry["version"]) == (bundled["name"], bundled["version"])


def test_a_build_is_loaded_and_decodes_the_same_ids(built):
    ids = prompt(120)
    with patch_model(tiny_llama(), **SPARSE, speculate=True) as handle:
        expected = greedy(handle.model, ids)
    with patch_model(tiny_llama(), **SPARSE, speculate=True, kernels=built, strict=True) as handle:
        assert torch.equal(greedy(handle.model, ids), expected)
        assert handle.report().kernels["source"] == str(built)


def test_a_module_the_user_loaded(built):
    import copy
    import pickle

    from kernels import get_local_kernel

    module = get_local_kernel(built)
    model = tiny_llama()
    handle = patch_model(model, **SPARSE, kernels=module)
    assert handle.kernels.module is module
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.sparse_prr.kernels.module is module
        assert twin.sparse_prr.config == handle.config
    with pytest.raises(kernel_loader.KernelError, match=r"module 'json'|has no absorb_queries"):
        patch_model(tiny_llama(), **SPARSE, kernels=json)


def test_a_broken_local_kernels_is_named_and_the_bundled_copy_follows(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={tmp_path / 'nowhere'}")
    for key in ("auto", "hub", REPO):
        loaded = kernel_loader.resolve(key)
        assert loaded.source == "bundled"
        said = (
            rf"kernels from LOCAL_KERNELS={REPO}=.*nowhere could not .*Remedy: correct LOCAL_KERNELS, owner/name=path"
        )
        assert re.search(said, loaded.fallback)
        with pytest.raises(kernel_loader.KernelError, match=said):
            kernel_loader.resolve(key, strict=True)
    monkeypatch.delenv("LOCAL_KERNELS")
    assert kernel_loader.resolve("auto").fallback is None  # what was resolved under one value isn't kept for another


def test_a_malformed_local_kernels_is_named(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", "nonsense")
    said = "kernels from LOCAL_KERNELS=nonsense could not be loaded: ValueError: .*Remedy: correct LOCAL_KERNELS"
    with pytest.raises(kernel_loader.KernelError, match=said):
        kernel_loader.resolve("auto", strict=True)


def test_an_untrusted_publisher_is_not_to_be_trusted_by_advice(monkeypatch):
    def untrusted(repo_id, source):
        raise ValueError(
            f"Kernel repository '{repo_id}' is not from a trusted publisher. Set trust_remote_code=True or"
        )

    monkeypatch.setattr(kernel_loader, "_from_hub", untrusted)
    with pytest.raises(kernel_loader.KernelError, match="Remedy: read it, and if you trust it use your copy") as error:
        kernel_loader.resolve("a/b", strict=True)
    assert "trust_remote_code" not in str(error.value)


def test_local_kernels_takes_the_place_of_the_bundled_copy(built):
    for key in ("auto", "hub", REPO):
        out = run(DESCRIBE.format(key=key), LOCAL_KERNELS=f"{REPO}={built}")
        assert out.splitlines() == ["LOCAL_KERNELS | None", "[[1]]"]


def test_an_offline_hub_cache(built, tmp_path):
    for key in ("hub", REPO):
        cache = hub_cache(tmp_path / key.replace("/", "-"), built)
        out = run(DESCRIBE.format(key=key), HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(cache))
        assert out.splitlines() == [f"hub {REPO} | None", "[[1]]"]


@pytest.mark.parametrize("offline", ["1", "0"])
def test_not_cached_falls_back_to_the_bundled_copy_and_says_so(offline, tmp_path):
    out = run(DESCRIBE.format(key="hub"), HF_HUB_OFFLINE=offline, HF_HUB_CACHE=str(tmp_path))
    assert ("SOCKET" in out) == (offline == "0")  # offline is never tried
    said = out.splitlines()[-2]
    assert said.startswith(f"bundled | kernels from {REPO} could not be loaded: ValueError")
    assert f"torch {torch.__version__}, CUDA" in said
    assert said.endswith("Running instead: bundled")
    assert ("LOCAL_KERNELS=owner/name=path" if offline == "1" else "check the name and the network") in said
    assert "trust_remote_code" not in said


def test_a_failure_is_tried_once_per_process_and_not_per_layer_or_step(tmp_path):
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tests" / "helpers")!r})
        import kernels
        from models import SPARSE, greedy, prompt, tiny_llama
        from hf_sparse_prr import patch_model
        tries, original = [], kernels.get_kernel
        kernels.get_kernel = lambda *args, **kwargs: tries.append(args) or original(*args, **kwargs)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                with patch_model(tiny_llama(), **SPARSE, kernels="hub") as handle:
                    greedy(handle.model, prompt(120))
                    told = handle.report().warnings
        said = [warning for warning in said if "hf_sparse_prr" in str(warning.message)]
        print(len(tries), len(said), len(told))
    """
    assert run(code, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path)).split()[-3:] == ["1", "1", "1"]


def test_strict_raises_instead(tmp_path):
    code = """
        try:
            kernel_loader.resolve("hub", True)
        except kernel_loader.KernelError as error:
            print(error)
    """
    out = run(code, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    assert "not available in the local cache" in out
    assert "Remedy" in out


def broken(built: Path, folder: Path, change) -> Path:
    repo = shutil.copytree(built, folder / "repo")
    change(repo / "build")
    return repo


def no_variant(build: Path) -> None:
    shutil.rmtree(build)
    (build / "torch-rocm").mkdir(parents=True)


def bad_metadata(build: Path) -> None:
    for variant in build.iterdir():
        (variant / "metadata.json").write_text('{"name": "sparse-prr"')


def other_abi(build: Path) -> None:
    for variant in build.iterdir():
        (variant / "__init__.py").write_text("raise ImportError('x.abi3.so: undefined symbol: _ZN3c105ErrorC2E')")


def no_ops(build: Path) -> None:
    for variant in build.iterdir():
        (variant / "__init__.py").write_text("def gvr_topk(): ...")


FAILURES = [
    (no_variant, "build variant", "use a torch and GPU that the repo has a variant for"),
    (bad_metadata, "metadata|JSON|EOF", "metadata.json is broken"),
    (other_abi, "undefined symbol", "ABI mismatch"),
    (no_ops, "it has no absorb_queries", "look at what the repo exports"),
]


@pytest.mark.parametrize(("change", "reason", "remedy"), FAILURES, ids=[row[0].__name__ for row in FAILURES])
def test_a_broken_repo_says_why_and_what_helps(built, tmp_path, change, reason, remedy):
    with pytest.raises(kernel_loader.KernelError, match=f"(?s)({reason}).*Remedy: .*{remedy}"):
        kernel_loader.resolve(broken(built, tmp_path, change))


def test_without_the_kernels_library_the_references_run_and_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.warns(
        UserWarning, match=r'ModuleNotFoundError.*Remedy: pip install "kernels.*Running instead: reference'
    ):
        handle = patch_model(tiny_llama(), **SPARSE)
    assert handle.report().kernels["source"] == "reference"
    assert len(handle.report().warnings) == 1
    with pytest.raises(kernel_loader.KernelError):
        patch_model(tiny_llama(), **SPARSE, strict=True)


@pytest.mark.parametrize("kernels", ["nowhere", 5, None, "a/b/c"])
def test_what_kernels_may_be(kernels):
    with pytest.raises(ValueError, match="kernels: expected one of 'auto', 'hub', 'reference', a repo id, the path"):
        SparseConfig(kernels=kernels)
