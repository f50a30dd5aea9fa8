"""The lines of a run as a picture: how much faster a plan is, quality of both, and whom a judge prefers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from specsot_lab.eval.aggregate import SLOWER, CategoryRow

DIRECT, SOT, TIE = "#8c96a3", "#1f6feb", "#d7dbe0"
DPI = 120


def plot(lines: Sequence[CategoryRow], file: Path) -> None:
    """One PNG."""
    figure_of(lines).savefig(file, dpi=DPI)


def figure_of(lines: Sequence[CategoryRow]) -> Figure:
    """A row for each category, the first one on top; the judge's panel only where one was asked."""
    judged = any(line.wins for line in lines)
    panels = 3 if judged else 2
    figure = Figure(figsize=(3.2 + 3 * panels, 1.8 + 0.42 * len(lines)))
    figure.set_layout_engine("constrained", wspace=0.06)
    axes: Any = figure.subplots(1, panels, sharey=True)
    draw_speed(axes[0], lines)
    draw_quality(axes[1], lines)
    if judged:
        draw_wins(axes[2], lines)
    axes[0].set_yticks(range(len(lines)), [name_of(line) for line in lines])
    axes[0].invert_yaxis()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Planned answers against direct ones")
    labels = {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels())}
    figure.legend(
        labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), frameon=False
    )
    return figure


def name_of(line: CategoryRow) -> str:
    """As in the table, with the number of questions."""
    return f"{line.task}: {line.category.removeprefix(f'{line.task}/')} ({line.questions})"


def draw_speed(axes: Any, lines: Sequence[CategoryRow]) -> None:
    bars = axes.barh(range(len(lines)), [line.speedup for line in lines], color=SOT, height=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=3, bbox={"facecolor": "white", "linewidth": 0, "pad": 1})
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(SLOWER, color="black", linewidth=0.8, linestyle=":", label=f"pays from {SLOWER}")
    axes.set_title("tokens per second, planned over direct", fontsize="medium")
    axes.margins(x=0.15)


def draw_quality(axes: Any, lines: Sequence[CategoryRow]) -> None:
    """Of both; nothing where a task has no score."""
    for offset, name, color in ((-0.2, "direct", DIRECT), (0.2, "sot", SOT)):
        rows = [row + offset for row in range(len(lines))]
        axes.barh(
            rows, [getattr(line, f"{name}_quality") or 0 for line in lines], 0.36, color=color, label=name
        )
    for row, line in enumerate(lines):
        if line.direct_quality is None:
            axes.text(0.01, row, "not scored", va="center", color=DIRECT)
    axes.set_xlim(0, 1)
    axes.set_title("quality, the task's own score", fontsize="medium")


def draw_wins(axes: Any, lines: Sequence[CategoryRow]) -> None:
    """Shares of all questions; those without a verdict are left out on the right."""
    left = [0.0] * len(lines)
    for name, label, color in (("sot", "sot", SOT), ("ties", "even", TIE), ("direct", "direct", DIRECT)):
        shares = [getattr(line.wins, name) / line.questions if line.wins else 0.0 for line in lines]
        axes.barh(range(len(lines)), shares, left=left, height=0.6, color=color, label=label)
        left = [before + share for before, share in zip(left, shares)]
    axes.set_xlim(0, 1)
    axes.set_title("preferred by the judge, share of questions", fontsize="medium")
