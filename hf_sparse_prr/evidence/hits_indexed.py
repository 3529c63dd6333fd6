"""The hit-rate study of models with an indexer: from `stats()` and the trace of what was predicted and selected.

Their scores are no selector's and aren't recorded: what reuse would have hit follows from the selections themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_sparse_prr.config import DEFAULT_EMA
from hf_sparse_prr.demo.progress import Progress, silent
from hf_sparse_prr.evidence.decoding import Decoded
from hf_sparse_prr.evidence.hits import DELTAS, WINDOW, continued, rows_of
from hf_sparse_prr.evidence.settings import Setting
from hf_sparse_prr.evidence.subjects import Subject

_LAGS = (1, 2, 4, 8, 16, 32)
Steps = dict[int, list[tuple[set[int], set[int]]]]  # by layer: (predicted, selected) of each step


def indexed_study(
    subject: Subject, length: int, steps: int, seed: int = 0, progress: Progress = silent
) -> dict[str, Any]:
    """As `hits.study`, of tokens in place of blocks and without what needs scores: calibration, and a shift of them.
    `last` is there for as many as are selected alone.

    Raises:
        ValueError: a model without an indexer.
    """
    if not subject.indexed:
        raise ValueError(f"model: expected one with an indexer, got {subject.name}")
    ids = continued(subject, length, steps, seed, switched=False)
    runs = {}
    for delta in DELTAS:
        progress(f"decode, {delta:g} predicted a selected one", 0, None)
        runs[delta] = _decode(subject, ids, steps, delta)
    progress("decode, a change of topic", 0, None)
    turned = _steps_of(_decode(subject, continued(subject, length, steps, seed, switched=True), steps, 1.0))
    steady = _steps_of(runs[1.0])
    layers: dict[int, dict[str, Any]] = {}
    for delta, run in runs.items():
        assert run.stats is not None
        for each in run.stats["layers"]:
            if each["layer"] in steady:
                layers.setdefault(each["layer"], {})[f"{delta:g}"] = {"ema": _pair(each)}
    for layer, found in layers.items():
        found["1"]["last"] = {"rate": _reuse(steady[layer])}
    stats = runs[1.0].stats
    assert stats is not None
    return {
        "layers": layers,
        "mean": _mean(layers),
        "stats": _pair(stats),
        "drift": {lag: _average([_overlap(each, lag) for each in steady.values()]) for lag in _LAGS if lag < steps},
        "topic": {"at": steps // 2, "steady": _windows(steady), "switched": _windows(turned)},
    }


def _decode(subject: Subject, ids: list[int], steps: int, delta: float) -> Decoded:
    rows = rows_of(subject, ids, steps, own_prompt=True)
    return rows.decode(Setting("prr", "dsa"), spec_ratio=delta, ema=DEFAULT_EMA, trace=True)


def _steps_of(run: Decoded) -> Steps:
    found: Steps = {}
    for entry in run.trace:
        found.setdefault(entry.layer, []).append((_ids(entry.predicted), _ids(entry.selected)))
    return found


def _ids(padded: torch.Tensor) -> set[int]:
    """Of one batch row, int32 [1, 1, n], -1 padded."""
    return set(padded.flatten().tolist()) - {-1}


def _overlap(steps: list[tuple[set[int], set[int]]], lag: int) -> float:
    """The share of what is selected that was selected so many steps before."""
    pairs = [(now, before) for (_, now), (_, before) in zip(steps[lag:], steps, strict=False)]
    return round(sum(len(now & before) for now, before in pairs) / sum(len(now) for now, _ in pairs), 4)


def _reuse(steps: list[tuple[set[int], set[int]]], begin: int = 0) -> float:
    """What reuse of the last step hits from step `begin` on: nothing in the very first, as the EMA."""
    before = [set(), *(chosen for _, chosen in steps)]
    pairs = [(chosen, last) for (_, chosen), last in zip(steps, before, strict=False)][begin:]
    return round(sum(len(chosen & last) for chosen, last in pairs) / sum(len(chosen) for chosen, _ in pairs), 4)


def _windows(steps: Steps) -> list[dict[str, float]]:
    """EMA and last step by windows of steps, the mean over layers."""
    found = []
    for begin in range(0, min(map(len, steps.values())), WINDOW):
        ema, last = [], []
        for each in steps.values():
            part = each[begin : begin + WINDOW]
            selected = sum(len(chosen) for _, chosen in part)
            ema.append(sum(len(predicted & chosen) for predicted, chosen in part) / selected)
            last.append(_reuse(each[: begin + WINDOW], begin))
        found.append({"step": begin, "ema": _average(ema), "last": _average(last)})
    return found


def _pair(stats: dict[str, Any]) -> dict[str, float]:
    return {"rate": round(stats["hit_rate"], 4), "weighted": round(stats["hit_rate_weighted"], 4)}


def _mean(layers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for delta in DELTAS:
        here = [layer[f"{delta:g}"]["ema"] for layer in layers.values()]
        found[f"{delta:g}"] = {"ema": {name: _average([each[name] for each in here]) for name in here[0]}}
    found["1"]["last"] = {"rate": _average([layer["1"]["last"]["rate"] for layer in layers.values()])}
    return found


def _average(values: list[float]) -> float:
    return round(sum(values) / len(values), 4)
