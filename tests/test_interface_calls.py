"""One call of the registered attention: masks, what stays dense, and the tokens that DSA models choose themselves."""

import warnings

import pytest
import torch
from models import TOLERANCE, left_pad, prompt, tiny
from registered import (
    attention_module,
    call,
    causal,
    clean_registries,  # noqa: F401
    logits_of,
    random_states,
    register,
    sdpa,
    switched,
)

from hf_sparse_prr import interface
from hf_sparse_prr.patches import INDEXED

pytestmark = pytest.mark.compat


def test_masks_of_every_kind_say_the_same():
    """None, bool and additive; and a preallocated buffer, whose tail the mask hides."""
    attention = register()
    unmasked, stock = call(attention)
    assert not torch.equal(unmasked, stock)
    mask = causal(1)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for given in (mask, additive, mask[:1]):
        assert torch.equal(call(attention, given)[0], unmasked)
    module, states = attention_module(), random_states(3)
    short, _ = attention(module, *states, causal(3))
    junk = [torch.cat([part, torch.full((2, 2, 40, 8), 1e3)], dim=2) for part in states[1:]]
    long, _ = attention(module, states[0], *junk, causal(3, 160, hidden=40))
    assert torch.equal(short, long)


def test_a_mask_that_is_not_causal_is_dense_and_said_once():
    attention = register()
    hole = causal(3).clone()
    hole[:, :, 1, 5] = False
    biased = torch.zeros(2, 1, 1, 120)
    biased[..., 7] = 0.5
    per_head = causal(1).expand(2, 4, 1, 120).clone()
    per_head[:, 0, :, 3] = False
    everything = torch.ones(2, 1, 3, 120, dtype=torch.bool)
    tree = torch.eye(120, dtype=torch.bool)[-3:].expand(2, 1, 3, 120).clone()
    tree[..., :60] = True
    with pytest.warns(UserWarning, match="stock dense attention runs for this call, because the attention mask is not"):
        call(attention, hole, count=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mask in (hole, biased, per_head, everything, tree):
            ours, stock = call(attention, mask, count=mask.shape[2])
            assert torch.equal(ours, stock)
    strict = register(strict=True)
    for mask in (hole, biased):
        with pytest.raises(
            RuntimeError, match=r"strict=True: stock dense attention runs.* not causal x per-token validity"
        ):
            call(strict, mask, count=mask.shape[2])
    ours, stock = call(strict, causal(3), count=3)
    assert not torch.equal(ours, stock)


def test_a_fully_padded_row_is_finite_and_disturbs_nobody():
    attention = register()
    mask = causal(2).clone()
    alone = call(attention, mask, count=2)[0]
    mask[1] = False
    padded = call(attention, mask, count=2)[0]
    assert padded.isfinite().all() and torch.equal(padded[0], alone[0])


DENSE_CALLS = {
    "sliding_window": dict(sliding_window=100),
    "is_causal": dict(is_causal=False),
    "dropout": dict(dropout=0.5),
    "position_bias": dict(position_bias=torch.linspace(0, 1, 480).view(1, 4, 1, 120)),
    "prompt": dict(count=17),
    "fits": dict(columns=80, mask=torch.tensor([1.0, 0.0] * 40).view(1, 1, 1, 80)),
    "encoder": {},
    "no layer": {},
    "other layer": {},
}


@pytest.mark.parametrize("case", DENSE_CALLS)
def test_calls_that_stay_dense(case):
    """Without a warning: strict has nothing to raise."""
    attention, module = register(strict=True), attention_module()
    if case == "encoder":
        module.is_causal = False
    elif case == "no layer":
        module.layer_idx = None
    elif case == "other layer":
        module.layer_idx = 3  # the model has three
    assert torch.equal(*call(attention, module=module, **DENSE_CALLS[case]))
    assert not torch.equal(*call(attention, columns=81))


def test_without_a_mask_several_queries_are_the_first_of_a_preallocated_cache():
    attention = register(sparse_prefill=True)
    long, stock = call(attention, count=100, columns=160)
    query, key, value = random_states(100, 160)
    short, _ = attention(attention_module(), query, key[:, :, :100], value[:, :, :100], None)
    assert torch.equal(long, short)
    assert torch.equal(long[:, :80], stock[:, :80]) and not torch.equal(long[:, 80:], stock[:, 80:])


def test_values_of_another_width_stay_dense():
    attention, module = register(), attention_module()
    query, key, value = random_states(1)
    states = (query, key, value[..., :6])
    with pytest.warns(UserWarning, match="because keys have 8 channels and values 6"):
        ours, _ = attention(module, *states, None)
    assert torch.equal(ours, sdpa(module, *states, None)[0])


def test_the_default_scale():
    attention = register()
    assert torch.equal(call(attention)[0], call(attention, scaling=8**-0.5)[0])
    assert not torch.equal(call(attention)[0], call(attention, scaling=0.7)[0])


def test_refused_calls():
    attention = register()
    for name in ("s_aux", "softcap"):
        with pytest.raises(ValueError, match=f"{name}: expected None, got one from LlamaAttention"):
            call(attention, **{name: torch.ones(4)})
        assert call(attention, **{name: None})[0].shape == (2, 1, 4, 8)
    with pytest.raises(ValueError, match=r"attention_mask: expected \[2, 1, 1, 120\], got \[2, 1, 1, 119\]"):
        call(attention, causal(1, 119))
    for indices in (torch.zeros(2, 1, 1, 4).int(), torch.zeros(2, 2, 4).int(), torch.zeros(2, 1, 4)):
        with pytest.raises(ValueError, match=r"indices: expected int32 or int64 \[2, 1, k\], got"):
            call(attention, indices=indices)


# Models with an indexer of their own

TOPK = 8


def tiny_dsa(model_type):
    return tiny(model_type, index_topk=TOPK)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pads", [(0, 0), (0, 13)])
@pytest.mark.parametrize("model_type", INDEXED)
def test_dsa_models_agree_with_sdpa(model_type, pads, static, monkeypatch):
    calls = []
    original = interface.gathered
    monkeypatch.setattr(interface, "gathered", lambda *args: calls.append(args[0].shape[2]) or original(*args))
    ids, mask = left_pad([prompt(40 - pad, seed=pad)[0] for pad in pads])
    kwargs = dict(attention_mask=mask, output_logits=True, return_dict_in_generate=True, max_new_tokens=12)
    kwargs.update(do_sample=False, **(dict(cache_implementation="static") if static else {}))
    stock = tiny_dsa(model_type).generate(ids, **kwargs)
    register()
    ours = switched(tiny_dsa(model_type)).generate(ids, **kwargs)
    assert torch.equal(stock.sequences, ours.sequences)
    for a, b in zip(stock.logits, ours.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert calls == [1] * 3 * 11  # every decode step of every layer, and no prompt


def test_dsa_below_its_top_k_and_in_training_is_sdpa():
    ids = prompt(30)
    register()
    results = []
    for model in (tiny_dsa("deepseek_v32"), switched(tiny_dsa("deepseek_v32"))):
        short = logits_of(model, ids[:, :TOPK], [5, 1, 2])
        model.train()
        logits_of(model, ids, [29, 1], grad=True).square().sum().backward()
        results.append([short, *(parameter.grad for parameter in model.parameters())])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True))


