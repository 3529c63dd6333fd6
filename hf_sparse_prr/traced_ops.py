"""Kernels as torch.compile sees them: `torch.library.custom_op` registrations with fakes.

Imported at the first trace and not before, with traced_latent.py: ops.py asks for them. An op's first argument is the
key of a kernel module in a table, and the others are the kernel's own, tuples of tensors taken apart. Outputs are
contiguous, as the fakes say, and no output is an input. The op runs the kernel and nothing else, so a step can be
captured in a CUDA graph.

Shape letters are those of the kernel repo.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from . import kernel_loader
from .bundled.reference import EmaStep, Partials, TopKStats
from .bundled.reference.topk import check_topk_arguments

KERNELS: dict[str, ModuleType] = {}
_OPS = torch.ops.hf_sparse_prr


@torch.compiler.assume_constant_result
def key_of(module: ModuleType) -> str:
    """The module's key in the table: its name, numbered where another module has it. The same in every process that
    traces the same modules in the same order, so that compiled code can be cached. It stays for the process's life."""
    for key, held in KERNELS.items():
        if held is module:
            return key
    key, number = module.__name__, 1
    while key in KERNELS:
        number += 1
        key = f"{module.__name__}#{number}"
    KERNELS[key] = module
    return key


@torch.compiler.assume_constant_result
def key_of_auto() -> str:
    """The key of the module that "auto" means."""
    return key_of(kernel_loader.resolve("auto").module)


def _op(name: str) -> Callable[..., Any]:
    """A method that calls the registered op of that name: its arguments are called as the kernel's are."""

    def call(self: "Ops", *args: Any, **kwargs: Any) -> Any:
        return getattr(_OPS, name)(self._key, *args, **kwargs)

    return call


class Ops:
    """A kernel module's ops under their own names and signatures, for code that is traced. What else the module has is
    plain torch, such as `slots_of`, that dynamo traces into."""

    def __init__(self, key: str, module: ModuleType | None = None) -> None:
        self._key, self._module = key, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    append_states = _op("append_states")
    compress_keys = _op("compress_keys")
    index_scores = _op("index_scores")
    index_topk = _op("index_topk")
    infllm_scores = _op("infllm_scores")
    latent_attention = _op("latent_attention")
    quest_scores = _op("quest_scores")
    select_blocks = _op("select_blocks")
    tally = _op("tally")
    topk_threshold = _op("topk_threshold")
    update_summaries = _op("update_summaries")

    def block_partials(self, *args: Any, **kwargs: Any) -> Partials:
        return Partials(*_OPS.block_partials(self._key, *args, **kwargs))

    def ema_step(self, *args: Any, **kwargs: Any) -> EmaStep:
        return EmaStep(*_OPS.ema_step(self._key, *args, **kwargs))

    def gvr_topk(self, *args: Any, return_stats: bool = False, **kwargs: Any) -> Any:
        if not return_stats:
            return _OPS.gvr_topk(self._key, *args, **kwargs)
        indices, *stats = _OPS.gvr_topk_stats(self._key, *args, **kwargs)
        return indices, TopKStats(*stats)

    def merge_partials(self, partials: Partials) -> Tensor:
        return _OPS.merge_partials(self._key, *partials)

    def repair_merge(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor,
        start: Tensor,
        selected: Tensor,
        end: Tensor,
        predicted: Tensor,
        partials: Partials | None,
        *,
        scale: float,
        block_size: int,
    ) -> Tensor:
        data = (query, keys, values, valid, start, selected, end, predicted)
        return _OPS.repair_merge(self._key, *data, *(partials or (None, None, None)), scale, block_size)


# Ops that write and return nothing need no fake: torch makes it.


@custom_op("hf_sparse_prr::append_states", mutates_args=("keys", "values"))
def append_states(
    kernels: str, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, end: Tensor
) -> None:
    KERNELS[kernels].append_states(keys, values, new_keys, new_values, end)


