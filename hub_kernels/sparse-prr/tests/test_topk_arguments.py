"""gvr_topk: its statistics and what it refuses."""

import re

import numpy as np
import pytest
import torch

SCORES = torch.zeros(2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 1000), (2, 0), (0, 4)])
@pytest.mark.parametrize("k", [0, 1, 500, 2000])
def test_gvr_topk_stats(ops, rows, columns, k, dtype):
    scores = torch.tensor(np.random.default_rng(6).standard_normal((rows, columns))).to(dtype)
    lengths = torch.tensor([columns, -4, 7][:rows], dtype=torch.int32)
    indices, stats = ops.gvr_topk(scores, k, lengths=lengths, return_stats=True)
    assert torch.equal(indices, ops.gvr_topk(scores, k, lengths=lengths))
    assert isinstance(stats, ops.TopKStats)
    assert stats._fields == ("passes", "candidates", "fallback")
    assert [field.dtype for field in stats] == [torch.int32, torch.int32, torch.bool]
    for field in stats:
        assert field.shape == (rows,)
        assert field.device == scores.device
    assert ((stats.passes >= 0) & (stats.passes <= 40)).all()
    assert ((stats.candidates >= 0) & (stats.candidates <= lengths.clamp(0, columns))).all()


def test_gvr_topk_without_stats_returns_a_tensor(ops):
    assert isinstance(ops.gvr_topk(torch.ones(1, 2), 1), torch.Tensor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3), 1), "scores: expected [R, N] in float32, bfloat16 or float16, got [3] in torch.float32"),
        ((torch.zeros(1, 2, 3), 1), "got [1, 2, 3] in torch.float32"),
        ((torch.zeros(2, 3, dtype=torch.float64), 1), "got [2, 3] in torch.float64"),
        ((torch.zeros(2, 3, dtype=torch.int32), 1), "got [2, 3] in torch.int32"),
        ((torch.zeros(2, 3, dtype=torch.bool), 1), "got [2, 3] in torch.bool"),
        ((SCORES, -1), "k: expected an int >= 0, got -1"),
        ((SCORES, 2.0), "k: expected an int >= 0, got 2.0"),
        ((SCORES, True), "k: expected an int >= 0, got True"),
        ((SCORES, None), "k: expected an int >= 0, got None"),
        ((SCORES, torch.tensor(2)), "k: expected an int >= 0, got tensor(2"),
        ((SCORES, np.float64(2)), "k: expected an int >= 0, got np.float64(2.0)"),
        ((SCORES, np.True_), "k: expected an int >= 0, got np.True_"),
        ((SCORES, np.int64(-1)), "k: expected an int >= 0, got np.int64(-1)"),
        ((SCORES.to_sparse(), 1), "scores: expected a strided tensor, got torch.sparse_coo"),
    ],
)
def test_gvr_topk_rejects(ops, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.gvr_topk(*arguments)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), "lengths: expected an integer tensor [2], got [3] in torch.int32"),
        (torch.zeros(2, 1, dtype=torch.int32), "lengths: expected an integer tensor [2], got [2, 1] in torch.int32"),
        (torch.tensor(1), "lengths: expected an integer tensor [2], got [] in torch.int64"),
        (torch.zeros(2), "lengths: expected an integer tensor [2], got [2] in torch.float32"),
        (torch.zeros(2, dtype=torch.bool), "lengths: expected an integer tensor [2], got [2] in torch.bool"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "lengths: expected device {device}, got meta"),
    ],
)
def test_gvr_topk_rejects_lengths(ops, lengths, message):
    with pytest.raises(ValueError, match=re.escape(message.format(device=SCORES.device))):
        ops.gvr_topk(SCORES, 1, lengths=lengths)


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.int32), "hint: expected an integer tensor [2, M], got [3, 4] in torch.int32"),
        (torch.zeros(2, dtype=torch.int32), "hint: expected an integer tensor [2, M], got [2] in torch.int32"),
        (torch.zeros(2, 4), "hint: expected an integer tensor [2, M], got [2, 4] in torch.float32"),
        (torch.zeros(2, 4, dtype=torch.bool), "hint: expected an integer tensor [2, M], got [2, 4] in torch.bool"),
        (torch.zeros(2, 4, dtype=torch.int32, device="meta"), "hint: expected device {device}, got meta"),
        (torch.zeros(2, 4, dtype=torch.int32).to_sparse(), "hint: expected a strided tensor, got torch.sparse_coo"),
    ],
)
def test_gvr_topk_rejects_hints(ops, hint, message):
    with pytest.raises(ValueError, match=re.escape(message.format(device=SCORES.device))):
        ops.gvr_topk(SCORES, 1, hint=hint)


@pytest.mark.parametrize("k", [np.int64(5), np.uint8(5), np.int32(500)])
def test_gvr_topk_takes_integers_of_numpy(ops, k):
    scores = torch.randn(2, 300)
    assert torch.equal(ops.gvr_topk(scores, k), ops.gvr_topk(scores, int(k)))
    assert torch.equal(ops.topk_threshold(scores, k), ops.topk_threshold(scores, int(k)))


def test_gvr_topk_takes_options_by_keyword_only(ops):
    with pytest.raises(TypeError):
        ops.gvr_topk(SCORES, 1, torch.zeros(2, 1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (1.0, "threshold: expected a tensor, got float"),
        (torch.zeros(3), "threshold: expected [2] or [2, 2] in torch.float32, got [3] in torch.float32"),
        (torch.zeros(2, 3), "got [2, 3] in torch.float32"),
        (torch.zeros(2, dtype=torch.float64), "got [2] in torch.float64"),
        (torch.zeros(2, dtype=torch.int32), "got [2] in torch.int32"),
        (torch.zeros(2, device="meta"), "threshold: expected device"),
    ],
)
def test_gvr_topk_refuses_other_thresholds(ops, threshold, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.gvr_topk(SCORES, 1, threshold=threshold)


def test_gvr_topk_takes_thresholds_of_any_layout(ops):
    scores = torch.tensor(np.random.default_rng(8).standard_normal((3, 9000)), dtype=torch.float32)
    expected, sampled = ops.gvr_topk(scores, 50), ops.topk_threshold(scores, 50)
    assert sampled.shape == (3, 2) and (sampled[:, 0] <= sampled[:, 1]).all()
    for threshold in (sampled, sampled.t().contiguous().t(), sampled[:, 0], sampled[:, :1].expand(-1, 2)):
        assert torch.equal(ops.gvr_topk(scores, 50, threshold=threshold), expected)


def test_topk_threshold_of_short_rows_and_nothing(ops):
    assert ops.topk_threshold(torch.zeros(0, 5), 3).shape == (0, 2)
    assert (ops.topk_threshold(torch.zeros(2, 5), 3) <= 0).all()
    with pytest.raises(ValueError, match="k: expected an int >= 0"):
        ops.topk_threshold(torch.zeros(2, 5), -1)
