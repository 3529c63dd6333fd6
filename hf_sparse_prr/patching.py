"""patch_model: the attention classes of one model instance are swapped, all intended ones or none, and swapped back."""

import dataclasses
import inspect
import types
import warnings
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import Cache, PreTrainedModel

from . import kernel_loader, patches
from .config import INDEXED, LayerPlan, SparseConfig, without_effect
from .hooks import HOOKS, MISSING, MaskHook, cache_argument, class_method
from .indexed import indexer_of
from .interface import check_implementation
from .mixed import kinds_of, leader_of, other_layers
from .report import GraphReport, LayerReport, Recorder, Report, TraceEntry
from .tokens import MAX_DRAFT, Step, longest_row

if TYPE_CHECKING:
    from .budget import Budget
    from .patches._base import SparseAttention
    from .profile import Key, Profile

_PROCESS_WARNINGS: set[str] = set()


class Binding:
    """What a patched attention module knows: its handle and its plan."""

    def __init__(self, handle: "PatchHandle", plan: LayerPlan) -> None:
        self.handle = handle
        self.plan = plan

    def check_foreign(self, cache: Any, mask: Any, count: int) -> None:
        """The first layer of full attention, before its write: say once that a cache which isn't a SparseCache runs
        stock, at the first token that would be sparse."""
        plan, name = self.handle.sparse_plan, type(cache).__name__
        if cache is None or plan is None or count > MAX_DRAFT or torch.compiler.is_compiling():
            return
        if self.handle.has_warned(f"foreign {name}"):
            return
        would_be_sparse = True  # a paged cache tells no length
        if isinstance(cache, Cache):
            seen = int(cache.get_seq_length())
            would_be_sparse = seen > 0 and seen + count > plan.fits and longest_row(mask, seen + count) > plan.fits
        if would_be_sparse:
            self.handle.note_foreign(cache)

    def check_step(self, step: Step, grad: bool, device: torch.device) -> None:
        """The first layer of full attention, before its write: masks that force a dense call, gradients that won't
        be there, a GPU without kernels."""
        backend = getattr(self.handle.kernels.module, "backend", None)
        if device.type == "cuda" and backend == "reference" and self.handle.config.kernels != "reference":
            self.handle.fall_back(
                "no Triton",
                "the plain-torch reference ops run on this GPU, right and slow: no Triton was found (remedy: pip "
                "install triton)",
            )
        blocks = self.handle.sparse_plan is not None and self.plan.selector != INDEXED  # latents heed any mask
        if step.dense_reason is not None and blocks:
            self.handle.fall_back("mask", f"stock dense attention runs for this call, because {step.dense_reason}")
        if grad:
            self.handle.warn(
                "grad",
                "attention over a SparseCache runs under torch.no_grad() and stores detached K/V; for "
                "gradients call the model without a SparseCache",
            )


