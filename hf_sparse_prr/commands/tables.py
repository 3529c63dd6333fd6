"""What the tables of the benchmarks share."""

from __future__ import annotations

from typing import Any

from rich.console import Console

_NOISY = 0.25  # a larger spread is said


def say(out: Console, *lines: str) -> None:
    for line in lines:
        out.print(line, soft_wrap=True, highlight=False, markup=False)


def machine_line(found: dict[str, Any]) -> str:
    threads, kernels = found["threads"], found["kernels"]
    return (
        f"{found['device']}, {threads} thread{'' if threads == 1 else 's'}, torch {found['torch']}, triton "
        f"{found['triton'] or 'none'}, {found['dtype']}, kernels: {kernels['backend']} ({kernels['source']})"
    )


def opening(out: Console, found: dict[str, Any], *lines: str) -> None:
    """What ran where, the benchmark's own lines, the command, and why the kernels aren't those of "auto", if so."""
    fallback = found["kernels"]["fallback"]
    say(out, machine_line(found), *lines, found["command"], *([fallback] if fallback else []))


def noise_lines(spreads: dict[str, float | None]) -> list[str]:
    """What the spreads of times, by their names, say about the machine; nothing where all are small."""
    known = {name: spread for name, spread in spreads.items() if spread is not None and spread > _NOISY}
    if not known:
        return []
    worst = max(known, key=lambda name: known[name])
    return [
        f"noisy: in {len(known)} of {len(spreads)} times the middle half of the calls spreads over more than "
        f"{_NOISY:.0%} of the median ({worst}: {known[worst]:.0%}); OMP_NUM_THREADS=1 or a quiet machine"
    ]


def percent(share: float | None, digits: int = 0) -> str:
    return "-" if share is None else f"{share:.{digits}%}"
