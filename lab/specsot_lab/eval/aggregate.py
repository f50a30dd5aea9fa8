"""What the records of a run come to: quality and speed per category, where a plan pays, and its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from specsot_app.bench.core.tables import Column, figure, markdown, text

SLOWER, WORSE = 1.1, 0.02  # less speedup than this is none; a quality lower by more than this is a loss

Verdict = Literal["sot", "direct", "unclear"]
Record = dict[str, Any]
Pair = tuple[Record, Record]  # direct, and with a plan
Winners = Mapping[tuple[str, str], str | None]  # (task, id) -> direct, sot, tie, None


@dataclass(frozen=True, slots=True)
class Wins:
    """A judge's verdicts on one category's questions. unjudged: those without one."""

    sot: int
    ties: int
    direct: int
    unjudged: int

    @property
    def margin(self) -> float | None:
        """Share of the questions won by a plan less that of those lost, -1 to 1."""
        judged = self.sot + self.ties + self.direct
        return (self.sot - self.direct) / judged if judged else None


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """One category, by the questions that were answered both ways, and the turns that were.

    quality: mean of the task's own score, None where it has none. seconds: mean of a question's.
    planned: share of the answers in mode sot that had a plan of two points or more.
    wins: None where no judge was asked.
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
    wins: Wins | None = None

    @property
    def row(self) -> dict[str, Any]:
        """As JSON and tables have it."""
        return asdict(self) | {"speedup": self.speedup, "verdict": self.verdict}

    @property
    def speedup(self) -> float:
        """Tokens of the answer per second with a plan over those without: answers differ in length."""
        return self.sot_speed / self.direct_speed if self.direct_speed else 0.0

    @property
    def gains(self) -> list[float]:
        """What a plan brings in quality, by score and by judge. Where both score 0, nothing is known."""
        direct, sot = self.direct_quality or 0.0, self.sot_quality or 0.0
        margin = self.wins.margin if self.wins else None
        return [gain for gain in (sot - direct if direct or sot else None, margin) if gain is not None]

    @property
    def verdict(self) -> Verdict:
        """Whether a router should send such questions to a plan; never decided by speed alone."""
        if not self.gains:
            return "unclear"
        return "sot" if self.speedup >= SLOWER and min(self.gains) >= -WORSE else "direct"


def pairs_of(records: Sequence[Record]) -> list[Pair]:
    """Of every prompt answered both ways; where one got further, the turns that both have."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        found.setdefault((record["task"], record["id"]), {})[record["mode"]] = record
    both = [(one["direct"], one["sot"]) for one in found.values() if {"direct", "sot"} <= one.keys()]
    return [_of_same_turns(*pair) for pair in both if pair[0]["turns"] and pair[1]["turns"]]


def sum_up(pairs: Sequence[Pair], winners: Winners | None = None) -> list[CategoryRow]:
    """By task and category, in the order in which they come first. winners None: no judge was asked."""
    by: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        by.setdefault((pair[0]["task"], pair[0]["category"]), []).append(pair)
    return [_line(task, category, of, winners) for (task, category), of in by.items()]


def _of_same_turns(direct: Record, sot: Record) -> Pair:
    turns = min(len(direct["turns"]), len(sot["turns"]))
    return direct | {"turns": direct["turns"][:turns]}, sot | {"turns": sot["turns"][:turns]}


def _line(task: str, category: str, pairs: Sequence[Pair], winners: Winners | None) -> CategoryRow:
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
        None if winners is None else _wins(direct, winners),
    )


def _wins(records: Sequence[Record], winners: Winners) -> Wins:
    count = Counter(winners.get((one["task"], one["id"])) for one in records)
    return Wins(count["sot"], count["tie"], count["direct"], count[None])


def _quality(records: Sequence[Record]) -> float | None:
    scores = [next(iter(one["scores"].values())) for one in records if one["scores"]]
    return fmean(scores) if scores else None


def _speed(records: Sequence[Record]) -> float:
    seconds = _sum(records, "seconds")
    return _sum(records, "tokens") / seconds if seconds else 0.0


def _sum(records: Sequence[Record], what: str) -> float:
    return sum(turn[what] for one in records for turn in one["turns"])


UNCLEAR = "unclear: no verdict on quality (no score or judge, or 0 both ways)"


def page_of(lines: Sequence[CategoryRow]) -> str:
    """The judge's column only where one was asked."""
    columns = [one for one in COLUMNS if one.heading != JUDGED or any(line.wins for line in lines)]
    page = markdown(columns, [line.row for line in lines])
    return f"{page}\n{UNCLEAR}" if any(line.verdict == "unclear" for line in lines) else page


def told_wins(wins: Mapping[str, int] | None) -> str:
    judged = wins and wins["sot"] + wins["ties"] + wins["direct"]
    return f"{wins['sot']}/{wins['ties']}/{wins['direct']}" if wins and judged else "-"


JUDGED = "judge +/=/-"
COLUMNS = (
    text("task", "task"),
    text("category", "category"),
    figure("n", "questions", 0),
    figure("quality direct", "direct_quality"),
    figure("sot", "sot_quality"),
    Column(JUDGED, lambda row: told_wins(row["wins"])),
    figure("tok/s direct", "direct_speed", 1),
    figure("sot", "sot_speed", 1),
    figure("speedup", "speedup"),
    Column("pays", lambda row: row["verdict"]),
)
