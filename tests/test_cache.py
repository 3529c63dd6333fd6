"""Every Cache verb moves K/V and all side state together."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SPARSE, TOLERANCE, left_pad, prompt, tiny_llama
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from hf_sparse_prr import SparseCache, SparseConfig, patch_model
from hf_sparse_prr.tokens import Grid

pytestmark = pytest.mark.compat


def forward(model, ids, cache, mask=None):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]


def decode(model, cache, tokens, mask=None):
    """Feed the given ids [B, n] one by one: logits [B, n, V]."""
    rows = []
    for column in range(tokens.shape[1]):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones((len(mask), 1))], dim=1)
        rows.append(forward(model, tokens[:, column : column + 1], cache, mask))
    return torch.stack(rows, dim=1)


def assert_same_prior(cache, other):
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert one.length == two.length
        a, b = one.memory.prior, two.memory.prior
        assert (a is None) == (b is None)
        for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
            if x is None or y is None:
                assert x is y
                continue
            width = min(x.shape[2], y.shape[2])
            # one forward of several tokens and several of one run other GEMMs: close, not equal
            torch.testing.assert_close(x[:, :, :width], y[:, :, :width], equal_nan=True, **TOLERANCE[torch.float32])


@pytest.fixture
def model():
    model = tiny_llama()
    with patch_model(model, **SPARSE, speculate=True):
        yield model


@pytest.fixture
def warm(model):
    """A cache of two rows, one padded, with 120 prompt columns and 10 decode tokens."""
    ids, mask = left_pad([prompt(120)[0], prompt(101, seed=1)[0]])
    cache = SparseCache(model)
    forward(model, ids, cache, mask)
    decode(model, cache, prompt(10, batch=2, seed=2), mask)
    return cache


def full_mask(cache):
    return cache.tokens.valid[:, : cache.tokens.length].long()


def test_growth_is_geometric_and_views_are_returned(model):
    cache = SparseCache(model)
    forward(model, prompt(100), cache)
    buffers, growths = cache.layers[0].keys, 0
    for _ in range(1200):
        keys, _ = cache.layers[0].update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
        assert keys.data_ptr() == cache.layers[0].keys.data_ptr()
        growths += cache.layers[0].keys is not buffers
        buffers = cache.layers[0].keys
    assert cache.layers[0].length == 1300 and growths <= 5


def test_reorder_cache_moves_every_side_tensor(model, warm):
    twin, order, next_ids = copy.deepcopy(warm), torch.tensor([1, 1]), prompt(6, batch=2, seed=3)
    warm.reorder_cache(order)
    expected = decode(model, twin, next_ids[:, [0]][[1, 0]], full_mask(twin))[[1, 1], :1]
    got = decode(model, warm, next_ids[[0, 0]][:, :1], full_mask(warm))
    assert torch.equal(got[0], got[1])
    torch.testing.assert_close(got[0], expected[0])


def test_batch_verbs_equal_the_rows_they_keep(model, warm):
    repeated, kept = copy.deepcopy(warm), copy.deepcopy(warm)
    repeated.batch_repeat_interleave(2)
    kept.batch_select_indices(torch.tensor([1]))
    assert repeated.layers[0].keys.shape[0] == 4 and repeated.tokens.start.tolist() == [0, 0, 19, 19]
    assert kept.tokens.start_min == kept.tokens.start_max == 19
    ids = prompt(5, batch=2, seed=3)
    base = decode(model, copy.deepcopy(warm), ids, full_mask(warm))
    torch.testing.assert_close(
        decode(model, repeated, ids.repeat_interleave(2, 0), full_mask(repeated)), base.repeat_interleave(2, 0)
    )
    torch.testing.assert_close(decode(model, kept, ids[1:], full_mask(kept)), base[1:])


@pytest.mark.parametrize("drop", [0, 1, 3])
def test_crop_undoes_tokens_as_if_never_seen(model, warm, drop):
    """Accepted tokens, then a forward of drafts of which `drop` are rejected."""
    ids = prompt(5, batch=2, seed=3)
    plain = copy.deepcopy(warm)
    decode(model, plain, ids[:, : 5 - drop], full_mask(plain))
    mask = torch.cat([full_mask(warm), torch.ones(2, 5, dtype=torch.long)], dim=1)
    forward(model, ids, warm, mask)
    warm.crop(-drop)
    assert warm.get_seq_length() == plain.get_seq_length()
    assert_same_prior(warm, plain)
    after = prompt(4, batch=2, seed=4)
    torch.testing.assert_close(
        decode(model, warm, after, full_mask(warm)), decode(model, plain, after, full_mask(plain))
    )


def test_crop_deeper_than_the_last_step_clears_the_prior(model, warm):
    warm.crop(-1)
    assert warm.layers[0].memory.prior is not None
    warm.crop(-1)
    assert all(layer.memory.prior is None for layer in warm.layers)


def test_crop_recomputes_a_partly_dropped_block(model):
    """What was dropped must not live on in a block's bound."""
    ids, handle = prompt(150), model.sparse_prr
    cache, clean = SparseCache(model), SparseCache(model)
    forward(model, ids[:, :137], clean)
    forward(model, ids[:, :137], cache)
    for layer in cache.layers:
        layer.update(torch.full((1, 2, 3, 8), 1e4), torch.zeros(1, 2, 3, 8))
        grid = Grid(torch.ones(1, layer.capacity, dtype=torch.bool), torch.zeros(1).long(), torch.tensor([140]))
        layer.summarise(handle.kernels.module, grid)
        layer.crop(-3)
    tail = prompt(40, seed=5)
    torch.testing.assert_close(decode(model, cache, tail), decode(model, clean, tail))
    for a, b in zip(cache.layers, clean.layers, strict=True):
        for layer in (a, b):
            layer.summarise(handle.kernels.module, cache.tokens.on(layer.device))
        assert torch.equal(a.summaries[1][:, :, :11], b.summaries[1][:, :, :11])


