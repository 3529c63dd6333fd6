"""Training in seconds: phases come in order, weights move, and what is learnt is what is asked."""

import pytest
import torch

from hf_sparse_prr.evidence.tiny import tiny_model
from hf_sparse_prr.evidence.training import Plan, Trainer

SMALL = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2)
PLAN = Plan(lengths=(48, 64), tokens=512, steps=4, decay=10, warm_up=4, sparse=4, sparse_lengths=(96,), workers=0)


def train(family, plan=PLAN, minutes=0.1, **overrides):
    model = tiny_model(family, **{**SMALL, **overrides})
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    told = []
    progress = Trainer(model, plan, minutes, lambda progress: told.append(progress.phase)).run()
    moved = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    return model, progress, told, moved


def test_lengths_come_in_order_then_the_rate_falls():
    model, progress, told, moved = train("llama")
    assert told[0] == "dense 48" and told[-1] == "decay" and not model.training
    assert progress.steps >= 10 * len(told) > 0
    assert progress.log[-1]["loss"] < progress.log[0]["loss"]
    assert moved == {name for name, _ in model.named_parameters()}


def test_an_indexer_has_two_phases_more():
    slow = Plan(lengths=(48,), tokens=192, steps=4, decay=10, warm_up=10, sparse=10, sparse_lengths=(96,), workers=0)
    _, progress, told, moved = train("deepseek_v32", slow, minutes=0.15, index_topk=24)
    phases = [each.partition(" ")[0] for each in dict.fromkeys(told)]
    assert phases[0] == "dense" and "sparse" in phases
    assert phases == [each for each in ("dense", "decay", "warm-up", "sparse") if each in phases]
    assert any(".indexer." in name for name in moved)
    assert progress.log[-1]["index_loss"] > 0


def test_time_ends_it():
    _, progress, _, _ = train("llama", minutes=0.005)
    assert 0 < progress.steps < 500


@pytest.mark.parametrize("share, over", [(0.0, True), (100.0, False)])
def test_over_is_a_share_of_the_time(share, over):
    assert Trainer(tiny_model("llama", **SMALL), PLAN, 0.5, lambda _: None).over(share) is over
