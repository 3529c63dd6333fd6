"""The answers of a launch, kept so that a crash loses none and a second run repeats none.

    answers.jsonl             every line's answer, in the order of the prompts: there once all are there
    answers.jsonl.run.json    of what run: prompts, model, settings; with the totals at its end
    answers.jsonl.parts/      while it runs: run.json, and a file of whole lines of each process that ever wrote

A record is one write of one line, flushed to the disk; a line without its end was cut off and isn't counted. A process
makes a new file, whatever an earlier run left, so nobody writes where another one may still.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

_NO_ROOM = "--out: expected room for answers, got {} ({}); the same command goes on from here"


class RunError(ValueError):
    """The answers can't go where they should; the message says what was expected."""


class DiskError(RuntimeError):
    """An answer can't be kept: no room, say; the message says where. What was kept stays."""


class Answers:
    """The files of one run. identity: what a second run must share with the first one to go on with it."""

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        if not out.name:
            raise RunError(f"--out: expected a file, got {out}, a folder")
        self.out, self.identity = out, json.loads(json.dumps(identity))
        self.run_file = out.with_name(out.name + ".run.json")
        self.parts = out.with_name(out.name + ".parts")

    def begin(self) -> bool:
        """The main process's: take the folder for this run, and say whether all answers are there already.

        Raises:
            RunError: the files are another run's, nobody's we know, or of a run that is still at work.
        """
        if self.out.exists():
            self._check_identity(self.run_file, self.out)
            shutil.rmtree(self.parts, ignore_errors=True)  # a run that ended before it could
            return True
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
            self._lock = (self.parts / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it, however a process ends
        except BlockingIOError as error:
            raise RunError(f"--out: expected no other run at work on {self.out}, got one that is") from error
        except OSError as error:
            raise RunError(f"--out: expected a place that can be written, got {self.out} ({error})") from error
        began = self.parts / "run.json"
        if any(self.parts.glob("*.jsonl")):
            self._check_identity(began, self.parts)
        else:  # a run that began no answer, one refused for a bad line say, binds nobody: the line may be mended
            _replace(began, json.dumps(self.identity, indent=2) + "\n")
        return False

    def _check_identity(self, path: Path, of: Path) -> None:
        if not path.is_file():
            raise RunError(f"--out: expected a file that isn't there yet, got {of}, not of a run of this command")
        theirs = json.loads(path.read_text()).get("run")
        ours = self.identity["run"]
        if theirs != ours:
            other = sorted(key for key in {*ours, *(theirs or {})} if (theirs or {}).get(key) != ours.get(key))
            raise RunError(
                f"--out: expected answers of the same run, got {of} of one with another {', '.join(other)}; "
                "name another --out, or remove it"
            )

    def done(self) -> dict[int, dict[str, Any]]:
        """The records of every process so far, by line number. A line that was answered twice counts once."""
        records: dict[int, dict[str, Any]] = {}
        for part in sorted(self.parts.glob("*.jsonl")):
            for line in part.read_bytes().split(b"\n")[:-1]:  # what follows the last end of line was cut off
                try:
                    record = json.loads(line)
                    records.setdefault(record["line"], record)
                except (ValueError, TypeError, KeyError) as error:
                    raise RunError(f"--out: expected answers in {part}, got {line[:40]!r}; remove that line") from error
        return records

    def writer(self, process: int) -> PartFile:
        return PartFile(self.parts, process)

    def finish(self, lines: list[int], totals: dict[str, Any]) -> int:
        """The main process's: join the records, in the order of `lines`; nothing half-written bears the final name.
        Returns how many of them are errors."""
        records = self.done()
        missing = [line for line in lines if line not in records]
        if missing:
            raise RunError(f"expected an answer to each of {len(lines)} prompts, got none to line {missing[0]}")
        document = {**self.identity, "totals": totals}
        try:
            _replace(self.run_file, json.dumps(document, indent=2) + "\n")
            _replace(self.out, "".join(json.dumps(records[line], ensure_ascii=False) + "\n" for line in lines))
        except OSError as error:
            raise DiskError(_NO_ROOM.format(self.out, error)) from error
        shutil.rmtree(self.parts)
        return sum("error" in records[line] for line in lines)


class PartFile:
    """What one process writes: whole lines, on the disk when `write` returns."""

    def __init__(self, folder: Path, process: int) -> None:
        self._folder = folder
        self._file, _ = tempfile.mkstemp(prefix=f"{process}-", suffix=".jsonl", dir=folder)

    def write(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            raise DiskError(_NO_ROOM.format(self._folder, error)) from error

    def close(self) -> None:
        os.close(self._file)


def _replace(path: Path, text: str) -> None:
    """Write the file beside it and give it its name."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
