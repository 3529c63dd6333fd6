"""`hf-sparse-prr eval`: do sparse decoding's answers equal dense decoding's, and PRR's those of serial?"""

from __future__ import annotations

import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from hf_sparse_prr.commands.arguments import (
    check_device,
    dtype_of,
    numbers_of,
    one_line_refusals,
    words_of,
    writable,
)
from hf_sparse_prr.commands.eval_tables import show
from hf_sparse_prr.commands.terminal import (
    EXIT_DIFFERENT,
    EXIT_FETCH,
    EXIT_MODEL,
    EXIT_USAGE,
    Bar,
    CommandError,
    one_line_errors,
)
from hf_sparse_prr.demo.loading import LoadError
from hf_sparse_prr.demo.smollm2 import FetchError
from hf_sparse_prr.evidence.evaluate import Grid, differing
from hf_sparse_prr.evidence.forced import FORCED
from hf_sparse_prr.evidence.jobs import run_jobs
from hf_sparse_prr.evidence.parts import evaluate_parts
from hf_sparse_prr.evidence.parts import full as parts_of_all
from hf_sparse_prr.evidence.store import write
from hf_sparse_prr.evidence.tasks import TASKS
from hf_sparse_prr.evidence.texts import TEXTS
from hf_sparse_prr.evidence.tiny import trained

_LIST = "repeatable, or with commas"
_TINY = tuple(f"tiny:{family}" for family in trained())


