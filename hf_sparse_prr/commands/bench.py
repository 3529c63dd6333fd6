"""`hf-sparse-prr bench`: what a decode step takes, against stock or dense, in one run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.bench import bench_layer
from hf_sparse_prr.bench_exact import ExactnessError
from hf_sparse_prr.bench_segment import bench_segment, check_arguments
from hf_sparse_prr.commands.terminal import EXIT_DIFFERENT, EXIT_USAGE, Bar, CommandError, one_line_errors
from hf_sparse_prr.shapes import SHAPES

bench = typer.Typer(help="Time decoding against stock, in one run.", no_args_is_help=True)
_SHAPES = f"Whose layer: {', '.join(SHAPES)}."
_SETTINGS = {
    "dense": "dense SDPA",
    "dense_grouped": "dense, heads grouped",
    "serial": "serial sparse",
    "prr": "PRR",
}
_STAGES = {"score": "score", "topk": "top-k", "partials": "partials", "merge": "merge", "other": "other"}


@bench.callback()
def root() -> None:
    """Time decoding against stock, in one run."""


def _dtype(name: str) -> torch.dtype:
    if name not in ("float32", "bfloat16", "float16"):
        raise CommandError(f"--dtype: expected float32, bfloat16 or float16, got {name!r}", EXIT_USAGE)
    return getattr(torch, name)


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise CommandError(f"--device: expected cpu, cuda, cuda:1, .., got {device!r}", EXIT_USAGE) from error
    if kind not in ("cpu", "cuda"):
        raise CommandError(f"--device: expected cpu, cuda, cuda:1, .., got {device!r}", EXIT_USAGE)
    if kind == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"--device: expected one that is there, got {device!r} without a CUDA GPU", EXIT_USAGE)


@bench.command()
def layer(
    shape: Annotated[str, typer.Option(help=_SHAPES)] = "smollm2",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 7168,
    selector: Annotated[str, typer.Option(help="quest or infllm_v2; auto is quest.")] = "auto",
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 1024,
    heads: Annotated[int | None, typer.Option(min=1, show_default="the shape's")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, show_default="the shape's")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, show_default="the shape's")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each setting gets.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """One attention layer's decode step: stock on a DynamicCache, serial sparse, PRR. Default: SmolLM2-135M's layer.

    Exit codes: 0 done, 2 wrong argument.
    """
    with one_line_errors(Console(stderr=True)):
        number = _dtype(dtype)
        _check_device(device)
        try:
            found = bench_layer(
                tokens,
                budget,
                "auto",
                heads,
                kv_heads,
                head_dim,
                number,
                device,
                rounds,
                shape=shape,
                selector=selector,
            )
        except ValueError as error:
            raise CommandError(error, EXIT_USAGE) from error
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table(
        "setting", "ms a step", "ratio to stock", "K/V and summary bytes",
        title=f"{found['device']}, {found['threads']} threads, torch {found['torch']}, {found['dtype']}",
        caption="{name}: {heads} heads over {kv_heads} KV heads of {head_dim}, {tokens} tokens, batch {batch}; ".format(
            **found["shape"]
        )
        + f"{found['selector']}, budget {budget}; PRR hit rate {found['hit_rate']:.1%}",
    )  # fmt: skip
    for name, ms in found["ms"].items():
        table.add_row(
            name, f"{ms:.3f}", f"{found['ratio_to_stock'][name]:.2f}", f"{found['kv_bytes_per_step'][name]:,.0f}"
        )
    Console().print(table)


@bench.command()
def segment(
    shape: Annotated[str, typer.Option(help=_SHAPES)] = "qwen3-32b",
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens in the cache, 1024 to 1048576; repeatable.", show_default="16384")
    ] = None,
    selector: Annotated[str, typer.Option(help="quest or infllm_v2.")] = "quest",
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 4096,
    block_size: Annotated[str, typer.Option(help="Tokens in a block: 16, 32, 64, 128 or auto.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Batch rows.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each setting gets.")] = 5,
    correlation: Annotated[float, typer.Option(help="Of each query with the one before it; decides PRR's hits.")] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """Selection + attention of one layer's decode step over random K/V: dense, serial sparse, PRR, and serial by stage.

    Exactness comes first: PRR equals serial decoding bit for bit, serial equals dense attention over the selected
    blocks, and those are the best by a stable sort. The last line of stdout is the whole result as JSON.

    Exit codes: 0 done, 1 a result is wrong (a bug), 2 wrong argument, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes):
        number, contexts = _dtype(dtype), context or [16384]
        _check_device(device)
        size = int(block_size) if block_size.isdecimal() else block_size
        try:
            check_arguments(shape, contexts, selector, budget, size, correlation)
            with Bar(notes) as bar:
                found = bench_segment(
                    shape, contexts, selector, budget, size, batch, number, device, rounds,
                    correlation=correlation, progress=bar,
                )  # fmt: skip
        except ExactnessError as error:
            raise CommandError(error, EXIT_DIFFERENT) from error
        except ValueError as error:
            raise CommandError(error, EXIT_USAGE) from error
    found["command"] = " ".join(
        [
            f"hf-sparse-prr bench segment --shape {shape}",
            *(f"--context {tokens}" for tokens in contexts),
            f"--selector {selector} --budget {budget} --block-size {block_size} --batch {batch} --dtype {dtype}",
            f"--device {device} --rounds {rounds} --correlation {correlation:g}",
        ]
    )
    if not as_json:
        _show(Console(), found)
    print(json.dumps(found))


