"""Decode steps that read lengths on the device alone: a CUDA graph of one is right for every later token, until a
buffer moves.

The host tells a cache of the token as ever (`Tokens.commit`); what a step leaves behind goes where it was.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from .cache import SparseCache
from .config import LayerPlan
from .overlap import Late
from .predictor import Prior

if TYPE_CHECKING:
    from .patching import PatchHandle

Result = TypeVar("Result")


def _copy(held: list[Any], made: list[Any]) -> None:
    """All at once into the tensors that are held: one by one they took 70 us of a token of 30 layers."""
    pairs = [(old, new) for old, new in zip(held, made, strict=True) if old is not None]
    if pairs:
        torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])


class DeviceSteps:
    """The layers of a cache from `first` on: those that select, and those that share a selection."""

    def __init__(self, handle: "PatchHandle", cache: SparseCache, first: int) -> None:
        self.handle, self.cache, self.first = handle, cache, first
        self._layers = cache.layers[first:]
        self._selecting = [index for index in range(first, len(cache.layers)) if handle.plans[index].status == "sparse"]
        self._priors: list[Prior] = []

    def _memories(self) -> list[Any]:
        return [self.cache.layers[index].memory for index in self._selecting]

    def can_run(self, column: int, device: torch.device) -> bool:
        """Whether a token in `column`, for which every row selects, needs nothing that the host would do."""
        return all(layer.can_append_on_device(column, device) for layer in self._layers) and all(
            memory.prior is not None and not (memory.uncalibrated and plan.predicted_blocks)
            for memory, plan in zip(self._memories(), self._plans(), strict=True)
        )

    def _plans(self) -> list[LayerPlan]:
        return [self.cache.layers[index].plan for index in self._selecting]

    def choice(self) -> tuple[int, ...]:
        """What the layers speculate on now."""
        return tuple(plan.predicted_blocks for plan in self._plans())

    def summarise(self, column: int) -> None:
        """What is due once a block, before the token in `column` is run: the cache was told of it, these layers not."""
        due = [layer for layer in self._layers if layer.is_due(column)]
        if due:
            grid = self.cache.tokens.on(due[0].device)
            for layer in due:
                layer.summarise(self.handle.kernels.module, grid._replace(end=grid.end - 1))

    def tensors(self) -> Iterator[torch.Tensor | None]:
        """Buffers that a step reads and writes where they are."""
        tokens, statistics = self.cache.tokens, self.handle.recorder.statistics_of(self.cache)
        yield from (tokens.valid, tokens.start, tokens.end)
        for index, layer in enumerate(self._layers, self.first):
            yield statistics.held(index)
            yield from layer.buffers()

    def prior_shapes(self) -> Any:
        """What the last token has left: what there is of it, and for how many rows. How wide `hold` sees to."""
        priors = [tuple(memory.prior) for memory in self._memories()]
        return [leaf if leaf is None else leaf.shape[:-1] for leaf in tree_leaves(priors)]

    def hold(self) -> None:
        """Priors of our own, as a step leaves them, which all later steps write over."""
        for index in self._selecting:
            layer = self.cache.layers[index]
            layer.memory.prior = layer.steady(layer.memory.prior).map(torch.clone)
        self._priors = [memory.prior for memory in self._memories()]

    def holds(self) -> bool:
        """Whether no other token has left others since."""
        return all(memory.prior is prior for memory, prior in zip(self._memories(), self._priors, strict=True))

    def take(self) -> bool:
        """Have what tokens of another choice left copied to where our own priors are. False where the shapes differ."""
        layers = [self.cache.layers[index] for index in self._selecting]
        made = tree_leaves([tuple(layer.steady(layer.memory.prior)) for layer in layers])
        held = tree_leaves([tuple(prior) for prior in self._priors])
        if [each if each is None else each.shape for each in made] != [x if x is None else x.shape for x in held]:
            return False
        _copy(held, made)
        for layer, prior in zip(layers, self._priors, strict=True):
            layer.memory.prior = prior
        return True

    def run(self, step: Callable[[], Result]) -> Result:
        """Run one token, on priors that are held. `advance` tells the host."""
        statistics = self.handle.recorder.statistics_of(self.cache)
        calls = list(statistics.selector_calls)
        self.cache.tokens.shared.clear()
        self.cache.on_device, self.cache.late = True, Late()
        try:
            result = step()
            made = [memory.prior for memory in self._memories()]
            with self.cache.late.last():  # it reads what was made there; all layers have read what it writes over
                _copy(*(tree_leaves([tuple(prior) for prior in priors]) for priors in (self._priors, made)))
            self.cache.late.join()
        finally:
            statistics.selector_calls = calls
            self.cache.on_device, self.cache.late = False, None
            self.cache.tokens.shared.clear()
            for memory, prior in zip(self._memories(), self._priors, strict=True):
                memory.prior = prior
        return result

    def advance(self) -> None:
        """A token was run."""
        statistics = self.handle.recorder.statistics_of(self.cache)
        for layer in self._layers:
            layer.advance()
        for index in self._selecting:
            statistics.selector_calls[index] += 1
