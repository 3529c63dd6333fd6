"""A million tokens in more elements than an int32 counts: offsets are 64-bit."""

import pytest
import torch

COLUMNS, HEADS, GROUP, DIM, SIZE = 2**20, 17, 4, 128, 64  # 2.3e9 elements, 4.6 GB each of K and V
DTYPE = torch.bfloat16


@pytest.fixture
def buffers():
    if not torch.cuda.is_available() or torch.get_default_device().type != "cuda":
        pytest.skip("needs a GPU with 12 GB free")
    keys, values = (torch.empty(1, HEADS, COLUMNS, DIM, dtype=DTYPE) for _ in range(2))
    for buffer in (keys, values):
        buffer[:, -1] = torch.randn(COLUMNS, DIM, dtype=DTYPE)
    yield keys, values
    torch.cuda.empty_cache()


def test_the_last_head_of_a_huge_buffer_equals_itself_alone(ops, assert_same_bits, buffers):
    query, new = torch.randn(1, HEADS, GROUP, DIM, dtype=DTYPE), torch.randn(1, HEADS, 1, DIM, dtype=DTYPE)
    valid, start, end = torch.ones(1, COLUMNS, dtype=torch.bool), torch.tensor([0]), torch.tensor([COLUMNS])
    last = torch.tensor([COLUMNS // SIZE - 1])
    forced = torch.tensor([[[0, COLUMNS // SIZE - 2, COLUMNS // SIZE - 1]]], dtype=torch.int32)

    def step(keys, values, query, new):
        ops.append_states(keys, values, new, new, end)
        shape = (*keys.shape[:2], COLUMNS // SIZE, DIM)
        lower, upper = torch.zeros(shape, dtype=DTYPE), torch.zeros(shape, dtype=DTYPE)
        ops.update_summaries(keys, valid, start, lower, upper, end, COLUMNS, SIZE)
        scores = ops.quest_scores(query, lower, upper, 1, last - 1)
        selected, free = ops.select_blocks(scores, forced, 61)
        data = (query, keys, values, valid, start)
        options = dict(scale=DIM**-0.5, block_size=SIZE)
        partials = ops.block_partials(*data, free, end, **options)
        return scores, selected, *partials, ops.repair_merge(*data, selected, end, free, partials, **options)

    alone = step(*(tensor[:, -1:].clone() for tensor in (*buffers, query, new)))
    together = step(*buffers, query, new)
    assert int(together[1][0, -1].max()) == COLUMNS // SIZE - 1
    for whole, part in zip(together, alone, strict=True):
        assert_same_bits(whole[:, -1:].contiguous(), part)
