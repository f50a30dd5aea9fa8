"""Whether a table is worse than one that was stored: speedups, row by row.

Pure. Refuses to compare seconds: the stored run may be of another machine. A speedup is a ratio within a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsot.errors import InvalidRequest

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
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


def compare(now: Sequence[Row], then: Sequence[Row]) -> list[Verdict]:
    """Rows that both have, by name. Raises InvalidRequest where there are none."""
    before = {row["name"]: row for row in then if "speedup" in row}
    both = [(row, before[row["name"]]) for row in now if "speedup" in row and row["name"] in before]
    if not both:
        raise InvalidRequest("against: no row of that run was measured now", field="against")
    return [Verdict(row["name"], old["speedup"], row["speedup"], bool(row["rival"])) for row, old in both]


def read_rows(file: Path) -> list[Row]:
    """Of a stored run of `quick` or `full`. Raises InvalidRequest."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        rows = stored["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"against: {file} holds no results ({error})", field="against") from None
    if not any("speedup" in row for row in rows):
        raise InvalidRequest(f"against: {file} holds no speedups", field="against")
    return rows
