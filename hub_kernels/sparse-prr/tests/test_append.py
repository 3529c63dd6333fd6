"""append_states: new columns where the device says, and nothing else written."""

import numpy as np
import pytest
import torch


def states(rng, *shape, dtype=torch.float32):
    return torch.tensor(rng.standard_normal(shape), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("count", "dims"), [(1, (64, 64)), (3, (80, 80)), (40, (16, 24)), (1, (192, 128)), (2, (24, 0))]
)
def test_append_states_writes_the_new_columns_of_each_row(ops, count, dims, dtype):
    rng = np.random.default_rng(0)
    buffers = [states(rng, 3, 2, 90, dim, dtype=dtype) for dim in dims]
    new = [states(rng, 3, 2, count, dim, dtype=dtype) for dim in dims]
    end = torch.tensor([count, 41, 90])
    expected = [buffer.clone() for buffer in buffers]
    for buffer, state in zip(expected, new, strict=True):
        for row, last in enumerate(end.tolist()):
            buffer[row, :, last - count : last] = state[row]
    assert ops.append_states(*buffers, *new, end) is None
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


def test_append_states_takes_views_and_any_integer(ops):
    rng = np.random.default_rng(1)
    keys, values = (states(rng, 2, 50, 3, 32) for _ in range(2))
    new = states(rng, 2, 2, 3, 64)[..., ::2].transpose(1, 2)
    before = keys.clone()
    ops.append_states(keys.transpose(1, 2), values.transpose(1, 2), new, new, torch.tensor([50, 7], dtype=torch.int32))
    before[0, 48:50], before[1, 5:7] = new[0].transpose(0, 1), new[1].transpose(0, 1)
    assert torch.equal(keys, before)


def test_append_states_of_nothing_changes_nothing(ops):
    keys = torch.ones(2, 2, 10, 16)
    ops.append_states(keys, keys, keys[:, :, :0], keys[:, :, :0], torch.tensor([4, 4]))
    assert (keys == 1).all()
