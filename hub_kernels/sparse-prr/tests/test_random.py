"""repair_merge over random problems: the bits of an empty prediction, whatever was predicted, alone and in a batch.

A problem is a batch of rows with their own start and end, and every (row, head) of it counts as a case, with lists and
a prediction of its own. All of it is drawn on the device, so that 10,000 cases take a GPU about a minute:

    PRR_CASES=10000 HF_SPARSE_PRR_TEST_DEVICE=cuda pytest -n 8 hub_kernels/sparse-prr/tests/test_random.py
"""

import os
from typing import NamedTuple

import pytest
import torch

from .drawn import INTERPRETED

ON_GPU = torch.get_default_device().type == "cuda"
CASES = int(os.environ.get("PRR_CASES", "32" if INTERPRETED else "2048" if ON_GPU else "256"))
BATCH, HEADS = (8, 8) if ON_GPU else (2, 2)
INF, NAN = float("inf"), float("nan")
BEYOND = (-(2**31), -7, 2**20, 2**31 - 1)  # what no block is called


class Shape(NamedTuple):
    """Sizes of a problem: numbers that a kernel is compiled for, so that few of them are."""

    dtype: torch.dtype
    dim: int
    block_size: int
    group: int
    blocks: int  # that a row may have
    slots: int  # of the selection

    def __str__(self):
        return "-".join(str(part).removeprefix("torch.") for part in self)


SHAPES = [
    Shape(torch.float32, 64, 16, 3, 40, 33),
    Shape(torch.float16, 80, 32, 4, 24, 16),
    Shape(torch.bfloat16, 128, 64, 8, 24, 17),
    Shape(torch.bfloat16, 128, 64, 16, 20, 20),
    Shape(torch.bfloat16, 192, 128, 1, 12, 9),
    Shape(torch.float32, 256, 32, 7, 20, 16),
    Shape(torch.float16, 96, 16, 5, 80, 70),  # more ranks than are added at a time
    Shape(torch.bfloat16, 64, 128, 2, 16, 11),
]
if INTERPRETED:
    SHAPES = [
        shape._replace(dtype=torch.float32 if shape.dtype == torch.float32 else torch.float16, blocks=6, slots=4)
        for shape in SHAPES
    ]


class Inputs(NamedTuple):
    """As block_partials takes them: query [B, H, G, D], keys and values [B, H, T, D], valid [B, T], start, end [B]."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor

    def alone(self, row, head):
        """One case in a batch of its own, in memory of its own: views would be compiled for anew."""
        b, h = slice(row, row + 1), slice(head, head + 1)
        states = (x[b, h].clone() for x in self[:3])
        return Inputs(*states, *(x[b].clone() for x in self[3:]))


class Random:
    """Draws on the default device."""

    def __init__(self, seed):
        self.generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)

    def normal(self, *size):
        return torch.randn(size, generator=self.generator)

    def below(self, bound, *size):
        """Integers from 0 to bound - 1; bound may be a tensor that `size` extends."""
        if isinstance(bound, int):
            return torch.randint(bound, size, generator=self.generator)
        return (torch.rand(size, generator=self.generator, dtype=torch.float64) * bound).long()

    def chance(self, p, *size):
        return torch.rand(size, generator=self.generator) < p


def there_are(inputs, shape):
    """Blocks that each row has begun, [B]; none in a row without tokens."""
    return -(-(inputs.end - inputs.start) // shape.block_size)


def make_inputs(random, shape):
    """Ragged starts and ends, holes, tied and infinite keys; NaN and infinities wherever nothing is attended.

    Returns the inputs and bool [B, H]: the case has an infinite key, so that its output may be NaN.
    """
    size, room = shape.block_size, 5
    columns = shape.blocks * size + room
    query = random.normal(BATCH, HEADS, shape.group, shape.dim).to(shape.dtype)
    keys, values = (random.normal(BATCH, HEADS, columns, shape.dim).to(shape.dtype) for _ in range(2))
    start = random.below(2 * size, BATCH)
    end = start + random.below(columns - start + 1, BATCH)
    end[random.chance(0.05, BATCH)] = 0  # a row of padding alone
    end = torch.maximum(end, start)
    end = torch.minimum(end, start + shape.blocks * size)
    holes = torch.tensor([0.0, 0.2, 0.9])[random.below(3, BATCH)]
    t = torch.arange(columns)
    valid = torch.rand((BATCH, columns), generator=random.generator) >= holes[:, None]
    tied = random.chance(0.1, BATCH, HEADS)
    keys = torch.where(tied[:, :, None, None], keys[:, :, :1], keys)
    infinite = random.chance(0.1, BATCH, HEADS)
    spoiled = infinite[..., None] & random.chance(0.02, BATCH, HEADS, columns)
    keys[..., 0] = torch.where(spoiled, INF, keys[..., 0])
    garbage = torch.tensor([NAN, INF, -INF], dtype=shape.dtype)
    ignored = (~valid | (t >= end[:, None]) | (t < start[:, None]))[:, None, :, None]
    keys, values = (torch.where(ignored, garbage[random.below(3, *x.shape)], x) for x in (keys, values))
    return Inputs(query, keys, values, valid, start.int(), end), infinite


def select(random, shape, there):
    """int32 [B, H, slots]: ascending ids of some of each row's blocks, nearly always the open one, -1 last."""
    n = torch.arange(shape.blocks)
    weight = torch.rand((BATCH, HEADS, shape.blocks), generator=random.generator)
    is_open = (n == there[:, None] - 1)[:, None] & random.chance(0.95, BATCH, HEADS, 1)
    weight = torch.where(is_open, 2.0, weight).masked_fill((n >= there[:, None])[:, None], -1)
    most = there.clamp(max=shape.slots)[:, None]
    count = (1 + random.below(shape.slots, BATCH, HEADS)).where(random.chance(0.7, BATCH, HEADS), most).minimum(most)
    rank = weight.argsort(dim=-1, descending=True).argsort(dim=-1)
    ids = torch.where(rank < count[..., None], n, shape.blocks).sort(dim=-1).values[..., : shape.slots]
    return ids.masked_fill(ids == shape.blocks, -1).int()


