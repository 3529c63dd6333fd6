"""`hf-sparse-prr bench`: what a decode step takes, against stock or dense, in one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.bench import bench_layer
from hf_sparse_prr.bench_exact import ExactnessError
from hf_sparse_prr.bench_indexed import SHAPES as INDEXED_SHAPES
from hf_sparse_prr.bench_indexed import bench_indexed
from hf_sparse_prr.bench_segment import bench_segment, check_arguments
from hf_sparse_prr.bench_topk import CACHES, FULL, OVERLAPS, bench_topk, default_grid
from hf_sparse_prr.bench_topk import check_arguments as check_topk
from hf_sparse_prr.bench_topk_rows import SCORES, STRATEGIES, written
from hf_sparse_prr.commands import topk_tables
from hf_sparse_prr.commands.arguments import (
    check_device,
    command_of,
    dtype_of,
    numbers_of,
    rate_of,
    shares_of,
    tokens_of,
    words_of,
)
from hf_sparse_prr.commands.terminal import EXIT_DIFFERENT, EXIT_USAGE, Bar, CommandError, one_line_errors
from hf_sparse_prr.kernel_loader import KernelError, resolve
from hf_sparse_prr.shapes import SHAPES

bench = typer.Typer(help="Time decoding against stock, in one run.", no_args_is_help=True)
_SHAPES = f"Whose layer: {', '.join(SHAPES)}."
_DTYPE = "float32, bfloat16 or float16; by default float32, on a GPU bfloat16."
_NAMES = {"dense": "dense SDPA", "dense_grouped": "dense, heads grouped", "serial": "serial sparse"}


@bench.callback()
def root() -> None:
    """Time decoding against stock, in one run."""


@bench.command()
def layer(
    shape: Annotated[
        str, typer.Option(help=f"{_SHAPES} With an indexer of its own: {', '.join(INDEXED_SHAPES)}.")
    ] = "smollm2",
    context: Annotated[str, typer.Option("--context", "--tokens", help="Tokens in the cache: 7168, 16K, 1M.")] = "7168",
    prefill: Annotated[
        str | None, typer.Option(help="With an indexer: time a prompt of so many tokens, too.", show_default="none")
    ] = None,
    stock_prefill: Annotated[
        bool, typer.Option(help="Run the prompt on the stock class as well: it may not fit.")
    ] = True,
    selector: Annotated[str, typer.Option(help="quest or infllm_v2; auto is quest.")] = "auto",
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 1024,
    heads: Annotated[int | None, typer.Option(min=1, show_default="the shape's")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, show_default="the shape's")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, show_default="the shape's")] = None,
    dtype: Annotated[str | None, typer.Option(help=_DTYPE)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each setting gets.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """One attention layer's decode step: stock on a DynamicCache, serial sparse, PRR. Default: SmolLM2-135M's layer.

    With an indexer: a step includes the projections, and must give stock's output; budget, selector and heads are the
    model's. The last line of stdout is the whole result as JSON.

    Exit codes: 0 done, 1 an output differs from stock's (a bug), 2 wrong argument.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes):
        check_device(device)
        number, tokens = dtype_of(dtype, device), tokens_of(context)
        if shape not in SHAPES and shape not in INDEXED_SHAPES:
            known = ", ".join([*SHAPES, *INDEXED_SHAPES])
            raise CommandError(f"--shape: expected one of {known}, got {shape!r}", EXIT_USAGE)
        indexed = shape in INDEXED_SHAPES
        if indexed and (selector != "auto" or heads or kv_heads or head_dim):
            message = f"expected no --selector, --heads, --kv-heads or --head-dim with {shape}: they are the model's"
            raise CommandError(message, EXIT_USAGE)
        if prefill is not None and not indexed:
            raise CommandError(f"--prefill: expected a shape with an indexer, got {shape!r}", EXIT_USAGE)
        length = 0 if prefill is None else tokens_of(prefill)
        try:
            if indexed:
                with Bar(notes) as bar:
                    found = bench_indexed(shape, tokens, number, device, rounds, 12, length, stock_prefill, bar)
            else:
                found = bench_layer(
                    tokens, budget, "auto", heads, kv_heads, head_dim, number, device, rounds,
                    shape=shape, selector=selector,
                )  # fmt: skip
        except ExactnessError as error:
            raise CommandError(error, EXIT_DIFFERENT) from error
        except ValueError as error:
            raise CommandError(error, EXIT_USAGE) from error
    if not as_json:
        (_show_indexed if indexed else _show_layer)(Console(), found)
    print(json.dumps(found))


