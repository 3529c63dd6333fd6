"""The runtime's choice: what pays by a profile, what tries cost, and that no choice changes a bit."""

import copy
from itertools import cycle

import pytest
import torch
from graphs import TOKENS, logits_of, twice, without_cuda
from models import SPARSE, prompt, tiny_llama
from profiles import key_of, made_up

from hf_sparse_prr import SparseCache, budget, patch_model
from hf_sparse_prr.budget import Policy, hits_at
from hf_sparse_prr.profile import Key, sources_of

pytestmark = pytest.mark.compat
KEY = Key("it", "triton", 1, 32, 8, 128, "bfloat16", 1, "quest", 64, 64)
AUTO = dict(SPARSE, budget=128, speculate="auto")  # 5 blocks by score


def played(policy, hit, context=4096, tokens=2048):
    """(share of the steps' time that was lost over the worst 256, ratios by window) where the hit rate of all layers at
    ratio 1 is hit(token)."""
    at = policy.profile.at(context)
    policy.start(context)
    lost, ratios = [], []
    for token in range(0, tokens, budget.WINDOW):
        ratio = policy.ratio
        ratios.append(ratio)
        rate = hits_at(ratio, hit(token), 1.0) if ratio else 0.0
        lost += [(at.step(ratio, rate) / at.serial - 1) if ratio else 0.0] * budget.WINDOW
        policy.look(context, budget.WINDOW, [rate] * 3 if ratio else [])
    over = [sum(lost[begin : begin + 256]) / 256 for begin in range(len(lost) - 255)]
    return max(over), ratios


def test_hits_at_other_ratios():
    assert hits_at(1.0, 0.8, 1.0) == pytest.approx(0.8)
    assert hits_at(2.0, 0.8, 1.0) == pytest.approx(0.96)
    assert hits_at(0.5, 1.0, 1.0) == 0.5 and hits_at(1.0, 0.5, 0.5) == pytest.approx(0.75)


