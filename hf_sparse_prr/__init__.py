"""Exact sparse decoding for Transformers: one line, `patch_model(model)`, before `generate()`.

Importing this package does nothing: the names below are loaded when they are first used.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import SparseCache
    from .config import SparseConfig
    from .interface import register_attention
    from .ops import gvr_topk
    from .patching import PatchHandle, patch_model, unpatch_model

__version__ = "0.1.0"

_HOME = {
    "SparseCache": "cache",
    "SparseConfig": "config",
    "register_attention": "interface",
    "gvr_topk": "ops",
    "PatchHandle": "patching",
    "patch_model": "patching",
    "unpatch_model": "patching",
}
__all__ = [
    "PatchHandle",
    "SparseCache",
    "SparseConfig",
    "gvr_topk",
    "patch_model",
    "register_attention",
    "unpatch_model",
]


if find_spec(f"{__name__}.patches") is None:
    raise ImportError(
        f"hf_sparse_prr: expected the installed package, got its sources in {__path__[0]}, which are whole only once "
        "they are installed; run in another folder, or `pip install -e .` in this one"
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
