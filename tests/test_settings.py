"""What an evaluation runs under, as data."""

import pytest

from hf_sparse_prr import SparseConfig
from hf_sparse_prr.evidence.settings import MODES, Setting, budget_of, settings_for


def test_dense_comes_first_and_prr_after_its_twin():
    found = settings_for(False, 4096, ["quest", "infllm_v2"], ["1/8", "1024"], [32, 64], list(MODES))
    assert found[0] == Setting("dense") and [each.mode for each in found[1:3]] == ["forced"] * 2
    assert [each.block_size for each in found[1:3]] == [32, 64]
    assert {each.budget for each in found[3:]} == {512, 1024} and len(found) == 3 + 2 * 2 * 2 * 2
    for serial, prr in zip(found[3::2], found[4::2], strict=True):
        assert (serial.mode, prr.mode) == ("serial", "prr") and prr.serial == serial
    assert len({each.label for each in found}) == len(found)


def test_a_model_with_an_indexer_has_one_way_to_select():
    labels = [each.label for each in settings_for(True, 4096, ["quest"], ["1/8"], [16, 32], list(MODES))]
    assert labels == ["dense", "serial-dsa", "prr-dsa"]


def test_modes_may_be_left_out():
    assert settings_for(False, 4096, ["quest"], ["1/8"], [32], ["serial"]) == [
        Setting("serial", "quest", 512, 32, "auto", "1/8")
    ]


@pytest.mark.parametrize("setting", settings_for(False, 4096, ["quest", "infllm_v2"], ["1/8"], [32], ["serial", "prr"]))
def test_overrides_are_settings_of_the_library(setting):
    config = SparseConfig(**setting.overrides(ema=(0.4, 0.1, 0.25)))
    assert config.budget == 512 and config.speculate == (setting.mode == "prr")


def test_overrides_of_an_indexed_model_name_no_budget():
    assert Setting("prr", "dsa").overrides() == {"selector": "dsa", "speculate": True}


@pytest.mark.parametrize("text, tokens", [("512", 512), ("1/8", 512), ("3/4", 3072), ("1/1", 4096)])
def test_a_budget_is_tokens_or_a_share(text, tokens):
    assert budget_of(text, 4096) == tokens


@pytest.mark.parametrize("text", ["", "x", "1/", "/8", "1/0", "-5", "1.5", "1/8/2"])
def test_another_budget_is_refused(text):
    with pytest.raises(ValueError, match=r"budget: expected tokens like 512, or a share of the length like 1/8, got"):
        budget_of(text, 4096)
