"""How long work says where it is: one callable, so that the library needs no progress-bar package."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with the name of a stage, the steps done, and the steps in all (None: not known)."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


def silent(stage: str, done: int, total: int | None) -> None:
    """A `Progress` that shows nothing."""
