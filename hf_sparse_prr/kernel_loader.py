"""Where kernels come from: resolved once per key and process, never inside a step.

The hub and the bundled copy, when they fail, are replaced by the next one, hub -> bundled -> reference, with one
message that says why and what helps; `strict` raises it instead. A path or a module of the user's own that fails always
raises.
"""

import os
import re
import sys
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

REPO_ID = "hf-sparse-prr/sparse-prr"
VERSION = 1
_BUNDLED = "the bundled copy"  # as a key: what "auto" means without LOCAL_KERNELS
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OPS = (
    "absorb_queries",
    "absorb_values",
    "append_states",
    "ascending",
    "block_partials",
    "compress_keys",
    "ema_predict",
    "ema_step",
    "ema_update",
    "forced_blocks",
    "gather_tokens",
    "grouped_linear",
    "gvr_topk",
    "index_append",
    "index_queries",
    "index_scores",
    "index_topk",
    "infllm_scores",
    "latent_append",
    "latent_attention",
    "listed_attention",
    "masked_attention",
    "merge_partials",
    "normalise",
    "quest_scores",
    "repair_merge",
    "rotate_append",
    "select_blocks",
    "slots_of",
    "tally",
    "topk_threshold",
    "update_summaries",
)


class Kernels(NamedTuple):
    """A loaded kernel repo.

    source: "bundled", "reference", "module NAME", "LOCAL_KERNELS", a path, or "hub REPO". backend: "triton", "cuda",
    "interpreter" (of Triton's kernels) or "reference". fallback: why it isn't what was asked for, or None.
    """

    module: ModuleType
    source: str
    version: int
    backend: str
    fallback: str | None = None


class KernelError(RuntimeError):
    """A kernel source failed: says the source, the reason, torch and CUDA versions, and the remedy."""


def is_repo_id(key: object) -> bool:
    """Whether a string names a Hub repo, "owner/name", and not a folder."""
    return isinstance(key, str) and _REPO.fullmatch(key) is not None and not Path(key).exists()


def _accept(module: ModuleType, source: str) -> Kernels:
    missing = [name for name in OPS if not hasattr(module, name)]
    if missing:
        raise AttributeError(f"it has no {', '.join(missing)}")
    return Kernels(module, source, VERSION, getattr(module, "backend", "reference"))


def _from_folder(folder: Path, source: str) -> Kernels:
    from kernels import get_loaded_kernels, get_local_kernel

    # Builds of one id share their submodules' names: those of another folder must not answer for this one's
    for loaded in get_loaded_kernels():
        if Path(loaded.module.__file__ or "").parent != folder:
            for held in [held for held in sys.modules if held.startswith(f"{loaded.metadata.id}.")]:
                del sys.modules[held]
    return _accept(get_local_kernel(folder), source)


def _from_hub(repo_id: str, source: str) -> Kernels:
    from kernels import get_kernel

    return _accept(get_kernel(repo_id, version=VERSION), source)


def overridden(key: str | Path | ModuleType) -> bool:
    """Whether LOCAL_KERNELS answers for what the key names."""
    repo_id = REPO_ID if key in ("auto", "hub") else key
    entries = os.environ.get("LOCAL_KERNELS", "").split(":")
    return isinstance(key, str) and any(entry.startswith(f"{repo_id}=") for entry in entries)


def _bundled() -> Kernels:
    with resources.as_file(resources.files("hf_sparse_prr.bundled")) as folder:
        return _from_folder(folder, "bundled")


def _reference() -> Kernels:
    return _accept(import_module("hf_sparse_prr.bundled.reference"), "reference")


def _load(key: str | Path | ModuleType) -> Kernels:
    if isinstance(key, ModuleType):
        return _accept(key, f"module {key.__name__}")
    if key == "reference":
        return _reference()
    if key == _BUNDLED or (key == "auto" and not overridden(key)):
        return _bundled()
    if key in ("auto", "hub") or is_repo_id(key):
        repo_id = REPO_ID if key in ("auto", "hub") else str(key)
        return _from_hub(repo_id, "LOCAL_KERNELS" if overridden(key) else f"hub {repo_id}")
    return _from_folder(Path(os.fspath(key)), str(key))


