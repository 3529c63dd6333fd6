"""How `bench layer` looks for a layer without an indexer: one table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from hf_sparse_prr.commands.tables import noise_lines, opening, percent, say


def show(out: Console, found: dict[str, Any]) -> None:
    """What ran where, and the table."""
    opening(out, found)
    shares, sizes = found["floor_share"], found["shape"]
    caption = "{name}: {heads} heads over {kv_heads} KV heads of {head_dim}, {tokens} tokens, ".format(**sizes)
    caption += f"batch {sizes['batch']}; {found['selector']}, budget {found['budget']}; "
    caption += f"PRR hit rate {percent(found['hit_rate'], 1)}"
    columns = ("setting", "ms a step", "ratio to stock", "K/V and summary bytes", *(["of floor"] if shares else []))
    table = Table(*columns, caption=caption)
    for name, ms in found["ms"].items():
        row = [name, f"{ms:.3f}", f"{found['ratio_to_stock'][name]:.2f}", f"{found['kv_bytes_per_step'][name]:,.0f}"]
        table.add_row(*row, *([percent(shares[name])] if shares else []))
    out.print(table)
    say(out, *noise_lines(found["spread"]))
