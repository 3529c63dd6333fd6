"""What speculation takes on one GPU, at one shape and with one set of kernels: a table that was measured by
`hf-sparse-prr profile`, kept as JSON, and looked up by exactly those. PRR's budget table (arXiv 2606.30389, section
4.4).
"""

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

FORMAT, VERSION = "hf_sparse_prr profile", 1
_COMMITTED = Path(__file__).parent / "profiles"
_REMEDY = "delete it, or run `hf-sparse-prr profile` again"


class Key(NamedTuple):
    """What a profile holds for. device: as torch calls the GPU.  backend, version: of the kernels.  blocks: that a KV
    head attends to, forced ones included, of block_size tokens each.  dtype: "bfloat16"."""

    device: str
    backend: str
    version: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    batch: int
    selector: str
    block_size: int
    blocks: int

    def __str__(self) -> str:
        return (
            f"{self.device}, {self.backend} kernels {self.version}, {self.heads} heads over {self.kv_heads} KV heads "
            f"of {self.head_dim}, {self.dtype}, batch {self.batch}, {self.selector}, {self.blocks} blocks of "
            f"{self.block_size}"
        )

    @property
    def file_name(self) -> str:
        """One file a key."""
        name = (
            f"{self.device}-{self.backend}{self.version}-{self.heads}x{self.kv_heads}x{self.head_dim}-{self.dtype}-"
            f"b{self.batch}-{self.selector}-{self.blocks}x{self.block_size}.json"
        )
        return "".join(c if c.isalnum() or c in "-." else "_" for c in name)


class Cell(NamedTuple):
    """Microseconds a layer where that share of the free blocks was predicted, with `ratio` predictions for each of
    them. repair: alone.  step: selection with speculation beside it, and repair."""

    ratio: float
    hit_rate: float
    repair: float
    step: float


class At(NamedTuple):
    """Microseconds a layer with `context` tokens. select: scores and top-k.  serial: those and attention, without
    speculation.  speculate: attention over what is predicted, by ratio.  cells: by ratio and hit rate."""

    context: int
    select: float
    serial: float
    speculate: dict[float, float]
    cells: tuple[Cell, ...]

    def ratio(self, wanted: float) -> float:
        """The measured one that is nearest."""
        return min(self.speculate, key=lambda each: abs(each - wanted))

    def step(self, ratio: float, hit_rate: float) -> float:
        """Of the nearest ratio, interpolated between hit rates; beyond them the last one's."""
        return self._between(ratio, hit_rate, lambda cell: cell.step)

    def repair(self, ratio: float, hit_rate: float) -> float:
        """As `step`."""
        return self._between(ratio, hit_rate, lambda cell: cell.repair)

    def _between(self, ratio: float, hit_rate: float, figure: Callable[[Cell], float]) -> float:
        ratio = self.ratio(ratio)
        cells = sorted((cell for cell in self.cells if cell.ratio == ratio), key=lambda cell: cell.hit_rate)
        below = [cell for cell in cells if cell.hit_rate <= hit_rate]
        above = [cell for cell in cells if cell.hit_rate > hit_rate]
        if not below or not above:
            return figure((below or above)[-1 if below else 0])
        low, high = below[-1], above[0]
        share = (hit_rate - low.hit_rate) / (high.hit_rate - low.hit_rate)
        return figure(low) + share * (figure(high) - figure(low))


def _slope(contexts: Sequence[int], values: Sequence[float]) -> float:
    """Microseconds a token, by least squares; 0 where there is one context, or time falls with it."""
    if len(contexts) < 2:
        return 0.0
    x, y = sum(contexts) / len(contexts), sum(values) / len(values)
    covariance = sum((a - x) * (b - y) for a, b in zip(contexts, values, strict=True))
    return max(0.0, covariance / sum((a - x) ** 2 for a in contexts))


class Profile(NamedTuple):
    """A measured table. made: with what (torch, triton, command, ..).  contexts: ascending."""

    key: Key
    made: dict[str, Any]
    contexts: tuple[At, ...]

    def at(self, context: int) -> At:
        """The nearest context that was measured, by ratio; past the last one its figures, grown as a line through all
        contexts grows."""
        last = self.contexts[-1]
        if context <= last.context:
            return min(self.contexts, key=lambda each: abs(math.log(each.context / max(context, 1))))
        return self._grown(last, context)

    def _grown(self, last: At, context: int) -> At:
        measured, more = [each.context for each in self.contexts], context - last.context

        def grown(figure: Callable[[At], float]) -> float:
            return figure(last) + more * _slope(measured, [figure(each) for each in self.contexts])

        def cell(at: int) -> Cell:
            ratio, rate = last.cells[at][:2]
            return Cell(ratio, rate, grown(lambda each: each.cells[at].repair), grown(lambda each: each.cells[at].step))

        return At(
            context,
            grown(lambda each: each.select),
            grown(lambda each: each.serial),
            {ratio: grown(lambda each, ratio=ratio: each.speculate[ratio]) for ratio in last.speculate},  # type: ignore[misc]
            tuple(map(cell, range(len(last.cells)))),
        )

    def document(self) -> dict[str, Any]:
        """As it is written."""
        contexts = [
            {
                **at._asdict(),
                "speculate": [list(each) for each in at.speculate.items()],
                "cells": list(map(list, at.cells)),
            }
            for at in self.contexts
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "key": self.key._asdict(),
            "made": self.made,
            "contexts": contexts,
        }