def test_crop_refuses_positive_numbers(warm):
    with pytest.raises(ValueError, match="expected an int <= 0"):
        warm.crop(3)


def test_reset_forgets_everything(model, warm):
    ids = prompt(130, seed=8)
    warm.reset()
    assert warm.get_seq_length() == 0 and warm.decode_columns == []
    fresh = SparseCache(model)
    for cache in (warm, fresh):
        forward(model, ids, cache)
    assert torch.equal(decode(model, warm, ids[:, :5]), decode(model, fresh, ids[:, :5]))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_are_independent_and_complete(model, warm, clone):
    twin = clone(warm)
    assert_same_prior(warm, twin)
    ids = prompt(5, batch=2, seed=3)
    assert torch.equal(decode(model, twin, ids, full_mask(twin)), decode(model, warm, ids, full_mask(warm)))
    twin.layers[0].keys.fill_(0)
    twin.layers[0].memory.prior.level.fill_(0)
    assert warm.layers[0].keys.any() and warm.layers[0].memory.prior.level.nan_to_num().any()


def test_offload_and_prefetch_keep_everything(model, warm):
    twin = copy.deepcopy(warm)
    for layer in warm.layers:
        layer.offload()
        layer.prefetch()
    ids = prompt(3, batch=2, seed=3)
    assert torch.equal(decode(model, twin, ids, full_mask(twin)), decode(model, warm, ids, full_mask(warm)))


def test_settings_are_the_models(model):
    other = SparseConfig(budget=160, block_size=16)
    with pytest.raises(ValueError, match="expected the settings of the model"):
        SparseCache(model, sparse_config=other)
    bare = SparseCache(model.config)
    forward(model, prompt(20), bare)
    assert bare.sparse_config == model.sparse_prr.config
    stranger = SparseCache(model.config, sparse_config=other)
    with pytest.raises(ValueError, match="expected the settings of the model"):
        forward(model, prompt(20), stranger)
    assert stranger.get_seq_length() == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "9"])
