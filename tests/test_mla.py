"""Models with an indexer of their own: logits, selection and attention of the stock classes."""

import contextlib

import pytest
import torch
from latents import CLOSE, LENGTH, TOPK, forward, full_layers, padded, picked_layers
from models import greedy, left_pad, predicting, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from hf_sparse_prr import SparseCache, patch_model
from hf_sparse_prr.patches import INDEXED

pytestmark = pytest.mark.compat
BOTH = pytest.mark.parametrize("speculate", [False, True])


@pytest.fixture(params=INDEXED)
def model(request):
    return tiny(request.param)


def in_chunks(model, ids, mask, cache, size):
    """Logits [B, Q, V] of a forward that comes `size` tokens at a time."""
    ends = [min(begin + size, ids.shape[1]) for begin in range(0, ids.shape[1], size)]
    parts = [ids[:, begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    logits = [forward(model, part, cache, mask[:, :end]).logits for part, end in zip(parts, ends, strict=True)]
    return torch.cat(logits, dim=1)


def stock_logits(model, ids, mask):
    return forward(model, ids, DynamicCache(config=model.config), mask).logits


@BOTH
@pytest.mark.parametrize("size", [1, 5, 16, 99, LENGTH])
def test_logits_are_stocks_however_the_tokens_come(model, size, speculate):
    ids, mask = padded()
    expected, real = stock_logits(model, ids, mask), mask.bool()
    with patch_model(model, speculate=speculate) as handle:
        for max_length in (None, LENGTH + 3):
            cache = SparseCache(model, max_length=max_length)
            logits = in_chunks(model, ids, mask, cache, size)
            torch.testing.assert_close(logits[real], expected[real], **CLOSE)
            assert not logits.isnan().any()
        selected = handle.stats()["selector_calls"] > 0
    assert selected == (size <= 16)  # a longer step is a prompt: it selects, and no step is counted


@pytest.mark.parametrize("workspace", [1, 50_000])
def test_a_small_workspace_changes_no_logits(model, workspace):
    ids, mask = padded()
    seen = []
    for bytes_held in (2**30, workspace):
        with patch_model(model, workspace=bytes_held):
            seen.append(forward(model, ids, SparseCache(model), mask).logits[mask.bool()])
    torch.testing.assert_close(*seen, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("predicted", ["by the EMA", "everything", "nothing of it"])
def test_prr_equals_serial_bitwise(model, predicted, dtype, monkeypatch):
    model = model.to(dtype)
    ids, mask = padded()
    tokens, outputs = prompt(15, batch=3, seed=3), []
    for speculate in (False, True):
        with patch_model(model, speculate=speculate, spec_ratio=1.5, trace=True) as handle:
            chooser = contextlib.nullcontext()
            if speculate and predicted != "by the EMA":

                def choose(layer, token):
                    columns = torch.arange(token.column + 1, dtype=torch.int32).expand(3, 1, -1)
                    return columns if predicted == "everything" else columns[:, :, :3] * 0 + 5000 % token.column

                chooser = predicting(monkeypatch, choose)
            cache = SparseCache(model)
            forward(model, ids, cache, mask)
            with chooser:
                outputs.append(torch.stack([forward(model, tokens[:, i : i + 1], cache).logits for i in range(15)]))
            predictions = sum(int((entry.predicted >= 0).sum()) for entry in handle.trace)
            assert (predictions > 0) == speculate
            stats = handle.stats()
            assert stats["steps"] == 15 and stats["selector_calls"] == 15 * picked_layers(model)
            if predicted == "everything" and speculate:
                assert stats["hit_rate"] == 1.0 and stats["repaired_blocks"] == 0
    assert torch.equal(*outputs)


def test_ties_go_to_the_first_tokens_and_padding_moves_nothing(model):
    """With index weights of 0 every score is 0: the first tokens win, and stock's choice is arbitrary."""
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            torch.nn.init.zeros_(layer.self_attn.indexer.weights_proj.weight)
    ids, mask = padded()
    with patch_model(model, trace=True) as handle:
        cache = SparseCache(model)
        forward(model, ids, cache, mask)
        forward(model, prompt(1, batch=3, seed=5), cache)
        assert len(handle.trace) == picked_layers(model)
        for entry in handle.trace:
            assert entry.selected.shape == (3, 1, TOPK)
            assert (entry.selected[:2, 0] == torch.arange(TOPK)).all()  # counted from each row's first token
            assert (entry.selected[2] == -1).all()  # fits
            assert torch.equal(entry.missed, entry.selected)


def test_attention_weights_and_states_are_stocks(model):
    model.set_attn_implementation("eager")
    ids, mask = padded()
    asked = dict(output_attentions=True, output_hidden_states=True)
    stock_cache = DynamicCache(config=model.config)
    expected = [forward(model, ids, stock_cache, mask, **asked)]
    longer = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
    expected.append(forward(model, prompt(1, batch=3, seed=5), stock_cache, longer, **asked))
    with patch_model(model):
        cache = SparseCache(model)
        found = [forward(model, ids, cache, mask, **asked)]
        found.append(forward(model, prompt(1, batch=3, seed=5), cache, longer, **asked))
    for ours, stock in zip(found, expected, strict=True):
        for a, b in zip(ours.attentions, stock.attentions, strict=True):
            assert a.shape == b.shape
            real = mask.bool() if a.shape[2] > 1 else torch.ones(3, 1, dtype=torch.bool)
            torch.testing.assert_close(a.transpose(1, 2)[real], b.transpose(1, 2)[real], **CLOSE)
    model.set_attn_implementation("sdpa")
    with patch_model(model):
        cache = SparseCache(model)
        with pytest.raises(ValueError, match="output_attentions: expected the eager"):
            forward(model, ids, cache, mask, output_attentions=True)


def odd_mask(kind, length):
    """[1, 1 or 4, Q, T]: not causal x validity."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    if kind == "hidden":  # some queries may not see some tokens
        seen[:, :, length // 2 :, 3:9] = False
        return seen
    if kind == "by head":
        seen = seen.repeat(1, 4, 1, 1)
        seen[:, 1, length // 2 :, 3:9] = False
        return seen
    distance = (torch.arange(length)[:, None] - torch.arange(length)).float()
    bias = -0.05 * distance + (0.3 if kind == "lifted bias" else 0.0)
    return torch.where(distance >= 0, bias, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize("length", [30, LENGTH])
@pytest.mark.parametrize("kind", ["hidden", "by head", "bias", "lifted bias"])
def test_any_mask_is_heeded(model, kind, length):
    """In a prompt and in a step, as stock does it; and what follows without a mask sees all tokens."""
    ids, mask, stock = prompt(length), odd_mask(kind, length), DynamicCache(config=model.config)
    expected = [forward(model, ids, stock, mask).logits, forward(model, prompt(1, seed=5), stock).logits]
    with patch_model(model, strict=True):
        cache = SparseCache(model)
        torch.testing.assert_close(forward(model, ids, cache, mask).logits, expected[0], **CLOSE)
        torch.testing.assert_close(forward(model, prompt(1, seed=5), cache).logits, expected[1], **CLOSE)


def test_steps_that_return_weights_are_counted_and_traced(model):
    model.set_attn_implementation("eager")
    ids, seen = prompt(LENGTH), []
    for weights in (False, True):
        with patch_model(model, trace=True, speculate=True) as handle:
            cache = SparseCache(model)
            forward(model, ids, cache)
            logits = [forward(model, ids[:, i : i + 1], cache, output_attentions=weights).logits for i in range(3)]
            seen.append((torch.cat(logits), handle.stats(), [entry.selected for entry in handle.trace]))
    (plain, counts, trace), (logits, other, traced) = seen
    torch.testing.assert_close(plain, logits, **CLOSE)
    assert counts["selector_calls"] == other["selector_calls"] == len(trace) == 3 * picked_layers(model)
    assert all(map(torch.equal, trace, traced))


def test_report_and_statistics(model):
    with patch_model(model, speculate=True, spec_ratio=1.5) as handle:
        greedy(model, prompt(LENGTH))
        layers, stats = handle.report().layers, handle.stats()
    shared = [not full for full in full_layers(model)]
    assert [layer.status for layer in layers] == ["shared" if follows else "sparse" for follows in shared]
    assert all(layer.selector == "dsa" and layer.settings["index_topk"] == TOPK for layer in layers)
    assert layers[0].settings["predicted_tokens"] == 60
    assert stats["steps"] == 23 and 0 < stats["hit_rate"] < 1 and stats["bytes_read"] > 0
    assert stats["ema"] == stats["layers"][0]["ema"] == (0.4, 0.1, 0.25)
    assert "3 of 3 attention layers sparse" in str(handle.report())


def test_settings_without_effect_are_named(model):
    with patch_model(model) as handle:
        assert "no effect" not in str(handle.report())
    with patch_model(model, budget=None, group="max", hint="none") as handle:
        assert "they have no effect: budget=None, group='max'" in str(handle.report())


def test_modules_keep_what_a_module_has(model):
    """Nothing of torch.nn.Module is hidden by the class that takes over."""
    names = [name for name, _ in model.named_parameters()]
    with patch_model(model):
        assert [name for name, _ in model.named_parameters()] == names
        for layer in model.model.layers:
            assert list(layer.self_attn.parameters())


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an op makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("pad", [0, 7])
def test_a_long_prompt_takes_linear_memory(model, pad):
    """No mask of queries x columns, also where padding asks for one; the scores keep to the workspace."""
    sizes = {}
    for length in (256, 1024):
        ids, mask = left_pad([prompt(length)[0], prompt(length - pad, seed=1)[0]])
        with patch_model(model, workspace=2**18), Largest() as seen:
            cache = SparseCache(model)
            model.model(ids, attention_mask=mask, past_key_values=cache)
        sizes[length] = seen.bytes
    assert sizes[1024] <= 4.5 * sizes[256]
    assert sizes[1024] < 8 * 1024 * 1024  # bytes of the scores of two rows


def test_bytes_are_those_of_rows_that_select_and_of_real_tokens(model):
    """Two rows select among 160 and 123 tokens of their own, one fits; a token's index key has 16 channels, its latent
    and RoPE key 40."""
    ids, mask = padded()
    with patch_model(model) as handle:
        cache = SparseCache(model)
        forward(model, ids, cache, mask)
        forward(model, prompt(1, batch=3, seed=5), cache)
        expected = 4 * (2 * TOPK * 40 + (161 + 124) * 16)
        assert handle.stats()["bytes_read"] == expected * picked_layers(model)
