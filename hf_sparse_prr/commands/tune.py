"""`hf-sparse-prr tune`: measure the kernels' launch parameters on this machine's GPU and keep them."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.commands.arguments import writable
from hf_sparse_prr.commands.terminal import EXIT_USAGE, Bar, CommandError, one_line_errors
from hf_sparse_prr.kernel_loader import resolve


def tune(
    output: Annotated[
        Path | None, typer.Option(help="The JSON file to write.", show_default="the one the kernels look for")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's JSON on stdout, and where it is.")] = False,
) -> None:
    """Time the launch parameters of the Triton kernels at published shapes and write the best to a JSON file.

    The file is named by the GPU; kernels read it when they first run in a process. A minute or two.

    Exit codes: 0 done, 2 wrong argument or no GPU to measure on, 130 stopped.
    """
    notes = Console(stderr=True)
    with one_line_errors(notes):
        new = None if output is None else writable(output)
        gpu = _gpu(device)
        kernels = resolve("auto").module.__name__  # those that will run: compiled ones have more to choose
        measuring = import_module(f"{kernels}.tune")  # here: it needs triton
        tuned = import_module(f"{kernels}.triton_kernels.tuned")

        path = output or tuned.user_folder() / tuned.file_name(torch.cuda.get_device_name(gpu))
        new = new or writable(path)
        with torch.cuda.device(gpu), Bar(notes) as bar:
            chosen = measuring.tune(gpu, bar)
        document = measuring.document(torch.cuda.get_device_name(gpu), chosen)
        new.write_text(json.dumps(document, indent=2) + "\n")
        new.replace(path)  # a process that starts meanwhile reads the old file or the new one
        if as_json:
            print(json.dumps({**document, "written_to": str(path)}, indent=2))
            return
        out = Console()
        out.print(_table(document["gpu"], chosen, tuned.DEFAULTS))
        for op, choice in chosen.items():
            for reason in choice.refused:
                out.print(f"{op}: not taken, {reason}", soft_wrap=True, highlight=False, markup=False)
        out.print(f"written to {path}", soft_wrap=True, highlight=False, markup=False)
        committed = tuned.committed(document["gpu"])
        if committed is not None:
            out.print(f"this GPU has a committed file, which comes first: {committed}", soft_wrap=True, markup=False)


def _gpu(name: str) -> torch.device:
    """The CUDA device of a name, with its index."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CommandError(f"--device: expected cuda, cuda:1, .., got {name!r}", EXIT_USAGE) from error
    if device.type != "cuda":
        raise CommandError(f"--device: expected cuda, cuda:1, .., got {name!r}: only GPU kernels are tuned", EXIT_USAGE)
    if not torch.cuda.is_available() or find_spec("triton") is None:
        missing = "Triton" if torch.cuda.is_available() else "a CUDA GPU"
        raise CommandError(f"expected a CUDA GPU and Triton to measure on, got a machine without {missing}", EXIT_USAGE)
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise CommandError(f"--device: expected one of {torch.cuda.device_count()} GPUs, got {name!r}", EXIT_USAGE)
    return torch.device("cuda", index)


def _table(gpu: str, chosen: dict[str, Any], defaults: dict[str, dict[str, int]]) -> Table:
    """One row an op and case: microseconds a call with the defaults and with what was chosen."""
    table = Table("op", "chosen", "case", title=f"{gpu}: us a call, median of CUDA graph replays")
    for column in ("defaults", "chosen", "saved"):
        table.add_column(column, justify="right")
    for op, choice in chosen.items():
        values = " ".join(f"{name}={value}" for name, value in choice.values.items())
        label = f"{values} (default)" if choice.values == defaults[op] else values
        for case, before in choice.before.items():
            after = choice.after[case]
            table.add_row(op, label, case, f"{before:.2f}", f"{after:.2f}", f"{1 - after / before:.1%}")
            op = label = ""
    return table
