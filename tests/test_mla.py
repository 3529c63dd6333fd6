"""Models with an indexer of their own: logits, selection and attention of the stock classes, in every mode."""

import contextlib
import copy
import pickle

import pytest
import torch
from models import greedy, left_pad, predicting, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

from hf_sparse_prr import SparseCache, patch_model, patching
from hf_sparse_prr.config import SparseConfig
from hf_sparse_prr.hooks import cache_argument
from hf_sparse_prr.patches import INDEXED

pytestmark = pytest.mark.compat
TOPK, LENGTH = 40, 160  # selected tokens, and those of a row that is four times as long
# 1e-5 of the largest logit, 5.6: stock's own logits move by 1.6e-5 when its tokens come one by one
CLOSE = dict(rtol=1e-5, atol=5e-5)
BOTH = pytest.mark.parametrize("speculate", [False, True])


@pytest.fixture(params=INDEXED)
def model(request):
    return tiny(request.param)


def forward(model, ids, cache, mask=None, **kwargs):
    """The model's output for the new ids [B, Q]; the mask covers what the cache holds as well."""
    positions = None if mask is None or mask.dim() > 2 else (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, **kwargs)


def in_chunks(model, ids, mask, cache, size):
    """Logits [B, Q, V] of a forward that comes `size` tokens at a time."""
    ends = [min(begin + size, ids.shape[1]) for begin in range(0, ids.shape[1], size)]
    parts = [ids[:, begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    logits = [forward(model, part, cache, mask[:, :end]).logits for part, end in zip(parts, ends, strict=True)]
    return torch.cat(logits, dim=1)


def padded():
    return left_pad([prompt(LENGTH)[0], prompt(LENGTH - 37, seed=1)[0], prompt(30, seed=2)[0]])


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


def picked_layers(model):
    return len(model.config.layer_types) - list(getattr(model.config, "indexer_types", None) or []).count("shared")


MODES = {
    "greedy": {},
    "sampled": dict(do_sample=True, top_k=20),
    "beams": dict(num_beams=3),
    "beam sampling": dict(num_beams=2, do_sample=True, top_k=10),
    "several sequences": dict(num_return_sequences=2, do_sample=True, top_k=10),
    "chunked prefill": dict(prefill_chunk_size=77),
    "prompt lookup": dict(prompt_lookup_num_tokens=4),
    "assisted": {},
    "preallocated": {},
    "static": dict(cache_implementation="static"),
    "no cache": dict(use_cache=False),
    "eager": {},
}


@pytest.mark.parametrize("mode", list(MODES))
def test_every_mode_generates_the_ids_of_stock(model, mode, monkeypatch):
    """The prompt repeats itself, so that drafts are accepted and rejected."""
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
    piece = prompt(50)
    ids = torch.cat([piece, piece, prompt(20, seed=3), piece[:, :15]], dim=1)
    asked, out = {"do_sample": False, "max_new_tokens": 20, **MODES[mode]}, []
    if mode == "assisted":
        asked["assistant_model"] = tiny(model.config.model_type, seed=1, layers=2)
    if mode == "eager":
        model.set_attn_implementation("eager")
    torch.manual_seed(7)
    out.append(model.generate(ids, **asked))
    foreign = mode in ("static", "no cache")
    for speculate in (False, True):
        with patch_model(model, speculate=speculate) as handle:
            if mode == "preallocated":
                asked[cache_argument()] = SparseCache(model, max_length=300)
            torch.manual_seed(7)
            said = pytest.warns(UserWarning, match="StaticCache") if mode == "static" else contextlib.nullcontext()
            monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
            with said:
                out.append(model.generate(ids, **asked))
            assert (handle.stats()["selector_calls"] > 0) != foreign
    for other in out[1:]:
        assert torch.equal(out[0], other)


def test_left_padded_batches_generate_the_ids_of_stock(model):
    ids, mask = padded()
    expected = greedy(model, ids, attention_mask=mask)
    with patch_model(model, speculate=True):
        assert torch.equal(greedy(model, ids, attention_mask=mask), expected)


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


def verbs(model, cache):
    """Every verb of the cache, with decode tokens between them: their logits."""
    seen, name = [], prompt(3, batch=3, seed=3)

    def feed(tokens):
        for i in range(tokens.shape[1]):
            seen.append(forward(model, tokens[:, i : i + 1], cache).logits)

    feed(name)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    feed(prompt(2, batch=3, seed=4))
    cache.crop(-1)
    feed(prompt(3, batch=3, seed=5))
    cache.crop(-5)
    feed(prompt(2, batch=3, seed=6))
    cache.batch_repeat_interleave(2)
    feed(prompt(2, batch=6, seed=7))
    cache.batch_select_indices(torch.tensor([5, 1, 3]))
    cache = copy.deepcopy(cache)
    feed(prompt(2, batch=3, seed=8))
    cache = pickle.loads(pickle.dumps(cache))
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    feed(prompt(2, batch=3, seed=9))
    cache.crop(-30)
    feed(prompt(3, batch=3, seed=11))
    return cache, torch.cat([logits.flatten() for logits in seen])


def test_every_cache_verb_moves_all_side_state(model):
    """PRR and serial see the same bits, and both what stock sees."""
    ids, mask = left_pad([prompt(LENGTH)[0], prompt(LENGTH - 37, seed=1)[0], prompt(LENGTH - 9, seed=2)[0]])
    outputs = []
    for speculate in (False, True):
        with patch_model(model, speculate=speculate):
            cache = SparseCache(model)
            forward(model, ids, cache, mask)
            cache, logits = verbs(model, cache)
            outputs.append(logits)
            for layer, full in zip(cache.layers, full_layers(model), strict=True):
                assert layer.indexed == (layer.length if full else 0)
            cache.reset()
            assert all(layer.index_keys is None and layer.indexed == 0 for layer in cache.layers)
            forward(model, ids[:1], cache)
    assert torch.equal(*outputs)


def full_layers(model):
    types = getattr(model.config, "indexer_types", None) or ["full"] * 3
    return [kind == "full" for kind in types]


def test_an_unpatched_model_runs_stock_on_a_sparse_cache(model):
    ids, mask = padded()
    expected = greedy(model, ids, attention_mask=mask)
    for max_length in (None, 300):
        cache = SparseCache(model.config, max_length=max_length)
        assert torch.equal(greedy(model, ids, attention_mask=mask, **{cache_argument(): cache}), expected)


def test_a_cache_of_another_model_is_refused_before_any_write(model):
    other = tiny(model.config.model_type, index_topk=60)
    glm = model.config.model_type == "glm_moe_dsa"
    sharing = tiny("glm_moe_dsa", layers=3)
    sharing.config.indexer_types = ["full", "full", "shared"]
    with patch_model(model), patch_model(tiny("llama")) as llama:
        for cache in (SparseCache(other), SparseCache(llama.model), *([SparseCache(sharing.config)] if glm else [])):
            with pytest.raises(ValueError, match=r"cache: expected one for a model with Indexer\(topk=40.*, got"):
                forward(model, prompt(30), cache)
            assert cache.get_seq_length() == 0
        cache = SparseCache(model)
        with pytest.raises(ValueError, match=r"cache: expected one for a model with no indexer, got one for Indexer"):
            forward(llama.model, prompt(30), cache)
        assert cache.get_seq_length() == 0


def test_an_indexer_that_selects_another_number_than_the_config_says_is_refused(model):
    model.config.index_topk = 20
    with pytest.raises(ValueError, match=r"index_topk: expected the config's 20, got 40 in a layer"):
        patch_model(model)


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


@pytest.mark.parametrize("foreign", [DynamicCache, StaticCache])
def test_a_foreign_cache_is_stock_and_said_once(model, foreign, monkeypatch):
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
    ids = prompt(LENGTH)

    def make():
        static = foreign is StaticCache
        return foreign(config=model.config, max_cache_len=LENGTH + 30) if static else foreign(config=model.config)

    expected = greedy(model, ids, **{cache_argument(): make()})
    with patch_model(model), pytest.warns(UserWarning, match=foreign.__name__) as said:
        assert torch.equal(greedy(model, ids, **{cache_argument(): make()}), expected)
    assert len(said) == 1


def test_gradients_without_a_sparse_cache_are_stock(model):
    ids, seen = prompt(60), []
    for patched in (False, True):
        with patch_model(model) if patched else contextlib.nullcontext():
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            seen.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


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


def test_the_report_says_what_has_no_kernel_yet(model, monkeypatch):
    with patch_model(model) as handle:
        assert "plain torch" not in str(handle.report())
        monkeypatch.setattr(handle, "kernels", handle.kernels._replace(backend="triton"))
        assert "index scores and latent attention run as plain torch" in str(handle.report())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(selector="quest"), "selector: expected 'auto' or 'dsa'.*, got 'quest'"),
        (dict(dense_layers=1), "dense_layers: expected 'auto' or 0.*, got 1"),
        (dict(semantics="superset"), "semantics: expected 'exact'.*, got 'superset'"),
    ],
)
def test_settings_that_contradict_the_models_rule_are_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        patch_model(model, **settings)
    assert not any("binding" in module.__dict__ for module in model.modules())


