"""forced_blocks: sinks and last blocks of each row, and what its next token will have."""

import numpy as np
import pytest
import torch


def oracle(valid, start, end, fits, size, sinks, local):
    """Row by row, in plain Python."""
    rows = []
    for row, (first, behind) in enumerate(zip(start, end, strict=True)):
        of = []
        for last in (behind, behind + 1):
            tokens = last - first
            newest = (tokens - 1) // size
            blocks = (
                [*range(sinks), *range(newest - local + 1, newest + 1)] if tokens > fits else [-1] * (sinks + local)
            )
            of.append((tokens > fits, newest - local + 1 if tokens > fits else 0, blocks))
        kept = [
            block
            if block >= 0 and valid[row, first + block * size : min(first + (block + 1) * size, behind)].any()
            else -1
            for block in of[0][2]
        ]
        rows.append((of[0][0], behind - first, of[0][1], [kept], of[1][1], [of[1][2]]))
    return [list(each) for each in zip(*rows, strict=True)]


@pytest.mark.parametrize(("size", "sinks", "local"), [(16, 1, 2), (64, 0, 1), (5, 3, 3), (200, 1, 2)])
def test_rows_as_told_one_by_one(ops, size, sinks, local):
    rng = np.random.default_rng(0)
    columns, batch, fits = 9 * size, 9, (sinks + local + 1) * size
    start = rng.integers(0, size, batch)
    end = np.array([0, 1, fits, fits + 1, fits + size, 0, columns, columns - 3, fits - 1]) + [
        *start[:6],
        0,
        0,
        start[8],
    ]
    valid = rng.random((batch, columns)) < 0.02  # most blocks hold no token
    found = ops.forced_blocks(torch.tensor(valid), torch.tensor(start), torch.tensor(end), fits, size, sinks, local)
    expected = oracle(valid, start, end, fits, size, sinks, local)
    assert [each.tolist() for each in found] == expected
    assert [each.dtype for each in found] == [torch.bool, *[torch.int64] * 2, torch.int32, torch.int64, torch.int32]


def test_views(ops):
    valid = torch.ones(2, 400, dtype=torch.bool)
    start, end = torch.tensor([0, 7, 3, 9])[::2], torch.tensor([400, 0, 90, 0])[::2]
    found = ops.forced_blocks(
        valid.T.contiguous().T[:, :300].contiguous()[:, :], start, end.clamp(max=300), 64, 16, 1, 2
    )
    again = ops.forced_blocks(valid[:, :300], start.clone(), end.clamp(max=300).clone(), 64, 16, 1, 2)
    assert all(map(torch.equal, found, again))


def test_no_rows(ops):
    nothing = torch.zeros(0, dtype=torch.int64)
    found = ops.forced_blocks(torch.zeros(0, 10, dtype=torch.bool), nothing, nothing, 64, 16, 1, 2)
    assert found.forced.shape == found.next_forced.shape == (0, 1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": torch.ones(10, dtype=torch.bool)}, r"valid: expected \[B, T\], got \[10\]"),
        ({"start": torch.zeros(2, dtype=torch.int64)}, r"start: expected \[B\] = \[1\], got \[2\]"),
        ({"end": torch.zeros(1)}, "end: expected torch.int8 or .*, got torch.float32"),
        ({"local": 0}, "local: expected an int >= 1, got 0"),
        ({"block_size": True}, "block_size: expected an int >= 1, got True"),
        ({"fits": 47}, "fits: expected at least the forced blocks, 48, got 47"),
    ],
)
def test_what_is_refused(ops, change, message):
    rows = torch.zeros(1, dtype=torch.int64)
    given = dict(
        valid=torch.ones(1, 10, dtype=torch.bool), start=rows, end=rows, fits=64, block_size=16, sinks=1, local=2
    )
    with pytest.raises(ValueError, match=message):
        ops.forced_blocks(**{**given, **change})
