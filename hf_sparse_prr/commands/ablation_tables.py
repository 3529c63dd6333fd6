"""How `bench ablation` looks: a table for each shape."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.bench_ablation import SETTINGS
from hf_sparse_prr.commands.tables import opening, percent, say

_SAYS = {
    "serial": "serial",
    "S1": "S1: last blocks, or again",
    "S2": "S2: S1 + repair",
    "S3": "S3: S2 + EMA",
    "exact": "ours: S3 + exact",
}


def show(out: Console, found: dict[str, Any]) -> None:
    """Times as serial's share of speed: 1.10 is 1.10 times as fast."""
    opening(
        out,
        found,
        f"{found['selector']}, budget {found['budget']} in blocks of {found['block_size']}, batch {found['batch']}; "
        f"{found['timed_by']}, medians of {found['rounds']}",
    )
    for each in found["shapes"]:
        table = Table(title=f"{each['shape']}: us a layer, speed of serial's", box=box.SIMPLE, padding=(0, 0, 0, 1))
        table.add_column("", no_wrap=True)
        for at in each["contexts"]:
            table.add_column(f"{at['context']:,}", no_wrap=True, justify="right")
        for key in SETTINGS:
            rows = [at["settings"][key] for at in each["contexts"]]
            table.add_row(_SAYS[key], *(f"{row['us']:.1f} {1 / row['to_serial']:.2f}x" for row in rows))
        table.add_row("EMA, beside", *(f"{at['predict_us']:.1f}      " for at in each["contexts"]))
        out.print(table)
        for at in each["contexts"]:
            rates, errors = at["rates"], {key: at["settings"][key]["error"] for key in ("S2", "S3")}
            say(
                out,
                f"{at['context']:,} tokens: hits {percent(rates['last'], 1)} of the last blocks (all in "
                f"{percent(rates['whole'])} of the layers), {percent(rates['ema'], 1)} of the EMA; outputs differ from "
                f"serial's by {percent(errors['S2'], 1)} (S2) and {percent(errors['S3'], 1)} (S3), ours in no bit",
            )
