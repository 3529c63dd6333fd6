"""What an evaluation shows: accuracy by task and setting, distance from dense on texts, and whether PRR is exact."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hf_sparse_prr.commands.tables import percent, say
from hf_sparse_prr.evidence.evaluate import differing


def show(out: Console, found: dict[str, Any]) -> None:
    cells = found["cells"]
    lines = [", ".join(f"{name} {value}" for name, value in each.items()) for each in environments(found)]
    say(out, *lines, found["command"])
    for key in dict.fromkeys(_table_of(cell) for cell in cells):
        part, model, length = key
        here = [cell for cell in cells if _table_of(cell) == key]
        tasks = [cell for cell in here if "accuracy" in cell]
        texts = [cell for cell in here if "perplexity" in cell]
        name = f"{f'{part}: ' if part else ''}{model}, {length} tokens"
        if tasks:
            say(out, "", f"{name}: exact answers")
            out.print(accuracy_table(tasks))
        if texts:
            say(out, "", f"{name}: against dense")
            out.print(text_table(texts))
    say(out, verdict(cells))


def environments(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that the cells were measured in, for a run may go on elsewhere."""
    every = [cell.get("environment", found["environment"]) for cell in found["cells"]] or [found["environment"]]
    return [each for at, each in enumerate(every) if each not in every[:at]]


def _table_of(cell: dict[str, Any]) -> tuple[str, str, int]:
    return cell["part"], cell["model"], cell["length"]


def verdict(cells: list[dict[str, Any]]) -> str:
    """One line on exactness."""
    pairs, wrong = differing(cells)
    answers = sum(len(cell.get("answers", ())) for cell in cells if cell["mode"] == "prr")
    if wrong:
        names = [" ".join(str(cell[key]) for key in ("model", "task", "length", "label")) for cell in wrong]
        return f"PRR DIFFERS from serial in {len(wrong)} of {pairs} cells, this is a bug: {', '.join(names)}"
    if not pairs:
        return "PRR is compared with serial nowhere: no cell of both"
    equal = f"PRR equals serial in all {pairs} cells: {answers} answers, and every logit to the bit"
    idle = sum(cell["mode"] == "prr" and not cell.get("selector_calls", 1) for cell in cells)
    return equal + (f"; in {idle} of them nothing was selected, all of it is dense" if idle else "")


def accuracy_table(cells: list[dict[str, Any]]) -> Table:
    """A row a setting, a column a task; depths are averaged. Narrow, so that eight tasks fit a terminal."""
    names = list(dict.fromkeys(cell["task"] for cell in cells))
    table = Table(box=SIMPLE, padding=0, collapse_padding=True)
    words = [word for cell in cells for word in _spaced(cell["label"]).split()]
    table.add_column("how", min_width=max(map(len, words)))  # wraps between words: what is right of it is cut off
    for name in [*names, "mean", "hit_rate"]:
        table.add_column(name.replace("needle_", "").replace("_", "\n"), justify="right", min_width=5, no_wrap=True)
    for label in dict.fromkeys(cell["label"] for cell in cells):
        shares = [_mean(cells, label, task) for task in [*names, None]]
        row = [percent(share, 1).replace("100.0", "100") for share in [*shares, _mean(cells, label, value="hit_rate")]]
        table.add_row(_spaced(label), *row)
    return table


def _spaced(label: str) -> str:
    return label.replace("-", " ").replace("_", " ")


def text_table(cells: list[dict[str, Any]]) -> Table:
    table = Table("text", "setting", "perplexity", "top-1 as dense", "KL, nats a token", "hit rate")
    for cell in cells:
        rate = cell.get("hit_rate")
        table.add_row(
            cell["task"].partition(":")[2],
            cell["label"],
            f"{cell['perplexity']:.3f}",
            percent(cell["agreement"], 1),
            f"{cell['kl']:.5f}",
            percent(rate, 1),
        )
    return table


def _mean(cells: list[dict[str, Any]], label: str, task: str | None = None, value: str = "accuracy") -> float | None:
    here = [cell for cell in cells if cell["label"] == label and task in (None, cell["task"])]
    chosen = [cell[value] for cell in here if value in cell]
    return sum(chosen) / len(chosen) if chosen else None