@custom_op("hf_sparse_prr::update_summaries", mutates_args=("lower", "upper"))
def update_summaries(
    kernels: str,
    keys: Tensor,
    valid: Tensor,
    start: Tensor,
    lower: Tensor,
    upper: Tensor,
    end: Tensor,
    count: int,
    block_size: int,
) -> None:
    KERNELS[kernels].update_summaries(keys, valid, start, lower, upper, end, count, block_size)


@custom_op("hf_sparse_prr::compress_keys", mutates_args=("means", "filled"))
def compress_keys(
    kernels: str,
    keys: Tensor,
    valid: Tensor,
    start: Tensor,
    means: Tensor,
    filled: Tensor,
    end: Tensor,
    count: int,
    window: int,
    stride: int,
) -> None:
    KERNELS[kernels].compress_keys(keys, valid, start, means, filled, end, count, window=window, stride=stride)


@custom_op("hf_sparse_prr::tally", mutates_args=("numbers",))
def tally(
    kernels: str,
    numbers: Tensor,
    selected: Tensor,
    free: Tensor,
    predicted: Tensor,
    importance: Tensor | None,
    first: int,
    last: Tensor,
) -> None:
    KERNELS[kernels].tally(numbers, selected, free, predicted, importance, first, last)


def _scores(like: Tensor, blocks: int) -> Tensor:
    return like.new_empty((*like.shape[:2], blocks), dtype=torch.float32)


