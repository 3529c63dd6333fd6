"""`hf-sparse-prr profile`: measure what speculation takes on this GPU, and keep it for speculate="auto"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hf_sparse_prr import profile as profiles
from hf_sparse_prr.bench_profile import CONTEXTS, RATIOS, bench_profile
from hf_sparse_prr.budget import choices
from hf_sparse_prr.commands.arguments import (
    check_device,
    dtype_of,
    numbers_of,
    one_line_refusals,
    positives_of,
    writable,
)
from hf_sparse_prr.commands.plots import plot_profile, ready
from hf_sparse_prr.commands.tables import percent, say
from hf_sparse_prr.commands.terminal import Bar, one_line_errors
from hf_sparse_prr.shapes import SHAPES

_LIST = "repeatable, or with commas"
_SHOWN = (1.0, 0.95, 0.9, 0.8)  # hit rates at a spec_ratio of 1


def profile(
    shape: Annotated[str, typer.Option(help=f"Whose layers: {', '.join(SHAPES)}.")] = "llama-3.1-8b",
    context: Annotated[
        list[str] | None, typer.Option(help=f"Tokens in the cache; {_LIST}.", show_default="4K to 512K by powers of 2")
    ] = None,
    selector: Annotated[str, typer.Option(help="quest or infllm_v2.")] = "quest",
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 4096,
    block_size: Annotated[str, typer.Option(help="Tokens in a block: 16, 32, 64, 128 or auto.")] = "auto",
    spec_ratio: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Predicted blocks per selected one; {_LIST}.", show_default=",".join(f"{r:g}" for r in RATIOS)
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch rows.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="By default float32, on a GPU bfloat16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cuda",
    kernels: Annotated[str, typer.Option(help="auto, hub, reference, a repo id or the path of one.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each call, on a GPU replays of its graph.")] = 12,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers in turn.", show_default="so many that K/V come from memory")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="The JSON file to write.", show_default='the one that speculate="auto" looks for'),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf.", show_default="none")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's JSON on stdout, and where it is.")] = False,
) -> None:
    """Selection, speculation, repair and all of them together, of a layer, by context, spec_ratio and hit rate.

    speculate="auto" and spec_ratio="profile" read the file on a GPU of that name, for models of those heads with those
    settings and kernels. Contexts that the budget holds whole are left out. Minutes on a GPU.

    Exit codes: 0 done, 1 a result is wrong (a bug), 2 wrong argument, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes), one_line_refusals():
        check_device(device)
        number, contexts = dtype_of(dtype, device), numbers_of("--context", context) or CONTEXTS
        ratios = positives_of("--spec-ratio", spec_ratio) or RATIOS
        size = int(block_size) if block_size.isdecimal() else block_size
        # Here: before minutes of work
        new = writable(output or profiles.user_folder() / "any.json")
        if plot is not None:
            ready(plot)
        with Bar(notes) as bar:
            found = bench_profile(
                shape, contexts, selector, budget, size, batch, number, device, rounds, layers, ratios, kernels, bar
            )
        path = output or profiles.user_folder() / found.key.file_name
        new = new if output else writable(path)
        new.write_text(json.dumps(found.document(), indent=1) + "\n")
        new.replace(path)  # a process that starts meanwhile reads the old file or the new one
        if plot is not None:
            plot_profile(found, plot)
    if as_json:
        print(json.dumps({**found.document(), "written_to": str(path)}, indent=1))
        return
    out = Console()
    say(out, str(found.key))
    out.print(_table(found))
    say(out, f"written to {path}", *([] if plot is None else [f"drawn in {plot}"]))


def _table(found: profiles.Profile) -> Table:
    """Stages at a spec_ratio of 1 or the nearest one; then a serial step's time over PRR's at the best spec_ratio, by
    the hit rate at 1; and that spec_ratio at 95%."""
    title = "us a layer; then serial / PRR by hit rate"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 0, 0, 1))
    columns = ["context", "select", "speculate", "repair", "serial", *(percent(hit) for hit in _SHOWN), "ratio"]
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right")
    for at in found.contexts:
        stages = [at.select, at.speculate[at.ratio(1.0)], at.repair(1.0, _SHOWN[1]), at.serial]
        best = [min(choices(at, hit), key=lambda each: each[1]) for hit in _SHOWN]
        gains = [f"{at.serial / us:.2f}" for _, us in best]
        table.add_row(f"{at.context:,}", *(f"{us:.1f}" for us in stages), *gains, f"{best[1][0]:g}")
    return table
