"""Where kernels come from: resolved once per key, never inside a step."""

import os
import sys
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

REPO_ID = "hf-sparse-prr/sparse-prr"
VERSION = 1


class Kernels(NamedTuple):
    """A loaded kernel repo. source: "bundled", "reference" or the path."""

    module: ModuleType
    source: str
    version: int
    backend: str


def _load_folder(folder: Path, source: str) -> Kernels:
    from kernels import get_local_kernel, get_loaded_kernels

    # Builds of one id share their submodules' names: those of another folder must not answer for this one's
    for loaded in get_loaded_kernels():
        name = loaded.metadata.id
        if Path(loaded.module.__file__ or "").parent != folder:
            for held in [held for held in sys.modules if held.startswith(f"{name}.")]:
                del sys.modules[held]
    module = get_local_kernel(folder)
    return Kernels(module, source, VERSION, module.backend)


@cache
def resolve(key: str | Path) -> Kernels:
    """Load the kernels that `SparseConfig.kernels` names.

    "auto" loads the copy of the kernel repo that comes with this package, through `kernels.get_local_kernel`;
    "reference" imports the references without needing `kernels`; anything else is a path to a kernel repo, its
    `build` folder or one variant.

    Raises:
        FileNotFoundError: no variant for this machine at the path.
    """
    if key == "reference":
        return Kernels(import_module("hf_sparse_prr.bundled"), "reference", VERSION, "reference")
    if key == "auto":
        with resources.as_file(resources.files("hf_sparse_prr.bundled")) as folder:
            return _load_folder(folder, "bundled")
    return _load_folder(Path(os.fspath(key)), str(key))
