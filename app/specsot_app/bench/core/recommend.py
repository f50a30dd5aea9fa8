"""What to set for which goal, read off the rows of a table, and never known beforehand.

Of a row it takes the figures and the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Goal:
    """column: what counts; most: the larger the better.

    slack: what is so close to the best, as a share of it, is equally good, and speed decides.
    """

    name: str
    column: str
    most: bool
    unit: str
    slack: float


GOALS = (
    Goal("throughput", "tokens_per_second", True, "tokens/s", 0.0),
    Goal("latency", "ttft_ms", False, "ms to the first token", 0.5),  # one prompt's time varies that much
    Goal("memory", "memory_mib", False, "MiB", 0.05),
)


def recommend(rows: Sequence[Row]) -> list[dict[str, object]]:
    """For every length and goal the best of our methods: of all, and of those that keep the plain text."""
    ours = [row for row in rows if "skipped" not in row and not row["rival"]]
    found: list[dict[str, object]] = []
    for tokens in sorted({_number(row, "tokens") for row in ours}):
        here = [row for row in ours if row["tokens"] == tokens]
        for goal in GOALS:
            found += _told(goal, int(tokens), here)
    return found


def _told(goal: Goal, tokens: int, rows: Sequence[Row]) -> list[dict[str, object]]:
    groups = {"any text": rows, "plain's text": [row for row in rows if row["exact"]]}
    picked = {text: best_for(goal, group) for text, group in groups.items() if group}
    return [
        {"goal": goal.name, "tokens": tokens, "text": text, "method": row["method"],
         "figure": row[goal.column], "unit": goal.unit, "speedup": row["speedup"]}
        for text, row in picked.items()
    ]  # fmt: skip


def best_for(goal: Goal, rows: Sequence[Row]) -> Row:
    """The fastest of those that are as good as the best."""
    values = [_number(row, goal.column) for row in rows]
    best = max(values) if goal.most else min(values)
    allowed = best * (1 - goal.slack) if goal.most else best * (1 + goal.slack)
    good = [row for row, value in zip(rows, values) if (value >= allowed if goal.most else value <= allowed)]
    return max(good, key=lambda row: _number(row, "tokens_per_second"))


def _number(row: Row, column: str) -> float:
    value = row[column]
    assert isinstance(value, int | float)
    return value
