"""Work beside the main stream: what a decode step speculates, remembers and counts while it selects and attends."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

# By the stream that is current when a step begins, so that a user's streams never wait for each other's side work, and
# by thread. A side stream starts with a wait for its main one and is joined before the step ends: memory that either
# frees is reused by neither too early. Of threads that shared one, the second could be given memory of it that the
# first has freed and the main stream still reads.
_LOCAL = threading.local()


def side_of(main: torch.cuda.Stream, purpose: str = "step") -> torch.cuda.Stream:
    """The stream beside `main` for a purpose: one that is waited for late is in the way of no other."""
    sides: dict[tuple[Any, ...], torch.cuda.Stream] = _LOCAL.__dict__.setdefault("sides", {})
    key = (main.device, main.cuda_stream, purpose)
    if key not in sides:
        # Other priorities were slower: of a layer with an indexer, 128K, late first 160 us, main first 161, alike 157
        sides[key] = torch.cuda.Stream(main.device)
    return sides[key]


class Overlap:
    """A side stream of one decode step, on CUDA; elsewhere everything runs in order, and in a compiled step too:
    streams are not traced.

    Events order the two streams, so a CUDA graph captures the fork: it costs 0.2 us there.
    """

    def __init__(self, device: torch.device, purpose: str = "step") -> None:
        self._main = self._side = None
        self._forked = False
        self._held: list[Any] = []
        if device.type == "cuda" and not torch.compiler.is_compiling():
            self._main = torch.cuda.current_stream(device)
            self._side = side_of(self._main, purpose)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What runs in it sees all that the main stream was given before, and is done after the next `join`."""
        if self._side is None or self._main is None:
            yield
            return
        self._side.wait_stream(self._main)
        self._forked = True
        with self.on_side():
            yield

    @contextmanager
    def on_side(self) -> Iterator[None]:
        """As `beside`, but what the main stream was given since the last one isn't waited for."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def hold(self, *tensors: Any) -> None:
        """Keep what the main stream has made and the side one reads: freed before the next `join`, its memory could be
        given to the main stream again."""
        self._held += tensors

    def join(self) -> None:
        """Let the main stream wait for what runs beside it."""
        if self._side is not None and self._main is not None and self._forked:
            self._main.wait_stream(self._side)  # unforked it isn't part of a capture, and must not be waited for
            self._forked = False
        self._held.clear()


class Late:
    """What the layers of a token remember and count, beside all that comes after their attention: to be joined once, at
    the token's end. Forked before attention it ran beside its kernels, which all else waits for: 27 us of counts beside
    20 of attention (DeepSeek-V3.2's layer, H200)."""

    def __init__(self) -> None:
        self._overlap: Overlap | None = None
        self._read: list[Any] = []

    @contextmanager
    def behind(self, device: torch.device, *read: Any) -> Iterator[None]:
        """What runs in it sees all that the main stream was given before, and is done after the next `join`. read: what
        the main stream would free, and give to its next tensors."""
        self._overlap = self._overlap or Overlap(device, "late")
        self._read.append(read)
        with self._overlap.beside():
            yield

    @contextmanager
    def last(self) -> Iterator[None]:
        """What runs in it is behind all of that, and waits for nothing else."""
        with nullcontext() if self._overlap is None else self._overlap.on_side():
            yield

    def join(self) -> None:
        if self._overlap is not None:
            self._overlap.join()
        self._read.clear()
