"""What a patched forward does where it cannot run as asked: another cache, gradients, odd masks, wrong inputs."""

import contextlib
import copy
import gc
import warnings
import weakref

import pytest
import torch
from models import SPARSE, greedy, left_pad, prompt, tiny_llama
from transformers import DynamicCache, StaticCache

from hf_sparse_prr import SparseCache, SparseConfig, patch_model, patching

pytestmark = pytest.mark.compat
IDS = prompt(100)
DENSE_LAYERS = pytest.mark.parametrize("dense_layers", [0, 1])
FOREIGN_CACHES = pytest.mark.parametrize(
    "foreign",
    [lambda config: DynamicCache(config=config), lambda config: StaticCache(config=config, max_cache_len=160)],
    ids=["dynamic", "static"],
)


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())


@contextlib.contextmanager
def own_warnings():
    """Collects this package's warnings."""
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(warning.message) for warning in caught if str(warning.message).startswith("hf_sparse_prr")]


def patched(**settings):
    model = tiny_llama()
    return model, patch_model(model, **{**SPARSE, **settings})


def step(model, ids, cache, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **kwargs).logits


def warm(model, cache=None, length=90):
    """A cache that holds a prompt and some decoded tokens."""
    cache = SparseCache(model) if cache is None else cache
    for begin, end in ((0, length - 2), (length - 2, length - 1), (length - 1, length)):
        step(model, IDS[:, begin:end], cache)
    return cache


def leaves(thing, path="cache"):
    """Every value that a cache holds, however deep, by its path. Left out is what is made anew for each forward."""
    if isinstance(thing, (list, tuple)):
        parts = enumerate(thing)
    elif isinstance(thing, dict):
        parts = thing.items()
    elif type(thing).__module__.startswith("hf_sparse_prr") and not isinstance(thing, SparseConfig):
        parts = vars(thing).items()
    else:
        yield path, thing
        return
    for name, part in parts:
        if name not in ("_step", "shared", "statistics"):
            yield from leaves(part, f"{path}.{name}")


def assert_same(cache, before):
    """`before` is a deepcopy of the cache."""
    now, then = dict(leaves(cache)), dict(leaves(before))
    assert now.keys() == then.keys()
    for path, value in then.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(now[path], value, rtol=0, atol=0, equal_nan=True, msg=path)
        else:
            assert now[path] == value, path


# Somebody else's cache


@FOREIGN_CACHES
def test_a_foreign_cache_runs_stock_and_is_named_once_per_process(foreign):
    expected = greedy(tiny_llama(), IDS)
    with own_warnings() as said:
        handles = []
        for _ in range(2):
            model, handle = patched()
            cache = foreign(model.config)
            assert torch.equal(greedy(model, IDS, past_key_values=cache), expected)
            assert handle.stats()["selector_calls"] == 0
            handles.append(handle)
    assert len(said) == 1
    assert type(cache).__name__ in said[0]
    assert "SparseCache" in said[0]
    assert [len(handle.report().warnings) for handle in handles] == [1, 1]


@FOREIGN_CACHES
@DENSE_LAYERS
def test_a_foreign_cache_is_named_at_the_first_token_that_would_be_sparse(foreign, dense_layers):
    model, _ = patched(dense_layers=dense_layers)
    cache, spoken = foreign(model.config), []
    for begin, end in [(0, 78), *((t, t + 1) for t in range(78, 83))]:
        with own_warnings() as said:
            step(model, IDS[:, begin:end], cache)
        spoken += [end] * len(said)
    assert spoken == [81]  # the budget holds 80


def test_a_foreign_cache_of_padding_is_not_named():
    """Rows count from their first real token: none of these outgrows its budget."""
    model, handle = patched(strict=True)
    ids, mask = left_pad([IDS[0, :20]], extra=80)
    expected = greedy(tiny_llama(), ids, attention_mask=mask)
    with own_warnings() as said:
        new = greedy(model, ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config))
    assert torch.equal(new, expected)
    assert said == [] == handle.report().warnings


@pytest.mark.parametrize(
    ("chunks", "training"),
    [([100], False), ([70, 30], False), ([90, 1], True)],
    ids=["prompt", "prompt in chunks", "training"],
)
def test_a_foreign_cache_is_not_named_where_nothing_would_be_sparse(chunks, training):
    model, handle = patched(strict=True)
    model.train(training)
    cache = DynamicCache(config=model.config)
    with own_warnings() as said:
        for ids in IDS[:, : sum(chunks)].split(chunks, dim=1):
            step(model, ids, cache)
        step(model, IDS, None)
    assert said == [] == handle.report().warnings


