"""One prefill, then the same greedy continuation three times: dense, serial sparse, and PRR. A model with an indexer
runs stock in place of dense, and reads the prompt each time: what stock caches isn't what a patched model needs."""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import DynamicCache

from hf_sparse_prr import SparseCache, patch_model
from hf_sparse_prr.demo.progress import Progress
from hf_sparse_prr.hooks import cache_argument
from hf_sparse_prr.indexed import indexer_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_prr.patching import PatchHandle

PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Run:
    """What one setting generated, and how long it took."""

    name: str
    ids: list[int]
    first_token_seconds: float
    step_seconds: list[float]
    layers: list[dict[str, Any]] = field(repr=False)
    report: str = field(repr=False)

    @property
    def seconds_per_token(self) -> float | None:
        """The median decode step, None where the first token was the only one."""
        return statistics.median(self.step_seconds) if self.step_seconds else None


@dataclass(frozen=True)
class Comparison:
    """The three runs over copies of one prefilled cache; with an indexer over one each, and `prefill_seconds` are those
    of serial sparse."""

    prompt_tokens: int
    prefill_seconds: float
    dense: Run
    serial: Run
    prr: Run

    @property
    def runs(self) -> tuple[Run, Run, Run]:
        return self.dense, self.serial, self.prr

    @property
    def identical(self) -> bool:
        """Whether serial and PRR chose the same tokens: the promise is that they always do."""
        return self.serial.ids == self.prr.ids


def compare(
    model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, settings: dict[str, Any], progress: Progress
) -> Comparison:
    """Continue `ids` [1, T] under dense, serial sparse and PRR decoding; `settings` are SparseConfig fields."""
    ids = ids.to(model.device)
    if indexer_of(model.config) is not None:
        return _compare_indexed(model, ids, new_tokens, settings, progress)
    cache, prefill_seconds = _prefill(model, SparseCache(model.config), ids[:, :-1], progress)
    settings_of = {
        "dense": {**settings, "budget": None},
        "serial sparse": {**settings, "speculate": False},
        "PRR": {**settings, "speculate": True},
    }
    runs = []
    for name, each in settings_of.items():
        with patch_model(model, **each) as handle:  # a cache made from a bare config takes the settings now
            runs.append(_decode(model, name, ids, copy.deepcopy(cache), new_tokens, progress, handle))
    return Comparison(ids.shape[1], prefill_seconds, *runs)


def _compare_indexed(
    model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, settings: dict[str, Any], progress: Progress
) -> Comparison:
    own, _ = _prefill(model, DynamicCache(config=model.config), ids[:, :-1], progress)
    runs, seconds = [_decode(model, "stock", ids, own, new_tokens, progress, None)], 0.0
    for name, speculate in (("PRR", True), ("serial sparse", False)):
        with patch_model(model, **{**settings, "speculate": speculate}) as handle:
            cache, seconds = _prefill(model, SparseCache(model), ids[:, :-1], progress)
            runs.insert(1, _decode(model, name, ids, cache, new_tokens, progress, handle))
    return Comparison(ids.shape[1], seconds, *runs)


def _prefill(model: PreTrainedModel, cache: Any, ids: torch.Tensor, progress: Progress) -> tuple[Any, float]:
    """Run the model as it is over `ids` in chunks. Returns the cache and the seconds that it took."""
    total, begin = ids.shape[1], time.perf_counter()
    with torch.inference_mode():
        for start in range(0, total, PREFILL_CHUNK):
            progress("prefill", start, total)
            chunk = ids[:, start : start + PREFILL_CHUNK]
            model(chunk, use_cache=True, logits_to_keep=1, **{cache_argument(): cache})
    _wait_for(model)
    progress("prefill", total, total)
    return cache, time.perf_counter() - begin


def _decode(
    model: PreTrainedModel,
    name: str,
    ids: torch.Tensor,
    cache: Any,
    new_tokens: int,
    progress: Progress,
    handle: PatchHandle | None,
) -> Run:
    """Generate greedily over `cache`, which holds all of `ids` but the last token."""
    progress(f"decode: {name}", 0, new_tokens)
    clock = _Clock(name, new_tokens, progress)
    out = cast(Any, model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        streamer=clock,
        **{cache_argument(): cache},
    )
    layers, report = ([], "stock") if handle is None else (handle.stats()["layers"], str(handle.report()))
    first, *steps = clock.seconds
    return Run(name, out[0, ids.shape[1] :].tolist(), first, steps, layers, report)


class _Clock:
    """A streamer that keeps the time instead of the text: generate() hands it the prompt, then each token."""

    def __init__(self, name: str, new_tokens: int, progress: Progress) -> None:
        self.seconds: list[float] = []
        self._stage, self._total, self._progress = f"decode: {name}", new_tokens, progress
        self._last: float | None = None

    def put(self, value: torch.Tensor) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
            self._progress(self._stage, len(self.seconds), self._total)
        self._last = time.perf_counter()  # the progress bar is not the model's time

    def end(self) -> None:
        pass


def _wait_for(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