def _ids(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


@custom_op("hf_sparse_prr::quest_scores", mutates_args=())
def quest_scores(
    kernels: str, query: Tensor, lower: Tensor, upper: Tensor, first: int, last: Tensor, group: str = "sum"
) -> Tensor:
    return KERNELS[kernels].quest_scores(query, lower, upper, first, last, group=group).contiguous()


quest_scores.register_fake(lambda kernels, query, lower, *_: _scores(query, lower.shape[2]))


@custom_op("hf_sparse_prr::infllm_scores", mutates_args=())
def infllm_scores(
    kernels: str,
    query: Tensor,
    means: Tensor,
    filled: Tensor,
    first: int,
    last: Tensor,
    length: Tensor,
    scale: float,
    stride: int,
) -> Tensor:
    scores = KERNELS[kernels].infllm_scores(query, means, filled, first, last, length, scale=scale, stride=stride)
    return scores.contiguous()


infllm_scores.register_fake(lambda kernels, query, means, *_: _scores(query, means.shape[2]))


@custom_op("hf_sparse_prr::gvr_topk", mutates_args=())
def gvr_topk(
    kernels: str,
    scores: Tensor,
    k: int,
    hint: Tensor | None = None,
    lengths: Tensor | None = None,
    threshold: Tensor | None = None,
) -> Tensor:
    return KERNELS[kernels].gvr_topk(scores, k, hint=hint, lengths=lengths, threshold=threshold).contiguous()


@gvr_topk.register_fake
def _chosen(
    kernels: str,
    scores: Tensor,
    k: int,
    hint: Tensor | None = None,
    lengths: Tensor | None = None,
    threshold: Tensor | None = None,
) -> Tensor:
    check_topk_arguments(scores, k, hint, lengths, threshold)  # a tensor elsewhere would get here and no further
    return _ids(scores, scores.shape[0], k)


@custom_op("hf_sparse_prr::gvr_topk_stats", mutates_args=())
def gvr_topk_stats(
    kernels: str,
    scores: Tensor,
    k: int,
    hint: Tensor | None = None,
    lengths: Tensor | None = None,
    threshold: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    guesses = dict(hint=hint, lengths=lengths, threshold=threshold)
    indices, stats = KERNELS[kernels].gvr_topk(scores, k, **guesses, return_stats=True)
    passes, candidates, fallback = stats
    return indices.contiguous(), passes, candidates, fallback


@gvr_topk_stats.register_fake
def _(
    kernels: str, scores: Tensor, k: int, *guesses: Tensor | None, **named: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = scores.shape[0]
    fallback = scores.new_empty(rows, dtype=torch.bool)
    return _chosen(kernels, scores, k, *guesses, **named), _ids(scores, rows), _ids(scores, rows), fallback


@custom_op("hf_sparse_prr::topk_threshold", mutates_args=())
def topk_threshold(kernels: str, scores: Tensor, k: int, lengths: Tensor | None = None) -> Tensor:
    return KERNELS[kernels].topk_threshold(scores, k, lengths=lengths)


@topk_threshold.register_fake
def _(kernels: str, scores: Tensor, k: int, lengths: Tensor | None = None) -> Tensor:
    check_topk_arguments(scores, k, None, lengths)
    return scores.new_empty((scores.shape[0], 2), dtype=torch.float32)


@custom_op("hf_sparse_prr::select_blocks", mutates_args=())
def select_blocks(
    kernels: str, scores: Tensor, forced: Tensor, k: int, hint: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    selected, free = KERNELS[kernels].select_blocks(scores, forced, k, hint=hint)
    return selected.contiguous(), free.contiguous()


@select_blocks.register_fake
def _(kernels: str, scores: Tensor, forced: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
    return _ids(scores, *scores.shape[:2], forced.shape[2] + k), _ids(scores, *scores.shape[:2], k)


@custom_op("hf_sparse_prr::block_partials", mutates_args=())
def block_partials(
    kernels: str,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    valid: Tensor,
    start: Tensor,
    blocks: Tensor,
    end: Tensor,
    scale: float,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    compute = KERNELS[kernels].block_partials
    output, peak, total = compute(query, keys, values, valid, start, blocks, end, scale=scale, block_size=block_size)
    return output.contiguous(), peak.contiguous(), total.contiguous()


@block_partials.register_fake
def _(
    kernels: str, query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, start: Tensor, blocks: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    group, dim = query.shape[2:]
    shapes = ((*blocks.shape, group, dim), (*blocks.shape, group), (*blocks.shape, group))
    output, peak, total = (query.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return output, peak, total


@custom_op("hf_sparse_prr::merge_partials", mutates_args=())
def merge_partials(kernels: str, output: Tensor, peak: Tensor, total: Tensor) -> Tensor:
    return KERNELS[kernels].merge_partials(Partials(output, peak, total)).contiguous()


@merge_partials.register_fake
def _(kernels: str, output: Tensor, *_: Any) -> Tensor:
    batch, heads, _slots, group, dim = output.shape
    return output.new_empty((batch, heads, group, dim))


@custom_op("hf_sparse_prr::repair_merge", mutates_args=())
def repair_merge(
    kernels: str,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    valid: Tensor,
    start: Tensor,
    selected: Tensor,
    end: Tensor,
    predicted: Tensor,
    output: Tensor | None,
    peak: Tensor | None,
    total: Tensor | None,
    scale: float,
    block_size: int,
) -> Tensor:
    partials = None if output is None or peak is None or total is None else Partials(output, peak, total)
    merged = KERNELS[kernels].repair_merge(
        query, keys, values, valid, start, selected, end, predicted, partials, scale=scale, block_size=block_size
    )
    return merged.contiguous()


repair_merge.register_fake(lambda kernels, query, *_: query.new_empty(query.shape, dtype=torch.float32))


@custom_op("hf_sparse_prr::ema_step", mutates_args=())
def ema_step(
    kernels: str, scores: Tensor, level: Tensor, trend: Tensor, ema: Tensor, first: int, last: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    level, trend, expected, importance = KERNELS[kernels].ema_step(scores, level, trend, ema, first, last)
    if importance is scores:  # without blocks, `normalise` gives back what it got
        importance = scores.clone()
    return level.contiguous(), trend.contiguous(), expected.contiguous(), importance.contiguous()


@ema_step.register_fake
def _(kernels: str, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    level, trend, expected, importance = (_scores(scores, scores.shape[2]) for _ in range(4))
    return level, trend, expected, importance
