"""What report(), stats() and the trace say of a patched model, and that the three agree."""

import contextlib
import gc
import json
import re

import pytest
import torch
from models import SPARSE, greedy, left_pad, prompt, tiny_llama

from hf_sparse_prr import SparseCache, patch_model
from hf_sparse_prr.tokens import Step

pytestmark = pytest.mark.compat
STEPS = 23  # decode steps of 24 new tokens: the first one comes from the prompt
RATES = ("hit_rate", "hit_rate_weighted", "extra_rate")


def patched(**settings):
    model = tiny_llama()
    return model, patch_model(model, **{**SPARSE, **settings})


def prefilled(model, length=100):
    cache = SparseCache(model)
    with torch.no_grad():
        model(prompt(length), past_key_values=cache)
    return cache


def decode(model, cache, steps, seed=1):
    with torch.no_grad():
        for token in prompt(steps, seed=seed).T:
            model(token[None], past_key_values=cache)


def members(blocks):
    """One set of block ids for each batch row and KV head."""
    return [{block for block in row.tolist() if block >= 0} for row in blocks.flatten(0, 1)]


def test_report_of_a_patched_model():
    _, handle = patched(dense_layers=1, speculate=True, spec_ratio=0.5)
    report = handle.report()
    assert [layer.index for layer in report.layers] == [0, 1, 2]
    assert [layer.status for layer in report.layers] == ["dense", "sparse", "sparse"]
    assert {layer.attention_class for layer in report.layers} == {"LlamaAttention"}
    assert [layer.selector for layer in report.layers] == [None, "quest", "quest"]
    assert "dense_layers" in report.layers[0].reason
    assert report.layers[0].settings == {}
    settings = report.layers[1].settings
    assert settings["budget"] == 80
    assert settings["block_size"] == 16
    assert settings["sink_blocks"] == 1
    assert settings["local_blocks"] == 2
    assert settings["speculate"] is True
    assert settings["predicted_blocks"] == 1
    assert settings["semantics"] == "exact"
    assert settings["hint"] == "predicted"


def test_on_a_cpu_the_reference_is_no_fallback():
    _, handle = patched(strict=True)
    report = handle.report()
    assert report.backend == "reference" or torch.cuda.is_available()
    assert report.kernels == {"source": "bundled", "version": 1}
    assert report.warnings == []


def test_report_prints_as_a_table():
    _, handle = patched(dense_layers=1)
    lines = str(handle.report()).splitlines()
    assert lines[0] == "hf_sparse_prr: 2 of 3 attention layers sparse"
    assert "reference" in lines[1] or torch.cuda.is_available()
    table = lines[2:5]
    assert table[0].split()[:4] == ["layer", "class", "status", "selector"]
    assert [row.split()[:4] for row in table[1:]] == [
        ["0", "LlamaAttention", "dense", "-"],
        ["1-2", "LlamaAttention", "sparse", "quest"],
    ]
    assert repr(handle.report()) == str(handle.report())


def test_report_of_a_model_without_a_budget():
    handle = patch_model(tiny_llama(), budget=None)
    assert [(layer.status, layer.reason) for layer in handle.report().layers] == [("dense", "budget=None")] * 3
    assert "0 of 3 attention layers sparse" in str(handle.report())


@pytest.mark.parametrize(
    ("settings", "said"), [({"speculate": "auto"}, "no profile"), ({"semantics": "superset"}, "semantics='superset'")]
)
def test_report_says_what_is_not_as_one_may_think(settings, said):
    assert said in str(patched(**{"speculate": False, **settings})[1].report())
    assert said not in str(patched(speculate=False)[1].report())


def test_stats_before_anything_ran():
    _, handle = patched(speculate=True)
    stats = handle.stats()
    assert set(stats) == {
        *("steps", "selector_calls", "repaired_blocks", "bytes_read", "ema", "layers"),
        *RATES,
    }
    assert [stats[name] for name in ("steps", "selector_calls", "repaired_blocks", "bytes_read")] == [0, 0, 0, 0]
    assert [stats[name] for name in RATES] == [None] * 3
    assert [layer["layer"] for layer in stats["layers"]] == [0, 1, 2]


def test_stats_are_plain_host_numbers():
    model, handle = patched(speculate=True)
    greedy(model, prompt(100))
    assert json.loads(json.dumps(handle.stats()))["selector_calls"] == 3 * STEPS


def test_steps_count_also_where_nothing_is_selected():
    model, handle = patched(budget=None)
    greedy(model, prompt(100))
    stats = handle.stats()
    assert (stats["steps"], stats["selector_calls"], stats["bytes_read"]) == (STEPS, 0, 0)


