"""Several grids as one evaluation: what everything is, and that parts stay apart."""

from dataclasses import replace

import pytest

from hf_sparse_prr.evidence.evaluate import Grid, differing
from hf_sparse_prr.evidence.parts import evaluate_parts, files_of, full
from hf_sparse_prr.evidence.tasks import TASKS
from hf_sparse_prr.evidence.texts import TEXTS

SMALL = Grid(models=("tiny:llama",), tasks=("needle_single",), lengths=(512,), episodes=2, budgets=("1/4",),
             block_sizes=(16,))  # fmt: skip
PARTS = {"one": SMALL, "all": replace(SMALL, dense_layers=0)}


def test_everything_of_tiny_models_covers_each_choice():
    parts = full(("tiny:llama", "tiny:deepseek_v32"), "cpu", "float32")
    assert set(parts) == {"4K", "16K", "depth", "all-layers"}
    for part, length, episodes in (("4K", 4096, 64), ("16K", 16384, 16)):
        grid = parts[part]
        assert grid.tasks == tuple(TASKS) and grid.lengths == (length,) and grid.episodes == episodes
        assert grid.selectors == ("quest", "infllm_v2") and grid.modes == ("dense", "forced", "serial", "prr")
        assert set(grid.budgets) == {"1/16", "1/8", "1/4"} and set(grid.block_sizes) == {16, 32, 64}
    assert len(parts["depth"].depths) == 5 and len(parts["depth"].lengths) == 3
    assert parts["all-layers"].dense_layers == 0
    assert parts["16K"].models == parts["depth"].models == ("tiny:llama", "tiny:deepseek_v32")
    assert parts["all-layers"].models == ("tiny:llama",)
    assert set(full(("tiny:deepseek_v32",))) == {"4K", "16K", "depth"}


def test_everything_of_other_models_is_the_passkey_and_texts():
    parts = full(("tiny:llama", "smollm2"), "cuda", "bfloat16")
    assert parts["passkey"].models == parts["texts"].models == ("smollm2",)
    assert len(parts["passkey"].depths) == 5 and parts["passkey"].budgets == ("1024",)
    assert parts["texts"].texts == tuple(TEXTS) and parts["texts"].tasks == ()
    assert {(grid.device, grid.dtype) for grid in parts.values()} == {("cuda", "bfloat16")}
    assert "smollm2" not in parts["4K"].models and set(full(("smollm2",))) == {"passkey", "texts"}


def test_every_file_is_known_beforehand(tmp_path):
    wanted = files_of(PARTS, tmp_path)
    assert not any(path.exists() for path in wanted)
    cells = evaluate_parts(PARTS, tmp_path)["cells"]
    assert set(wanted) == set(tmp_path.glob("*/cells/*.json")) and len(wanted) == len(cells) == 6
    assert [cell["part"] for cell in cells] == ["one"] * 3 + ["all"] * 3
    assert differing(cells) == (2, [])
    changed = [{**cell, "digest": ["0"]} if (cell["part"], cell["mode"]) == ("all", "prr") else cell for cell in cells]
    assert differing(changed) == (2, [changed[5]])  # its twin is of the same part


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(lengths=(65536,)), "length: expected at most 32768 for tiny:llama, got 65536"),
        (dict(budgets=("16",)), "budget: expected None or an int >= 64"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_runs(tmp_path, wrong, words):
    with pytest.raises(ValueError, match=words):
        files_of({"one": SMALL, "two": replace(SMALL, **wrong)}, tmp_path)
    assert not list(tmp_path.glob("*/cells"))
