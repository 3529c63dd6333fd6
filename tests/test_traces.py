"""Traces of trained weights: as they were recorded, and replayed to the rates that stats() gave."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_sparse_prr.evidence.decoding import Rows
from hf_sparse_prr.evidence.exact import episodes_of
from hf_sparse_prr.evidence.replay import replay
from hf_sparse_prr.evidence.settings import Setting
from hf_sparse_prr.evidence.subjects import load_subject
from hf_sparse_prr.evidence.traces import Trace, recorded, trace_of
from hf_sparse_prr.selectors import SELECTORS

pytestmark = pytest.mark.compat

FILES = sorted((Path(__file__).parent / "traces").glob("*.safetensors"))
EMA = (0.4, 0.1, 0.25)


def decoded(subject, setting, rows=1):
    episodes = episodes_of("copying", subject.form, 1024, rows, 0)
    ids = torch.tensor([each.ids for each in episodes])
    given = torch.zeros(1024, dtype=torch.bool)
    held = Rows(subject, ids, 1024 - 17, given)
    held.read()
    with recorded(setting.selector) as seen:
        return held.decode(setting, ema=EMA), seen


@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
def test_a_recorded_run_replays_to_its_statistics(tmp_path, selector):
    found, seen = decoded(load_subject("tiny:llama"), Setting("prr", selector, 256, 32, 1))
    trace = trace_of(seen, [1, 2, 3], free=5, task="copying")
    trace.save(tmp_path / "t.safetensors")
    held = Trace.load(tmp_path / "t.safetensors")
    assert held.about == {"task": "copying"} and list(held.scores) == [1, 2, 3] and held.free == 5
    for layer, scores in held.scores.items():
        assert scores.shape[:2] == (16, 2)
        torch.testing.assert_close(scores, trace.scores[layer], rtol=0, atol=0, equal_nan=True)
        hits, stats = replay(scores, 5, EMA), found.stats["layers"][layer]
        assert hits.rate == pytest.approx(stats["hit_rate"], abs=1e-6)
        assert hits.weighted == pytest.approx(stats["hit_rate_weighted"], abs=1e-6)


def test_recording_changes_nothing_and_ends():
    subject, setting = load_subject("tiny:llama"), Setting("prr", "quest", 256, 32, 1)
    inner = SELECTORS["quest"]
    first, _ = decoded(subject, setting)
    assert SELECTORS["quest"] is inner
    episodes = episodes_of("copying", subject.form, 1024, 1, 0)
    plain = Rows(subject, torch.tensor([episodes[0].ids]), 1024 - 17, torch.zeros(1024, dtype=torch.bool))
    plain.read()
    assert plain.decode(setting, ema=EMA).digest == first.digest


def test_several_rows_are_refused():
    with pytest.raises(ValueError, match="trace: expected one batch row, got 2"):
        decoded(load_subject("tiny:llama"), Setting("prr", "quest", 256, 32, 1), rows=2)
    assert not type(SELECTORS["quest"]).__name__.startswith("_")


@pytest.mark.parametrize("path", [path for path in FILES if "llama" in path.name], ids=lambda path: path.stem)
def test_a_real_trace_replays_to_the_statistics_of_its_run(path):
    trace = Trace.load(path)
    assert len(trace.scores) == 2
    for layer, scores in trace.scores.items():
        hits = replay(scores, trace.free, tuple(trace.about["ema"]))
        assert hits.rate == pytest.approx(trace.about["hit_rate"][str(layer)], abs=1e-6)
        assert hits.weighted == pytest.approx(trace.about["hit_rate_weighted"][str(layer)], abs=1e-6)


def test_there_are_real_traces():
    assert [path.stem for path in FILES] == ["llama-infllm_v2", "llama-quest", "smollm2-quest"]
    assert all(path.stat().st_size < 60_000 for path in FILES)


def test_scores_of_half_a_step_are_refused():
    with pytest.raises(ValueError, match="trace: expected a multiple of 2 scores, one a layer and step, got 3"):
        trace_of([torch.zeros(2, 4)] * 3, [0, 1], 1)


def test_another_file_is_refused(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"trace: expected scores and the metadata of Trace.save, got \['weight'\]"):
        Trace.load(tmp_path / "w.safetensors")


def test_blocks_that_come_later_are_nan_before():
    trace = trace_of([torch.zeros(1, 3), torch.zeros(1, 4)], [0], 1)
    assert trace.scores[0].isnan().tolist() == [[[False, False, False, True]], [[False] * 4]]
    assert len(trace.part(1).scores[0]) == 1
