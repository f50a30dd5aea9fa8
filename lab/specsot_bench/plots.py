"""Draws plots of what was measured: bars with their spread, and shares of a whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specsot.errors import InvalidRequest
from specsot_bench.core.method_page import by_length

# Figures of a row by key.
Row = Mapping[str, Any]

# Colours of the bars, see MEANING.
PLAIN = "#444444"
RIVAL = "#b0703c"
SAME = "#3465a4"
OTHER = "#5b9a3c"
# What each colour means in the legend.
MEANING = {
    PLAIN: "plain",
    RIVAL: "Transformers",
    SAME: "writes plain's text",
    OTHER: "may write another text",
}
# Dots per inch of a PNG. Untuned.
DPI = 110


@contextmanager
def picture(
    file: Path, title: str, size: tuple[float, float], panels: int = 1, **shared_axes: bool
) -> Generator[list[Any]]:
    """Yield the panels of a picture, side by side; at the end of the context, add one legend of their labels
    and write a PNG.

    Labels that are equal appear once in the legend; without labels there is no legend. If the context
    raises, no file is written.

    file: Path of the PNG.
    title: Title above the panels.
    size: Width and height in inches.
    panels: Number of panels.
    shared_axes: Keywords `sharex=True` or `sharey=True` of matplotlib's subplots.
    Raises InvalidRequest if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidRequest("plots need matplotlib: pip install 'specsot[bench]'", field="plots") from None
    chart: Any = Figure(figsize=size, layout="constrained")
    axes = list(chart.subplots(1, panels, squeeze=False, **shared_axes)[0])
    yield axes
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    chart.suptitle(title)
    labels = {label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels())}
    if labels:
        legend_place = {"loc": "outside lower center", "ncols": min(len(labels), 5), "frameon": False}
        chart.legend(labels.values(), labels.keys(), **legend_place)
    chart.savefig(file, dpi=DPI, bbox_inches="tight")


def bars(
    panel: Any,
    names: Sequence[str],
    values: Sequence[float],
    bar_labels: Sequence[str],
    bar_colours: Sequence[str] | str = SAME,
    spread: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw a bar for each value, the first on top, with a label after it.

    The labels' order is that of the values.

    panel: Axes object of matplotlib.
    names: Names to the left of the bars.
    values: Lengths of the bars.
    bar_labels: Labels to the right of the bars.
    bar_colours: One colour for all bars, or one for each.
    spread: Minimum and maximum of each value; empty: no error bars are drawn.
    """
    error_bars = None
    if spread:
        error_bars = [[max(value - low, 0) for value, (low, _) in zip(values, spread)],
                  [max(high - value, 0) for value, (_, high) in zip(values, spread)]]  # fmt: skip
    drawn_bars = panel.barh(range(len(values)), values, xerr=error_bars, color=bar_colours, ecolor="#999999")
    # A white box keeps a label readable where it lies over the line at 1.
    label_box = {"facecolor": "white", "linewidth": 0, "pad": 1}
    panel.bar_label(drawn_bars, bar_labels, padding=4, fontsize=8, bbox=label_box)
    panel.set_yticks(range(len(values)), names)
    panel.margins(x=0.25)
    # Panels may share the axis, which must be inverted once.
    if not panel.yaxis_inverted():
        panel.invert_yaxis()


def draw(rows: Sequence[Row], title: str, stem: Path) -> None:
    """Write `stem`-speed.png and `stem`-memory.png, with a panel for every length; nothing if no row was
    measured.

    Existing files are replaced. Skipped rows are not drawn.

    rows: Rows of a table.
    title: Title above the panels.
    stem: Path of the pictures without their ending.
    Raises InvalidRequest if matplotlib is not installed.
    """
    lengths = by_length([row for row in rows if "skipped" not in row])
    max_rows = max(map(len, lengths.values()), default=0)
    size = 5.2 * len(lengths) + 2, 0.34 * max_rows + 1.6
    for kind, fill_panel in (("speed", _speeds), ("memory", _memory)) if lengths else ():
        file = stem.with_name(f"{stem.name}-{kind}.png")
        with picture(file, title, size, len(lengths), sharex=True) as panels:
            for panel, (tokens, length_rows) in zip(panels, lengths.items()):
                fill_panel(panel, length_rows)
                panel.set_title(f"{tokens} tokens")
            for colour, meaning in MEANING.items():
                panels[0].plot([], [], "s", color=colour, label=meaning)


def draw_if_possible(draw: Callable[[], object]) -> None:
    """Call a function that draws; if matplotlib is missing, print a line instead.

    Every InvalidRequest is printed, on stderr; other exceptions are passed on.

    draw: Draws and writes pictures; it takes no arguments.
    """
    try:
        draw()
    except InvalidRequest as error:
        print(f"specsot: {error}", file=sys.stderr)


def _speeds(panel: Any, rows: Sequence[Row]) -> None:
    """Draw the speedup of each row, with its range.

    The label of a bar is its tokens per second, and a line marks the speed of the baseline, 1.

    panel: Axes object of matplotlib.
    rows: Measured rows of one length.
    """
    bar_labels = [f"{row['tokens_per_second']:.0f} tok/s" for row in rows]
    _methods(panel, rows, "speedup", bar_labels, [row["speedup_range"] for row in rows])
    panel.axvline(1, color=PLAIN, linewidth=0.8)
    panel.set_xlabel("speedup over plain decoding")


def _memory(panel: Any, rows: Sequence[Row]) -> None:
    """Draw the memory of each row.

    panel: Axes object of matplotlib.
    rows: Measured rows of one length.
    """
    _methods(panel, rows, "memory_mib", [f"{row['memory_mib']:.1f}" for row in rows])
    panel.set_xlabel("own memory, MiB")


def _methods(
    panel: Any,
    rows: Sequence[Row],
    key: str,
    bar_labels: Sequence[str],
    spread: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw a bar for each method, in its colour.

    panel: Axes object of matplotlib.
    rows: Measured rows of one length.
    key: Key of the figure that is drawn.
    bar_labels: Labels to the right of the bars.
    spread: Minimum and maximum of each figure; empty: no error bars are drawn.
    """
    names = [row["method"] for row in rows]
    values = [row[key] for row in rows]
    bars(panel, names, values, bar_labels, list(map(_colour, rows)), spread)


def _colour(row: Row) -> str:
    """Return a method's colour, one of the keys of MEANING: by whether Transformers wrote the answer, whether
    the method is the baseline, and whether it must write the baseline's text.

    Transformers takes precedence over the baseline, and the baseline over the text.

    row: Figures of the method by key.
    """
    if row["rival"]:
        return RIVAL
    if row["method"] == "plain":
        return PLAIN
    return SAME if row["exact"] else OTHER
