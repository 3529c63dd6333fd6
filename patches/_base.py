"""What every patched attention class does before it attends: which cache it was given, and whether that will do."""

from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hf_sparse_prr.cache import Look, SparseCache
from hf_sparse_prr.hooks import cache_argument
from hf_sparse_prr.interface import check_implementation

if TYPE_CHECKING:
    from hf_sparse_prr.patching import Binding

    class _Attention(torch.nn.Module):
        """What a stock attention class has."""

        config: Any
        layer_idx: Any
        scaling: float
        o_proj: Any

else:
    _Attention = object


class SparseAttention(_Attention):
    """Mixed in before a stock attention class. `binding` is set when an instance is patched.

    A family gives `stock`, the class it stands in for, and `modeling`, its modeling file, whose RoPE and eager
    attention are used.  extra_arguments: of the stock forward beside those that every class has.
    """

    binding: "Binding"
    stock: type[torch.nn.Module]
    modeling: ModuleType
    extra_arguments: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def check_stock(cls, module: torch.nn.Module) -> None:
        """ValueError for a module that isn't as the family knows it, beside its forward."""

    def given_cache(self, cache: Any, past_key_values: Any, kwargs: dict[str, Any]) -> Any:
        """The one cache; it is `cache` since transformers 5.24 and `past_key_values` before. ValueError for two."""
        given = past_key_values if cache is None else cache
        if not isinstance(given, SparseCache) or self.layer_idx <= given.leader:
            check_implementation(self.config)
        if cache_argument() != "cache" and not isinstance(cache, SparseCache):
            if cache is not None:  # the paged cache of continuous batching, for the attention function
                kwargs["cache"] = cache
            cache = None
        if cache is not None and past_key_values is not None:
            raise ValueError("expected one cache, got both `cache` and `past_key_values`")
        return past_key_values if cache is None else cache

    def note_stock(self, cache: Any, mask: Any, count: int, kwargs: dict[str, Any]) -> None:
        """Say where the stock forward runs because of the cache."""
        if self.layer_idx == self.binding.handle.leader and not self.training:
            self.binding.check_foreign(kwargs.get("cache") if cache is None else cache, mask, count)

    def look(self, cache: SparseCache) -> Look:
        """At the config, for all layers behind the first one of full attention."""
        if cache.look is None or self.layer_idx <= cache.leader:
            asked = bool(getattr(self.config, "output_attentions", False))
            cache.look = Look(self.config._attn_implementation, asked)
        return cache.look

    def check_cache(self, cache: SparseCache, kwargs: dict[str, Any]) -> bool:
        """ValueError where this model can't use the cache, or the weights that are asked for can't be given. Returns
        whether they are."""
        if self.training:
            raise ValueError("SparseCache: expected a model in eval mode, got model.train(); call model.eval()")
        handle = self.binding.handle
        if cache.kinds is not handle.kinds and cache.kinds != handle.kinds:
            self._refuse_layers(cache)
        if cache.indexer != handle.indexer:
            expected, got = ("no indexer" if each is None else str(each) for each in (handle.indexer, cache.indexer))
            raise ValueError(f"cache: expected one for a model with {expected}, got one for {got}")
        look = self.look(cache)
        wants_weights = kwargs.get("output_attentions", look.wants_weights)
        if wants_weights and look.implementation != "eager":
            raise ValueError(
                "output_attentions: expected the eager attention implementation, got "
                f"{look.implementation!r}, which has none to return; call "
                "model.set_attn_implementation('eager')"
            )
        return bool(wants_weights)

    def _refuse_layers(self, cache: SparseCache) -> None:
        """ValueError for a cache whose layers aren't this model's."""
        expected, got = self.binding.handle.kinds, cache.kinds
        if len(expected) != len(got):
            raise ValueError(f"cache: expected {len(expected)} layers, got {len(got)}")
        index = next(i for i in range(len(got)) if expected[i] != got[i])
        names = (kinds[index] or "full attention" for kinds in (expected, got))
        raise ValueError("cache: expected {} in layer {index}, got {}".format(*names, index=index))

    def as_mask(self, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """bool [B, 1, Q, T] as the attention implementation takes it."""
        if self.config._attn_implementation != "eager":
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
