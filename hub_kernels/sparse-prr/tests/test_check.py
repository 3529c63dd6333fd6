"""What ops refuse: one argument at a time that doesn't fit the others. Nothing is written then.

On a GPU, and in the interpreter, the kernels are asked; elsewhere the references. They refuse the same.
"""

import inspect
import os
import re

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

KERNELS = torch.get_default_device().type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
B, H, G, D, T, S, N, W, K, J, F, Q, E, C, A, P = 2, 3, 4, 16, 50, 16, 4, 2, 5, 6, 2, 3, 8, 24, 8, 7


def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def partials(ops, slots=J, group=G):
    shape = (B, H, slots, group)
    return ops.Partials(zeros(*shape, D), zeros(*shape), zeros(*shape))


def calls(ops):
    """Arguments by name that each op takes."""
    keys, row, buffer = zeros(B, H, T, D), torch.full((B,), T), zeros(B, H, N, D)
    grid = dict(keys=keys, valid=bools(B, T), start=ints(B), end=row)
    attention = dict(query=zeros(B, H, G, D), values=keys, scale=1.0, block_size=S, **grid)
    ids, windows = ints(B, H, K), dict(means=zeros(B, H, N, W, D), filled=bools(B, H, N, W))
    scores = zeros(B, H, N)
    index = dict(query=zeros(B, Q, G, E), weights=zeros(B, Q, G), keys=zeros(B, T, E), scale=1.0)
    index |= dict(valid=bools(B, T), end=torch.full((1, Q), T))
    listed = dict(latents=zeros(B, T, C), ropes=zeros(B, T, A), tokens=ints(B, Q, K))
    states = dict(new_keys=zeros(B, H, Q, D), new_values=zeros(B, H, Q, E))
    return {
        "append_states": dict(keys=keys, values=zeros(B, H, T, E), end=row, **states),
        "block_partials": dict(blocks=ids, **attention),
        "compress_keys": dict(count=1, window=32, stride=8, **windows, **grid),
        "ema_step": dict(scores=scores, level=scores, trend=scores, ema=zeros(B, 3), first=0, last=row),
        "gather_tokens": listed,
        "index_scores": index,
        "index_topk": dict(k=K, **index),
        "infllm_scores": dict(
            query=zeros(B, H, G, D), first=0, last=row, length=row, scale=1.0, stride=8, **windows
        ),
        "latent_attention": dict(
            query=zeros(B, Q, H, C + A), predicted=ints(B, Q, P), held=zeros(B, Q, P, C + A), scale=1.0, **listed
        ),
        "listed_attention": dict(query=zeros(B, Q, H, C), rope=zeros(B, Q, H, A), scale=1.0, **listed),
        "merge_partials": dict(partials=partials(ops)),
        "quest_scores": dict(query=zeros(B, H, G, D), lower=buffer, upper=buffer, first=0, last=row),
        "repair_merge": dict(selected=ids, predicted=ints(B, H, J), partials=partials(ops), **attention),
        "select_blocks": dict(scores=scores, forced=ints(B, 1, F) - 1, k=K),
        "tally": dict(
            numbers=zeros(B, H, 7, dtype=torch.float64), selected=ids, free=ids, predicted=ids, importance=scores,
            first=0, last=row,
        ),
        "update_summaries": dict(lower=buffer, upper=buffer.clone(), count=1, block_size=S, **grid),
    }  # fmt: skip


def call(ops, name, arguments):
    """References take some by keyword only, and `by_device` what comes first."""
    order = inspect.signature(getattr(ops, name)).parameters
    return getattr(ops, name)(**{key: arguments[key] for key in order if key in arguments})


