"""Whether a kernel repo and its `build/` are what may be published, and publishing it.

A repo is a folder with build.toml, CARD.md, torch-ext/NAME/ and tests/; `build/` is what `kernels` loads from the Hub,
on a branch v1, v2, .. for each version, one folder a variant.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_sparse_prr.kernel_loader import OPS, VERSION, KernelError, resolve

_NATIVE = (".so", ".pyd")
_GENERATED = {"metadata.json", "_ops.py"}
_WANTED = {"name": str, "version": int, "license": str, "backends": list}  # of [general]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. problem: what is wrong, None where nothing is."""

    what: str
    problem: str | None = None


@dataclass(frozen=True)
class KernelRepo:
    """A kernel repo on disk, read."""

    folder: Path
    general: dict[str, Any]
    compiled: list[str]  # backends of kernels that need a compiler
    native: list[str]  # their sources, below the folder

    @property
    def package(self) -> Path:
        return self.folder / "torch-ext" / self.general["name"].replace("-", "_")

    @property
    def repo_id(self) -> str:
        return self.general["hub"]["repo-id"]

    @property
    def version(self) -> int:
        return self.general["version"]

    @property
    def variants(self) -> list[Path]:
        build = self.folder / "build"
        return sorted(path for path in build.iterdir() if path.is_dir()) if build.is_dir() else []

    @property
    def beside(self) -> list[str]:
        """Folders that are published beside `build/`."""
        return [name for name in ("benchmarks",) if (self.folder / name).is_dir()]


def read_repo(folder: Path) -> KernelRepo:
    """ValueError where the folder isn't a kernel repo."""
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    path = folder / "build.toml"
    try:
        config = tomllib.loads(path.read_text())
        general = config["general"]
        parts = list(config.get("kernel", {}).values())
        native = [path for part in (config.get("torch", {}), *parts) for path in part.get("src", ())]
        repo = KernelRepo(folder, general, sorted({part["backend"] for part in parts}), native)
        if odd := [
            f"{name} {general[name]!r}" for name, kind in _WANTED.items() if not isinstance(general[name], kind)
        ]:
            raise TypeError(", ".join(odd))
        if not isinstance(repo.repo_id, str):
            raise TypeError(f"hub.repo-id {repo.repo_id!r}")
    except OSError as error:
        raise ValueError(f"{folder}: expected a folder with a build.toml, got none ({error.strerror})") from error
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(
            f"{path}: expected TOML with general.name, version, license, backends and hub.repo-id, got {error!r}"
        ) from error
    if not repo.package.is_dir():
        raise ValueError(f"{folder}: expected the sources in {repo.package}, got no folder")
    if gone := [path for path in native if not (folder / path).is_file()]:
        raise ValueError(f"{folder}: expected the sources that build.toml names, got none of {', '.join(gone)}")
    return repo


def check(repo: KernelRepo, *, every: bool = False) -> Iterator[Finding]:
    """What is looked at, one by one. every: a variant of each compiled kernel must be there as well."""
    if every:
        yield Finding("committed as it is", _uncommitted(repo.folder))
    versions = {"build.toml": repo.version, "metadata.json": _version_of(repo.package), "this library": VERSION}
    differ = len(set(versions.values())) > 1
    said = ", ".join(f"{where} {version}" for where, version in versions.items())
    yield Finding("one version", f"expected one, got {said}" if differ else None)

    card = (repo.folder / "CARD.md").read_text() if (repo.folder / "CARD.md").is_file() else ""
    lacking = [name for name in OPS if not re.search(rf"`{name}\(", card)]
    yield Finding("a card that lists every op", f"CARD.md: expected {', '.join(lacking)}" if lacking else None)

    names = [variant.name for variant in repo.variants]
    absent = [f"torch-{backend}" for backend in repo.general["backends"] if f"torch-{backend}" not in names]
    if every and repo.compiled and not any(_is_compiled(variant) for variant in repo.variants):
        absent.append(f"one compiled for {', '.join(repo.compiled)}")
    found = f"build/: expected {', '.join(absent)}, got {', '.join(names) or 'nothing'}"
    yield Finding("a variant for each backend", found if absent else None)
    for variant in repo.variants:
        yield Finding(f"{variant.name}: of these sources", _differs(repo, variant))
    yield Finding("the variant that fits this machine", _runs(repo))


def _version_of(package: Path) -> object:
    """What the package's metadata.json says; what is wrong with it, as text."""
    try:
        return json.loads((package / "metadata.json").read_text())["version"]
    except (KeyError, OSError, TypeError, ValueError) as error:
        return f"({type(error).__name__}: {error})"


