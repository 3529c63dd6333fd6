"""SparseConfig: what a user may choose, checked field by field; LayerPlan: what one layer does with it."""

import dataclasses
import functools
import math
import numbers
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from .kernel_loader import is_repo_id
from .selectors import SELECTORS, Selector

if TYPE_CHECKING:
    from .indexed import Indexer

BLOCK_SIZES = (16, 32, 64, 128)
SEMANTICS = ("exact", "superset")
HINTS = ("predicted", "previous", "rope", "none")
KERNEL_SOURCES = ("auto", "hub", "reference")
DEFAULT_EMA = (0.4, 0.1, 0.25)
INDEXED = "dsa"  # the selector of models that have an indexer of their own
_SIZES = ("dense_length", "workspace")
_MANY = 2**31  # more blocks than any cache holds
_LEAST = 1e-6  # of alpha and beta: fp32 keeps it and its complement
_C = TypeVar("_C")


def _expect(condition: bool, field: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{field}: expected {expected}, got {got!r}")


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _choices(values: tuple[Any, ...]) -> str:
    return "one of " + ", ".join(repr(value) for value in values)


def _names_its_fields(kind: _C) -> _C:
    """A dataclass whose TypeError for an unknown name lists those that there are; Python's own doesn't."""
    made: Any = kind
    stock, fields = made.__init__, [field.name for field in dataclasses.fields(made)]

    @functools.wraps(stock)
    def checked(self: Any, *values: Any, **settings: Any) -> None:
        if unknown := sorted(set(settings) - set(fields)):
            raise TypeError(f"unknown setting {', '.join(unknown)}; the fields are {', '.join(fields)}")
        stock(self, *values, **settings)

    made.__init__ = checked
    return kind


@_names_its_fields
@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """Settings of sparse decoding. Every field is checked: ValueError("field: expected .., got .."); an unknown name
    is a TypeError that lists the fields.

    Attributes:
        selector: how blocks are scored. "quest": a bound from the minimum and maximum of a block's keys. "infllm_v2":
            attention weights on means of 32 keys. "dsa": the model's own indexer, which chooses tokens, not blocks;
            budget, block_size, sinks, local blocks and dense layers are then the model's business. "auto" is "dsa" for
            a model that has an indexer, else "quest".
        budget: tokens attended per KV head and step, forced blocks included; rounded down to whole blocks. At least
            one block more than the forced ones. None: dense.
        block_size: tokens in a block; "auto" is 32 for quest, whose bound loosens as blocks grow, and 64 for infllm_v2.
        sink_blocks, local_blocks: first and last blocks, always attended and never predicted. The open (last) block
            is the first of the local ones.
        dense_layers: the first n layers stay dense; "auto" is min(2, layers - 1).
        speculate: attend to predicted blocks while the selection is computed (PRR). "auto": while a profile and the hit
            rates of the last tokens say that it pays; off without a profile (`hf-sparse-prr profile` measures one).
        spec_ratio: predicted blocks per selected block, any float > 0; "profile": the one that by the profile and those
            hit rates takes least, 1.0 without a profile.
        ema: (alpha, beta, gamma) of the predictor, alpha and beta in (0, 1], gamma >= 0; "calibrate" chooses them from
            the last prompt queries, per batch row and layer. With an indexer it is (.4, .1, .25).
        semantics: "exact", or "superset" (attend to predicted and selected blocks, as the PRR paper does).
        hint: what the top-k starts from: the predicted blocks (without a predictor, the previous ones), the previous
            ones, those that RoPE alone favours by their distance, or nothing. It never changes the result.
        kernels: "auto" (the bundled copy, or LOCAL_KERNELS), "hub" or a repo id, "reference" (plain torch), a path to a
            kernel repo, or a module that you loaded.
        strict: raise where the library would otherwise run something else than asked for.
        trace: keep predicted, selected and missed blocks of every step.
        dense_length: a batch row of fewer tokens stays dense even above its budget (InfLLM-v2's dense_len).
        group: how the scores of the query heads of a KV head combine, "sum" or, for quest, "max".
        sparse_prefill: prompt tokens select as well, each for itself as if decoded, once their row outgrew its budget.
            With an indexer they always do.
        workspace: bytes that the prompt of a model with an indexer may take at a time, about, beside its cache and
            activations; its queries come in as many parts as that needs, of one query at least.
        cuda_graph: generate() on an NVIDIA GPU replays the sparse layers of a decode step as a CUDA graph where they
            can be captured; the report says what became of it. Hooks, adapters and weights of those layers that
            change while it runs are not seen.
        fused_layers: generate() on an NVIDIA GPU runs what a layer does beside attention for a decode token in four
            kernels over the model's own weights: of one batch row, in half precision, once it outgrew its budget, and
            where these modules are plain. Latent attention does so in every forward of one token. False calls the
            modules.
    """

    selector: str = "auto"
    budget: int | None = 4096
    block_size: int | Literal["auto"] = "auto"
    sink_blocks: int = 1
    local_blocks: int = 2
    dense_layers: int | Literal["auto"] = "auto"
    speculate: bool | Literal["auto"] = "auto"
    spec_ratio: float | Literal["profile"] = "profile"
    ema: tuple[float, float, float] | Literal["calibrate"] = "calibrate"
    semantics: str = "exact"
    hint: str = "predicted"
    kernels: str | Path | ModuleType = "auto"
    strict: bool = False
    trace: bool = False
    dense_length: int = 0
    group: str = "sum"
    sparse_prefill: bool = False
    workspace: int = 2**30
    cuda_graph: bool = True
    fused_layers: bool = True

    def __post_init__(self) -> None:
        self._check_choices()
        _expect(
            self.block_size == "auto" or (is_int(self.block_size) and self.block_size in BLOCK_SIZES),
            "block_size",
            _choices(("auto", *BLOCK_SIZES)),
            self.block_size,
        )
        _expect(is_int(self.sink_blocks) and self.sink_blocks >= 0, "sink_blocks", "an int >= 0", self.sink_blocks)
        _expect(is_int(self.local_blocks) and self.local_blocks >= 1, "local_blocks", "an int >= 1", self.local_blocks)
        _expect(
            self.dense_layers == "auto" or (is_int(self.dense_layers) and self.dense_layers >= 0),
            "dense_layers",
            "'auto' or an int >= 0",
            self.dense_layers,
        )
        _expect(is_int(self.workspace) and self.workspace > 0, "workspace", "an int > 0, bytes", self.workspace)
        _expect(is_int(self.dense_length) and self.dense_length >= 0, "dense_length", "an int >= 0", self.dense_length)
        _expect(
            isinstance(self.speculate, bool) or self.speculate == "auto",
            "speculate",
            "True, False or 'auto'",
            self.speculate,
        )
        _expect(
            self.spec_ratio == "profile" or (_is_number(self.spec_ratio) and self.spec_ratio > 0),
            "spec_ratio",
            "'profile' or a float > 0",
            self.spec_ratio,
        )
        self._check_ema()
        self._check_budget()
        for field in ("budget", "block_size", "sink_blocks", "local_blocks", "dense_layers", *_SIZES):
            value = getattr(self, field)
            if is_int(value):  # also numpy's
                object.__setattr__(self, field, int(value))
        _expect(
            isinstance(self.kernels, Path | ModuleType)
            or (
                isinstance(self.kernels, str)
                and self.kernels != ""
                and (self.kernels in KERNEL_SOURCES or is_repo_id(self.kernels) or Path(self.kernels).is_dir())
            ),
            "kernels",
            f"{_choices(KERNEL_SOURCES)}, a repo id, the path of a folder, or a module",
            self.kernels,
        )
        for field in ("cuda_graph", "fused_layers", "sparse_prefill", "strict", "trace"):
            _expect(isinstance(getattr(self, field), bool), field, "a bool", getattr(self, field))

    def _check_choices(self) -> None:
        for field, choices in (("selector", ("auto", *SELECTORS, INDEXED)), ("semantics", SEMANTICS), ("hint", HINTS)):
            value = getattr(self, field)
            _expect(isinstance(value, str) and value in choices, field, _choices(choices), value)
        if self.selector == INDEXED:
            self._check_indexed()
            return
        selector = SELECTORS[self.resolved_selector]
        _expect(isinstance(selector, Selector), "selector", f"an instance of Selector as {self.selector!r}", selector)
        groups = selector.groups
        _expect(self.group in groups, "group", f"{_choices(groups)} for selector {self.selector!r}", self.group)

    def _check_indexed(self) -> None:
        """What contradicts a selection by the model's own rule."""
        _expect(self.dense_layers in ("auto", 0), "dense_layers", f"'auto' or 0 with {INDEXED!r}", self.dense_layers)
        _expect(self.semantics == "exact", "semantics", f"'exact' with {INDEXED!r}", self.semantics)

    def _check_ema(self) -> None:
        ema = self.ema
        if ema == "calibrate":
            return
        good = (
            isinstance(ema, tuple | list)
            and len(ema) == 3
            and all(_is_number(value) for value in ema)
            and _LEAST <= ema[0] <= 1
            and _LEAST <= ema[1] <= 1
            and 0 <= ema[2] <= 1 / _LEAST
        )
        _expect(good, "ema", "'calibrate' or (alpha, beta, gamma), alpha and beta in (0, 1], gamma >= 0", ema)
        object.__setattr__(self, "ema", tuple(float(value) for value in ema))

    def _check_budget(self) -> None:
        if self.budget is None or self.selector == INDEXED:
            return
        needed = self.forced_blocks + 1
        _expect(
            is_int(self.budget) and self.budget // self.tokens_per_block >= needed,
            "budget",
            f"None or an int >= {needed * self.tokens_per_block} ({self.forced_blocks} forced blocks and one more, "
            f"of {self.tokens_per_block} tokens)",
            self.budget,
        )

    @property
    def tokens_per_block(self) -> int:
        """block_size with "auto" resolved."""
        if self.selector == INDEXED:
            return 1
        return SELECTORS[self.resolved_selector].block_size if self.block_size == "auto" else self.block_size

    @property
    def resolved_selector(self) -> str:
        """selector with "auto" resolved."""
        return "quest" if self.selector == "auto" else self.selector

    @property
    def forced_blocks(self) -> int:
        """Blocks that are always attended."""
        return self.sink_blocks + self.local_blocks

    @property
    def leaves_to_profile(self) -> bool:
        """Whether a profile, if there is one, decides what is speculated on. Never where that changed the output."""
        asked = self.speculate == "auto" or (self.speculate is True and self.spec_ratio == "profile")
        return asked and self.semantics == "exact"

    def replace(self, **overrides: Any) -> "SparseConfig":
        """A copy with some fields changed. TypeError for names that aren't fields."""
        return dataclasses.replace(self, **overrides)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SparseConfig":
        return self  # frozen, and a module can't be copied

    def __getstate__(self) -> dict[str, Any]:
        """A module can't be pickled: its name is, if it can be imported by it."""
        state = dict(self.__dict__)
        if isinstance(self.kernels, ModuleType):
            name = self.kernels.__name__
            if sys.modules.get(name) is not self.kernels:
                raise ValueError(f"kernels: expected a module that sys.modules holds to pickle it, got {name!r}")
            state["kernels"] = ("module", name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["kernels"], tuple):
            state["kernels"] = import_module(state["kernels"][1])
        self.__dict__.update(state)

    def plan(self, kinds: Sequence[str], indexer: "Indexer | None" = None) -> list["LayerPlan"]:
        """What each attention layer does. ValueError where `dense_layers` exceeds them, or the selector isn't the
        model's.

        kinds: of each layer, "" for full attention, else what it has instead, which stays dense.  indexer: the model's.
        """
        if indexer is not None:
            return self._plan_indexed(indexer)
        _expect(
            self.selector != INDEXED,
            "selector",
            _choices(("auto", *SELECTORS)) + ": this model has no indexer",
            INDEXED,
        )
        layers = len(kinds)
        dense = min(2, layers - 1) if self.dense_layers == "auto" else self.dense_layers
        _expect(dense <= layers, "dense_layers", f"at most {layers}, the model's layers", dense)
        sparse = LayerPlan.dense("budget=None") if self.budget is None else self._sparse(self.budget)
        leading = LayerPlan.dense(f"dense_layers={self.dense_layers!r}: the first {dense} stay dense")
        if self.budget is None:
            leading = sparse
        return [
            LayerPlan.dense(kind)._replace(full=False) if kind else leading if index < dense else sparse
            for index, kind in enumerate(kinds)
        ]

    def _predicted(self, free: int) -> int:
        """Blocks that are predicted where `free` are selected by score."""
        ratio = 1.0 if self.spec_ratio == "profile" else self.spec_ratio
        return math.floor(min(ratio * free, _MANY)) if self.speculate is True else 0

    def _plan_indexed(self, indexer: "Indexer") -> list["LayerPlan"]:
        """Tokens as blocks of one, none of them forced."""
        only = f"'auto' or {INDEXED!r}: this model selects by its own indexer"
        _expect(self.selector in ("auto", INDEXED), "selector", only, self.selector)
        self._check_indexed()
        full = LayerPlan(
            status="sparse",
            reason="",
            selector=INDEXED,
            block_size=1,
            blocks=indexer.topk,
            predicted_blocks=self._predicted(indexer.topk),
            ema=DEFAULT_EMA if self.ema == "calibrate" else self.ema,
            hint=self.hint,
        )
        reason = "the tokens of the last layer that has an indexer"
        shared = full._replace(status="shared", reason=reason, predicted_blocks=0)
        return [shared if follows else full for follows in indexer.shared]

    def _sparse(self, budget: int) -> "LayerPlan":
        blocks = min(budget // self.tokens_per_block, _MANY)
        free = blocks - self.forced_blocks
        return LayerPlan(
            status="sparse",
            reason="",
            selector=self.resolved_selector,
            block_size=self.tokens_per_block,
            blocks=blocks,
            sink_blocks=self.sink_blocks,
            local_blocks=self.local_blocks,
            dense_length=self.dense_length,
            group=self.group,
            sparse_prefill=self.sparse_prefill,
            predicted_blocks=self._predicted(free),
            ema=None if self.ema == "calibrate" else self.ema,
            superset=self.semantics == "superset",
            hint=self.hint,
        )


def without_effect(config: SparseConfig) -> list[str]:
    """The settings that were given and mean nothing to a model with an indexer: "budget=64"."""
    names = ("budget", "block_size", "sink_blocks", "local_blocks", "dense_length", "group", "sparse_prefill")
    usual = {field.name: field.default for field in dataclasses.fields(SparseConfig)}
    given = {name: getattr(config, name) for name in names}
    return [f"{name}={value!r}" for name, value in given.items() if value != usual[name]]


class LayerPlan(NamedTuple):
    """The settings of one layer, resolved. `full` is False where the layer has another attention than over the whole
    context; `predicted_blocks` is 0 where nothing is predicted, and may exceed the blocks there are; `ema` is None
    where it is calibrated."""

    status: str
    reason: str
    full: bool = True
    selector: str = ""
    block_size: int = 0
    blocks: int = 0
    sink_blocks: int = 0
    local_blocks: int = 0
    dense_length: int = 0
    group: str = "sum"
    sparse_prefill: bool = False
    predicted_blocks: int = 0
    ema: tuple[float, float, float] | None = None
    superset: bool = False
    hint: str = "none"

    @classmethod
    def dense(cls, reason: str) -> "LayerPlan":
        return cls(status="dense", reason=reason)

    @property
    def calibrates(self) -> bool:
        """Whether the layer keeps prompt queries to choose its EMA from."""
        return self.predicted_blocks > 0 and self.ema is None

    @property
    def options(self) -> dict[str, Any]:
        """What differs from the usual among the settings that are rarely used."""
        usual = LayerPlan.dense("")
        names = ("dense_length", "group", "sparse_prefill")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(usual, name)}

    @property
    def fits(self) -> int:
        """Tokens up to which a batch row attends densely."""
        return max(self.blocks * self.block_size, self.dense_length - 1)

    @property
    def free_blocks(self) -> int:
        """Blocks of the budget that are selected by score."""
        return self.blocks - self.sink_blocks - self.local_blocks
