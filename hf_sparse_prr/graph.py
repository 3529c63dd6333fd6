"""The decode steps of generate() as CUDA graphs: what a token's sparse layers launch, 1.3 ms of Python each, is
captured once and replayed.

Layers up to the first of full attention run as ever: that one checks the token, appends it and tells the cache. So do
dense layers, whose attention takes another shape for each length. What follows them is the tail: it reads lengths on
the device alone (on_device.py), so a replay is right for every later token, until a buffer moves.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from threading import Lock, get_ident
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .cache import CACHE_NAMES, SparseCache, cache_in
from .experts import why_not_experts
from .fused import Layer, layer_of, why_not_module
from .layer import writes
from .on_device import DeviceSteps

if TYPE_CHECKING:
    from .patching import PatchHandle

DEVICES = ("cuda",)
_SOME = 8  # tokens that a capture pays after, about: it costs as much as five eager ones
_MOVED = "no two tokens in a row had the same buffers and every row selecting (beams, drafts and crops move them)"
_LOCK, _INSTALLING = Lock(), Lock()
_RUNNING: list[int] = []  # the threads of generate() calls over a SparseCache, once a call

Replay = Callable[[], None]


def captured(run: Callable[[], torch.Tensor], output: torch.Tensor) -> tuple[Replay, int]:
    """What repeats `run`, and leaves in `output` what it returned; and the bytes that it keeps. RuntimeError where
    something in it can't be captured.

    On a stream of its own: torch's default for captures is one for the process, on the GPU that captured first. A
    capture that fails may leave the thread on it, so the stream that was current is set again.
    """
    device = output.device
    with _LOCK, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        torch.cuda.empty_cache()  # as a capture does
        before = torch.cuda.memory_reserved(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
            output.copy_(run())
        return graph.replay, max(torch.cuda.memory_reserved(device) - before, 0)


def _nothing() -> None:
    """A reference to None."""


def _reference(tensor: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    return _nothing if tensor is None else weakref.ref(tensor)


def _leaves(kwargs: dict[str, Any]) -> list[Any]:
    """What a token's layers are given beside hidden states and the cache, flat."""
    leaves: list[Any] = []
    for name in sorted(kwargs):
        value = kwargs[name]
        if isinstance(value, tuple | list | dict):
            leaves += tree_leaves(value)
        elif name not in CACHE_NAMES:
            leaves.append(value)
    return leaves