class PatchHandle:
    """A patched model's settings, report and statistics; also `model.sparse_prr`.

    A context manager: leaving the `with` that patched unpatches, also on an exception; a `with` on a model that was
    patched before leaves it patched.
    """

    def __init__(
        self, model: PreTrainedModel, config: SparseConfig, modules: list[nn.Module], stock: type[nn.Module]
    ) -> None:
        self.model = model
        self.config = config
        self.modules = modules
        self.stock = stock
        self.others = other_layers(model.config)
        self.kinds = kinds_of(self.others)
        self.indexer = indexer_of(model.config)
        self.plans = config.plan(self.kinds, self.indexer)
        self.classes = [type(module).__name__ for module in modules]
        self.replaced: dict[str, Any] = {}
        self._start()

    def _start(self) -> None:
        self.recorder = Recorder(self.plans, self.config)
        self.graphs = GraphReport()
        self.compiled = 0  # decode tokens that ran compiled
        self.profiles: dict[Key, Profile | None] = {}  # that were asked for
        self.budget: Budget | None = None  # of the cache that ran last
        self.warnings: dict[str, str] = {}
        self.kernels = kernel_loader.resolve(self.config.kernels, self.config.strict)
        if self.kernels.fallback is not None:
            self.warn(f"kernels {self.config.kernels}", self.kernels.fallback)
        if self.sparse_plan is None and self.config.budget is not None and any(self.kinds):
            reasons = ", ".join(sorted({plan.reason for plan in self.plans}))
            self.fall_back(
                f"no sparse layer {reasons}", f"stock dense attention runs in every layer, because: {reasons}"
            )
        self._unpatch_on_exit: list[bool] = []
        self._fresh = False

    def __getstate__(self) -> dict[str, Any]:
        kept = ("model", "config", "modules", "stock", "others", "kinds", "indexer", "plans", "classes", "replaced")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def inv_freq(self) -> torch.Tensor | None:
        """RoPE frequencies as the model has them now (dynamic scaling changes them); None where it keeps none."""
        return getattr(getattr(self.model.base_model, "rotary_emb", None), "inv_freq", None)

    @property
    def leader(self) -> int:
        """The first layer of full attention."""
        return leader_of(self.kinds)

    @property
    def sparse_plan(self) -> LayerPlan | None:
        """The plan of the sparse layers; None where all are dense."""
        return next((plan for plan in self.plans if plan.status == "sparse"), None)

    def __enter__(self) -> "PatchHandle":
        if not self.replaced:
            raise RuntimeError("expected a patched model, got the handle of one that was unpatched; call patch_model")
        self._unpatch_on_exit.append(self._fresh)
        self._fresh = False
        return self

    def __exit__(self, *exception: object) -> None:
        if self._unpatch_on_exit.pop():
            self.unpatch()

    def has_warned(self, cause: str) -> bool:
        return cause in self.warnings

    def warn(self, cause: str, message: str) -> None:
        """One warning per process and cause; the report has it for every handle it concerns."""
        self.warnings.setdefault(cause, message)
        if cause not in _PROCESS_WARNINGS:
            _PROCESS_WARNINGS.add(cause)
            warnings.warn(f"hf_sparse_prr: {message}", UserWarning, stacklevel=2)

    def note_foreign(self, cache: Any) -> None:
        """A cache that isn't a SparseCache runs stock."""
        name = type(cache).__name__
        self.fall_back(
            f"foreign {name}",
            f"stock dense attention runs, because the cache is a {name}; pass SparseCache(model), or let "
            "generate() make one",
        )

    def fall_back(self, cause: str, message: str) -> None:
        """Something else runs than was asked for: RuntimeError under `strict`, else a warning."""
        if self.config.strict:
            raise RuntimeError(f"strict=True: {message}")
        self.warn(cause, message)

    def report(self) -> Report:
        """What is active, layer by layer. Prints as a table."""
        layers = []
        for index, (name, plan) in enumerate(zip(self.classes, self.plans, strict=True)):
            settings: dict[str, Any] = {}
            if plan.selector == INDEXED:
                settings = {
                    "index_topk": plan.blocks,
                    "speculate": plan.predicted_blocks > 0,
                    "predicted_tokens": plan.predicted_blocks,
                    "hint": plan.hint,
                }
            elif plan.status == "sparse":
                settings = {
                    "budget": plan.blocks * plan.block_size,
                    "block_size": plan.block_size,
                    "sink_blocks": plan.sink_blocks,
                    "local_blocks": plan.local_blocks,
                    **plan.options,
                    "speculate": plan.predicted_blocks > 0,
                    "predicted_blocks": plan.predicted_blocks,
                    "semantics": "superset" if plan.superset else "exact",
                    "hint": plan.hint,
                }
            layers.append(LayerReport(index, name, plan.selector or None, settings, plan.status, plan.reason))
        notes = []
        done = self.recorder.summary()
        if self.indexer is None and self.sparse_plan is not None and done["steps"] and not done["selector_calls"]:
            notes.append(
                f"nothing was selected so far: all {done['steps']} decode steps were stock, no row being longer than "
                f"the {self.sparse_plan.fits} tokens that it attends to densely"
            )
        if self.config.leaves_to_profile and self.sparse_plan is not None:
            notes.append(f"speculate={self.config.speculate!r}: {self.budget or self._without_profile()}")
        if self.indexer is not None and (idle := without_effect(self.config)):
            notes.append(f"the model's indexer decides what these are about, they have no effect: {', '.join(idle)}")
        if self.graphs.captured or self.graphs.reason or self.graphs.beside:
            notes.append(str(self.graphs))
        if self.compiled:
            notes.append(f"{self.compiled} decode steps ran as generate() compiles them, where nothing is predicted")
        if self.config.semantics == "superset":
            predicts = any(plan.predicted_blocks for plan in self.plans)
            what = "predicted blocks are attended to as well, outputs differ from serial"
            notes.append(f"semantics='superset': {what if predicts else 'nothing is predicted, so it changes nothing'}")
        return Report(layers, self.kernels, list(self.warnings.values()), notes)

    def _without_profile(self) -> str:
        what = "off" if self.config.speculate == "auto" else "spec_ratio 1"
        for key in self.profiles:
            return f"{what}, there is no profile for {key}; `hf-sparse-prr profile` measures one"
        return f"{what}, there is no profile for this model and device"

    def stats(self) -> dict[str, Any]:
        """Counts and rates since patching or `reset_stats()`, as host numbers; rates exclude forced blocks.

        steps, selector_calls (layers x steps), hit_rate = |P n A| / |A|, hit_rate_weighted (the share of a
        selection's normalised score that was predicted, the mean over tokens, layers and KV heads that something was
        predicted for; hit_rate counts the others as missed),
        extra_rate = |P - A| / |P|, repaired_blocks, bytes_read (K/V and summaries), ema, and layers: the same of each.
        Rates are None if nothing was ever predicted. Counters count work done, also for drafts that were rejected;
        the trace follows the cache and forgets them.
        """
        return self.recorder.summary()

    def reset_stats(self) -> None:
        """Clear statistics and trace."""
        self.recorder.clear()

    @property
    def trace(self) -> list[TraceEntry]:
        """With trace=True, (step, layer, predicted, selected, missed) of every decode token."""
        return self.recorder.trace

    def unpatch(self) -> None:
        """Put the stock classes back. Idempotent."""
        for module in self.modules:
            binding = module.__dict__.get("binding")
            if binding is not None and binding.handle is self:
                del module.__dict__["binding"]
                _set_class(module, self.stock)
        for name, value in self.replaced.items():
            ours = self.model.__dict__.get(name)
            if getattr(ours, "handle", ours) is not self:
                continue  # somebody replaced it since
            if value == MISSING:
                del self.model.__dict__[name]
            else:
                self.model.__dict__[name] = value
        self.replaced = {}
        before = self.model.base_model
        for key, hook in list(before._forward_pre_hooks.items()):
            if isinstance(hook, MaskHook) and hook.handle is self:
                del before._forward_pre_hooks[key]
                before._forward_pre_hooks_with_kwargs.pop(key, None)


