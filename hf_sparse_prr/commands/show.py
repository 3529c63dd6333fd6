"""How a comparison looks: as tables for a person, as one document for a script."""

from __future__ import annotations

from textwrap import indent
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_sparse_prr.demo.compare import Comparison, Run


def as_tables(console: Console, result: Comparison, texts: list[str], passkey: str | None) -> None:
    """Print PRR's report and its hit rates by layer; last, so that it stays in sight, the answers and the times."""
    console.print(result.prr.report, markup=False, highlight=False, soft_wrap=True)
    console.print(_hit_rates(result.prr))
    for run, text in zip(result.runs, texts, strict=True):
        found = "" if passkey is None else f" [dim]({_found(text, passkey)} {passkey})[/]"
        console.print(f"\n[bold]{run.name}[/]{found}\n{escape(indent(text.strip(), '  '))}", highlight=False)
    console.print(_times(result))
    verdict = "[green]identical[/]" if result.identical else "[bold red]DIFFERENT: this is a bug, please report it[/]"
    console.print(f"serial and PRR tokens: {verdict} ({len(result.prr.ids)} tokens)")


def as_document(result: Comparison, texts: list[str], passkey: str | None) -> dict[str, Any]:
    """Return everything `as_tables` shows, and the token ids, as plain data."""
    runs = {}
    for run, text in zip(result.runs, texts, strict=True):
        runs[run.name] = {
            "text": text,
            "ids": run.ids,
            "passkey_found": None if passkey is None else passkey in text,
            "first_token_seconds": run.first_token_seconds,
            "seconds_per_token": run.seconds_per_token,
            "layers": run.layers,
            "report": run.report,
        }
    return {
        "prompt_tokens": result.prompt_tokens,
        "prefill_seconds": result.prefill_seconds,
        "passkey": passkey,
        "identical": result.identical,
        "runs": runs,
    }


def _found(text: str, passkey: str) -> str:
    return "found" if passkey in text else "did not find"


def _times(result: Comparison) -> Table:
    table = Table(title=f"prefill: {result.prompt_tokens} tokens in {result.prefill_seconds:.1f} s")
    for column in ("decoding", "tokens", "first token, ms", "each next token, ms (median)"):
        table.add_column(column, justify="left" if column == "decoding" else "right")
    for run in result.runs:
        each = "-" if run.seconds_per_token is None else f"{1000 * run.seconds_per_token:.1f}"
        table.add_row(run.name, str(len(run.ids)), f"{1000 * run.first_token_seconds:.1f}", each)
    return table


def _hit_rates(run: Run) -> Table:
    table = Table(title="PRR by layer (forced blocks not counted; - where nothing was predicted)")
    columns = {
        "layer": "layer",
        "selections": "selector_calls",
        "hit rate": "hit_rate",
        "weighted by score": "hit_rate_weighted",
        "extra": "extra_rate",
        "repaired blocks": "repaired_blocks",
    }
    for column in columns:
        table.add_column(column, justify="right")
    for layer in run.layers:
        table.add_row(*(_cell(layer[key]) for key in columns.values()))
    return table


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if isinstance(value, float) else str(value)
