"""`hf-sparse-prr bench ablation`: what each part of PRR is worth."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from hf_sparse_prr.bench_ablation import bench_ablation
from hf_sparse_prr.commands.ablation_tables import show
from hf_sparse_prr.commands.arguments import (
    check_device,
    command_of,
    dtype_of,
    numbers_of,
    one_line_refusals,
    pair_of,
    words_of,
)
from hf_sparse_prr.commands.terminal import Bar, one_line_errors
from hf_sparse_prr.shapes import SHAPES

_LIST = "repeatable, or with commas"


def ablation(
    shape: Annotated[
        list[str] | None,
        typer.Option(help=f"Whose layers: {', '.join(SHAPES)}; {_LIST}.", show_default="llama-3.1-8b,glm-4-9b"),
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(help=f"Tokens in the cache; {_LIST}.", show_default="16K,128K,512K")
    ] = None,
    selector: Annotated[str, typer.Option(help="quest or infllm_v2.")] = "quest",
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 4096,
    block_size: Annotated[str, typer.Option(help="Tokens in a block: 16, 32, 64, 128 or auto.")] = "auto",
    hits: Annotated[
        str | None,
        typer.Option(help="Hit rates of the last blocks and of the EMA, like 0.86,0.89.", show_default="natural"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch rows.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="By default float32, on a GPU bfloat16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    kernels: Annotated[str, typer.Option(help="auto, hub, reference, a repo id or the path of one.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each, on a GPU replays of its graph.")] = 25,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers in turn.", show_default="1, on a GPU until L2 can't hold them")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """What each part of PRR is worth, as the PRR paper's Table 8: reuse, repair, the EMA, and exactness.

    S1 reuses the last token's blocks or does all of it again, S2 repairs, S3 predicts by the EMA, ours is S3 made
    exact. The last line of stdout is the whole result as JSON.

    Exit codes: 0 done, 1 a result is wrong (a bug), 2 wrong argument, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes), one_line_refusals():
        check_device(device)
        number, contexts = dtype_of(dtype, device), numbers_of("--context", context) or [2**14, 2**17, 2**19]
        shapes = words_of("--shape", shape) or ["llama-3.1-8b", "glm-4-9b"]
        size = int(block_size) if block_size.isdecimal() else block_size
        rates = None if hits is None else pair_of("--hits", hits)
        with Bar(notes) as bar:
            found = bench_ablation(
                shapes, contexts, selector, budget, size, batch, number, device, rounds, hits=rates, layers=layers,
                kernels=kernels, progress=bar,
            )  # fmt: skip
    options = {
        "shape": shapes, "context": contexts, "selector": selector, "budget": budget, "block-size": block_size,
        "hits": hits, "batch": batch, "dtype": found["dtype"], "device": device, "kernels": kernels, "rounds": rounds,
        "layers": layers,
    }  # fmt: skip
    found["command"] = command_of("ablation", list(options.items()))
    if not as_json:
        show(Console(), found)
    print(json.dumps(found))
