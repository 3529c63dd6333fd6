"""One decode token of one layer: predict -> speculate || select -> repair and merge -> update."""

from types import ModuleType
from typing import NamedTuple

import torch

from .blocks import ascending, rope_blocks, top_blocks
from .calibration import calibrate
from .config import DEFAULT_EMA, LayerPlan
from .layer import SparseLayer
from .predictor import Prior
from .report import Statistics, TraceEntry
from .selectors import SELECTORS, Scope
from .tokens import Tokens

_WIDEST = 65536  # slots of an empty trace entry, where a budget is meant to be endless


class Token(NamedTuple):
    """A query token as every layer of the same plan sees it.

    column, step: its own column and decode step.  valid: bool [B, T].  start: [B].
    selects: bool [B], the rows that no longer fit.  last: [B], blocks at or past it aren't scored.
    forced: int32 [B, 1, F], sinks and last blocks of the rows that select; -1 where no token is left in one.
    rope: int32 [B, 1, K], the blocks RoPE favours, where they are the hint.
    """

    column: int
    step: int
    valid: torch.Tensor
    start: torch.Tensor
    selects: torch.Tensor
    last: torch.Tensor
    forced: torch.Tensor
    rope: torch.Tensor | None = None


def token_at(
    tokens: Tokens,
    column: int,
    step: int,
    plan: LayerPlan,
    device: torch.device,
    inv_freq: torch.Tensor | None = None,
) -> Token:
    """The query token in `column`, worked out by the first layer that asks and shared by the others."""
    key = (column, plan.block_size, plan.fits, plan.sink_blocks, plan.local_blocks, device)
    if key not in tokens.shared:
        valid, start = tokens.on(device)
        size = plan.block_size
        selects = column + 1 - start > plan.fits
        newest = (column - start) // size
        local = newest[:, None] - torch.arange(plan.local_blocks - 1, -1, -1, device=device)
        sinks = torch.arange(plan.sink_blocks, device=device).expand(newest.shape[0], -1)
        forced = torch.cat([sinks, local], dim=1)
        members = (start[:, None] + forced * size)[..., None] + torch.arange(size, device=device)
        real = valid.gather(1, members.clamp(0, valid.shape[1] - 1).flatten(1)).view(members.shape)
        holds = (real & (members <= column)).any(dim=-1) & selects[:, None]
        forced = torch.where(holds, forced, -1).to(torch.int32)[:, None]
        last = torch.where(selects, newest - plan.local_blocks + 1, 0)
        rope = None
        if plan.hint == "rope" and inv_freq is not None:
            rope = rope_blocks(inv_freq, start, column, size, plan.sink_blocks, last, plan.free_blocks)
        tokens.shared[key] = Token(column, step, valid, start, selects, last, forced, rope)
    return tokens.shared[key]


class Selection(NamedTuple):
    """int32 block ids, [B, H, ..], ascending, -1 padded: chosen by score; with the forced ones; scores [B, H, N]."""

    free: torch.Tensor
    selected: torch.Tensor
    scores: torch.Tensor


def select(
    layer: SparseLayer,
    query: torch.Tensor,
    token: Token,
    kernels: ModuleType,
    scale: float,
    hint: torch.Tensor | None = None,
) -> Selection:
    """The blocks that `query` [B, H, G, D] attends to: forced ones and the best of the rest."""
    plan = layer.plan
    scope = Scope(plan.sink_blocks, token.last, token.column + 1 - token.start, scale)
    scores = SELECTORS[plan.selector].checked_scores(kernels, query, layer.summaries, scope, plan)
    free = top_blocks(kernels, scores, plan.free_blocks, hint)
    forced = token.forced.expand(-1, query.shape[1], -1)
    return Selection(free, ascending(torch.cat([forced, free], dim=-1)), scores)


def predict(layer: SparseLayer, prior: Prior, token: Token, kernels: ModuleType, ema: torch.Tensor) -> torch.Tensor:
    """int32 [B, H, P]: the blocks the prior expects; all -1 where it expects nothing."""
    level, trend = prior.ema_state(layer.summaries[0].shape[2])
    columns = torch.arange(level.shape[2], device=level.device)
    selectable = (columns >= layer.plan.sink_blocks) & (columns < token.last[:, None])  # none where the row fits
    expected = kernels.ema_predict(level, trend, ema).masked_fill(~selectable[:, None], float("nan"))
    return top_blocks(kernels, expected, min(layer.plan.predicted_blocks, level.shape[2]))


