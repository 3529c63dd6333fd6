"""What a cache knows of its columns: which hold a real token, where each batch row starts, how a forward extends them.

A column is a position in the K/V buffers. A padded column keeps its slot and is marked invalid, wherever it stands.
Bits change only through `commit`, after everything that can be refused has been checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# Without a prompt length, a longer step is taken for a prompt: drafts to verify are shorter.
MAX_DRAFT = 16
_BLOCKS = -5000.0  # in an additive mask: some write -10000 for padding; a bias is nearer to 0 in some query
MASK_REASON = "the attention mask is not causal x per-token validity"


def longest_row(mask: Any, length: int) -> int:
    """Tokens of the longest batch row, from its first real one on, in a forward whose last column is length - 1."""
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
        return length
    last = _allowed(mask if mask.dim() == 2 else mask[:, 0, -1])[0][:, :length]
    return int((length - last.to(torch.uint8).argmax(dim=1)).max())


@dataclass(frozen=True)
class Step:
    """One forward over the cache, worked out once and shared by its layers.

    begin, count: the columns it adds.  first_decode: query tokens before it are prompt and attend densely (0..count).
    validity: bool [B, begin + count] as the mask says it, None where there is no mask.
    changed: the mask says something else of old columns than it did before.
    dense_reason: why nothing may be selected in this forward, or None.
    """

    begin: int
    count: int
    first_decode: int
    validity: torch.Tensor | None = None
    changed: bool = False
    dense_reason: str | None = None


def _allowed(mask: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Where a bool, 0/1 or additive mask lets attention through, and whether it says only yes and no."""
    if not mask.is_floating_point():
        return mask.bool(), True
    blocked = mask <= torch.finfo(mask.dtype).min / 2
    return mask > _BLOCKS, bool((blocked | (mask == 0)).all())


def read_mask(mask: Any, batch: int, begin: int, count: int, kv_length: int) -> tuple[torch.Tensor | None, bool]:
    """Per-token validity, bool [batch, begin + count], that an attention mask stands for (None: no mask), and whether
    the mask is causal x that validity.

    Raises:
        ValueError: a mask of another shape than [batch or 1, .., count, kv_length] (or [batch, begin + count]).
    """
    end = begin + count
    if mask is None:
        return None, True
    if not isinstance(mask, torch.Tensor):
        return None, False
    if mask.dim() == 2:
        if mask.shape != (batch, end):
            raise ValueError(f"attention_mask: expected [{batch}, {end}], got {list(mask.shape)}")
        return mask.bool(), True
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[2:] != (count, kv_length):
        raise ValueError(f"attention_mask: expected [{batch}, 1, {count}, {kv_length}], got {list(mask.shape)}")
    allowed, binary = _allowed(mask)
    shared = mask.shape[1] == 1
    allowed = allowed[:, 0].expand(batch, -1, -1)
    validity = allowed[:, -1, :end]
    if count == 1:
        return validity, binary and shared
    columns = torch.arange(kv_length, device=mask.device)
    causal = columns <= torch.arange(begin, end, device=mask.device)[:, None]
    known = torch.nn.functional.pad(validity, (0, kv_length - end))
    if binary and shared and bool((allowed == (causal & known[:, None])).all()):
        return validity, True
    # A column some query may attend to holds a token
    return allowed.any(dim=1)[:, :end], False


class Grid(NamedTuple):
    """valid: bool [B, T].  start, end: int64 [B], the columns where each row's tokens begin and where they end."""

    valid: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor


