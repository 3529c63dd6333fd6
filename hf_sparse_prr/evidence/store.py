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
        ValueError: the folder holds cells of other settings, or a file that isn't a JSON object.
    """

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        self.folder, self._asked = folder, asked
        self._held = folder / "run.json"
        if self._held.is_file() and any((folder / "cells").glob("*.json")):  # one that measured nothing binds nobody
            self._check()
        else:
            write(self._held, asked)

    def _check(self) -> None:
        before = read(self._held)
        unlike = [name for name in self._asked if before.get(name) != self._asked[name]]
        if unlike:
            name = unlike[0]
            raise ValueError(
                f"output: expected a folder of the same run, got one with {name} {before.get(name)!r}, not "
                f"{self._asked[name]!r}; name another folder, or delete {self.folder}"
            )

    def cell(
        self, name: str, measure: Callable[[], dict[str, Any]], about: dict[str, Any], again: bool = False
    ) -> dict[str, Any]:
        """The cell's results: read where they are there, else measured and kept, with what it says `about` them.

        again: measured, whatever is there.

        Raises:
            ValueError: what is there is no cell, or one of other weights than it says about them.
        """
        path = self.path(name)
        if again or not path.is_file():
            found = measure()
            self._check()  # again: another run may have begun in the folder meanwhile
            write(path, {**found, **about})
        found = read(path)
        if "digest" not in found:
            raise ValueError(f"{path}: expected a cell's results, got none; delete it")
        if found.get("weights", about["weights"]) != about["weights"]:
            raise ValueError(
                f"{path}: expected results of the weights that were loaded, got others'; name another output, or "
                f"delete {self.folder}"
            )
        return found

    def path(self, name: str) -> Path:
        """Of a cell's file."""
        return self.folder / "cells" / f"{name}.json"


def read(path: Path) -> dict[str, Any]:
    """What `write` has written. ValueError for anything else."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}; delete it") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}; delete it")
    return found


def write(path: Path, data: dict[str, Any]) -> None:
    """Under its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # where it was stopped between the two