def decode_token(
    layer: SparseLayer,
    layer_idx: int,
    query: torch.Tensor,
    token: Token,
    kernels: ModuleType,
    scale: float,
    statistics: Statistics,
    trace: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of one query token; the layer's K/V and summaries hold everything up to it.

    Args:
        query: [B, H, G, D], post-RoPE.  scale: of the logits.

    Returns:
        fp32 [B, H, G, D], of use only in the rows that select, and the blocks attended to, int32 [B, H, K].
    """
    plan = layer.plan
    if layer.memory.uncalibrated:
        calibrate(layer, token.valid, token.start, kernels, scale)
    prior = layer.memory.prior
    batch, heads = query.shape[:2]
    ema = layer.memory.coefficients(plan.ema or DEFAULT_EMA, batch, query.device)
    attend = dict(scale=scale, block_size=plan.block_size)
    data = (query, layer.keys, layer.values, token.valid, token.start)
    end = token.column + 1

    if plan.predicted_blocks and prior is not None:
        predicted = predict(layer, prior, token, kernels, ema)
    else:
        slots = min(plan.predicted_blocks, layer.summaries[0].shape[2])
        predicted = query.new_full((batch, heads, slots), -1, dtype=torch.int32)
    speculative = kernels.block_partials(*data, predicted, end, **attend)

    hint = token.rope if token.rope is None else token.rope.expand(-1, heads, -1)
    if plan.hint in ("predicted", "previous") and prior is not None:
        hint = predicted if plan.hint == "predicted" and plan.predicted_blocks else prior.winners
    selection = select(layer, query, token, kernels, scale, hint)
    attended = selection.selected
    if plan.superset:
        extra = predicted.masked_fill(kernels.slots_of(predicted, attended) >= 0, -1)
        attended = ascending(torch.cat([attended, extra], dim=-1))
    output = kernels.repair_merge(*data, attended, end, predicted, speculative, **attend)

    importance = kernels.normalise(selection.scores) if plan.predicted_blocks else None
    missed = count(statistics, layer_idx, layer, token, predicted, selection, importance, kernels)
    if trace:
        statistics.trace.append(TraceEntry(token.step, layer_idx, predicted, selection.selected, missed))
    if importance is None:
        layer.memory.advance(token.column, Prior(selection.free))
    else:
        if prior is None:
            state = (torch.full_like(importance, float("nan")), torch.zeros_like(importance))
        else:
            state = prior.ema_state(importance.shape[2])
        layer.memory.advance(token.column, Prior(selection.free, *kernels.ema_update(*state, importance, ema)))
    return output, attended


def prefill_token(
    layer: SparseLayer, query: torch.Tensor, token: Token, kernels: ModuleType, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of one prompt token: as `decode_token`, but nothing is predicted, remembered or counted."""
    data = (query, layer.keys, layer.values, token.valid, token.start)
    blocks = select(layer, query, token, kernels, scale).selected
    partials = kernels.block_partials(*data, blocks, token.column + 1, scale=scale, block_size=layer.plan.block_size)
    return kernels.merge_partials(partials), blocks


def attention_weights(
    query: torch.Tensor, keys: torch.Tensor, token: Token, attended: torch.Tensor, scale: float, block_size: int
) -> torch.Tensor:
    """What a user who asks for attentions sees of a sparse token: fp32 [B, H, G, T], 0 outside the attended blocks.

    query: [B, H, G, D].  keys: [B, H, T, D].
    """
    columns = torch.arange(keys.shape[2], device=keys.device)
    block = (columns - token.start[:, None]) // block_size
    member = torch.zeros((*attended.shape[:2], keys.shape[2] // block_size + 2), dtype=torch.bool, device=keys.device)
    member.scatter_(2, attended.long() + 1, True)
    member[:, :, 0] = False  # unused slots, and columns before the first block
    seen = member.gather(2, (block.clamp(min=-1) + 1)[:, None].expand(-1, attended.shape[1], -1))
    seen &= (token.valid[:, : keys.shape[2]] & (columns <= token.column))[:, None]
    logits = (query.float() * scale) @ keys.float().transpose(2, 3)
    return torch.softmax(logits.masked_fill(~seen[:, :, None], float("-inf")), dim=-1)


def record_fitting(statistics: Statistics, layer_idx: int, plan: LayerPlan, like: torch.Tensor, step: int) -> None:
    """Trace a token whose batch rows all fit their budget: nothing predicted, nothing selected. like: [B, H, ..]."""

    def none(slots: int) -> torch.Tensor:
        return like.new_full((*like.shape[:2], min(slots, _WIDEST)), -1, dtype=torch.int32)

    entry = TraceEntry(
        step, layer_idx, none(min(plan.predicted_blocks, plan.blocks)), none(plan.blocks), none(plan.free_blocks)
    )
    statistics.trace.append(entry)


def count(
    statistics: Statistics,
    layer_idx: int,
    layer: SparseLayer,
    token: Token,
    predicted: torch.Tensor,
    selection: Selection,
    importance: torch.Tensor | None,
    kernels: ModuleType,
) -> torch.Tensor:
    """Add this token to the layer's counters, without a host sync. Returns the missed blocks, as in the trace."""
    free, plan = selection.free, layer.plan
    statistics.bytes_per_block[layer_idx] = plan.block_size * layer.bytes_per_token
    statistics.bytes_per_summary[layer_idx] = layer.bytes_per_summary
    statistics.selector_calls[layer_idx] += 1
    scored = (token.last - plan.sink_blocks).clamp(min=0).sum() * free.shape[1]
    attended = (selection.selected >= 0).sum()
    if importance is None:
        statistics.add(layer_idx, torch.stack([attended, scored]), None)
        return free
    statistics.ema[layer_idx] = layer.memory.ema
    hit, chosen = kernels.slots_of(free, predicted) >= 0, free >= 0
    hits, guesses = hit.sum(), (predicted >= 0).sum()
    weight = importance.gather(2, free.long().clamp(min=0)).masked_fill(~chosen, 0.0).double()
    counts = torch.stack([attended + guesses - hits, scored, hits, chosen.sum(), guesses])
    # The paper's H (section 4.2): the share of a selection's score that was predicted, every prediction counting alike
    total = weight.sum(dim=2)
    asked = (total > 0) & (predicted >= 0).any(dim=2)
    shares = torch.where(asked, (weight * hit).sum(dim=2) / total, 0.0)
    statistics.add(layer_idx, counts, torch.stack([shares.sum(), asked.sum().double()]))
    return ascending(free.masked_fill(hit, -1))
