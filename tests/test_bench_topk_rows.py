"""Rows and hints of the top-k's benchmark: of the shape and the worth that it says; and its oracle."""

import pytest
import torch

from hf_sparse_prr import kernel_loader
from hf_sparse_prr.bench_topk_rows import SCORES, Rows, best

pytestmark = pytest.mark.compat
CPU = torch.device("cpu")


def pool_of(name: str = "normal", rows: int = 6, n: int = 300, ragged: bool = False, most: int = 50) -> Rows:
    return Rows(name, rows, n, most, torch.float32, CPU, ragged)


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_of_the_range_they_are_named_for(name: str) -> None:
    scores = pool_of(name, 4, 20000, most=1).scores
    low, mean, high = {
        "normal": (-6, 0, 6), "beta": (-0.75, 1.90, 13.60), "logistic": (-0.47, 1.6, 12.32),
        "lognormal": (-4.12, 2.55, 17.28), "weibull": (-3.04, 1.57, 12.30), "relu": (0, 0.01, 6),
        "bits": (-float("inf"), None, float("inf")),
    }[name]  # fmt: skip
    real = scores[~scores.isnan()]
    assert low <= real.min() and real.max() <= high
    if mean is not None:
        assert len(real) == scores.numel() and abs(real.mean() - mean) < 0.1
    else:
        assert 0.001 < scores.isnan().double().mean() < 0.02 and 0.05 < (real.abs() < 1e-30).double().mean() < 0.2
    assert (scores == 0).double().mean() > 0.9 if name == "relu" else True


def test_bits_ascend_with_what_is_behind_them() -> None:
    found = SCORES["bits"](torch.linspace(-2.5, 2.5, 1000))
    assert not found.isnan().any() and (found.diff() > 0).all()


@pytest.mark.parametrize("name", ["normal", "relu", "beta"])
def test_the_previous_step_resembles_a_row_and_another_row_does_not(name: str) -> None:
    pool = pool_of(name, 3, 4000, most=100)

    def shared(which: str) -> float:
        theirs = best(pool.other(which), 100, None)
        return float((theirs[:, :, None] == pool.winners(100)[:, None]).double().sum() / 300)

    assert shared("previous") > 0.4 > 0.2 > shared("other")
    assert pool.other("previous") is pool.other("previous")


def test_best_is_a_stable_sort_that_knows_no_nan() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[1.0, nan, 2.0, 2.0, -0.0, 0.0, -inf], [nan, -inf, nan, nan, 5.0, nan, 9.0]])
    assert best(scores, 7, None).tolist() == [[2, 3, 0, 4, 5, 6, -1], [6, 4, 1, -1, -1, -1, -1]]
    assert best(scores, 3, torch.tensor([2, 6])).tolist() == [[0, -1, -1], [4, 1, -1]]


def test_best_of_many_rows_is_that_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(7, 40).round(decimals=1)
    lengths = torch.arange(7) * 6
    whole = best(scores, 5, lengths)
    monkeypatch.setattr("hf_sparse_prr.bench_topk_rows._AT_ONCE", 100)
    assert torch.equal(best(scores, 5, lengths), whole)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.95, 1.0])
def test_a_previous_hint_has_the_overlap_that_is_asked_for(overlap: float, ragged: bool) -> None:
    pool = pool_of(ragged=ragged)
    hint, winners = pool.previous_hint(20, overlap), pool.winners(20)
    assert hint.shape == (6, 20) and hint.dtype == torch.int32
    for row in range(6):
        length = 300 if pool.lengths is None else int(pool.lengths[row])
        if length < 40:
            continue
        chosen = hint[row].tolist()
        assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < length
        assert len(set(chosen) & set(winners[row].tolist())) == round(overlap * 20)


def test_other_hints() -> None:
    pool, kernels = pool_of(), kernel_loader.resolve("reference").module
    assert pool.guesses("none", 20, kernels) == {}
    assert torch.equal(pool.guesses("oracle", 20, kernels)["hint"], pool.winners(20))
    anything = pool.guesses("random", 20, kernels)["hint"]
    assert (anything.diff() > 0).all() and anything.min() >= 0 and anything.max() < 300
    assert pool_of("beta", 1, 4, most=4).previous_hint(4, 0.5).tolist()[0][2:] == [4, 4]  # no loser is left


def test_rows_are_the_same_each_time() -> None:
    first, second = pool_of(ragged=True), pool_of(ragged=True)
    assert torch.equal(first.scores, second.scores) and torch.equal(first.lengths, second.lengths)
    assert torch.equal(first.previous_hint(9, 0.5), second.previous_hint(9, 0.5))
