"""One decode token of one layer: predict -> speculate || select -> repair and merge || update."""

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .blocks import rope_blocks
from .bundled import reference
from .calibration import calibrate
from .config import DEFAULT_EMA, LayerPlan
from .layer import SparseLayer
from .ops import traceable
from .overlap import Late, Overlap
from .predictor import Expected, Prior
from .report import Statistics, TraceEntry
from .selectors import SELECTORS, Scope
from .tokens import Tokens

if TYPE_CHECKING:
    from .bundled.reference import Partials

_REMEMBERED = ("predicted", "previous")  # the top-k starts from what the last token left
_WIDEST = 65536  # slots of an empty trace entry, where a budget is meant to be endless


class Token(NamedTuple):
    """A query token as every layer of the same plan sees it.

    column, step: its own column and decode step, on the host.  valid: bool [B, T].  start, end, length: [B], the row's
    first column, the column after the token's own, and how many lie between.  selects: bool [B], the rows that no
    longer fit.  last: [B], blocks at or past it aren't scored; next_last: that of the token to come.
    forced: int32 [B, 1, F], sinks and last blocks of the rows that select; -1 where no token is left in one.
    next_forced: those of the token to come, if its row selects then, also blocks that turn out to be empty.
    rope: int32 [B, 1, K], the blocks RoPE favours, where they are the hint.
    """

    column: int
    step: int
    valid: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    selects: torch.Tensor
    length: torch.Tensor
    last: torch.Tensor
    forced: torch.Tensor
    next_last: torch.Tensor
    next_forced: torch.Tensor
    rope: torch.Tensor | None = None


def token_at(
    tokens: Tokens,
    column: int,
    step: int,
    plan: LayerPlan,
    device: torch.device,
    inv_freq: torch.Tensor | None = None,
    kernels: Any = reference,
) -> Token:
    """The query token in `column`, worked out by the first layer that asks and shared by the others."""
    key = (column, plan.block_size, plan.fits, plan.sink_blocks, plan.local_blocks, device)
    if key not in tokens.shared:
        valid, start, newest_end = tokens.on(device)
        later = tokens.length - 1 - column
        end = newest_end - later if later else newest_end  # from the device: a captured step is replayed as it grows
        reach = kernels.forced_blocks(
            valid, start, end, plan.fits, plan.block_size, plan.sink_blocks, plan.local_blocks
        )
        rope = None
        if plan.hint == "rope" and inv_freq is not None:
            rope = rope_blocks(inv_freq, start, column, plan.block_size, plan.sink_blocks, reach.last, plan.free_blocks)
        tokens.shared[key] = Token(column, step, valid, start, end, **reach._asdict(), rope=rope)
    return tokens.shared[key]


class Selection(NamedTuple):
    """int32 block ids, [B, H, ..], ascending, -1 padded: with the forced ones; chosen by score; scores [B, H, N]."""

    selected: torch.Tensor
    free: torch.Tensor
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
    scope = Scope(plan.sink_blocks, token.last, token.length, scale)
    scores = SELECTORS[plan.selector].checked_scores(kernels, query, layer.summaries, scope, plan)
    selected, free = kernels.select_blocks(scores, token.forced, plan.free_blocks, hint=hint)
    return Selection(selected, free, scores)


def expect(
    layer: SparseLayer, prior: Prior | None, token: Token, heads: int, kernels: ModuleType, ema: torch.Tensor
) -> Expected:
    """What is attended to before the selection is known: the forced blocks and those that the prior expects, -1 where
    it expects nothing."""
    if prior is not None and prior.expected is not None:
        return prior.expected
    blocks = layer.scored_blocks(token.column)
    slots = min(layer.plan.predicted_blocks, blocks)
    if prior is None or prior.level is None:
        nothing = token.forced.new_full((token.forced.shape[0], heads, slots), -1)
        return Expected(torch.cat([token.forced.expand(-1, heads, -1), nothing], dim=2), nothing)
    level, trend = prior.ema_state(blocks)
    columns = torch.arange(blocks, device=level.device)
    selectable = (columns >= layer.plan.sink_blocks) & (columns < token.last[:, None])  # none where the row fits
    scores = kernels.ema_predict(level, trend, ema).masked_fill(~selectable[:, None], float("nan"))
    return Expected(*kernels.select_blocks(scores, token.forced, slots))


