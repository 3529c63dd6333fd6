"""The segment's benchmark: what it reports, and that it refuses to time what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_sparse_prr import bench_segment as segment
from hf_sparse_prr import kernel_loader
from hf_sparse_prr.bench import BANDWIDTH, bandwidth_of, bench_layer, layer_config
from hf_sparse_prr.bench_exact import ExactnessError, best_blocks
from hf_sparse_prr.bench_problem import COLD, cold_layers, predicted_at
from hf_sparse_prr.bench_segment import bench_segment, check_arguments
from hf_sparse_prr.bench_stages import Work
from hf_sparse_prr.bench_time import Taken, in_turns, spread_of
from hf_sparse_prr.shapes import shape

pytestmark = pytest.mark.compat
SMALL = dict(contexts=[1024], budget=512, rounds=1, steps=3)
COMPARED = ("dense", "dense_grouped", "serial")
STAGES = ("score", "select", "partials", "merge", "attend", "predict", "tally", "append")


@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
def test_reports_times_hits_and_bytes(selector: str) -> None:
    found = json.loads(json.dumps(bench_segment("smollm2", selector=selector, **SMALL)))
    size = {"quest": 32, "infllm_v2": 64}[selector]
    assert found["shape"] == {"name": "smollm2", "heads": 9, "kv_heads": 3, "head_dim": 64, "batch": 1}
    assert (found["selector"], found["budget"], found["block_size"]) == (selector, 512, size)
    assert found["blocks"] == {"selected": 512 // size, "by_score": 512 // size - 3, "predicted": 512 // size - 3}
    assert found["kernels"]["backend"] == "reference" and found["kernels"]["fallback"] is None
    assert found["torch"] == torch.__version__ and "triton" in found
    assert (found["timed_by"], found["bandwidth"]) == ("clock", None)
    (each,) = found["contexts"]
    assert (each["context"], each["layers"]) == (1024, 1)
    assert each["exact"]["prr_equals_serial"] == "bitwise" and each["exact"]["graph_equals_eager"] is None
    assert each["exact"]["steps"] == 3
    assert 0 < each["exact"]["output_error"] < 2e-5
    settings, stages = each["settings"], each["stages"]
    assert list(settings) == [*COMPARED, "prr natural"]
    assert set(stages) == {*STAGES, "repair natural"}
    for row in (*settings.values(), *stages.values()):
        assert row["us"] > 0 and row["spread"] >= 0
        assert row["floor_us"] is row["floor_share"] is None  # no GPU whose bandwidth is known
    serial = settings["serial"]
    assert serial["to_dense"] == serial["us"] / settings["dense"]["us"]
    assert serial["to_best_dense"] >= serial["to_dense"] and serial["to_serial"] == 1
    assert serial["gb_per_s"] == pytest.approx(serial["moved_bytes"] / serial["us"] / 1e3)
    assert 0.2 < settings["prr natural"]["hit_rate"] < 1
    natural = each["natural"]
    assert 0.2 < natural["hit_rate"] < 1
    assert natural["extra_rate"] == pytest.approx(1 - natural["hit_rate"])  # as many are predicted as are selected


def test_bytes_are_those_of_blocks_and_summaries() -> None:
    each = bench_segment("smollm2", **SMALL, hit_rates=[1, 0.5, 0])["contexts"][0]
    token = 3 * 2 * 64 * 4  # KV heads, key and value, fp32
    blocks, summaries = token * 512, token * (1024 // 32 + 1 - 3)  # two vectors a block that isn't forced
    assert each["bytes"] == {"dense": token * (1024 + 3), "blocks": blocks, "summaries": summaries}
    settings, stages = each["settings"], each["stages"]
    assert settings["dense"]["moved_bytes"] == settings["dense_grouped"]["floor_bytes"] == token * (1024 + 3)
    for name, wrong in (("serial", 0), ("prr 1", 0), ("prr 0.5", 7), ("prr 0", 13)):
        assert settings[name]["floor_bytes"] == blocks + summaries
        assert settings[name]["moved_bytes"] == blocks + summaries + wrong * 32 * token
        if name != "serial":
            assert stages[name.replace("prr", "repair")]["floor_bytes"] == wrong * 32 * token
    assert stages["score"]["floor_bytes"] == summaries
    assert stages["partials"]["floor_bytes"] == stages["attend"]["floor_bytes"] == blocks
    assert stages["merge"]["floor_bytes"] is None
    assert each["serial_bytes_of_all_layers"] == blocks + summaries


def test_hit_rates_are_those_asked_for_in_every_layer() -> None:
    found = bench_segment("smollm2", **SMALL, hit_rates=[1, 0.95, 0.3, 0, None], layers=3)
    (each,) = found["contexts"]
    rates = {name: row["hit_rate"] for name, row in each["settings"].items()}
    free = 512 // 32 - 3
    assert rates["prr 1"] == 1 and rates["prr 0"] == 0
    assert rates["prr 0.95"] == pytest.approx(round(0.95 * free) / free)
    assert rates["prr 0.3"] == pytest.approx(round(0.3 * free) / free)
    assert 0.2 < rates["prr natural"] < 1 and rates["serial"] is None
    assert each["layers"] == 3 and each["serial_bytes_of_all_layers"] == 3 * each["settings"]["serial"]["moved_bytes"]


def test_wrong_predictions_can_be_selected_and_are_always_the_same() -> None:
    scores = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    scores[:, :, :2] = scores[:, :, 36:] = float("nan")
    free = best_blocks(scores, 10).to(torch.int32)
    for rate, hits in ((1.0, 10), (0.95, 10), (0.94, 9), (0.0, 0)):
        guessed = predicted_at(rate, free, scores, seed=5)
        assert guessed.dtype == torch.int32 and guessed.shape == free.shape
        assert torch.equal(guessed, predicted_at(rate, free, scores, seed=5))
        assert (guessed.diff(dim=2) > 0).all()
        assert not scores.gather(2, guessed.long()).isnan().any()
        assert ((guessed[..., None] == free[:, :, None]).any(dim=3).sum(dim=2) == hits).all()
    assert not torch.equal(predicted_at(0.5, free, scores, seed=5), predicted_at(0.5, free, scores, seed=6))


def test_where_nothing_wrong_is_left_nothing_is_predicted() -> None:
    scores = torch.tensor([[[float("nan"), 1.0, 2.0, 3.0, 4.0, 0.0]]])
    free = torch.tensor([[[2, 3, 4]]], dtype=torch.int32)
    assert predicted_at(0.0, free, scores, seed=0).tolist() == [[[1, 5, -1]]]
    assert predicted_at(1.0, free, scores, seed=0).tolist() == [[[2, 3, 4]]]


def test_equal_queries_hit_and_unrelated_ones_miss() -> None:
    found = [bench_segment("smollm2", correlation=value, **SMALL)["contexts"][0] for value in (0.0, 0.9, 1.0)]
    rates = [each["natural"]["hit_rate"] for each in found]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] > 0.9  # a new block may come in
    assert found[2]["settings"]["prr natural"]["hit_rate"] > 0.9


def test_batch_block_size_and_half_precision() -> None:
    found = bench_segment(
        "glm-4-9b", [1024, 1100], "infllm_v2", 512, 16, 2, torch.bfloat16, rounds=1, steps=2
    )  # fmt: skip
    assert found["dtype"] == "bfloat16" and found["shape"]["batch"] == 2
    assert [each["context"] for each in found["contexts"]] == [1024, 1100]
    assert found["contexts"][0]["bytes"]["blocks"] == 2 * 2 * 2 * 128 * 2 * 512


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(shape="gpt2"), r"shape: expected one of glm-4-9b, .*smollm2, got 'gpt2'"),
        (dict(selector="best"), r"selector: expected one of 'auto', 'quest', 'infllm_v2', 'dsa', got 'best'"),
        (dict(block_size=17), r"block_size: expected one of 'auto', 16, .*, got 17"),
        (dict(budget=64), r"budget: expected None or an int >= 128 .*, got 64"),
        (dict(contexts=[1000]), r"context: expected 1024 \.\. 1048576 tokens, .*, got 1000"),
        (dict(contexts=[2**20 + 1]), r"context: expected 1024 \.\. 1048576 tokens, .*, got 1048577"),
        (dict(budget=2048), r"context: expected .* not fewer than the 2048 that budget=2048 attends to, got 1024"),
        (dict(correlation=1.5), r"correlation: expected a number from 0 to 1, got 1\.5"),
        (dict(hit_rates=[0.5, 1.5]), r"hit_rate: expected a number from 0 to 1, or natural, got 1\.5"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_segment(**{"shape": "smollm2", **SMALL, **changes})


def _worse_blocks(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda scores, forced, k, **kwargs: real(-scores, forced, k, **kwargs)


def _louder(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: real(*args, **kwargs) * 1.01


def _ignores_old_partials(real: Callable[..., Any]) -> Callable[..., Any]:
    """Right within rounding where something was predicted, and not bit for bit."""

    def repair(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = real(*args, **kwargs)
        return output * (1 + 1e-6) if args[7].shape[2] else output

    return repair


@pytest.mark.parametrize(
    "op, lie, message",
    [
        ("select_blocks", _worse_blocks, r"selection of step 0: expected the forced blocks and .*, got \d+ others"),
        ("quest_scores", _louder, r"scores of step 0: expected within 2e-05 of its oracle, got 0\.01"),
        ("repair_merge", _louder, r"output of step 0: expected within 2e-05 of its oracle, got 0\.01"),
        ("repair_merge", _ignores_old_partials, r"PRR's output of step \d: expected the bits of serial .*, got a diff"),
    ],
)
def test_a_kernel_that_lies_is_never_timed(
    op: str, lie: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = kernel_loader.resolve("auto").module
    monkeypatch.setattr(module, op, lie(getattr(module, op)))
    stages = []
    with pytest.raises(ExactnessError, match=message):
        bench_segment("smollm2", **SMALL, progress=lambda stage, *_: stages.append(stage))
    assert stages == ["1024 tokens: exactness"]


def _ignores_hits(real: Callable[..., Any]) -> Callable[..., Any]:
    """Right unless everything was predicted, which is never so while tokens are decoded."""

    def repair(*args: Any, **kwargs: Any) -> torch.Tensor:
        output, selected, predicted = real(*args, **kwargs), args[5], args[7]
        return output * (1 + 1e-6) if predicted.shape[2] and torch.equal(selected, predicted.sort().values) else output

    return repair


def test_a_kernel_that_lies_at_one_hit_rate_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernel_loader.resolve("auto").module
    monkeypatch.setattr(module, "repair_merge", _ignores_hits(module.repair_merge))
    bench_segment("smollm2", **SMALL, hit_rates=[0.5])
    with pytest.raises(ExactnessError, match="the output of prr 1 in layer 0: expected the bits of serial decoding"):
        bench_segment("smollm2", **SMALL, hit_rates=[0.5, 1])


class _Replayed:
    """In place of `Captured`, which needs a GPU: the results of calls, changed by `error`."""

    error = 0.0

    def __init__(self, call: Callable[[int], torch.Tensor], layers: int, device: torch.device) -> None:
        self._call, self._layers = call, layers
        self.results = [torch.full((2,), float("nan")) for _ in range(2 * layers)]

    def replay(self) -> None:
        for step, result in enumerate(self.results):
            result.copy_(self._call(step % self._layers) + self.error)

    def timed(self, replays: int) -> Taken:
        return Taken(7.0)


def test_replays_are_compared_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "Captured", _Replayed)
    settings = {name: Work(lambda layer: torch.full((2,), float(layer))) for name in ("dense", "serial", "prr 1")}
    stages = {"score": settings["serial"]}
    at = (3, torch.device("cpu"), 30, lambda *_: None)
    assert segment._replayed(settings, stages, *at) == dict.fromkeys(("dense", "serial", "prr 1", "score"), Taken(7.0))
    monkeypatch.setattr(_Replayed, "error", 1e-3)
    with pytest.raises(ExactnessError, match="serial in a CUDA graph: expected the bits of the same without one"):
        segment._replayed(settings, stages, *at)


def test_kernels_that_do_not_load_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_loader, "_from_hub", lambda *_: kernel_loader._from_folder(Path("/nowhere"), "hub"))
    for call in (
        lambda: bench_segment("smollm2", **SMALL, kernels="a/b"),
        lambda: bench_layer(600, 256, kernels="a/b"),
    ):
        with pytest.raises(kernel_loader.KernelError, match="kernels from a/b could not be loaded"):
            call()


def test_floor_and_share_follow_from_bytes_and_bandwidth() -> None:
    row = segment._figures(Taken(20.0, 0.1), Work(lambda layer: None, 24e6, 48e6, 0.5), 4.8e12)
    assert (row["us"], row["spread"]) == (20.0, 0.1)
    assert (row["floor_us"], row["floor_share"], row["gb_per_s"]) == (5.0, 0.25, 2400.0)
    row = segment._figures(Taken(20.0), Work(lambda layer: None), 4.8e12)
    assert row["floor_us"] is row["floor_share"] is row["gb_per_s"] is None


def test_a_spread_is_the_middle_half_of_all_calls_over_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread_of([1.0, 2.0, 3.0]) is None
    assert spread_of([2.0] * 9) == 0
    assert spread_of([1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(2 / 3)
    seconds = iter(range(1000))
    monkeypatch.setattr("hf_sparse_prr.bench_time.time.perf_counter", lambda: float(next(seconds)))
    assert in_turns({"it": lambda layer: None}, 1, torch.device("cpu"), 2, lambda *_: None) == {"it": Taken(1e6, 0.0)}


def test_layers_of_a_gpu_exceed_its_l2_and_fit_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, l2 = torch.device("cuda"), 60 * 2**20
    properties = type("Properties", (), {"L2_cache_size": l2})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140 * 2**30, 141 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert bandwidth_of(gpu) == BANDWIDTH["NVIDIA H200"] == 4.8e12 and bandwidth_of(torch.device("cpu")) is None
    for name, context in (("llama-3.1-8b", 2**17), ("glm-4-9b", 2**14), ("glm-4-9b", 2**19)):
        sizes, plans = check_arguments(name, [context], "quest", 4096, 64, 0.9)
        read = sizes.kv_heads * (4096 * 512 + context // 64 * 512)
        layers = cold_layers(sizes, context, plans["prr"], 1, torch.bfloat16, gpu)
        assert COLD * l2 <= layers * read < COLD * l2 + read or layers == 64
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 2**30, 141 * 2**30))
    assert cold_layers(sizes, 2**19, plans["prr"], 1, torch.bfloat16, gpu) == 2  # of 0.55 GB each
    assert cold_layers(shape("smollm2"), 2**14, plans["prr"], 1, torch.float32, torch.device("cpu")) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_times_are_those_of_graphs() -> None:
    found = bench_segment("smollm2", [4096], "quest", 1024, 64, dtype=torch.bfloat16, device="cuda", rounds=2, steps=2)
    (each,) = found["contexts"]
    assert found["timed_by"] == "CUDA graph" and each["exact"]["graph_equals_eager"] == "bitwise"
    assert list(each["settings"]) == [*COMPARED, "prr 1", "prr 0.95", "prr 0"]
    assert each["layers"] > 1 and all(0 < row["us"] < 1000 for row in each["settings"].values())


def test_best_blocks_takes_the_smallest_index_of_a_tie_and_no_nan() -> None:
    scores = torch.tensor([[[float("nan"), 1.0, 2.0, 2.0, 2.0, -1.0]]])
    assert best_blocks(scores, 2).tolist() == [[[2, 3]]]
    assert best_blocks(scores, 4).tolist() == [[[1, 2, 3, 4]]]


@pytest.mark.parametrize("name, selector", [("smollm2", "quest"), ("qwen3-14b", "infllm_v2")])
def test_layer_of_a_shape(name: str, selector: str) -> None:
    heads = {} if name == "smollm2" else dict(heads=8, kv_heads=2, head_dim=16)  # of a size for a test
    found = bench_layer(600, 256, rounds=1, steps=5, shape=name, selector=selector, **heads)
    assert found["shape"]["name"] == name and found["selector"] == selector
    assert found["shape"]["heads"] == (9 if name == "smollm2" else 8)
    assert set(found["ms"]) == {"stock", "serial", "prr"}
    assert found["kv_bytes_per_step"]["serial"] < found["kv_bytes_per_step"]["stock"]
    heads, kv_heads, dim, hidden = (9, 3, 64, 576) if name == "smollm2" else (8, 2, 16, 128)
    assert found["weight_bytes"] >= 4 * 2 * dim * hidden * (heads + kv_heads)  # and norms, if there are any
    assert found["floor_share"] is None


def test_layer_config_is_the_shapes_unless_heads_are_given() -> None:
    config = layer_config("glm-z1-9b", 3, 70000, None, None, None)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("glm4", 3, 4096)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 2, 128)
    assert (config.vocab_size, config.intermediate_size, config.max_position_embeddings) == (64, 64, 70000)
    config = layer_config("glm-z1-9b", 3, 1, 8, 4, 64)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 64)
    assert config.hidden_size == 512
    with pytest.raises(ValueError, match="heads: expected a multiple of kv_heads=4, got 6"):
        layer_config("smollm2", 3, 1, 6, 4, None)
    with pytest.raises(ValueError, match="head_dim: expected an even number, got 63"):
        layer_config("smollm2", 3, 1, None, None, 63)
