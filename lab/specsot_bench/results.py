"""Holds the clock of every measurement, and writes results: JSON with what was measured, where, how, and row
by row.

Every row has a unique name; names of figures contain their units.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specsot._version import __version__
from specsot_bench.core.tables import Row
from specsot_bench.plots import draw_if_possible

# Returns seconds.
Clock = Callable[[], float]

# The clock of all measurements, in seconds.
now: Clock = time.perf_counter


class Stopwatch:
    """Measures the seconds since it was made.

    clock: Returns seconds; tests pass a clock of their own.
    """

    def __init__(self, clock: Clock = now) -> None:
        self._clock = clock
        self.started = clock()

    @property
    def seconds(self) -> float:
        """Return the seconds since the stopwatch was made."""
        return self._clock() - self.started


def write_results(file: Path, bench: str, settings: Row, rows: Sequence[Row]) -> None:
    """Write one JSON object with what was measured, where and how; folders are created. Paths in it become
    strings.

    file: Path of the file, which is replaced if it exists.
    bench: Name of the benchmark.
    settings: Settings of the run by name.
    rows: Figures of each row by name.
    """
    figures = {
        "bench": bench,
        "version": __version__,
        "machine": describe_machine(),
        "settings": settings,
        "rows": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures, indent=2, default=str) + "\n")


def publish(
    bench: str,
    settings: Row,
    rows: Sequence[Row],
    page: str,
    output: Path | None,
    draw: Callable[[Path], object] | None = None,
) -> None:
    """Print the page. If an output file is given, write the figures to it as JSON, and the page and plots to
    files of the same name with other endings.

    Without `output`, nothing is written or drawn. Existing files are replaced.

    bench: Name of the benchmark.
    settings: Settings of the run by name.
    rows: Figures of each row by name.
    page: The page as Markdown.
    output: Path of the JSON file; None: the page is only printed.
    draw: Draws the plots, called with the files' common path without suffix; None: no plots. Without
        matplotlib, a line is printed instead.
    """
    print(page)
    if output is None:
        return
    write_results(output, bench, settings, rows)
    output.with_suffix(".md").write_text(page if page.endswith("\n") else f"{page}\n", encoding="utf-8")
    if draw is not None:
        draw_if_possible(lambda: draw(output.with_suffix("")))


def named(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Return the rows, each with an entry "name" made of these keys: strings as they are, numbers after their
    key.

    rows: Figures of each row by name.
    keys: Keys of the entries that distinguish the rows; a row that lacks one leaves it out.
    """
    return [
        {"name": ", ".join(_label_of(key, row[key]) for key in keys if key in row)} | dict(row)
        for row in rows
    ]


def _label_of(key: str, value: object) -> str:
    """Return one part of a row's name: a string as it is, ("rows", 4) -> "rows 4".

    key: Key of the entry.
    value: The entry: a string, or a number.
    """
    return value if isinstance(value, str) else f"{key} {value}"


def describe_machine() -> dict[str, object]:
    """Return processor, cores and Python version of this machine, on which the clients ran, and a fleet of
    processes as well.
    """
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
