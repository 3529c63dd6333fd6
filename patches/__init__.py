"""Attention classes of the supported families, by `config.model_type`. Imported when a model is patched."""

from importlib import import_module
from types import ModuleType

FAMILIES = {"llama": "llama"}


def family(model_type: str) -> ModuleType:
    """The module of a family: `ATTENTION`, the stock class, and `SPARSE`, the class that takes its place.

    Raises:
        ValueError: an unknown model type; lists the supported ones.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"model_type: expected one of {', '.join(sorted(FAMILIES))}, got {model_type!r}")
    return import_module(f"{__name__}.{FAMILIES[model_type]}")