def test_without_speculation_there_are_no_rates():
    model, handle = patched(speculate=False)
    greedy(model, prompt(100))
    stats = handle.stats()
    assert [stats[name] for name in RATES] == [None] * 3
    assert stats["ema"] is None
    assert stats["repaired_blocks"] == 0
    assert stats["steps"] == STEPS
    assert stats["selector_calls"] == 3 * STEPS


def rates(trace):
    """(hit_rate, extra_rate, repaired_blocks) that trace entries add up to."""
    chosen = predicted = hits = 0
    for entry in trace:
        sets = zip(members(entry.predicted), members(entry.selected), members(entry.missed), strict=True)
        for guess, selected, missed in sets:
            hits += len(guess & selected)
            chosen += len(guess & selected) + len(missed)
            predicted += len(guess)
    return hits / chosen, (predicted - hits) / predicted, chosen - hits


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_stats_are_what_the_trace_adds_up_to(ratio):
    model, handle = patched(speculate=True, spec_ratio=ratio, trace=True)
    ids, mask = left_pad([prompt(140)[0], prompt(90, seed=1)[0]])
    greedy(model, ids, attention_mask=mask)
    stats, names = handle.stats(), ("hit_rate", "extra_rate", "repaired_blocks")
    assert tuple(stats[name] for name in names) == rates(handle.trace)
    assert 0 < stats["hit_rate"] < 1
    for index, layer in enumerate(stats["layers"]):
        assert tuple(layer[name] for name in names) == rates(entry for entry in handle.trace if entry.layer == index)


def test_everything_predicted_is_a_weighted_hit_rate_of_one():
    model, handle = patched(speculate=True, spec_ratio=100.0)
    cache = prefilled(model, 114)
    decode(model, cache, steps=1)
    handle.reset_stats()
    decode(model, cache, steps=4)
    stats = handle.stats()
    assert stats["hit_rate"] == 1
    assert stats["hit_rate_weighted"] == pytest.approx(1)
    assert stats["repaired_blocks"] == 0
    # 115 .. 119 tokens are 8 blocks, 3 of them forced, and 2 of the 5 others are selected
    assert stats["extra_rate"] == (5 - 2) / 5


def test_the_better_scored_blocks_weigh_more():
    model, handle = patched(speculate=True)
    greedy(model, prompt(200))
    stats = handle.stats()
    assert 0 < stats["hit_rate_weighted"] <= 1
    assert stats["hit_rate_weighted"] != stats["hit_rate"]


def test_bytes_are_those_of_the_blocks_and_summaries_that_were_read():
    model, handle = patched(dense_layers=2)
    decode(model, prefilled(model, 114), steps=4)
    block, summary = 2 * 16 * 8 * 4, 2 * 8 * 4  # K and V of 16 tokens; minimum and maximum; dim 8, fp32
    heads, steps, attended, scored = 2, 4, 5, 5
    assert handle.stats()["bytes_read"] == heads * steps * (attended * block + scored * summary)


def test_stats_add_up_over_caches_dead_or_alive():
    model, handle = patched(speculate=True, trace=True)
    ids = prompt(100)
    greedy(model, ids)
    once = handle.stats()
    for _ in range(2):
        gc.collect()
        greedy(model, ids)
    gc.collect()
    held = prefilled(model)
    decode(model, held, steps=2)
    stats = handle.stats()
    assert stats["steps"] == 3 * STEPS + 2
    assert stats["selector_calls"] == 3 * (3 * STEPS + 2)
    assert stats["repaired_blocks"] >= 3 * once["repaired_blocks"] > 0
    assert len(handle.trace) == stats["selector_calls"]


def test_reset_stats_clears_and_a_live_cache_goes_on():
    model, handle = patched(speculate=True, trace=True)
    cache = prefilled(model)
    decode(model, cache, steps=3)
    handle.reset_stats()
    assert handle.stats() == patched(speculate=True)[1].stats()
    assert handle.trace == []
    decode(model, cache, steps=2)
    assert handle.stats()["steps"] == 2
    assert sorted({entry.step for entry in handle.trace}) == [3, 4]


def test_stats_say_the_ema_in_use():
    model, handle = patched(dense_layers=1, speculate=True, ema=(0.5, 0.5, 0.5))
    greedy(model, prompt(100))
    stats = handle.stats()
    assert stats["ema"] == (0.5, 0.5, 0.5)
    assert [layer["ema"] for layer in stats["layers"]] == [None, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)]


