"""SparseLayer: K/V of one layer in preallocated buffers [B, H, capacity, D] that grow geometrically, and what selection
and prediction need beside them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .config import LayerPlan
from .mixed import check_states
from .overlap import side_of
from .predictor import Memory, Prior
from .selectors import SELECTORS, Columns, Summaries
from .tokens import Grid


def ordinary() -> AbstractContextManager[Any]:
    """In it tensors that are made are ordinary ones without gradients. Where they would be, as in most of generate(),
    it costs nothing: entering the two modes takes 6 us, three times a layer."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _ordinary()
    return nullcontext()


@contextmanager
def _ordinary() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():  # in this order: leaving inference mode turns grad on
        yield


def writes(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that makes or changes the cache's tensors: they are ordinary ones without gradients, also when it is
    called under inference_mode, so that a cache serves callers of every mode."""

    @wraps(method)
    def write(*args: Any, **kwargs: Any) -> Any:
        with ordinary():
            return method(*args, **kwargs)

    return write


_GRANULE = 64  # columns; capacities are multiples of it


class SparseLayer(CacheLayerMixin):
    """K/V of one layer and its side state: block summaries, EMA and last winners."""

    is_croppable = True
    is_sliding = False
    keys: torch.Tensor  # None, as in every cache layer, until the first states come
    values: torch.Tensor

    def __init__(self, max_length: int | None = None) -> None:
        super().__init__()
        self.max_length = max_length
        self.is_compileable = max_length is not None
        self.plan = LayerPlan.dense("no settings yet")
        self._empty()

    def _empty(self) -> None:
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
        self.length = 0
        self.summaries: Summaries = ()
        self.summarised = 0  # columns that the summaries cover
        self.memory = Memory()
        self._event: torch.cuda.Event | None = None  # of what runs beside the prompt

    @property
    def capacity(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    @property
    def batch_size(self) -> int:
        return self.keys.shape[0] if self.is_initialized else -1

    @property
    def bytes_per_token(self) -> int:
        """Of one KV head: key and value."""
        return sum(buffer.shape[3] * buffer.element_size() for buffer in (self.keys, self.values))

    @property
    def bytes_per_summary(self) -> int:
        """Of one block of one KV head."""
        return sum(tensor[0, 0, 0].numel() * tensor.element_size() for tensor in self.summaries)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        columns = self._room_for(key_states.shape[2])
        for name, states in (("keys", key_states), ("values", value_states)):
            batch, heads, _, dim = states.shape
            setattr(self, name, states.new_zeros((batch, heads, columns, dim), requires_grad=False))
        self.is_initialized = True

    def _room_for(self, columns: int) -> int:
        if self.max_length is not None:
            return self.max_length
        return -(-(columns + max(256, columns // 4)) // _GRANULE) * _GRANULE

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Raise ValueError for states that don't fit this layer. Nothing was written yet."""
        if key_states.is_meta or value_states.is_meta:
            raise ValueError("key and value states: expected tensors with data, got meta tensors")
        self.check_room(key_states.shape[2])
        if self.is_initialized:
            check_states(self, key_states, value_states)

    def check_room(self, count: int) -> None:
        """Raise ValueError where `count` more tokens exceed `max_length`."""
        length = self.length + count
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"cache: expected at most max_length={self.max_length} tokens, got {length}")

    @contextmanager
    def beside(self, grid: Grid) -> Iterator[Grid]:
        """What runs in it may read the layer and the copy of `grid` that it is given, and write its summaries and
        memory, beside what comes after: on CUDA on a stream that `settle` waits for."""
        if self.keys.device.type != "cuda":
            yield grid
            return
        self.settle()
        main = torch.cuda.current_stream(self.keys.device)
        side = side_of(main, "prompt")
        mine = Grid(*(tensor.clone() for tensor in grid))  # theirs change with the next token
        side.wait_stream(main)
        queries = self.memory.queries
        for tensor in (*mine, self.keys, *self.summaries, *([] if queries is None else [queries])):
            tensor.record_stream(side)  # a cache may go before it ends
        with torch.cuda.stream(side):
            yield mine
        self._event = side.record_event()

    def settle(self) -> None:
        """Before anything else reads or writes the layer: what runs beside the prompt comes first."""
        if self._event is not None:
            torch.cuda.current_stream(self.keys.device).wait_event(self._event)
            self._event = None

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return self.__dict__

    @writes
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return all K/V: views of the columns in use, or with `max_length` the whole buffers."""
        self.check(key_states, value_states)
        return self.append(key_states, value_states)

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` of states that were checked, in a method that `writes`."""
        self.settle()
        begin, end = self.length, self.length + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif end > self.capacity:
            grown = (0, 0, 0, self._room_for(end) - self.capacity)
            self.keys = torch.nn.functional.pad(self.keys, grown)
            self.values = torch.nn.functional.pad(self.values, grown)
        self.keys[:, :, begin:end] = key_states.detach()
        self.values[:, :, begin:end] = value_states.detach()
        self.length = end
        self.memory.open(begin)
        if self.max_length is not None:
            return self.keys, self.values
        return self.keys[:, :, :end], self.values[:, :, :end]

    def append_fitting(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`append` of one token to a buffer that has room, in few calls. Without gradients or inference mode."""
        if self._event is not None:
            self.settle()
        keys, values, begin = self.keys, self.values, self.length
        for states, buffer in ((key, keys), (value, values)):
            like = states.dtype == buffer.dtype and states.shape[:2] == buffer.shape[:2]
            if not like or states.shape[3] != buffer.shape[3]:
                check_states(self, key, value)  # says what is wrong
        keys.narrow(2, begin, 1).copy_(key)
        values.narrow(2, begin, 1).copy_(value)
        self.length = begin + 1
        self.memory.open(begin)
        return keys.narrow(2, 0, begin + 1), values.narrow(2, 0, begin + 1)

    def scored_blocks(self, column: int) -> int:
        """Blocks that scores of a query in `column` are for, those without a token among them."""
        return self.summaries[0].shape[2]

    @property
    def _blocks(self) -> int:
        """That the buffer has room for."""
        return -(-self.capacity // self.plan.block_size)

    @property
    def reads_local(self) -> bool:
        """Whether a query's scores depend on the summaries of local blocks, its own too."""
        return self.plan.status == "sparse" and SELECTORS[self.plan.selector].reads_local

    def is_due(self, column: int) -> bool:
        """Whether a query in `column` reads summaries that aren't up to date, or the buffer has outgrown them.

        Blocks are scored only when they have left the local ones, so where a selector reads no others they are due once
        a block and not once a token (152 us a layer on a CPU).
        """
        read = column + 1 if self.reads_local else column - (self.plan.local_blocks - 1) * self.plan.block_size
        return not self.summaries or self.summaries[0].shape[2] < self._blocks or self.summarised < read

    def summarise(self, kernels: Any, grid: Grid) -> None:
        """Bring the block summaries up to the last column."""
        selector = SELECTORS[self.plan.selector]
        if not self.summaries:
            self.summaries = selector.allocate(self.keys, self._blocks, self.plan)
        elif self.summaries[0].shape[2] < self._blocks:
            more = selector.allocate(self.keys, self._blocks - self.summaries[0].shape[2], self.plan)
            self.summaries = tuple(torch.cat(pair, dim=2) for pair in zip(self.summaries, more, strict=True))
        if self.summarised < self.length:
            columns = Columns(self.keys, *grid, self.length - self.summarised)
            selector.summarise(kernels, self.summaries, columns, self.plan)
            self.summarised = self.length

    def can_append_on_device(self, column: int, device: torch.device) -> bool:
        """Whether `append_on_device` has room for the token in `column`, and all that it writes to is there."""
        return self.length == column < self.capacity and self.keys.device == device and bool(self.summaries)

    def buffers(self) -> Iterator[torch.Tensor | None]:
        """What a token on the device reads and writes where it is, but for the prior."""
        yield from (self.keys, self.values, self.memory.ema, *self.summaries)

    def steady(self, prior: Prior) -> Prior:
        """A prior as a token on the device leaves it."""
        return prior

    def append_on_device(self, kernels: Any, key: torch.Tensor, value: torch.Tensor, grid: Grid) -> None:
        """Append one token [B, H, 1, D] to a buffer that has room, in the column before `grid.end`:
        lengths are read on the device alone. `advance` tells the host."""
        kernels.append_states(self.keys, self.values, key, value, grid.end)

    def summarise_on_device(self, kernels: Any, grid: Grid) -> None:
        """Bring the block that holds the newest token up to date, where its own query reads it."""
        if self.reads_local:
            columns = Columns(self.keys, *grid, 1)
            SELECTORS[self.plan.selector].summarise(kernels, self.summaries, columns, self.plan)

    def advance(self) -> None:
        """A token was appended on the device, and the prior overwritten: a crop that undoes it leaves none."""
        self.length += 1
        if self.reads_local:
            self.summarised = self.length
        self.memory.open(self.length)

    def forget_blocks(self) -> None:
        """The block grid or the validity of old columns changed: summaries and prior are made anew."""
        self.summarised = 0
        self.memory.clear()

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length + query_length if self.max_length is None else self.max_length), 0

    def crop(self, tokens_to_remove: int) -> None:
        length = max(self.length - abs(tokens_to_remove), 0)
        self.memory.crop(length)
        self.length = length
        # A block that lost some of its tokens is recomputed when the next one arrives
        self.summarised = min(self.summarised, length)

    def reset(self) -> None:
        self._empty()

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.is_initialized:
            return
        self.settle()
        self.keys, self.values = change(self.keys), change(self.values)
        self.summaries = tuple(change(tensor) for tensor in self.summaries)
        self.memory.map(change)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))