ATTENTION = [
    ("query", zeros(B, H, G), "query: expected [B, H, G, D], got [2, 3, 4]"),
    ("query", 1.0, "query: expected a tensor, got float"),
    ("query", zeros(B, H, G, D, dtype=torch.float64), "query: expected torch.float32 or torch.bfloat16 or"),
    ("keys", zeros(1, H, T, D), "keys: expected [B, H, T, D] = [2, 3, .., 16], got [1, 3, 50, 16]"),
    ("keys", zeros(B, H, T, D, dtype=torch.float16), "keys: expected torch.float32, got torch.float16"),
    ("values", zeros(B, H, T - 1, D), "values: expected [B, H, T, D] = [2, 3, 50, 16], got [2, 3, 49, 16]"),
    ("values", zeros(B, H, T, 8), "values: expected [B, H, T, D] = [2, 3, 50, 16], got [2, 3, 50, 8]"),
    ("valid", bools(B, T - 1), "valid: expected [B, T] = [2, 50], got [2, 49]"),
    ("valid", ints(B, T), "valid: expected torch.bool, got torch.int32"),
    ("start", ints(1), "start: expected [B] = [2], got [1]"),
    ("end", T, "end: expected a tensor, got int"),
    ("end", zeros(B), "end: expected torch.int8 or torch.uint8 or torch.int16 or torch.int32 or torch.int64, got"),
    ("block_size", 0, "block_size: expected an int >= 1, got 0"),
    ("block_size", 16.0, "block_size: expected an int >= 1, got 16.0"),
]
INDEX = [
    ("query", zeros(B, Q, E), "query: expected [B, Q, I, E], got [2, 3, 8]"),
    ("weights", zeros(B, Q, 2), "weights: expected [B, Q, I] = [2, 3, 4], got [2, 3, 2]"),
    ("weights", zeros(B, Q), "weights: expected [B, Q, I] = [2, 3, 4], got [2, 3]"),
    ("keys", zeros(1, T, E), "keys: expected [B, T, E] = [2, .., 8], got [1, 50, 8]"),
    ("keys", zeros(B, T, 4), "keys: expected [B, T, E] = [2, .., 8], got [2, 50, 4]"),
    ("keys", zeros(B, T, E).to_sparse(), "keys: expected a strided tensor, got torch.sparse_coo"),
    ("valid", None, "valid: expected a tensor, got NoneType"),
    ("valid", bools(B, T - 1), "valid: expected [B, T] = [2, 50], got [2, 49]"),
    ("end", torch.zeros(Q).int(), "end: expected [B or 1, Q] = [2, 3], got [3]"),
    ("end", 50, "end: expected a tensor, got int"),
    ("end", zeros(1, Q), "end: expected torch.int8 or"),
    ("end", ints(3, Q), "end: expected [B or 1, Q] = [2, 3], got [3, 3]"),
]  # fmt: skip
TOKENS = [
    ("latents", zeros(T, C), "latents: expected [B, T, C], got [50, 24]"),
    ("ropes", zeros(B, T - 1, A), "ropes: expected [B, T, A] = [2, 50, ..], got [2, 49, 8]"),
    ("ropes", zeros(B, T, A, dtype=torch.float16), "ropes: expected torch.float32, got torch.float16"),
    ("tokens", ints(1, Q, K), "tokens: expected [B, Q, K] = [2, .., ..], got [1, 3, 5]"),
    ("tokens", ints(B, Q, K, dtype=torch.int64), "tokens: expected torch.int32, got torch.int64"),
]
REFUSED = {
    "append_states": [
        ("values", zeros(B, H, T - 1, E), "values: expected [B, H, T, D'] = [2, 3, 50, ..], got [2, 3, 49, 8]"),
        ("new_keys", zeros(B, H, Q, E), "new_keys: expected [B, H, Q, D] = [2, 3, .., 16], got [2, 3, 3, 8]"),
        ("new_keys", zeros(B, H, T + 1, D), "new_values: expected [B, H, Q, D'] = [2, 3, 51, 8], got [2, 3, 3, 8]"),
        ("new_values", zeros(B, H, 1, E), "new_values: expected [B, H, Q, D'] = [2, 3, 3, 8], got [2, 3, 1, 8]"),
        ("new_values", zeros(B, H, Q, E, dtype=torch.float16), "new_values: expected torch.float32, got torch.float16"),
        ("end", torch.tensor(T), "end: expected [B] = [2], got []"),
    ],
    "block_partials": [
        *ATTENTION,
        ("blocks", ints(B, K), "blocks: expected [B, H, K] = [2, 3, ..], got [2, 5]"),
        ("blocks", ints(B, H, K, dtype=torch.int64), "blocks: expected torch.int32, got torch.int64"),
    ],
    "compress_keys": [
        ("valid", bools(1, T), "valid: expected [B, T] = [2, 50], got [1, 50]"),
        ("means", zeros(B, H, N, W, 8), "means: expected [B, H, N, W, D] = [2, 3, .., .., 16], got [2, 3, 4, 2, 8]"),
        ("means", zeros(B, H, N, W, D, dtype=torch.float16), "means: expected torch.float32, got torch.float16"),
        ("filled", bools(B, H, N - 1, W), "filled: expected [B, H, N, W] = [2, 3, 4, 2], got [2, 3, 3, 2]"),
        ("filled", ints(B, H, N, W), "filled: expected torch.bool, got torch.int32"),
    ],
    "ema_step": [
        ("scores", zeros(B, N), "scores: expected [B, H, N], got [2, 4]"),
        ("level", zeros(B, H, N - 1), "level: expected [B, H, N] = [2, 3, 4], got [2, 3, 3]"),
        ("trend", zeros(B, H, N, dtype=torch.float64), "trend: expected torch.float32, got torch.float64"),
        ("ema", zeros(3), "ema: expected [B, 3] = [2, 3], got [3]"),
        ("last", 4, "last: expected a tensor, got int"),
    ],
    "gather_tokens": TOKENS,
    "index_scores": INDEX,
    "index_topk": [
        *INDEX,
        ("k", -1, "k: expected an int >= 0, got -1"),
        ("hint", ints(B, K), "hint: expected an integer tensor [6, M], got [2, 5] in torch.int32"),
        ("threshold", zeros(B, 2), "threshold: expected [6] or [6, 2] in torch.float32, got [2, 2]"),
    ],
    "infllm_scores": [
        ("query", zeros(B, H, G, 1), "means: expected [B, H, N, W, D] = [2, 3, .., .., 1], got [2, 3, 4, 2, 16]"),
        ("means", zeros(B, H, N, D), "means: expected [B, H, N, W, D] = [2, 3, .., .., 16], got [2, 3, 4, 16]"),
        ("filled", bools(B, H, N, 1), "filled: expected [B, H, N, W] = [2, 3, 4, 2], got [2, 3, 4, 1]"),
        ("last", ints(1), "last: expected [B] = [2], got [1]"),
        ("length", T, "length: expected a tensor, got int"),
        ("stride", 0, "stride: expected an int >= 1, got 0"),
    ],
    "latent_attention": [
        *TOKENS[:3],
        ("tokens", ints(B, 1, K), "query: expected [B, Q, H, C + A] = [2, 1, .., 32], got [2, 3, 3, 32]"),
        ("query", zeros(B, Q, H, C), "query: expected [B, Q, H, C + A] = [2, 3, .., 32], got [2, 3, 3, 24]"),
        ("predicted", ints(B, 1, P), "predicted: expected [B, Q, P] = [2, 3, ..], got [2, 1, 7]"),
        ("held", zeros(B, Q, 1, C + A), "held: expected [B, Q, P, C + A] = [2, 3, 7, 32], got [2, 3, 1, 32]"),
        ("held", None, "held: expected the rows of 7 predicted tokens, got None"),
    ],
    "listed_attention": [
        *TOKENS[:3],
        ("tokens", ints(B, 1, K), "query: expected [B, Q, H, C] = [2, 1, .., 24], got [2, 3, 3, 24]"),
        ("query", zeros(B, Q, H, C + A), "query: expected [B, Q, H, C] = [2, 3, .., 24], got [2, 3, 3, 32]"),
        ("rope", zeros(B, Q, 1, A), "rope: expected [B, Q, H, A] = [2, 3, 3, 8], got [2, 3, 1, 8]"),
    ],
    "merge_partials": [
        ("partials", (zeros(1), zeros(1), zeros(1)), "partials: expected Partials, got tuple"),
        ("partials", zeros(1), "partials: expected Partials, got Tensor"),
    ],
    "quest_scores": [
        ("query", zeros(B, H, G, 1), "lower: expected [B, H, N, D] = [2, 3, .., 1], got [2, 3, 4, 16]"),
        ("query", zeros(B, 1, G, D), "lower: expected [B, H, N, D] = [2, 1, .., 16], got [2, 3, 4, 16]"),
        ("lower", zeros(B, H, N, 8), "lower: expected [B, H, N, D] = [2, 3, .., 16], got [2, 3, 4, 8]"),
        ("upper", zeros(B, H, N - 1, D), "upper: expected [B, H, N, D] = [2, 3, 4, 16], got [2, 3, 3, 16]"),
        ("last", ints(1), "last: expected [B] = [2], got [1]"),
        ("last", 4, "last: expected a tensor, got int"),
        ("group", "mean", "group: expected 'sum' or 'max', got 'mean'"),
    ],
    "repair_merge": [
        *ATTENTION,
        ("selected", ints(B, 1, K), "selected: expected [B, H, K] = [2, 3, ..], got [2, 1, 5]"),
        ("predicted", ints(B, H, J - 1), "partials.output: expected [B, H, K, G, D] = [2, 3, 5, 4, 16], got [2, 3, 6,"),
        ("predicted", ints(B, 1, J), "predicted: expected [B, H, J] = [2, 3, ..], got [2, 1, 6]"),
        ("partials", None, "partials: expected those of 6 predicted blocks, got None"),
        ("partials", (zeros(1), zeros(1), zeros(1)), "partials: expected Partials, got tuple"),
    ],
    "select_blocks": [
        ("scores", zeros(H, N), "scores: expected [B, H, N], got [3, 4]"),
        ("scores", zeros(B, H, N, dtype=torch.float16), "scores: expected torch.float32, got torch.float16"),
        ("forced", None, "forced: expected a tensor, got NoneType"),
        ("forced", [[[0]]], "forced: expected a tensor, got list"),
        ("forced", zeros(B, 1, F), "forced: expected torch.int32, got torch.float32"),
        ("forced", ints(B, 1, F, dtype=torch.int64), "forced: expected torch.int32, got torch.int64"),
        ("forced", ints(B, 2, F), "forced: expected [B, 1 or H, F] = [2, 3, ..], got [2, 2, 2]"),
        ("k", -1, "k: expected an int >= 0, got -1"),
        ("k", True, "k: expected an int >= 0, got True"),
        ("hint", ints(B, K), "hint: expected [B, H, M] = [2, 3, ..], got [2, 5]"),
    ],
    "tally": [
        ("numbers", zeros(B, H, 7), "numbers: expected torch.float64, got torch.float32"),
        ("numbers", zeros(B, H, 6), "numbers: expected [B, H, 7] = [.., .., 7], got [2, 3, 6]"),
        ("numbers", zeros(H, B, 7, dtype=torch.float64).mT.mT.transpose(0, 1), "numbers: expected a contiguous tensor"),
        ("selected", ints(1, H, K), "selected: expected [B, H, F + K] = [2, 3, ..], got [1, 3, 5]"),
        ("free", ints(B, H, K, dtype=torch.int64), "free: expected torch.int32, got torch.int64"),
        ("predicted", ints(B, K), "predicted: expected [B, H, J] = [2, 3, ..], got [2, 5]"),
        ("importance", zeros(B, 1, N), "importance: expected [B, H, N] = [2, 3, ..], got [2, 1, 4]"),
        ("last", 4, "last: expected a tensor, got int"),
    ],
    "update_summaries": [
        ("keys", zeros(B, H, T), "keys: expected [B, H, T, D], got [2, 3, 50]"),
        ("valid", bools(B, T - 1), "valid: expected [B, T] = [2, 50], got [2, 49]"),
        ("start", 0, "start: expected a tensor, got int"),
        ("lower", zeros(B, H, N, 8), "lower: expected [B, H, N, D] = [2, 3, .., 16], got [2, 3, 4, 8]"),
        ("upper", zeros(B, H, N - 1, D), "upper: expected [B, H, N, D] = [2, 3, 4, 16], got [2, 3, 3, 16]"),
        ("upper", zeros(B, H, N, D, dtype=torch.float16), "upper: expected torch.float32, got torch.float16"),
        ("block_size", 0, "block_size: expected an int >= 1, got 0"),
    ],
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "argument", "value", "message"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_an_argument_that_does_not_fit_is_refused_before_anything_is_written(ops, name, argument, value, message):
    arguments = calls(ops)[name] | {argument: value}
    before = {key: held.clone() for key, held in arguments.items() if isinstance(held, torch.Tensor)}
    with pytest.raises(ValueError, match=re.escape(message)):
        call(ops, name, arguments)
    for key, held in before.items():
        assert torch.equal(held.to_dense(), arguments[key].to_dense()), key


@pytest.mark.parametrize("name", REFUSED)
def test_what_fits_is_taken_and_another_device_never(ops, name):
    arguments = calls(ops)[name]
    call(ops, name, arguments)
    tensors = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
    first = next(key for key in inspect.signature(getattr(ops, name)).parameters if key in arguments)
    for key in tensors:
        if key != first:
            with pytest.raises(ValueError, match="expected device"):
                call(ops, name, arguments | {key: arguments[key].to("meta")})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("output", "partials.output: expected torch.float32, got torch.float16"),
        ("peak", "partials.peak: expected torch.float32, got torch.float16"),
        ("total", "partials.total: expected torch.float32, got torch.float16"),
    ],
)
def test_the_parts_of_partials_are_looked_at(ops, part, message):
    with pytest.raises(ValueError, match=message):
        ops.merge_partials(partials(ops)._replace(**{part: getattr(partials(ops), part).half()}))
    short = partials(ops)._replace(**{part: getattr(partials(ops), part)[:, :, :-1]})
    with pytest.raises(ValueError, match=r"partials\.(peak|total): expected \[B, H, K, G\] = \[2, 3, (5|6), 4\]"):
        ops.merge_partials(short)
    elsewhere = ops.Partials(*(each.to("meta") for each in partials(ops)))
    with pytest.raises(ValueError, match=r"partials\.output: expected device .*, got meta"):
        call(ops, "repair_merge", calls(ops)["repair_merge"] | {"partials": elsewhere})


