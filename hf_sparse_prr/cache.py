"""SparseCache: a transformers Cache whose layers also hold what selection and prediction need.

All side state hangs off the cache and follows every verb of it.
"""

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from .config import SparseConfig, is_int
from .indexed import IndexedLayer, indexer_of
from .layer import SparseLayer, writes
from .mixed import Undo, check_crop, check_states, kinds_of, leader_of, other_layers
from .overlap import Late
from .tokens import Step, Tokens

if TYPE_CHECKING:
    from .budget import Budget
    from .fitting import Fitting
    from .report import Statistics


CACHE_NAMES = ("cache", "past_key_values")  # of the argument: the first since transformers 5.24


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache that a forward was given by either name, or None."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


class Look(NamedTuple):
    """What the model's config said when a forward's first layer of full attention looked: a look takes 9 us since
    transformers 5.24, and there were four a layer."""

    implementation: str
    wants_weights: bool


class SparseCache(Cache):
    """Cache of a patched model. An unpatched model given one runs stock on it.

    Args:
        model_or_config: a model, patched or not, or its config.
        max_length: tokens to preallocate; more raise ValueError, and `is_compileable` is True unless some layers have a
            sliding window. None: grows.
        sparse_config: settings, where the model isn't patched yet. From a bare config without them, the settings of
            the first patched model that uses the cache are adopted.

    Raises:
        ValueError: `sparse_config` and the patched model's settings differ; max_length isn't a positive int; no layer
            has full attention.
    """

    layers: list[Any]  # SparseLayer where attention is full, else what transformers has for the layer

    def __init__(
        self, model_or_config: Any, *, max_length: int | None = None, sparse_config: SparseConfig | None = None
    ) -> None:
        if max_length is not None and (not is_int(max_length) or max_length < 1):
            raise ValueError(f"max_length: expected None or an int >= 1, got {max_length!r}")
        if sparse_config is not None and not isinstance(sparse_config, SparseConfig):
            raise TypeError(f"sparse_config: expected a SparseConfig, got {sparse_config!r}")
        handle = getattr(model_or_config, "sparse_prr", None)
        config = getattr(model_or_config, "config", model_or_config)
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"expected a transformers model or its config, got {type(model_or_config).__name__}")
        # Not the config's layers while early-exit drafting lowers their number
        others = other_layers(config) if handle is None else handle.others
        if None not in others:
            raise ValueError(f"cache: expected a layer of full attention, got only {', '.join(set(kinds_of(others)))}")
        self.indexer = indexer_of(config) if handle is None else handle.indexer
        full = SparseLayer if self.indexer is None else IndexedLayer
        layers = [full(max_length) if other is None else copy.deepcopy(other) for other in others]
        super().__init__(layers=layers)
        self.kinds = kinds_of(others) if handle is None else handle.kinds
        self.leader = leader_of(self.kinds)
        self._others = others
        self._undo = Undo()
        self.tokens = Tokens()
        self.sparse_config: SparseConfig | None = None
        self.decode_columns: list[int] = []  # of every decode token the cache holds
        self.statistics: Statistics | None = None
        self._prompt_length: int | None = None
        self._step: Step | None = None
        self.budget: Budget | None = None  # what its layers speculate on, where that is left to a profile
        self.budget_for: tuple[torch.device, int] | None = None  # device and batch rows that a profile was asked for
        self.in_compiled = False  # a compiled decode step is running (compiled.py)
        self.late: Late | None = None  # what a step on the device leaves running beside it
        self.look: Look | None = None
        self.fitting: Fitting | None = None  # the token that is under way, where all rows fit (fitting.py)
        self.on_device = False  # a decode step that reads lengths on the device alone is running (graph.py)
        if handle is not None:
            self.adopt(handle.config)
        if sparse_config is not None:
            self.adopt(sparse_config)

    @property
    def prompt_length(self) -> int | None:
        """Tokens in columns below it attend densely. None: a step on an empty cache, or of more than 16 tokens, does.

        generate() sets it and clears it."""
        return self._prompt_length

    @prompt_length.setter
    def prompt_length(self, value: int | None) -> None:
        if value is not None and (not is_int(value) or value < 0):
            raise ValueError(f"prompt_length: expected None or an int >= 0, got {value!r}")
        self._prompt_length = None if value is None else int(value)

    @property
    def step(self) -> Step | None:
        """The last forward that the first layer of full attention has appended."""
        return self._step

    def ends_prompt(self, step: Step) -> bool:
        """Whether `step` has the last prompt token, as far as is known."""
        return self._prompt_length is not None and 0 < self._prompt_length <= step.begin + step.first_decode

    def check_settings(self, config: SparseConfig) -> None:
        """ValueError where the cache was made for other settings."""
        if self.sparse_config is not None and self.sparse_config is not config and self.sparse_config != config:
            raise ValueError(
                f"cache: expected the settings of the model, {config}, got one made for {self.sparse_config}"
            )

    def adopt(self, config: SparseConfig) -> None:
        """Take on the settings of a patched model."""
        self.check_settings(config)
        if self.sparse_config is None:
            for layer, plan in zip(self.layers, config.plan(self.kinds, self.indexer), strict=True):
                layer.plan = plan
        self.sparse_config = config

    def begin(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        mask: Any,
        config: SparseConfig | None,
        depth: int | None = None,
    ) -> Step:
        """Check a forward and say what it is. Nothing is written: a refused input leaves the cache as it was.

        Args:
            key_states, value_states: [B, H, Q, D], what `append` will be given.
            mask: the layer's attention mask, as transformers made it.
            config: settings of the patched model that calls.
            depth: layers that it runs, all by default; fewer while it drafts by early exit.

        Raises:
            ValueError: shapes, dtype, device, batch size, mask, length or settings that don't fit the cache.
        """
        layer = self.layers[layer_idx]
        if config is not None:
            self.check_settings(config)
        layer.check(key_states, value_states)
        batch, _, count, _ = key_states.shape
        step = self._step
        if layer_idx > self.leader and step is not None and (step.begin, step.count) == (layer.length, count):
            return step
        # Layers before the leader have this forward's tokens already
        lengths = {held.get_seq_length() - count * (i < layer_idx) for i, held in enumerate(self.layers[:depth])}
        if layer_idx != self.leader or len(lengths) > 1:
            raise ValueError(
                f"cache: expected layers of one length, got {sorted(lengths)} before a forward of {count} tokens in "
                f"layer {layer_idx}; an earlier one was interrupted, call cache.reset()"
            )
        kv_length, _ = layer.get_mask_sizes(count)
        return self.tokens.plan(mask, batch, count, kv_length, self.prompt_length)

    @writes
    def append(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        step: Step,
        config: SparseConfig | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append what `begin` has checked to one layer, and return the layer's K/V as `SparseLayer.update` does."""
        layer = self.layers[layer_idx]
        keys, values = layer.append(key_states, value_states)
        if layer_idx == self.leader:
            self.tokens.commit(step, key_states.shape[0], layer.capacity, key_states.device)
            self.told(step)
            self._undo.forget()
            if config is not None:
                self.adopt(config)
        if step.changed:
            layer.forget_blocks()
        return keys, values

    def told(self, step: Step) -> None:
        """`step` was appended to the leader."""
        self.decode_columns.extend(range(step.begin + step.first_decode, step.begin + step.count))
        self._step = step

    @writes
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a stock forward calls: no mask is known, new columns count as valid."""
        try:
            if self.kinds[layer_idx]:
                self._begin_other(key_states, value_states, layer_idx)
                return super().update(key_states, value_states, layer_idx, *args, **kwargs)
            step = self.begin(key_states, value_states, layer_idx, None, None)
            return self.append(key_states, value_states, layer_idx, step)
        except BaseException:  # raised again
            self.undo(layer_idx)
            raise

    def _begin_other(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> None:
        """Check what a layer with a window is about to append, and keep it as it was if the leader is still to come."""
        layer = self.layers[layer_idx]
        if layer.is_initialized:
            check_states(layer, key_states, value_states)
        if layer_idx == 0:
            self._undo.forget()
        if layer_idx < self.leader:
            self.layers[self.leader].check_room(key_states.shape[2])
            self._undo.keep(layer)

    def undo(self, layer_idx: int) -> None:
        """A forward was refused in a layer up to the leader: those before it are put back."""
        if layer_idx <= self.leader:
            self._undo.restore()

    @writes
    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last |tokens_to_remove| tokens.

        Raises:
            ValueError: a positive number.
            RuntimeError: a sliding window no longer holds what it would need; nothing was dropped.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding gives a tensor before transformers 5.18
        if tokens_to_remove > 0:
            raise ValueError(f"crop: expected an int <= 0, the tokens to remove, got {tokens_to_remove}")
        # Not the leader's length alone: early-exit drafts may end before it
        windows = [layer for layer in self.layers if hasattr(layer, "sliding_window") and layer.is_initialized]
        removed = min(-tokens_to_remove, max(each.get_seq_length() for each in [self.layers[self.leader], *windows]))
        for layer in windows:
            check_crop(layer, removed)
        for layer in self.layers:
            # A window that is empty, or that records nothing, would refuse even to drop nothing
            if not hasattr(layer, "sliding_window") or (layer.is_initialized and (removed or layer.record_past)):
                layer.crop(-removed)
        length = max(self.tokens.length - removed, 0)
        self.tokens.crop(length)
        held = [column for column in self.decode_columns if column < length]
        if self.statistics is not None and len(held) < len(self.decode_columns):
            self.statistics.crop_trace(len(held))
        self.decode_columns = held

    def reset(self) -> None:
        super().reset()
        for index, other in enumerate(self._others):
            if other is not None:  # transformers only zeroes what a window holds
                recording = getattr(self.layers[index], "record_past", None)
                self.layers[index] = copy.deepcopy(other)
                if recording is not None:
                    self.layers[index].record_past = recording
        self._undo.forget()
        self.tokens.reset()
        self.budget = self.budget_for = None
        self.fitting = None
        self.decode_columns = []
        self.statistics = None
        self._prompt_length = None
        self._step = None

    @writes
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.tokens.map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    @writes
    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.tokens.map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    @writes
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        indices = torch.as_tensor(indices)
        super().batch_select_indices(indices)
        self.tokens.map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "statistics": None, "_step": None, "fitting": None, "_undo": Undo()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "SparseCache":
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with torch.inference_mode(False):
            twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin
