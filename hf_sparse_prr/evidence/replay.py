"""Replay a trace: what an EMA would have predicted of each step's selection, and what reusing the last one would."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hf_sparse_prr.blocks import top_blocks
from hf_sparse_prr.bundled import reference
from hf_sparse_prr.calibration import GRID
from hf_sparse_prr.evidence.traces import Trace

LAST = (1.0, 1.0, 0.0)  # the level is the last score: the last step's best blocks are expected again
EMA = tuple[float, float, float]


class Hits(NamedTuple):
    """Of one layer, by step and KV head, [T, H]. hits: selected blocks that were predicted.  selected: how many there
    were.  shares: the predicted share of the selection's normalised score, NaN where nothing was predicted or the
    selection's score is 0."""

    hits: torch.Tensor
    selected: torch.Tensor
    shares: torch.Tensor

    @property
    def rate(self) -> float:
        """`hit_rate` of stats()."""
        return (self.hits.sum() / self.selected.sum()).item()

    @property
    def weighted(self) -> float:
        """`hit_rate_weighted` of stats()."""
        return self.shares.double().nanmean().item()

    def of(self, steps: slice = slice(None), heads: slice = slice(None)) -> Hits:
        return Hits(*(each[steps, heads] for each in self))


def replay(scores: torch.Tensor, free: int, ema: EMA, delta: float = 1.0) -> Hits:
    """Predict every step from those before it. scores: fp32 [T, H, N], of one layer of a `Trace`.  free: blocks
    selected a step.  delta: predicted blocks per selected one.
    """
    slots = min(math.floor(delta * free), scores.shape[2])
    coefficients = torch.tensor([ema], dtype=torch.float32)
    level = torch.full_like(scores[:1], float("nan"))
    trend = torch.zeros_like(level)
    found = []
    for now in scores:
        raw = now[None]
        hopes = reference.ema_predict(level, trend, coefficients).masked_fill(raw.isnan(), float("nan"))
        predicted, winners = top_blocks(reference, hopes, slots), top_blocks(reference, raw, free)  # type: ignore[arg-type]
        importance = reference.normalise(raw)
        hit = reference.slots_of(winners, predicted) >= 0
        weight = importance.gather(2, winners.long().clamp(min=0)).masked_fill(winners < 0, 0.0)
        total = weight.sum(dim=2)
        asked = (total > 0) & (predicted >= 0).any(dim=2)
        share = torch.where(asked, (weight * hit).sum(dim=2) / total, float("nan"))
        found.append((hit.sum(dim=2)[0], (winners >= 0).sum(dim=2)[0], share[0]))
        level, trend = reference.ema_update(level, trend, importance, coefficients)
    return Hits(*(torch.stack(column) for column in zip(*found, strict=True)))


def calibrated(scores: torch.Tensor, free: int, delta: float = 1.0) -> EMA:
    """The candidate of the library's grid with the best score-weighted hit rate on these steps; ties: the first."""
    return max(GRID, key=lambda ema: round(replay(scores, free, ema, delta).weighted * 2**20))


def overlaps(trace: Trace, lags: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> dict[int, float]:
    """How scores drift: by lag in steps, the share of a step's selected blocks that were selected so long before."""
    found = {}
    for lag in lags:
        shares = []
        for scores in trace.scores.values():
            winners = top_blocks(reference, scores, trace.free)  # type: ignore[arg-type]
            if lag < len(winners):
                here = (reference.slots_of(winners[lag:], winners[:-lag]) >= 0).sum()
                shares.append((here / (winners[lag:] >= 0).sum()).item())
        if shares:
            found[lag] = sum(shares) / len(shares)
    return found


def shifted(trace: Trace, at: int, blocks: int) -> Trace:
    """From step `at` on every score moves by so many blocks, the sink's too: real scores in places where a predictor
    doesn't expect them. Among the blocks that can be selected at `at`.
    """
    moved = {}
    for layer, scores in trace.scores.items():
        new = scores.clone()
        open_ = ~scores[at].isnan().any(dim=0)
        new[at:, :, open_] = scores[at:][:, :, open_].roll(blocks, dims=2)
        moved[layer] = new
    return Trace(moved, trace.free, {**trace.about, "shifted": [at, blocks]})
