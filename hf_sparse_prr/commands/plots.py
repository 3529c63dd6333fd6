"""Figures that the command line draws; matplotlib is an extra, loaded when one is asked for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_sparse_prr.budget import choices
from hf_sparse_prr.commands.arguments import writable
from hf_sparse_prr.commands.terminal import EXIT_USAGE, CommandError
from hf_sparse_prr.commands.token_tables import NAMES, growth, taken
from hf_sparse_prr.profile import Profile

_SUFFIXES = (".png", ".svg", ".pdf")
_HITS = (1.0, 0.95, 0.8)


def ready(path: Path) -> None:
    """CommandError where a figure couldn't be drawn there later."""
    if find_spec("matplotlib") is None:
        raise CommandError("--plot: expected matplotlib, got none; pip install 'hf_sparse_prr[plots]'", EXIT_USAGE)
    if path.suffix not in _SUFFIXES:
        raise CommandError(f"--plot: expected a file of {', '.join(_SUFFIXES)}, got {str(path)!r}", EXIT_USAGE)
    writable(path, "--plot")


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def plot_growth(found: dict[str, Any], path: Path) -> None:
    """Milliseconds a token against context (`taken`), of each setting of `bench token`: with the line through them and,
    where the bandwidth is known, from the first of them on how the bytes grow that a token reads of the cache."""
    contexts, sizes = found["contexts"], found["shape"]
    title = f"{found['device']}: {sizes['name']}, {sizes['layers']} layers, batch {sizes['batch']}, {found['selector']}"
    worked = any(row["gpu_ms"] is not None for row in contexts[0]["settings"].values())
    figure, axes = _axes(title, "tokens in the cache", "ms of GPU time a token" if worked else "ms a token")
    x = [each["context"] for each in contexts]
    lines = growth(found)
    for name in contexts[0]["settings"]:
        (drawn,) = axes.plot(x, [taken(each["settings"][name]) for each in contexts], "o", label=NAMES[name])
        if name in lines:
            base, slope, _ = lines[name]
            axes.plot([0, x[-1]], [base, base + slope * x[-1]], ":", color=drawn.get_color())
        if name in lines and found["bandwidth"]:
            rows = [each["settings"][name] for each in contexts]
            more = [1e3 * (row["cache_bytes"] - rows[0]["cache_bytes"]) / found["bandwidth"] for row in rows]
            label = f"{NAMES[name]}: its bytes"
            axes.plot(x, [taken(rows[0]) + ms for ms in more], "--", color=drawn.get_color(), alpha=0.5, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_profile(profile: Profile, path: Path) -> None:
    """Microseconds against context: the stages at a spec_ratio of 1, and whole steps at the best one."""
    key, tokens = profile.key, [at.context for at in profile.contexts]
    heads = f"{key.heads}/{key.kv_heads} heads of {key.head_dim}"
    title = f"{key.device}: {heads}, {key.selector}, {key.blocks} x {key.block_size}"
    figure, axes = _axes(title, "tokens in the cache", "us a layer")
    stages = {
        "selection": [at.select for at in profile.contexts],
        "speculation": [at.speculate[at.ratio(1.0)] for at in profile.contexts],
        "repair, hits 95%": [at.repair(1.0, 0.95) for at in profile.contexts],
    }
    for name, values in stages.items():
        axes.plot(tokens, values, marker=".", linestyle=":", label=name)
    axes.plot(tokens, [at.serial for at in profile.contexts], marker="o", color="black", label="serial step")
    for hit in _HITS:
        best = [min(us for _, us in choices(at, hit)) for at in profile.contexts]
        axes.plot(tokens, best, marker="s", label=f"PRR step, hits {hit:.0%} at ratio 1")
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{each // 1024}K" for each in tokens])
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
