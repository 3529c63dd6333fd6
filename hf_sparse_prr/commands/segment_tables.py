"""How `bench segment` looks: a table for each context, of settings and of stages."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.commands.tables import noise_lines, opening, percent, say

_NAMES = {"dense": "dense SDPA", "dense_grouped": "dense, heads grouped", "serial": "serial sparse"}


def show(out: Console, found: dict[str, Any]) -> None:
    """One table a context, and what was checked and hit."""
    sizes = found["shape"]
    opening(
        out,
        found,
        f"{sizes['name']}: {sizes['heads']} heads over {sizes['kv_heads']} KV heads of {sizes['head_dim']}, batch "
        f"{sizes['batch']}; {found['selector']}, budget {found['budget']} in blocks of {found['block_size']}",
    )
    for each in found["contexts"]:
        out.print(_table(each, found))
        exact = each["exact"]
        replayed = "" if exact["graph_equals_eager"] is None else ", and a graph's replay the calls outside of it,"
        say(
            out,
            f"exact in {exact['steps']} steps, the last in {_layers(each)}: PRR equals serial{replayed} bit for bit; "
            f"selection equals a stable sort; output within {exact['output_error']:.1e} of dense attention over the "
            f"selection, scores within {exact['scores_error']:.1e} of the reference",
            f"natural PRR hit rate without forced blocks: {percent(each['natural']['hit_rate'], 1)}, weighted by score "
            f"{percent(each['natural']['hit_rate_weighted'], 1)}; queries correlated by {found['correlation']:g}",
        )
        if any(_rounded(name, row) for name, row in each["settings"].items()):
            say(out, f"hit rates asked for are rounded to whole blocks, of {found['blocks']['by_score']} by score")
        rows = {_label(*named): named[1] for named in (*each["settings"].items(), *each["stages"].items())}
        say(out, *noise_lines({label: row["spread"] for label, row in rows.items()}))


def _rounded(name: str, row: dict[str, Any]) -> bool:
    """Whether a setting like "prr 0.95" has another hit rate than its name says."""
    rate = name.partition(" ")[2]
    return rate not in ("", "natural") and abs(float(rate) - row["hit_rate"]) > 1e-6


def _layers(each: dict[str, Any]) -> str:
    return "1 layer" if each["layers"] == 1 else f"{each['layers']} layers in turn"


def _label(name: str, row: dict[str, Any]) -> str:
    """For "prr 0.95" this is "PRR, hits 95.1%", or what the rounded number of blocks is."""
    kind, _, rate = name.partition(" ")
    if not rate:
        return _NAMES.get(name, name)
    natural = " (natural)" if rate == "natural" else ""
    return f"{'PRR' if kind == 'prr' else kind}, hits {percent(row['hit_rate'], 1)}{natural}"


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
        share = [percent(row["floor_share"], 1) if row["floor_share"] else ""] if known else []
        table.add_row(label, f"{row['us']:,.1f}", *ratios, *moved, *share)

    for name, row in each["settings"].items():
        add(_label(name, row), row)
    table.add_section()
    for name, row in each["stages"].items():
        add(f"  {_label(name, row)}", row)
    return table
