"""What this machine can do: versions, GPUs, and which kernels would load or why not. Needs no network."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from . import kernel_loader
from .patches import FAMILIES

# Supported ranges, as in pyproject.toml: at least, below
RANGES = {
    "torch": ((2, 9), None),
    "transformers": ((5, 17), (5, 25)),
    "kernels": ((0, 17, 2), (0, 19)),
    "safetensors": ((0, 4, 3), None),
}
OPTIONAL = ("triton", "accelerate", "peft", "huggingface_hub")
ENVIRONMENT = ("LOCAL_KERNELS", "HF_HUB_OFFLINE", "KERNELS_CACHE")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"."""
    parts = text.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _package(name: str) -> dict[str, Any]:
    found = _installed(name)
    lowest, beyond = RANGES[name]
    wanted = ">=" + ".".join(map(str, lowest)) + ("" if beyond is None else ",<" + ".".join(map(str, beyond)))
    numbers = None if found is None else _numbers(found)
    supported = numbers is not None and numbers >= lowest and (beyond is None or numbers < beyond)
    return {"version": found, "wanted": wanted, "supported": supported}


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        names.append({"name": properties.name, "capability": capability, "memory": properties.total_memory})
    return names


def _source(key: str) -> dict[str, Any]:
    try:
        kernels = kernel_loader.resolve(key, True)
    except kernel_loader.KernelError as error:
        return {"asked": key, "loads": False, "source": None, "backend": None, "why_not": str(error)}
    return {"asked": key, "loads": True, "source": kernels.source, "backend": kernels.backend, "why_not": None}


def _notes(auto: dict[str, Any]) -> list[str]:
    """What is set and has no effect. auto: the source of "auto"."""
    local = os.environ.get("LOCAL_KERNELS")
    if not local or not auto["loads"] or kernel_loader.overridden("auto"):
        return []
    return [f"LOCAL_KERNELS={local} names no copy of {kernel_loader.REPO_ID}: 'auto' is the bundled one"]


def diagnose(hub: bool = False) -> dict[str, Any]:
    """Everything `hf-sparse-prr doctor` prints. `hub` also tries the Hub, or its cache if HF_HUB_OFFLINE is set.

    `problems` is empty where patch_model works as asked for with the defaults; `notes` stand in nobody's way.
    """
    packages = {name: _package(name) for name in RANGES}
    sources = [_source(key) for key in (("auto", "reference", "hub") if hub else ("auto", "reference"))]
    problems = [
        f"{name}: expected {package['wanted']}, got {package['version']}"
        for name, package in packages.items()
        if not package["supported"]
    ]
    problems += [source["why_not"] for source in sources if not source["loads"]]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "optional": {name: _installed(name) for name in OPTIONAL},
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "kernels": sources,
        "model_types": sorted(FAMILIES),
        "notes": _notes(sources[0]),
        "problems": problems,
    }
