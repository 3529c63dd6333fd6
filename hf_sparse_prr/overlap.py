"""Work beside the main stream: what a decode step speculates, remembers and counts while it selects and attends."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        sides[key] = torch.cuda.Stream(main.device)
    return sides[key]


class Late:
    """What the layers of a token have left running beside it, and the tensors that this reads: to be joined once, at
    the token's end. An EMA and a prediction take longer than the repair that they run beside, and not than a layer."""

    def __init__(self) -> None:
        self._left: list[tuple[Overlap, Any]] = []

    def leave(self, overlap: "Overlap", *read: Any) -> None:
        """read: what the main stream would free, and give to its next tensors."""
        self._left.append((overlap, read))

    def join(self) -> None:
        for overlap, _ in self._left:
            overlap.join()
        self._left.clear()


class Overlap:
    """A side stream of one decode step, on CUDA; elsewhere everything runs in order, and in a compiled step too:
    streams are not traced.

    Events order the two streams, so a CUDA graph captures the fork: it costs 0.2 us there.
    """

    def __init__(self, device: torch.device) -> None:
        self._main = self._side = None
        self._forked = False
        self._held: list[Any] = []
        if device.type == "cuda" and not torch.compiler.is_compiling():
            self._main = torch.cuda.current_stream(device)
            self._side = side_of(self._main)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What runs in it sees all that the main stream was given before, and is done after the next `join`."""
        if self._side is None or self._main is None:
            yield
            return
        self._side.wait_stream(self._main)
        self._forked = True
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
