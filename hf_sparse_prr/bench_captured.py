"""A decode step of one layer with an indexer as a CUDA graph: its outputs as the cache grows, and what it takes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .bench_time import Captured, Taken
from .graph import captured
from .on_device import DeviceSteps
from .patching import PatchHandle
from .tokens import Step

# Bytes a second that reading weights reaches, where it was measured; the data sheet's are `bench.BANDWIDTH`
READS = {"NVIDIA H200": 4.23e12}
_REPLAYS = 20


class CapturedSteps:
    """layer: a `bench_indexed.Layer` that is patched.  cache: after a few eager steps, of a length that selects.

    Projections, append, selection and attention are in the graph; RoPE's angles, which all layers of a model share, and
    what the cache is told of a token, are not.
    """

    def __init__(self, layer: Any, handle: PatchHandle, cache: Any) -> None:
        self.layer, self.cache = layer, cache
        self._steps = DeviceSteps(handle, cache, 0)
        self._steps.hold()

    def _tell(self) -> None:
        """The cache of the next token."""
        tokens, held = self.cache.tokens, self.cache.layers[0]
        tokens.commit(Step(tokens.length, 1, 0), 1, held.capacity, held.keys.device)

    def _grow(self) -> None:
        self._tell()
        self._steps.advance()

    def _run(self, given: dict[str, Any]) -> torch.Tensor:
        return self._steps.run(lambda: self.layer.attend(given, self.cache))

    def outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of tokens [1, 1, hidden], one after the other: the first runs uncaptured, the others are replays."""
        self._tell()
        given = self.layer.inputs(inputs[0].clone(), self.cache.tokens.length - 1)
        output = self._run(given)
        found = [output.clone()]
        self._steps.advance()
        replay, _ = captured(lambda: self._run(given), output)
        for hidden in inputs[1:]:
            self._tell()
            fresh = self.layer.inputs(hidden, self.cache.tokens.length - 1)
            for held, new in zip(tree_leaves(given), tree_leaves(fresh), strict=True):
                if isinstance(held, torch.Tensor):
                    held.copy_(new)
            replay()
            found.append(output.clone())
            self._steps.advance()
        return found

    def timed(self, inputs: Sequence[torch.Tensor]) -> Taken:
        """A step's share of a graph of one step for each input, all in one column; the cache grows by a token between
        replays."""
        self._tell()
        given = [self.layer.inputs(hidden, self.cache.tokens.length - 1) for hidden in inputs]
        graph = Captured(lambda at: self._run(given[at]), len(given), inputs[0].device, len(given))
        self._steps.advance()
        return graph.timed(_REPLAYS, self._grow)


def shares(taken: Taken, found: dict[str, Any], name: str, device: torch.device) -> dict[str, Any]:
    """What a captured step of setting `name` took, read, and would take if it did nothing but read, by what
    `bench.compared` found: weights and cache, at the bandwidth that reading reaches; None where that isn't known."""
    moved, weights = found["kv_bytes_per_step"][name], found["weight_bytes"]
    speed = READS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    floor = None if speed is None else 1e6 * (moved + weights) / speed
    return {
        "us": taken.us,
        "spread": taken.spread,
        "bytes": moved + weights,
        "floor_us": floor,
        "floor_share": None if floor is None else floor / taken.us,
        "beyond_weights_us": None if speed is None else taken.us - 1e6 * weights / speed,
    }