def evaluate_command(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(_TINY)}, smollm2, or a path; {_LIST}.", show_default="the tiny ones"),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(TASKS)}, or none; {_LIST}.", show_default="all")
    ] = None,
    length: Annotated[list[str] | None, typer.Option(help=f"Tokens; {_LIST}.", show_default="4K")] = None,
    depth: Annotated[
        list[str] | None, typer.Option(help=f"Of the needle, 0 to 1, or any; {_LIST}.", show_default="any")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(TEXTS)}, for models with a tokenizer; {_LIST}.", show_default="none"),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Of each task, length and depth.")] = 32,
    text_tokens: Annotated[int, typer.Option(min=1, help="Scored at the end of each window of a text.")] = 128,
    windows: Annotated[int, typer.Option(min=1, help="Of each text.")] = 2,
    selector: Annotated[
        list[str] | None, typer.Option(help=f"quest, infllm_v2; {_LIST}.", show_default="quest")
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help=f"Tokens, or a share of the length like 1/8; {_LIST}.", show_default="1/8"),
    ] = None,
    block_size: Annotated[
        list[str] | None, typer.Option(help=f"16, 32, 64 or 128; {_LIST}.", show_default="32")
    ] = None,
    speculate: Annotated[
        list[str] | None, typer.Option(help=f"off is serial, on is PRR; {_LIST}.", show_default="off,on")
    ] = None,
    forced: Annotated[
        bool, typer.Option(help="Decode with the forced blocks alone as well: what is answered if nothing is selected.")
    ] = True,
    dense_layers: Annotated[str, typer.Option(help="First layers that stay dense: auto (two) or a number.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="By default float32, on a GPU bfloat16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Everything, in float32: takes the place of the options from --task to --dense-layers."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the device, each with its own models.")] = 1,
    output: Annotated[Path, typer.Option(help="A folder: a file a cell, results.json, plots.")] = Path("eval"),
    plots: Annotated[bool, typer.Option(help="Draw figures (matplotlib).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON.")] = False,
) -> None:
    """Answer retrieval tasks and continue real text with dense, serial sparse and PRR decoding; compare all answers.

    The end of each question and each answer are decoded under the setting; the prompt before is read densely. "forced"
    selects nothing: where it answers as well, the dense layers do, and accuracy says nothing of the selector. Run it
    again with the same output to go on where it was stopped. Models with an indexer select by it: budgets and block
    sizes are the others', and "dense" is the stock model.

    Exit codes: 0 done, 1 PRR differs from serial (a bug), 2 wrong argument, 3 no such model, 4 not fetched,
    130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes), one_line_refusals():
        check_device(device)
        if plots and find_spec("matplotlib") is None:
            raise CommandError("--plots: expected matplotlib, got none; pip install 'hf_sparse_prr[plots]'", EXIT_USAGE)
        models = tuple(words_of("--model", model) or _TINY)
        if full:
            _check_alone(context)
            parts = parts_of_all(models, device, dtype or "float32")
        else:
            tasks = words_of("--task", task) or list(TASKS)
            grid = Grid(
                models=models,
                tasks=() if tasks == ["none"] else tuple(tasks),
                lengths=tuple(numbers_of("--length", length) or [4096]),
                depths=tuple(_depths(words_of("--depth", depth) or ["any"])),
                texts=tuple(words_of("--text", text)),
                text_tokens=text_tokens,
                episodes=episodes,
                windows=windows,
                selectors=tuple(words_of("--selector", selector) or ["quest"]),
                budgets=tuple(words_of("--budget", budget) or ["1/8"]),
                block_sizes=tuple(numbers_of("--block-size", block_size) or [32]),
                modes=(
                    "dense",
                    *((FORCED,) if forced else ()),
                    *_modes(words_of("--speculate", speculate) or ["off", "on"]),
                ),
                dense_layers=int(dense_layers) if dense_layers.isdecimal() else dense_layers,
                dtype=str(dtype_of(dtype, device)).removeprefix("torch."),
                device=device,
            )
            parts = {"": grid}
        writable(output / "results.json")
        try:
            with Bar(notes) as bar:
                if jobs > 1:
                    run_jobs(parts, output, jobs, bar)
                found = evaluate_parts(parts, output, bar)
        except LoadError as error:
            raise CommandError(error, EXIT_MODEL) from error
        except FetchError as error:
            raise CommandError(error, EXIT_FETCH) from error
        except ProcessExitedException as error:
            if error.signal_name is None:
                raise
            raise _ended(str(error)) from error
        except ProcessRaisedException as error:  # its text is all that is left of the process's own error
            if "OutOfMemoryError" not in str(error):
                raise
            raise _ended("out of memory") from error
        found["command"] = shlex.join(["hf-sparse-prr", *sys.argv[1:]])
        write(output / "results.json", found)
        if as_json:
            print(json.dumps(found))
        else:
            show(Console(), found)
        if plots:
            from hf_sparse_prr.commands.eval_plots import draw

            drawn = [
                path
                for part in parts
                for path in draw(output / "plots" / part, [cell for cell in found["cells"] if cell["part"] == part])
            ]
            for path in drawn:
                notes.print(f"drawn: {path}", soft_wrap=True, highlight=False, markup=False)
            if not drawn:
                notes.print("nothing drawn: figures need two budgets, or two depths or lengths with --depth")
        if differing(found["cells"])[1]:
            raise CommandError("PRR differs from serial decoding; see above", EXIT_DIFFERENT)


def _ended(why: str) -> CommandError:
    told = f"--jobs: expected processes that live, got one that was ended ({why}); what is measured is kept: "
    return CommandError(f"{told}run it again, with fewer jobs if memory was short", EXIT_USAGE)


def _check_alone(context: typer.Context) -> None:
    """--full chooses what is evaluated."""
    free = {"model", "dtype", "device", "full", "jobs", "output", "plots", "as_json"}
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in free and source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise CommandError(f"{option}: expected nothing beside --full, which chooses it, got a value", EXIT_USAGE)


def _depths(words: list[str]) -> list[float | None]:
    try:
        found = [None if word == "any" else float(word) for word in words]
    except ValueError as error:
        raise CommandError(f"--depth: expected numbers from 0 to 1, or any, got {words}", EXIT_USAGE) from error
    for depth in found:
        if depth is not None and not 0.0 <= depth <= 1.0:
            raise CommandError(f"--depth: expected numbers from 0 to 1, or any, got {depth}", EXIT_USAGE)
    return found


def _modes(words: list[str]) -> list[str]:
    names = {"off": "serial", "on": "prr"}
    for word in words:
        if word not in names:
            raise CommandError(f"--speculate: expected off, on, got {word!r}", EXIT_USAGE)
    return [names[word] for word in sorted(words)]
