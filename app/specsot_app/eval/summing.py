"""What the records of a run come to: quality and speed per category, and where planning pays.

Pure. Refuses to know tasks and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

SLOWER, WORSE = 1.1, 0.02  # less speedup than this is none; a quality lower by more than this is a loss


@dataclass(frozen=True, slots=True)
class Line:
    """One category, by the questions that were answered both ways.

    quality: mean of the task's own score, None where it has none. seconds: mean, of whole answers.
    planned: share of the answers in mode sot that had a plan of two points or more.
    """

    task: str
    category: str
    questions: int
    direct_quality: float | None
    sot_quality: float | None
    direct_seconds: float
    sot_seconds: float
    direct_speed: float
    sot_speed: float
    planned: float

    @property
    def speedup(self) -> float:
        """Tokens per second with a plan over those without: answers differ in length."""
        return self.sot_speed / self.direct_speed if self.direct_speed else 0.0

    @property
    def verdict(self) -> str:
        """Whether a router should send such questions to a plan."""
        if self.speedup < SLOWER:
            return "direct"
        if self.direct_quality is None or self.sot_quality is None:
            return "faster; quality not scored"
        return "sot" if self.sot_quality >= self.direct_quality - WORSE else "direct"


def sum_up(records: Sequence[dict[str, Any]]) -> list[Line]:
    """By task and category, in the order in which they come first."""
    pairs: dict[tuple[str, str], dict[str, dict[str, dict[str, Any]]]] = {}
    for record in records:
        of = pairs.setdefault((record["task"], record["category"]), {})
        of.setdefault(record["id"], {})[record["mode"]] = record
    found: list[Line] = []
    for (task, category), answered in pairs.items():
        both = [one for one in answered.values() if {"direct", "sot"} <= one.keys()]
        if both:
            found.append(_line(task, category, [one["direct"] for one in both], [one["sot"] for one in both]))
    return found


def _line(task: str, category: str, direct: list[dict[str, Any]], sot: list[dict[str, Any]]) -> Line:
    return Line(
        task,
        category,
        len(direct),
        _quality(direct),
        _quality(sot),
        fmean(one["seconds"] for one in direct),
        fmean(one["seconds"] for one in sot),
        _speed(direct),
        _speed(sot),
        fmean(one["branches"] >= 2 for one in sot),
    )


def _quality(records: list[dict[str, Any]]) -> float | None:
    scores = [next(iter(one["scores"].values())) for one in records if one["scores"]]
    return fmean(scores) if scores else None


def _speed(records: list[dict[str, Any]]) -> float:
    seconds = sum(one["seconds"] for one in records)
    return sum(one["tokens"] for one in records) / seconds if seconds else 0.0


def lines_of(lines: Sequence[Line]) -> Iterator[str]:
    """A table for people."""
    quality, speed = f"{'quality direct':>16}{'sot':>7}", f"{'tok/s direct':>14}{'sot':>8}{'speedup':>9}"
    yield f"{'category':<38}{'n':>4}{quality}{speed}  pays"
    for line in lines:
        name = line.category if line.category.startswith(line.task) else f"{line.task}/{line.category}"
        qualities = f"{_told(line.direct_quality):>16}{_told(line.sot_quality):>7}"
        speeds = f"{line.direct_speed:>14.1f}{line.sot_speed:>8.1f}{line.speedup:>9.2f}"
        yield f"{name[:37]:<38}{line.questions:>4}{qualities}{speeds}  {line.verdict}"


def _told(quality: float | None) -> str:
    return "-" if quality is None else f"{quality:.2f}"
