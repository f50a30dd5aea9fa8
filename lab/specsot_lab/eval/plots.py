"""The lines of a run as a picture: how much faster a plan is, quality of both, and whom a judge prefers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specsot_app.bench.plots import SAME, bars, picture, stack
from specsot_lab.eval.aggregate import SLOWER, CategoryRow

DIRECT, TIE = "#8c96a3", "#d7dbe0"


def plot(lines: Sequence[CategoryRow], file: Path) -> None:
    """One PNG: a row for each category; the judge's panel only where one was asked. Raises InvalidRequest."""
    count = 3 if any(line.wins for line in lines) else 2
    size = 3.2 + 3 * count, 1.8 + 0.42 * len(lines)
    with picture(file, "Planned answers against direct ones", size, count, sharey=True) as panels:
        fill(panels, lines)


def fill(panels: Sequence[Any], lines: Sequence[CategoryRow]) -> None:
    """Speed, quality, and where there is a third panel the judge's preferences."""
    names = [f"{one.task}: {one.category.removeprefix(f'{one.task}/')} ({one.questions})" for one in lines]
    speedups = [line.speedup for line in lines]
    bars(panels[0], names, speedups, [f"{speedup:.2f}" for speedup in speedups])
    panels[0].axvline(1, color="black", linewidth=0.8)
    panels[0].axvline(SLOWER, color="black", linewidth=0.8, linestyle=":", label=f"pays from {SLOWER}")
    panels[0].set_title("tokens per second, planned over direct", fontsize="medium")
    _fill_quality(panels[1], lines)
    if len(panels) > 2:
        wins = [(line.wins, line.questions) for line in lines]
        parts = {label: [getattr(won, name) / of if won else 0.0 for won, of in wins]
                 for name, label in (("sot", "sot"), ("ties", "even"), ("direct", "direct"))}  # fmt: skip
        stack(panels[2], parts, (SAME, TIE, DIRECT))
        panels[2].set_xlim(0, 1)
        panels[2].set_title("preferred by the judge, share of questions", fontsize="medium")


def _fill_quality(panel: Any, lines: Sequence[CategoryRow]) -> None:
    """Of both; nothing where a task has no score."""
    for offset, name, colour in ((-0.2, "direct", DIRECT), (0.2, "sot", SAME)):
        values = [getattr(line, f"{name}_quality") or 0 for line in lines]
        panel.barh([row + offset for row in range(len(lines))], values, 0.36, color=colour, label=name)
    for row, line in enumerate(lines):
        if line.direct_quality is None:
            panel.text(0.01, row, "not scored", va="center", color=DIRECT)
    panel.set_xlim(0, 1)
    panel.set_title("quality, the task's own score", fontsize="medium")