def _update(
    layer: SparseLayer,
    token: Token,
    selection: Selection,
    kernels: ModuleType,
    ema: torch.Tensor,
    threshold: torch.Tensor | None,
) -> torch.Tensor | None:
    """Remember what the token selected, and expect the next one's. Returns the importance of its blocks, None where
    nothing is predicted."""
    plan, prior, scores = layer.plan, layer.memory.prior, selection.scores
    if not plan.predicted_blocks:
        layer.memory.advance(token.column, Prior(selection.free, threshold=threshold))
        return None
    if prior is None or prior.level is None:
        state = (torch.full_like(scores, float("nan")), torch.zeros_like(scores))
    else:
        state = prior.ema_state(scores.shape[2])
    level, trend, hopes, importance = kernels.ema_step(scores, *state, ema, plan.sink_blocks, token.next_last)
    slots = min(plan.predicted_blocks, scores.shape[2])
    expected = Expected(*kernels.select_blocks(hopes, token.next_forced, slots))
    layer.memory.advance(token.column, Prior(selection.free, level, trend, expected, threshold))
    return importance


def _remember(
    attention: Any,
    layer_idx: int,
    statistics: Statistics,
    selection: Selection,
    predicted: torch.Tensor,
    ema: torch.Tensor,
) -> None:
    """What the next token starts from, and the counts of this one."""
    layer, token, kernels = attention.layer, attention.token, attention.kernels
    threshold = attention.threshold_after(selection) if layer.plan.hint in _REMEMBERED else None
    importance = _update(layer, token, selection, kernels, ema, threshold)
    numbers = _count(statistics, layer_idx, layer, selection)
    first = layer.plan.sink_blocks
    kernels.tally(numbers, selection.selected, selection.free, predicted, importance, first, attention.end)


