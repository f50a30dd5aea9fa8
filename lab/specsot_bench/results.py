"""The clock of every measurement, and what that leaves behind: JSON that says what was measured, where, how,
and row by row what came.

Every row has a name of its own; names of figures carry their units.
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
from specsot_bench.plots import drawn

Clock = Callable[[], float]

now: Clock = time.perf_counter


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self, clock: Clock = now) -> None:
        self._clock = clock
        self.begun = clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self.begun


def write_results(file: Path, bench: str, settings: Row, rows: Sequence[Row]) -> None:
    """One object; its parents are made. Paths in it become texts."""
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
    """Show the page. Where figures are asked for: JSON, and beside it the page and pictures.

    draw: given the files' common stem; left out, with a line, where matplotlib is not installed.
    """
    print(page)
    if output is None:
        return
    write_results(output, bench, settings, rows)
    output.with_suffix(".md").write_text(page if page.endswith("\n") else f"{page}\n", encoding="utf-8")
    if draw is not None:
        drawn(lambda: draw(output.with_suffix("")))


def named(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Rows called after what they are of: texts as they are, numbers with what they count."""
    return [
        {"name": ", ".join(_said(key, row[key]) for key in keys if key in row)} | dict(row) for row in rows
    ]


def _said(key: str, value: object) -> str:
    return value if isinstance(value, str) else f"{key} {value}"


def describe_machine() -> dict[str, object]:
    """Where the clients ran; a fleet of processes ran there too."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