def test_a_step_longer_than_the_buffer_is_refused(ops):
    states = dict(new_keys=zeros(B, H, T + 1, D), new_values=zeros(B, H, T + 1, E))
    with pytest.raises(ValueError, match="new_keys: expected at most T = 50 columns, got 51"):
        call(ops, "append_states", calls(ops)["append_states"] | states)


def test_dynamo_traces_a_check_and_fake_tensors_pass_it(ops):
    arguments = calls(ops)["gather_tokens"]  # plain torch everywhere, and traced as it is
    compiled = torch.compile(ops.gather_tokens, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(**arguments), ops.gather_tokens(**arguments))
    with FakeTensorMode() as mode:
        fakes = {key: mode.from_tensor(value) for key, value in arguments.items()}
        assert ops.gather_tokens(**fakes).shape == (B, Q, K, C + A)
        with pytest.raises(ValueError, match=re.escape("ropes: expected [B, T, A] = [2, 50, ..], got [2, 49, 8]")):
            ops.gather_tokens(**fakes | {"ropes": fakes["ropes"][:, 1:]})


@pytest.mark.parametrize("name", ["index_topk", "select_blocks"])
def test_k_may_be_an_integer_of_numpy(ops, name):
    arguments = calls(ops)[name]
    for found, expected in zip(
        call(ops, name, arguments | {"k": np.int64(K)}), call(ops, name, arguments), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.skipif(not KERNELS, reason="the references take any size")
@pytest.mark.parametrize("name", ["block_partials", "repair_merge", "update_summaries"])
@pytest.mark.parametrize("size", [1, 7, 8, 24, 48])
def test_kernels_refuse_blocks_that_are_no_power_of_two_from_16(ops, name, size):
    with pytest.raises(ValueError, match=f"block_size: expected a power of two from 16, got {size}"):
        call(ops, name, calls(ops)[name] | {"block_size": size})


@pytest.mark.skipif(not KERNELS, reason="the references take any number")
def test_the_kernel_refuses_windows_that_are_no_power_of_two(ops):
    windows = dict(means=zeros(B, H, N, 3, D), filled=bools(B, H, N, 3))
    with pytest.raises(ValueError, match="means: expected W a power of two, got 3"):
        call(ops, "infllm_scores", calls(ops)["infllm_scores"] | windows)
