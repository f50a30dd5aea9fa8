"""Whole answers over a far ring, plan included, under a master: for `specsot bench ring --answer-tokens`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specsot.errors import SpecsotError
from specsot.events import Finished, Statistics
from specsot.params import Ask, Limits, Message
from specsot_bench.core.pairing import order
from specsot_bench.core.tables import figure, markdown, text
from specsot_bench.results import Row
from specsot_lab.bench.ring_fleet import Answer

WAYS: Mapping[str, dict[str, Any]] = {
    "plain": {"mode": "direct", "drafter": "none"},
    "eagle": {"mode": "direct", "drafter": "eagle"},
    "sot": {"mode": "sot", "drafter": "none"},
    "both": {"mode": "sot", "drafter": "eagle"},
}
DIRECT_SHARE = 4  # direct answers, whose speed does not change on the way, have so many times fewer tokens


class AnswersDiffer(SpecsotError):
    """Drafts changed what was written."""


@dataclass(frozen=True, slots=True)
class AnswerRuns:
    """Answers by way, the runs of each in order. line: its columns, `stages`, `rtt_ms`, `mbit`."""

    line: Row
    runs: Mapping[str, Sequence[Statistics]]

    def rows(self) -> list[Row]:
        """Return a row for each way."""
        return [self._row(way) for way in WAYS]

    def _row(self, way: str) -> Row:
        """Return the row of one way, relative to plain answers of the same rounds."""
        ours = self.runs[way]
        plain = self.runs["plain"]
        planned = WAYS[way]["mode"] == "sot"
        whole = statistics.median(_speed(one) / _speed(other) for one, other in zip(ours, plain))
        phase = statistics.median(_branch_speed(one) / _speed(other) for one, other in zip(ours, plain))
        return {
            **self.line,
            "way": way,
            "tokens": ours[0].completion_tokens,
            "branches": ours[0].branches,
            "tau": round(statistics.median(one.mean_accepted for one in ours), 2),
            "seconds": round(statistics.median(one.seconds for one in ours), 2),
            "tokens_per_second": round(statistics.median(map(_speed, ours)), 2),
            "of_plain": round(whole, 2),
            "branch_phase_of_plain": round(phase, 2) if planned else None,
        }


def _speed(one: Statistics) -> float:
    """Return the tokens a second of a request."""
    return one.completion_tokens / one.seconds


def _branch_speed(one: Statistics) -> float:
    """Return the tokens a second from the plan's end to the answer's; 0 without branches."""
    seconds = one.phases.get("branches", 0.0)
    return (one.completion_tokens - one.plan_tokens) / seconds if seconds else 0.0


async def ask_all(
    answer: Answer, line: Row, question: str, tokens: int, rounds: int, step: Callable[[], None]
) -> AnswerRuns:
    """Return all answers: every way once unmeasured, then round by round in turns.

    answer: asks the fleet. line: columns of the table's rows. question: plain text. tokens: of a planned
        answer at most. rounds: measured ones. step: called after each answer.
    Raises AnswersDiffer, and what ends requests.
    """
    runs: dict[str, list[Finished]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in order(tuple(WAYS), number + 1):
            runs[way].append(await answer(_ask(question, way, tokens)))
            step()
    for drafted, undrafted in (("eagle", "plain"), ("both", "sot")):
        if len({one.text for one in (*runs[drafted], *runs[undrafted])}) > 1:
            raise AnswersDiffer(f"{drafted} wrote another answer than {undrafted}")
    return AnswerRuns(line, {way: [one.statistics for one in ones[1:]] for way, ones in runs.items()})


def _ask(question: str, way: str, tokens: int) -> Ask:
    """Return the request of one way."""
    limit = tokens // DIRECT_SHARE if WAYS[way]["mode"] == "direct" else tokens
    return Ask(messages=(Message("user", question),), limits=Limits(max_new_tokens=limit), **WAYS[way])


def table_of_answers(rows: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    columns = (
        text("way", "way"),
        figure("stages", "stages", 0),
        figure("RTT ms", "rtt_ms", 0),
        figure("Mbit/s", "mbit", 0),
        figure("tokens", "tokens", 0),
        figure("branches", "branches", 0),
        figure("tau", "tau", 2),
        figure("seconds", "seconds", 2),
        figure("tokens/s", "tokens_per_second", 1),
        figure("of plain", "of_plain", 2),
        figure("its branch phase, of plain", "branch_phase_of_plain", 2),
    )
    return markdown(columns, rows)