@FOREIGN_CACHES
@DENSE_LAYERS
def test_strict_refuses_a_foreign_cache_before_any_write(foreign, dense_layers):
    model, _ = patched(strict=True, dense_layers=dense_layers)
    cache = foreign(model.config)
    step(model, IDS[:, :90], cache)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    with pytest.raises(RuntimeError, match=r"strict=True: .*Cache"):
        step(model, IDS[:, 90:91], cache)
    assert cache.get_seq_length() == 90
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


# Gradients


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_a_cache_losses_and_gradients_are_stock(checkpointing, training):
    results = []
    for model in (patched(strict=True)[0], tiny_llama()):
        model.train(training)
        if checkpointing:
            model.gradient_checkpointing_enable()
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.01), []
        for ids in (IDS, prompt(90, batch=2, seed=1)):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            seen += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        results.append(seen)
    assert all(torch.equal(ours, stock) for ours, stock in zip(*results, strict=True))


def test_training_with_a_sparse_cache_is_refused():
    model, _ = patched()
    cache = warm(model)
    before = copy.deepcopy(cache)
    model.train()
    with pytest.raises(ValueError, match=r"eval mode, got model.train\(\)"):
        step(model, IDS[:, 90:91], cache)
    assert_same(cache, before)


@pytest.mark.parametrize("trained", ["everything", "one projection"])
def test_a_sparse_cache_in_grad_mode_says_once_that_it_stores_no_gradients(trained):
    model, handle = patched()
    if trained != "everything":
        model.requires_grad_(False)
        model.model.layers[1].self_attn.q_proj.requires_grad_(True)
    cache, wants = SparseCache(model), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: wants.append(output[0].requires_grad))
    with own_warnings() as said:
        for ids in (IDS[:, :90], IDS[:, 90:91], IDS[:, 91:92]):
            model(ids, past_key_values=cache)
        patched()[0](IDS, past_key_values=SparseCache(model.config))
    assert len(said) == 1
    assert "gradients" in said[0]
    assert handle.report().warnings == [said[0].removeprefix("hf_sparse_prr: ")]
    assert wants == [False] * 9
    assert not any(value.requires_grad for _, value in leaves(cache) if isinstance(value, torch.Tensor))


def test_a_sparse_cache_without_grad_mode_says_nothing():
    model, _ = patched()
    with own_warnings() as said:
        warm(model)
    assert said == []


# Masks that are not causal x per-token validity


def earlier_hole(tokens, length):
    """The first query token does not see column 5, the second does."""
    mask = torch.ones((tokens, length), dtype=torch.bool).tril(length - tokens)
    mask[0, 5] = False
    return mask[None, None]


def per_head(tokens, length):
    mask = earlier_hole(tokens, length).repeat(1, 4, 1, 1)
    mask[:, 2, :, 7] = False
    return mask


def bias(tokens, length):
    distance = torch.arange(length) - torch.arange(length - tokens, length)[:, None]
    return torch.where(distance > 0, torch.finfo(torch.float32).min, 0.01 * distance)[None, None]


ODD_MASKS = pytest.mark.parametrize("odd", [earlier_hole, per_head, bias])


@ODD_MASKS
def test_an_odd_mask_is_stock_for_that_call_and_said_once(odd):
    model, handle = patched()
    stock, cache = tiny_llama(), SparseCache(model)
    twin = DynamicCache(config=stock.config)
    for runner, held in ((model, cache), (stock, twin)):
        step(runner, IDS[:, :90], held)
    with own_warnings() as said:
        for begin in (90, 92):
            ids, mask = IDS[:, begin : begin + 2], odd(2, begin + 2)
            expected = step(stock, ids, twin, attention_mask=mask)
            assert torch.equal(step(model, ids, cache, attention_mask=mask), expected)
    assert len(said) == 1
    assert "mask" in said[0]
    assert handle.report().warnings == [said[0].removeprefix("hf_sparse_prr: ")]
    assert handle.stats()["selector_calls"] == 0
    step(model, IDS[:, 94:95], cache)
    assert handle.stats()["selector_calls"] == 3


@ODD_MASKS
@DENSE_LAYERS
def test_strict_refuses_an_odd_mask_before_any_write(odd, dense_layers):
    model, _ = patched(strict=True, dense_layers=dense_layers)
    cache = warm(model)
    before = copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match=r"strict=True: .*mask"):
        step(model, IDS[:, 90:92], cache, attention_mask=odd(2, 92))
    assert_same(cache, before)


