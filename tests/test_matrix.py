"""Every family that selects blocks with every selector, in full and half precision: what has to hold for all."""

import contextlib
import copy
import pickle

import pytest
import torch
from models import SPARSE, TOLERANCE, greedy, left_pad, predicting, prompt, tiny
from oracle import check_layer
from transformers import DynamicCache

from hf_sparse_prr import SparseCache, patch_model, patching
from hf_sparse_prr.hooks import cache_argument
from hf_sparse_prr.patches import FAMILIES, INDEXED

pytestmark = pytest.mark.compat
SELECTORS = {
    "quest": SPARSE,
    "infllm_v2": dict(selector="infllm_v2", budget=160, block_size=32, dense_layers=0),  # two windows a block
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LENGTH = 200  # tokens of a prompt that is over every budget


@pytest.fixture(params=list(DTYPES))
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture(params=sorted(FAMILIES.keys() - INDEXED))
def model(request, dtype):
    return tiny(request.param, dtype=dtype)


@pytest.fixture(params=list(SELECTORS))
def settings(request):
    return SELECTORS[request.param]


def forward(model, ids, cache, mask=None):
    """Logits of the last token: [B, V]."""
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]


def feed(model, cache, tokens):
    """Decode the given ids [B, n] one by one: logits [B, n, V]."""
    return torch.stack([forward(model, tokens[:, i : i + 1], cache) for i in range(tokens.shape[1])], dim=1)


def padded():
    return left_pad([prompt(LENGTH)[0], prompt(LENGTH - 37, seed=1)[0], prompt(30, seed=2)[0]])


