"""`hf-sparse-prr bench`: what a decode step takes, against stock or dense, in one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_sparse_prr.bench import bench_layer, measured_kernels
from hf_sparse_prr.bench_indexed import SHAPES as INDEXED_SHAPES
from hf_sparse_prr.bench_indexed import bench_indexed
from hf_sparse_prr.bench_segment import bench_segment, check_arguments
from hf_sparse_prr.bench_token import SETTINGS, USUAL, bench_token
from hf_sparse_prr.bench_topk import CACHES, FULL, OVERLAPS, bench_topk, default_grid
from hf_sparse_prr.bench_topk import check_arguments as check_topk
from hf_sparse_prr.bench_topk_rows import SCORES, STRATEGIES, written
from hf_sparse_prr.commands import (
    indexed_tables,
    layer_tables,
    segment_tables,
    token_tables,
    topk_tables,
)
from hf_sparse_prr.commands.arguments import (
    check_device,
    command_of,
    dtype_of,
    numbers_of,
    one_line_refusals,
    rates_of,
    shares_of,
    tokens_of,
    words_of,
)
from hf_sparse_prr.commands.plots import plot_growth, ready
from hf_sparse_prr.commands.terminal import EXIT_DIFFERENT, EXIT_USAGE, Bar, CommandError, Commands, one_line_errors
from hf_sparse_prr.shapes import SHAPES

bench = Commands(help="Time decoding against stock, in one run.", no_args_is_help=True)
_SHAPES = f"Whose layer: {', '.join(SHAPES)}."
_DTYPE = "float32, bfloat16 or float16; by default float32, on a GPU bfloat16."
_KERNELS = "auto, hub, reference, a repo id or the path of one."
_LIST = "repeatable, or with commas"


@bench.callback()
def root() -> None:
    """Time decoding against stock, in one run."""


@bench.command(epilog="Example: hf-sparse-prr bench layer --shape llama-3.1-8b --context 32K --device cuda")
def layer(
    shape: Annotated[
        str, typer.Option(help=f"{_SHAPES} With an indexer of its own: {', '.join(INDEXED_SHAPES)}.")
    ] = "smollm2",
    context: Annotated[
        list[str] | None,
        typer.Option(
            "--context",
            "--tokens",
            help=f"Tokens in the cache: 7168, 16K, 1M; with an indexer {_LIST}.",
            show_default="7168",
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(help=f"With an indexer: time prompts of so many tokens, too; {_LIST}.", show_default="none"),
    ] = None,
    stock_prefill: Annotated[
        str, typer.Option(help="The longest prompt that the stock class gets as well: 16K took 133 GiB.")
    ] = "8K",
    selector: Annotated[str, typer.Option(help="quest or infllm_v2; auto is quest.")] = "auto",
    budget: Annotated[
        int | None, typer.Option(help="Tokens attended per KV head and step.", show_default="1024")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, show_default="the shape's")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, show_default="the shape's")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, show_default="the shape's")] = None,
    dtype: Annotated[str | None, typer.Option(help=_DTYPE)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    kernels: Annotated[str, typer.Option(help=_KERNELS)] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each setting gets.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """One attention layer's decode step: stock on a DynamicCache, serial sparse, PRR. Default: SmolLM2-135M's layer.

    With an indexer: a step includes the projections, and must give stock's output; on a GPU it is also timed in a CUDA
    graph, which must give the bits of eager steps; budget, selector and heads are the model's. The last line of stdout
    is the whole result as JSON.

    Exit codes: 0 done, 1 an output isn't what it has to be (a bug), 2 wrong argument, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes), one_line_refusals():
        check_device(device)
        number, contexts = (
            dtype_of(dtype, device),
            [tokens_of(each) for each in words_of("--context", context)] or [7168],
        )
        if shape not in SHAPES and shape not in INDEXED_SHAPES:
            known = ", ".join([*SHAPES, *INDEXED_SHAPES])
            raise CommandError(f"--shape: expected one of {known}, got {shape!r}", EXIT_USAGE)
        indexed = shape in INDEXED_SHAPES
        if indexed and (selector != "auto" or any(each is not None for each in (budget, heads, kv_heads, head_dim))):
            message = "expected no --selector, --budget, --heads, --kv-heads or --head-dim"
            raise CommandError(f"{message} with {shape}: they are the model's", EXIT_USAGE)
        if prefill and not indexed:
            raise CommandError(f"--prefill: expected a shape with an indexer, got {shape!r}", EXIT_USAGE)
        if len(contexts) > 1 and not indexed:
            raise CommandError(f"--context: expected one with {shape}, got {len(contexts)}", EXIT_USAGE)
        prompts = [tokens_of(each, "--prefill") for each in words_of("--prefill", prefill)]
        longest = tokens_of(stock_prefill, "--stock-prefill")
        if indexed:
            with Bar(notes) as bar:
                found = bench_indexed(shape, contexts, number, device, rounds, 12, prompts, longest, bar, kernels)
        else:
            budget = 1024 if budget is None else budget
            found = bench_layer(
                contexts[0], budget, "auto", heads, kv_heads, head_dim, number, device, rounds,
                shape=shape, selector=selector, kernels=kernels,
            )  # fmt: skip
    options: list[tuple[str, Any]] = [("shape", shape), ("context", contexts), ("prefill", prompts or None)]
    options += [("stock-prefill", longest if prompts else None), ("selector", selector), ("budget", budget)]
    options += [("heads", heads), ("kv-heads", kv_heads), ("head-dim", head_dim), ("dtype", found["dtype"])]
    options += [("device", device), ("kernels", kernels), ("rounds", rounds)]
    found["command"] = command_of("layer", options)
    if not as_json:
        (indexed_tables if indexed else layer_tables).show(Console(), found)
    print(json.dumps(found))


