"""What the records of a run come to: quality and speed per category, where a plan pays, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from specsot_bench.core.tables import Column, figure, markdown, text

# Speedup. Less than this counts as none. Untuned.
SLOWER = 1.1
# Score. A quality that is lower by more than this is a loss. Untuned.
WORSE = 0.02

Verdict = Literal["sot", "direct", "unclear"]
Record = dict[str, Any]
Pair = tuple[Record, Record]  # direct, and with a plan


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """One category, by the questions that were answered both ways, and the turns that both answers have.

    task, category: their names. questions: their number. direct_quality, sot_quality: means of the task's own
        score; None if the task has none. direct_seconds, sot_seconds: mean seconds of a question.
        direct_speed, sot_speed: tokens per second. planned: fraction of the turns in mode sot that had a plan
        of two points or more.
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
        """Return the row as a dict, with speedup and verdict."""
        return asdict(self) | {"speedup": self.speedup, "verdict": self.verdict}

    @property
    def speedup(self) -> float:
        """Return the tokens per second with a plan divided by those without, since the answers differ in
        length; 0 if nothing was written directly.
        """
        return self.sot_speed / self.direct_speed if self.direct_speed else 0.0

    @property
    def gain(self) -> float | None:
        """Return the quality with a plan minus that without; None where both score 0, so that nothing is
        known.
        """
        direct = self.direct_quality or 0.0
        sot = self.sot_quality or 0.0
        return sot - direct if direct or sot else None

    @property
    def verdict(self) -> Verdict:
        """Return whether a router should send such questions to a plan ("sot"); never decided by speed alone.
        "unclear" if the quality is unknown.
        """
        if self.gain is None:
            return "unclear"
        return "sot" if self.speedup >= SLOWER and self.gain >= -WORSE else "direct"


def pairs_of(records: Sequence[Record]) -> list[Pair]:
    """Return (direct, planned) records of every prompt that was answered both ways; if one answer has more
    turns, only those that both have.
    """
    records_by_mode: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        records_by_mode.setdefault((record["task"], record["id"]), {})[record["mode"]] = record
    both = [
        (modes["direct"], modes["sot"])
        for modes in records_by_mode.values()
        if {"direct", "sot"} <= modes.keys()
    ]
    return [_with_equal_turns(*pair) for pair in both if pair[0]["turns"] and pair[1]["turns"]]


def rows_by_category(pairs: Sequence[Pair]) -> list[CategoryRow]:
    """Return a row for each task and category, in the order in which they first occur."""
    pairs_of_category: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        pairs_of_category.setdefault((pair[0]["task"], pair[0]["category"]), []).append(pair)
    return [
        _category_row(task, category, category_pairs)
        for (task, category), category_pairs in pairs_of_category.items()
    ]


def direct_lines(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return questions, quality and speed by task and category, of records that were all answered without a
    plan; records without turns are left out.
    """
    records_of_category: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["turns"]:
            records_of_category.setdefault((record["task"], record["category"]), []).append(record)
    return [
        {
            "task": task,
            "category": category,
            "questions": len(category_records),
            "direct_quality": _quality(category_records),
            "direct_seconds": _sum(category_records, "seconds") / len(category_records),
            "direct_speed": _speed(category_records),
        }
        for (task, category), category_records in records_of_category.items()
    ]


def _with_equal_turns(direct: Record, sot: Record) -> Pair:
    """Return both records, cut to the number of turns that both have."""
    turns = min(len(direct["turns"]), len(sot["turns"]))
    return direct | {"turns": direct["turns"][:turns]}, sot | {"turns": sot["turns"][:turns]}


def _category_row(task: str, category: str, pairs: Sequence[Pair]) -> CategoryRow:
    """Return the row of one category. pairs: (direct, planned) records, at least one."""
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
        fmean(turn["branches"] >= 2 for record in sot for turn in record["turns"]),
    )


def _quality(records: Sequence[Record]) -> float | None:
    """Return the mean of the first score of the records that have one; None if none has."""
    scores = [next(iter(record["scores"].values())) for record in records if record["scores"]]
    return fmean(scores) if scores else None


def _speed(records: Sequence[Record]) -> float:
    """Return the tokens per second over all turns of the records; 0 if they took no time."""
    seconds = _sum(records, "seconds")
    return _sum(records, "tokens") / seconds if seconds else 0.0


def _sum(records: Sequence[Record], key: str) -> float:
    """Return the sum of one figure over all turns of the records. key: such as "seconds"."""
    return sum(turn[key] for record in records for turn in record["turns"])


UNCLEAR = "unclear: no verdict on quality (no score, or 0 both ways)"


def page_of(lines: Sequence[CategoryRow]) -> str:
    """Return the table of categories in Markdown, with a note if a verdict is unclear."""
    page = markdown(COLUMNS, [line.row for line in lines])
    return f"{page}\n{UNCLEAR}" if any(line.verdict == "unclear" for line in lines) else page


def direct_page(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table of direct answers in Markdown. lines: as `direct_lines` returns them."""
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
