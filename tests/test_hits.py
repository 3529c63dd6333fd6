"""The study of hit rates, in a small form."""

import pytest

from hf_sparse_prr.evidence.hits import DELTAS, continued, study
from hf_sparse_prr.evidence.settings import Setting
from hf_sparse_prr.evidence.subjects import load_subject


@pytest.fixture(scope="module")
def found():
    return study(load_subject("tiny:llama"), 768, 32, Setting("prr", "quest", 192, 16, 2))


def test_rates_are_those_of_the_run(found):
    rates, trace = found
    assert list(rates["layers"]) == list(trace.scores) == [2, 3] and trace.free == 9
    mean = sum(layer["1"]["ema"]["rate"] for layer in rates["layers"].values()) / 2
    assert mean == pytest.approx(rates["stats"]["rate"], abs=1e-3)
    assert rates["mean"]["1"]["ema"]["rate"] == pytest.approx(mean, abs=1e-3)


def test_heads_average_to_their_layer_and_surplus_helps(found):
    for layer in found[0]["layers"].values():
        heads = [head["rate"] for head in layer["1"]["heads"]]
        assert len(heads) == 2 and sum(heads) / 2 == pytest.approx(layer["1"]["ema"]["rate"], abs=1e-3)
        by_delta = [layer[f"{delta:g}"]["ema"]["rate"] for delta in DELTAS]
        assert by_delta == sorted(by_delta)


def test_a_shift_is_seen_when_it_comes(found):
    rates = found[0]["shift"]["ema"]
    assert [each["step"] for each in rates[:2]] == [15, 16]
    assert rates[1]["ema"] < rates[0]["ema"]


def test_topics_and_calibration_are_there(found):
    rates = found[0]
    assert [each["step"] for each in rates["topic"]["switched"]] == [0, 8, 16, 24]
    assert rates["calibrated_by_prompt"]["rate"] > 0 and len(rates["calibrated_by_prompt"]["ema"]) == 4
    assert set(rates["mean"]["calibrated"]) == {"chosen", "default", "last"}


def test_what_is_decoded_has_the_length_asked_for():
    subject = load_subject("tiny:llama")
    for switched in (False, True):
        assert len(continued(subject, 768, 32, 0, switched)) == 800
    assert continued(subject, 768, 32, 0, False) != continued(subject, 768, 32, 1, False)


def test_a_model_with_an_indexer_is_refused():
    with pytest.raises(ValueError, match="model: expected one that selects blocks, got tiny:deepseek_v32"):
        study(load_subject("tiny:deepseek_v32"), 768, 32, Setting("prr", "dsa"))