def test_stats_say_what_calibration_chose():
    model, handle = patched(dense_layers=1, speculate=True, ema="calibrate")
    cache = prefilled(model)
    decode(model, cache, steps=2)
    stats = handle.stats()
    assert stats["ema"] == "calibrate"
    chosen = [tuple(round(value, 6) for value in layer.memory.ema[0].tolist()) for layer in cache.layers[1:]]
    assert [layer["ema"] for layer in stats["layers"]] == [None, *chosen]
    del cache
    gc.collect()
    greedy(model, prompt(20), tokens=2)
    assert [layer["ema"] for layer in handle.stats()["layers"]] == [None, *chosen], "of the last cache that predicted"


def test_no_trace_unless_asked_for():
    model, handle = patched(speculate=True)
    greedy(model, prompt(100))
    assert handle.trace == []


@pytest.mark.parametrize("speculate", [True, False])
def test_a_trace_entry(speculate):
    model, handle = patched(speculate=speculate, trace=True, dense_layers=1)
    ids, mask = left_pad([prompt(140)[0], prompt(90, seed=1)[0]])
    greedy(model, ids, attention_mask=mask)
    assert [(entry.step, entry.layer) for entry in handle.trace] == [(s, n) for s in range(STEPS) for n in (1, 2)]
    for entry in handle.trace:
        lengths = torch.tensor([141 + entry.step] * 2 + [91 + entry.step] * 2)
        for blocks in entry[2:]:
            assert blocks.dtype == torch.int32
            assert blocks.shape[:2] == (2, 2)
            key = blocks.masked_fill(blocks < 0, 10**6)
            assert torch.equal(key, key.sort(dim=-1).values), "ascending, -1 last"
        sets = zip(members(entry.predicted), members(entry.selected), members(entry.missed), lengths, strict=True)
        for predicted, selected, missed, length in sets:
            newest = int(length - 1) // 16
            forced = {0, newest - 1, newest}
            assert forced <= selected
            assert len(selected) == 5
            assert not predicted & forced
            assert missed == selected - predicted - forced


def test_a_row_that_fits_its_budget_is_traced_as_unused():
    model, handle = patched(trace=True, speculate=True)
    ids, mask = left_pad([prompt(100)[0], prompt(20, seed=1)[0]])
    greedy(model, ids, attention_mask=mask, tokens=4)
    assert all(bool((blocks[1] == -1).all()) for entry in handle.trace for blocks in entry[2:])
    assert all(bool((entry.selected[0] >= 0).all()) for entry in handle.trace)
    greedy(model, prompt(20), tokens=4)
    assert all(bool((blocks == -1).all()) for entry in handle.trace[-9:] for blocks in entry[2:])
    assert len(handle.trace) == 2 * 3 * 3


def test_a_crop_takes_dropped_tokens_from_the_trace():
    model, handle = patched(trace=True)
    cache = prefilled(model)
    decode(model, cache, steps=5)
    cache.crop(-2)
    assert sorted({entry.step for entry in handle.trace}) == [0, 1, 2]
    decode(model, cache, steps=1, seed=2)
    assert [entry.step for entry in handle.trace[-3:]] == [3, 3, 3]


def test_the_report_says_that_nothing_was_selected_yet():
    model, handle = patched()
    assert "nothing was selected" not in str(handle.report())  # nor decoded
    greedy(model, prompt(20), tokens=5)
    assert "nothing was selected so far: all 4 decode steps were stock, no row being longer than the 80" in str(
        handle.report()
    )
    greedy(model, prompt(100), tokens=5)
    assert "nothing was selected" not in str(handle.report())


@pytest.mark.parametrize("strict", [False, True])
def test_a_gpu_that_runs_references_is_said(strict):
    """In the first layer, without Triton. On a CPU, or where references were asked for, nothing is said."""
    said = r"reference ops run on this GPU, right and slow: no Triton was found \(remedy: pip install triton\)"
    step = Step(0, 1, 0)
    for kernels, device, speaks in (("auto", "cpu", False), ("reference", "cuda", False), ("auto", "cuda", True)):
        with patch_model(tiny_llama(), **SPARSE, kernels=kernels, strict=strict) as handle:
            binding = handle.model.model.layers[0].self_attn.binding
            with pytest.raises(RuntimeError, match=said) if speaks and strict else contextlib.nullcontext():
                binding.check_step(step, False, torch.device(device))
            warned = handle.report().warnings
            assert bool(warned) == (speaks and not strict)
            if warned:
                assert re.search(said, warned[0])
