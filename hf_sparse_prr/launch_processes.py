"""How the processes of a launch agree: who is there, what the main one says, who takes the next prompt.

Through gloo and a store of torch.distributed, not NCCL: it is a few bytes, and a collective that waits for the slowest
prompt would run into NCCL's timeout.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm

T = TypeVar("T")
_FOREVER = timedelta(days=30)
_REFRESH = {True: 1.0, False: 30.0}  # seconds between two looks of the bar: on a terminal, in a log


def join(cpu: bool) -> PartialState:
    """This process among those of its launcher, on a GPU of its own where there are any."""
    options: dict[str, Any] = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        options = dict(backend="gloo", timeout=_FOREVER)
    state = PartialState(cpu=cpu or not torch.cuda.is_available(), **options)
    if state.device.type == "cuda":
        torch.cuda.set_device(state.device)
    return state


def from_main(state: PartialState, compute: Callable[[], T]) -> T:
    """What the main process computes, everywhere; a ValueError as well."""
    said: list[Any] = [None, None]
    if state.is_main_process:
        try:
            said = [compute(), None]
        except ValueError as error:
            said = [None, error]
    broadcast_object_list(said)
    if said[1] is not None:
        raise said[1]
    return said[0]


def for_each(state: PartialState, items: list[T], compute: Callable[[T], Any]) -> dict[T, Any]:
    """compute(item) of every item, each by one process, known to all."""
    with state.split_between_processes(items) as mine:
        found = [(item, compute(item)) for item in mine]
    return dict(gather_object(found))


def open_store(state: PartialState) -> dist.Store:
    """Counters that all processes see; they start at 0."""
    if state.num_processes == 1:
        return dist.HashStore()
    host = os.environ["MASTER_ADDR"]
    held: list[Any] = []

    def serve() -> int:
        held.append(dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_FOREVER))
        return held[0].port

    port = from_main(state, serve)
    return held[0] if held else dist.TCPStore(host, port, is_master=False, timeout=timedelta(minutes=5))


class Bar:
    """The main process's progress bar over all processes: `done` of the store, looked at by a thread."""

    def __init__(self, state: PartialState, store: dist.Store, before: int, total: int) -> None:
        self._store, self._before = store, before
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if state.is_main_process:
            wait = _REFRESH[sys.stderr.isatty()]
            self._bar = tqdm(initial=before, total=total, unit="prompt", mininterval=wait, file=sys.stderr)
            self._thread = threading.Thread(target=self._look, args=(wait,), daemon=True)

    def _look(self, wait: float) -> None:
        while not self._stopped.wait(wait):
            self._show()

    def _show(self) -> None:
        self._bar.update(self._before + self._store.add("done", 0) - self._bar.n)

    def __enter__(self) -> Bar:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._show()
            self._bar.close()