def _show_indexed(out: Console, found: dict[str, Any]) -> None:
    shares, prefill = found["floor_share"], found["prefill"]
    table = Table(
        "setting", "ms a step", "ratio to stock", "cache bytes", *([] if shares is None else ["of floor"]),
        title=f"{found['device']}, {found['threads']} threads, torch {found['torch']}, {found['dtype']}",
        caption="{name}: {heads} heads, {tokens} tokens, {index_topk} selected; ".format(**found["shape"])
        + f"PRR hit rate {found['hit_rate']:.1%}; {found['error']:.1e} of the largest output from stock",
    )  # fmt: skip
    for name, ms in found["ms"].items():
        row = [name, f"{ms:.3f}", f"{found['ratio_to_stock'][name]:.3f}", f"{found['kv_bytes_per_step'][name]:,.0f}"]
        table.add_row(*row, *([] if shares is None else [_percent(shares[name])]))
    out.print(table)
    if prefill is not None:
        taken = ", ".join(f"{name} {ms:,.0f} ms" for name, ms in prefill["ms"].items())
        out.print(f"a prompt of {prefill['tokens']} tokens: {taken}")


def _show_layer(out: Console, found: dict[str, Any]) -> None:
    shares = found["floor_share"]
    table = Table(
        "setting", "ms a step", "ratio to stock", "K/V and summary bytes", *([] if shares is None else ["of floor"]),
        title=f"{found['device']}, {found['threads']} threads, torch {found['torch']}, {found['dtype']}",
        caption="{name}: {heads} heads over {kv_heads} KV heads of {head_dim}, {tokens} tokens, batch {batch}; ".format(
            **found["shape"]
        )
        + f"{found['selector']}, budget {found['budget']}; PRR hit rate {found['hit_rate']:.1%}",
    )  # fmt: skip
    for name, ms in found["ms"].items():
        row = [name, f"{ms:.3f}", f"{found['ratio_to_stock'][name]:.2f}", f"{found['kv_bytes_per_step'][name]:,.0f}"]
        table.add_row(*row, *([] if shares is None else [_percent(shares[name])]))
    out.print(table)


