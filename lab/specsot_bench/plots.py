"""Draws plots of what was measured: bars with their spread, and shares of a whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specsot.errors import InvalidRequest
from specsot_bench.core.method_page import by_length

Row = Mapping[str, Any]

PLAIN = "#444444"
RIVAL = "#b0703c"
SAME = "#3465a4"
OTHER = "#5b9a3c"
MEANING = {
    PLAIN: "plain",
    RIVAL: "Transformers",
    SAME: "writes plain's text",
    OTHER: "may write another text",
}
DPI = 110


@contextmanager
def picture(
    file: Path, title: str, size: tuple[float, float], panels: int = 1, **shared: bool
) -> Generator[list[Any]]:
    """Draw panels side by side, with one legend of their labels, and write a PNG at the end of the context.

    shared: `sharex` or `sharey`. Raises InvalidRequest if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequest("plots need matplotlib: pip install 'specsot[bench]'", field="plots") from None
    drawing: Any = Figure(figsize=size, layout="constrained")
    axes = list(drawing.subplots(1, panels, squeeze=False, **shared)[0])
    yield axes
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    drawing.suptitle(title)
    labels = {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels())}
    if labels:
        below = {"loc": "outside lower center", "ncols": min(len(labels), 5), "frameon": False}
        drawing.legend(labels.values(), labels.keys(), **below)
    drawing.savefig(file, dpi=DPI, bbox_inches="tight")


def bars(
    panel: Any,
    names: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    colours: Sequence[str] | str = SAME,
    spread: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw a bar for each value, the first on top, with a text after it. spread: least and most of each
    value.
    """
    around = None
    if spread:
        around = [[max(value - low, 0) for value, (low, _) in zip(values, spread)],
                  [max(high - value, 0) for value, (_, high) in zip(values, spread)]]  # fmt: skip
    drawn = panel.barh(range(len(values)), values, xerr=around, color=colours, ecolor="#999999")
    white = {"facecolor": "white", "linewidth": 0, "pad": 1}  # over the line of 1
    panel.bar_label(drawn, texts, padding=4, fontsize=8, bbox=white)
    panel.set_yticks(range(len(values)), names)
    panel.margins(x=0.25)
    # Panels may share the axis, which must be inverted once.
    if not panel.yaxis_inverted():
        panel.invert_yaxis()


def draw(rows: Sequence[Row], title: str, stem: Path) -> None:
    """Write `stem`-speed.png and `stem`-memory.png, with a panel for every length. Raises InvalidRequest."""
    lengths = by_length([row for row in rows if "skipped" not in row])
    most = max(map(len, lengths.values()), default=0)
    size = 5.2 * len(lengths) + 2, 0.34 * most + 1.6
    for what, fill in (("speed", _speeds), ("memory", _memory)) if lengths else ():
        file = stem.with_name(f"{stem.name}-{what}.png")
        with picture(file, title, size, len(lengths), sharex=True) as panels:
            for panel, (tokens, some) in zip(panels, lengths.items()):
                fill(panel, some)
                panel.set_title(f"{tokens} tokens")
            for colour, says in MEANING.items():
                panels[0].plot([], [], "s", color=colour, label=says)


def drawn(draw: Callable[[], object]) -> None:
    """Draw; if matplotlib is missing, print a line instead."""
    try:
        draw()
    except InvalidRequest as error:
        print(f"specsot: {error}", file=sys.stderr)


def _speeds(panel: Any, rows: Sequence[Row]) -> None:
    """Draw the speedups."""
    texts = [f"{row['tokens_per_second']:.0f} tok/s" for row in rows]
    _methods(panel, rows, "speedup", texts, [row["speedup_range"] for row in rows])
    panel.axvline(1, color=PLAIN, linewidth=0.8)
    panel.set_xlabel("speedup over plain decoding")


def _memory(panel: Any, rows: Sequence[Row]) -> None:
    """Draw the memory of each method."""
    _methods(panel, rows, "memory_mib", [f"{row['memory_mib']:.1f}" for row in rows])
    panel.set_xlabel("own memory, MiB")


def _methods(
    panel: Any,
    rows: Sequence[Row],
    key: str,
    texts: Sequence[str],
    spread: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw a bar for each method."""
    names = [row["method"] for row in rows]
    values = [row[key] for row in rows]
    bars(panel, names, values, texts, list(map(_colour, rows)), spread)


def _colour(row: Row) -> str:
    """Return a method's colour."""
    if row["rival"]:
        return RIVAL
    if row["method"] == "plain":
        return PLAIN
    return SAME if row["exact"] else OTHER
