"""Make the tiny models: train one, measure it as it is saved, in bfloat16, and write weights, card and log."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_sparse_prr.demo.progress import Progress as Shown
from hf_sparse_prr.demo.progress import silent
from hf_sparse_prr.evidence.exact import episodes_of, forced_accuracy
from hf_sparse_prr.evidence.indexer import training
from hf_sparse_prr.evidence.mixture import WEIGHTS
from hf_sparse_prr.evidence.start import look_back
from hf_sparse_prr.evidence.tasks import TASKS, Bytes
from hf_sparse_prr.evidence.tiny import tiny_model
from hf_sparse_prr.evidence.training import Plan, Progress, Trainer

MEASURED = (1024, 4096, 16384)  # lengths, bytes
_TOGETHER = 65536  # bytes a forward
_SEED = 12345  # of the episodes measured; training's are drawn from other streams


def make(
    family: str,
    folder: Path,
    minutes: float,
    device: torch.device,
    plan: Plan,
    tell: Callable[[Progress], None],
    measured: tuple[int, ...] = MEASURED,
    episodes: int = 64,
    overrides: dict[str, Any] | None = None,
    measuring: Shown = silent,
) -> dict[str, Any]:
    """Train for at most `minutes` and write `folder`: model.safetensors, config.json, README.md, training.json.

    Returns what training.json holds. `overrides` of the configuration are for tests.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for each length
    model: Any = tiny_model(family, plan.seed, **(overrides or {}))
    look_back(model)
    model.to(device)
    progress = Trainer(model, plan, minutes, tell).run()
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    # What is measured is what anyone can load: the model here has RoPE's frequencies in bfloat16 as well by now, and
    # with those qwen3 finds nothing in 16K
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.to(device)
    found = {
        "family": family,
        "parameters": sum(each.numel() for each in model.parameters()),
        "plan": asdict(plan),
        "steps": progress.steps,
        "seconds": progress.log[-1]["seconds"] if progress.log else 0.0,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "episodes": episodes,
        "accuracy": measure(model, device, measured, episodes, measuring),
        "log": progress.log,
    }
    (folder / "training.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "README.md").write_text(card(found))
    return found


def measure(
    model: Any, device: torch.device, lengths: tuple[int, ...], episodes: int, measuring: Shown = silent
) -> dict[str, dict[str, float]]:
    """Accuracy by length and task: exact answers, with the tasks' default counts, needles anywhere. `episodes` each, an
    eighth of them over 8K. Models with an indexer read what it selects.
    """
    model.eval()
    indexed = hasattr(model.config, "index_topk")
    given = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device) if indexed else None
    with training(model) if indexed else nullcontext() as state:
        if state is not None:
            state.phase = "sparse"

        def logits(ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                return model(input_ids=ids, attention_mask=given, use_cache=False).logits

        found: dict[str, dict[str, float]] = {str(length): {} for length in lengths}
        for length in lengths:
            count = episodes if length <= 8192 else -(-episodes // 8)
            for done, task in enumerate(TASKS):
                measuring(f"measuring {length}", done, len(TASKS))
                asked = episodes_of(task, Bytes(), length, count, _SEED)
                rows = max(1, _TOGETHER // length)
                found[str(length)][task] = forced_accuracy(logits, asked, device, rows)
        return found


def card(found: dict[str, Any]) -> str:
    """The model's card."""
    lengths = list(found["accuracy"])
    rows = "\n".join(
        f"| {task} | " + " | ".join(f"{found['accuracy'][length][task]:.1%}" for length in lengths) + " |"
        for task in TASKS
    )
    share = ", ".join(f"{task} {weight / sum(WEIGHTS.values()):.0%}" for task, weight in WEIGHTS.items())
    return f"""---
license: apache-2.0
library_name: transformers
---

# Tiny {found["family"]}: {found["parameters"] / 1e6:.1f}M parameters, bytes, trained to retrieve

Made by `hf-sparse-prr train-tiny --family {found["family"]} --seed {found["plan"]["seed"]}` to test sparse attention on
trained weights. It can do the tasks below and nothing else. A token is a byte.

**Data.** Generated by `hf_sparse_prr.evidence.tasks`, nothing else: {share}. No text of others was used.

**First weights.** Random, but for queries and keys of the first layer: head i starts out looking at the token i + 1
before (`hf_sparse_prr/evidence/start.py`). All weights are trained on from there.

**Training.** {found["steps"]} steps of {found["plan"]["tokens"]} bytes, lengths up to {max(found["plan"]["lengths"])},
AdamW, {found["seconds"]:.0f} seconds on {found["machine"]} (torch {found["torch"]}). The log is in `training.json`.
How far it comes depends on the machine: a length is left when it is answered or its share of the time is over. Seeds
fix the data and the first weights; on another machine results differ in their last digits, and so in everything.

**Accuracy** of the whole answer, {found["episodes"]} episodes each (over 8K an eighth of them){_how(found)}:

| task | {" | ".join(f"{int(length) // 1024}K" if int(length) >= 1024 else length for length in lengths)} |
|---|{"---|" * len(lengths)}
{rows}

Weights are in bfloat16. Licence: Apache-2.0.
"""


def _how(found: dict[str, Any]) -> str:
    return ", reading what the indexer selects" if "dsa" in found["family"] or "deepseek" in found["family"] else ""
