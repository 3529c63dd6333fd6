"""One decode step: equal to an independent oracle, and bitwise the same whatever was predicted."""

import contextlib
import copy

import pytest
import torch
from models import SPARSE, TOLERANCE, left_pad, predicting, prompt, tiny_llama
from oracle import check_layer
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

import hf_sparse_prr.decode as decode
from hf_sparse_prr import SparseCache, patch_model
from hf_sparse_prr.bundled.reference import ascending

pytestmark = pytest.mark.compat
HALF_AND_FULL = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def teacher_forced(model, ids, cache, steps, mask=None):
    """Logits of `steps` decode tokens after a prefill of the rest, one token a forward: [B, steps, V]."""
    length, rows = ids.shape[1] - steps, []
    with torch.no_grad():
        for begin, end in [(0, length), *((i, i + 1) for i in range(length, ids.shape[1]))]:
            given = None if mask is None else mask[:, :end]
            positions = None if mask is None else (given.cumsum(1) - 1).clamp(min=0)[:, begin:end]
            out = model(ids[:, begin:end], attention_mask=given, position_ids=positions, past_key_values=cache)
            rows.append(out.logits[:, -1])
    return torch.stack(rows[1:], dim=1)


def run(model, ids, steps=20, mask=None, **settings):
    """(logits, trace, stats) of teacher-forced decoding with these settings."""
    with patch_model(model, **{**SPARSE, "trace": True, **settings}) as handle:
        logits = teacher_forced(model, ids, SparseCache(model), steps, mask)
        return logits, handle.trace, handle.stats()


