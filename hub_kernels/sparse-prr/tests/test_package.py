"""The repo as a package: it loads by itself, exports what it says, and imports nothing a Hub kernel may not."""

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ALLOWED = sys.stdlib_module_names | {"torch", "triton"}


def test_repo_loads_and_exports_exactly_its_all(ops):
    exported = {n for n, v in vars(ops).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert exported == set(ops.__all__)
    assert ops.__all__ == sorted(set(ops.__all__))


def test_every_export_has_a_docstring(ops):
    assert ops.__doc__
    for name in set(ops.__all__) - {"backend"}:
        assert getattr(ops, name).__doc__, name


@pytest.fixture(scope="session")
def package(ops):
    """The folder of what was loaded: `repo_path` may be a repo with its builds, and tests, which import more."""
    return Path(ops.__file__).parent


def test_repo_imports_only_the_standard_library_torch_and_itself(package):
    sources = sorted(package.rglob("*.py"))
    assert len(sources) > 1
    foreign = []
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
                "__import__",
                "import_module",
            ):
                names = [ast.unparse(node)]
            foreign += [f"{source.name}: {name}" for name in names if name.split(".")[0] not in ALLOWED]
    assert not foreign


def test_relative_imports_stay_inside_the_repo(package):
    for source in package.rglob("*.py"):
        depth = len(source.relative_to(package).parts)
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= depth, f"{source.name}: {ast.unparse(node)}"


def test_loading_again_gives_the_same_ops(ops, repo_path):
    import kernels

    again = kernels.get_local_kernel(repo_path)
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    assert again.__all__ == ops.__all__
    assert torch.equal(again.gvr_topk(scores, 2), ops.gvr_topk(scores, 2))
