"""The study of hit rates of models that select tokens by an indexer, in a small form."""

import pytest
import torch

from hf_sparse_prr.evidence import hits_indexed
from hf_sparse_prr.evidence.decoding import Decoded
from hf_sparse_prr.evidence.hits_indexed import indexed_study
from hf_sparse_prr.evidence.subjects import load_subject
from hf_sparse_prr.report import TraceEntry


@pytest.fixture(scope="module")
def found():
    return indexed_study(load_subject("tiny:deepseek_v32"), 640, 32)


def test_rates_are_those_of_the_run(found):
    assert list(found["layers"]) == [0, 1, 2, 3]
    assert found["mean"]["1"]["ema"]["rate"] == pytest.approx(found["stats"]["rate"], abs=1e-3)
    for layer in found["layers"].values():
        rates = [layer[delta]["ema"]["rate"] for delta in ("1", "1.5", "2")]
        assert 0 < rates[0] < rates[1] <= rates[2] <= 1.0  # 960 of some 650 tokens: all of those known
        assert 0 < layer["1"]["last"]["rate"] < 1


def test_windows_average_to_the_whole(found):
    steady = found["topic"]["steady"]
    assert [each["step"] for each in steady] == [0, 8, 16, 24] and found["topic"]["at"] == 16
    assert sum(each["ema"] for each in steady) / 4 == pytest.approx(found["stats"]["rate"], abs=1e-3)
    assert found["topic"]["switched"] != steady
    assert sum(each["last"] for each in steady) / 4 == pytest.approx(found["mean"]["1"]["last"]["rate"], abs=1e-3)
    assert found["drift"][1] == pytest.approx(found["mean"]["1"]["last"]["rate"] * 32 / 31, abs=1e-3)  # but the first
    assert list(found["drift"]) == [1, 2, 4, 8, 16]


def test_reuse_is_counted_by_hand():
    def entry(step, predicted, selected):
        ids = [torch.tensor([[row]], dtype=torch.int32) for row in (predicted, selected, [-1])]
        return TraceEntry(step, 2, *ids)

    trace = [entry(0, [-1], [1, 2, 3, 4]), entry(1, [1, 2], [2, 3, 4, 9]), entry(2, [2, 9, -1], [2, 9, 1, 7])]
    steps = hits_indexed._steps_of(Decoded(torch.empty(0), "", None, None, trace))
    assert hits_indexed._overlap(steps[2], 1) == 5 / 8 and hits_indexed._overlap(steps[2], 2) == 2 / 4
    assert hits_indexed._windows(steps) == [{"step": 0, "ema": round(3 / 12, 4), "last": round(5 / 12, 4)}]
    assert hits_indexed._reuse(steps[2], 2) == 2 / 4


def test_a_model_without_an_indexer_is_refused():
    with pytest.raises(ValueError, match="model: expected one with an indexer, got tiny:llama"):
        indexed_study(load_subject("tiny:llama"), 640, 32)
