"""The coefficients that calibration chooses are those a plain loop over the grid finds best."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from models import SPARSE, TOLERANCE, left_pad, prompt, tiny_llama

from hf_sparse_prr import SparseCache, calibration, patch_model
from hf_sparse_prr.calibration import GRID, prompt_scores
from hf_sparse_prr.config import DEFAULT_EMA
from hf_sparse_prr.kernel_loader import resolve

pytestmark = pytest.mark.compat
PRR = dict(SPARSE, speculate=True, budget=96)  # 3 blocks by score


def prefill(model, ids, mask=None, chunk=None):
    cache = SparseCache(model)
    cache.prompt_length = ids.shape[1]
    with torch.no_grad():
        for begin in range(0, ids.shape[1], chunk or ids.shape[1]):
            end = min(begin + (chunk or ids.shape[1]), ids.shape[1])
            given = None if mask is None else mask[:, :end]
            positions = None if mask is None else (given.cumsum(1) - 1).clamp(min=0)[:, begin:end]
            model(ids[:, begin:end], attention_mask=given, position_ids=positions, past_key_values=cache)
    cache.prompt_length = None
    return cache


def decode_one(model, cache, mask=None):
    batch = cache.tokens.batch
    with torch.no_grad():
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
        positions = None if mask is None else (mask.cumsum(1) - 1)[:, -1:]
        model(prompt(1, batch=batch, seed=9), attention_mask=mask, position_ids=positions, past_key_values=cache)


def best_by_loops(scores, row, k):
    """(candidate, level, trend) for one batch row, in Python floats."""
    heads = scores[0].shape[1]
    rates = {}
    for candidate in sorted(GRID):
        alpha, beta, gamma = candidate
        ratios = []
        states = {}
        for head in range(heads):
            level, trend = {}, {}
            for index, raw in enumerate(scores):
                values = {block: value for block, value in enumerate(raw[row, head].tolist()) if value == value}
                low, high = min(values.values()), max(values.values())
                seen = {block: (value - low) / (high - low) for block, value in values.items()}
                winners = sorted(values, key=lambda block: (-values[block], block))[:k]
                if index and sum(seen[block] for block in winners) > 0:
                    guess = {block: level[block] + gamma * trend[block] for block in level}
                    predicted = sorted(guess, key=lambda block: (-guess[block], block))[:k]
                    hit = sum(seen[block] for block in winners if block in predicted)
                    ratios.append(hit / sum(seen[block] for block in winners))
                for block, value in seen.items():
                    if block in level:
                        trend[block] = beta * (value - level[block]) + (1 - beta) * trend[block]
                        level[block] = alpha * value + (1 - alpha) * level[block]
                    else:
                        level[block], trend[block] = value, 0.0
            states[head] = (level, trend)
        rates[candidate] = (sum(ratios) / len(ratios), states)
    return rates


def test_the_grid_has_80_candidates():
    assert len(GRID) == len(set(GRID)) == 80 and GRID[0] == DEFAULT_EMA


def test_choice_and_state_equal_plain_loops():
    model = tiny_llama(layers=2)
    ids, mask = left_pad([prompt(200)[0], prompt(170, seed=1)[0]])
    with patch_model(model, **PRR) as handle:
        cache = prefill(model, ids, mask)
        for layer, plan in zip(cache.layers, handle.plans, strict=True):
            layer.plan = plan
            layer.summarise(handle.kernels.module, cache.tokens.on(layer.device))
        scored = [
            prompt_scores(layer, cache.tokens.valid, cache.tokens.start, handle.kernels.module, 8**-0.5)
            for layer in cache.layers
        ]
        decode_one(model, cache, mask)
        for layer, scores in zip(cache.layers, scored, strict=True):
            assert len(scores) == 32 and layer.memory.columns == list(range(168, 200))
            started = layer.memory._before[200]  # before the first decode token
            for row in range(2):
                rates = best_by_loops(scores, row, k=3)
                chosen = tuple(round(value, 4) for value in layer.memory.ema[row].tolist())
                assert rates[chosen][0] == pytest.approx(max(rate for rate, _ in rates.values()), abs=1e-6)
                for head, (level, trend) in rates[chosen][1].items():
                    for block, value in level.items():
                        assert float(started.level[row, head, block]) == pytest.approx(value, abs=1e-5)
                        assert float(started.trend[row, head, block]) == pytest.approx(trend[block], abs=1e-5)


def test_the_first_decode_token_already_has_a_prediction():
    model = tiny_llama()
    with patch_model(model, **PRR, trace=True) as handle:
        decode_one(model, prefill(model, prompt(200)))
        assert all((entry.predicted >= 0).all() for entry in handle.trace)
        assert handle.stats()["ema"] == "calibrate"
        assert all(layer["ema"] in GRID for layer in handle.stats()["layers"])


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_do_not_change_it(chunk):
    model, ids = tiny_llama(), prompt(200, batch=2)
    with patch_model(model, **PRR):
        whole, pieces = prefill(model, ids), prefill(model, ids, chunk=chunk)
        for cache in (whole, pieces):
            decode_one(model, cache)
        for one, two in zip(whole.layers, pieces.layers, strict=True):
            assert one.memory.columns == two.memory.columns
            assert torch.equal(one.memory.ema, two.memory.ema)
            levels = [layer.memory.prior.level[:, :, :13] for layer in (one, two)]  # 200 tokens are 12.5 blocks
            torch.testing.assert_close(*levels, equal_nan=True, **TOLERANCE[torch.float32])


def test_a_row_does_not_depend_on_its_neighbour():
    model = tiny_llama()
    rows = [prompt(200)[0], prompt(150, seed=1)[0]]
    ids, mask = left_pad(rows)
    with patch_model(model, **PRR):
        both = prefill(model, ids, mask)
        decode_one(model, both, mask)
        for index, row in enumerate(rows):
            alone = prefill(model, row[None])
            decode_one(model, alone)
            for one, two in zip(alone.layers, both.layers, strict=True):
                torch.testing.assert_close(one.memory.ema[0], two.memory.ema[index])


def test_short_prompts_keep_the_default_and_predict_nothing_yet():
    model = tiny_llama()
    ids = prompt(200)
    with patch_model(model, **PRR, trace=True) as handle:
        cache = SparseCache(model)
        cache.prompt_length = 7
        with torch.no_grad():
            model(ids, past_key_values=cache)
        first = next(entry for entry in handle.trace if (entry.selected >= 0).any())
        assert (first.predicted == -1).all()
        torch.testing.assert_close(cache.layers[0].memory.ema, torch.tensor([DEFAULT_EMA]))


def test_every_prompt_calibrates_anew_and_copies_carry_it():
    model = tiny_llama()
    with patch_model(model, **PRR):
        cache = prefill(model, prompt(200))
        twin = copy.deepcopy(cache)
        for held in (cache, twin):
            decode_one(model, held)
        assert torch.equal(cache.layers[1].memory.ema, twin.layers[1].memory.ema)
        cache.prompt_length, before = 241, cache.layers[1].memory.prior
        with torch.no_grad():
            model(prompt(40, seed=4), past_key_values=cache)
        assert cache.layers[1].memory.columns == list(range(209, 241))
        assert cache.layers[1].memory.prior is not before  # as the prompt ended


def test_given_coefficients_are_used_and_nothing_is_kept():
    model = tiny_llama()
    with patch_model(model, **PRR, ema=(0.6, 0.2, 0.5)) as handle:
        cache = prefill(model, prompt(200))
        decode_one(model, cache)
        assert cache.layers[0].memory.queries is None
        assert handle.stats()["ema"] == (0.6, 0.2, 0.5)


def test_the_prompts_end_calibrates_and_a_loop_of_ones_own_at_its_first_token():
    model = tiny_llama()
    with patch_model(model, **PRR):
        cache = prefill(model, prompt(200))
        assert all(layer.memory.prior is not None and layer.summarised == 200 for layer in cache.layers)
        with torch.no_grad():
            loop = SparseCache(model)
            model(prompt(200), past_key_values=loop)
            assert all(layer.memory.prior is None and layer.memory.uncalibrated for layer in loop.layers)
        for held in (cache, loop):
            decode_one(model, held)
        for one, two in zip(cache.layers, loop.layers, strict=True):
            assert torch.equal(one.memory.ema, two.memory.ema)
            assert torch.equal(one.memory.prior.level.nan_to_num(7.0), two.memory.prior.level.nan_to_num(7.0))


def test_a_prompt_that_fits_is_calibrated_when_a_token_selects():
    model = tiny_llama()
    with patch_model(model, **dict(PRR, budget=192)) as handle:
        out = model.generate(prompt(185), max_new_tokens=20, do_sample=False)
        assert out.shape[1] == 205 and all(layer["ema"] in GRID for layer in handle.stats()["layers"])


def test_hit_rates_are_the_same_in_parts(monkeypatch):
    torch.manual_seed(0)
    predicted = torch.randint(0, 40, (7, 5, 2, 3, 6), dtype=torch.int32)
    winners = torch.randint(-1, 40, (7, 2, 3, 4), dtype=torch.int32)
    importance = torch.rand(7, 2, 3, 40)
    kernels = resolve("reference").module
    whole = calibration.hit_rates(predicted, winners, importance, kernels)
    monkeypatch.setattr(calibration, "_AT_ONCE", 1)
    torch.testing.assert_close(calibration.hit_rates(predicted, winners, importance, kernels), whole)
    for candidate in range(5):
        for row in range(2):
            rates = []
            for query in range(7):
                for head in range(3):
                    chosen = [block for block in winners[query, row, head].tolist() if block >= 0]
                    weights = importance[query, row, head]
                    total = sum(float(weights[block]) for block in chosen)
                    guess = predicted[query, candidate, row, head].tolist()
                    if total > 0:
                        rates.append(sum(float(weights[block]) for block in chosen if block in guess) / total)
            assert float(whole[candidate, row]) == pytest.approx(sum(rates) / len(rates), abs=1e-6)


@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
def test_how_much_is_held_at_a_time_changes_no_bit(selector, monkeypatch):
    model, ids, found = tiny_llama(), prompt(200, batch=3), []
    for held in (calibration._HELD, 1, 5000):
        monkeypatch.setattr(calibration, "_HELD", held)
        with patch_model(model, **dict(PRR, selector=selector)):
            cache = prefill(model, ids)
            decode_one(model, cache)
        found.append([each for layer in cache.layers for each in (layer.memory.ema, *layer.memory._before[200][:3])])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one.nan_to_num(-9.0), two.nan_to_num(-9.0))


@pytest.mark.parametrize(
    "verb",
    [
        lambda cache, model: decode_one(model, cache),
        lambda cache, model: cache.reorder_cache(torch.tensor([0])),
        lambda cache, model: cache.batch_repeat_interleave(2),
        lambda cache, model: copy.deepcopy(cache),
        lambda cache, model: pickle.dumps(cache),
    ],
    ids=["forward", "reorder", "repeat", "copy", "pickle"],
)
@pytest.mark.skipif(torch.get_default_device().type == "cuda", reason="pretends to wait")
def test_what_runs_beside_the_prompt_is_waited_for(verb, monkeypatch):
    waited, model = [], tiny_llama()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=waited.append))
    with patch_model(model, **PRR):
        cache = prefill(model, prompt(200))
        for index, layer in enumerate(cache.layers):
            layer._event = index
        verb(cache, model)
        assert waited == [0, 1, 2] and all(layer._event is None for layer in cache.layers)
