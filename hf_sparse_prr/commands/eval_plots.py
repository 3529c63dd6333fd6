"""Figures of an evaluation: accuracy against budget, and for each setting a map of depth by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_LINES = 16  # that a figure can take


def draw(folder: Path, cells: list[dict[str, Any]]) -> list[Path]:
    """Write PNG files to `folder`, those that the cells have something for; returns them."""
    scored = [cell for cell in cells if "accuracy" in cell]
    made = []
    for model in dict.fromkeys(cell["model"] for cell in scored):
        here = [cell for cell in scored if cell["model"] == model]
        name = "".join(letter if letter.isalnum() else "_" for letter in model)
        if len({cell["budget"] for cell in here if cell["mode"] == "serial"}) > 1:
            made.append(_budgets(folder / f"{name}-budget.png", model, here))
        if len({(cell["length"], cell["depth"]) for cell in here if cell["depth"] is not None}) > 1:
            made += _maps(
                folder, name, model, [cell for cell in here if cell["depth"] is not None and cell["mode"] != "prr"]
            )
    return made


def _budgets(path: Path, model: str, cells: list[dict[str, Any]]) -> Path:
    """A line a task, selector, block size and length, or where those are too many their mean over tasks; dense as a
    dotted one. PRR's would lie on serial's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    lines = _lines(cells, ("task", "length", "selector", "block_size"))
    if len(lines) > _LINES:
        lines = _lines(cells, ("length", "selector", "block_size"))
    for label, points in lines.items():
        budgets = sorted(points)
        axes.plot(budgets, [sum(points[at]) / len(points[at]) for at in budgets], marker="o", label=label)
    dense = [cell["accuracy"] for cell in cells if cell["mode"] == "dense"]
    if dense:
        axes.axhline(sum(dense) / len(dense), linestyle=":", color="black", label="dense, mean")
    axes.set(xlabel="budget, tokens", ylabel="exact answers", title=model, ylim=(-0.03, 1.03), xscale="log")
    axes.legend(fontsize=6, ncols=2)
    return _saved(figure, path)


def _lines(cells: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, dict[int, list[float]]]:
    """Serial accuracies by what `names` say of a cell, and by budget."""
    found: dict[str, dict[int, list[float]]] = {}
    for cell in cells:
        if cell["mode"] == "serial":
            label = " ".join(str(cell[name]) for name in names)
            found.setdefault(label, {}).setdefault(cell["budget"], []).append(cell["accuracy"])
    return found


def _maps(folder: Path, name: str, model: str, cells: list[dict[str, Any]]) -> list[Path]:
    from matplotlib.figure import Figure

    made = []
    lengths, depths = sorted({cell["length"] for cell in cells}), sorted({cell["depth"] for cell in cells})
    for task, label in dict.fromkeys((cell["task"], _share(cell)) for cell in cells):
        grid = [[float("nan")] * len(lengths) for _ in depths]
        for cell in cells:
            if (cell["task"], _share(cell)) == (task, label):
                grid[depths.index(cell["depth"])][lengths.index(cell["length"])] = cell["accuracy"]
        figure = Figure(figsize=(1.5 + 0.7 * len(lengths), 1.5 + 0.4 * len(depths)), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(grid, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        axes.set(xlabel="tokens", ylabel="depth", title=f"{model}\n{task}, {label}")
        figure.colorbar(image, label="exact answers")
        made.append(_saved(figure, folder / f"{name}-{task}-{label}.png"))
    return made


def _share(cell: dict[str, Any]) -> str:
    """The setting of a cell without what changes with the length."""
    if cell["mode"] == "dense" or not cell["asked"]:
        return str(cell["label"])
    return f"{cell['mode']}-{cell['selector']}-{cell['asked'].replace('/', 'of')}-{cell['block_size']}"


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