def reference(query, key, value, chosen, scale):
    """Softmax attention in float64 over the columns in chosen[b][q]; 0 where there is none."""
    output = torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for b, rows in enumerate(chosen):
        for q, columns in enumerate(rows):
            for h in range(query.shape[1]):
                if columns:
                    logits = key[b, h // group, columns].double() @ query[b, h, q].double() * scale
                    output[b, q, h] = torch.softmax(logits, dim=0) @ value[b, h // group, columns].double()
    return output


@pytest.mark.parametrize("kind", ["bool", "additive", "one query", "first queries"])
@pytest.mark.parametrize("columns", [50, 12], ids=["gathered", "masked"])
@pytest.mark.parametrize("workspace", [2**28, 3000, 1])
def test_indices_are_the_tokens_attended_to(workspace, columns, kind, monkeypatch):
    """-1, columns that don't exist, masked or later ones and repetitions count for nothing, NaN in them neither."""
    monkeypatch.setattr(interface, "_WORKSPACE", workspace)
    attention = register()
    masked = kind in ("bool", "additive")
    count, begin = {"one query": (1, columns - 1), "first queries": (3, 0)}.get(kind, (3, columns - 5))
    query, key, value = random_states(count, columns)
    value = value[..., :6].contiguous()  # narrower than the keys
    indices = torch.randint(-2, columns + 3, (2, count, 9))
    indices[0, 0] = torch.tensor([0, 0, -1, -1, begin, columns, 5, columns, 0])
    indices[1, -1] = -1
    valid = torch.ones(2, columns, dtype=torch.bool)
    valid[1, :4] = not masked
    mask = valid[:, None, None] & (torch.arange(columns) <= torch.arange(begin, begin + count)[:, None])
    chosen = [
        [sorted({c for c in row.tolist() if 0 <= c < columns and mask[b, 0, q, c]}) for q, row in enumerate(rows)]
        for b, rows in enumerate(indices)
    ]
    assert chosen[0][0] == ([0] if begin == 0 else [0, 5, begin]) and chosen[1][-1] == []
    expected = reference(query, key, value, chosen, 0.3)
    if columns == 50:
        for b in range(2):
            unused = sorted(set(range(columns)) - {c for row in chosen[b] for c in row})
            key[b, :, unused] = value[b, :, unused] = float("nan")
    given = {"bool": mask, "additive": torch.zeros(mask.shape).masked_fill(~mask, -3.4e38)}.get(kind)
    with torch.no_grad():
        ours, weights = attention(attention_module(), query, key, value, given, scaling=0.3, indices=indices.int())
    assert weights is None and ours.is_contiguous()
    torch.testing.assert_close(ours.double(), expected, **TOLERANCE[torch.float32])


def test_a_bias_of_the_mask_counts_for_indices():
    attention, module = register(), attention_module()
    query, key, value = random_states(1, 50, batch=1)
    bias = torch.randn(1, 1, 1, 50)
    indices = torch.tensor([[[4, 9, 30]]])
    ours, _ = attention(module, query, key, value, bias, indices=indices)
    kept = torch.full_like(bias, float("-inf")).index_copy(3, indices[0, 0], bias[..., indices[0, 0]])
    stock, _ = sdpa(module, query, key, value, kept)
    torch.testing.assert_close(ours, stock, **TOLERANCE[torch.float32])
