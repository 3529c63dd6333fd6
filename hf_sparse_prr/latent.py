"""How tokens of a model with an indexer of its own attend: over latents, to the tokens that its rule selects."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .decode import Selection, Token
from .indexed import IndexedLayer
from .tokens import Tokens


class Index(NamedTuple):
    """What the indexer asks of each query token. query: [B, Q, I, E], post-RoPE.  weights: fp32 [B, Q, I].
    scale: of the products."""

    query: torch.Tensor
    weights: torch.Tensor
    scale: float

    def part(self, begin: int, end: int) -> "Index":
        return self._replace(query=self.query[:, begin:end], weights=self.weights[:, begin:end])


def token_of(tokens: Tokens, column: int, step: int, topk: int, device: torch.device) -> Token:
    """The query token in `column`, for layers that select `topk` tokens: blocks of one, none of them forced. Ids are
    columns."""
    key = (column, "latent", topk, device)
    if key not in tokens.shared:
        valid, start, newest_end = tokens.on(device)
        later = tokens.length - 1 - column
        end = newest_end - later if later else newest_end
        nothing = torch.empty((valid.shape[0], 1, 0), dtype=torch.int32, device=device)
        tokens.shared[key] = Token(
            column=column, step=step, valid=valid, start=start, end=end, length=end - start,
            selects=end - start > topk, last=end, next_last=end, forced=nothing, next_forced=nothing,
        )  # fmt: skip
    return tokens.shared[key]


def select_tokens(
    layer: IndexedLayer,
    index: Index,
    valid: torch.Tensor,
    begin: int,
    topk: int,
    kernels: Any,
    mask: torch.Tensor | None = None,
    hint: torch.Tensor | None = None,
    threshold: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns that the query tokens in `begin` .. attend to, int32 [B, Q, K], ascending, -1 padded, and their
    scores, fp32 [B, Q, T]. Of tied scores the first columns win.

    mask: bool or additive [B or 1, Q, T], where it isn't causal x validity: it is heeded, and added, as by the stock
    indexer.  end: integer [B, Q], the column after each query token's own, where only the device knows it: `begin`
    isn't looked at then, and all columns of the buffer are scored, those from there on as NaN.
    """
    batch, count = index.query.shape[:2]
    columns = begin + count if end is None else layer.capacity
    own = torch.arange(begin + 1, columns + 1, device=valid.device)[None] if end is None else end
    hints = None if hint is None else hint.flatten(0, 1)
    if mask is not None:  # it says all that there is to say
        own, valid = torch.full_like(own, columns), torch.ones_like(valid)
    if columns <= topk:  # everything is selected: as if all scores were equal
        seen = valid[:, None, :columns] & (torch.arange(columns, device=valid.device) < own[:, :, None])
        scores = torch.zeros((batch, count, columns), device=valid.device).masked_fill_(~seen, float("nan"))
    else:
        assert layer.index_keys is not None
        held = (*index[:2], layer.index_keys[:, :columns], valid[:, :columns], own)
        if mask is None:
            return kernels.index_topk(*held, topk, scale=index.scale, hint=hints, threshold=threshold)
        scores = kernels.index_scores(*held, scale=index.scale)
    if mask is not None:
        mask = mask[:, :, :columns]
        hides = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
        biased = scores if mask.dtype == torch.bool else scores + mask
        scores = biased.masked_fill(hides, float("nan"))
    chosen = kernels.gvr_topk(scores.flatten(0, 1), min(topk, columns), hint=hints)
    return chosen.view(batch, count, -1), scores


class LatentAttention:
    """How one decode token attends: `decode.decode_step` drives it. query: [B, 1, H, C + A], absorbed.

    on_device: the token's column is known to the device alone, and every row selects.
    """

    heads = 1

    def __init__(
        self,
        layer: IndexedLayer,
        index: Index,
        query: torch.Tensor,
        token: Token,
        kernels: Any,
        scale: float,
        on_device: bool = False,
    ) -> None:
        self.layer, self.index, self.query = layer, index, query
        self.token, self.kernels, self.scale = token, kernels, scale
        self.attended: torch.Tensor | None = None  # int32 [B, 1, K], also of rows that select nothing
        # Tokens that are scored, as the counters take them
        self.end = token.length if on_device else token.length.masked_fill(~token.selects, 0)
        self._data = (layer.keys[:, 0], layer.values[:, 0])
        self._own = token.end[:, None] if on_device else None

    def calibrate(self) -> None:
        """Nothing: 81 candidates over tokens took 2.2 s a layer at 16K (one CPU thread), a step 10 ms."""

    def speculate(self, early: torch.Tensor) -> torch.Tensor | None:
        """What is read before the selection is known. None for kernels that would read it again: a listed row would
        have to be found among what is held. The counters take predictions as read all the same."""
        if getattr(self.kernels, "backend", "reference") != "reference":
            return None
        return self.kernels.gather_tokens(*self._data, early)

    def select(self, predicted: torch.Tensor | None, previous: torch.Tensor | None) -> Selection:
        """A row that fits attends to all its tokens, and counts as one that selects nothing."""
        token, topk = self.token, self.layer.plan.blocks
        prior = self.layer.memory.prior
        threshold = None if prior is None else prior.threshold
        hint = predicted
        if threshold is not None:  # it goes before a hint
            hint = None
        elif previous is not None:
            hint = previous + (previous >= 0).int()  # as far back as they were
        attended, scores = select_tokens(
            self.layer, self.index, token.valid, token.column, topk, self.kernels, hint=hint, threshold=threshold,
            end=self._own,
        )  # fmt: skip
        self.attended = attended
        if self._own is not None:
            return Selection(attended, attended, scores)
        selects = token.selects[:, None, None]
        chosen = torch.where(selects, attended, -1)
        return Selection(chosen, chosen, scores.masked_fill(~selects, float("nan")))

    def threshold_after(self, selection: Selection) -> torch.Tensor:
        """What the next token's top-k starts from."""
        return self.kernels.topk_threshold(selection.scores[:, 0], self.layer.plan.blocks)

    def repair(self, attended: torch.Tensor, early: torch.Tensor, speculative: torch.Tensor | None) -> torch.Tensor:
        """fp32 [B, 1, H, C]."""
        early = early[:, :, :0] if speculative is None else early
        return self.kernels.latent_attention(
            self.query, *self._data, self.attended, early, speculative, scale=self.scale
        )

    def traced(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids >= 0, ids - self.token.start[:, None, None].int(), -1)


def parts(begin: int, count: int, bytes_of: Any, workspace: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the query tokens, counted from 0, that are worked on at a time: as many as the workspace
    holds, one at least. bytes_of: what a query token takes, by the columns that there are."""
    at = 0
    while at < count:
        size = max(1, min(count - at, workspace // max(1, bytes_of(begin + count))))
        yield at, at + size
        at += size