def _show(out: Console, found: dict[str, Any]) -> None:
    """One table a context, and what was checked and hit."""
    sizes, kernels = found["shape"], found["kernels"]
    out.print(
        f"{found['device']}, {found['threads']} threads, torch {found['torch']}, {found['dtype']}, kernels: "
        f"{kernels['backend']} ({kernels['source']})\n{sizes['name']}: {sizes['heads']} heads over {sizes['kv_heads']} "
        f"KV heads of {sizes['head_dim']}, batch {sizes['batch']}; {found['selector']}, budget {found['budget']} in "
        f"blocks of {found['block_size']}\n{found['command']}",
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip
    if kernels["fallback"] is not None:
        out.print(kernels["fallback"], soft_wrap=True, highlight=False, markup=False)
    delta = found["blocks"]["predicted"] / found["blocks"]["by_score"]
    for each in found["contexts"]:
        out.print(_table(each))
        exact = each["exact"]
        out.print(
            f"exact in {exact['steps']} steps: PRR equals serial bit for bit; selection equals a stable sort; output "
            f"within {exact['output_error']:.1e} of dense attention over the selection, scores within "
            f"{exact['scores_error']:.1e} of the reference\nPRR hit rate without forced blocks, at delta {delta:g}: "
            f"{_percent(each['hit_rate'])}, weighted by score {_percent(each['hit_rate_weighted'])}; queries "
            f"correlated by {found['correlation']:g}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _table(each: dict[str, Any]) -> Table:
    """Ratios are to dense SDPA and to the faster of its two forms; "of peak" is of the GPU's memory bandwidth."""
    table = Table(title=f"{each['context']} tokens: ms a step, median over the rounds")
    columns = ["setting", "ms", "to dense", "to best dense", "MB read"]
    shares = each["floor_share"]
    for column in columns if shares is None else [*columns, "of peak"]:
        table.add_column(column, no_wrap=True, justify="left" if column == "setting" else "right")
    for key, name in _SETTINGS.items():
        row = [
            name,
            f"{each['ms'][key]:.3f}",
            f"{each['ratio_to_dense'][key]:.2f}",
            f"{each['ratio_to_best_dense'][key]:.2f}",
            f"{each['bytes_per_step'][key]['total'] / 1e6:,.2f}",
        ]
        table.add_row(*row, *([] if shares is None else [_percent(shares[key])]))
        if key == "serial":
            for stage, label in _STAGES.items():
                table.add_row(f"  {label}", f"{each['stages_ms'][stage]:.3f}")
    table.add_row("append, before them", f"{each['ms']['append']:.3f}")
    return table
