"""Results on disk: a file a cell, each whole or not there, so that an interrupted run loses the cell at work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Store:
    """A folder with `run.json`, what was asked for, and a file for each cell.

    Raises:
        ValueError: the folder holds cells of other settings.
    """

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        self.folder = folder
        held = folder / "run.json"
        if held.is_file() and any((folder / "cells").glob("*.json")):  # one that measured nothing binds nobody
            before = json.loads(held.read_text())
            unlike = [name for name in asked if before.get(name) != asked[name]]
            if unlike:
                name = unlike[0]
                raise ValueError(
                    f"output: expected a folder of the same run, got one with {name} {before.get(name)!r}, not "
                    f"{asked[name]!r}; name another folder, or delete {folder}"
                )
        else:
            write(held, asked)

    def cell(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The cell's results: read where they are there, else measured and kept."""
        path = self.path(name)
        if not path.is_file():
            write(path, measure())
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def path(self, name: str) -> Path:
        """Of a cell's file."""
        return self.folder / "cells" / f"{name}.json"


def write(path: Path, data: dict[str, Any]) -> None:
    """Under its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # where it was stopped between the two
