"""Decoding under settings: what is fed, what is chosen, and that each setting is what its name says."""

import pytest
import torch

from hf_sparse_prr.evidence.decoding import Rows
from hf_sparse_prr.evidence.exact import episodes_of
from hf_sparse_prr.evidence.settings import Setting
from hf_sparse_prr.evidence.subjects import load_subject

pytestmark = pytest.mark.compat

LENGTH, BEGIN = 768, 756


def rows_of(name, chosen=(), rows=2, **how):
    subject = load_subject(name)
    ids = torch.tensor([each.ids for each in episodes_of("needle_multi_key", subject.form, LENGTH, rows, 5)])
    own = torch.zeros(LENGTH, dtype=torch.bool)
    own[list(chosen)] = True
    held = Rows(subject, ids, BEGIN, own, **how)
    held.read()
    return held


@pytest.mark.parametrize("name", ["tiny:qwen3", "tiny:deepseek_v32"])
def test_dense_is_one_forward_of_the_stock_model(name):
    rows = rows_of(name)
    found = rows.decode(Setting("dense"), keep=True)
    with torch.no_grad():
        whole = rows.subject.model(rows.ids, use_cache=False).logits[:, BEGIN:-1].float()
    torch.testing.assert_close(found.logits, whole, rtol=2e-3, atol=2e-3)
    assert torch.equal(found.ids, rows.ids[:, BEGIN + 1 :]) and found.stats is None


def test_the_models_own_tokens_are_its_likeliest():
    rows = rows_of("tiny:llama", chosen=range(LENGTH - 2, LENGTH))
    found = rows.decode(Setting("dense"), keep=True)
    assert torch.equal(found.ids[:, -2:], found.logits[:, -2:].argmax(-1))
    assert torch.equal(found.ids[:, :-2], rows.ids[:, BEGIN + 1 : -2])


@pytest.mark.parametrize(
    "name, setting",
    [
        ("tiny:glm4", Setting("prr", "quest", 128, 16, 0)),
        ("tiny:llama", Setting("prr", "infllm_v2", 192, 32, 1)),
        ("tiny:deepseek_v32", Setting("prr", "dsa")),
    ],
)
def test_prr_has_serials_bits_and_neither_denses(name, setting):
    rows = rows_of(name)
    prr, serial, dense = (rows.decode(each) for each in (setting, setting.serial, Setting("dense")))
    assert prr.digest == serial.digest != dense.digest
    assert prr.stats["hit_rate"] > 0 and serial.stats["hit_rate"] is None
    assert prr.stats["selector_calls"] == serial.stats["selector_calls"] > 0
    assert rows.decode(setting).digest == prr.digest  # the cache that is copied stays as it was


def test_its_own_prompt_calibrates_the_ema():
    setting = Setting("prr", "quest", 128, 16, 0)
    given, own = rows_of("tiny:llama", rows=1), rows_of("tiny:llama", rows=1, own_prompt=True)
    default = given.decode(setting).stats["layers"]
    calibrated = own.decode(setting).stats["layers"]
    assert {each["ema"] for each in default} == {(0.4, 0.1, 0.25)}
    assert {each["ema"] for each in calibrated} != {(0.4, 0.1, 0.25)}


def test_a_prompt_that_was_not_read_is_refused():
    rows = rows_of("tiny:llama")
    rows._prompt = None
    with pytest.raises(ValueError, match=r"rows: expected read\(\) before decode\(\)"):
        rows.decode(Setting("dense"))
