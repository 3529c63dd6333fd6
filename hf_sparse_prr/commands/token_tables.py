"""How `bench token` looks: a table for each context, of settings."""

from __future__ import annotations

from statistics import linear_regression
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.commands.tables import noise_lines, opening, percent, say
from hf_sparse_prr.report import GraphReport

NAMES = {
    "dense": "dense, stock",
    "static": "stock, StaticCache",
    "compiled": "stock, compiled",
    "serial": "serial sparse",
    "prr": "PRR",
    "eager": "serial, no graphs",
    "auto": "PRR by the profile",
    "preallocated": "serial, compiled",
}


def show(out: Console, found: dict[str, Any]) -> None:
    """What ran where, one table a context, and what was checked, hit and captured."""
    sizes = found["shape"]
    opening(
        out,
        found,
        f"{sizes['name']}: {sizes['layers']} layers of random weights, batch {sizes['batch']}; {found['selector']}, "
        f"budget {found['budget']} in blocks of {found['block_size']}",
    )
    for each in found["contexts"]:
        rows = each["settings"]
        out.print(_table(each, found))
        if names := each["exact"]["same_bits"]:
            say(out, f"{', '.join(names)}: ids and logits of {each['exact']['tokens']} tokens are equal, bit for bit")
        if "prr" in rows:
            say(out, f"PRR hit rate {percent(rows['prr']['hit_rate'], 1)}")
        for name, row in rows.items():
            if row.get("choice"):
                say(out, f"{NAMES[name]}: {row['choice']}")
            graphs = GraphReport(**(row["graphs"] or {}))
            if graphs.captured or graphs.reason:
                say(out, f"{NAMES[name]}: {graphs}")
        say(out, *noise_lines({NAMES[name]: row["spread"] for name, row in rows.items()}))
    for name, (base, slope, farthest) in growth(found).items():
        line = f"{base:.2f} ms and {1e3 * slope * 1024:.2f} us for each 1K tokens"
        say(out, f"growth of {NAMES[name]}: {line}; at most {percent(farthest, 1)} off that line")


def taken(row: dict[str, Any]) -> float:
    """Milliseconds a token of a setting: those that the GPU works, where that is known. A host's other work is no
    function of the context."""
    worked: float | None = row["gpu_ms"]
    return row["ms"] if worked is None else worked


def growth(found: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """By setting, where there are three contexts: the line through its times (`taken`), ms at 0 and ms a token of
    context, and how far the farthest of them is from it, as a share of its own."""
    contexts = found["contexts"]
    lines = {}
    for name in contexts[0]["settings"] if len(contexts) > 2 else ():
        x = [each["context"] for each in contexts]
        y = [taken(each["settings"][name]) for each in contexts]
        slope, base = linear_regression(x, y)
        lines[name] = base, slope, max(abs(base + slope * a - b) / b for a, b in zip(x, y, strict=True))
    return lines


def _table(each: dict[str, Any], found: dict[str, Any]) -> Table:
    """GPU: ms a token in which it worked. first token: of a prompt whose K/V are random, but for the last token's;
    TTFT: of one that is computed. "of floor" is the share of the time that weights, K/V and summaries take to be read
    at the bandwidth of the data sheet."""
    prompt = "a computed prompt" if found["prefill"] else "random K/V"
    title = f"{each['context']} tokens, {prompt}: ms a token (TPOT), medians of {found['rounds']}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 0, 0, 1))
    known = found["bandwidth"] is not None
    on_gpu = any(row["peak_bytes"] is not None for row in each["settings"].values())
    optional = [*(["of floor"] if known else []), *(["peak GiB"] if on_gpu else [])]
    first = "TTFT" if found["prefill"] else "first token"
    worked = any(row["gpu_ms"] is not None for row in each["settings"].values())
    for column in ["", "TPOT", *(["GPU"] if worked else []), "min", "tokens/s", "to dense", first, *optional]:
        table.add_column(column, no_wrap=True, justify="right" if column else "left")
    for name, row in each["settings"].items():
        ratio = "-" if row["ratio_to_dense"] is None else f"{row['ratio_to_dense']:.2f}"
        gpu = [f"{row['gpu_ms']:,.2f}"] if worked else []
        cells = [f"{row['ms']:,.2f}", *gpu, f"{row['min']:,.2f}", f"{row['tokens_per_s']:,.1f}", ratio]
        cells += [f"{row['first_ms']:,.1f}", *([percent(row["floor_share"])] if known else [])]
        cells += [f"{row['peak_bytes'] / 2**30:.1f}"] if on_gpu else []
        table.add_row(NAMES[name], *cells)
    return table
