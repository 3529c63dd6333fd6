"""How `bench layer` looks for a layer with an indexer: a table for each context, another of graphs, one of prompts."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.commands.tables import noise_lines, opening, percent, say


def show(out: Console, found: dict[str, Any]) -> None:
    """What ran where, and the tables."""
    sizes = found["shape"]
    opening(out, found, "{name}: {heads} heads, {index_topk} tokens selected, random weights".format(**sizes))
    for each in found["contexts"]:
        out.print(_steps(each))
        if each["captured"]:
            out.print(_captured(each))
        far = f"by modules {each['error']:.1e} of the largest output from stock, as measured {each['drift']:.1e}"
        same = "; captured steps have the bits of eager ones" if each["captured"] else ""
        say(out, f"PRR hit rate {percent(each['hit_rate'], 1)}; {far}{same}", *noise_lines(each["spread"]))
    for each in found["prefill"]:
        say(out, _prompt(each))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=(0, 0, 0, 1))
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column else "left")
    return table


def _steps(each: dict[str, Any]) -> Table:
    table = _table(f"{each['tokens']} tokens: steps with an idle GPU or CPU", "", "ms", "to stock", "cache bytes")
    for name, ms in each["ms"].items():
        table.add_row(
            name, f"{ms:.3f}", f"{each['ratio_to_stock'][name]:.3f}", f"{each['kv_bytes_per_step'][name]:,.0f}"
        )
    return table


def _captured(each: dict[str, Any]) -> Table:
    """floor: what reading weights and cache takes.  rest: what a step takes beyond the weights."""
    table = _table(
        f"{each['tokens']} tokens: steps in a CUDA graph", "", "us", "floor us", "of floor", "rest us", "to stock"
    )
    for name, row in each["captured"].items():
        cells = ["-"] * 3
        if row["floor_us"] is not None:
            cells = [f"{row['floor_us']:.1f}", percent(row["floor_share"]), f"{row['beyond_weights_us']:.1f}"]
        ratio = f"{1e-3 * row['us'] / each['ms']['stock']:.4f}"
        table.add_row(name, f"{row['us']:.1f}", *cells, ratio)
    return table


def _prompt(each: dict[str, Any]) -> str:
    taken = []
    for name, ms in each["ms"].items():
        peak = each["peak_bytes"][name]
        taken.append(f"{name} {ms:,.0f} ms" + ("" if peak is None else f" and {peak / 2**30:.2f} GiB"))
    said = f"a prompt of {each['tokens']} tokens: {', '.join(taken)}"
    if "stock" in each["ms"]:
        said += f", {each['ms']['stock'] / each['ms']['sparse']:.1f} times as fast"
    return said
