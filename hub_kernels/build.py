"""Write `build/` of a kernel repo: what is published to the Hub, one folder a variant.

    python hub_kernels/build.py hub_kernels/sparse-prr [--cuda]

Pure Python and Triton need no compiler: each backend of build.toml gets a copy of torch-ext/ with a metadata.json whose
id names the version and a digest of the sources, so that two builds never share module names. `--cuda` adds a compiled
variant for the CUDA of the running torch: it needs nvcc, a C++ compiler and Python's headers, no network.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What kernel-builder generates beside torch_binding.cpp: macros whose names it may use, over torch's and Python's.
REGISTRATION = """\
#pragma once
#include <Python.h>
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)
#define REGISTER_EXTENSION(NAME) REGISTER_EXTENSION_(NAME)
#define REGISTER_EXTENSION_(NAME)                                            \\
  PyMODINIT_FUNC PyInit_##NAME() {                                           \\
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, #NAME, nullptr, -1}; \\
    return PyModule_Create(&module);                                         \\
  }
"""
NEEDED = {"general.name": str, "general.version": int, "general.license": str, "general.backends": list}
NEEDED_BY_CUDA = {"torch.src": list, "torch.stable-abi.cuda": str, "kernel": dict}
OPS = "import torch\n\nfrom . import {id}\n\nops = torch.ops.{id}\n"


def sources_of(folder: Path) -> list[Path]:
    """The files that are published: sources and data, no metadata of another variant, no bytecode."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "metadata.json"
    )


def read_config(repo: Path, *, cuda: bool) -> dict:
    """build.toml; ValueError where it can't be read or lacks what a build takes."""
    path = repo / "build.toml"
    try:
        config = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: expected TOML, got {error}") from error
    for name, kind in (NEEDED | NEEDED_BY_CUDA if cuda else NEEDED).items():
        value: object = config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            raise ValueError(f"{path}: expected {name}, {kind.__name__}, got {value!r}")
    for name, kernel in config["kernel"].items() if cuda else ():
        if not isinstance(kernel, dict) or not {"backend", "src", "cuda-capabilities"} <= kernel.keys():
            raise ValueError(f"{path}: expected kernel.{name} with backend, src and cuda-capabilities, got {kernel!r}")
    return config


def find_nvcc() -> str:
    """ValueError where there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    asked = os.path.join(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else "nvcc"
    if found := shutil.which(asked):
        return found
    raise ValueError(f"--cuda: expected {asked}, got none; CUDA_HOME names the toolkit's folder")


def digest_of(paths: list[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def write_variant(variant: Path, package: Path, general: dict, backend: str, digest: str) -> str:
    """Copy the package, describe it and return its id."""
    for path in sources_of(package):
        target = variant / path.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    metadata = {
        "name": general["name"],
        "id": f"_{package.name}_{backend}_{general['version']}_{digest}",
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        # No "archs" where kernels are compiled: `get_kernel` would refuse the GPUs on which Triton runs instead.
        "backend": {"type": backend},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return metadata["id"]


def compile_cuda(repo: Path, config: dict, variant: Path, name: str, nvcc: str) -> None:
    """Build NAME.abi3.so, and _ops.py that loads it, with torch's stable C interface and Python's limited one."""
    from torch.utils.cpp_extension import include_paths, library_paths

    major, minor = config["torch"]["stable-abi"]["cuda"].split(".")
    kernels = [kernel for kernel in config["kernel"].values() if kernel["backend"] == "cuda"]
    sources = [path for part in (config["torch"], *kernels) for path in part["src"] if path.endswith((".cpp", ".cu"))]
    capabilities = {entry.replace(".", "") for kernel in kernels for entry in kernel["cuda-capabilities"]}
    generated = variant / "generated"
    generated.mkdir()
    (generated / "registration.h").write_text(REGISTRATION)
    command = [
        nvcc,
        *("-shared", "-std=c++17", "-O3", "--threads=0", "--cudart=shared", "-Xcompiler=-fPIC"),
        *(f"-gencode=arch=compute_{entry},code=sm_{entry}" for entry in sorted(capabilities)),
        *("-DCUDA_KERNEL", "-DUSE_CUDA", "-DPy_LIMITED_API=0x03090000", f"-DTORCH_EXTENSION_NAME={name}"),
        f"-DTORCH_TARGET_VERSION={(int(major) << 56) | (int(minor) << 48)}ULL",
        *(f"-I{path}" for path in [generated, *include_paths(), sysconfig.get_path("include")]),
        *(str(repo / path) for path in sources),
        *(f"-L{path}" for path in library_paths()),
        *("-ltorch_cpu", "-ltorch_cuda"),
        *("-o", str(variant / f"{name}.abi3.so")),
    ]
    subprocess.run(command, check=True)
    shutil.rmtree(generated)
    (variant / "_ops.py").write_text(OPS.format(id=name))


def write_variants(repo: Path, new: Path, config: dict, nvcc: str | None) -> None:
    """Every variant into the folder `new`, a compiled one with nvcc."""
    general = config["general"]
    package = repo / "torch-ext" / general["name"].replace("-", "_")
    if not package.is_dir():
        raise ValueError(f"{package}: expected the sources of {general['name']}, got no folder")
    digest = digest_of(sources_of(package), package)
    for backend in general["backends"]:
        write_variant(new / f"torch-{backend}", package, general, backend, digest)
    if nvcc:
        import torch

        native = [repo / path for part in (config["torch"], *config["kernel"].values()) for path in part["src"]]
        digest = digest_of(sources_of(package) + native, repo)
        framework = "torch-stable-abi" + config["torch"]["stable-abi"]["cuda"].replace(".", "")
        toolkit = "cu" + torch.version.cuda.replace(".", "")
        variant = new / f"{framework}-{toolkit}-{platform.machine()}-{platform.system().lower()}"
        name = write_variant(variant, package, general, "cuda", digest)
        compile_cuda(repo, config, variant, name, nvcc)


def build(repo: Path, *, cuda: bool = False) -> list[Path]:
    """Write every variant and return their folders. `build/` is replaced as a whole, or, where a build fails, kept.

    Raises:
        ValueError: build.toml isn't what a build takes, `build` isn't a folder, or there is no nvcc.
        CalledProcessError: nvcc failed, and said why.
    """
    config = read_config(repo, cuda=cuda)
    if (repo / "build").exists() and not (repo / "build").is_dir():
        raise ValueError(f"{repo / 'build'}: expected a folder or nothing, got a file")
    nvcc = find_nvcc() if cuda else None
    new = repo / "build.new"
    shutil.rmtree(new, ignore_errors=True)
    try:
        write_variants(repo, new, config, nvcc)
        shutil.rmtree(repo / "build", ignore_errors=True)
        new.rename(repo / "build")
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return sorted((repo / "build").iterdir())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write build/ of a kernel repo.")
    parser.add_argument("repo", type=Path, help="a folder with a build.toml")
    parser.add_argument("--cuda", action="store_true", help="also compile the variant of the running torch")
    arguments = parser.parse_args()
    if not (arguments.repo / "build.toml").is_file():
        parser.error(f"{arguments.repo}: expected a folder with a build.toml")
    if arguments.cuda:
        import torch

        if torch.version.cuda is None:
            parser.error(f"--cuda: expected a CUDA build of torch, got {torch.__version__}")
    try:
        folders = build(arguments.repo, cuda=arguments.cuda)
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"build.py: {error if isinstance(error, ValueError) else 'nvcc failed, see above'}")
    for folder in folders:
        print(folder)
