"""The tables of `specsot bench quick` and `full` as pictures: how fast, and what speed costs in memory.

Refuses to know how figures came about. matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specsot.errors import InvalidRequest
from specsot_app.bench.typeset import by_length

Row = Mapping[str, Any]

PLAIN, RIVAL, SAME, OTHER = "#444444", "#b0703c", "#3465a4", "#5b9a3c"
MEANING = {PLAIN: "plain", RIVAL: "Transformers", SAME: "writes plain's text", OTHER: "writes another text"}


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
    drawn = [stem.with_name(f"{stem.name}-speed.png"), stem.with_name(f"{stem.name}-memory.png")]
    for file, make in zip(drawn, (_speeds, _memory)):
        figure = make(pyplot, lengths, title)
        figure.savefig(file, dpi=110, bbox_inches="tight")
        pyplot.close(figure)
    return drawn


def _speeds(pyplot: Any, lengths: Mapping[int, Sequence[Row]], title: str) -> Any:
    """Bars of speedups, the range over rounds on each; a panel for every length."""
    most = max(map(len, lengths.values()))
    figure, panels = pyplot.subplots(
        1, len(lengths), figsize=(5.2 * len(lengths) + 2, 0.34 * most + 1.6), squeeze=False, sharex=True
    )
    for panel, (tokens, rows) in zip(panels[0], lengths.items()):
        places = range(len(rows))
        values = [row["speedup"] for row in rows]
        around = [[max(value - row["speedup_range"][0], 0) for row, value in zip(rows, values)],
                  [max(row["speedup_range"][1] - value, 0) for row, value in zip(rows, values)]]  # fmt: skip
        panel.barh(places, values, xerr=around, color=[_colour(row) for row in rows], ecolor="#999999")
        panel.set_yticks(places, [row["method"] for row in rows])
        panel.invert_yaxis()
        panel.axvline(1, color=PLAIN, linewidth=0.8)
        for place, row in zip(places, rows):
            end = max(row["speedup_range"][1], row["speedup"])
            panel.annotate(f"{row['tokens_per_second']:.0f} tok/s", (end, place), (4, 0),
                           textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        panel.margins(x=0.18)
        panel.set_title(f"{tokens} tokens")
        panel.set_xlabel("speedup over plain decoding")
    return _finished(figure, title)


def _memory(pyplot: Any, lengths: Mapping[int, Sequence[Row]], title: str) -> Any:
    """Points: what each method holds, and how fast it is, at the greatest length."""
    tokens, rows = max(lengths.items())
    figure, panel = pyplot.subplots(figsize=(9, 6))
    for number, row in enumerate(rows):
        at = row["memory_mib"], row["speedup"]
        panel.scatter(*at, color=_colour(row))
        panel.annotate(
            row["method"], at, (5, 4 if number % 2 else -10), textcoords="offset points", fontsize=8
        )
    panel.axhline(1, color=PLAIN, linewidth=0.8)
    panel.margins(x=0.2, y=0.1)
    panel.set_xlabel(f"own memory at {tokens} tokens, MiB")
    panel.set_ylabel("speedup over plain decoding")
    return _finished(figure, title)


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
