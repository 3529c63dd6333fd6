"""`hf-sparse-prr hit-rates`: what the predictor achieves on a model's own scores."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_sparse_prr.commands.arguments import check_device, one_line_refusals, tokens_of, writable
from hf_sparse_prr.commands.tables import percent, say
from hf_sparse_prr.commands.terminal import EXIT_FETCH, EXIT_MODEL, EXIT_USAGE, Bar, CommandError, one_line_errors
from hf_sparse_prr.demo.loading import LoadError
from hf_sparse_prr.demo.smollm2 import FetchError
from hf_sparse_prr.evidence.evaluate import environment
from hf_sparse_prr.evidence.hits import DELTAS, study
from hf_sparse_prr.evidence.hits_indexed import indexed_study
from hf_sparse_prr.evidence.settings import Setting, budget_of
from hf_sparse_prr.evidence.store import write
from hf_sparse_prr.evidence.subjects import load_subject
from hf_sparse_prr.indexed import indexer_of
from hf_sparse_prr.selectors import SELECTORS


def hit_rates(
    model: Annotated[str, typer.Option(help="tiny:llama and the like, smollm2, or a path.")] = "tiny:llama",
    length: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "4K",
    steps: Annotated[int, typer.Option(min=32, help="Tokens decoded.")] = 128,
    selector: Annotated[str, typer.Option(help="quest or infllm_v2.")] = "quest",
    budget: Annotated[str, typer.Option(help="Tokens, or a share of the length like 1/8.")] = "1/8",
    block_size: Annotated[int, typer.Option(help="16, 32, 64 or 128.")] = 32,
    dense_layers: Annotated[str, typer.Option(help="First layers that stay dense: auto (two) or a number.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    output: Annotated[Path, typer.Option(help="The JSON file.")] = Path("hit-rates.json"),
    trace: Annotated[Path | None, typer.Option(help="Keep the scores of all steps here (safetensors).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """Hit rates by layer, KV head, surplus and weighting: EMA against reuse of the last step, calibrated against
    default, and what a change of topic does.

    Models with an indexer: of tokens, from statistics and selections, by layer. Forced blocks are not counted.
    `last` predicts as many blocks as the EMA, the best of the last step.

    Exit codes: 0 done, 2 wrong argument, 3 no such model, 4 not fetched, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes), one_line_refusals():
        check_device(device)
        for path, option in ((output, "--output"), (trace, "--trace")):
            if path is not None:
                writable(path, option)
        tokens = tokens_of(length, "--length")
        dense = int(dense_layers) if dense_layers.isdecimal() else dense_layers
        setting = Setting("prr", selector, budget_of(budget, tokens), block_size, dense)
        if selector not in SELECTORS:
            raise CommandError(f"--selector: expected one of {', '.join(SELECTORS)}, got {selector!r}", EXIT_USAGE)
        try:
            with Bar(notes) as bar:
                subject = load_subject(model, torch.float32, device, bar)
                indexer, kept = indexer_of(subject.model.config), None
                if indexer is not None:
                    if trace is not None:
                        raise CommandError(f"--trace: expected none for {model}, whose scores aren't kept", EXIT_USAGE)
                    setting, selected = Setting("prr", "dsa"), {"selected_tokens": indexer.topk}
                    found = indexed_study(subject, tokens, steps, progress=bar)
                else:
                    found, kept = study(subject, tokens, steps, setting, progress=bar)
                    selected = {"free_blocks": kept.free}
        except LoadError as error:
            raise CommandError(error, EXIT_MODEL) from error
        except FetchError as error:
            raise CommandError(error, EXIT_FETCH) from error
        asked = {"model": model, "length": tokens, "steps": steps, **selected, **setting._asdict()}
        command = shlex.join(["hf-sparse-prr", *sys.argv[1:]])
        found = {"command": command, "environment": environment(device), **asked, **found}
        write(output, found)
        if kept is not None and trace is not None:
            kept.save(trace)
        if as_json:
            print(json.dumps(found))
        else:
            _show(Console(), found)


def _show(out: Console, found: dict[str, Any]) -> None:
    indexed = "selected_tokens" in found
    what = (
        f"{found['selected_tokens']} tokens" if indexed else f"{found['free_blocks']} blocks of {found['block_size']}"
    )
    say(out, found["command"], f"{what} selected a step")
    columns = [f"{name}\nx{delta:g}" for delta in DELTAS for name in ("EMA", "last", "EMA,\nby score")]
    title = f"{found['model']}: hit rates, {found['length']} tokens and {found['steps']}"
    table = Table("layer", *columns, title=Text(title))  # elsewhere ":llama:" is an emoji
    for layer, rates in [*found["layers"].items(), ("mean", found["mean"])]:
        cells = []
        for delta in (f"{delta:g}" for delta in DELTAS):
            ema, last = rates[delta]["ema"], rates[delta].get("last", {})
            cells += [percent(each, 1) for each in (ema["rate"], last.get("rate"), ema["weighted"])]
        table.add_row(str(layer), *cells)
    out.print(table)
    say(
        out,
        "selected again after so many steps: "
        + ", ".join(f"{lag}: {rate:.1%}" for lag, rate in found["drift"].items()),
        "windows of 8 steps, EMA, steady: " + _line(found["topic"]["steady"]),
        f"topic changes at step {found['topic']['at']}: " + _line(found["topic"]["switched"]),
    )
    if indexed:
        return
    chosen = found["mean"]["calibrated"]
    say(
        out,
        "on the last three quarters: "
        + ", ".join(f"{name} {rates['rate']:.1%} ({rates['weighted']:.1%} weighted)" for name, rates in chosen.items()),
        f"scores moved by {found['shift']['blocks']} blocks, by step: " + _line(found["shift"]["ema"]),
    )


def _line(windows: list[dict[str, float]]) -> str:
    return " ".join(f"{each['ema']:.2f}" for each in windows)