def everything(layer, token):
    newest = int(((token.column - token.start) // layer.plan.block_size).max())
    blocks = torch.arange(layer.plan.sink_blocks, newest - layer.plan.local_blocks + 1, dtype=torch.int32)
    return blocks.expand(layer.keys.shape[0], layer.keys.shape[1], -1).contiguous()


@HALF_AND_FULL
@pytest.mark.parametrize("what", ["predicted", "empty", "everything", "all_wrong", "more", "less"])
def test_prr_equals_serial_bitwise(what, dtype, monkeypatch):
    model, ids = tiny_llama(dtype=dtype), prompt(200, batch=2)
    serial, selected, _ = run(model, ids, speculate=False)
    settings = {"more": dict(spec_ratio=3.0), "less": dict(spec_ratio=0.5)}.get(what, {})
    chooser = contextlib.nullcontext()
    if what == "everything":
        chooser = predicting(monkeypatch, everything)
    elif what == "empty":
        chooser = predicting(monkeypatch, lambda layer, token: everything(layer, token)[..., :0])
    elif what == "all_wrong":
        winners = {(entry.step, entry.layer): entry.selected for entry in selected}

        def losers(layer, token):
            index = next(i for i, held in enumerate(layers) if held is layer)
            blocks = everything(layer, token)
            right = winners[token.step, index]
            wrong = blocks.masked_fill((blocks[..., None] == right[..., None, :]).any(-1), -1)
            return ascending(wrong)[..., :4]

        layers = []
        original = SparseCache.__init__

        def remember(self, *args, **kwargs):
            original(self, *args, **kwargs)
            layers[:] = self.layers

        monkeypatch.setattr(SparseCache, "__init__", remember)
        chooser = predicting(monkeypatch, losers)
    with chooser:
        parallel, trace, stats = run(model, ids, speculate=True, **settings)
    assert torch.equal(serial, parallel)
    assert all(torch.equal(a.selected, b.selected) for a, b in zip(selected, trace, strict=True))
    predicted = sum(int((entry.predicted >= 0).sum()) for entry in trace)
    assert (predicted == 0) == (what == "empty")
    if what == "all_wrong":
        assert stats["hit_rate"] == 0.0 and stats["repaired_blocks"] > 0
    if what == "everything":
        assert stats["hit_rate"] > 0.9  # the first step has no prior, and predicts nothing


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("pads", [(0, 0), (0, 37), (90, 3)])
@pytest.mark.parametrize("group", ["sum", "max"])
def test_selection_and_output_equal_the_oracle(speculate, pads, group):
    """Rows above and below their budget in one batch, each from its own grid."""
    model = tiny_llama()
    ids, mask = left_pad([prompt(140 - pad, seed=i)[0] for i, pad in enumerate(pads)])
    checked = 0
    with patch_model(model, **SPARSE, speculate=speculate, group=group, trace=True) as handle:
        cache = SparseCache(model)
        begin = ids.shape[1] - 12
        teacher_forced(model, ids[:, :begin], cache, 4, mask[:, :begin])

        def compare(module, args, kwargs, result):
            nonlocal checked
            entry = handle.trace[-1]
            assert entry.layer == module.layer_idx
            expected, output = check_layer(
                module, kwargs["hidden_states"], kwargs["position_embeddings"], result[0],
                cache.layers[module.layer_idx], cache, handle.plans[module.layer_idx], entry,
            )  # fmt: skip
            torch.testing.assert_close(output, expected, **TOLERANCE[torch.float32])
            checked += 1

        hooks = [layer.self_attn.register_forward_hook(compare, with_kwargs=True) for layer in model.model.layers]
        with torch.no_grad():
            for column in range(begin, ids.shape[1]):
                positions = (mask[:, : column + 1].cumsum(1) - 1)[:, -1:]
                model(
                    ids[:, column : column + 1],
                    attention_mask=mask[:, : column + 1],
                    position_ids=positions,
                    past_key_values=cache,
                )
        for hook in hooks:
            hook.remove()
    assert checked == 12 * 3


@pytest.mark.parametrize("pad", [1, 7, 16, 31])
def test_padding_moves_neither_blocks_nor_ids(pad):
    model, row = tiny_llama(), prompt(140)[0]
    alone, trace, _ = run(model, row[None], speculate=True)
    ids, mask = left_pad([row], extra=pad)
    padded, padded_trace, _ = run(model, ids, mask=mask, speculate=True)
    torch.testing.assert_close(alone, padded, **TOLERANCE[torch.float32])
    for a, b in zip(trace, padded_trace, strict=True):
        assert torch.equal(a.selected, b.selected) and torch.equal(a.predicted, b.predicted)


def test_rows_do_not_depend_on_their_neighbours():
    """Given the same query and K/V a row's bits are the same alone and in a batch, with other lengths around it."""
    model = tiny_llama()
    rows = [prompt(length, seed=length)[0] for length in (140, 97, 30)]
    ids, mask = left_pad(rows)
    with patch_model(model, **SPARSE, speculate=True) as handle:
        cache = SparseCache(model)
        teacher_forced(model, ids, cache, 3, mask)
        layer, kernels = cache.layers[1], handle.kernels.module
        query = torch.randn(3, 2, 2, 8)
        column = layer.length - 1

        def attend(index):
            pick = slice(None) if index is None else slice(index, index + 1)
            tokens = copy.deepcopy(cache.tokens)
            tokens.map_rows(lambda tensor: tensor[pick])
            token = decode.token_at(tokens, column, 0, layer.plan, query.device)
            part = type(layer)()
            part.__dict__.update(layer.__dict__)
            part.keys, part.values = layer.keys[pick], layer.values[pick]
            part.summaries = tuple(tensor[pick] for tensor in layer.summaries)
            part.memory = decode.SparseLayer().memory
            part.memory.prior = layer.memory.prior.map(lambda tensor: tensor[pick])
            statistics = decode.Statistics(3)
            out, _ = decode.decode_token(part, 1, query[pick], token, kernels, 0.35, statistics, False)
            return out, part.memory.prior

        together, prior = attend(None)
        for index, fits in enumerate([False, False, True]):
            alone, alone_prior = attend(index)
            if not fits:
                assert torch.equal(alone[0], together[index])
            for a, b in zip(tree_leaves(alone_prior), tree_leaves(prior), strict=True):
                if a is b is None:  # no threshold over blocks
                    continue
                assert torch.equal(a[0].nan_to_num(-9), b[index].nan_to_num(-9))


def test_fitting_rows_run_stock_and_select_nothing():
    model, ids = tiny_llama(), prompt(60, batch=2)
    stock = teacher_forced(model, ids, DynamicCache(config=model.config), 20)
    sparse, trace, stats = run(model, ids, steps=20, speculate=True)
    assert torch.equal(stock, sparse)
    assert stats["selector_calls"] == 0 and stats["steps"] == 20
    assert len(trace) == 60
    assert all(bool((part == -1).all()) for entry in trace for part in entry[2:])


def test_crossing_the_budget_selects_from_the_first_token_that_does_not_fit():
    model, ids = tiny_llama(), prompt(100)
    _, trace, stats = run(model, ids, steps=40)
    first = min(entry.step for entry in trace if int((entry.selected >= 0).sum()))
    assert first == 80 - 60  # 60 prompt tokens; token number 81 is the first over 5 blocks of 16
    assert stats["selector_calls"] == 3 * 20 and stats["steps"] == 40


def test_a_nan_block_is_never_selected_and_the_row_stays_finite():
    model, ids = tiny_llama(), prompt(150)
    with patch_model(model, **SPARSE, trace=True) as handle, torch.no_grad():
        cache = SparseCache(model)
        model(ids, past_key_values=cache)
        for layer in cache.layers:
            layer.keys[:, :, 37] = float("nan")  # block 2
        logits = model(ids[:, :1], past_key_values=cache).logits
    assert logits.isfinite().all()
    assert all(2 not in entry.selected.tolist()[0][head] for entry in handle.trace for head in range(2))


def test_superset_attends_to_more_and_says_so():
    model, ids = tiny_llama(), prompt(200)
    exact, _, _ = run(model, ids, speculate=True)
    superset, _, stats = run(model, ids, speculate=True, semantics="superset")
    assert not torch.equal(exact, superset)
    assert stats["extra_rate"] > 0
    with patch_model(model, **SPARSE, semantics="superset", speculate=True) as handle:
        assert "superset" in str(handle.report())


def test_budget_none_is_dense():
    model, ids = tiny_llama(), prompt(150)
    dense, trace, stats = run(model, ids, budget=None)
    assert torch.equal(dense, teacher_forced(model, ids, DynamicCache(config=model.config), 20))
    assert stats["selector_calls"] == 0 and trace == []


def test_statistics_agree_with_the_trace():
    model, ids = tiny_llama(), prompt(200, batch=2)
    _, trace, stats = run(model, ids, speculate=True, spec_ratio=1.5)
    hits = chosen = predicted = 0
    for entry in trace:
        for row in range(2):
            for head in range(2):
                p = {b for b in entry.predicted[row, head].tolist() if b >= 0}
                a = {b for b in entry.selected[row, head].tolist() if b >= 0}
                newest = max(a)
                free = a - {0, newest, newest - 1}
                missed = {b for b in entry.missed[row, head].tolist() if b >= 0}
                assert missed == free - p
                hits, chosen, predicted = hits + len(p & free), chosen + len(free), predicted + len(p)
    assert stats["hit_rate"] == pytest.approx(hits / chosen)
    assert stats["extra_rate"] == pytest.approx((predicted - hits) / predicted)
    assert stats["repaired_blocks"] == chosen - hits
    assert 0 < stats["hit_rate_weighted"] <= 1
    assert [layer["layer"] for layer in stats["layers"]] == [0, 1, 2]
    assert sum(layer["repaired_blocks"] for layer in stats["layers"]) == stats["repaired_blocks"]
    blocks = sum(int((e.selected >= 0).sum() + (e.predicted >= 0).sum()) for e in trace) - hits
    assert stats["bytes_read"] > blocks * 16 * 8 * 2 * 4