def parse(document: Any, where: str) -> Profile:
    """A profile from its document. ValueError for another format or version, and for figures that can't be."""

    def check(fine: bool, expected: str, got: Any) -> None:
        if not fine:
            raise ValueError(f"{where}: expected {expected}, got {got!r}; {_REMEDY}")

    known = document if isinstance(document, dict) else {}
    check(known.get("format") == FORMAT, f"the format {FORMAT!r}", known.get("format"))
    check(known.get("version") == VERSION, f"version {VERSION} of it", known.get("version"))
    try:
        contexts = tuple(
            At(
                int(each["context"]),
                float(each["select"]),
                float(each["serial"]),
                {float(ratio): float(us) for ratio, us in each["speculate"]},
                tuple(Cell(*map(float, cell)) for cell in each["cells"]),
            )
            for each in known["contexts"]
        )
        profile = Profile(Key(**known["key"]), dict(known["made"]), contexts)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: expected the figures of a profile, got {error!r}; {_REMEDY}") from error
    tokens = [at.context for at in contexts]
    check(len(tokens) > 0 and tokens == sorted(set(tokens)) and tokens[0] > 0, "ascending contexts above 0", tokens)
    alike = {(*at.speculate, *(cell[:2] for cell in at.cells)) for at in contexts}
    check(len(alike) == 1, "the same ratios and hit rates at every context", len(alike))
    for at in contexts:
        figures = [at.select, at.serial, *at.speculate.values(), *(us for cell in at.cells for us in cell[2:])]
        check(all(math.isfinite(us) and us > 0 for us in figures), "times above 0", min(figures))
        ratios = [*at.speculate, *(cell.ratio for cell in at.cells)]
        check(all(math.isfinite(ratio) and ratio > 0 for ratio in ratios), "ratios above 0", ratios)
        rates = [cell.hit_rate for cell in at.cells]
        check(all(0 <= rate <= 1 for rate in rates), "hit rates from 0 to 1", rates)
        lacking = [ratio for ratio in at.speculate if not any(cell.ratio == ratio for cell in at.cells)]
        check(bool(at.speculate) and not lacking, "cells of each ratio", lacking)
    return profile


def read(path: Path) -> Profile:
    """The profile in a file. ValueError as `parse`, and where it isn't JSON."""
    try:
        document = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}; {_REMEDY}") from error
    return parse(document, str(path))


def user_folder() -> Path:
    """Where `hf-sparse-prr profile` writes. ValueError for a user without a home, who names none."""
    named = os.environ.get("HF_SPARSE_PRR_CACHE")
    try:
        return (Path(named) if named else Path.home() / ".cache" / "hf_sparse_prr") / "profiles"
    except RuntimeError as error:
        raise ValueError(
            f"HF_SPARSE_PRR_CACHE: expected a folder where there is no home, got none ({error})"
        ) from error


def _users(name: str) -> Path | None:
    """The user's own file; None too where a home or a folder can't be looked into."""
    try:
        path = user_folder() / name
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None


def find(key: Key) -> Profile | None:
    """The profile for this key and no other: the user's own, else a committed one. ValueError as `read`, and where a
    file of its name is for something else."""
    committed = _COMMITTED / key.file_name
    path = _users(key.file_name) or (committed if committed.is_file() else None)
    if path is None:
        return None
    profile = read(path)
    if profile.key != key:
        raise ValueError(f"{path}: expected a profile for {key}, got one for {profile.key}; {_REMEDY}")
    return profile


def sources_of(kernels: ModuleType) -> str:
    """A digest of what a kernel module was made from, which a profile keeps in `made`: its version stays while kernels
    become faster. Of a build the one in its id, which knows the CUDA sources too; else that of the module's files."""
    return _digest_of(Path(kernels.__file__ or "").parent)


@cache
def _digest_of(folder: Path) -> str:
    metadata = folder / "metadata.json"
    built = re.search(r"_([0-9a-f]{12})$", json.loads(metadata.read_text())["id"]) if metadata.is_file() else None
    if built is not None:
        return built[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json") and path != metadata):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def device_name(device: torch.device) -> str:
    """As `Key` has it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
