"""The segment's benchmark: what it reports, and that it refuses to time what is wrong."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_sparse_prr import kernel_loader
from hf_sparse_prr.bench import bench_layer, layer_config
from hf_sparse_prr.bench_exact import ExactnessError, best_blocks
from hf_sparse_prr.bench_segment import COMPARED, STAGES, bench_segment

pytestmark = pytest.mark.compat
SMALL = dict(contexts=[1024], budget=512, rounds=1, steps=3)


@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
def test_reports_times_hits_and_bytes(selector: str) -> None:
    found = json.loads(json.dumps(bench_segment("smollm2", selector=selector, **SMALL)))
    size = {"quest": 32, "infllm_v2": 64}[selector]
    assert found["shape"] == {"name": "smollm2", "heads": 9, "kv_heads": 3, "head_dim": 64, "batch": 1}
    assert (found["selector"], found["budget"], found["block_size"]) == (selector, 512, size)
    assert found["blocks"] == {"selected": 512 // size, "by_score": 512 // size - 3, "predicted": 512 // size - 3}
    assert found["kernels"]["backend"] == "reference" and found["kernels"]["fallback"] is None
    (each,) = found["contexts"]
    assert each["context"] == 1024
    assert each["exact"]["prr_equals_serial"] == "bitwise"
    assert each["exact"]["steps"] == 7
    assert 0 < each["exact"]["output_error"] < 2e-5
    assert all(each["ms"][name] > 0 for name in (*COMPARED, "append"))
    assert all(each["stages_ms"][name] > 0 for name in STAGES)
    assert each["ratio_to_dense"]["serial"] == each["ms"]["serial"] / each["ms"]["dense"]
    assert each["ratio_to_best_dense"]["serial"] >= each["ratio_to_dense"]["serial"]
    assert 0.3 < each["hit_rate"] < 1
    assert each["extra_rate"] == pytest.approx(1 - each["hit_rate"])  # as many are predicted as are selected
    assert each["floor_share"] is None  # no GPU whose bandwidth is known


def test_bytes_are_those_of_blocks_and_summaries() -> None:
    moved = bench_segment("smollm2", **SMALL)["contexts"][0]["bytes_per_step"]
    token = 3 * 2 * 64 * 4  # KV heads, key and value, fp32
    assert moved["dense"]["total"] == token * (1024 + 6)  # steps 5, 6 and 7 of a turn are timed
    assert moved["serial"]["blocks"] == token * 512
    assert moved["serial"]["summaries"] == token * (1024 // 32 + 1 - 3)  # two vectors a block that isn't forced
    assert moved["prr"]["summaries"] == moved["serial"]["summaries"]
    assert moved["serial"]["blocks"] < moved["prr"]["blocks"] < 2 * moved["serial"]["blocks"]
    assert moved["prr"]["total"] == moved["prr"]["blocks"] + moved["prr"]["summaries"]


def test_equal_queries_hit_and_unrelated_ones_miss() -> None:
    rates = [
        bench_segment("smollm2", correlation=value, **SMALL)["contexts"][0]["hit_rate"] for value in (0.0, 0.9, 1.0)
    ]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] > 0.9  # a new block may come in


def test_batch_block_size_and_half_precision() -> None:
    found = bench_segment(
        "glm-4-9b", [1024, 1100], "infllm_v2", 512, 16, 2, torch.bfloat16, rounds=1, steps=2
    )  # fmt: skip
    assert found["dtype"] == "bfloat16" and found["shape"]["batch"] == 2
    assert [each["context"] for each in found["contexts"]] == [1024, 1100]
    assert found["contexts"][0]["bytes_per_step"]["serial"]["blocks"] == 2 * 2 * 2 * 128 * 2 * 512


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(shape="gpt2"), r"shape: expected one of glm-4-9b, .*smollm2, got 'gpt2'"),
        (dict(selector="best"), r"selector: expected one of 'auto', 'quest', 'infllm_v2', got 'best'"),
        (dict(block_size=17), r"block_size: expected one of 'auto', 16, .*, got 17"),
        (dict(budget=64), r"budget: expected None or an int >= 128 .*, got 64"),
        (dict(contexts=[1000]), r"context: expected 1024 \.\. 1048576 tokens, .*, got 1000"),
        (dict(contexts=[2**20 + 1]), r"context: expected 1024 \.\. 1048576 tokens, .*, got 1048577"),
        (dict(budget=2048), r"context: expected .* not fewer than the 2048 that budget=2048 attends to, got 1024"),
        (dict(correlation=1.5), r"correlation: expected a number from 0 to 1, got 1\.5"),
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
        ("select_blocks", _worse_blocks, r"selection of step 0: expected the forced blocks and the best .*, got \d+ others"),
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