def _uncommitted(folder: Path) -> str | None:
    """What of a git checkout nobody else has; None where it is none, which then can't be told."""
    try:
        done = subprocess.run(["git", "-C", folder, "status", "--porcelain", "."], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    changed = [line[3:] for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return f"expected a clean checkout, got changes in {', '.join(changed[:3])}" if changed else None


def _is_compiled(variant: Path) -> bool:
    return any(path.suffix in _NATIVE for path in variant.iterdir())


def _differs(repo: KernelRepo, variant: Path) -> str | None:
    """What of a variant isn't as in the sources, or as `kernels` wants it."""
    try:
        metadata = json.loads((variant / "metadata.json").read_text())
    except (OSError, ValueError) as error:
        return f"metadata.json: expected JSON, got {error}"
    for key, wanted in (
        ("name", repo.general["name"]),
        ("version", repo.version),
        ("license", repo.general["license"]),
    ):
        if metadata.get(key) != wanted:
            return f"metadata.json: expected {key} {wanted!r}, got {metadata.get(key)!r}"
    ours, theirs = _files(repo.package), _files(variant)
    odd = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if odd:
        return f"expected the files of {repo.package.name}, got others or none of {', '.join(odd[:3])}; build it again"
    wanted = f"_{repo.version}_{_digest(repo, _is_compiled(variant))}"
    if not str(metadata.get("id")).endswith(wanted):
        return f"metadata.json: expected an id that ends with {wanted}, of these sources, got {metadata.get('id')!r}"
    return None


def _digest(repo: KernelRepo, compiled: bool) -> str:
    """Of the sources of a variant, as hub_kernels/build.py takes it: names below the root, and contents."""
    root = repo.folder if compiled else repo.package
    paths = sorted(repo.package / name for name in _files(repo.package))
    digest = hashlib.sha256()
    for path in [*paths, *(repo.folder / name for name in (repo.native if compiled else ()))]:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _files(folder: Path) -> dict[str, bytes]:
    """Of a package, without what a build adds."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    named = {path.relative_to(folder).as_posix(): path for path in paths if path.suffix not in _NATIVE}
    return {name: path.read_bytes() for name, path in named.items() if name not in _GENERATED}


def _runs(repo: KernelRepo) -> str | None:
    """What keeps the variant of this machine from being loaded and giving a right answer."""
    import torch

    try:
        module = resolve(repo.folder).module
    except KernelError as error:
        return str(error)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = torch.randint(-9, 9, (4, 3000), generator=torch.Generator().manual_seed(0)).float().to(device)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :64]
    if not torch.equal(module.gvr_topk(scores, 64), order.sort(dim=1).values.int()):
        return "gvr_topk: expected the indices of a stable sort, got others"
    return None


def run_tests(repo: KernelRepo) -> Finding:
    """The repo's own tests, through the built variant that fits this machine."""
    environment = {**os.environ, "HF_SPARSE_PRR_TEST_KERNELS": str(repo.folder.resolve())}
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", str(repo.folder / "tests")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing"])[-1]
    return Finding(
        "its tests, through the built copy", f"expected them to pass, got: {last}" if done.returncode else None
    )


def raise_version(repo: KernelRepo, library: Path) -> int:
    """Write the next version into build.toml, the package's metadata.json and the library's kernel_loader.py.

    Raises:
        ValueError: a file doesn't have the version once; nothing is written then.
    """
    old, new = repo.version, repo.version + 1
    places = {
        repo.folder / "build.toml": (f"\nversion = {old}\n", f"\nversion = {new}\n"),
        repo.package / "metadata.json": (f'"version": {old}', f'"version": {new}'),
        library: (f"\nVERSION = {old}\n", f"\nVERSION = {new}\n"),
    }
    texts = {path: path.read_text() for path in places if path.is_file()}
    for path, (before, _) in places.items():
        if texts.get(path, "").count(before) != 1:
            raise ValueError(
                f"{path}: expected {before.strip()!r} once, got it {texts.get(path, '').count(before)} times"
            )
    for path, (before, after) in places.items():
        path.write_text(texts[path].replace(before, after))
    return new


def upload(repo: KernelRepo) -> str:
    """Put the card, `build/` and the benchmarks on the Hub, where `kernels` looks for them: repo type "kernel", a
    branch for each version. A folder is one commit. Returns the address.

    Raises:
        ValueError: the Hub refuses, or isn't there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api, branch = HfApi(), f"v{repo.version}"
    where: dict[str, Any] = dict(repo_id=repo.repo_id, repo_type="kernel")
    said: dict[str, Any] = dict(commit_message=f"{repo.general['name']} {branch}")
    clean: dict[str, Any] = dict(ignore_patterns=["**/__pycache__/**"], delete_patterns=["*"])
    card = repo.folder / "CARD.md"
    try:
        api.create_repo(**where, exist_ok=True)
        api.create_branch(**where, branch=branch, exist_ok=True)
        for name in ("build", *repo.beside):
            folder = repo.folder / name
            api.upload_folder(**where, folder_path=folder, path_in_repo=name, revision=branch, **said, **clean)
        for revision in (branch, "main"):
            api.upload_file(**where, path_or_fileobj=card, path_in_repo="README.md", revision=revision, **said)
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"expected {repo.repo_id} to take an upload, got {type(error).__name__}: {reason}") from error
    return f"https://huggingface.co/kernels/{repo.repo_id}/tree/{branch}"
