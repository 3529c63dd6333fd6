"""Write `build/` of a kernel repo: what is published to the Hub, one folder a variant.

    python hub_kernels/build.py hub_kernels/sparse-prr

A pure Python and Triton repo needs no compiler: each backend of build.toml gets a copy of torch-ext/ with a
metadata.json whose id names the version and a digest of the sources, so that two builds never share module names.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def sources_of(package: Path) -> list[Path]:
    """The files that are published: sources and data, no metadata of another variant, no bytecode."""
    return sorted(
        path
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "metadata.json"
    )


def build(repo: Path) -> list[Path]:
    """Write every variant and return their folders. `build/` is replaced as a whole."""
    general = tomllib.loads((repo / "build.toml").read_text())["general"]
    package = repo / "torch-ext" / general["name"].replace("-", "_")
    sources = sources_of(package)
    digest = hashlib.sha256()
    for path in sources:
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    new = repo / "build.new"
    shutil.rmtree(new, ignore_errors=True)
    for backend in general["backends"]:
        variant = new / f"torch-{backend}"
        for path in sources:
            target = variant / path.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        metadata = {
            "name": general["name"],
            "id": f"_{package.name}_{backend}_{general['version']}_{digest.hexdigest()[:12]}",
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.rmtree(repo / "build", ignore_errors=True)
    new.rename(repo / "build")
    return sorted((repo / "build").iterdir())


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "build.toml").is_file():
        sys.exit("usage: python hub_kernels/build.py REPO, a folder with a build.toml")
    for folder in build(Path(sys.argv[1])):
        print(folder)
