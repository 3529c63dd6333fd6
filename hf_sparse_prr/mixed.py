"""Layers that have something else than full attention: they keep the cache layer that transformers has for them."""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, DynamicLayer


def other_layers(config: Any) -> list[Any]:
    """Of each attention layer of a transformers config: None for full attention, with or without an indexer, else its
    empty cache layer."""
    full = (DynamicLayer, DynamicIndexedLayer)
    return [None if type(layer) in full else layer for layer in DynamicCache(config=config).layers]


def kinds_of(layers: list[Any]) -> list[str]:
    """What `other_layers` are, in words: "" for full attention."""
    return ["" if layer is None else _kind(layer) for layer in layers]


def _kind(layer: Any) -> str:
    window = getattr(layer, "sliding_window", None)
    return type(layer).__name__ if window is None else f"sliding window of {window} tokens"


def leader_of(kinds: list[str]) -> int:
    """The layer that reads masks and counts columns for all: the first one of full attention. Their number without."""
    return next((index for index, kind in enumerate(kinds) if not kind), len(kinds))


def check_states(layer: Any, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    """ValueError for new key or value states that don't continue those of a cache layer."""
    for name, states, buffer in (("key", key_states, layer.keys), ("value", value_states, layer.values)):
        expected = (*buffer.shape[:2], buffer.shape[3])
        got = (*states.shape[:2], states.shape[3])
        if got != expected or states.dtype != buffer.dtype or states.device != layer.device:
            raise ValueError(
                f"{name} states: expected [B, H, D] = {list(expected)} in {buffer.dtype} on {layer.device}, "
                f"got {list(got)} in {states.dtype} on {states.device}; call cache.reset(), or make another cache"
            )


def check_crop(layer: Any, removed: int) -> None:
    """RuntimeError where a window has dropped tokens that it needs again once `removed` are gone."""
    window, held = layer.sliding_window, layer.keys.shape[2]
    # What has dropped nothing can give up everything; else window - 1 tokens have to stay
    most = removed if held >= layer.get_seq_length() else max(held - window + 1, 0)
    if most < removed:
        raise RuntimeError(
            f"crop: expected at most {most} tokens, got {removed}: a sliding window of {window} tokens holds no more; "
            "call activate_past_recording() before the forward that is to be undone"
        )


class Undo:
    """The layers before the leader as they were before this forward: the leader may still refuse it.

    transformers' dynamic layers replace their tensors and never write into them, so a copy of the attributes is enough.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Any, dict[str, Any]]] = []

    def keep(self, layer: Any) -> None:
        self.kept.append((layer, dict(layer.__dict__)))

    def forget(self) -> None:
        self.kept = []

    def restore(self) -> None:
        for layer, attributes in reversed(self.kept):
            layer.__dict__.clear()
            layer.__dict__.update(attributes)
        self.kept = []
