"""What `kernels benchmark` runs, found and checked as it does, at a small size."""

import sys
from pathlib import Path

import pytest
import torch
from kernels.cli.benchmark import discover_benchmark_classes, discover_benchmark_scripts

REPO = Path(__file__).parents[1]
(SCRIPT,) = discover_benchmark_scripts("sparse-prr", REPO)
WORKLOADS = [
    (cls, name.removeprefix("benchmark_"))
    for cls in discover_benchmark_classes(SCRIPT, REPO)
    for name in dir(cls)
    if name.startswith("benchmark_")
]


def test_every_op_of_a_step_has_a_workload():
    names = {cls.__name__ for cls, _ in WORKLOADS}
    assert names == {"QuestScores", "SelectBlocks", "GvrTopk", "Attention", "Repair"}


@pytest.mark.parametrize("cls, workload", WORKLOADS, ids=lambda part: getattr(part, "__name__", part))
def test_workload_gives_what_its_reference_gives(ops, monkeypatch, cls, workload):
    for name, value in {"TOKENS": 1024, "SLOTS": 8, "LLAMA_8B": (2, 2, 32), "GLM_4_9B": (1, 4, 32)}.items():
        monkeypatch.setattr(sys.modules[cls.__module__], name, value)
    torch.manual_seed(cls.seed)
    instance = cls()
    instance.kernel, instance.device = ops, torch.get_default_device().type
    getattr(instance, f"setup_{workload}", instance.setup)()
    getattr(instance, f"benchmark_{workload}")()
    expected = getattr(instance, f"verify_{workload}")()
    assert instance.out.shape == expected.shape
    assert torch.allclose(instance.out, expected, atol=1e-2)  # as the runner