@bench.command()
def segment(
    shape: Annotated[str, typer.Option(help=_SHAPES)] = "qwen3-32b",
    context: Annotated[
        list[str] | None,
        typer.Option(help="Tokens in the cache, 1K to 1M, like 131072 or 128K; repeatable.", show_default="16K"),
    ] = None,
    selector: Annotated[str, typer.Option(help="quest or infllm_v2.")] = "quest",
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 4096,
    block_size: Annotated[str, typer.Option(help="Tokens in a block: 16, 32, 64, 128 or auto.")] = "auto",
    hit_rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Share of the blocks chosen by score that PRR predicts, 0 to 1, or natural: what the EMA predicts; "
            "repeatable.",
            show_default="natural, on a GPU 1, 0.95 and 0",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch rows.")] = 1,
    dtype: Annotated[str | None, typer.Option(help=_DTYPE)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    kernels: Annotated[str, typer.Option(help="auto, hub, reference, a repo id or the path of one.")] = "auto",
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Turns of each, on a GPU replays of its graph.", show_default="5, on a GPU 50"),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Layers that calls rotate over.", show_default="1, on a GPU what reads 8 times its L2"
        ),
    ] = None,
    correlation: Annotated[float, typer.Option(help="Of each query with the one before it: natural hits.")] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """Selection + attention of one token in a layer over random K/V: dense, serial sparse, PRR by hit rate; and stages.

    On a GPU every time is that of a CUDA graph over layers whose K/V come from memory. Exactness comes first: PRR
    equals serial decoding bit for bit, serial equals dense attention over the selected blocks, and those are the best
    by a stable sort. The last line of stdout is the whole result as JSON.

    Exit codes: 0 done, 1 a result is wrong (a bug), 2 wrong argument, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes):
        check_device(device)
        number, contexts = dtype_of(dtype, device), [tokens_of(text) for text in context or ["16K"]]
        rates = None if hit_rate is None else [rate_of(text) for text in hit_rate]
        size = int(block_size) if block_size.isdecimal() else block_size
        try:
            check_arguments(shape, contexts, selector, budget, size, correlation, rates)
            resolve(kernels)
            with Bar(notes) as bar:
                found = bench_segment(
                    shape, contexts, selector, budget, size, batch, number, device, rounds,
                    correlation=correlation, hit_rates=rates, layers=layers, kernels=kernels, progress=bar,
                )  # fmt: skip
        except ExactnessError as error:
            raise CommandError(error, EXIT_DIFFERENT) from error
        except (ValueError, KernelError) as error:
            raise CommandError(error, EXIT_USAGE) from error
    options: list[tuple[str, Any]] = [("shape", shape), *(("context", tokens) for tokens in contexts)]
    options += [("selector", selector), ("budget", budget), ("block-size", block_size), ("batch", batch)]
    options += [("hit-rate", text) for text in hit_rate or ()]
    options += [("dtype", found["dtype"]), ("device", device), ("kernels", kernels), ("rounds", found["rounds"])]
    options += [("layers", layers), ("correlation", f"{correlation:g}")]
    found["command"] = command_of("segment", options)
    if not as_json:
        _show(Console(), found)
    print(json.dumps(found))


def _show(out: Console, found: dict[str, Any]) -> None:
    """One table a context, and what was checked and hit."""
    sizes, kernels = found["shape"], found["kernels"]
    out.print(
        f"{found['device']}, {found['threads']} threads, torch {found['torch']}, triton {found['triton'] or 'none'}, "
        f"{found['dtype']}, kernels: {kernels['backend']} ({kernels['source']})\n"
        f"{sizes['name']}: {sizes['heads']} heads over {sizes['kv_heads']} KV heads of {sizes['head_dim']}, batch "
        f"{sizes['batch']}; {found['selector']}, budget {found['budget']} in blocks of {found['block_size']}\n"
        f"{found['command']}",
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip
    if kernels["fallback"] is not None:
        out.print(kernels["fallback"], soft_wrap=True, highlight=False, markup=False)
    for each in found["contexts"]:
        out.print(_table(each, found))
        exact = each["exact"]
        replayed = "" if exact["graph_equals_eager"] is None else ", and a graph's replay the calls outside of it,"
        out.print(
            f"exact in {exact['steps']} steps, the last in {_layers(each)}: PRR equals serial{replayed} bit for bit; "
            f"selection equals a stable sort; output within {exact['output_error']:.1e} of dense attention over the "
            f"selection, scores within {exact['scores_error']:.1e} of the reference\n"
            f"natural PRR hit rate without forced blocks: {_percent(each['natural']['hit_rate'])}, weighted by score "
            f"{_percent(each['natural']['hit_rate_weighted'])}; queries correlated by {found['correlation']:g}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _layers(each: dict[str, Any]) -> str:
    return "1 layer" if each["layers"] == 1 else f"{each['layers']} layers in turn"


def _label(name: str, row: dict[str, Any]) -> str:
    """For "prr 0.95" this is "PRR, hits 95.1%", or what the rounded number of blocks is."""
    kind, _, rate = name.partition(" ")
    if not rate:
        return _NAMES.get(name, name)
    natural = " (natural)" if rate == "natural" else ""
    return f"{'PRR' if kind == 'prr' else kind}, hits {_percent(row['hit_rate'])}{natural}"


def _table(each: dict[str, Any], found: dict[str, Any]) -> Table:
    """Ratios are to dense SDPA as transformers calls it and to serial; "of floor" is the share of the time that it
    takes to read what the row has to at the bandwidth of the data sheet."""
    title = f"{each['context']} tokens: us a layer, {found['timed_by']}, medians of {found['rounds']}, {_layers(each)}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 0, 0, 1))
    known = found["bandwidth"] is not None
    for column in ["", "us", "to dense", "to serial", "MB", "GB/s", *(["of floor"] if known else [])]:
        table.add_column(column, no_wrap=True, justify="right" if column else "left")

    def add(label: str, row: dict[str, Any]) -> None:
        ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("to_dense", "to_serial")]
        moved = ["", ""] if not row["moved_bytes"] else [f"{row['moved_bytes'] / 1e6:,.2f}", f"{row['gb_per_s']:,.0f}"]
        share = [_percent(row["floor_share"]) if row["floor_share"] else ""] if known else []
        table.add_row(label, f"{row['us']:,.1f}", *ratios, *moved, *share)

    for name, row in each["settings"].items():
        add(_label(name, row), row)
    table.add_section()
    for name, row in each["stages"].items():
        add(f"  {_label(name, row)}", row)
    return table


_LIST = "repeatable, or with commas"


@bench.command()
def topk(
    n: Annotated[
        list[str] | None,
        typer.Option(help=f"Scores a row; {_LIST}.", show_default="8K,32K; on a GPU 8K,32K,128K,512K"),
    ] = None,
    k: Annotated[
        list[str] | None,
        typer.Option(help=f"Winners; {_LIST}.", show_default="512,2048; on a GPU 64,512,1024,2048"),
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option(help=f"Rows a call; {_LIST}.", show_default="1,4; on a GPU 1,4,16,64,128")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every power of two from 4K to 1M as scores a row.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    scores: Annotated[str, typer.Option(help=f"{', '.join(SCORES)}.")] = "normal",
    ragged: Annotated[bool, typer.Option("--ragged", help="Rows of random lengths, which are on the device.")] = False,
    overlap: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of the previous step's winners with the right ones, 0 to 1; {_LIST}.",
            show_default=",".join(map(written, OVERLAPS)),
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(help=f"Guesses: {', '.join(STRATEGIES)}; {_LIST}.", show_default="all that the kernels can"),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(CACHES)}: where rows come from.", show_default="warm; on a GPU both"),
    ] = None,
    kernels: Annotated[str, typer.Option(help="auto, hub, reference, a repo id or the path of one.")] = "auto",
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Turns of each, on a GPU replays of its graph.", show_default="5, on a GPU 20"),
    ] = None,
    limit_time: Annotated[
        float | None, typer.Option(min=0, help="Begin no cell after so many seconds.", show_default="none")
    ] = None,
    ablation: Annotated[bool, typer.Option("--ablation", help="One cell: what each kind of guess is worth.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """The exact top-k in every cell of a grid, by what is guessed before, beside torch.topk and torch.sort.

    On a GPU every time is that of a CUDA graph. Exactness comes first: a call of which a row differs from a stable sort
    is counted and not timed. The last line of stdout is the whole result as JSON.

    Exit codes: 0 done, 1 a row is wrong (a bug), 2 wrong argument, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes):
        check_device(device)
        number, on_gpu = dtype_of(dtype, device), device.startswith("cuda")
        grid: list[Sequence[int]] = list(default_grid(device, ablation))
        if full and (n or ablation):
            raise CommandError(f"--full: expected no {'--n' if n else '--ablation'} with it, got both", EXIT_USAGE)
        given = [FULL if full else numbers_of("--n", n), numbers_of("--k", k), numbers_of("--rows", rows)]
        if given[0] and not given[1]:  # of the default k, those that the shortest row has
            grid[1] = [each for each in grid[1] if each <= min(given[0])] or [min(given[0])]
        lengths, winners, batches = (new or default for new, default in zip(given, grid, strict=True))
        if ablation and len(lengths) * len(winners) * len(batches) != 1:
            sizes = f"{len(lengths)}, {len(winners)} and {len(batches)}"
            raise CommandError(f"--ablation: expected one --n, --k and --rows, got {sizes}", EXIT_USAGE)
        overlaps, names = shares_of("--overlap", overlap) or OVERLAPS, words_of("--strategies", strategies) or None
        cache = cache or ("both" if on_gpu else "warm")
        try:
            check_topk(lengths, winners, batches, device, scores, overlaps, cache, names, kernels)
            with Bar(notes) as bar:
                found = bench_topk(
                    lengths, winners, batches, number, device, scores, ragged, overlaps, cache, names, kernels, rounds,
                    limit_time, bar,
                )  # fmt: skip
        except (ValueError, KernelError) as error:
            raise CommandError(error, EXIT_USAGE) from error
        options = {
            "n": lengths, "k": winners, "rows": batches, "dtype": dtype, "device": device, "scores": scores,
            "overlap": [written(each) for each in overlaps], "strategies": names, "cache": cache,
            "kernels": kernels, "rounds": found["rounds"], "limit-time": limit_time, "ragged": ragged or None,
            "ablation": ablation or None,
        }  # fmt: skip
        found["command"] = command_of("topk", list(options.items()))
        if not as_json:
            topk_tables.show(Console(), found, ablation)
        print(json.dumps(found))
        if found["wrong"]:
            raise CommandError(f"expected the rows of a stable sort, got {found['wrong']} others", EXIT_DIFFERENT)