def _remedy(error: BaseException, key: str | Path | ModuleType) -> str:
    """What helps, judged by what the failure says."""
    text = f"{type(error).__name__} {error}"
    if overridden(key) or "LOCAL_KERNELS entry" in text:
        return "correct LOCAL_KERNELS, owner/name=path to a kernel repo or its build folder, or unset it"
    if "undefined symbol" in text or "ABI" in text:
        return "the extension was built for another torch (ABI mismatch): install that torch, or a build for this one"
    if isinstance(error, ModuleNotFoundError) and error.name == "kernels":
        return 'pip install "kernels>=0.17.2,<0.19"'
    if "offline mode" in text or "local cache" in text:
        return "load it once with network access, or point LOCAL_KERNELS at a copy: LOCAL_KERNELS=owner/name=path"
    if "could not verify publisher" in text:
        return "check the name and the network, or use kernels='auto'"
    if "trusted publisher" in text:
        return "read it, and if you trust it use your copy: LOCAL_KERNELS=owner/name=path"
    if "build variant" in text:
        return "use a torch and GPU that the repo has a variant for, or kernels='auto'"
    if "metadata" in text or "missing field" in text or "JSON" in text:
        return "its metadata.json is broken: get the repo again, or build it again"
    return "use kernels='auto', or look at what the repo exports" if key != "auto" else "install hf_sparse_prr again"


def _failure(key: str | Path | ModuleType, error: BaseException) -> str:
    name = REPO_ID if key == "hub" else getattr(key, "__name__", key)
    reason = " ".join(str(error).split()) or type(error).__name__
    reason = reason.partition(" Set trust_remote_code")[0]  # to run anyone's code is no remedy
    if overridden(key) or "LOCAL_KERNELS entry" in reason:
        name = f"LOCAL_KERNELS={os.environ['LOCAL_KERNELS']}"
    return (
        f"kernels from {name!s} could not be loaded: {type(error).__name__}: {reason} (torch {torch.__version__}, CUDA "
        f"{torch.version.cuda or 'none'}). Remedy: {_remedy(error, key)}"
    )


def _errors() -> tuple[type[Exception], ...]:
    """What loading a kernel is known to raise; anything else is a bug and passes through."""
    known: list[type[Exception]] = [AttributeError, ImportError, OSError, RuntimeError, SyntaxError, ValueError]
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.errors import HfHubHTTPError

        known.append(HfHubHTTPError)
    return tuple(known)


def resolve(key: str | Path | ModuleType, strict: bool = False) -> Kernels:
    """Load the kernels that `SparseConfig.kernels` names.

    Args:
        key: "auto", the copy of the kernel repo that comes with this package, or what LOCAL_KERNELS has in its place;
            "hub" or a repo id, `kernels.get_kernel` with the pinned version; "reference", the references, without
            needing `kernels`; a path to a kernel repo, its build folder or one variant; a module that the user loaded.
        strict: raise where the source fails.

    Raises:
        KernelError: the source failed, and it is strict, a path, a module or the references.
    """
    return _resolve(key, strict, os.environ.get("LOCAL_KERNELS"))


@cache
def _resolve(key: str | Path | ModuleType, strict: bool, local: str | None) -> Kernels:
    """`resolve`, under one value of LOCAL_KERNELS."""
    try:
        return _load(key)
    except _errors() as error:
        message = _failure(key, error)
        if strict or not (key in ("auto", "hub", _BUNDLED) or is_repo_id(key)):
            raise KernelError(message) from error
    if overridden(key):
        following = _resolve(_BUNDLED, False, local)  # not "auto": LOCAL_KERNELS answers for that as well
    else:
        following = _resolve("reference" if key in ("auto", _BUNDLED) else "auto", False, local)
    return following._replace(fallback=f"{message}. Running instead: {following.source}")
