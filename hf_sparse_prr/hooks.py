"""What takes the place of `generate` on a patched model instance: picklable callables, not closures."""

import inspect
import types
from contextlib import ExitStack
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin

from .cache import SparseCache
from .compiled import CompiledCall, why_not
from .graph import decode_graph

if TYPE_CHECKING:
    from .patching import PatchHandle

MISSING = "missing"  # marks an instance attribute that wasn't there; a string, so that a pickled handle keeps it
# What is to be undone when this generate() ends; one stack a call and thread
_UNDONE: ContextVar[ExitStack | None] = ContextVar("hf_sparse_prr_undone", default=None)


@cache
def cache_argument() -> str:
    """How this transformers names the cache argument: `cache` since 5.24, `past_key_values` before. Every attention
    layer asks at every token."""
    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def class_method(instance: Any, name: str) -> Any:
    """The method of the class, whatever the instance has in its place."""
    return types.MethodType(getattr(type(instance), name), instance)


class _Hook:
    """Takes the place of the method `__name__` of a model; `replaced` is the instance attribute that was there."""

    __name__: str

    def __init__(self, handle: "PatchHandle", replaced: Any) -> None:
        self.handle = handle
        self.replaced = replaced

    def _stock(self) -> Any:
        return class_method(self.handle.model, self.__name__) if self.replaced == MISSING else self.replaced


class GenerateHook(_Hook):
    """Accepts `cache=` on every transformers, and undoes at its end what was prepared for its cache."""

    __name__ = "generate"

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return inspect.getdoc(self._stock())

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._stock())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "cache" in kwargs and cache_argument() != "cache":
            kwargs["past_key_values"] = kwargs.pop("cache")
        with ExitStack() as undone:
            undone.callback(_UNDONE.reset, _UNDONE.set(undone))
            return self._stock()(*args, **kwargs)


class PrepareCacheHook(_Hook):
    """Makes a SparseCache where the user gave no cache, and tells it where the prompt ends."""

    __name__ = "_prepare_cache_for_generation"

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        model: Any = self.handle.model
        name = cache_argument()
        dynamic = generation_config.cache_implementation in (None, "dynamic")
        wanted = dynamic and generation_config.use_cache is not False and not model.training
        wanted = wanted and not all(self.handle.kinds)  # nothing to select from: transformers' own cache
        if model_kwargs.get(name) is None and wanted:
            model_kwargs[name] = SparseCache(model)
            if generation_config.is_assistant:  # drafts are rolled back
                model_kwargs[name].activate_past_recording()
        else:
            self._stock()(generation_config, model_kwargs, mode, batch_size, max_cache_length)
        given = model_kwargs.get(name)
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if isinstance(given, SparseCache) and copies > 1 and given.tokens.batch == batch_size:
            given.batch_repeat_interleave(copies)  # prefilled for the prompts: each is continued several times
        plan = self.handle.sparse_plan
        would_be_sparse = plan is not None and max_cache_length >= plan.fits and not model.training
        foreign = given is not None and not isinstance(given, SparseCache) and would_be_sparse
        # On a GPU the forward over such a cache may be compiled: its layers can't say from there that they are stock
        if foreign and model._valid_auto_compile_criteria(model_kwargs, generation_config):
            self.handle.note_foreign(given)
        undone = _UNDONE.get()
        if isinstance(given, SparseCache) and undone is not None:
            mask = model_kwargs.get("attention_mask")
            # transformers >= 5.18 drops a mask of ones and keeps its length
            length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
            given.prompt_length = length
            undone.callback(setattr, given, "prompt_length", None)
            outputs = ("output_attentions", "output_hidden_states")
            asks = any(getattr(each, name, None) for each in (generation_config, model.config) for name in outputs)
            asks = asks or any(map(model_kwargs.get, outputs))
            tokens = None if length is None else max_cache_length - length
            wanted = not asks and model._valid_auto_compile_criteria(model_kwargs, generation_config)
            if not wanted or why_not(self.handle, given, copies) is not None:
                generation_config.disable_compile = True
                undone.enter_context(decode_graph(self.handle, given, tokens, asks))


class CompiledCallHook(_Hook):
    """What generate() compiles checks its tokens first and tells the cache after them."""

    __name__ = "get_compiled_call"

    def __call__(self, compile_config: Any) -> Any:
        return CompiledCall(self.handle, self._stock()(compile_config))


class MaskHook:
    """Before the forward of a model with an indexer: hands the mask of a SparseCache on as it is, [B, T] or none. Its
    layers work out what a query may see part by part; transformers' own mask is [B, 1, Q, T]: 4 GiB for a prompt of
    64K tokens, and several times that to read it."""

    def __init__(self, handle: "PatchHandle", name: str) -> None:
        self.handle = handle
        self.name = name  # what the model calls the mask of its layers

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        plain = mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2)
        if len(args) > 1 or not plain or not isinstance(cache, SparseCache):
            return None
        return args, {**kwargs, "attention_mask": {self.name: mask}}


HOOKS: dict[str, type[_Hook]] = {
    "generate": GenerateHook,
    "_prepare_cache_for_generation": PrepareCacheHook,
    "get_compiled_call": CompiledCallHook,
}
