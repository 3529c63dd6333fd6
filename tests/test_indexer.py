"""Training of an indexer: in its phases attention is stock's, and gradients go where they belong."""

import pytest
import torch

from hf_sparse_prr.evidence.indexer import _selected, scores, training
from hf_sparse_prr.evidence.tiny import tiny_model

SMALL = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=4)
GIVEN = torch.ones((1, 1, 1, 1), dtype=torch.bool)
FAMILIES = ("deepseek_v32", "glm_moe_dsa")


def ids(tokens=48):
    return torch.randint(1, 256, (2, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("phase", ["dense", "sparse"])
def test_attention_is_that_of_the_stock_model_while_all_is_selected(family, phase):
    model = tiny_model(family, **SMALL, index_topk=64).eval()
    with torch.no_grad():
        stock = model(ids(), use_cache=False).logits
        with training(model) as state:
            state.phase = phase
            ours = model(ids(), attention_mask=GIVEN, use_cache=False).logits
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def test_the_best_are_selected_and_what_ties_with_the_last_of_them():
    model = tiny_model("deepseek_v32", **SMALL, index_topk=12).eval()
    index, seen = [], []

    def keep(asked, keys, count):
        index.append(scores(asked, keys))
        seen.append(_selected(asked, keys, count))
        return seen[-1]

    with torch.no_grad(), training(model) as state, pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_sparse_prr.evidence.indexer._selected", keep)
        state.phase = "sparse"
        model(ids(), attention_mask=GIVEN, use_cache=False)
    assert len(index) == 4
    for found, mask in zip(index, seen, strict=True):
        for row in range(2):
            for query in range(48):
                held = found[row, query, : query + 1]
                least = sorted(held.tolist(), reverse=True)[:12][-1]
                assert torch.equal(mask[row, 0, query, : query + 1], held >= least)
                assert not mask[row, 0, query, query + 1 :].any()


def test_selecting_changes_something():
    model = tiny_model("deepseek_v32", **SMALL, index_topk=12).eval()
    with torch.no_grad(), training(model) as state:
        dense = model(ids(), attention_mask=GIVEN, use_cache=False).logits
        state.phase = "sparse"
        assert not torch.allclose(model(ids(), attention_mask=GIVEN, use_cache=False).logits, dense, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("phase", ["warm-up", "sparse"])
def test_the_indexers_loss_reaches_indexers_alone(family, phase):
    model = tiny_model(family, **SMALL, index_topk=12)
    with training(model) as state:
        state.phase, state.rows = phase, torch.arange(20, 48).expand(2, -1)
        model(ids(), attention_mask=GIVEN, use_cache=False)
        assert len(state.losses) == 4 and all(loss > 0 for loss in state.losses)
        torch.stack(state.losses).mean().backward()
    with_gradient = {name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()}
    assert with_gradient and all(".indexer." in name for name in with_gradient)


def test_the_loss_falls_as_an_indexer_learns():
    model = tiny_model("deepseek_v32", **SMALL, index_topk=12)
    optimizer = torch.optim.Adam([each for name, each in model.named_parameters() if ".indexer." in name], lr=5e-3)
    losses = []
    with training(model) as state:
        state.phase, state.rows = "warm-up", torch.arange(20, 48).expand(2, -1)
        for _ in range(12):
            state.losses = []
            model(ids(), attention_mask=GIVEN, use_cache=False)
            loss = torch.stack(state.losses).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_stock_classes_are_back_after_an_error():
    model = tiny_model("deepseek_v32", **SMALL)
    before = [type(layer.self_attn) for layer in model.model.layers]

    def stops():
        with training(model):
            assert [type(layer.self_attn) for layer in model.model.layers] != before
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stops()
    assert [type(layer.self_attn) for layer in model.model.layers] == before