def predict(random, shape, there, selected):
    """int32 [B, H, 2 N], in any order: each case has one of eight kinds of prediction."""
    length = 2 * shape.blocks
    n = torch.arange(length).expand(BATCH, HEADS, -1)
    begun = n < there[:, None, None]
    chosen = (n[..., None] == selected[..., None, :]).any(dim=-1)
    some = random.chance(0.5, BATCH, HEADS, length)
    once = torch.where(begun & some, n, -1)[..., : shape.blocks]
    strange = torch.tensor(BEYOND)[random.below(len(BEYOND), BATCH, HEADS, length)]
    kinds = [
        torch.full_like(n, -1),  # nothing
        torch.where(begun, n, -1),  # all there is
        torch.where(begun & ~chosen, n, -1),  # nothing of what was selected
        torch.where(chosen, n, -1),  # just that
        torch.where(begun & some, n, -1),
        n,  # more than there is
        torch.cat([once, once], dim=-1),  # twice
        torch.where(some, n, strange),
    ]
    kind = random.below(len(kinds), BATCH, HEADS)[None, ..., None].expand(1, -1, -1, length)
    order = torch.rand((BATCH, HEADS, length), generator=random.generator).argsort(dim=-1)
    return torch.stack(kinds).gather(0, kind)[0].gather(-1, order).int()


def poison(inputs, slots):
    """Leave NaN in the memory that outputs and partials of this size will be given."""
    batch, heads, group, dim = inputs.query.shape
    rows = (batch, heads, slots, group)
    sizes = ((*rows, dim), rows, rows, (batch, heads, group, dim), (batch, heads, slots))
    freed = [torch.full(size, NAN) for size in sizes]
    del freed


def attend(ops, shape, inputs, selected, predicted=None):
    """repair_merge; without a prediction, what serial decoding runs."""
    options = dict(scale=shape.dim**-0.5, block_size=shape.block_size)
    first, end = inputs[:5], inputs.end
    predicted = selected[:, :, :0] if predicted is None else predicted
    poison(inputs, predicted.shape[2])
    partials = ops.block_partials(*first, predicted, end, **options)
    poison(inputs, selected.shape[2])
    return ops.repair_merge(*first, selected, end, predicted, partials, **options)


def products(query, keys):
    """query @ keys.mT, summed channel by channel as one thread does: cuBLAS splits a sum and errs less."""
    total = torch.zeros((*query.shape[:3], keys.shape[2]), dtype=query.dtype)
    for d in range(query.shape[3]):
        total.addcmul_(query[..., d, None], keys[:, :, None, :, d])
    return total


def softmax_over(inputs, shape, selected, dtype):
    """Attention over the tokens of the selected blocks in one pass, computed in `dtype`: [B, H, G, D]."""
    t, start = torch.arange(inputs.valid.shape[1]), inputs.start.long()[:, None]
    block = (t - start).div(shape.block_size, rounding_mode="floor")
    attended = inputs.valid & (t >= start) & (t < inputs.end[:, None])
    seen = (selected[..., None, :] == block[:, None, :, None]).any(dim=-1) & attended[:, None]
    keys, values = (torch.where(seen[..., None], x.to(dtype), 0) for x in inputs[1:3])
    logits = products(inputs.query.to(dtype), keys) * shape.dim**-0.5
    weights = logits.masked_fill(~seen[:, :, None], -INF).softmax(dim=-1)
    return torch.where(seen.any(dim=-1)[..., None, None], weights, 0) @ values, values


def check_errors(output, inputs, shape, selected, finite):
    """As near to fp64 as one fp32 softmax over the same tokens is; both as the layer takes them, in its own dtype."""
    exact, values = softmax_over(inputs, shape, selected, torch.float64)
    single, _ = softmax_over(inputs, shape, selected, torch.float32)
    ours, usual = (((x.to(shape.dtype) - exact).abs().amax(dim=(2, 3))) for x in (output, single))
    largest = values.abs().amax(dim=(2, 3))
    # 2.5e-7: two units in the last place of fp32
    assert ((ours <= 1.5 * usual + 2.5e-7 * largest) | ~finite).all(), ((ours - 1.5 * usual) / largest)[finite].max()
    # Before it is rounded: weights in 16 bits at least, high and low half
    assert (((output - exact).abs().amax(dim=(2, 3)) <= 1e-5 * largest + 1e-6) | ~finite).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_repair_merge_of_random_problems(ops, assert_same_bits, shape):
    for seed in range(-(-CASES // (len(SHAPES) * BATCH * HEADS))):
        random = Random(seed)
        inputs, infinite = make_inputs(random, shape)
        there = there_are(inputs, shape)
        selected = select(random, shape, there)
        predicted = predict(random, shape, there, selected)
        serial = attend(ops, shape, inputs, selected)
        assert not (serial.isnan() & ~infinite[..., None, None]).any()
        assert_same_bits(attend(ops, shape, inputs, selected, predicted), serial)
        alone = [
            attend(ops, shape, inputs.alone(row, head), selected[row : row + 1, head : head + 1].clone())[0, 0]
            for row in range(BATCH)
            for head in range(HEADS)
        ]
        assert_same_bits(torch.stack(alone).unflatten(0, (BATCH, HEADS)), serial)
        if seed % 4 == 0:
            check_errors(serial, inputs, shape, selected, ~infinite)