@bench.command(
    epilog="Example: hf-sparse-prr bench segment --shape qwen3-32b --context 128K --hit-rate 0.95 --device cuda"
)
def segment(
    shape: Annotated[str, typer.Option(help=_SHAPES)] = "qwen3-32b",
    context: Annotated[
        list[str] | None,
        typer.Option(help=f"Tokens in the cache, 1K to 1M, like 131072 or 128K; {_LIST}.", show_default="16K"),
    ] = None,
    selector: Annotated[str, typer.Option(help="quest or infllm_v2.")] = "quest",
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 4096,
    block_size: Annotated[str, typer.Option(help="Tokens in a block: 16, 32, 64, 128 or auto.")] = "auto",
    hit_rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Share of the blocks chosen by score that PRR predicts, 0 to 1, or natural: what the EMA predicts; "
            f"{_LIST}.",
            show_default="natural, on a GPU 1, 0.95 and 0",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch rows.")] = 1,
    dtype: Annotated[str | None, typer.Option(help=_DTYPE)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    kernels: Annotated[str, typer.Option(help=_KERNELS)] = "auto",
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
    with one_line_errors(notes), one_line_refusals():
        check_device(device)
        number, contexts = dtype_of(dtype, device), numbers_of("--context", context) or [2**14]
        rates = rates_of("--hit-rate", hit_rate) or None
        size = int(block_size) if block_size.isdecimal() else block_size
        check_arguments(shape, contexts, selector, budget, size, correlation, rates)
        measured_kernels(kernels)
        with Bar(notes) as bar:
            found = bench_segment(
                shape, contexts, selector, budget, size, batch, number, device, rounds,
                correlation=correlation, hit_rates=rates, layers=layers, kernels=kernels, progress=bar,
            )  # fmt: skip
    options: list[tuple[str, Any]] = [("shape", shape), ("context", contexts)]
    options += [("selector", selector), ("budget", budget), ("block-size", block_size), ("batch", batch)]
    options += [("hit-rate", rates and ["natural" if rate is None else written(rate) for rate in rates])]
    options += [("dtype", found["dtype"]), ("device", device), ("kernels", kernels), ("rounds", found["rounds"])]
    options += [("layers", layers), ("correlation", f"{correlation:g}")]
    found["command"] = command_of("segment", options)
    if not as_json:
        segment_tables.show(Console(), found)
    print(json.dumps(found))


def _grid(given: Sequence[Sequence[int]], device: str, ablation: bool) -> list[Sequence[int]]:
    """Row lengths, k and rows: those given, and the defaults for the others."""
    grid: list[Sequence[int]] = list(default_grid(device, ablation))
    if given[0] and not given[1]:  # of the default k, those that the shortest row has
        grid[1] = [each for each in grid[1] if each <= min(given[0])] or [min(given[0])]
    chosen = [new or default for new, default in zip(given, grid, strict=True)]
    if ablation and any(len(each) != 1 for each in chosen):
        sizes = "{}, {} and {}".format(*map(len, chosen))
        raise CommandError(f"--ablation: expected one --n, --k and --rows, got {sizes}", EXIT_USAGE)
    return chosen


@bench.command(epilog="Example: hf-sparse-prr bench topk --device cuda")
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
    kernels: Annotated[str, typer.Option(help=_KERNELS)] = "auto",
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
    with one_line_errors(notes), one_line_refusals():
        check_device(device)
        number, on_gpu = dtype_of(dtype, device), device.startswith("cuda")
        if full and (n or ablation):
            raise CommandError(f"--full: expected no {'--n' if n else '--ablation'} with it, got both", EXIT_USAGE)
        given = [FULL if full else numbers_of("--n", n), numbers_of("--k", k), numbers_of("--rows", rows)]
        lengths, winners, batches = _grid(given, device, ablation)
        overlaps, names = shares_of("--overlap", overlap) or OVERLAPS, words_of("--strategies", strategies) or None
        cache = cache or ("both" if on_gpu else "warm")
        check_topk(lengths, winners, batches, device, scores, overlaps, cache, names, kernels)
        with Bar(notes) as bar:
            found = bench_topk(
                lengths, winners, batches, number, device, scores, ragged, overlaps, cache, names, kernels, rounds,
                limit_time, bar,
            )  # fmt: skip
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
        with one_line_errors(notes):
            raise CommandError(f"expected the rows of a stable sort, got {found['wrong']} others", EXIT_DIFFERENT)


@bench.command(epilog="Example: hf-sparse-prr bench token --shape llama-3.1-8b --context 128K --device cuda")
def token(
    shape: Annotated[
        str | None,
        typer.Option(help=f"Whose model: {', '.join(SHAPES)}.", show_default="smollm2, on a GPU llama-3.1-8b"),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help=f"Tokens in the cache, like 131072 or 128K; {_LIST}.", show_default="2K, on a GPU 32K,128K"),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Of the model.", show_default="all")] = None,
    selector: Annotated[str, typer.Option(help="quest or infllm_v2.")] = "quest",
    budget: Annotated[
        int | None,
        typer.Option(help="Tokens attended per KV head and step.", show_default="1024, on a GPU 4096"),
    ] = None,
    block_size: Annotated[str, typer.Option(help="Tokens in a block: 16, 32, 64, 128 or auto.")] = "64",
    batch: Annotated[int, typer.Option(min=1, help="Batch rows.")] = 1,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="New tokens that are timed.", show_default="8, on a GPU 32")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(SETTINGS)}; {_LIST}.", show_default=",".join(USUAL)),
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill/--no-prefill", help="Compute the prompt; without, K/V are random.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help=_DTYPE)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    kernels: Annotated[str, typer.Option(help=_KERNELS)] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each setting.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf.", show_default="none")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """Whole tokens of generate(), of a model with random weights: dense stock, serial sparse, PRR; on a GPU also eager.

    If they are named: static and compiled are stock on a StaticCache, preallocated is ours compiled, auto speculates as
    the profile of this GPU and shape has it.

    A token's time is the difference of two calls, of few and of more tokens. Exactness comes first: all but dense give
    the same ids and logits, bit for bit. The last line of stdout is the whole result as JSON.

    Exit codes: 0 done, 1 ids or logits differ (a bug), 2 wrong argument, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes), one_line_refusals():
        check_device(device)
        number, on_gpu = dtype_of(dtype, device), device.startswith("cuda")
        contexts = numbers_of("--context", context) or ([2**15, 2**17] if on_gpu else [2**11])
        names = words_of("--settings", settings) or None
        shape, count = shape or ("llama-3.1-8b" if on_gpu else "smollm2"), tokens or (32 if on_gpu else 8)
        if budget is None:
            budget = 4096 if on_gpu else 1024
        size = int(block_size) if block_size.isdecimal() else block_size
        if plot is not None:
            ready(plot)
        with Bar(notes) as bar:
            found = bench_token(
                shape, contexts, selector, budget, size, batch, count, number, device, layers, names, prefill, rounds,
                kernels, bar,
            )  # fmt: skip
    options = {
        "shape": shape, "context": contexts, "layers": layers, "selector": selector, "budget": budget,
        "block-size": block_size, "batch": batch, "tokens": count, "settings": names, "prefill": prefill or None,
        "dtype": found["dtype"], "device": device, "kernels": kernels, "rounds": rounds,
    }  # fmt: skip
    found["command"] = command_of("token", list(options.items()))
    if not as_json:
        token_tables.show(Console(), found)
    if plot is not None:
        plot_growth(found, plot)
    print(json.dumps(found))
