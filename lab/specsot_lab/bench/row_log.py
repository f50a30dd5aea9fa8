"""Rows that take long to measure: each is shown as it comes, and kept with all before it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from specsot_app.bench.results import Row, named, write_results
from specsot_app.bench.stopwatch import Stopwatch


class RowLog:
    """named: what a row is called after; where that is the same, the number of its turn follows."""

    def __init__(self, bench: str, settings: Row, output: Path | None, *named: str) -> None:
        self._bench, self._settings, self._output, self._named = bench, settings, output, named
        self._watch, self._seen = Stopwatch(), Counter[tuple[object, ...]]()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        key = tuple(row.get(name) for name in self._named)
        self._seen[key] += 1
        turn = {"turn": self._seen[key]} if self._seen[key] > 1 else {}
        self.rows += named([{**row, **turn}], *self._named, "turn")
        said = "  ".join(f"{name} {value}" for name, value in {**row, **turn}.items())
        print(f"{self._watch.seconds:.0f} s  {said}", flush=True)
        if self._output:
            write_results(self._output, self._bench, self._settings, self.rows)
