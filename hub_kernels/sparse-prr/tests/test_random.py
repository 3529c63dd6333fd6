"""repair_merge over random problems: the bits of an empty prediction, whatever was predicted, alone and in a batch."""

import os

import numpy as np
import pytest
import torch

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))  # slow, and silently wrong in bfloat16
CASES = int(os.environ.get("PRR_CASES", "8" if INTERPRETED else "96"))  # 10000 on a GPU before a release
SHAPES = [  # dtype, head dim, block size, query heads of a KV head
    (torch.float32, 64, 16, 3),
    (torch.float16, 80, 32, 4),
    (torch.bfloat16, 128, 64, 8),
    (torch.bfloat16, 128, 64, 16),
    (torch.bfloat16, 192, 128, 1),
    (torch.float32, 256, 32, 7),
    (torch.float16, 96, 16, 5),
    (torch.bfloat16, 64, 128, 2),
]
PREDICTIONS = ("random", "empty", "all", "disjoint", "the same", "more than there are")


def lists(rng, problem, slots):
    """int32 [B, H, slots]: ascending ids of each row's blocks, the open one always, -1 last."""
    batch, heads = problem.query.shape[:2]
    blocks = torch.full((batch, heads, slots), -1, dtype=torch.int32)
    for row in range(batch):
        there = max(0, -(-(problem.end - int(problem.start[row])) // problem.block_size))
        for head in range(heads):
            count = min(there, int(rng.integers(1, slots + 1)))
            chosen = rng.choice(there, count, replace=False) if there else np.zeros(0, dtype=int)
            if there and there - 1 not in chosen:
                chosen[0] = there - 1
            blocks[row, head, : len(chosen)] = torch.tensor(np.sort(chosen), dtype=torch.int32)
    return blocks


def predict(rng, kind, problem, selected):
    if kind == "the same":
        return selected.clone()
    if kind == "empty":
        return selected[:, :, :0]
    everything = torch.arange(max(problem.blocks, 1), dtype=torch.int32).expand(*selected.shape[:2], -1).contiguous()
    if kind == "all":
        return everything
    if kind == "disjoint":
        taken = (everything[..., None] == selected[..., None, :]).any(dim=-1)
        return everything.masked_fill(taken, -1)
    if kind == "more than there are":
        return torch.cat([everything, everything + everything.shape[2]], dim=2)
    return lists(rng, problem, int(rng.integers(1, 40)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_repair_merge_of_random_problems(make_problem, assert_same_bits, shape):
    dtype, dim, block_size, group = shape
    if INTERPRETED and dtype == torch.bfloat16:
        dtype = torch.float16
    for case in range(-(-CASES // len(SHAPES))):
        rng = np.random.default_rng(case)
        problem = make_problem(
            case, batch=2, heads=2, group=group, dim=dim, block_size=block_size,
            tokens=int(rng.integers(1, 24 * block_size)), holes=float(rng.choice([0.0, 0.2])), dtype=dtype,
        )  # fmt: skip
        selected = lists(rng, problem, int(rng.integers(1, 33)))
        serial = problem.repair_merge(selected, selected[:, :, :0])
        assert not serial.isnan().any()
        kind = PREDICTIONS[case % len(PREDICTIONS)]
        assert_same_bits(problem.repair_merge(selected, predict(rng, kind, problem, selected)), serial)
        row, head = int(rng.integers(2)), int(rng.integers(2))
        alone = selected[row : row + 1, head : head + 1]
        assert_same_bits(problem.alone(row, head).repair_merge(alone, alone[:, :, :0])[0, 0], serial[row, head])
