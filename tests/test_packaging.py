"""The wheel and the editable install, each used from a folder that is not the repository; and what an import costs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("hf_sparse_prr", "patches", "hub_kernels", "pyproject.toml", "README.md", "LICENSE")
# Where each importable package has its files, as pyproject.toml maps them.
MAPPED = {
    "hf_sparse_prr": "hf_sparse_prr",
    "patches": "hf_sparse_prr/patches",
    "hub_kernels/sparse-prr/torch-ext/sparse_prr": "hf_sparse_prr/bundled",
}
IMPORTS = "import hf_sparse_prr, hf_sparse_prr.patches, hf_sparse_prr.bundled, hf_sparse_prr.selectors\n"


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command and return its stdout; a failure shows everything it printed."""
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=_without_python() | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _without_python() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a build leaves folders beside them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, checkout, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_source_under_its_import_name(checkout: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{target}/{path.relative_to(checkout / source).as_posix()}"
        for source, target in MAPPED.items()
        for kind in ("*.py", "*.json")  # profiles and launch parameters, too
        for path in (checkout / source).rglob(kind)
    }
    assert any("/profiles/" in name for name in expected)
    assert expected <= names, f"not in pyproject.toml's packages: {sorted(expected - names)}"
    assert {"hf_sparse_prr/py.typed", "hf_sparse_prr/bundled/metadata.json"} <= names
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"hf_sparse_prr"}


def test_wheel_holds_the_tiny_models_and_stays_small(checkout: Path, wheel: Path) -> None:
    folder = "hf_sparse_prr/evidence/models"
    expected = {f"{folder}/{path.relative_to(checkout / folder)}" for path in (checkout / folder).rglob("*.*")}
    assert len(expected) >= 5 * 5 and expected <= set(zipfile.ZipFile(wheel).namelist())
    assert wheel.stat().st_size < 20e6


def test_wheel_has_the_license_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "hf-sparse-prr = hf_sparse_prr.cli:main" in archive.read(entry_points).decode()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())


def test_installed_wheel_imports_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel, cwd=elsewhere)
    assert not (target / "patches").exists()
    code = IMPORTS + "print(hf_sparse_prr.__file__, hf_sparse_prr.patches.__file__, hf_sparse_prr.bundled.__file__)"
    files = run(sys.executable, "-c", code, cwd=elsewhere, PYTHONPATH=str(target)).split()
    assert all(Path(file).is_relative_to(target) for file in files), files


def test_editable_install_imports_from_another_folder(checkout: Path, tmp_path: Path) -> None:
    environment, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    python = _venv_beside_this_one(environment, tmp_path / "parent")
    options = ("--no-deps", "--no-build-isolation", "--editable")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, checkout, cwd=elsewhere)
    code = IMPORTS + "print(hf_sparse_prr.__file__, hf_sparse_prr.patches.__file__, hf_sparse_prr.bundled.__file__)"
    files = run(python, "-c", code, cwd=elsewhere).split()
    assert all(Path(file).is_relative_to(checkout) for file in files), files
    assert run(python, "-c", "import importlib.util as u; print(u.find_spec('patches'))", cwd=elsewhere) == "None\n"


def test_sources_that_are_not_installed_say_so(checkout: Path) -> None:
    command = [sys.executable, "-c", "import hf_sparse_prr"]  # the folder that it runs in comes first
    done = subprocess.run(command, cwd=checkout, env=_without_python(), capture_output=True, text=True)
    assert done.returncode != 0
    assert "expected the installed package, got its sources in" in done.stderr.splitlines()[-1]
    assert "`pip install -e .` in this one" in done.stderr.splitlines()[-1]


def _venv_beside_this_one(folder: Path, links: Path) -> Path:
    """Make a venv that sees this one's packages, except hf_sparse_prr: its installed wheel would be found first."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    links.mkdir()
    for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(path).iterdir():
            if not entry.name.startswith("hf_sparse_prr") and entry.suffix != ".pth" and "editable" not in entry.name:
                (links / entry.name).symlink_to(entry)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", code, cwd=folder).strip())
    (site / "parent.pth").write_text(f"{links}\n")
    return python


QUIET_IMPORT = """
import socket, sys, time
import torch, transformers

class Refused(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("opened a socket")

socket.socket = Refused
before, start = set(sys.modules), time.perf_counter()
import hf_sparse_prr
seconds = time.perf_counter() - start
{names}
new = set(sys.modules) - before
assert not torch.cuda.is_initialized(), "initialised CUDA"
assert not [name for name in new if name.split(".")[0] == "triton"], "imported triton"
assert not [name for name in new if ".modeling_" in name and name.startswith("transformers.models.")], "a modeling file"
print(seconds)
"""


@pytest.mark.parametrize("names", ["", "from hf_sparse_prr import *"], ids=["package", "every public name"])
def test_import_is_quick_and_touches_nothing(names: str, tmp_path: Path) -> None:
    seconds = float(run(sys.executable, "-c", QUIET_IMPORT.format(names=names), cwd=tmp_path))
    assert seconds < 2.0
