"""`hf-sparse-prr bench speculation`: where speculation pays, and what speculate="auto" makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.bench_speculation import CONTEXTS, HITS, bench_speculation, table_of, verdict
from hf_sparse_prr.commands.arguments import (
    check_device,
    dtype_of,
    folder_at,
    numbers_of,
    one_line_refusals,
    positives_of,
    shares_of,
    words_of,
    writable,
)
from hf_sparse_prr.commands.tables import percent, say
from hf_sparse_prr.commands.terminal import EXIT_USAGE, Bar, CommandError, one_line_errors
from hf_sparse_prr.profile import parse, read
from hf_sparse_prr.shapes import SHAPES

_LIST = "repeatable, or with commas"


def speculation(
    shape: Annotated[
        list[str] | None,
        typer.Option(help=f"Whose layers: {', '.join(SHAPES)}; {_LIST}.", show_default="llama-3.1-8b,glm-4-9b"),
    ] = None,
    selector: Annotated[
        list[str] | None, typer.Option(help=f"quest or infllm_v2; {_LIST}.", show_default="both")
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(help=f"Tokens in the cache; {_LIST}.", show_default="16K to 512K by powers of 2")
    ] = None,
    hits: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Shares of the selected blocks that are predicted; {_LIST}.",
            show_default=",".join(f"{hit:g}" for hit in HITS),
        ),
    ] = None,
    spec_ratio: Annotated[
        list[str] | None, typer.Option(help=f"Predicted blocks per selected one; {_LIST}.", show_default="1")
    ] = None,
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 4096,
    block_size: Annotated[str, typer.Option(help="Tokens in a block: 16, 32, 64, 128 or auto.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Batch rows.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="By default float32, on a GPU bfloat16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cuda",
    kernels: Annotated[str, typer.Option(help="auto, hub, reference, a repo id or the path of one.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each call, on a GPU replays of its graph.")] = 12,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers in turn.", show_default="so many that K/V come from memory")
    ] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="Measure nothing: by these profiles.", show_default="none")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="A folder for the profiles that are measured.", show_default="none")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """Serial and speculative steps of a layer by hit rate, and what speculate="auto" does by them and costs.

    Each shape and selector is measured as `hf-sparse-prr profile` does it. The runtime then plays 2048 tokens at each
    hit rate. The last line of stdout is the whole result as JSON, profiles included.

    Exit codes: 0 done, 1 a result is wrong (a bug), 2 wrong argument, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes), one_line_refusals():
        rates = shares_of("--hits", hits) or list(HITS)
        if not all(0 <= rate <= 1 for rate in rates):
            raise CommandError(f"--hits: expected numbers from 0 to 1, got {','.join(map(str, rates))}", EXIT_USAGE)
        if output is not None:
            folder_at(output)  # here: before minutes of work
        if profile:
            given = [read(path) for path in profile]
            tables = [
                {"shape": each.made.get("shape"), "selector": each.key.selector, "profile": each.document()}
                | {"contexts": table_of(each, rates)}
                for each in given
            ]
            found: dict[str, Any] = {"bench": "speculation", "tables": tables, **verdict(tables)}
        else:
            check_device(device)
            size = int(block_size) if block_size.isdecimal() else block_size
            with Bar(notes) as bar:
                found = bench_speculation(
                    words_of("--shape", shape) or ["llama-3.1-8b", "glm-4-9b"],
                    words_of("--selector", selector) or ["quest", "infllm_v2"],
                    numbers_of("--context", context) or CONTEXTS, rates,
                    positives_of("--spec-ratio", spec_ratio) or [1.0], budget, size, batch, dtype_of(dtype, device),
                    device, rounds, layers, kernels, bar,
                )  # fmt: skip
        for each in found["tables"] if output is not None else ():
            assert output is not None
            path = output / parse(each["profile"], "it").key.file_name
            new = writable(path)
            new.write_text(json.dumps(each["profile"], indent=1) + "\n")
            new.replace(path)
    if not as_json:
        _show(Console(), found)
    print(json.dumps(found))


def _auto(row: dict[str, Any]) -> str:
    """The ratio that it ends with, and what it costs at the most."""
    return f"{row['auto']:g}" if row["auto"] else ("tries" if row["on_share"] else "off")


def _show(out: Console, found: dict[str, Any]) -> None:
    """A table a shape and selector, a row a context; of each hit rate the gain, and what "auto" does and costs."""
    for each in found["tables"]:
        hits = [row["hit_rate"] for row in each["contexts"][0]["rows"]]
        title = f"{each['shape']}, {each['selector']}: serial / speculative step; what auto does, its cost at the most"
        table = Table(title=title, box=box.SIMPLE, padding=(0, 0, 0, 1))
        for column in ("context", "serial us", *(percent(hit) for hit in hits)):
            table.add_column(column, no_wrap=True, justify="right")
        for at in each["contexts"]:
            cells = [f"{row['gain']:.2f} {_auto(row)} {percent(max(row['cost'], 0.0), 1)}" for row in at["rows"]]
            table.add_row(f"{at['context']:,}", f"{at['rows'][0]['serial_us']:.1f}", *cells)
        out.print(table)
    least = found["least_gain_on"]
    on = "auto nowhere ends with speculation on" if least is None else f"where auto ends on, a step is {least:.2f}x"
    say(out, f"{on} (asked: {found['asked']:.2f}x); what tries cost at the most: {percent(found['largest_cost'], 1)}")