def _by_dtype(leaves: list[Any]) -> list[list[torch.Tensor]]:
    """The tensors among them."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in leaves:
        if isinstance(each, torch.Tensor):
            found.setdefault(each.dtype, []).append(each)
    return list(found.values())


class _Graph(NamedTuple):
    """A captured tail. inputs: what it reads, dtype by dtype.  output: what it writes.  steps: hold the priors that it
    reads and writes.  bytes: that it keeps."""

    replay: Replay
    inputs: list[list[torch.Tensor]]
    output: torch.Tensor
    steps: DeviceSteps
    bytes: int


class Tail:
    """The last layers of a model, all of them sparse, over one cache. One graph for each choice of what is speculated
    on, kept until a buffer moves: to change the choice costs a copy of what the layers remember.

    first: the index of the first of them.  layers: what each of them runs.
    """

    def __init__(self, handle: "PatchHandle", cache: SparseCache, layers: list[Layer], first: int) -> None:
        self.handle, self.cache, self.layers, self.first = handle, cache, layers, first
        self.plan = handle.plans[first]
        self.notes = handle.graphs
        self._steps = DeviceSteps(handle, cache, first)
        self._hands_on = getattr(handle.modules[first], "hands_on", False)  # its layers return their selection too
        self._config = handle.model.config.get_text_config(decoder=True)
        self._off = False
        self._known, self._wait = 0, 1  # tokens in a row that a graph would do for; and those before it is captured
        self._replayed = 0  # by the graphs there are
        self._single = 0  # forwards of one token so far
        self._done: torch.Tensor | None = None  # what the tail returned last
        self._given: Any = None  # what the last token's layers were given, but for tensors' values
        self._buffers: list[Callable[[], Any]] = []  # of the last token; held, they would outlive a growth
        self._shapes: Any = None  # of its priors
        self._kept: dict[tuple[int, ...], _Graph] = {}
        self._choice: tuple[int, ...] = ()  # of the last token
        self._tried = False

    def forward(self, at: int, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Of the at-th layer of the tail. The first one runs all of them, and the others hand on what it returned."""
        layer = self.layers[at]
        if at > 0:
            done = hidden_states is self._done
            return self._returned(hidden_states) if done else layer(hidden_states, *args, **kwargs)
        cache = cache_in(kwargs)
        if args or cache is not self.cache or torch.is_grad_enabled():  # the first: another thread's
            return layer(hidden_states, *args, **kwargs)
        self._done = self._token(hidden_states, kwargs)
        return layer(hidden_states, **kwargs) if self._done is None else self._returned(self._done)

    def _returned(self, hidden_states: torch.Tensor) -> Any:
        """As a layer returns it; nobody asks for a selection behind the tail."""
        return (hidden_states, None) if self._hands_on else hidden_states

    @writes
    def _token(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The tail's output, or None: this token has to run as ever. Two do before a graph is captured, so that every
        kernel is compiled and the state is one that a token leaves; and two after each change of a buffer."""
        kwargs = {name: value for name, value in kwargs.items() if name != "attention_mask"}
        self._single += hidden_states.shape[1] == 1
        if not self._can_replay(hidden_states):
            self._drop()
            self._given = None
            return None
        self._steps.summarise(self.cache.tokens.length - 1)
        leaves = _leaves(kwargs)
        described = self._describe(hidden_states, kwargs, leaves)
        same, choice = self._is_known(described), self._steps.choice()
        graph, turned, self._choice = self._kept.get(choice), choice != self._choice, choice
        if same and graph is not None and (graph.steps.holds() or (turned and graph.steps.take())):
            for held, new in zip(graph.inputs, _by_dtype([hidden_states, *leaves]), strict=True):
                torch._foreach_copy_(held, new)  # in one kernel
            graph.replay()
            self._replayed += 1
            self.notes.replayed += 1
            graph.steps.advance()
            return graph.output.clone()  # the next token's is written over it
        steady = same and turned and graph is None and bool(self._kept)  # but for the choice it could be replayed
        if not steady:
            fresh = not self._kept
            self._drop()
            self._known = self._known + 1 if same and fresh and self._shapes == self._steps.prior_shapes() else 0
        if (steady or self._known >= self._wait) and len(set(_RUNNING)) == 1:  # nothing beside other threads' work
            return self._capture(hidden_states, kwargs)
        self._given, self._shapes = described, self._steps.prior_shapes()
        self._buffers = [_reference(tensor) for tensor in self._steps.tensors()]
        return None

    def _drop(self) -> None:
        """The graphs don't do any more. Ones that hardly paid make the next one wait twice as long."""
        if self._kept:
            self._wait = 1 if self._replayed >= _SOME else 2 * self._wait
        self._kept, self._replayed, self._known = {}, 0, 0

    def _can_replay(self, hidden_states: torch.Tensor) -> bool:
        """Whether this is a decode token for which every row of every layer selects, after another one."""
        cache, step = self.cache, self.cache.step
        if self._off or not self.handle.replaced:  # the second: a streamer has unpatched the model
            return False
        if torch.is_autocast_enabled(hidden_states.device.type):  # its casts are freed with it
            self._off, self.notes.reason = True, "autocast is on"
            return False
        if hidden_states.device.type not in DEVICES or hidden_states.shape[1] != 1:
            return False
        if step is None or self._config.num_hidden_layers != len(self.handle.plans):  # drafts by early exit run fewer
            return False
        plain = step.count == 1 and step.first_decode == 0 and step.dense_reason is None and not step.changed
        if not plain or not cache.tokens.all_longer(step.begin, self.plan.fits) or torch.compiler.is_compiling():
            return False
        return self._steps.can_run(step.begin, hidden_states.device)

    def _describe(self, hidden_states: torch.Tensor, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        given = [(each.shape, each.dtype) if isinstance(each, torch.Tensor) else each for each in leaves]
        return hidden_states.shape, hidden_states.dtype, hidden_states.device, sorted(kwargs), given

    def _is_known(self, described: Any) -> bool:
        """Whether a graph of the last token does for this one what running it would."""
        if self._given != described:
            return False
        tensors = self._steps.tensors()
        return all(held() is each for held, each in zip_longest(self._buffers, tensors, fillvalue=_nothing))

    def _capture(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Run this token as a graph would, and capture it for the next."""
        given = {"hidden_states": hidden_states, **kwargs}
        inputs = tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, given)
        steps = DeviceSteps(self.handle, self.cache, self.first)
        steps.hold()
        run = partial(steps.run, partial(self._forward, inputs))
        output = run()
        held = output.clone()
        self._tried = True
        steps.advance()
        try:
            replay, kept = captured(run, held)
        except RuntimeError as error:  # what was captured so far never ran
            self._off, self.notes.failed = True, f"the step can't be captured: {str(error).splitlines()[0]}"
            self.notes.reason = self.notes.failed
            self.handle.warn("CUDA graph", f"decode steps run uncaptured, with the same bits: {self.notes.failed}")
            return output
        copied = _by_dtype([inputs["hidden_states"], *_leaves({name: inputs[name] for name in kwargs})])
        self._kept[self._choice] = _Graph(replay, copied, held, steps, kept)
        self.notes.captured += 1
        self.notes.bytes = sum(graph.bytes for graph in self._kept.values())
        return output

    def _forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        """All layers on the inputs that are held."""
        given = dict(inputs)
        hidden_states = given.pop("hidden_states")
        for run in self.layers:
            output = run(hidden_states, attention_mask=None, **given)
            if self._hands_on:
                hidden_states, given["prev_topk_indices"] = output
            else:
                hidden_states = output
        return hidden_states

    def end(self) -> None:
        """generate() is over: the graph and its memory are given back."""
        if not self._tried and self._single > _SOME and self.notes.reason is None:
            self.notes.reason = _MOVED
        self._kept = {}


class _Forward:
    """Stands in for the forward of a decoder layer during generate(). A copy of the model has the layer's own."""

    def __init__(self, layer: Any, run: Layer | None) -> None:
        self.layer, self.run = layer, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = MethodType(type(self.layer).forward, self.layer) if self.run is None else self.run
        return run(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _Forward, (self.layer, None)


def _is_installed(decoder: Any) -> bool:
    forward = None if decoder is None else decoder.__dict__.get("forward")
    return isinstance(forward, _Forward) and forward.run is not None


def _decoders(handle: "PatchHandle") -> list[Any]:
    """The decoder layers around the patched attention modules, in their order."""
    around = {id(getattr(module, "self_attn", None)): module for module in handle.model.modules()}
    return [around.get(id(attention)) for attention in handle.modules]


def why_not(handle: "PatchHandle", decoders: list[Any], first: int) -> str | None:
    """Why the decode steps of this model can't be captured. What changes in its layers while generate() runs isn't
    seen."""
    modules = [module for decoder in decoders if decoder is not None for module in decoder.modules()]
    modules += [handle.model, handle.model.base_model]
    parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    reasons = (
        (not handle.config.cuda_graph, "cuda_graph=False"),
        (handle.config.trace, "trace=True keeps tensors of every token"),
        (handle.config.hint == "rope", "hint='rope' is worked out on the host"),
        (handle.config.semantics == "superset", "semantics='superset' depends on what is remembered"),
        (
            len(decoders) < 2 or handle.plans[first].status == "dense",
            "fewer than two layers that select stand behind the others",
        ),
        (None in decoders, "an attention module isn't the self_attn of a layer"),
        (torch.nn.modules.module._has_any_global_hook(), "a hook on all modules"),
        (any(type(parameter).__name__ == "DTensor" for parameter in parameters), "weights are sharded"),
        (len({parameter.device for parameter in parameters}) > 1, "weights are on several devices"),
        (handle.graphs.failed is not None, handle.graphs.failed),
    )
    told = next((reason for holds, reason in reasons if holds), None) or why_not_experts(decoders)
    return told or next((reason for module in modules if (reason := why_not_module(module)) is not None), None)


@contextmanager
def decode_graph(handle: "PatchHandle", cache: SparseCache, tokens: int | None, asks_for_more: bool) -> Iterator[None]:
    """Within it decode steps over `cache` are captured where they can be; `handle.graphs` says what became of it.

    tokens: to come at most, if it is known.  asks_for_more: hidden states or attentions are asked for, of every layer.
    """
    plans = handle.plans
    if handle.model.device.type not in DEVICES or handle.sparse_plan is None:
        yield
        return
    first = handle.leader + 1
    if handle.indexer is None:  # else they all select, or share what another selects
        first = max(first, next(at for at in range(len(plans)) if len(set(plans[at:])) == 1))
    decoders = _decoders(handle)
    tail, installed = None, []
    with _INSTALLING:
        if any(_is_installed(decoder) for decoder in decoders):
            handle.graphs.beside += 1
        else:
            reason = "hidden states or attentions are asked for" if asks_for_more else None
            if tokens is not None and tokens < _SOME:
                reason = f"fewer than {_SOME} tokens were to come"
            handle.graphs.reason = reason or why_not(handle, decoders[first:], first)
            # Where an indexer selects, attention fuses its own linear parts
            latent: list[Any] = handle.modules if handle.indexer is not None and handle.config.fused_layers else []
            handle.graphs.fused = sum(attention.fuses() for attention in latent)
            known = {at: decoder for at, decoder in enumerate(decoders) if decoder is not None}
            # Those that are asked for attentions or hidden states run as they are
            layers = {
                at: decoder.forward if asks_for_more else layer_of(handle, decoder) for at, decoder in known.items()
            }
            if handle.graphs.reason is None:
                tail = Tail(handle, cache, [layers[at] for at in range(first, len(plans))], first)
            for at, decoder in known.items():
                run = layers[at] if tail is None or at < first else partial(tail.forward, at - first)
                if "forward" not in decoder.__dict__ and run != decoder.forward:
                    decoder.__dict__["forward"] = _Forward(decoder, run)
                    installed.append(decoder)
        _RUNNING.append(get_ident())
    try:
        yield
    finally:
        _RUNNING.remove(get_ident())
        for decoder in installed:
            if isinstance(decoder.__dict__.get("forward"), _Forward):
                del decoder.__dict__["forward"]
        if tail is not None:
            tail.end()
