"""The tables of `specsot bench quick` and `full` as pictures: how fast, and what speed costs in memory.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specsot.errors import InvalidRequest
from specsot_app.bench.core.tables import by_length

Row = Mapping[str, Any]

PLAIN, RIVAL, SAME, OTHER = "#444444", "#b0703c", "#3465a4", "#5b9a3c"
MEANING = {
    PLAIN: "plain",
    RIVAL: "Transformers",
    SAME: "writes plain's text",
    OTHER: "may write another text",
}


def plotter() -> Any:
    """matplotlib without a screen. Raises InvalidRequest where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise InvalidRequest("plots need matplotlib: pip install 'specsot[bench]'", field="plots") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(rows: Sequence[Row], title: str, stem: Path) -> list[Path]:
    """`stem`-speed.png and `stem`-memory.png; returns them. Raises InvalidRequest: no matplotlib."""
    pyplot = plotter()
    measured = {
        tokens: [row for row in some if "skipped" not in row] for tokens, some in by_length(rows).items()
    }
    lengths = {tokens: some for tokens, some in measured.items() if some}
    files: list[Path] = []
    for what, fill in (("speed", _speeds), ("memory", _memory)) if lengths else ():
        figure = _panels(pyplot, lengths, fill)
        file = stem.with_name(f"{stem.name}-{what}.png")
        _finished(figure, title).savefig(file, dpi=110, bbox_inches="tight")
        pyplot.close(figure)
        files.append(file)
    return files


def ratios(rows: Sequence[Row], title: str, file: Path) -> None:
    """A bar for each row's `ratio`, with its quartiles; rows that were skipped are left out."""
    measured = [row for row in rows if "skipped" not in row]
    values = [row["ratio"] for row in measured]
    below = [max(value - row["quartiles"][0], 0) for row, value in zip(measured, values)]
    above = [max(row["quartiles"][1] - value, 0) for row, value in zip(measured, values)]
    with _saved(file, (8, 0.4 * len(measured) + 1.6)) as panel:
        colours = [SAME if row.get("exact", True) else OTHER for row in measured]
        panel.barh(range(len(values)), values, xerr=[below, above], color=colours, ecolor="#999999")
        panel.axvline(1, color=PLAIN, linewidth=0.8)
        panel.set_yticks(range(len(values)), [row["name"] for row in measured])
        panel.set_title(title)
        panel.margins(x=0.2)
        ends = [value + more for value, more in zip(values, above)]
        _label(panel, ends, [f"{value:.2f}" for value in values])


def shares(rows: Mapping[str, Mapping[str, float]], title: str, file: Path) -> None:
    """A bar of 100 % for each row, cut into its parts, which are the same in all."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    with _saved(file, (9, 0.5 * len(rows) + 1.8)) as panel:
        left = [0.0] * len(rows)
        for part in parts:
            values = [100 * row.get(part, 0.0) / (sum(row.values()) or 1) for row in rows.values()]
            panel.barh(range(len(rows)), values, left=left, label=part)
            left = [before + value for before, value in zip(left, values)]
        panel.set_yticks(range(len(rows)), list(rows))
        panel.set_xlabel("% of a lap")
        panel.set_title(title)
        panel.legend(ncols=4, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.25))


def drawn(draw: Callable[[], object]) -> None:
    """Draw; a line instead where nothing can."""
    try:
        draw()
    except InvalidRequest as error:
        print(f"specsot: {error}", file=sys.stderr)


@contextmanager
def _saved(file: Path, size: tuple[float, float]) -> Generator[Any]:
    """One panel, the first row on top; written at the end. Raises InvalidRequest: no matplotlib."""
    pyplot = plotter()
    figure, panel = pyplot.subplots(figsize=size)
    yield panel
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _panels(
    pyplot: Any, lengths: Mapping[int, Sequence[Row]], fill: Callable[[Any, Sequence[Row]], None]
) -> Any:
    """One for every length, a bar for every method."""
    most = max(map(len, lengths.values()))
    size = 5.2 * len(lengths) + 2, 0.34 * most + 1.6
    figure, panels = pyplot.subplots(1, len(lengths), figsize=size, squeeze=False, sharex=True)
    for panel, (tokens, rows) in zip(panels[0], lengths.items()):
        fill(panel, rows)
        panel.set_yticks(range(len(rows)), [row["method"] for row in rows])
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.set_title(f"{tokens} tokens")
    return figure


def _speeds(panel: Any, rows: Sequence[Row]) -> None:
    """Speedups, with their range over the rounds."""
    values = [row["speedup"] for row in rows]
    ends = [max(row["speedup_range"][1], row["speedup"]) for row in rows]
    below = [value - min(row["speedup_range"][0], value) for row, value in zip(rows, values)]
    around = [below, [end - value for end, value in zip(ends, values)]]
    panel.barh(range(len(rows)), values, xerr=around, color=list(map(_colour, rows)), ecolor="#999999")
    panel.axvline(1, color=PLAIN, linewidth=0.8)
    panel.set_xlabel("speedup over plain decoding")
    _label(panel, ends, [f"{row['tokens_per_second']:.0f} tok/s" for row in rows])


def _memory(panel: Any, rows: Sequence[Row]) -> None:
    values = [row["memory_mib"] for row in rows]
    panel.barh(range(len(rows)), values, color=list(map(_colour, rows)))
    panel.set_xlabel("own memory, MiB")
    _label(panel, values, [f"{value:.1f}" for value in values])


def _label(panel: Any, ends: Sequence[float], texts: Sequence[str]) -> None:
    """Behind the end of each bar."""
    for place, (end, text) in enumerate(zip(ends, texts)):
        over = {"facecolor": "white", "linewidth": 0, "pad": 1}  # the line of 1
        panel.annotate(
            text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=over
        )


def _finished(figure: Any, title: str) -> Any:
    from matplotlib.patches import Patch

    figure.suptitle(title)
    handles = [Patch(color=colour, label=says) for colour, says in MEANING.items()]
    where = {"loc": "lower center", "bbox_to_anchor": (0.5, -0.06)}
    figure.legend(handles=handles, ncols=len(MEANING), frameon=False, **where)
    figure.tight_layout()
    return figure


def _colour(row: Row) -> str:
    if row["rival"]:
        return RIVAL
    if row["method"] == "plain":
        return PLAIN
    return SAME if row["exact"] else OTHER