def test_max_length_and_prompt_length_are_checked(model, value):
    with pytest.raises(ValueError, match="max_length: expected"):
        SparseCache(model, max_length=value)
    if value != 0:
        with pytest.raises(ValueError, match="prompt_length: expected"):
            SparseCache(model).prompt_length = value


def test_tokens_below_prompt_length_attend_densely(model):
    """By position, also within one forward, and also one token at a time."""
    ids = prompt(150)
    stock = DynamicCache(config=model.config)
    cache = SparseCache(model)
    cache.prompt_length = 150
    with torch.no_grad():
        for column in range(150):
            sparse = model(ids[:, column : column + 1], past_key_values=cache).logits
    model.sparse_prr.unpatch()
    with torch.no_grad():
        for column in range(150):
            dense = model(ids[:, column : column + 1], past_key_values=stock).logits
    assert torch.equal(sparse, dense)


def test_a_prompt_and_drafts_in_one_forward(model):
    ids = prompt(150)
    together, apart = SparseCache(model), SparseCache(model)
    together.prompt_length = apart.prompt_length = 140
    with torch.no_grad():
        logits = model(ids, past_key_values=together).logits[:, -10:]
    forward(model, ids[:, :140], apart)
    torch.testing.assert_close(logits, decode(model, apart, ids[:, 140:]))
    assert_same_prior(together, apart)
    assert model.sparse_prr.stats()["steps"] == 20


verbs = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, 5)),
    st.tuples(st.just("drafts"), st.integers(2, 16)),
    st.tuples(st.just("prompt"), st.integers(17, 60)),
    st.tuples(st.just("padded"), st.integers(17, 40)),
    st.tuples(st.just("crop"), st.integers(0, 30)),
    st.tuples(st.just("reorder"), st.integers(0, 3)),
    st.tuples(st.just("repeat"), st.integers(2, 2)),
    st.tuples(st.just("select"), st.integers(0, 1)),
    st.tuples(st.just("copy"), st.integers(0, 1)),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(verbs, min_size=1, max_size=7), st.integers(0, 30))
def test_summaries_are_a_pure_function_of_what_they_cover(sequence, pad):
    """After any sequence of verbs the summaries equal those made anew from the K/V and validity at hand."""
    model = tiny_llama(layers=2)
    with patch_model(model, **SPARSE, speculate=True) as handle:
        kernels = handle.kernels.module
        ids, mask = left_pad([prompt(110)[0], prompt(110 - pad, seed=1)[0]])
        cache = SparseCache(model)
        forward(model, ids, cache, mask)
        for seed, (verb, number) in enumerate([*sequence, ("decode", 1)], start=1):
            mask = full_mask(cache)
            batch = len(mask)
            if verb == "decode":
                decode(model, cache, prompt(number, batch=batch, seed=seed), mask)
            elif verb in ("drafts", "prompt", "padded"):
                new = torch.ones((batch, number), dtype=torch.long)
                if verb == "padded":
                    new[-1, : number // 2] = 0
                forward(model, prompt(number, batch=batch, seed=seed), cache, torch.cat([mask, new], dim=1))
            elif verb == "crop":
                cache.crop(-number)
            elif verb == "reorder":
                cache.reorder_cache(torch.arange(batch).roll(number))
            elif verb == "repeat" and batch < 8:
                cache.batch_repeat_interleave(number)
            elif verb == "select":
                cache.batch_select_indices(torch.arange(batch)[number % batch :])
            elif verb == "copy":
                cache = copy.deepcopy(cache)
        grid = cache.tokens.on(cache.tokens.start.device)
        start = grid.start
        assert cache.tokens.length == cache.get_seq_length(0) == cache.get_seq_length(1)
        for layer in cache.layers:
            layer.summarise(kernels, grid)
            held = [tensor.clone() for tensor in layer.summaries]
            layer.summarised, layer.summaries = 0, ()
            layer.summarise(kernels, grid)
            for row in range(len(start)):
                blocks = -(-(layer.length - int(start[row])) // 16)
                for old, new in zip(held, layer.summaries, strict=True):
                    assert torch.equal(old[row, :, :blocks], new[row, :, :blocks])
