"""The hit-rate study: what the predictor achieves on a model's own scores, by layer, head, surplus and weighting."""

from __future__ import annotations

import random
from typing import Any

import torch

from hf_sparse_prr import SparseConfig
from hf_sparse_prr.config import DEFAULT_EMA
from hf_sparse_prr.demo.progress import Progress, silent
from hf_sparse_prr.evidence.decoding import Rows
from hf_sparse_prr.evidence.replay import LAST, Hits, calibrated, overlaps, replay, shifted
from hf_sparse_prr.evidence.settings import Setting
from hf_sparse_prr.evidence.subjects import Subject
from hf_sparse_prr.evidence.tasks import TASKS
from hf_sparse_prr.evidence.texts import text_of
from hf_sparse_prr.evidence.traces import Trace, recorded, trace_of
from hf_sparse_prr.patching import patch_model

DELTAS = (1.0, 1.5, 2.0)
WINDOW = 8  # steps
SHIFT = 5  # blocks
TOPICS = ("reference", "argparse")  # the second one takes over


def study(
    subject: Subject, length: int, steps: int, setting: Setting, seed: int = 0, progress: Progress = silent
) -> tuple[dict[str, Any], Trace]:
    """Decode `steps` given tokens after `length` others, and again with a change of topic halfway.

    Text models continue text; the tiny ones copy one span, or two. Returns what was found, and the trace of the first.

    Raises:
        ValueError: a model with an indexer: its scores are no selector's; `indexed_study` is for it.
    """
    if subject.indexed:
        raise ValueError(f"model: expected one that selects blocks, got {subject.name}, which has an indexer")
    progress("decode", 0, None)
    steady = continued(subject, length, steps, seed, switched=False)
    trace, stats = _decode(subject, steady, steps, setting)
    progress("decode, calibrated by its prompt", 0, None)
    own = rows_of(subject, steady, steps, own_prompt=True).decode(setting, ema="calibrate").stats
    assert own is not None
    progress("decode, a change of topic", 0, None)
    turned, _ = _decode(subject, continued(subject, length, steps, seed, switched=True), steps, setting)
    layers = {}
    for done, layer in enumerate(trace.scores):
        progress("replay", done, len(trace.scores))
        layers[layer] = _layer(trace, layer)
    half = steps // 2
    found = {
        "layers": layers,
        "mean": _mean(layers),
        "stats": _pair(stats),
        "calibrated_by_prompt": {**_pair(own), "ema": [each["ema"] for each in own["layers"]]},
        "drift": overlaps(trace),
        "topic": {"at": half, "steady": _windows(trace), "switched": _windows(turned)},
        "shift": {"at": half, "blocks": SHIFT, "ema": _around(shifted(trace, half, SHIFT), half)},
    }
    return found, trace


def continued(subject: Subject, length: int, steps: int, seed: int, switched: bool) -> list[int]:
    """`length + steps` tokens, the last of which are decoded; ValueError where a text is shorter."""
    half = steps - steps // 2 if switched else 0
    if subject.tokenizer is None:
        spans, parts = (2, steps // 2 - 5) if switched else (1, steps - 5)  # 5 are the question
        rng = random.Random(f"{seed} hits")
        return TASKS["copying"](subject.form, rng, length + steps, parts=parts + 4, spans=3, queries=spans).ids
    ids = subject.encode(text_of(TOPICS[0]))[: length + steps - half]
    ids += subject.encode(text_of(TOPICS[1]))[:half]
    if len(ids) < length + steps:
        raise ValueError(f"length: expected at most {len(ids) - steps}, got {length}")
    return ids


def rows_of(subject: Subject, ids: list[int], steps: int, own_prompt: bool) -> Rows:
    given = torch.zeros(len(ids), dtype=torch.bool)
    return Rows(subject, torch.tensor([ids]), len(ids) - steps - 1, given, own_prompt)


def _decode(subject: Subject, ids: list[int], steps: int, setting: Setting) -> tuple[Trace, dict[str, Any]]:
    rows = rows_of(subject, ids, steps, own_prompt=False)
    rows.read()
    with recorded(setting.selector) as seen:
        stats = rows.decode(setting, ema=DEFAULT_EMA).stats
    assert stats is not None
    sparse = [each["layer"] for each in stats["layers"] if each["selector_calls"]]
    if not sparse:
        raise ValueError(
            f"budget, dense_layers: expected a layer that selects from {len(ids)} tokens, got none under "
            f"{setting.budget} and {setting.dense_layers!r}"
        )
    config = SparseConfig(**setting.overrides())
    with patch_model(subject.model, config) as handle:
        free = handle.plans[sparse[0]].free_blocks
    about = {"model": subject.name, "tokens": len(ids), "setting": setting.label}
    return trace_of(seen, sparse, free, **about), stats


def _layer(trace: Trace, layer: int) -> dict[str, Any]:
    """By delta: EMA and reuse of the last step, and by KV head; calibrated on a quarter against default on the rest."""
    scores, free = trace.scores[layer], trace.free
    found: dict[str, Any] = {}
    for delta in DELTAS:
        ema, last = replay(scores, free, DEFAULT_EMA, delta), replay(scores, free, LAST, delta)
        heads = [ema.of(heads=slice(head, head + 1)) for head in range(scores.shape[1])]
        found[f"{delta:g}"] = {
            "ema": _both(ema),
            "last": _both(last),
            "heads": [_both(head) for head in heads],
        }
    quarter = len(scores) // 4
    chosen, rest = calibrated(scores[:quarter], free), slice(quarter, None)
    found["calibrated"] = {
        "ema": chosen,
        "chosen": _both(replay(scores, free, chosen).of(rest)),
        "default": _both(replay(scores, free, DEFAULT_EMA).of(rest)),
        "last": _both(replay(scores, free, LAST).of(rest)),
    }
    return found


def _both(hits: Hits) -> dict[str, float]:
    return {"rate": round(hits.rate, 4), "weighted": round(hits.weighted, 4)}


def _pair(stats: dict[str, Any]) -> dict[str, Any]:
    return {"rate": stats["hit_rate"], "weighted": stats["hit_rate_weighted"]}


def _mean(layers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Over layers, of the same entries but those of heads and coefficients."""
    wanted = {f"{delta:g}": ("ema", "last") for delta in DELTAS} | {"calibrated": ("chosen", "default", "last")}
    return {
        entry: {name: _average([layer[entry][name] for layer in layers.values()]) for name in names}
        for entry, names in wanted.items()
    }


def _average(rates: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(sum(each[name] for each in rates) / len(rates), 4) for name in rates[0]}


def _windows(trace: Trace) -> list[dict[str, float]]:
    """EMA and last step by windows of steps, the mean over layers."""
    return _course(trace, range(0, _steps(trace), WINDOW), WINDOW)


def _around(trace: Trace, at: int) -> list[dict[str, float]]:
    """The same by step, from the one before `at` on."""
    return _course(trace, range(at - 1, min(at + 9, _steps(trace))), 1)


def _course(trace: Trace, begins: range, width: int) -> list[dict[str, float]]:
    pairs = [[replay(scores, trace.free, ema) for ema in (DEFAULT_EMA, LAST)] for scores in trace.scores.values()]
    found = []
    for begin in begins:
        part = slice(begin, begin + width)
        rates = [[hits.of(part).rate for hits in pair] for pair in pairs]
        ema, last = (sum(column) / len(rates) for column in zip(*rates, strict=True))
        found.append({"step": begin, "ema": round(ema, 4), "last": round(last, 4)})
    return found


def _steps(trace: Trace) -> int:
    return len(next(iter(trace.scores.values())))
