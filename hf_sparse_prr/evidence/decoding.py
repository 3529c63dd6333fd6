"""Decode given rows under one setting after another, over copies of one prefilled cache.

The prompt is read by the stock model. Its last tokens, the end of the question, are decoded: each selects for itself,
as an answer's tokens do. Models with an indexer read the prompt under each setting: what stock caches isn't what a
patched model needs.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from hf_sparse_prr import SparseCache, patch_model
from hf_sparse_prr.dense import without_cudnn
from hf_sparse_prr.evidence.forced import FORCED, nothing_selected
from hf_sparse_prr.evidence.settings import Setting
from hf_sparse_prr.evidence.subjects import Subject
from hf_sparse_prr.hooks import cache_argument
from hf_sparse_prr.report import TraceEntry

_CHUNK = 512  # prompt tokens a forward
_STOCK_CHUNK = 128  # stock's indexer copies the index keys for each of them: 2 GiB for 16 rows of 4K
_UNUSED = 4 * 2**30  # bytes that stock may keep: to give them back after each chunk made other processes wait


class Decoded(NamedTuple):
    """ids: int64 [B, n], of the tokens decoded.  digest: sha256 of all their logits' bits.  stats: of the patch, None
    for dense.  logits: fp32 [B, n, V] where they were asked for.  trace: where `trace=True` was asked for."""

    ids: torch.Tensor
    digest: str
    stats: dict[str, Any] | None
    logits: torch.Tensor | None
    trace: list[TraceEntry]


class Rows:
    """ids: int64 [B, T].  begin: the first token that is decoded; those before it are the prompt.  chosen: bool [T],
    true where a token is the model's own choice and not the one in `ids`.  own_prompt: each setting reads the prompt
    itself, so that the EMA can be calibrated by it."""

    def __init__(
        self, subject: Subject, ids: torch.Tensor, begin: int, chosen: torch.Tensor, own_prompt: bool = False
    ) -> None:
        self.own_prompt = own_prompt or subject.indexed
        self.subject, self.ids, self.begin, self.chosen = subject, ids.to(subject.model.device), begin, chosen.tolist()
        self._prompt: Any = None  # the cache, once it is needed

    @torch.inference_mode()
    def decode(self, setting: Setting, keep: bool = False, **more: Any) -> Decoded:
        """Greedy where the token is the model's own. keep: the logits. more: SparseConfig fields."""
        with self._patched(setting, more) as handle:
            cache = self._cache(setting)
            digest, kept, found = hashlib.sha256(), [], []
            token = self.ids[:, self.begin]
            last = self.ids.shape[1] - 1
            for at in range(self.begin, last):
                given = {cache_argument(): cache}
                logits = self.subject.model(token[:, None], use_cache=True, **given).logits[:, -1].float()
                digest.update(logits.cpu().numpy().tobytes())
                if keep:
                    kept.append(logits)
                token = logits.argmax(-1) if self.chosen[at + 1] else self.ids[:, at + 1]
                found.append(token)
            stats, trace = (None, []) if handle is None else (handle.stats(), handle.trace)
        ids = torch.stack(found, dim=1).cpu()
        return Decoded(ids, digest.hexdigest(), stats, torch.stack(kept, dim=1) if keep else None, trace)

    @contextmanager
    def _patched(self, setting: Setting, more: dict[str, Any]) -> Iterator[Any]:
        if setting.mode == "dense":
            with without_cudnn():  # as patched models do
                yield None
            return
        known = nothing_selected() if setting.mode == FORCED else nullcontext()
        with known, patch_model(self.subject.model, **setting.overrides(**more)) as handle:
            yield handle

    def _cache(self, setting: Setting) -> Any:
        model = self.subject.model
        if self.own_prompt:
            return self._prefill(DynamicCache(config=model.config) if setting.mode == "dense" else SparseCache(model))
        if self._prompt is None:
            raise ValueError("rows: expected read() before decode(): this prompt is read by the stock model")
        return copy.deepcopy(self._prompt)

    @torch.inference_mode()
    def read(self) -> None:
        """Read the prompt, once, with the unpatched model."""
        if self._prompt is None and not self.own_prompt:
            self._prompt = self._prefill(SparseCache(self.subject.model.config))

    def _prefill(self, cache: Any) -> Any:
        if isinstance(cache, SparseCache):
            cache.prompt_length = self.begin
        stock = self.subject.indexed and not isinstance(cache, SparseCache)
        for chunk in self.ids[:, : self.begin].split(_STOCK_CHUNK if stock else _CHUNK, dim=1):
            self.subject.model(chunk, use_cache=True, logits_to_keep=1, **{cache_argument(): cache})
            if stock and chunk.is_cuda and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _UNUSED:
                torch.cuda.empty_cache()  # each chunk takes more than the last: what is kept of that is of no use
        return cache