# Inputs that do not fit the cache


def narrow_mask(model, cache):
    step(model, IDS[:, 90:91], cache, attention_mask=torch.ones((1, 1, 1, 90), dtype=torch.bool))


def mask_of_other_rows(model, cache):
    step(model, IDS[:, 90:91], cache, attention_mask=torch.ones((2, 1, 1, 91), dtype=torch.bool))


def other_batch_size(model, cache):
    step(model, IDS[:, 90:91].repeat(2, 1), cache)


def other_dtype(model, cache):
    step(copy.deepcopy(model).to(torch.bfloat16), IDS[:, 90:91], cache)


def other_settings(model, cache):
    step(patched(speculate=True, budget=96)[0], IDS[:, 90:91], cache)


def other_heads(model, cache):
    other = tiny_llama(num_key_value_heads=4)
    patch_model(other, model.sparse_prr.config)
    step(other, IDS[:, 90:91], cache)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (narrow_mask, r"attention_mask: expected \[1, 1, 1, 91\], got \[1, 1, 1, 90\]"),
        (mask_of_other_rows, r"attention_mask: expected \[1, 1, 1, 91\], got \[2, 1, 1, 91\]"),
        (other_batch_size, r"expected \[B, H, D\] = \[1, 2, 8\].*got \[2, 2, 8\]"),
        (other_dtype, "expected .*float32.*got .*bfloat16"),
        (other_settings, "expected .*budget=96.*got .*budget=80"),
        (other_heads, r"expected \[B, H, D\] = \[1, 2, 8\].*got \[1, 4, 8\]"),
    ],
)
def test_what_does_not_fit_the_cache_raises_and_leaves_it(forward, message):
    model, _ = patched(speculate=True)
    cache = warm(model)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=message):
        forward(model, cache)
    assert_same(cache, before)
    assert torch.equal(step(model, IDS[:, 90:91], cache), step(model, IDS[:, 90:91], before))


@pytest.mark.parametrize("layers", [2, 4])
def test_a_cache_for_another_number_of_layers_is_refused(layers):
    model, _ = patched()
    cache = SparseCache(tiny_llama(layers=layers))
    with pytest.raises(ValueError, match=f"3 layers, got {layers}"):
        step(model, IDS, cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("prefilled", [False, True], ids=["in the prompt", "while decoding"])
def test_an_interrupted_forward_is_noticed_by_the_next_one(prefilled):
    def interrupt(module, args):
        raise KeyboardInterrupt

    model, _ = patched()
    cache = warm(model) if prefilled else SparseCache(model)
    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(model, IDS[:, 90:91], cache)
    hook.remove()
    before = copy.deepcopy(cache)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"interrupted, call cache.reset\(\)"):
            step(model, IDS[:, 90:91], cache)
        assert_same(cache, before)
    cache.reset()
    assert torch.equal(step(model, IDS, cache), step(model, IDS, SparseCache(model)))


def test_any_spec_ratio_may_be_asked_for():
    serial = greedy(patched(speculate=False)[0], IDS)
    assert torch.equal(greedy(patched(speculate=True, spec_ratio=1e12)[0], IDS), serial)


# Memory


@pytest.mark.parametrize("unpatched", [False, True], ids=["patched", "unpatched"])
def test_nothing_outlives_its_owner(unpatched):
    model, handle = patched(speculate=True, trace=True)
    out = model.generate(IDS, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    made = next(value for value in out.values() if isinstance(value, SparseCache))
    own = warm(model)
    caches = [weakref.ref(thing) for cache in (made, own) for thing in (cache, cache.layers[0], cache.layers[0].keys)]
    owners = [weakref.ref(thing) for thing in (model, handle, model.model.layers[0].self_attn)]
    assert handle.stats()["selector_calls"] == 3 * (3 + 2)
    del out, made, own
    gc.collect()
    assert [ref() for ref in caches] == [None] * 6, "the model kept a cache"
    if unpatched:
        handle.unpatch()
    del model, handle
    gc.collect()
    assert [ref() for ref in owners] == [None] * 3


def test_a_bare_config_adopts_the_settings_of_the_model():
    model, handle = patched()
    cache = warm(model, SparseCache(model.config))
    assert cache.sparse_config is handle.config
    with pytest.raises(ValueError, match="budget=96"):
        SparseCache(model, sparse_config=SparseConfig(**{**SPARSE, "budget": 96}))
