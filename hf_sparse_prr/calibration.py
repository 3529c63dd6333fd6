"""Which (alpha, beta, gamma) predicts a prompt's blocks best (PRR, arXiv 2606.30389, section 4.2).

The last prompt queries are scored as if they were decoded. Each candidate of the grid predicts every one of them from
those before; the one with the best score-weighted hit rate wins, per batch row and layer, and the state it ends in
starts the EMA.
"""

from types import ModuleType

import torch

from .blocks import top_blocks
from .config import DEFAULT_EMA
from .layer import SparseLayer
from .predictor import MIN_QUERIES, Prior
from .selectors import SELECTORS, Scope

# Ties go to the first: the default leads, then the grid in the order alpha, beta, gamma
GRID = (
    DEFAULT_EMA,
    *(
        candidate
        for a in (2, 4, 6, 8)
        for b in (1, 2, 3, 4, 5)
        for c in (0, 1, 2, 3)
        if (candidate := (a / 10, b / 10, c / 4)) != DEFAULT_EMA
    ),
)


def prompt_scores(
    layer: SparseLayer, valid: torch.Tensor, start: torch.Tensor, kernels: ModuleType, scale: float
) -> list[torch.Tensor]:
    """Of blocks: fp32 [B, H, N] for each remembered prompt query; NaN for blocks it wouldn't have selected from, and
    for rows in which it is padding."""
    plan, memory = layer.plan, layer.memory
    assert memory.queries is not None
    scores = []
    for index, column in enumerate(memory.columns):
        selectable = (column - start) // plan.block_size - plan.local_blocks + 1
        last = torch.where(valid[:, column], selectable, 0)
        query = memory.queries[:, :, :, index]
        scope = Scope(plan.sink_blocks, last, column + 1 - start, scale)
        scores.append(SELECTORS[plan.selector].checked_scores(kernels, query, layer.summaries, scope, plan))
    return scores


def hit_weights(
    predicted: torch.Tensor, winners: torch.Tensor, importance: torch.Tensor, kernels: ModuleType
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: the sum over heads of (importance of predicted winners / importance of all), and how many heads have
    any importance."""
    weight = importance.gather(2, winners.long().clamp(min=0)).masked_fill(winners < 0, 0.0)
    hit = (weight * (kernels.slots_of(winners, predicted) >= 0)).sum(dim=2)
    total = weight.sum(dim=2)
    return torch.where(total > 0, hit / total, 0.0).sum(dim=1), (total > 0).sum(dim=1)


def calibrate(layer: SparseLayer, valid: torch.Tensor, scores: list[torch.Tensor], kernels: ModuleType) -> None:
    """Choose the coefficients of each batch row and start its EMA, from the scores, fp32 [B, H, N], of the remembered
    prompt queries. Rows with fewer than 8 of them keep the default and an empty prior."""
    plan, memory = layer.plan, layer.memory
    batch, heads, blocks = scores[0].shape
    candidates = torch.tensor(GRID, dtype=torch.float32, device=valid.device)
    ema = candidates.repeat_interleave(batch, dim=0)  # [C * B, 3], candidate-major
    level = torch.full((len(ema), heads, blocks), float("nan"), device=valid.device)
    trend = torch.zeros_like(level)
    rate = torch.zeros(len(ema), device=valid.device)
    heads_seen = torch.zeros(batch, device=valid.device)
    for index, raw in enumerate(scores):
        importance = kernels.normalise(raw)
        winners = top_blocks(kernels, raw, plan.free_blocks)
        repeated = importance.repeat(len(candidates), 1, 1)
        if index:
            predicted = top_blocks(kernels, kernels.ema_predict(level, trend, ema), min(plan.predicted_blocks, blocks))
            hits, seen = hit_weights(predicted, winners.repeat(len(candidates), 1, 1), repeated, kernels)
            rate, heads_seen = rate + hits, heads_seen + seen[:batch]
        level, trend = kernels.ema_update(level, trend, repeated, ema)
    best = (rate.view(-1, batch) / heads_seen.clamp(min=1)).argmax(dim=0)
    chosen = best * batch + torch.arange(batch, device=valid.device)
    enough = valid[:, memory.columns].sum(dim=1) >= MIN_QUERIES
    known = enough[:, None, None]
    memory.start(
        torch.where(enough[:, None], ema[chosen], candidates[0]),
        Prior(
            torch.where(known, winners, -1),
            torch.where(known, level[chosen], float("nan")),
            torch.where(known, trend[chosen], 0.0),
        ),
    )
