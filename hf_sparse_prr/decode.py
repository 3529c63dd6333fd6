"""One decode token of one layer: predict -> speculate || select -> repair and merge -> update."""

from types import ModuleType
from typing import NamedTuple

import torch

from .cache import SparseLayer
from .config import LayerPlan
from .predictor import Prior
from .report import Statistics, TraceEntry
from .selectors import SELECTORS

_NO_BLOCK = torch.iinfo(torch.int32).max


class Token(NamedTuple):
    """Where a query token stands. valid: bool [B, T].  start: [B].  column: its own.  step: its decode step.
    selects: bool [B], the batch rows that are longer than their budget."""

    valid: torch.Tensor
    start: torch.Tensor
    column: int
    step: int
    selects: torch.Tensor


class Selection(NamedTuple):
    """int32 block ids, [B, H, ..], ascending, -1 padded: chosen by score; with the forced ones; scores [B, H, N]."""

    free: torch.Tensor
    selected: torch.Tensor
    scores: torch.Tensor


def top_blocks(
    kernels: ModuleType, scores: torch.Tensor, k: int, hint: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 [B, H, k]: the best-scored blocks of each KV head."""
    rows = scores.flatten(0, 1)
    hints = None if hint is None else hint.flatten(0, 1)
    return kernels.gvr_topk(rows, k, hint=hints).view(*scores.shape[:2], k)


def ascending(blocks: torch.Tensor) -> torch.Tensor:
    """Block ids in order, -1 last."""
    ordered = blocks.masked_fill(blocks < 0, _NO_BLOCK).sort(dim=-1).values
    return ordered.masked_fill(ordered == _NO_BLOCK, -1)


def forced_blocks(token: Token, plan: LayerPlan) -> torch.Tensor:
    """int32 [B, F]: sinks and the last blocks of the rows that select; -1 for other rows and where no token is left."""
    newest = (token.column - token.start) // plan.block_size
    local = newest[:, None] - torch.arange(plan.local_blocks - 1, -1, -1, device=newest.device)
    sinks = torch.arange(plan.sink_blocks, device=newest.device).expand(newest.shape[0], -1)
    blocks = torch.cat([sinks, local], dim=1)
    tokens = (token.start[:, None] + blocks * plan.block_size)[..., None] + torch.arange(
        plan.block_size, device=newest.device
    )
    within = tokens.clamp(0, token.valid.shape[1] - 1).flatten(1)
    holds = token.valid.gather(1, within).view(tokens.shape) & (tokens <= token.column)
    return torch.where(token.selects[:, None] & holds.any(dim=-1), blocks, -1).to(torch.int32)


def select(
    layer: SparseLayer, query: torch.Tensor, token: Token, kernels: ModuleType, hint: torch.Tensor | None
) -> Selection:
    """The blocks that `query` [B, H, G, D] attends to: forced ones and the best of the rest."""
    plan = layer.plan
    newest = (token.column - token.start) // plan.block_size
    last = (newest - plan.local_blocks + 1).masked_fill(~token.selects, 0)
    scores = SELECTORS[plan.selector].scores(kernels, query, layer.summaries, plan.sink_blocks, last)
    free = top_blocks(kernels, scores, plan.free_blocks, hint)
    forced = forced_blocks(token, plan)[:, None].expand(-1, query.shape[1], -1)
    return Selection(free, ascending(torch.cat([forced, free], dim=-1)), scores)


def predict(layer: SparseLayer, token: Token, kernels: ModuleType, ema: torch.Tensor, blocks: int) -> torch.Tensor:
    """int32 [B, H, P]: the blocks the prior expects; all -1 where it expects nothing."""
    level, trend = layer.memory.prior.ema_state(blocks)
    expected = kernels.ema_predict(level, trend, ema)
    expected = expected.masked_fill(~token.selects[:, None, None], float("nan"))
    return top_blocks(kernels, expected, layer.plan.predicted_blocks)


def decode_token(
    layer: SparseLayer,
    layer_idx: int,
    query: torch.Tensor,
    token: Token,
    kernels: ModuleType,
    scale: float,
    statistics: Statistics,
    trace: bool,
) -> torch.Tensor:
    """Sparse attention of one query token; the layer's K/V and summaries hold everything up to it.

    Args:
        query: [B, H, G, D], post-RoPE.

    Returns:
        fp32 [B, H, G, D]; of use only in the rows that select.
    """
    plan, memory = layer.plan, layer.memory
    batch, heads = query.shape[:2]
    blocks = layer.summaries[0].shape[2]
    ema = memory.coefficients(plan.ema, batch, query.device)
    speculates = plan.predicted_blocks > 0

    if speculates and memory.prior is not None:
        predicted = predict(layer, token, kernels, ema, blocks)
    else:
        predicted = query.new_full((batch, heads, plan.predicted_blocks), -1, dtype=torch.int32)
    attend = dict(scale=scale, block_size=plan.block_size)
    data = (query, layer.keys, layer.values, token.valid, token.start)
    end = token.column + 1
    speculative = kernels.block_partials(*data, predicted, end, **attend)

    hint = None
    if plan.hint != "none" and memory.prior is not None:
        hint = predicted if speculates and plan.hint == "predicted" else memory.prior.winners
    selection = select(layer, query, token, kernels, hint)
    attended = selection.selected
    if plan.superset:
        extra = predicted.masked_fill(kernels.slots_of(predicted, attended) >= 0, -1)
        attended = ascending(torch.cat([attended, extra], dim=-1))
    output = kernels.repair_merge(*data, attended, end, predicted, speculative, **attend)

    importance = kernels.normalise(selection.scores) if speculates else None
    _record(statistics, layer_idx, layer, token, predicted, selection, importance, kernels, trace)
    if importance is None:
        memory.advance(token.column, Prior(selection.free))
    else:
        if memory.prior is None:
            state = (torch.full_like(importance, float("nan")), torch.zeros_like(importance))
        else:
            state = memory.prior.ema_state(blocks)
        memory.advance(token.column, Prior(selection.free, *kernels.ema_update(*state, importance, ema)))
    return output


def record_fitting(
    statistics: Statistics, layer_idx: int, plan: LayerPlan, like: torch.Tensor, heads: int, step: int
) -> None:
    """Trace a token whose batch rows all fit their budget: nothing was predicted, nothing selected."""

    def none(slots: int) -> torch.Tensor:
        return like.new_full((like.shape[0], heads, slots), -1, dtype=torch.int32)

    entry = TraceEntry(step, layer_idx, none(plan.predicted_blocks), none(plan.blocks), none(plan.free_blocks))
    statistics.trace.append(entry)


def _record(
    statistics: Statistics,
    layer_idx: int,
    layer: SparseLayer,
    token: Token,
    predicted: torch.Tensor,
    selection: Selection,
    importance: torch.Tensor | None,
    kernels: ModuleType,
    trace: bool,
) -> None:
    """Count what this token predicted, selected and read. No host sync."""
    free = selection.free
    chosen = free >= 0
    hits = kernels.slots_of(free, predicted) >= 0
    if importance is None:
        weight = torch.zeros_like(free, dtype=torch.float64)
    else:
        weight = importance.gather(2, free.long().clamp(min=0)).masked_fill(~chosen, 0.0).double()
    scored = (~selection.scores.isnan()).sum()
    computed = (selection.selected >= 0).sum() + (predicted >= 0).sum() - hits.sum()
    counts = [hits.sum(), chosen.sum(), (predicted >= 0).sum(), (weight * hits).sum(), weight.sum(), computed, scored]
    statistics.add(layer_idx, torch.stack([count.double() for count in counts]))
    statistics.selector_calls[layer_idx] += 1
    statistics.bytes_per_block[layer_idx] = layer.plan.block_size * layer.bytes_per_token
    statistics.bytes_per_summary[layer_idx] = layer.bytes_per_summary
    if trace:
        missed = ascending(free.masked_fill(hits, -1))
        statistics.trace.append(
            TraceEntry(token.step, layer_idx, predicted, selection.selected, missed)
        )
