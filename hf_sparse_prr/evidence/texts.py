"""Long real text that is on every machine with Python: its language reference, and sources of its standard library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module


def _reference() -> str:
    topics = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def _source(module: str) -> Callable[[], str]:
    return lambda: inspect.getsource(import_module(module))


# The text differs a little from one Python version to the next
TEXTS: dict[str, Callable[[], str]] = {
    "reference": _reference,
    "argparse": _source("argparse"),
    "typing": _source("typing"),
    "decimal": _source("_pydecimal"),
}


def text_of(name: str) -> str:
    """ValueError for a name that isn't one of `TEXTS`."""
    if name not in TEXTS:
        raise ValueError(f"text: expected one of {', '.join(TEXTS)}, got {name!r}")
    return TEXTS[name]()