class Tokens:
    """The columns of a cache. `start` is each row's first real column, `length` when it has none yet.

    `start_min` and `start_max` bound `start` on the host, so that a step needs no device read to know that every row,
    or none, is longer than its budget. `start_max` is None while a row has no real token.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.length = 0
        self.valid = torch.zeros((0, 0), dtype=torch.bool)  # [B, capacity]; no rows: nothing came yet
        self.start = torch.zeros(0, dtype=torch.int64)
        self.end = torch.zeros(0, dtype=torch.int64)  # [B], `length` on the device
        self.start_min: int = 0
        self.start_max: int | None = 0
        self.padded = False  # some column holds no token
        self.shared: dict[Any, Any] = {}  # what layers work out once per forward; emptied when anything changes

    @property
    def batch(self) -> int | None:
        return self.valid.shape[0] or None

    def plan(self, mask: Any, batch: int, count: int, kv_length: int, prompt_length: int | None) -> Step:
        """Check a forward of `count` new columns and say what it is. Writes nothing."""
        if self.batch is not None and batch != self.batch:
            raise ValueError(
                f"cache: expected batch size {self.batch}, got {batch}; call cache.reset(), or make another cache"
            )
        begin = self.length
        if prompt_length is not None:
            first_decode = min(max(prompt_length - begin, 0), count)
        else:
            first_decode = count if begin == 0 or count > MAX_DRAFT else 0
        validity, factorises = read_mask(mask, batch, begin, count, kv_length)
        changed = False
        if validity is not None and self.batch is not None:
            validity = validity.to(self.valid.device)
            if factorises and self.padded and bool(validity.all()):
                validity = None  # "all ones" and "no mask" can't be told apart: what is known of padding stays
            elif factorises:
                changed = not torch.equal(validity[:, :begin], self.valid[:, :begin])
                if changed and not bool(validity[:, begin:].any()):
                    # transformers fills up a mask that is too narrow with zeros
                    raise ValueError(
                        f"attention_mask: expected one of {begin + count} columns that has a new token, got one that "
                        "hides all new ones and other old ones than before"
                    )
            else:
                validity = torch.cat([self.valid[:, :begin], validity[:, begin:]], dim=1)
        reason = None if factorises else MASK_REASON
        return Step(begin, count, first_decode, validity, changed, reason)

    def commit(self, step: Step, batch: int, capacity: int, device: torch.device) -> None:
        """Write the columns of `step`; the buffer then holds `capacity` of them."""
        end = step.begin + step.count
        if self.batch is None:
            self.valid = torch.zeros((batch, capacity), dtype=torch.bool, device=device)
            self.start = torch.zeros(batch, dtype=torch.int64, device=device)
            self.end = torch.zeros_like(self.start)
        elif self.valid.shape[1] < capacity:
            self.valid = torch.nn.functional.pad(self.valid, (0, capacity - self.valid.shape[1]))
        if step.validity is None:
            self.valid[:, step.begin : end] = True
        else:
            self.valid[:, :end] = step.validity
            self.padded = not bool(step.validity.all())
        self.length = end
        self.end += step.count
        self.shared.clear()
        if step.changed or self.start_max is None or (step.begin == 0 and step.validity is not None):
            self._find_start()

    def _find_start(self) -> None:
        """Reads the device: at prompts, when old columns changed, and while a row has no real token."""
        known = self.valid[:, : self.length]
        if known.numel() == 0:
            self.start, self.start_min, self.start_max = torch.zeros_like(self.start), 0, 0
            return
        empty = ~known.any(dim=1)
        self.start = known.to(torch.uint8).argmax(dim=1).masked_fill(empty, self.length)
        self.start_min = int(self.start.min())
        self.start_max = None if bool(empty.any()) else int(self.start.max())

    def on(self, device: torch.device) -> Grid:
        """Validity and bounds on a layer's device."""
        grid = Grid(self.valid, self.start, self.end)
        if self.valid.device == device:
            return grid
        if device not in self.shared:
            self.shared[device] = Grid(*(tensor.to(device) for tensor in grid))
        return self.shared[device]

    def crop(self, length: int) -> None:
        """Forget the columns at and past `length`."""
        if length >= self.length:
            return
        self.valid[:, length : self.length] = False
        self.end -= self.length - length
        self.length = length
        self.shared.clear()
        if self.start_max is None or length <= self.start_max:
            self._find_start()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shared": {}}

    def map_rows(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension."""
        if self.batch is None:
            return
        self.valid, self.start, self.end = rows(self.valid), rows(self.start), rows(self.end)
        self.shared.clear()
        self._find_start()

    def any_longer(self, column: int, tokens: int) -> bool:
        """Whether, with the token in `column`, a row may be longer than `tokens`. False is certain."""
        return column + 1 - self.start_min > tokens

    def all_longer(self, column: int, tokens: int) -> bool:
        """Whether, with the token in `column`, every row is longer than `tokens`. True is certain."""
        return self.start_max is not None and column + 1 - self.start_max > tokens
