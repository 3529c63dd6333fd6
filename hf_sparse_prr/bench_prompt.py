"""Time generate() from one prompt again and again: what `bench token` calls in each of its settings."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from .bench import filled
from .bench_exact import ExactnessError, check_bits
from .bench_time import Timer, busy_ms, spread_of
from .cache import SparseCache
from .hooks import cache_argument
from .patching import PatchHandle

FEW = 12  # tokens of the shorter of two calls: fewer than 8 to come aren't captured


def _check_ids(what: str, got: torch.Tensor, expected: torch.Tensor, of: str) -> None:
    if not torch.equal(got, expected):
        row, at = (got != expected).nonzero()[0].tolist()
        raise ExactnessError(f"{what}: expected the ids of {of}, got others from token {at} of row {row} on")


def _rewind(cache: Any, count: int) -> None:
    """Drop the last tokens. A StaticCache of transformers 5.17 can't by itself."""
    if isinstance(cache, StaticCache):
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.cumulative_length.sub_(count)
    else:
        cache.crop(-count)


class Prompt:
    """Random ids [batch, context] that a model continues.

    computed: by the model, which gives their K/V; else those are random.  many: tokens of the longer of two calls,
    that of FEW is the shorter one.
    """

    def __init__(self, model: Any, context: int, batch: int, new_tokens: int, computed: bool) -> None:
        self.model, self.context, self.batch, self.computed = model, context, batch, computed
        self.many = FEW + new_tokens
        self._timed = Timer(model.device)
        self._compiles = False  # what is generated with just now
        torch.manual_seed(0)
        self._ids = torch.randint(model.config.vocab_size, (batch, context + 1), device=model.device)

    @property
    def cache_bytes(self) -> int:
        """Of all K/V."""
        config = self.model.config
        vectors = 2 * config.num_hidden_layers * config.num_key_value_heads * self.batch * self.context
        return vectors * config.head_dim * self.model.dtype.itemsize

    def read_bytes(self, handle: PatchHandle | None) -> float:
        """Of K/V and summaries that a token read; all K/V in layers that never selected."""
        if handle is None:
            return self.cache_bytes
        each = handle.stats()["layers"]
        whole = self.cache_bytes / len(each)
        return sum(at["bytes_read"] / at["selector_calls"] if at["selector_calls"] else whole for at in each)

    def _generate(self, cache: Any, ids: torch.Tensor, count: int, logits: bool = False) -> Any:
        """Ids [batch, tokens + count], and if they are asked for the logits of each new one."""
        options: dict[str, Any] = {cache_argument(): cache, "max_new_tokens": count, "do_sample": False}
        options["disable_compile"] = not self._compiles
        return self.model.generate(ids, output_logits=logits, return_dict_in_generate=True, **options)

    def _prefilled(self, new_cache: Callable[[], Any]) -> tuple[Any, torch.Tensor, float | None]:
        """A cache of the context, the ids with the one that follows, and, where they are computed, the ms that this
        took the second time."""
        config, device = self.model.config, self.model.device
        if not self.computed:
            torch.manual_seed(1)  # the same K/V in every setting
            shape = (self.batch, config.num_key_value_heads, self.context, config.head_dim)
            return filled(new_cache(), shape, config.num_hidden_layers, device, self.model.dtype), self._ids, None
        for _ in range(2):
            cache = new_cache()
            ms, out = self._timed(self._generate, cache, self._ids[:, :-1], 1)
        return cache, out.sequences, ms

    def _cache_of(self, name: str, handle: PatchHandle | None) -> Callable[[], Any]:
        """What makes the caches of a setting."""
        model, room = self.model, self.context + self.many + 1
        if handle is not None:
            return lambda: SparseCache(model, max_length=room if name == "preallocated" else None)
        if name in ("static", "compiled"):
            return lambda: StaticCache(config=model.config, max_cache_len=room)
        return lambda: DynamicCache(config=model.config)

    def measure(
        self, name: str, handle: PatchHandle | None, same: tuple[str, Any] | None, rounds: int,
        progress: Callable[[int, int], None],
    ) -> tuple[dict[str, Any], Any]:  # fmt: skip
        """Times in ms of the setting `name`, and what its first call gave. After each call the cache is cropped, so
        that all of them continue the same context.

        same: the name of a setting, and what it gave, whose ids and logits these have to be; ExactnessError if they
            aren't, or if a patched model's calls differ from each other.  ValueError where noise hides the time.
        """
        model, on_gpu = self.model, self.model.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(model.device)
        progress(0, rounds + 1)
        new_cache, self._compiles = self._cache_of(name, handle), name in ("compiled", "preallocated")
        cache, ids, prompt_ms = self._prefilled(new_cache)

        def call(count: int, logits: bool = False) -> tuple[float, Any]:
            ms, out = self._timed(self._generate, cache, ids, count, logits)
            _rewind(cache, count)
            return ms, out

        _, out = call(self.many, logits=True)
        given = out.sequences[:, self.context :].cpu(), torch.stack(out.logits).cpu()
        del out
        if same is not None:
            _check_ids(name, given[0], same[1][0], same[0])
            check_bits(f"the logits of {name}", given[1], same[1][1], same[0])
        taken: dict[int, list[float]] = {1: [], FEW: [], self.many: []}
        for done in range(rounds):
            progress(done + 1, rounds + 1)
            for count, times in taken.items():
                ms, out = call(count)
                times.append(ms)
                if handle is not None:
                    again = out.sequences[:, self.context :].cpu()
                    _check_ids(f"{name}, called again", again, given[0][:, : count + 1], "its first call")
        each = [(long - short) / (self.many - FEW) for short, long in zip(taken[FEW], taken[self.many], strict=True)]
        ms = statistics.median(each)
        if ms <= 0:
            raise ValueError(f"tokens: expected more, whose time shows, got {self.many - FEW} in {ms:.2g} ms each")
        short, long = (busy_ms(partial(call, count), model.device) for count in (FEW, self.many))
        row = {
            "ms": ms,
            "min": min(each),
            "gpu_ms": None if short is None or long is None else (long - short) / (self.many - FEW),
            "spread": spread_of(each),
            "first_ms": statistics.median(taken[1]) if prompt_ms is None else prompt_ms,
            "tokens_per_s": 1e3 * self.batch / ms,
            "peak_bytes": torch.cuda.max_memory_allocated(model.device) if on_gpu else None,
        }
        return row, given