class BlockAttention:
    """How one token attends where each KV head selects blocks of keys. query: [B, H, G, D], post-RoPE."""

    def __init__(
        self, layer: SparseLayer, query: torch.Tensor, token: Token, kernels: ModuleType, scale: float
    ) -> None:
        self.layer, self.query, self.token, self.kernels, self.scale = layer, query, token, kernels, scale
        self.heads = query.shape[1]
        self.end = token.last  # behind what is scored, as the counters take it
        self._data = (query, layer.keys, layer.values, token.valid, token.start)
        self._how: dict[str, Any] = dict(scale=scale, block_size=layer.plan.block_size)

    def calibrate(self) -> None:
        """By the remembered prompt queries, if there are any that haven't been used."""
        if self.layer.memory.uncalibrated:
            calibrate(self.layer, self.token.valid, self.token.start, self.kernels, self.scale)

    def speculate(self, early: torch.Tensor) -> "Partials":
        return self.kernels.block_partials(*self._data, early, self.token.end, **self._how)

    def select(self, predicted: torch.Tensor | None, previous: torch.Tensor | None) -> Selection:
        """predicted, previous: what may hint at the winners, as the settings ask."""
        rope = self.token.rope
        hint = previous if predicted is None else predicted
        if hint is None and rope is not None:
            hint = rope.expand(-1, self.heads, -1)
        return select(self.layer, self.query, self.token, self.kernels, self.scale, hint)

    def threshold_after(self, selection: Selection) -> None:
        """Rows of blocks are short: their top-k reads them whole, and starts from nothing."""

    def repair(self, attended: torch.Tensor, early: torch.Tensor, speculative: Any) -> torch.Tensor:
        return self.kernels.repair_merge(*self._data, attended, self.token.end, early, speculative, **self._how)

    def traced(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids as a trace has them: counted from the row's first real token."""
        return ids


def decode_step(
    attention: Any,
    layer_idx: int,
    statistics: Statistics,
    trace: bool,
    late: Late | None = None,
    overlap: Overlap | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Predict, speculate beside the selection, repair and merge, and remember: `BlockAttention` or another class of its
    methods says how. Returns its result and the ids attended to, int32 [B, H, K].

    late: joins what is remembered and counted, if the caller does that later: it then begins behind attention, beside
    what follows, and is in the way of neither.  overlap: the caller's, if something is under way in it that attention
    is to wait for.
    """
    layer, token, kernels = attention.layer, attention.token, attention.kernels
    plan, like = layer.plan, token.forced
    batch, device = token.valid.shape[0], token.valid.device
    attention.calibrate()
    prior = layer.memory.prior
    ema = layer.memory.coefficients(plan.ema or DEFAULT_EMA, batch, device)
    overlap = overlap or Overlap(device)

    early = predicted = like.new_empty((batch, attention.heads, 0))  # serial: nothing is early
    speculative = None
    if plan.predicted_blocks:
        early, predicted = expect(layer, prior, token, attention.heads, kernels, ema)  # here: also a hint
        with overlap.beside():
            speculative = attention.speculate(early)

    hints = plan.hint in _REMEMBERED and prior is not None
    foreseen = hints and plan.hint == "predicted" and plan.predicted_blocks > 0
    previous = prior.winners if hints and not foreseen and prior is not None else None
    selection = attention.select(predicted if foreseen else None, previous)
    overlap.join()
    attended = selection.selected
    if plan.superset:
        extra = predicted.masked_fill(kernels.slots_of(predicted, attended) >= 0, -1)
        attended = kernels.ascending(torch.cat([attended, extra], dim=-1))

    given = (attention, layer_idx, statistics, selection, predicted, ema)
    if late is None:
        with overlap.beside():
            _remember(*given)
    output = attention.repair(attended, early, speculative)
    if late is None:
        overlap.join()
    else:
        with late.behind(device, selection, early, predicted):
            _remember(*given)
    if trace:
        free = selection.free
        missed = kernels.ascending(free.masked_fill(kernels.slots_of(free, predicted) >= 0, -1))
        lists = (attention.traced(ids) for ids in (predicted, selection.selected, missed))
        statistics.trace.append(TraceEntry(token.step, layer_idx, *lists))
    return output, attended


def decode_token(
    layer: SparseLayer,
    layer_idx: int,
    query: torch.Tensor,
    token: Token,
    kernels: ModuleType,
    scale: float,
    statistics: Statistics,
    trace: bool,
    late: Late | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of one query token; the layer's K/V and summaries hold everything up to it.

    Args:
        query: [B, H, G, D], post-RoPE.  scale: of the logits.  late: as `decode_step`.

    Returns:
        fp32 [B, H, G, D], of use only in the rows that select, and the blocks attended to, int32 [B, H, K].
    """
    kernels = traceable(kernels)
    attention = BlockAttention(layer, query, token, kernels, scale)
    return decode_step(attention, layer_idx, statistics, trace, late)


def prefill_token(
    layer: SparseLayer, query: torch.Tensor, token: Token, kernels: ModuleType, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of one prompt token: as `decode_token`, but nothing is predicted, remembered or counted."""
    kernels = traceable(kernels)
    data = (query, layer.keys, layer.values, token.valid, token.start)
    blocks = select(layer, query, token, kernels, scale).selected
    partials = kernels.block_partials(*data, blocks, token.end, scale=scale, block_size=layer.plan.block_size)
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


def _count(statistics: Statistics, layer_idx: int, layer: SparseLayer, selection: Selection) -> torch.Tensor:
    """The layer's counters, for the kernel that adds this token to them: no host sync."""
    statistics.bytes_per_block[layer_idx] = layer.plan.block_size * layer.bytes_per_token
    statistics.bytes_per_summary[layer_idx] = layer.bytes_per_summary
    statistics.selector_calls[layer_idx] += 1
    if layer.plan.predicted_blocks:
        statistics.ema[layer_idx] = layer.memory.ema
    return statistics.numbers(layer_idx, selection.free)
