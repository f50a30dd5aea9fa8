"""Sums of the records of a run: quality and speed per category, whether a plan is worth it there, and the
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from specsot_bench.core.tables import Column, figure, markdown, text

# Ratio of tokens per second. A planned answer must be this much faster, so that sending the category to a
# plan is worth it. Untuned.
MIN_SPEEDUP = 1.1
# Score. The quality may be lower by this much before planning counts as a loss. Untuned.
MAX_QUALITY_LOSS = 0.02

# The mode that suits a category: "sot", "direct", or "unclear" if the quality is unknown.
Verdict = Literal["sot", "direct", "unclear"]
# One line of records.jsonl, see `specsot_lab.eval.records.answer_to`.
Record = dict[str, Any]
# The records (direct, planned) of one prompt.
Pair = tuple[Record, Record]


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """The figures of one category. They are means over the questions that were answered both ways, and the
    turns that both answers have.

    task: Name of the task.
    category: Name of the category.
    questions: Number of questions.
    direct_quality: Mean score of the direct answers by the task's own measure; None if the task has none.
    sot_quality: Mean score of the planned answers; None if the task has none.
    direct_seconds: Mean seconds of a question's direct answer.
    sot_seconds: Mean seconds of a question's planned answer.
    direct_speed: Tokens per second of the direct answers.
    sot_speed: Tokens per second of the planned answers.
    planned: Fraction of the turns in mode "sot" that had a plan of two points or more.
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
        """Return all fields by name, with "speedup" and "verdict"."""
        return asdict(self) | {"speedup": self.speedup, "verdict": self.verdict}

    @property
    def speedup(self) -> float:
        """Return the tokens per second with a plan divided by those without, because the answers differ in
        length. Return 0.0 if the direct speed is 0.
        """
        return self.sot_speed / self.direct_speed if self.direct_speed else 0.0

    @property
    def gain(self) -> float | None:
        """Return the quality with a plan minus the quality without. Return None if both are missing or 0,
        because then nothing is known.

        If only one of them is missing, it counts as 0.
        """
        direct = self.direct_quality or 0.0
        sot = self.sot_quality or 0.0
        return sot - direct if direct or sot else None

    @property
    def verdict(self) -> Verdict:
        """Return "sot" if a router should plan such questions: if planning is faster by MIN_SPEEDUP and the
        quality is not lower by more than MAX_QUALITY_LOSS. Return "direct" if not, and "unclear" if the
        quality is unknown, since speed alone never decides.
        """
        if self.gain is None:
            return "unclear"
        return "sot" if self.speedup >= MIN_SPEEDUP and self.gain >= -MAX_QUALITY_LOSS else "direct"


def pairs_of(records: Sequence[Record]) -> list[Pair]:
    """Return the (direct, planned) records of every prompt that was answered both ways, in the order of the
    records. If one answer has more turns, only the turns that both have are kept. A prompt is left out if one
    of its answers has no turn.

    records: The records of a run, in any modes.

    Records of other modes are ignored. Of several records of one prompt and mode, the last one counts.
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
    """Return a row for each task and category, in the order in which they first occur; an empty list without
    pairs.

    pairs: The (direct, planned) records of all prompts.

    The records are those that `pairs_of` returns.
    """
    pairs_of_category: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        pairs_of_category.setdefault((pair[0]["task"], pair[0]["category"]), []).append(pair)
    return [
        _category_row(task, category, category_pairs)
        for (task, category), category_pairs in pairs_of_category.items()
    ]


def direct_lines(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row with the questions, quality and speed of each task and category; records without turns are
    left out.

    records: The records of a run whose prompts were all answered without a plan.

    The keys are "task", "category", "questions", "direct_quality" (None without scores), "direct_seconds"
    (mean of a question) and "direct_speed" (tokens per second). The order is that in which the categories
    first occur.
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


def _with_equal_turns(direct_record: Record, planned_record: Record) -> Pair:
    """Return both records, cut to the number of turns that both have.

    direct_record: The record of the direct answer.
    planned_record: The record of the planned answer to the same prompt.
    """
    num_turns = min(len(direct_record["turns"]), len(planned_record["turns"]))
    return direct_record | {"turns": direct_record["turns"][:num_turns]}, planned_record | {
        "turns": planned_record["turns"][:num_turns]
    }


def _category_row(task: str, category: str, pairs: Sequence[Pair]) -> CategoryRow:
    """Return the row of one category.

    task: Name of the task.
    category: Name of the category.
    pairs: The (direct, planned) records of the category, at least one.

    Qualities are None if no record has a score. Seconds are means over questions.
    """
    direct_records, planned_records = zip(*pairs)
    return CategoryRow(
        task,
        category,
        len(pairs),
        _quality(direct_records),
        _quality(planned_records),
        _sum(direct_records, "seconds") / len(pairs),
        _sum(planned_records, "seconds") / len(pairs),
        _speed(direct_records),
        _speed(planned_records),
        fmean(turn["branches"] >= 2 for record in planned_records for turn in record["turns"]),
    )


def _quality(records: Sequence[Record]) -> float | None:
    """Return the mean of the first score of those records that have a score; None if no record has one.

    records: The records of one category in one mode.
    """
    scores = [next(iter(record["scores"].values())) for record in records if record["scores"]]
    return fmean(scores) if scores else None


def _speed(records: Sequence[Record]) -> float:
    """Return the tokens per second over all turns of the records; 0.0 if they took no time.

    records: The records of one category in one mode.
    """
    seconds = _sum(records, "seconds")
    return _sum(records, "tokens") / seconds if seconds else 0.0


def _sum(records: Sequence[Record], key: str) -> float:
    """Return the sum of one figure over all turns of the records.

    records: The records of one category in one mode.
    key: Name of the figure in a turn, such as "seconds".
    """
    return sum(turn[key] for record in records for turn in record["turns"])


# Line below the table that explains the verdict "unclear".
UNCLEAR_NOTE = "unclear: no verdict on quality (no score, or 0 both ways)"


def page_of(category_rows: Sequence[CategoryRow]) -> str:
    """Return the table of categories in Markdown. A note follows if a verdict is unclear.

    category_rows: The rows of `rows_by_category`.
    """
    page = markdown(COLUMNS, [line.row for line in category_rows])
    return f"{page}\n{UNCLEAR_NOTE}" if any(line.verdict == "unclear" for line in category_rows) else page


def direct_page(direct_rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of direct answers in Markdown.

    direct_rows: The rows of `direct_lines`.
    """
    return markdown(DIRECT_COLUMNS, direct_rows)


# Columns of the table of direct answers.
DIRECT_COLUMNS = (
    text("task", "task"),
    text("category", "category"),
    figure("n", "questions", 0),
    figure("quality", "direct_quality"),
    figure("seconds", "direct_seconds", 1),
    figure("tok/s", "direct_speed", 1),
)
# Columns of the table of categories. The last one says which mode suits the category.
COLUMNS = (
    text("task", "task"),
    text("category", "category"),
    figure("n", "questions", 0),
    figure("quality direct", "direct_quality"),
    figure("sot", "sot_quality"),
    figure("tok/s direct", "direct_speed", 1),
    figure("sot", "sot_speed", 1),
    figure("speedup", "speedup"),
    Column("better mode", lambda row: row["verdict"]),
)
