"""`hf-sparse-prr doctor`: what this machine can do, and what is in the way."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_sparse_prr.commands.terminal import Bar, one_line_errors
from hf_sparse_prr.doctor import diagnose

EXIT_PROBLEMS = 1


def doctor(
    hub: Annotated[bool, typer.Option("--hub", help="Also try the kernels of the Hub, or its cache offline.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Show versions, GPUs, and which kernels would load or why not.

    Exit codes: 0 everything works, 1 something is in the way, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes):
        if hub:
            with Bar(notes) as bar:
                bar("asking the Hub", 0, None)
                found = diagnose(hub)
        else:
            found = diagnose(hub)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        out = Console()
        table = Table("what", "here", "wanted", title=f"Python {found['python']} on {found['platform']}")
        for name, package in found["packages"].items():
            table.add_row(name, package["version"] or "not installed", package["wanted"])
        for name, installed in found["optional"].items():
            table.add_row(name, installed or "not installed", "optional")
        gpus = ", ".join(f"{gpu['name']} (sm {gpu['capability']})" for gpu in found["gpus"])
        table.add_row("GPU", gpus or "none", "optional")
        out.print(table)
        for name, value in found["environment"].items():
            out.print(f"{name}={value}", soft_wrap=True, highlight=False, markup=False)
        for source in found["kernels"]:
            loads = f"{source['source']}, backend {source['backend']}" if source["loads"] else "does not load"
            out.print(f"kernels={source['asked']!r}: {loads}", soft_wrap=True)
        out.print(f"model types: {', '.join(found['model_types'])}")
        for note in found["notes"]:
            out.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
        for problem in found["problems"]:
            out.print(f"[bold red]problem:[/] {escape(problem)}", soft_wrap=True, highlight=False)
    if found["problems"]:
        raise typer.Exit(EXIT_PROBLEMS)
