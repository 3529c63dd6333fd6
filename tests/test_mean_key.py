"""CONTRIBUTING's worked example of a selector: it runs as it stands there."""

import re
from pathlib import Path

import oracle
import pytest
import torch
from models import SPARSE, TOLERANCE, greedy, left_pad, prompt, tiny_llama

from hf_sparse_prr import SparseCache, SparseConfig, patch_model, selectors

pytestmark = pytest.mark.compat
SETTINGS = dict(SPARSE, selector="mean_key")


def mean_key(row):
    """Of complete blocks; no other is ever scored."""
    return {block: float((row.queries @ row.keys[tokens].mean(dim=0)).sum()) for block, tokens in row.members.items()}


@pytest.fixture(autouse=True)
def example(monkeypatch):
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    monkeypatch.setattr(selectors, "SELECTORS", selectors.SELECTORS)  # put back, should the example replace it
    monkeypatch.setitem(selectors.SELECTORS, "mean_key", None)
    monkeypatch.setitem(oracle.SCORES, "mean_key", mean_key)
    (source,) = re.findall(r'```python\n("""Mean-key.*?)```', text, flags=re.DOTALL)
    assert source.count("\n") < 40
    exec(compile(source, "CONTRIBUTING.md", "exec"), {})


@pytest.mark.parametrize("speculate", [False, True])
def test_selection_and_attention_equal_the_oracle(speculate):
    model, checked = tiny_llama(), 0
    ids, mask = left_pad([prompt(140)[0], prompt(120, seed=1)[0]])
    with patch_model(model, **SETTINGS, speculate=speculate, trace=True) as handle, torch.no_grad():
        cache = SparseCache(model)
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)

        def compare(module, args, kwargs, result):
            nonlocal checked
            layer, plan = cache.layers[module.layer_idx], handle.plans[module.layer_idx]
            given = kwargs["hidden_states"], kwargs["position_embeddings"], result[0]
            expected, got = oracle.check_layer(module, *given, layer, cache, plan, handle.trace[-1])
            torch.testing.assert_close(got, expected, **TOLERANCE[torch.float32])
            checked += 1

        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(compare, with_kwargs=True)
        for column in range(20):
            model(prompt(1, batch=2, seed=column), past_key_values=cache)
    assert checked == 60


def test_prr_equals_serial():
    model, ids = tiny_llama(), prompt(150, batch=2)
    out = []
    for settings in (SPARSE, SETTINGS, dict(SETTINGS, speculate=True)):
        with patch_model(model, **settings):
            out.append(greedy(model, ids))
    assert torch.equal(out[1], out[2])
    assert not torch.equal(out[0], out[1])  # it isn't Quest


def test_it_is_listed():
    with pytest.raises(
        ValueError, match="selector: expected one of 'auto', 'quest', 'infllm_v2', 'mean_key', 'dsa', got 'x'"
    ):
        SparseConfig(selector="x")


def test_a_class_is_not_an_instance(monkeypatch):
    monkeypatch.setitem(selectors.SELECTORS, "mean_key", type(selectors.SELECTORS["mean_key"]))
    with pytest.raises(ValueError, match="selector: expected an instance of Selector as 'mean_key', got <class"):
        SparseConfig(selector="mean_key")


def test_scores_of_another_shape_are_refused(monkeypatch):
    selector = selectors.SELECTORS["mean_key"]
    real = selector.scores
    monkeypatch.setattr(selector, "scores", lambda *given: real(*given)[:, :, :5])
    with patch_model(tiny_llama(), **SETTINGS) as handle:
        expected = r"scores of selector 'mean_key': expected float32 \[1, 2, \d+\], got torch.float32 \[1, 2, 5\]"
        with pytest.raises(ValueError, match=expected):
            greedy(handle.model, prompt(100), tokens=3)


def test_scores_out_of_scope_are_hidden(monkeypatch):
    """A selector that scores every block alike can't take a forced one, or one that isn't there."""
    selector = selectors.SELECTORS["mean_key"]
    monkeypatch.setattr(
        selector, "scores", lambda kernels, query, summaries, *_: torch.full((1, 2, len_of(summaries)), 5.0)
    )
    with patch_model(tiny_llama(), **SETTINGS, trace=True) as handle:
        greedy(handle.model, prompt(150), tokens=3)
    newest = 150 // 16
    assert handle.trace[0].selected[0, 0].tolist() == [0, 1, 2, newest - 1, newest]


def len_of(summaries):
    return summaries[0].shape[2]