def _set_class(module: nn.Module, cls: type) -> None:
    """Swap the class of an instance so that accelerate's hooks, set before or after, call the right forward."""
    module.__class__ = cls
    attributes = module.__dict__
    if "_old_forward" in attributes:  # what a hooked forward calls
        attributes["_old_forward"] = class_method(module, "forward")
    elif isinstance(attributes.get("forward"), types.MethodType):  # left behind by remove_hook_from_module
        attributes["forward"] = class_method(module, "forward")


def _check_forward(module: nn.Module, others: frozenset[str]) -> None:
    """ValueError for an attention class whose forward isn't the one we know, naming the parameter and the version.
    others: parameters that this family has beside the usual ones."""
    known = {"self", "hidden_states", "position_embeddings", "attention_mask", cache_argument(), "kwargs", *others}
    parameters = set(inspect.signature(type(module).forward).parameters)
    odd = sorted(parameters ^ known)
    if odd:
        raise ValueError(
            f"{type(module).__name__}.forward: expected the parameters {', '.join(sorted(known))}, got "
            f"{'unknown' if odd[0] in parameters else 'no'} {odd[0]!r} (transformers {transformers.__version__})"
        )


def _attention_modules(model: PreTrainedModel, sparse: "type[SparseAttention]") -> list[Any]:
    """The modules to patch, in layer order; ValueError unless there is one for each layer, all of them as we know."""
    stock = sparse.stock
    modules: list[Any] = [module for module in model.modules() if isinstance(module, stock)]
    for module in modules:
        _check_forward(module, sparse.extra_arguments)
        if type(module) is not stock:
            raise ValueError(f"expected {stock.__name__} modules, got {type(module).__name__}")
        sparse.check_stock(module)
        forward = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
        if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
            raise ValueError(f"expected no instance forward on {type(module).__name__}, got {forward!r}; undo it first")
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    modules.sort(key=lambda module: module.layer_idx)
    if [module.layer_idx for module in modules] != list(range(layers)):
        raise ValueError(f"expected an attention module for each of {layers} layers, got {len(modules)}")
    return modules


