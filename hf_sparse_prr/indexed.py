"""IndexedLayer: a layer of a model with an indexer of its own. Latents take the place of keys, and their RoPE part that
of values; the indexer's keys lie beside them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .layer import SparseLayer, writes
from .predictor import Prior
from .tokens import Grid


class Indexer(NamedTuple):
    """What a model's config says of its indexers. topk: tokens that a query selects.  shared: of each layer, whether
    it takes the selection of the last one before it that has an indexer."""

    topk: int
    shared: tuple[bool, ...]


def indexer_of(config: Any) -> Indexer | None:
    """None for a model without indexers. config: a transformers config."""
    text = config.get_text_config(decoder=True)
    topk = getattr(text, "index_topk", None)
    if topk is None:
        return None
    types = getattr(text, "indexer_types", None) or ["full"] * text.num_hidden_layers
    return Indexer(int(topk), tuple(kind == "shared" for kind in types))


class IndexedLayer(SparseLayer):
    """Latents [B, 1, T, C], RoPE keys [B, 1, T, A] and index keys [B, T, E] of one layer, and what predicts its
    selection. A layer that shares a selection has no index keys."""

    def _empty(self) -> None:
        super()._empty()
        self.index_keys: torch.Tensor | None = None
        self.indexed = 0  # columns that have an index key

    @property
    def bytes_per_summary(self) -> int:
        """Of one token: its index key."""
        return 0 if self.index_keys is None else self.index_keys.shape[2] * self.index_keys.element_size()

    def scored_blocks(self, column: int) -> int:
        return column + 1

    def check_index(self, states: torch.Tensor, begin: int) -> None:
        """Raise ValueError for index keys [B, Q, E] that don't continue those of this layer; nothing was written."""
        if self.indexed != begin:
            raise ValueError(
                f"index keys: expected those of {begin} tokens in the cache, got {self.indexed}; call cache.reset() or "
                "make another cache"
            )
        held = self.index_keys
        if held is None:
            return
        expected, got = (held.shape[0], held.shape[2]), (states.shape[0], states.shape[2])
        if got != expected or states.dtype != held.dtype or states.device != held.device:
            raise ValueError(
                f"index keys: expected [B, E] = {list(expected)} in {held.dtype} on {held.device}, got {list(got)} in "
                f"{states.dtype} on {states.device}; call cache.reset(), or make another cache"
            )

    @writes
    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append index keys [B, Q, E] of the tokens that `update` has appended, and return all of them: a view of the
        columns in use, or with `max_length` the whole buffer."""
        self.check_index(indexer_key_states, self.length - indexer_key_states.shape[1])
        begin, end = self.indexed, self.indexed + indexer_key_states.shape[1]
        columns = self.capacity
        if self.index_keys is None:
            batch, _, dim = indexer_key_states.shape
            self.index_keys = indexer_key_states.new_zeros((batch, columns, dim), requires_grad=False)
        elif columns > self.index_keys.shape[1]:
            grown = (0, 0, 0, columns - self.index_keys.shape[1])
            self.index_keys = torch.nn.functional.pad(self.index_keys, grown)
        self.index_keys[:, begin:end] = indexer_key_states.detach()
        self.indexed = end
        return self.index_keys if self.max_length is not None else self.index_keys[:, :end]

    reads_local = False

    def is_due(self, column: int) -> bool:
        """Never: a token is a block, and its index key came with it."""
        return False

    def can_append_on_device(self, column: int, device: torch.device) -> bool:
        keys = self.index_keys
        indexed = keys is None or (self.indexed == column and keys.shape[1] == self.capacity)
        return self.length == column < self.capacity and self.keys.device == device and indexed

    def buffers(self) -> Iterator[torch.Tensor | None]:
        yield from (self.keys, self.values, self.memory.ema, self.index_keys)

    def steady(self, prior: Prior) -> Prior:
        """All columns of the buffer are scored, those without a token as NaN."""
        return prior.widened(self.capacity, min(self.plan.predicted_blocks, self.capacity))

    def append_on_device(
        self, kernels: Any, key: torch.Tensor, value: torch.Tensor, grid: Grid, index_key: torch.Tensor | None = None
    ) -> None:
        """As that of a SparseLayer, with the token's index key [B, 1, E], None in a layer that shares a selection."""
        kernels.append_states(self.keys, self.values, key, value, grid.end)
        if index_key is not None and self.index_keys is not None:
            held, new = self.index_keys[:, None], index_key[:, None]
            kernels.append_states(held, held[..., :0], new, new[..., :0], grid.end)

    def advance(self) -> None:
        super().advance()
        if self.index_keys is not None:
            self.indexed = self.length

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.indexed = min(self.indexed, self.length)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map(change)
        if self.index_keys is not None:
            self.index_keys = change(self.index_keys)
