"""`hf-sparse-prr bench`: what a decode step takes, against stock, in one run."""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.bench import bench_layer
from hf_sparse_prr.commands.terminal import EXIT_USAGE, CommandError, one_line_errors

bench = typer.Typer(help="Time decoding against stock, in one run.", no_args_is_help=True)


@bench.callback()
def root() -> None:
    """Time decoding against stock, in one run."""


@bench.command()
def layer(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 7168,
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 1024,
    heads: Annotated[int, typer.Option(min=1)] = 9,
    kv_heads: Annotated[int, typer.Option(min=1)] = 3,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each setting gets.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """One attention layer's decode step: stock on a DynamicCache, serial sparse, PRR. Default: SmolLM2-135M's layer."""
    with one_line_errors(Console(stderr=True)):
        if dtype not in ("float32", "bfloat16", "float16"):
            raise CommandError(f"--dtype: expected float32, bfloat16 or float16, got {dtype!r}", EXIT_USAGE)
        try:
            found = bench_layer(
                tokens, budget, "auto", heads, kv_heads, head_dim, getattr(torch, dtype), device, rounds
            )
        except ValueError as error:
            raise CommandError(error, EXIT_USAGE) from error
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(
        "setting", "ms a step", "ratio to stock", "K/V and summary bytes",
        title=f"{found['device']}, {found['threads']} threads, {found['dtype']}, {found['shape']}, budget {budget}",
    )  # fmt: skip
    for name, ms in found["ms"].items():
        table.add_row(
            name, f"{ms:.3f}", f"{found['ratio_to_stock'][name]:.2f}", f"{found['kv_bytes_per_step'][name]:,.0f}"
        )
    Console().print(table)