def _patchable(model: nn.Module) -> PreTrainedModel:
    """The transformers model in `model` (itself, or inside a wrapper such as a PeftModel)."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"model: expected a transformers model, got {type(model).__name__}")


def _differing(held: SparseConfig, config: SparseConfig) -> str:
    """The fields in which two settings differ: "budget=256, got budget=128"."""
    names = [
        field.name for field in dataclasses.fields(held) if getattr(held, field.name) != getattr(config, field.name)
    ]
    old, new = (", ".join(f"{name}={getattr(each, name)!r}" for name in names) for each in (held, config))
    return f"{old}, got {new}"


def _handle_of(model: PreTrainedModel) -> PatchHandle | None:
    """The handle that has patched a model, or a model inside or around it."""
    bindings = (module.__dict__.get("binding") for module in model.modules())
    return next((binding.handle for binding in bindings if isinstance(binding, Binding)), None)


def patch_model(model: nn.Module, config: SparseConfig | None = None, /, **overrides: Any) -> PatchHandle:
    """Make a model decode sparsely. Touches this instance only, all intended layers or none.

    Args:
        model: a transformers model, before or after device_map, tp_plan, PEFT and .to().
        config: settings; default SparseConfig().  overrides: fields of it.

    Returns:
        The handle. A model that is patched with the same settings gives the same handle.

    Raises:
        ValueError: unsupported model type (lists the supported ones), an attention class we don't know, settings out
            of range, or the model is patched with other settings.
        TypeError: an unknown setting (lists the fields).
    """
    if config is not None and not isinstance(config, SparseConfig):
        raise TypeError(f"config: expected a SparseConfig, got {config!r}; give single fields by name")
    config = (config or SparseConfig()).replace(**overrides)
    target = _patchable(model)
    held = _handle_of(target)
    if held is not None:
        if held.config != config:
            raise ValueError(
                f"expected the settings it is patched with, {_differing(held.config, config)}; unpatch first"
            )
        if target not in held.model.modules():
            raise ValueError(
                f"expected an unpatched model, got one whose {type(held.model).__name__} is; unpatch that first"
            )
        held._fresh = False
        return held
    sparse = patches.family(target.config.model_type)
    check_implementation(target.config)
    handle = PatchHandle(target, config, _attention_modules(target, sparse), sparse.stock)
    try:
        for module, plan in zip(handle.modules, handle.plans, strict=True):
            module.__dict__["binding"] = Binding(handle, plan)
            _set_class(module, sparse)
        for name, hook in HOOKS.items():
            if hasattr(target, name):
                handle.replaced[name] = target.__dict__.get(name, MISSING)
                target.__dict__[name] = hook(handle, handle.replaced[name])
        if handle.indexer is not None:
            mask = MaskHook(handle, target.config.get_text_config(decoder=True).layer_types[0])
            target.base_model.register_forward_pre_hook(mask, with_kwargs=True)
        handle.replaced["sparse_prr"] = MISSING
        target.__dict__["sparse_prr"] = handle
    except BaseException:  # all or none, also on Ctrl-C; raised again
        handle.unpatch()
        raise
    handle._fresh = True
    return handle


def unpatch_model(model: nn.Module) -> None:
    """Make a model stock again. Idempotent."""
    handle = _handle_of(_patchable(model))
    if handle is not None:
        handle.unpatch()
