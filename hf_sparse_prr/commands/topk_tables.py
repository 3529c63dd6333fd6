"""How `bench topk` looks: a table for each row length and k, or one of what a guess is worth."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.commands.tables import noise_lines, opening, percent, say

_STATS = ("passes", "cand.", "fallback")


def show(out: Console, found: dict[str, Any], ablation: bool) -> None:
    """What ran where, the tables, what columns mean, and what was left out."""
    opening(
        out,
        found,
        f"{found['scores']} scores{', ragged rows' if found['ragged'] else ''}; us a call, {found['timed_by']}, "
        f"medians of {found['rounds']}",
    )
    if ablation:
        out.print(_ablation(found))
    else:
        for (n, k), cells in groupby(found["cells"], key=lambda cell: (cell["n"], cell["k"])):
            out.print(_table(n, k, list(cells), found["bandwidth"] is not None))
    say(out, _legend(ablation, found["bandwidth"] is not None), *noise_lines(_spreads(found["cells"])))
    for reason, cells in groupby(found["left_out"], key=lambda cell: cell["reason"]):
        names = ["{n} x {k} x {rows} {cache}".format(**cell) for cell in cells]
        shown = ", ".join(names if len(names) <= 12 else [*names[:11], f"{len(names) - 11} more (in the JSON)"])
        say(out, f"left out, {reason} ({len(names)}, N x k x rows): {shown}")


def _legend(ablation: bool, known: bool) -> str:
    """What the columns mean that are shown."""
    ratios = "/none: the time to that without a guess." if ablation else "/topk, /sort: the time to torch's."
    floor = "; floor: the share of the time that those take at the data sheet's bandwidth" if known else ""
    moved = "" if ablation else f" GB/s: of scores read once and indices written{floor}."
    return (
        f"wrong: rows that differ from a stable sort, and aren't timed. {ratios}{moved} Means of rows: passes, "
        "candidates, fallbacks of a search. The references use every guess, compiled kernels thresholds alone, "
        "Triton's none."
    )


def _spreads(cells: list[dict[str, Any]]) -> dict[str, float | None]:
    """Of every time, by what and where it was measured."""
    found = {}
    for cell in cells:
        at = "{n} x {k} x {rows} {cache}".format(**cell)
        found.update({f"{name} at {at}": spread for name, spread in cell["peers_spread"].items()})
        found.update({f"{name} at {at}": row["spread"] for name, row in cell["strategies"].items()})
    return found


def _number(value: float | None) -> str:
    """Of three digits or more, and not wide."""
    return "-" if value is None else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _of_search(row: dict[str, Any]) -> list[str]:
    return [f"{row['passes']:.1f}", f"{row['candidates']:.0f}", percent(row["fallback"])]


def _new(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, padding=0)
    for column in ("", *columns):
        table.add_column(column, no_wrap=True, justify="right" if column else "left")
    return table


def _table(n: int, k: int, cells: list[dict[str, Any]], known: bool) -> Table:
    """All cells of a row length and k."""
    shares = ["floor"] if known else []
    table = _new(f"N {n}, k {k}", "wrong", "us", "/topk", "/sort", "GB/s", *shares, *_STATS)
    for cell in cells:
        table.add_section()
        table.add_row(f"{cell['rows']} row{'s' if cell['rows'] > 1 else ''}, {cell['cache']}")
        for name, us in cell["peers"].items():
            ratios = [_number(us / cell["peers"][peer]) for peer in ("torch.topk", "torch.sort")]
            table.add_row(f" {name}", "", _number(us), *ratios)
        for name, row in cell["strategies"].items():
            measured = [_number(row[key]) for key in ("us", "to_topk", "to_sort", "gb_per_s")]
            share = [percent(row["floor_share"])] if known else []
            table.add_row(f" {name}", str(row["wrong"]), *measured, *share, *_of_search(row))
    return table


def _ablation(found: dict[str, Any]) -> Table:
    """One shape, a line a strategy, with times beside each other for each state of the cache."""
    cells = found["cells"]
    times = [column for cell in cells for column in (f"{cell['cache']} us", "/none")]
    shape = "N {n}, k {k}, rows {rows}".format(**cells[0]) if cells else "nothing was timed"
    table = _new(shape, "wrong", *times, *_STATS)
    for name in found["strategies"] if cells else ():
        rows = [cell["strategies"][name] for cell in cells]
        measured = []
        for cell, row in zip(cells, rows, strict=True):
            none = cell["strategies"].get("none", {}).get("us")
            to_none = row["us"] / none if row["us"] and none else None
            measured += [_number(row["us"]), _number(to_none)]
        table.add_row(name, str(max(row["wrong"] for row in rows)), *measured, *_of_search(rows[0]))
    return table
