"""Which (alpha, beta, gamma) predicts a prompt's blocks best (PRR, arXiv 2606.30389, section 4.2).

The last prompt queries are scored as if they were decoded. Each candidate of the grid predicts every one of them from
those before; the one with the best score-weighted hit rate wins, per batch row and layer, and the state it ends in
starts the EMA. All candidates are one batch, and so are queries but where each needs what the one before it left: a
kernel for each query, beside the rest of the prompt's layers.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from .blocks import top_blocks
from .config import DEFAULT_EMA
from .layer import SparseLayer
from .predictor import MIN_QUERIES, Prior
from .selectors import SELECTORS, Scope
from .tokens import Tokens

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


_AT_ONCE = 2**26  # pairs of blocks that are compared at a time
_HELD = 2**24  # numbers that are held at a time: summaries, once a query, and predicted scores


def _to(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the device, without a wait for what it does."""
    made = torch.tensor(values, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def prompt_scores(
    layer: SparseLayer, valid: torch.Tensor, start: torch.Tensor, kernels: ModuleType, scale: float
) -> torch.Tensor:
    """Of blocks: fp32 [Q, B, H, N], of the Q remembered prompt queries; NaN for blocks that one wouldn't have selected
    from, and for rows in which it is padding."""
    plan, memory = layer.plan, layer.memory
    assert memory.queries is not None
    columns = _to(memory.columns, torch.int64, start.device)[:, None]
    selectable = (columns - start) // plan.block_size - plan.local_blocks + 1
    last = torch.where(valid[:, columns[:, 0]].T, selectable, 0)
    length = columns + 1 - start
    selector, queries, scores = SELECTORS[plan.selector], memory.queries.permute(3, 0, 1, 2, 4), []
    many = max(1, _HELD // max(1, layer.summaries[0][0].numel()))
    for row in range(len(start)):  # its queries are a batch, whose summaries are the same
        parts = []
        for begin in range(0, len(queries), many):
            some = slice(begin, begin + many), row
            held = tuple(each[row].expand(len(queries[some]), *each.shape[1:]) for each in layer.summaries)
            scope = Scope(plan.sink_blocks, last[some].contiguous(), length[some].contiguous(), scale)
            parts.append(selector.checked_scores(kernels, queries[some], held, scope, plan))
        scores.append(torch.cat(parts))
    return torch.stack(scores, dim=1)


def _predictions(raw: torch.Tensor, ema: torch.Tensor, slots: int, kernels: ModuleType) -> tuple[torch.Tensor, ...]:
    """What each candidate predicts of all queries but the first, int32 [Q - 1, C * B, H, slots], and the level and
    trend that it ends with, [C * B, H, N]. raw: [Q, B, H, N].  ema: [C * B, 3], candidate-major."""
    batch, heads, blocks = raw.shape[1:]
    candidates = len(ema) // batch
    level = torch.full((len(ema), heads, blocks), float("nan"), device=raw.device)
    trend, everything = torch.zeros_like(level), torch.full((len(ema),), blocks, device=raw.device)
    predicted: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for index, scores in enumerate(raw):
        repeated = scores.expand(candidates, -1, -1, -1).flatten(0, 1)  # a view of one row
        step = kernels.ema_step(repeated, level, trend, ema, 0, everything)
        level, trend = step.level, step.trend
        if index + 1 < len(raw):
            expected.append(step.expected)
        if expected and (index + 1 >= len(raw) - 1 or (len(expected) + 1) * level.numel() > _HELD):
            best = top_blocks(kernels, torch.cat(expected), slots)
            predicted.append(best.unflatten(0, (len(expected), -1)))
            expected.clear()
    return torch.cat(predicted) if predicted else raw.new_empty((0,)), level, trend


def hit_rates(
    predicted: torch.Tensor, winners: torch.Tensor, importance: torch.Tensor, kernels: ModuleType
) -> torch.Tensor:
    """fp64 [C, B]: the mean over queries and heads of (importance of predicted winners / importance of all), where
    that is above 0. predicted: int32 [Q, C, B, H, P].  winners: int32 [Q, B, H, K].  importance: [Q, B, H, N]."""
    weight = importance.gather(3, winners.long().clamp(min=0)).masked_fill(winners < 0, 0.0)
    total = weight.sum(dim=3)
    hits = torch.zeros(predicted.shape[1:3], dtype=torch.float64, device=weight.device)
    a_query = max(predicted[0].numel() * winners.shape[3], 1)
    for begin in range(0, len(predicted), many := max(1, _AT_ONCE // a_query)):
        of = slice(begin, begin + many)
        guess, chosen = predicted[of], winners[of][:, None].expand(-1, predicted.shape[1], -1, -1, -1)
        found = kernels.slots_of(chosen.flatten(0, 2), guess.flatten(0, 2)) >= 0
        hit = (weight[of][:, None] * found.view(chosen.shape)).sum(dim=4)
        share = torch.where(total[of] > 0, 1 / total[of], 0.0)[:, None]
        hits += (hit * share).double().sum(dim=(0, 3))
    return hits / (total > 0).sum(dim=(0, 2)).clamp(min=1)


def calibrate(layer: SparseLayer, valid: torch.Tensor, start: torch.Tensor, kernels: ModuleType, scale: float) -> None:
    """Choose the coefficients of each batch row and start its EMA, by the remembered prompt queries. Rows with fewer
    than 8 of them keep the default and an empty prior. No wait for the device."""
    plan, memory = layer.plan, layer.memory
    raw = prompt_scores(layer, valid, start, kernels, scale)
    batch, _, blocks = raw.shape[1:]
    candidates = _to(GRID, torch.float32, raw.device)
    ema = candidates.repeat_interleave(batch, dim=0)  # [C * B, 3], candidate-major
    predicted, level, trend = _predictions(raw, ema, min(plan.predicted_blocks, blocks), kernels)
    winners = top_blocks(kernels, raw.flatten(0, 1), plan.free_blocks).unflatten(0, raw.shape[:2])
    if len(raw) > 1:
        rates = hit_rates(
            predicted.unflatten(1, (-1, batch)), winners[1:], kernels.normalise(raw[1:]), kernels
        )  # equal ones differ in how they were summed
        best = (rates * 2**20).round().argmax(dim=0)
    else:
        best = torch.zeros(batch, dtype=torch.int64, device=raw.device)
    chosen = best * batch + torch.arange(batch, device=raw.device)
    enough = valid[:, _to(memory.columns, torch.int64, raw.device)].sum(dim=1) >= MIN_QUERIES
    known = enough[:, None, None]
    memory.start(
        torch.where(enough[:, None], ema[chosen], candidates[0]),
        Prior(
            torch.where(known, winners[-1], -1),
            torch.where(known, level[chosen], float("nan")),
            torch.where(known, trend[chosen], 0.0),
        ),
    )


def calibrate_beside(layer: SparseLayer, tokens: Tokens, kernels: ModuleType, scale: float) -> None:
    """`calibrate`, and the summaries that it reads, on a stream of its own: the prompt's later layers go on meanwhile.
    The layer's next forward waits for it."""
    grid = tokens.on(layer.keys.device)
    with layer.beside(grid) as mine:
        layer.summarise(kernels, mine)
        calibrate(layer, mine.valid, mine.start, kernels, scale)
