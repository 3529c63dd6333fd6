"""How `bench layer` looks: one table, of a layer with or without an indexer of its own."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from hf_sparse_prr.commands.tables import noise_lines, opening, percent, say


def show(out: Console, found: dict[str, Any]) -> None:
    """What ran where, the table, and what a prompt took."""
    opening(out, found)
    shares, sizes, indexed = found["floor_share"], found["shape"], "index_topk" in found["shape"]
    hits = f"PRR hit rate {percent(found['hit_rate'], 1)}"
    if indexed:
        caption = "{name}: {heads} heads, {tokens} tokens, {index_topk} selected; ".format(**sizes)
        caption += f"{hits}; {found['error']:.1e} of the largest output from stock"
    else:
        caption = "{name}: {heads} heads over {kv_heads} KV heads of {head_dim}, {tokens} tokens, ".format(**sizes)
        caption += f"batch {sizes['batch']}; {found['selector']}, budget {found['budget']}; {hits}"
    read = "cache bytes" if indexed else "K/V and summary bytes"
    table = Table("setting", "ms a step", "ratio to stock", read, *(["of floor"] if shares else []), caption=caption)
    for name, ms in found["ms"].items():
        ratio = f"{found['ratio_to_stock'][name]:.{3 if indexed else 2}f}"
        row = [name, f"{ms:.3f}", ratio, f"{found['kv_bytes_per_step'][name]:,.0f}"]
        table.add_row(*row, *([percent(shares[name])] if shares else []))
    out.print(table)
    prefill = found.get("prefill")
    if prefill is not None:
        taken = ", ".join(f"{name} {ms:,.0f} ms" for name, ms in prefill["ms"].items())
        say(out, f"a prompt of {prefill['tokens']} tokens: {taken}")
    say(out, *noise_lines(found["spread"]))
