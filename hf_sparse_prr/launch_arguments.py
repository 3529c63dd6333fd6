"""What `python -m hf_sparse_prr.launch` may be asked, and what makes two runs the same run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_sparse_prr.config import SparseConfig

EPILOG = """\
examples:
  accelerate launch -m hf_sparse_prr.launch --model path/to/llama --prompts prompts.jsonl --out answers.jsonl
  accelerate launch --num_processes 4 -m hf_sparse_prr.launch .. --budget 2048 --speculate --dtype bfloat16
  torchrun --nproc-per-node 2 -m hf_sparse_prr.launch .. --cpu

A line of the prompts is {"prompt": "a text"} or {"messages": [{"role": "user", "content": "a text"}]}, and may have an
"id". The same command, given again, goes on where it was interrupted or killed.

exit codes: 0 done, 2 wrong argument, file or prompt, or a full disk, 3 the model cannot be loaded or is not
supported, or has no memory for a prompt, 130 stopped
"""


class UsageError(ValueError):
    """An argument is wrong; the message says what was expected."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Exits with code 2 and a line on stderr where arguments can't be read."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_sparse_prr.launch",
        description="Answer a file of prompts with sparse decoding, on every process of a launcher.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="a model folder, a .gguf file, or a name on the Hub")
    add("--prompts", required=True, type=Path, help="a JSON Lines file, one prompt a line")
    add("--out", required=True, type=Path, help="the JSON Lines file of answers; its parts lie beside it meanwhile")
    add("--tokens", type=int, default=256, help="new tokens of an answer at most (256)")
    add("--budget", type=int, help="tokens attended per KV head and step (4096)")
    add("--selector", help="how blocks are scored: quest or infllm_v2 (auto: quest)")
    add("--block-size", type=int, help="tokens in a block: 16, 32, 64 or 128")
    add("--speculate", action="store_true", help="predict, reuse, repair")
    add("--config", type=Path, help="a JSON file of SparseConfig fields; the options above come before it")
    add("--seed", type=int, help="sample as the model's generation config says, each line from a seed of its own")
    add("--bad-lines", choices=("fatal", "skip"), default="fatal", help="what a line that is no prompt does (fatal)")
    formats = ("float32", "bfloat16", "float16")
    add("--dtype", choices=formats, help="the weights' format (bfloat16 on a GPU, float32 on a CPU)")
    add("--cpu", action="store_true", help="compute on the CPU even where there are GPUs")
    asked = parser.parse_args(arguments)
    if asked.tokens < 1:
        parser.error(f"--tokens: expected at least 1, got {asked.tokens}")
    return asked


def settings_of(asked: argparse.Namespace) -> dict[str, Any]:
    """The SparseConfig fields that were asked for, checked."""
    settings: dict[str, Any] = {}
    if asked.config is not None:
        try:
            settings = json.loads(asked.config.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"--config: expected a JSON file, got {asked.config} ({error})") from error
        if not isinstance(settings, dict):
            raise UsageError(f"--config: expected an object of SparseConfig fields, got {settings!r}")
        if isinstance(settings.get("ema"), list):
            settings["ema"] = tuple(settings["ema"])
    given = dict(budget=asked.budget, selector=asked.selector, block_size=asked.block_size)
    settings |= {name: value for name, value in given.items() if value is not None}
    if asked.speculate:
        settings["speculate"] = True
    try:
        SparseConfig(**settings)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return settings


def identity_of(asked: argparse.Namespace, sha256: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What decides about the answers, so not how many processes there are: a run goes on with another's parts where all
    of it is the same."""
    model = Path(asked.model)
    return {
        "model": str(model.resolve()) if model.exists() else asked.model,
        "prompts_sha256": sha256,
        "tokens": asked.tokens,
        "settings": settings,
        "seed": asked.seed,
        "dtype": asked.dtype,
    }
