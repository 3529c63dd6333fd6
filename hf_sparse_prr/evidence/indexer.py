"""Training of an indexer, as its authors do it (arXiv 2512.02556): first it learns what dense attention attends to,
then both learn while attention reads only what is selected.

`training(model)` swaps the attention of a DSA model for one that can do so; stock attention selects without gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import kl_div, log_softmax, scaled_dot_product_attention

from hf_sparse_prr.latent import Index
from hf_sparse_prr.patches import family

_QUERIES = 1024  # whose index scores are worked on at a time


class State:
    """What the attention layers of one model share. phase: "dense", "warm-up" or "sparse".

    rows: [B, R] the query tokens whose attention the indexer is compared with.  losses: one a layer.
    """

    def __init__(self) -> None:
        self.phase = "dense"
        self.rows: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []
        self.logits: torch.Tensor | None = None  # [B, R, T] of the latest layer with an indexer
        self.seen: torch.Tensor | None = None  # bool [B, 1, T, T], what it selected


@contextmanager
def training(model: Any) -> Iterator[State]:
    """Swap the attention of every layer; the stock classes are back on leaving."""
    state, stock = State(), []
    base = family(model.config.model_type)
    trained = type(f"Training{base.__name__}", (_Training, base), {"state": state})
    for layer in model.model.layers:
        stock.append((layer.self_attn, type(layer.self_attn)))
        layer.self_attn.__class__ = trained
    try:
        yield state
    finally:
        for module, kind in stock:
            module.__class__ = kind


class _Training:
    """Mixed in before the patched class of a family, whose projections and RoPE it uses."""

    state: State

    def _index(self: Any, hidden: torch.Tensor, residual: torch.Tensor, rope: Any) -> tuple[Index | None, Any]:
        """The indexer's gradient stays in the indexer."""
        if self.state.phase == "dense":
            return None, None
        with torch.enable_grad():
            return super()._index(hidden.detach(), residual.detach(), rope)  # type: ignore[misc]

    def forward(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any) -> tuple[Any, ...]:
        state = self.state
        new = self.project(hidden_states, position_embeddings)
        keys, values = self.expand_kv(new.latent, new.key)
        query = torch.cat([new.nope, new.rope], dim=-1)
        if state.phase == "sparse" and new.asked is not None:
            state.seen = _selected(new.asked, new.index_key, self.config.index_topk)
        if state.phase != "dense":
            with torch.enable_grad():
                self._compare(new, query, keys)
        if state.phase == "sparse":
            output = scaled_dot_product_attention(query, keys, values, attn_mask=state.seen, scale=self.scaling)
        else:
            output = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=self.scaling)
        output = self.o_proj(output.transpose(1, 2).flatten(2))
        return (output, None, None) if self.hands_on else (output, None)

    def _compare(self: Any, new: Any, query: torch.Tensor, keys: torch.Tensor) -> None:
        """KL of the indexer's distribution from the heads' mean attention, over what is seen."""
        state = self.state
        if state.rows is None:
            return
        rows, total = state.rows, keys.shape[2]
        causal = torch.arange(total, device=rows.device) <= rows[:, :, None]
        if new.asked is not None:
            state.logits = scores(_rows(new.asked, rows), new.index_key)
        visible = causal
        if state.phase == "sparse":
            assert state.seen is not None
            visible = state.seen[:, 0].gather(1, rows[:, :, None].expand(-1, -1, total))
        with torch.no_grad():
            asked = query.gather(2, rows[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
            weights = (asked @ keys.transpose(2, 3)).float() * self.scaling
            target = weights.masked_fill(~visible[:, None], float("-inf")).softmax(-1).mean(1)
        found = log_softmax(state.logits.masked_fill(~visible, -1e9), dim=-1)
        state.losses.append(kl_div(found, target, reduction="none").sum(-1).mean())


def scores(index: Index, keys: torch.Tensor) -> torch.Tensor:
    """index scores [B, Q, T] in float32, as the stock indexer's."""
    with torch.autocast(keys.device.type, enabled=False):
        each = torch.relu(torch.einsum("bqhe,bte->bqht", index.query.float(), keys.float()) * index.scale)
        return torch.einsum("bqht,bqh->bqt", each, index.weights.float())


def _rows(index: Index, rows: torch.Tensor) -> Index:
    query, weights = index.query, index.weights
    return Index(
        query.gather(1, rows[:, :, None, None].expand(-1, -1, *query.shape[2:])),
        weights.gather(1, rows[:, :, None].expand(-1, -1, weights.shape[2])),
        index.scale,
    )


@torch.no_grad()
def _selected(index: Index, keys: torch.Tensor, count: int) -> torch.Tensor:
    """bool [B, 1, T, T]: the `count` tokens of highest score, and those that tie with the last of them."""
    batch, total = keys.shape[:2]
    seen = torch.ones((batch, 1, total, total), dtype=torch.bool, device=keys.device).tril_()
    for begin in range(0, total, _QUERIES):
        end = min(begin + _QUERIES, total)
        if end <= count:
            continue
        found = scores(index.part(begin, end), keys[:, :end])
        found = found.masked_fill(~seen[:, 0, begin:end, :end], float("-inf"))
        seen[:, 0, begin:end, :end] &= found >= found.topk(count, dim=-1).values[..., -1:]
    return seen