def test_while_rows_fit_it_is_stock_to_the_bit(model):
    ids, mask = padded()
    asked = dict(
        attention_mask=mask, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    stock = model.generate(ids, **asked)
    with patch_model(model, budget=4096, speculate=True) as handle:
        for cache in (None, SparseCache(model, max_length=LENGTH + 20)):
            out = model.generate(ids, **asked, **({} if cache is None else {cache_argument(): cache}))
            assert torch.equal(out.sequences, stock.sequences)
            assert all(torch.equal(a, b) for a, b in zip(out.logits, stock.logits, strict=True))
        assert handle.stats()["selector_calls"] == 0
        assert [layer.status for layer in handle.report().layers] == ["dense", "dense", "sparse"]
    assert torch.equal(model.generate(ids, **asked).sequences, stock.sequences)


@pytest.mark.parametrize("predicted", ["by the EMA", "everything", "the last block only"])
def test_prr_equals_serial_bitwise(model, settings, predicted, monkeypatch):
    ids, mask = padded()
    tokens, outputs = prompt(15, batch=3, seed=3), []
    for speculate in (False, True):
        with patch_model(model, **settings, speculate=speculate, spec_ratio=1.5, trace=True) as handle:
            chooser = contextlib.nullcontext()
            if speculate and predicted != "by the EMA":
                first = slice(None) if predicted == "everything" else slice(-1, None)

                def choose(layer, token, first=first):
                    newest = int(token.last.max())
                    blocks = torch.arange(layer.plan.sink_blocks, newest, dtype=torch.int32)
                    return blocks.expand(*layer.keys.shape[:2], -1)[..., first].contiguous()

                chooser = predicting(monkeypatch, choose)
            cache = SparseCache(model)
            forward(model, ids, cache, mask)
            with chooser:
                outputs.append(feed(model, cache, tokens))
            predictions = sum(int((entry.predicted >= 0).sum()) for entry in handle.trace)
            assert (predictions > 0) == speculate
            assert handle.stats()["selector_calls"] == 15 * 3
    assert torch.equal(*outputs)


@pytest.mark.parametrize("speculate", [False, True])
def test_selection_and_attention_equal_the_oracle(model, settings, speculate):
    ids, mask = padded()
    checked = 0
    with patch_model(model, **settings, speculate=speculate, trace=True) as handle:
        cache = SparseCache(model)
        forward(model, ids, cache, mask)

        def compare(module, args, kwargs, result):
            nonlocal checked
            expected, got = check_layer(
                module, kwargs["hidden_states"], kwargs["position_embeddings"], result[0],
                cache.layers[module.layer_idx], cache, handle.plans[module.layer_idx], handle.trace[-1],
            )  # fmt: skip
            torch.testing.assert_close(got, expected, **TOLERANCE[got.dtype])
            checked += 1

        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(compare, with_kwargs=True)
        feed(model, cache, prompt(4, batch=3, seed=3))
    assert checked == 4 * 3


def verbs(model, cache):
    """Every cache verb on three rows, with decoding in between: the cache and all logits seen."""
    seen = [feed(model, cache, prompt(6, batch=3, seed=3))]
    seen.append(forward(model, prompt(5, batch=3, seed=4), cache)[:, None])  # drafts
    cache.crop(-4)
    seen.append(feed(model, cache, prompt(3, batch=3, seed=5)))
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    seen.append(feed(model, cache, prompt(2, batch=3, seed=6)))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    seen.append(feed(model, cache, prompt(2, batch=3, seed=7)))
    cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    seen.append(feed(model, cache, prompt(2, batch=3, seed=8)))
    forward(model, prompt(40, batch=3, seed=9), cache)  # a second turn
    seen.append(feed(model, cache, prompt(3, batch=3, seed=10)))
    cache.crop(-30)
    seen.append(feed(model, cache, prompt(3, batch=3, seed=11)))
    return cache, torch.cat(seen, dim=1)


def test_every_cache_verb_moves_all_side_state(model, settings):
    """PRR and serial see the same bits, and summaries equal those made anew from the K/V at hand."""
    ids, mask = padded()
    outputs = []
    for speculate in (False, True):
        with patch_model(model, **settings, speculate=speculate) as handle:
            cache = SparseCache(model)
            forward(model, ids, cache, mask)
            cache, logits = verbs(model, cache)
            outputs.append(logits)
            for layer in cache.layers:
                grid = cache.tokens.on(layer.device)
                layer.summarise(handle.kernels.module, grid)
                held, layer.summaries, layer.summarised = layer.summaries, (), 0
                layer.summarise(handle.kernels.module, grid)
                for row in range(3):
                    blocks = -(-(layer.length - int(grid.start[row])) // layer.plan.block_size)
                    for old, new in zip(held, layer.summaries, strict=True):
                        assert torch.equal(old[row, :, :blocks], new[row, :, :blocks])
            cache.reset()
            assert cache.get_seq_length() == 0
            forward(model, ids[:1], cache)
    assert torch.equal(*outputs)


MODES = {
    "sampled": dict(do_sample=True, top_k=20),
    "beams": dict(num_beams=3, do_sample=False),
    "several sequences": dict(num_return_sequences=2, do_sample=True, top_k=10),
    "beam sampling": dict(num_beams=2, do_sample=True, top_k=10),
    "greedy": dict(do_sample=False),
    "chunked prefill": dict(do_sample=False, prefill_chunk_size=77),
    "prompt lookup": dict(do_sample=False, prompt_lookup_num_tokens=4),
    "assisted": dict(do_sample=False),
    "preallocated": dict(do_sample=False),
    "eager": dict(do_sample=False),
}
GREEDY = ("greedy", "chunked prefill", "prompt lookup", "assisted", "preallocated", "eager")


@pytest.mark.parametrize("mode", list(MODES))
def test_every_mode_generates_the_same_serial_and_prr(model, settings, mode):
    """And in full precision the modes that promise greedy's ids keep the promise. The prompt repeats itself, so that
    drafts are accepted and rejected."""
    piece = prompt(60)
    ids = torch.cat([piece, piece, piece, prompt(20, seed=3), piece[:, :15]], dim=1)
    extra, out = {}, []
    if mode == "assisted":
        extra["assistant_model"] = tiny(model.config.model_type, seed=1, layers=2, dtype=model.dtype)
    if mode == "eager":
        model.set_attn_implementation("eager")
    for speculate in (False, True):
        with patch_model(model, **settings, speculate=speculate) as handle:
            if mode == "preallocated":
                extra[cache_argument()] = SparseCache(model, max_length=300)
            torch.manual_seed(7)
            out.append(model.generate(ids, max_new_tokens=20, **MODES[mode], **extra))
            assert handle.stats()["selector_calls"] > 0
            if mode in GREEDY and model.dtype == torch.float32:
                model.set_attn_implementation("sdpa")
                assert torch.equal(out[-1][:, -20:], greedy(model, ids, tokens=20))
                model.set_attn_implementation("eager" if mode == "eager" else "sdpa")
    assert torch.equal(*out)


def test_several_turns_and_a_copied_prefix(model, settings):
    """A conversation over one cache, a prefix continued twice: the ids of the same forwards by hand."""
    if model.dtype != torch.float32:
        pytest.skip("ids of differently shaped GEMMs are compared in full precision")
    with patch_model(model, **settings, speculate=True):
        prefix, cache = prompt(LENGTH), SparseCache(model)
        forward(model, prefix[:, :-1], cache)
        for seed in (1, 2):
            ids = torch.cat([prefix, prompt(9, seed=seed)], dim=1)
            copied = copy.deepcopy(cache)
            asked = dict(max_new_tokens=8, do_sample=False, **{cache_argument(): copied})
            # With a mask: generate() takes a new token that happens to be the pad id for padding
            text = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
            assert torch.equal(text[:, -8:], greedy(model, ids, tokens=8))
            more = torch.cat([text, prompt(5, seed=seed + 2)], dim=1)
            byhand = copy.deepcopy(copied)
            byhand.prompt_length = more.shape[1]
            logits = forward(model, more[:, copied.get_seq_length() :], byhand)
            expected = [logits.argmax(-1, keepdim=True)]
            for _ in range(7):
                expected.append(forward(model, expected[-1], byhand).argmax(-1, keepdim=True))
            text = model.generate(more, attention_mask=torch.ones_like(more), **asked)
            assert torch.equal(text[:, -8:], torch.cat(expected, dim=1))


def test_a_foreign_cache_is_stock(model, monkeypatch):
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
    ids = prompt(LENGTH)
    name = cache_argument()
    stock = greedy(model, ids, **{name: DynamicCache(config=model.config)})
    with patch_model(model, **SPARSE), pytest.warns(UserWarning, match="DynamicCache") as said:
        assert torch.equal(greedy(model, ids, **{name: DynamicCache(config=model.config)}), stock)
    assert len(said) == 1
