"""What the records of a run come to: quality and speed per category, where a plan pays, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from specsot_bench.core.tables import Column, figure, markdown, text

# less speedup than this is none; a quality lower by more than this is a loss
SLOWER = 1.1
WORSE = 0.02

Verdict = Literal["sot", "direct", "unclear"]
Record = dict[str, Any]
Pair = tuple[Record, Record]  # direct, and with a plan


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """One category, by the questions that were answered both ways, and the turns that were.

    direct_quality, sot_quality: means of the task's own score, None if the task has none.
    direct_seconds, sot_seconds: means of the seconds that a question took.
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
    def row(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.speedup, "verdict": self.verdict}

    @property
    def speedup(self) -> float:
        """Tokens of the answer per second with a plan over those without: answers differ in length."""
        return self.sot_speed / self.direct_speed if self.direct_speed else 0.0

    @property
    def gain(self) -> float | None:
        """What a plan brings in quality. Where both score 0, nothing is known."""
        direct = self.direct_quality or 0.0
        sot = self.sot_quality or 0.0
        return sot - direct if direct or sot else None

    @property
    def verdict(self) -> Verdict:
        """Whether a router should send such questions to a plan; never decided by speed alone."""
        if self.gain is None:
            return "unclear"
        return "sot" if self.speedup >= SLOWER and self.gain >= -WORSE else "direct"


def pairs_of(records: Sequence[Record]) -> list[Pair]:
    """Of every prompt answered both ways; where one got further, the turns that both have."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        found.setdefault((record["task"], record["id"]), {})[record["mode"]] = record
    both = [(one["direct"], one["sot"]) for one in found.values() if {"direct", "sot"} <= one.keys()]
    return [_of_same_turns(*pair) for pair in both if pair[0]["turns"] and pair[1]["turns"]]


def sum_up(pairs: Sequence[Pair]) -> list[CategoryRow]:
    """By task and category, in the order in which they come first."""
    by: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        by.setdefault((pair[0]["task"], pair[0]["category"]), []).append(pair)
    return [_line(task, category, of) for (task, category), of in by.items()]


def direct_lines(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Questions, quality and speed by task and category, of records that were all answered without a plan."""
    by: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["turns"]:
            by.setdefault((record["task"], record["category"]), []).append(record)
    return [
        {
            "task": task,
            "category": category,
            "questions": len(of),
            "direct_quality": _quality(of),
            "direct_seconds": _sum(of, "seconds") / len(of),
            "direct_speed": _speed(of),
        }
        for (task, category), of in by.items()
    ]


def _of_same_turns(direct: Record, sot: Record) -> Pair:
    turns = min(len(direct["turns"]), len(sot["turns"]))
    return direct | {"turns": direct["turns"][:turns]}, sot | {"turns": sot["turns"][:turns]}


def _line(task: str, category: str, pairs: Sequence[Pair]) -> CategoryRow:
    direct, sot = zip(*pairs)
    return CategoryRow(
        task,
        category,
        len(pairs),
        _quality(direct),
        _quality(sot),
        _sum(direct, "seconds") / len(pairs),
        _sum(sot, "seconds") / len(pairs),
        _speed(direct),
        _speed(sot),
        fmean(turn["branches"] >= 2 for one in sot for turn in one["turns"]),
    )


def _quality(records: Sequence[Record]) -> float | None:
    scores = [next(iter(one["scores"].values())) for one in records if one["scores"]]
    return fmean(scores) if scores else None


def _speed(records: Sequence[Record]) -> float:
    seconds = _sum(records, "seconds")
    return _sum(records, "tokens") / seconds if seconds else 0.0


def _sum(records: Sequence[Record], what: str) -> float:
    return sum(turn[what] for one in records for turn in one["turns"])


UNCLEAR = "unclear: no verdict on quality (no score, or 0 both ways)"


def page_of(lines: Sequence[CategoryRow]) -> str:
    page = markdown(COLUMNS, [line.row for line in lines])
    return f"{page}\n{UNCLEAR}" if any(line.verdict == "unclear" for line in lines) else page


def direct_page(lines: Sequence[dict[str, Any]]) -> str:
    return markdown(DIRECT_COLUMNS, lines)


DIRECT_COLUMNS = (
    text("task", "task"),
    text("category", "category"),
    figure("n", "questions", 0),
    figure("quality", "direct_quality"),
    figure("seconds", "direct_seconds", 1),
    figure("tok/s", "direct_speed", 1),
)
COLUMNS = (
    text("task", "task"),
    text("category", "category"),
    figure("n", "questions", 0),
    figure("quality direct", "direct_quality"),
    figure("sot", "sot_quality"),
    figure("tok/s direct", "direct_speed", 1),
    figure("sot", "sot_speed", 1),
    figure("speedup", "speedup"),
    Column("pays", lambda row: row["verdict"]),
)
