"""`specsot bench ring`: whole answers, direct and planned, with drafts and without, over stages that are far
from each other.

Every hop passes a TCP proxy that delays it by half a round trip, and limits its bytes per second.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specsot.errors import InvalidRequest, SpecsotError
from specsot.events import Statistics
from specsot.members import HopDtype
from specsot.params import Ask, Limits, Message
from specsot.service.options import DraftModelOptions
from specsot_app.fleet.demo import is_small, small_pair
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_bench.asking import counting_bar
from specsot_bench.core.pairing import order
from specsot_bench.core.tables import figure, markdown, text
from specsot_bench.results import Row, named, publish
from specsot_lab.bench.delay_proxy import exact_loop
from specsot_lab.bench.ring_fleet import Answer, Line, answers_of

# Options of the requests of each way.
WAYS: Final[Mapping[str, dict[str, Any]]] = {
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
class RingMeasurement:
    """What is measured.

    weights: The model, its head and their precision.
    rtts: Round trips between neighbours, in milliseconds.
    stages: Numbers of stages.
    mbits: Megabits per second of every hop, one measurement each; (): lines without a limit.
    rounds: Measured rounds of all ways.
    tokens: Maximum number of tokens of a planned answer.
    hop: The type in which hidden rows travel.
    """

    weights: DraftModelOptions
    rtts: tuple[float, ...]
    stages: tuple[int, ...]
    mbits: tuple[float, ...]
    rounds: int
    tokens: int
    hop: HopDtype = "auto"


def measure(measurement: RingMeasurement, output: Path | None) -> int:
    """Measure every distance with a new fleet, because what members have learned at one distance is wrong at
    the next; then publish the table. If an error ends the measurement, what was measured before is published.
    Return the exit status 0.

    measurement: What is measured.
    output: The JSON file; None: the table is only printed.

    Raises InvalidRequest for a model without a head, Unavailable if a ring breaks, and AnswersDiffer if
    drafts change an answer.
    """
    weights = measurement.weights
    if weights.draft_model is None:
        raise InvalidRequest("the ring of a model needs --draft-model, an EAGLE head", field="draft-model")
    quiet_logs()
    rows = list[Row]()
    try:
        run_until_signal(_measure(measurement, rows), exact_loop)
    finally:
        if rows:
            precision = {name: getattr(weights, name) for name in ("dtype", "quantization")}
            settings = {"model": str(weights.base), "rounds": measurement.rounds, **precision}
            settings |= {"hop_dtype": measurement.hop, "answer_tokens": measurement.tokens}
            names = named(rows, "stages", "rtt_ms", "mbit", "way")
            publish("ring", settings, names, markdown(COLUMNS, rows), output)
    return 0


async def _measure(measurement: RingMeasurement, rows: list[Row]) -> None:
    """Measure every distance.

    measurement: What is measured.
    rows: Gets the rows of each distance when it is complete, also if an error ends the measurement.
    """
    questions = plan_questions(measurement.weights.base)
    places = [
        (stages, rtt, mbit)
        for stages in measurement.stages
        for rtt in measurement.rtts
        for mbit in measurement.mbits or (None,)
    ]
    turns = len(places) * (len(questions) * measurement.rounds + 1) * len(WAYS)
    with counting_bar(sys.stderr, "measuring", turns) as advance:
        for stages, rtt, mbit in places:
            line = Line(rtt / 2000, mbit and mbit * 1e6 / 8)
            async with answers_of(measurement.weights, stages, line, measurement.hop) as answer:
                runs = await ask_all(answer, questions, measurement.tokens, measurement.rounds, advance)
            rows += [{"stages": stages, "rtt_ms": rtt, "mbit": mbit, **row} for row in rows_of(runs)]


def plan_questions(base: Path) -> tuple[str, str]:
    """Return two questions that the model plans. The small pair was trained on topics of its own, and gets
    the first two of these.

    base: Directory of the base model.

    Any other model gets a question on regular exercise and one on working from home.
    """
    if not is_small(base):
        return "What are the benefits of regular exercise?", "What are the advantages of working from home?"
    first, second = (small_pair() / "topics.txt").read_text(encoding="utf-8").splitlines()[:2]
    return first, second


async def ask_all(
    answer: Answer, questions: Sequence[str], tokens: int, rounds: int, advance: Callable[[], None]
) -> dict[str, list[Statistics]]:
    """Return the statistics of all answers by way: round by round, and in a round question by question. The
    first question is asked in every way once unmeasured; the ways take turns, forwards and backwards.

    answer: Sends a request to the fleet.
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
    return runs


def _request(question: str, way: str, tokens: int) -> Ask:
    """Return the request of one way. A direct answer gets DIRECT_SHARE times fewer tokens than a planned one.

    question: What the user asks.
    way: One of WAYS.
    tokens: Maximum number of tokens of a planned answer.
    """
    limit = tokens // DIRECT_SHARE if WAYS[way]["mode"] == "direct" else tokens
    return Ask(messages=(Message("user", question),), limits=Limits(max_new_tokens=limit), **WAYS[way])


def rows_of(runs: Mapping[str, Sequence[Statistics]]) -> list[Row]:
    """Return a row for each way, relative to direct answers without drafts to the same questions in the same
    rounds.

    runs: The statistics of the answers of each way in WAYS, see `ask_all`.

    "of_plain" is the median ratio of tokens per second to those of "plain". "branch_phase_of_plain", the same
    for the phase of the branches, is None for direct answers. "tokens", "branches", "steps" and
    "plan_seconds", the seconds until the plan was complete, are medians; "tau" is the median of the mean
    accepted tokens.
    """
    plain_speeds = [_speed(answer) for answer in runs["plain"]]
    rows = list[Row]()
    for way, answers in runs.items():
        is_planned = WAYS[way]["mode"] == "sot"
        ratios = [_speed(answer) / speed for answer, speed in zip(answers, plain_speeds)]
        branch_ratios = [_branch_speed(answer) / speed for answer, speed in zip(answers, plain_speeds)]
        rows.append({
            "way": way,
            "tokens": statistics.median(answer.completion_tokens for answer in answers),
            "branches": statistics.median(answer.branches for answer in answers),
            "steps": statistics.median(answer.steps for answer in answers),
            "tau": round(statistics.median(answer.mean_accepted for answer in answers), 2),
            "seconds": round(statistics.median(answer.seconds for answer in answers), 2),
            "plan_seconds": round(statistics.median(map(_plan_seconds, answers)), 2) if is_planned else None,
            "tokens_per_second": round(statistics.median(map(_speed, answers)), 2),
            "of_plain": round(statistics.median(ratios), 2),
            "branch_phase_of_plain": round(statistics.median(branch_ratios), 2) if is_planned else None,
        })  # fmt: skip
    return rows


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


# The columns of the table.
COLUMNS: Final = (
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