def test_a_model_without_an_indexer_refuses_dsa():
    assert SparseConfig(selector="dsa").selector == "dsa"
    with pytest.raises(ValueError, match=r"selector: expected one of 'auto', 'quest'.*no indexer, got 'dsa'"):
        patch_model(tiny("llama"), selector="dsa")


@pytest.mark.parametrize("name", ["kv_a_layernorm", "indexer.k_norm"])
def test_an_attention_without_a_part_we_know_is_refused(model, name):
    part = model.model.layers[2].self_attn.get_submodule(name.rpartition(".")[0])
    setattr(part, name.rpartition(".")[2], None)
    with pytest.raises(ValueError, match=rf"expected submodules .*, got no {name}"):
        patch_model(model)


def test_the_budget_is_not_the_models_business(model):
    """`budget` and block settings say nothing of tokens: None too."""
    ids = prompt(LENGTH)
    expected = greedy(model, ids)
    for settings in (dict(budget=None), dict(budget=64, block_size=16), dict(selector="dsa")):
        with patch_model(model, **settings) as handle:
            assert torch.equal(greedy(model, ids), expected)
            assert handle.stats()["selector_calls"] > 0


def test_states_that_do_not_continue_the_index_are_refused(model):
    with patch_model(model):
        cache = SparseCache(model)
        forward(model, prompt(30), cache)
        held = cache.layers[0].index_keys
        cache.layers[0].index_keys = held.double()
        with pytest.raises(ValueError, match=r"index keys: expected .* in torch.float64"):
            forward(model, prompt(1), cache)
        assert cache.get_seq_length() == 30 and all(layer.length == 30 for layer in cache.layers)
        cache.layers[0].index_keys = held
        forward(model, prompt(1), cache)


def test_hints_change_nothing(model):
    ids, seen = prompt(LENGTH), []
    for hint in ("predicted", "previous", "rope", "none"):
        with patch_model(model, hint=hint, speculate=True):
            seen.append(greedy(model, ids))
    assert all(torch.equal(seen[0], other) for other in seen[1:])


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


def test_the_mask_hook_goes_with_the_patch(model):
    old = patch_model(model)
    old.unpatch()
    with patch_model(model):
        old.unpatch()
        assert len(model.model._forward_pre_hooks) == 1
        twin = copy.deepcopy(model)
        assert torch.equal(greedy(twin, prompt(60)), greedy(model, prompt(60)))
    assert not model.model._forward_pre_hooks and not model.model._forward_pre_hooks_with_kwargs
    twin.sparse_prr.unpatch()
    assert not twin.model._forward_pre_hooks


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
