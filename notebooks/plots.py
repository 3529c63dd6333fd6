"""What the notebooks draw with: colours that a colour-blind reader tells apart (Okabe and Ito's, and cividis), and
marks, hatches and numbers that a black-and-white printer keeps."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

BLUE, ORANGE, GREEN, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7"
GREY, WHITE = "#BBBBBB", "#FFFFFF"
HATCHES = ("", "//", "..", "xx", "\\\\")
NOT_READ, FORCED, HIT, MISSED, EXTRA = range(5)
KINDS = {
    FORCED: (GREY, "forced"),
    HIT: (BLUE, "predicted and selected"),
    MISSED: (ORANGE, "missed: selected, not predicted (x)"),
    EXTRA: (SKY, "extra: predicted, not selected (.)"),
}


def figure(columns=1, rows=1, width=4.2, height=3.0):
    """(figure, axes) of a size for a page; axes is an array where there are several."""
    plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout="constrained")


def bars(axes, values, title, unit):
    """A bar for each name, with its number above it."""
    colours = (BLUE, ORANGE, GREEN, SKY, PURPLE)
    for index, (name, value) in enumerate(values.items()):
        style = dict(color=colours[index % 5], hatch=HATCHES[index % 5], edgecolor="black", linewidth=0.6)
        axes.bar_label(axes.bar([name], [value], **style), fmt="%.3g", padding=2)
    axes.set(title=title, ylabel=unit)
    axes.margins(y=0.12)
    axes.tick_params(axis="x", labelrotation=15)


def heat_map(axes, values, rows, columns, title, labels, low=0.0, high=1.0):
    """values [len(rows)][len(columns)], None or NaN where there is none. Each cell has its number."""
    grid = np.array(values, dtype=float)
    axes.imshow(grid, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    axes.set(title=title, ylabel=labels[0], xlabel=labels[1])
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    for row, column in np.ndindex(grid.shape):
        value = grid[row, column]
        dark = np.isnan(value) or value < (low + high) / 2
        text = "-" if np.isnan(value) else f"{value:.2f}"
        axes.text(column, row, text, ha="center", va="center", color="white" if dark and text != "-" else "black")


def kinds_of(entries, head, blocks, forced):
    """What happened to each block at each step: an array [steps, blocks] of kinds, of one KV head of one batch row.

    entries: of `handle.trace`, of one layer.  forced: per entry, the set of its forced blocks.
    """
    grid = np.full((len(entries), blocks), NOT_READ)
    for step, (entry, always) in enumerate(zip(entries, forced, strict=True)):
        sets = [{block for block in part[0, head].tolist() if block >= 0} for part in entry[2:]]
        predicted, selected, missed = sets
        for kind, found in (
            (EXTRA, predicted - selected),
            (HIT, predicted & selected),
            (MISSED, missed),
            (FORCED, selected & always),
        ):
            grid[step, sorted(found)] = kind
    return grid


def trace(axes, grid, title):
    """Draw what `kinds_of` found: a row a step, a column a block."""
    colours = ListedColormap([WHITE, *(colour for colour, _ in KINDS.values())])
    axes.imshow(grid, cmap=colours, vmin=0, vmax=4, aspect="auto", interpolation="nearest")
    for kind, mark in ((MISSED, "x"), (EXTRA, ".")):
        steps, blocks = np.nonzero(grid == kind)
        axes.scatter(blocks, steps, marker=mark, s=9, color="black", linewidths=0.7)
    axes.set(title=title, xlabel="block of the context", ylabel="decode step")


def legend_of_kinds(owner):
    """Above a figure or axes, what the colours of `trace` mean."""
    handles = [Patch(facecolor=colour, edgecolor="black", label=label) for colour, label in KINDS.values()]
    owner.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
