"""Replayed predictions: against rates counted by hand, and what must hold on real scores."""

from pathlib import Path

import pytest
import torch

from hf_sparse_prr import gvr_topk
from hf_sparse_prr.calibration import GRID
from hf_sparse_prr.config import DEFAULT_EMA
from hf_sparse_prr.evidence.replay import LAST, calibrated, overlaps, replay, shifted
from hf_sparse_prr.evidence.traces import Trace

TRACES = Path(__file__).parent / "traces"
QUEST = Trace.load(TRACES / "llama-quest.safetensors")
REAL = [(path.stem, Trace.load(path)) for path in sorted(TRACES.glob("*.safetensors"))]
LAYERS = [
    pytest.param(trace.scores[layer], trace.free, id=f"{name} {layer}")
    for name, trace in REAL
    for layer in trace.scores
]


def winners(scores, k):
    """Sets of the k best blocks by step and head, by a sort."""
    order = scores.nan_to_num(nan=float("-inf")).argsort(dim=-1, descending=True, stable=True)[..., :k]
    return [[set(head.tolist()) for head in step] for step in order]


@pytest.mark.parametrize("scores, free", LAYERS)
@pytest.mark.parametrize("delta", [1.0, 1.5])
def test_reuse_is_counted_as_by_hand(scores, free, delta):
    chosen, held = winners(scores, free), winners(scores, int(delta * free))
    hits = replay(scores, free, LAST, delta)
    assert hits.hits[0].sum() == 0
    for step in range(1, len(scores)):
        for head in range(scores.shape[1]):
            assert hits.hits[step, head] == len(chosen[step][head] & held[step - 1][head])
    assert hits.selected.unique().tolist() == [free]


def test_weights_are_shares_of_the_normalised_score():
    scores = torch.tensor([[[4.0, 3.0, 0.0]], [[1.0, 3.0, 5.0]]])  # 0 and 1 are expected of the second step
    hits = replay(scores, 2, LAST)
    assert hits.shares[0].isnan().all() and hits.hits.tolist() == [[0], [1]]
    assert hits.shares[1].item() == pytest.approx(0.5 / 1.5)  # (3 - 1) / 4 of that and (5 - 1) / 4
    assert hits.rate == pytest.approx(1 / 4) and hits.weighted == pytest.approx(0.5 / 1.5)


def test_more_predicted_blocks_never_hit_less():
    for scores in QUEST.scores.values():
        rates = [replay(scores, QUEST.free, DEFAULT_EMA, delta).rate for delta in (0.5, 1.0, 1.5, 2.0, 100.0)]
        assert rates == sorted(rates)
        assert rates[-1] == pytest.approx(31 / 32, abs=0.01)  # nothing was known of the first step and of new blocks


def test_the_calibrated_candidate_is_the_best_of_the_grid():
    scores = QUEST.scores[2][:12]
    chosen = calibrated(scores, QUEST.free)
    best = max(replay(scores, QUEST.free, ema).weighted for ema in GRID)
    assert replay(scores, QUEST.free, chosen).weighted == pytest.approx(best, abs=1e-6)


def test_overlap_falls_with_the_lag():
    found = overlaps(QUEST)
    assert list(found) == [1, 2, 4, 8, 16] and all(0 < rate < 1 for rate in found.values())
    assert found[1] > found[16]


def test_a_shift_moves_real_scores_and_costs_hits_at_once():
    moved = shifted(QUEST, 16, 5)
    for layer, scores in QUEST.scores.items():
        assert torch.equal(moved.scores[layer][:16].nan_to_num(), scores[:16].nan_to_num())
        after, before = moved.scores[layer][16:], scores[16:]
        assert torch.equal(after.nan_to_num().sort(dim=2).values, before.nan_to_num().sort(dim=2).values)
    drop = [replay(trace.scores[2], QUEST.free, DEFAULT_EMA).of(slice(16, 17)).rate for trace in (QUEST, moved)]
    assert drop[1] < drop[0]


@pytest.mark.parametrize("scores, free", LAYERS)
@pytest.mark.parametrize("k", [1, 4, 13, 25])
def test_the_exact_top_k_of_real_scores(scores, free, k):
    rows = scores.flatten(0, 1)
    wanted = [sorted(head) for step in winners(scores, k) for head in step]
    for hint in (None, torch.zeros((len(rows), 3), dtype=torch.int32), gvr_topk(rows.roll(2, 0), k)):
        assert gvr_topk(rows, k, hint=hint).tolist() == wanted


@pytest.mark.parametrize("scores, free", [each for each in LAYERS if "smollm2" in each.id])
def test_a_text_models_blocks_are_mostly_predicted(scores, free):
    assert replay(scores, free, DEFAULT_EMA).rate > 0.7
    assert replay(scores, free, DEFAULT_EMA, 2.0).rate > 0.9
