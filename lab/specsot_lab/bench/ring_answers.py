"""Whole answers over a far ring, plan included, with a master: for `specsot bench ring --answer-tokens`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specsot.errors import SpecsotError
from specsot.events import Statistics
from specsot.params import Ask, Limits, Message
from specsot_bench.core.pairing import order
from specsot_bench.core.tables import figure, markdown, text
from specsot_bench.results import Row
from specsot_lab.bench.ring_fleet import Answer

# Options of the requests of each way.
WAYS: Mapping[str, dict[str, Any]] = {
    "plain": {"mode": "direct", "drafter": "none"},
    "eagle": {"mode": "direct", "drafter": "eagle"},
    "sot": {"mode": "sot", "drafter": "none"},
    "both": {"mode": "sot", "drafter": "eagle"},
}
# Direct answers, whose speed does not change while they are written, have so many times fewer tokens.
DIRECT_SHARE: Final = 4


class AnswersDiffer(SpecsotError):
    """An answer with drafts differs from the answer without drafts."""


@dataclass(frozen=True, slots=True)
class AnswerRuns:
    """The statistics of answers, by way.

    line: The columns that all rows share: `stages`, `rtt_ms`, `mbit`.
    runs: The statistics of each way in WAYS, round by round, and in a round question by question.
    """

    line: Row
    runs: Mapping[str, Sequence[Statistics]]

    def rows(self) -> list[Row]:
        """Return a row for each way."""
        return [self._row(way) for way in WAYS]

    def _row(self, way: str) -> Row:
        """Return the row of one way, relative to direct answers without drafts to the same questions in the
        same rounds.

        way: One of WAYS.

        "of_plain" is the median ratio of tokens per second to those of "plain". "branch_phase_of_plain", the
        same for the phase of the branches, is None for direct answers. "tokens", "branches", "steps" and
        "plan_seconds", the seconds until the plan was complete, are medians; "tau" is the median of the mean
        accepted tokens.
        """
        answers = self.runs[way]
        baseline_answers = self.runs["plain"]
        is_planned = WAYS[way]["mode"] == "sot"
        speed_up = statistics.median(
            _speed(answer) / _speed(baseline) for answer, baseline in zip(answers, baseline_answers)
        )
        branch_speed_up = statistics.median(
            _branch_speed(answer) / _speed(baseline) for answer, baseline in zip(answers, baseline_answers)
        )
        return {
            **self.line,
            "way": way,
            "tokens": statistics.median(answer.completion_tokens for answer in answers),
            "branches": statistics.median(answer.branches for answer in answers),
            "steps": statistics.median(answer.steps for answer in answers),
            "tau": round(statistics.median(answer.mean_accepted for answer in answers), 2),
            "seconds": round(statistics.median(answer.seconds for answer in answers), 2),
            "plan_seconds": round(statistics.median(map(_plan_seconds, answers)), 2) if is_planned else None,
            "tokens_per_second": round(statistics.median(map(_speed, answers)), 2),
            "of_plain": round(speed_up, 2),
            "branch_phase_of_plain": round(branch_speed_up, 2) if is_planned else None,
        }


def _speed(answer: Statistics) -> float:
    """Return the tokens per second of an answer.

    answer: The answer's statistics.
    """
    return answer.completion_tokens / answer.seconds


def _branch_speed(answer: Statistics) -> float:
    """Return the tokens per second from the end of the plan to that of the answer; 0 without branches.

    answer: The answer's statistics.
    """
    seconds = answer.phases.get("branches", 0.0)
    return (answer.completion_tokens - answer.plan_tokens) / seconds if seconds else 0.0


def _plan_seconds(answer: Statistics) -> float:
    """Return the seconds from the beginning of a planned answer until its plan was complete.

    answer: The answer's statistics.
    """
    return answer.phases.get("skeleton_prefill", 0.0) + answer.phases.get("skeleton", 0.0)


async def ask_all(
    answer: Answer, line: Row, questions: Sequence[str], tokens: int, rounds: int, advance: Callable[[], None]
) -> AnswerRuns:
    """Return the answers of all ways to all questions: the first question in every way once unmeasured, then
    round by round and question by question, forwards and backwards in turns.

    answer: Sends a request to the fleet.
    line: The columns that all rows share.
    questions: What the user asks, at least one question.
    tokens: Maximum number of tokens of a planned answer.
    rounds: Number of measured rounds.
    advance: Called after each answer.

    Raises AnswersDiffer if drafts change an answer, and whatever error ends a request.

    Texts of "eagle" and "plain", and of "both" and "sot", must be the same in all rounds, the unmeasured one
    included.
    """
    runs: dict[str, list[Statistics]] = {way: [] for way in WAYS}
    texts: dict[tuple[str, str], str] = {}
    for number, question in enumerate((questions[0], *(tuple(questions) * rounds))):
        for way in order(tuple(WAYS), number + 1):
            finished = await answer(_request(question, way, tokens))
            if texts.setdefault((question, str(WAYS[way]["mode"])), finished.text) != finished.text:
                raise AnswersDiffer(f"{way}: the answer to {question!r} differs from an earlier one")
            runs[way] += [finished.statistics] if number else []
            advance()
    return AnswerRuns(line, runs)


def _request(question: str, way: str, tokens: int) -> Ask:
    """Return the request of one way. A direct answer gets DIRECT_SHARE times fewer tokens than a planned one.

    question: What the user asks.
    way: One of WAYS.
    tokens: Maximum number of tokens of a planned answer.
    """
    limit = tokens // DIRECT_SHARE if WAYS[way]["mode"] == "direct" else tokens
    return Ask(messages=(Message("user", question),), limits=Limits(max_new_tokens=limit), **WAYS[way])


def table_of_answers(rows: Sequence[Row]) -> str:
    """Return the table in Markdown. Without rows, the table has only its heading.

    rows: The rows of all ways.
    """
    columns = (
        text("way", "way"),
        figure("stages", "stages", 0),
        figure("RTT ms", "rtt_ms", 0),
        figure("Mbit/s", "mbit", 0),
        figure("tokens", "tokens", 0),
        figure("branches", "branches", 0),
        figure("steps", "steps", 0),
        figure("tau", "tau", 2),
        figure("seconds", "seconds", 2),
        figure("plan, seconds", "plan_seconds", 2),
        figure("tokens/s", "tokens_per_second", 1),
        figure("of plain", "of_plain", 2),
        figure("its branch phase, of plain", "branch_phase_of_plain", 2),
    )
    return markdown(columns, rows)
