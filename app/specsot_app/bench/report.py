"""What becomes of a run of `specsot bench quick` or `full`: its files, and the look back at a stored run.

Only speedups are compared: the stored run may be of another machine, and a speedup is a ratio within a run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from specsot.errors import InvalidRequest
from specsot_app.bench import results
from specsot_app.bench.core.aggregate import names_of
from specsot_app.bench.core.method_page import latex_of, page_of, recommend
from specsot_app.bench.core.tables import Row
from specsot_app.bench.plots import draw
from specsot_app.bench.rounds import TableRun, measure


def publish(
    task: TableRun, name: str, output: Path | None = None, against: Path | None = None, tolerance: float = 0.1
) -> int:
    """Measure, show, keep; 1 where a speedup got worse than the stored one by more than the tolerance.

    output: the JSON file; Markdown, LaTeX and plots go beside it. against: a stored run.
    """
    before = read_run(against, names_of(task.course)) if against else None
    settings, rows = measure(task)
    title = f"specsot bench {name}, {settings['model']}"
    page = page_of(title, _said(name, settings), rows, recommend(rows))
    results.publish(name, settings, rows, page, output, lambda stem: draw(rows, title, stem))
    if output is not None:
        output.with_suffix(".tex").write_text(latex_of(title, rows), encoding="utf-8")
    return 0 if before is None else look_back(settings, rows, before, tolerance)


def _said(name: str, settings: Row) -> str:
    machine = results.describe_machine()
    return (
        f"`specsot bench {name}`: {settings['model']}, {precision_of(settings)}, {settings['device']}"
        f" ({machine['cores']} cores, {machine['processor']}), rounds: {settings['rounds']}, greedy,"
        " end-of-sequence tokens ignored by all."
        f" Load average at the end: {os.getloadavg()[0]:.1f}; figures are comparable within this run alone."
    )


def precision_of(settings: Row) -> str:
    """As far as it differs from the usual."""
    kept = {"auto": None, "int8": "int8 KV"}.get(str(settings.get("kv_cache_dtype")))
    drafts = settings.get("draft_quantization") or settings.get("draft_dtype")
    told = settings["dtype"], settings.get("quantization"), kept, drafts and f"drafts {drafts}"
    return ", ".join(str(one) for one in told if one)


def look_back(settings: Row, rows: Sequence[Row], before: StoredRun, tolerance: float) -> int:
    """Every row that both runs have; 1 where one is worse, or cannot be measured any more."""
    verdicts, gone = compare(rows, before.rows), lost(rows, before.rows)
    others = unlike(settings, before.settings)
    for line in (*others, *(verdict.line(tolerance) for verdict in verdicts), *gone):
        print(line)
    return int(bool(gone) or any(verdict.worse(tolerance) for verdict in verdicts))


DECISIVE = (
    *("model", "draft_model", "small_model", "device"),
    *("dtype", "quantization", "kv_cache_dtype", "draft_dtype", "draft_quantization"),
)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of before. settings: how it was taken, as far as it says."""

    rows: Sequence[Row]
    settings: Row


@dataclass(frozen=True, slots=True)
class SpeedupChange:
    """One row then and now. Of a rival it is plain decoding that is looked at: a rival that is faster now,
    measured by it, says that plain decoding is slower.
    """

    name: str
    then: float
    now: float
    rival: bool

    @property
    def change(self) -> float:
        """Above 1 is better."""
        return self.then / self.now if self.rival else self.now / self.then

    def worse(self, tolerance: float) -> bool:
        return self.change < 1 - tolerance

    def line(self, tolerance: float) -> str:
        mark = "worse" if self.worse(tolerance) else "ok"
        of = "plain against it" if self.rival else "speedup"
        figures = f"{self.change:.2f} of what it was ({self.then:.2f}, now {self.now:.2f})"
        return f"{mark:5}  {self.name}: {of} {figures}"


def compare(now: Sequence[Row], then: Sequence[Row]) -> list[SpeedupChange]:
    """Rows that both have, by name. Raises InvalidRequest where there are none."""
    before = {row["name"]: row for row in then if "speedup" in row}
    both = [(row, before[row["name"]]) for row in now if "speedup" in row and row["name"] in before]
    if not both:
        raise InvalidRequest("against: no row of that run was measured now", field="against")
    return [
        SpeedupChange(row["name"], old["speedup"], row["speedup"], bool(row["rival"])) for row, old in both
    ]


def lost(now: Sequence[Row], then: Sequence[Row]) -> list[str]:
    """A line for every row that was measured then and could not be now, which is worse than slow."""
    before = {row["name"] for row in then if "speedup" in row}
    gone = [row for row in now if "skipped" in row and row["name"] in before]
    return [f"worse  {row['name']}: not measured now: {row['skipped']}" for row in gone]


def unlike(now: Row, then: Row) -> list[str]:
    """A line for every setting that decides what pays and was another one then."""
    return [
        f"other  {name}: {then[name]} then, {now.get(name)} now"
        for name in DECISIVE
        if name in then and then[name] != now.get(name)
    ]


def read_run(file: Path, names: Collection[str]) -> StoredRun:
    """A stored run. names: of the rows that will be compared. Raises InvalidRequest."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        rows, settings = [_checked(row) for row in told["rows"]], dict(told.get("settings", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"against: {file} holds no results ({error})", field="against") from None
    measured = {row["name"] for row in rows if "speedup" in row}
    if not measured:
        raise InvalidRequest(f"against: {file} holds no speedups", field="against")
    if not measured & set(names):
        raise InvalidRequest(f"against: {file} has other rows, such as {min(measured)!r}", field="against")
    return StoredRun(rows, settings)


def _checked(row: Any) -> Row:
    """A row as far as it is read. Raises ValueError."""
    if not isinstance(row, dict) or not isinstance(cast("Row", row).get("name"), str):
        raise ValueError("a row has no name")
    found = cast("Row", row)
    speedup = found.get("speedup", 1.0)
    if not isinstance(speedup, int | float) or not 0 < speedup < math.inf:
        raise ValueError(f"{found['name']}: a speedup of {speedup!r}")
    return found
