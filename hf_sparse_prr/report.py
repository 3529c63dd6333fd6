"""What a patched model does and did: the report, and statistics that cost a step no host sync."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .cache import SparseCache
    from .config import LayerPlan, SparseConfig
    from .kernel_loader import Kernels

NUMBERS = ("blocks_read", "summaries_read", "hits", "selected", "predicted", "hit_shares", "guessed")  # as `tally`


class TraceEntry(NamedTuple):
    """One decode token in one layer: int32 [B, H, n] block ids counted from the batch row's first real token,
    ascending, -1 padded. `selected` includes forced blocks, `predicted` does not, missed = selected - predicted -
    forced. A batch row that fits its budget is all -1."""

    step: int
    layer: int
    predicted: torch.Tensor
    selected: torch.Tensor
    missed: torch.Tensor


class Statistics:
    """Counters and trace of one cache. The counters stay on the layers' devices until they are asked for."""

    def __init__(self, layers: int) -> None:
        self.steps = 0
        self.selector_calls = [0] * layers
        self.bytes_per_block = [0] * layers
        self.bytes_per_summary = [0] * layers
        self.ema: list[torch.Tensor | None] = [None] * layers
        self.trace: list[TraceEntry] = []
        self._numbers: list[torch.Tensor | None] = [None] * layers
        self._folded: list[list[torch.Tensor]] = [[] for _ in range(layers)]

    def numbers(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """A layer's counters, float64 [B, H, 7], for the kernel that adds to them. like: [B, H, ..]."""
        held, shape = self._numbers[layer], (*like.shape[:2], len(NUMBERS))
        if held is None or held.shape != shape or held.device != like.device:
            if held is not None:  # the batch changed
                self._folded[layer].append(held.sum(dim=(0, 1)))
            held = self._numbers[layer] = torch.zeros(shape, dtype=torch.float64, device=like.device)
        return held

    def held(self, layer: int) -> torch.Tensor | None:
        """A layer's counters, None before its first token."""
        return self._numbers[layer]

    def crop_trace(self, steps: int) -> None:
        """Tokens at and past decode step `steps` were dropped."""
        self.trace = [entry for entry in self.trace if entry.step < steps]

    def layer(self, index: int) -> dict[str, Any]:
        """Host numbers of one layer."""
        values: dict[str, Any] = dict.fromkeys(NUMBERS, 0)
        held = self._numbers[index]
        for row in [*self._folded[index], *([] if held is None else [held.sum(dim=(0, 1))])]:
            for name, value in zip(NUMBERS, row.tolist(), strict=True):
                values[name] += value if name == "hit_shares" else int(value)
        return {
            "steps": self.steps,
            "selector_calls": self.selector_calls[index],
            "bytes_read": values["blocks_read"] * self.bytes_per_block[index]
            + values["summaries_read"] * self.bytes_per_summary[index],
            **values,
        }


def rates_of(counts: dict[str, Any]) -> dict[str, Any]:
    """Rates from summed counters; None where nothing was ever predicted."""
    asked, predicted = counts["predicted"] > 0, counts["predicted"]
    return {
        "steps": counts["steps"],
        "selector_calls": counts["selector_calls"],
        "hit_rate": counts["hits"] / counts["selected"] if asked and counts["selected"] else None,
        "hit_rate_weighted": (counts["hit_shares"] / counts["guessed"] if asked and counts["guessed"] else None),
        "extra_rate": (predicted - counts["hits"]) / predicted if asked else None,
        "repaired_blocks": counts["selected"] - counts["hits"] if asked else 0,
        "bytes_read": counts["bytes_read"],
    }


def _sum(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: sum(part[key] for part in parts) for key in parts[0]}


class Recorder:
    """The statistics of every cache that a patched model has met. Those of dead caches are folded into one."""

    def __init__(self, plans: "list[LayerPlan]", config: "SparseConfig") -> None:
        self._plans, self._config = plans, config
        self.clear()

    def clear(self) -> None:
        self._live: list[tuple[weakref.ref[SparseCache], Statistics]] = []
        self._done = self._layers(Statistics(len(self._plans)))
        self._done_trace: list[TraceEntry] = []
        self._last_ema: list[Any] = [None] * len(self._plans)

    def statistics_of(self, cache: "SparseCache") -> Statistics:
        """The statistics a cache writes to."""
        if cache.statistics is None or not any(held is cache.statistics for _, held in self._live):
            self._fold()
            cache.statistics = Statistics(len(self._plans))
            self._live.append((weakref.ref(cache), cache.statistics))
        return cache.statistics

    def _layers(self, statistics: Statistics) -> list[dict[str, Any]]:
        return [statistics.layer(index) for index in range(len(self._plans))]

    def _fold(self) -> None:
        alive = []
        for cache, statistics in self._live:
            if (owner := cache()) is not None and owner.statistics is statistics:
                alive.append((cache, statistics))
                continue
            self._last_ema = [self._ema(index) for index in range(len(self._plans))]
            self._done = [_sum(pair) for pair in zip(self._done, self._layers(statistics), strict=True)]
            self._done_trace.extend(statistics.trace)
        self._live = alive

    @property
    def trace(self) -> list[TraceEntry]:
        return [*self._done_trace, *(entry for _, statistics in self._live for entry in statistics.trace)]

    def summary(self) -> dict[str, Any]:
        """The dict of `PatchHandle.stats()`."""
        every = [self._done, *(self._layers(statistics) for _, statistics in self._live)]
        layers = [_sum(parts) for parts in zip(*every, strict=True)]
        total = rates_of(_sum(layers))
        total["steps"] = layers[0]["steps"]
        predicts = any(plan.predicted_blocks for plan in self._plans) or total["hit_rate"] is not None
        return {
            **total,
            "ema": self._used_ema() if predicts else None,
            "layers": [
                {"layer": index, **rates_of(layer), "ema": self._ema(index)} for index, layer in enumerate(layers)
            ],
        }

    def _used_ema(self) -> Any:
        """What was asked for, or where nothing is calibrated the coefficients that all layers have."""
        given = {plan.ema for plan in self._plans if plan.predicted_blocks}
        return self._config.ema if None in given or not given else given.pop()

    def _ema(self, index: int) -> Any:
        """(alpha, beta, gamma) that a layer last predicted with, a list of them where batch rows differ."""
        used = [ema for _, statistics in self._live if (ema := statistics.ema[index]) is not None]
        if not used:
            return self._last_ema[index]
        rows = [tuple(round(value, 6) for value in row) for row in used[-1].tolist()]
        return rows[0] if len(set(rows)) == 1 else rows


@dataclass
class GraphReport:
    """Decode steps as CUDA graphs. captured, replayed: graphs and tokens.  bytes: that the last ones kept.  reason: why
    the last generate() had none.  failed: why none will be tried again.  beside: generate() calls during another one of
    the same model, which have none.  fused: layers whose linear parts the last generate() could run in a few kernels a
    token, wholly or in part."""

    captured: int = 0
    replayed: int = 0
    bytes: int = 0
    reason: str | None = None
    failed: str | None = None
    beside: int = 0
    fused: int = 0

    def __str__(self) -> str:
        said = [] if self.reason is None else [f"off, because {self.reason}"]
        if self.captured:
            said.append(f"{self.captured} captured, {self.replayed} tokens replayed, {self.bytes / 2**20:.0f} MiB")
        if self.beside:
            said.append(f"{self.beside} calls of generate() ran during another and had none")
        fused = f"; linear parts fused in {self.fused} layers" if self.fused else ""
        return f"CUDA graphs of decode steps: {'; '.join(said) or 'none yet'}{fused}"


@dataclass(frozen=True)
class LayerReport:
    """One layer of the report: `settings` are the resolved ones, `status` is "sparse", "dense" or "shared"."""

    index: int
    attention_class: str
    selector: str | None
    settings: dict[str, Any]
    status: str
    reason: str


class Report:
    """What is active in a patched model. Prints as a table."""

    def __init__(self, layers: list[LayerReport], kernels: "Kernels", warnings: list[str], notes: list[str]) -> None:
        self.layers = layers
        self.backend = kernels.backend
        self.kernels = {"source": kernels.source, "version": kernels.version}
        self.warnings = warnings
        self.notes = notes

    def __str__(self) -> str:
        head = ("layer", "class", "status", "selector", "settings", "reason")
        rows: list[tuple[str, ...]] = []
        for cells, alike in groupby(self.layers, key=self._cells):
            indices = [layer.index for layer in alike]
            rows.append((f"{indices[0]}-{indices[-1]}" if len(indices) > 1 else str(indices[0]), *cells))
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        sparse = sum(layer.status != "dense" for layer in self.layers)
        lines = [
            f"hf_sparse_prr: {sparse} of {len(self.layers)} attention layers sparse",
            f"kernels: {self.backend} ({self.kernels['source']}, version {self.kernels['version']})",
            *(line.rstrip() for line in table),
            *(f"note: {note}" for note in self.notes),
            *(f"warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)

    @staticmethod
    def _cells(layer: LayerReport) -> tuple[str, ...]:
        """A row but its layer number: layers in a row that have the same share one."""
        settings = " ".join(f"{name}={value}" for name, value in layer.settings.items())
        return layer.attention_class, layer.status, layer.selector or "-", settings or "-", layer.reason or "-"

    __repr__ = __str__