@pytest.mark.parametrize("hit", [0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("worst", [1.05, 1.25, 1.5])
def test_speculation_never_costs_more_than_five_percent(hit, worst):
    policy = Policy(made_up(KEY, worst=worst))
    lost, ratios = played(policy, lambda token: hit)
    assert lost <= 0.05
    gain = 1 / min(us / policy.profile.at(4096).serial for _, us in budget.choices(policy.profile.at(4096), hit))
    if gain < budget.GAIN:
        assert ratios[-1] == 0.0 and sum(map(bool, ratios)) < 12
    elif gain > budget._START and worst < 1.5:
        assert all(ratios)


def test_a_rate_that_swings_costs_no_more():
    policy = Policy(made_up(KEY, worst=1.4))
    lost, ratios = played(policy, lambda token: 1.0 if token // 64 % 2 else 0.1, tokens=8192)
    assert lost <= 0.05 and any(ratios)


def test_off_where_it_does_not_pay_and_on_again_when_it_recovers():
    lost, ratios = played(Policy(made_up(KEY)), lambda token: 0.2 if token < 1024 else 0.95)
    windows = 1024 // budget.WINDOW
    assert ratios[windows - 2] == 0.0 and all(ratios[-8:]) and lost <= 0.05


def test_it_stays_as_it_is_between_the_two_thresholds():
    profile = made_up(KEY)
    between = (1.25 - 1 / 1.115) / 0.75  # a hit rate that makes a step 1.115 times as fast
    _, ratios = played(Policy(profile, given=1.0), lambda token: 1.0 if token < 256 else between)
    assert all(ratios)
    _, ratios = played(Policy(profile, given=1.0), lambda token: 0.0 if token < 256 else between)
    assert sum(map(bool, ratios[16:])) < 8  # tries, none of which is kept


def test_the_ratio_is_the_one_that_takes_least():
    profile = made_up(KEY)
    policy = Policy(profile)
    assert policy.start(4096) == 2.0  # 10% more time, and .99 of them are hit in place of .9
    policy.ratio = 1.0
    assert policy.look(4096, 16, [0.95]) == 1.0
    assert policy.look(4096, 16, [0.62]) == 2.0
    policy = Policy(profile, given=0.5, always=True)
    assert policy.start(4096) == 0.5 and policy.look(4096, 16, [0.0]) == 0.5


def test_what_cannot_pay_is_never_tried():
    lost, ratios = played(Policy(made_up(KEY, best=0.95)), lambda token: 1.0)
    assert not any(ratios) and lost == 0.0


@pytest.fixture
def profiled(monkeypatch):
    """Profiles that are found for whatever is asked; what was asked."""
    asked = []

    def give(**kind):
        def find(key):
            asked.append(key)
            return made_up(key, **kind)

        monkeypatch.setattr(budget, "find", find)
        return asked

    without_cuda(monkeypatch)
    return give


def test_auto_is_off_without_a_profile_and_says_what_it_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(budget, "find", asked.append)
    model = tiny_llama()
    with patch_model(model, **AUTO) as handle:
        logits_of(model, prompt())
        assert handle.stats()["hit_rate"] is None and "'auto': off, there is no profile for" in str(handle.report())
        assert asked == [key_of(model, handle)] and str(asked[0]) in str(handle.report())


@pytest.mark.parametrize("current", [True, False])
def test_a_profile_of_other_sources_is_used_and_said_to_be(monkeypatch, current):
    def find(key):
        profile = made_up(key)
        own = sources_of(handle.kernels.module)
        return profile._replace(made={"sources": own if current else "of long ago"})

    monkeypatch.setattr(budget, "find", find)
    model = tiny_llama()
    with patch_model(model, **AUTO) as handle:
        logits_of(model, prompt())
        said = str(handle.report())
    assert "by the profile of" in said
    assert ("measured with other sources of these kernels" in said) == (not current)


def test_a_bad_file_is_said_once_and_generation_goes_on(monkeypatch):
    def find(key):
        raise ValueError("expected JSON, got nothing")

    monkeypatch.setattr(budget, "find", find)
    model = tiny_llama()
    with patch_model(model, **AUTO) as handle, pytest.warns(UserWarning, match="no profile is used: expected JSON"):
        logits_of(model, prompt())
    assert any("no profile is used" in each for each in handle.warnings.values())


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", [dict(best=0.3, worst=0.9), dict(best=0.85, worst=1.1), dict(best=0.99)])
def test_no_choice_changes_a_bit(profiled, kind, cuda_graph):
    profiled(**kind)
    model = tiny_llama(layers=4)
    with patch_model(model, **dict(AUTO, speculate=False), cuda_graph=False):
        expected = logits_of(model, prompt(), 200)
    with patch_model(model, **AUTO, cuda_graph=cuda_graph) as handle:
        cache = SparseCache(model)
        found = logits_of(model, prompt(), 200, past_key_values=cache)
        assert all(map(torch.equal, found, expected))
        predicted = [layer["hit_rate"] is not None for layer in handle.stats()["layers"]]
        assert all(predicted) == (kind["best"] < 0.9)
        assert "by the profile of" in str(handle.report())
        if kind["best"] == 0.3:
            assert cache.budget.policy.ratio and f"on, spec_ratio {cache.budget.policy.ratio:g}" in str(handle.report())
            assert all(layer["ema"] for layer in handle.stats()["layers"])


@pytest.mark.parametrize("ratio", ["profile", 1.0])
def test_graphs_of_both_choices_are_kept(profiled, monkeypatch, ratio):
    """On, off, on again at set tokens: the bits and the statistics of eager steps, and a graph of each."""
    profiled()
    turns = cycle([0.0, 1.0])
    monkeypatch.setattr(Policy, "start", lambda self, context: 1.0)

    def look(self, context, tokens, hits):
        self.ratio = next(turns)
        return self.ratio

    monkeypatch.setattr(Policy, "look", look)
    monkeypatch.setattr(Policy, "ratio", 1.0, raising=False)
    handle, cache = twice(tiny_llama(layers=4), prompt(), dict(AUTO, spec_ratio=ratio), tokens=TOKENS + 80)
    assert cache.budget.turns >= 4
    assert handle.graphs.captured == 2
    assert handle.graphs.replayed > 80


def test_speculate_true_takes_its_ratio_from_the_profile(profiled):
    asked = profiled(best=0.99, worst=1.5)
    model = tiny_llama()
    with patch_model(model, **dict(AUTO, speculate=True)) as handle:
        cache = SparseCache(model)
        logits_of(model, prompt(), 60, past_key_values=cache)
        assert cache.budget.policy.ratio > 0 and asked  # never off
        assert handle.stats()["hit_rate"] > 0
    with patch_model(model, **dict(AUTO, speculate=True, spec_ratio=1.0)):
        logits_of(model, prompt())
    with patch_model(model, **dict(AUTO, speculate=True, semantics="superset")):
        logits_of(model, prompt())
    assert len(asked) == 1


def test_copies_crops_resets_and_later_turns_go_on(profiled):
    profiled(best=0.3, worst=0.9)
    model = tiny_llama()
    with patch_model(model, **dict(AUTO, speculate=False)):
        cache = SparseCache(model)
        plain = model.generate(prompt(), max_new_tokens=40, do_sample=False, past_key_values=cache)
        more = model.generate(plain, max_new_tokens=40, do_sample=False, past_key_values=copy.deepcopy(cache))
        cache.crop(-20)
        cropped = model.generate(plain, max_new_tokens=40, do_sample=False, past_key_values=cache)
    with patch_model(model, **AUTO):
        cache = SparseCache(model)
        assert torch.equal(model.generate(prompt(), max_new_tokens=40, do_sample=False, past_key_values=cache), plain)
        twin = copy.deepcopy(cache)
        assert twin.budget is not cache.budget and twin.budget.policy.ratio == cache.budget.policy.ratio
        assert torch.equal(model.generate(plain, max_new_tokens=40, do_sample=False, past_key_values=twin), more)
        cache.crop(-20)
        assert torch.equal(model.generate(plain, max_new_tokens=40, do_sample=False, past_key_values=cache), cropped)
        cache.reset()
        assert cache.budget is None
        assert torch.equal(model.generate(prompt(), max_new_tokens=40, do_sample=False, past_key_values=cache), plain)


def test_rows_of_their_own_and_beams(profiled):
    asked = profiled(best=0.3, worst=0.9)
    model, ids = tiny_llama(), prompt(batch=2)
    for how in (dict(), dict(num_beams=2), dict(prompt_lookup_num_tokens=3)):
        given = ids[:1] if "prompt_lookup_num_tokens" in how else ids
        out = []
        for speculate in (False, "auto"):
            with patch_model(model, **dict(AUTO, speculate=speculate)):
                out.append(model.generate(given, max_new_tokens=30, do_sample=False, **how))
        assert torch.equal(*out)
    assert {key.batch for key in asked} == {1, 2, 4}


def test_counters_that_begin_anew_say_nothing(profiled, monkeypatch):
    profiled(best=0.3, worst=0.9)
    model, seen = tiny_llama(), []
    look = Policy.look
    monkeypatch.setattr(Policy, "look", lambda self, *given: (seen.append(given[2]), look(self, *given))[1])
    with patch_model(model, **AUTO) as handle:
        cache = SparseCache(model)
        out = model.generate(prompt(), max_new_tokens=24, do_sample=False, past_key_values=cache)
        handle.reset_stats()
        mask = torch.ones_like(out)  # an id may be that of padding
        model.generate(out, attention_mask=mask, max_new_tokens=24, do_sample=False, past_key_values=cache)
    assert seen and all(0 <= rate <= 1 for rates in seen for rate in rates)
