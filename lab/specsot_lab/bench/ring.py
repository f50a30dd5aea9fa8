"""`specsot bench ring`: the gain of drafting and branches with stages that are far from each other.

Every hop passes a TCP proxy that delays it by half a round trip, and limits its bytes per second. There are
two rings. "mock" has stages without weights that take a known time, and a drafter that knows the text and is
wrong with a known probability. "model" is the small pair, or another model with its head; "answers" is the
same ring, of which only whole answers are measured.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from specsot.errors import InvalidRequest, SpecsotError
from specsot.members import HopDtype
from specsot.service.options import DraftModelOptions
from specsot_app.fleet.demo import is_small
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_bench.asking import counting_bar
from specsot_bench.core.pairing import Comparison, Sample, order
from specsot_bench.core.tables import Column, markdown
from specsot_bench.results import Row, describe_machine, named, publish
from specsot_lab.bench.delay_proxy import exact_loop
from specsot_lab.bench.ring_answers import ask_all, table_of_answers
from specsot_lab.bench.ring_fleet import Line, RingFleet, StepTimes, Written, answers_of, ring_of
from specsot_lab.bench.ring_sites import MOCK, SKILL, RingTask, plan_questions, set_up, small_weights

# The ways to write: without drafts and branches, with drafts, with branches, with both.
METHODS = ("plain", "eagle", "sot", "both")
# Fraction of branches times tau that is required if hops are most of a step. Untuned.
AIM: Final = 0.7
# Fraction of the speed of split decoding without speculation that is required if nothing can be gained.
# Untuned.
NO_GAIN_AIM: Final = 0.97


class TextsDiffer(SpecsotError):
    """Two ways to write the same text wrote different texts."""


@dataclass(frozen=True, slots=True)
class RingRuns:
    """The runs of all ways with one ring at one distance.

    name: Name of the ring, "mock" or "model".
    stages: Number of stages.
    rtt: Round trip between neighbours, in seconds.
    mbit: Megabits per second of every hop; None: no limit.
    tokens: Tokens of every branch; ways with drafts write twice as many.
    runs: The runs of each way in METHODS, round by round.
    """

    name: str
    stages: int
    rtt: float
    mbit: float | None
    tokens: int
    runs: Mapping[str, tuple[Written, ...]]

    def on_own_hosts(self) -> RingRuns:
        """Return what is computed from these runs, split decoding without speculation included, for stages on
        hosts of their own; see `with_own_hosts`.
        """
        return replace(self, runs={way: tuple(map(with_own_hosts, runs)) for way, runs in self.runs.items()})

    def comparison(self, way: str) -> Comparison:
        """Return the comparison of one way with split decoding without speculation, which writes one token
        per step.

        way: One of METHODS. "plain" is compared with itself, without an aim.
        """
        way_samples, baseline_samples = (
            tuple(map(_sample_of, self.runs[side_way])) for side_way in (way, "plain")
        )
        return Comparison(
            f"{self.name} {way}", way_samples, baseline_samples, None if way == "plain" else self.aim(way)
        )

    def aim(self, way: str) -> float:
        """Return the speed-up that is required of a way: a fraction of the ideal one if hops take most of a
        step, else nearly 1.

        way: One of METHODS.
        """
        hops_dominate = self.rtt >= 0.1 and self.mbit is None
        return AIM * self.ideal(way) if hops_dominate else NO_GAIN_AIM

    def ideal(self, way: str) -> float:
        """Return branches times tau: the largest speed-up that is possible.

        way: One of METHODS.
        """
        return len(self.runs[way][0].token_ids) * self.tau(way)

    def tau(self, way: str) -> float:
        """Return the mean tokens per tree, the bonus token included.

        way: One of METHODS.
        """
        runs = self.runs[way]
        return sum(run.tokens for run in runs) / max(sum(sum(run.draft_rounds) for run in runs), 1)

    def row(self, way: str) -> dict[str, object]:
        """Return the figures of one way as a row.

        way: One of METHODS.

        "tau" is the mean tokens per tree; "speedup" and "quartiles" compare with the way "plain", pair by
        pair; "of_branches_x_tau" is the speed-up divided by the ideal one. "tokens_per_step" and
        "frames_per_step" count all tokens and all frames per tree of the branch that had most trees.
        "idle_percent", "stage_ms" and "queue_ms" are lists with one value for each stage.
        "wire_bytes_per_token" counts the bytes of all hops. "rtt_ms", "hop_ms", "queue_ms" and "stage_ms" are
        milliseconds; medians over the runs.
        """
        runs, comparison = self.runs[way], self.comparison(way)
        quartiles = comparison.spread
        return {
            "ring": self.name,
            "stages": self.stages,
            "rtt_ms": round(self.rtt * 1000, 3),
            "mbit": self.mbit,
            "branch_tokens": self.tokens,
            "way": way,
            "branches": len(runs[0].token_ids),
            "tau": round(self.tau(way), 3),
            "tokens_per_step": round(_median(run.tokens / max(run.draft_rounds) for run in runs), 2),
            "tokens_per_second": round(comparison.rates[0], 2),
            "speedup": round(comparison.ratio, 3),
            "quartiles": [round(value, 3) for value in quartiles],
            "aim": round(self.aim(way), 3),
            "of_branches_x_tau": round(comparison.ratio / self.ideal(way), 3),
            "pairs": len(runs),
            "frames_per_step": round(_median(len(run.steps) / max(run.draft_rounds) for run in runs), 2),
            "rows_per_frame": round(_median(_mean(step.rows for step in run.steps) for run in runs), 1),
            "idle_percent": [round(100 * value) for value in _medians(map(_idle_fractions, runs))],
            "stage_ms": [round(1000 * value, 2) for value in _medians(map(_stage_seconds, runs))],
            "hop_ms": round(1000 * _median(_mean_hop_seconds(run) for run in runs), 2),
            "queue_ms": [round(1000 * value, 2) for value in _medians(map(_mean_queue_seconds, runs))],
            "wire_bytes_per_token": round(_median(run.carried / run.tokens for run in runs)),
        }


async def measure_ways(
    ring: RingFleet, place: RingPlace, task: RingTask, rounds: int, advance: Callable[[], None]
) -> RingRuns:
    """Write with every way once unmeasured, then round by round, forwards and backwards in turns. Return all
    measured runs.

    ring: The ring.
    place: The ring's name, size and distance.
    task: What is written.
    rounds: Number of measured rounds, at least 1.
    advance: Called after each run.

    Raises TextsDiffer if two ways write different texts, or one writes another text than expected.

    The unmeasured round is checked for the expected text, but not compared with the others. Raises
    Unavailable if the ring breaks.
    """
    runs: dict[str, list[Written]] = {way: [] for way in METHODS}
    for number in range(rounds + 1):
        for way in order(METHODS, number + 1):
            written = await ring.write(task.job(way))
            check_expected(task, way, written)
            if number:
                runs[way].append(written)
            advance()
    check_equal_texts([run for ways in runs.values() for run in ways], place.ring)
    return RingRuns(
        place.ring,
        place.stages,
        place.rtt / 1000,
        place.mbit,
        place.tokens,
        {way: tuple(way_runs) for way, way_runs in runs.items()},
    )


def check_expected(task: RingTask, way: str, written: Written) -> None:
    """Check that every branch has written the expected tokens. Nothing is checked if the task does not know
    them.

    task: Knows the expected tokens.
    way: Name of the way, for the error.
    written: What was written.

    Raises TextsDiffer for another text.

    The check covers as many tokens as each branch has written.
    """
    if task.expected is None:
        return
    for branch, token_ids in enumerate(written.token_ids):
        if tuple(task.expected(branch, len(token_ids))) != token_ids:
            raise TextsDiffer(
                f"{way}: branch {branch} wrote {token_ids[:8]}..., not what plain decoding writes"
            )


def check_equal_texts(runs: Sequence[Written], name: str) -> None:
    """Check that every branch wrote the same text in all runs, as far as each run went.

    runs: The runs of all ways.
    name: Name of the ring, for the error.

    Raises TextsDiffer for different texts.

    A run that is shorter than others is compared up to its end. Nothing is checked with fewer than two runs.
    """
    longest: dict[int, tuple[int, ...]] = {}
    for run in runs:
        for branch, token_ids in enumerate(run.token_ids):
            longest_so_far = longest.get(branch, ())
            if any(token != known_token for token, known_token in zip(token_ids, longest_so_far)):
                raise TextsDiffer(f"{name}: branch {branch} wrote different texts")
            longest[branch] = max(token_ids, longest_so_far, key=len)


def with_own_hosts(run: Written) -> Written:
    """Return the run as computed for stages that have a host like this one each, where the drafter shares the
    host of the last stage. A run without steps is returned unchanged.

    On such hosts no stage computes alongside another: no frame waits for its turn, and none takes a stage
    longer than the median of the frames with as many rows that were in flight alone. Steps become shorter by
    the saved time, and the run becomes shorter by the same factor as its steps. This is the best result that
    such hosts could have: if several frames are in flight, some of the waiting is for the stage's own work.
    The time that both ends of a hop take is left as measured.

    run: The measured run.

    A frame that was in flight alone keeps its times, and so does one without any frame of the same size that
    was alone. The waiting times are 0 in the result, and the tokens are unchanged.
    """
    seconds_alone: dict[tuple[int, int], list[float]] = {}
    for step in run.steps:
        for stage, seconds in enumerate(step.seconds if step.alone else ()):
            seconds_alone.setdefault((stage, step.rows), []).append(seconds)
    usual_seconds = {key: statistics.median(all_seconds) for key, all_seconds in seconds_alone.items()}

    def seconds_on_own_host(step: StepTimes) -> tuple[float, ...]:
        """Return the seconds of each stage in a step, which are at most the usual seconds of a frame with as
        many rows that is in flight alone.

        step: The measured step.
        """
        if step.alone:
            return step.seconds
        return tuple(
            min(stage_seconds, usual_seconds.get((stage, step.rows), stage_seconds))
            for stage, stage_seconds in enumerate(step.seconds)
        )

    steps = [replace(step, seconds=seconds_on_own_host(step)) for step in run.steps]
    saved_seconds = sum(run.queued) + sum(
        sum(old.seconds) - sum(new.seconds) for old, new in zip(run.steps, steps)
    )
    factor = 1 - saved_seconds / sum(step.elapsed for step in steps) if steps else 1.0
    shorter_steps = tuple(replace(step, elapsed=step.elapsed * factor) for step in steps)
    return replace(run, seconds=run.seconds * factor, steps=shorter_steps, queued=(0.0,) * len(run.queued))


def _sample_of(run: Written) -> Sample:
    """Return tokens and seconds of a run.

    run: The run.
    """
    return Sample(run.tokens, run.seconds)


def _idle_fractions(run: Written) -> list[float]:
    """Return, for every stage, the fraction of the time in which it computed nothing.

    run: The run.
    """
    busy = [sum(step.seconds[stage] for step in run.steps) for stage in range(len(run.queued))]
    return [max(1 - busy_seconds / run.seconds, 0.0) for busy_seconds in busy]


def _stage_seconds(run: Written) -> list[float]:
    """Return, for every stage, the mean seconds of computation per step; 0 without steps.

    run: The run.
    """
    return [_mean(step.seconds[stage] for step in run.steps) for stage in range(len(run.queued))]


def _mean_hop_seconds(run: Written) -> float:
    """Return the mean seconds of a hop, without the time that frames waited at stages; 0 without steps.

    run: The run.

    Negative differences count as 0. The number of hops is that of the stages, times that of the steps.
    """
    between = sum(step.elapsed - sum(step.seconds) for step in run.steps) - sum(run.queued)
    return max(between, 0.0) / max(len(run.steps) * len(run.queued), 1)


def _mean_queue_seconds(run: Written) -> list[float]:
    """Return, for every stage, the mean seconds that a frame waited there; 0 without steps.

    run: The run.
    """
    return [seconds / max(len(run.steps), 1) for seconds in run.queued]


def _medians(lists: Iterable[list[float]]) -> list[float]:
    """Return the median of each place over lists of equal length: [1, 5], [3, 9], [2, 7] -> [2, 7].

    lists: The lists, at least one.
    """
    return [statistics.median(values) for values in zip(*lists)]


def _median(values: Iterable[float]) -> float:
    """Return the median.

    values: The values, at least one.
    """
    return statistics.median(values)


def _mean(values: Iterable[float]) -> float:
    """Return the mean; 0 without values.

    values: The values.
    """
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


# Milliseconds of a round trip. Below it steps are short, and NEAR_FACTOR times as many tokens are written.
# Untuned.
NEAR_MS: Final = 50.0
# Factor on the tokens of every branch below NEAR_MS. Untuned.
NEAR_FACTOR: Final = 3


@dataclass(frozen=True, slots=True)
class RingPlace:
    """A ring at one distance.

    ring: Name of the ring, "mock" or "model".
    stages: Number of stages.
    rtt: Round trip between neighbours, in milliseconds.
    mbit: Megabits per second of every hop; None: no limit.
    tokens: Tokens of every branch; ways with drafts write twice as many.
    """

    ring: str
    stages: int
    rtt: float
    mbit: float | None = None
    tokens: int = 10

    @property
    def line(self) -> Line:
        """Return the line between two hosts: half of the round trip in each direction, and the rate in bytes
        per second.
        """
        return Line(self.rtt / 2000, self.mbit and self.mbit * 1e6 / 8)


@dataclass(frozen=True, slots=True)
class RingMeasurement:
    """What is measured.

    rtts: Round trips between neighbours, in milliseconds.
    stages: Numbers of stages.
    rounds: Measured rounds of all ways.
    tokens: Tokens of every branch; more are written if steps are short, see `tokens_at`.
    branches: Number of branches.
    rings: Names of the rings, of "mock", "model" and "answers".
    mbits: Megabits per second of every hop, one measurement each; (): lines without a limit.
    answer_tokens: Maximum number of tokens of whole answers, which are measured with the rings "model" and
        "answers"; 0: they are not.
    hop: The type in which hidden rows of the ring "model" travel.
    weights: Models of the ring "model", and their precision.
    """

    rtts: tuple[float, ...] = (0.0, 1.0, 10.0, 50.0, 100.0)
    stages: tuple[int, ...] = (2, 4)
    rounds: int = 4
    tokens: tuple[int, ...] = (10,)
    branches: int = 6
    rings: tuple[str, ...] = ("mock", "model")
    mbits: tuple[float, ...] = ()
    answer_tokens: int = 0
    hop: HopDtype = "auto"
    weights: DraftModelOptions = field(default_factory=small_weights)

    def plan(self) -> list[RingPlace]:
        """Return every ring to measure, at every distance and rate.

        The order is ring by ring, then by number of stages, round trip, rate and tokens. Without rates, every
        line has no limit.
        """
        lines = [
            (rtt, mbit, self.tokens_at(rtt, tokens))
            for rtt in self.rtts for mbit in self.mbits or (None,) for tokens in self.tokens
        ]  # fmt: skip
        return [
            RingPlace(name, stages, *line) for name in self.rings for stages in self.stages for line in lines
        ]

    def tokens_at(self, rtt: float, tokens: int) -> int:
        """Return the tokens of every branch at a distance: NEAR_FACTOR times as many if steps are short.

        rtt: Round trip, in milliseconds.
        tokens: Tokens of every branch at a large distance.
        """
        return tokens * (NEAR_FACTOR if rtt < NEAR_MS else 1)


# The page of results.
PAGE: Final = """# Stages that are far from each other

`{command}`,
one run on {cores} cores ({processor}), all members in one process: {rounds} runs of each way, all ways
in turns, ratios of pairs with plain split decoding (one step a token), their median and quartiles. Every hop
passes a TCP proxy that delays it by half the round trip. B = {branches} branches; tau = mean tokens
per tree. Every text was compared: all ways write the same. What the columns mean: [the ring](../ring.md). Raw
figures: [{file}]({file}). Load average at the end: {load:.1f}; where it is above 1, others worked there too.

The mock's drafts come from a drafter that knows the text and is right {skill:.0%} of the time: they show what
steps cost, not how good a head is. The model's come from its own head.

Rows of *own hosts* are computed from the runs above them, as if every stage had a host like this of its own:
no frame waits for its turn, and none takes a stage longer than frames of the same size that are alone in
flight.

{table}
"""
# The part of the page that shows whole answers.
ANSWERS: Final = """
Whole answers of the model, with a master on the host of stage 0: `{questions}`, at most {tokens}
tokens (a quarter of that for direct answers, whose speed stays the same). Tokens are all that was written,
the plan included. Drafts changed no text.

{table}
"""


# What `--quick` measures.
QUICK: Final = RingMeasurement((0.0, 100.0), (2,), rounds=1, tokens=(6,))


def measurement_of(
    quick: bool,
    rtts: Sequence[float] | None = None,
    stages: Sequence[int] | None = None,
    rounds: int | None = None,
    only: str | None = None,
    tokens: Sequence[int] = (),
    mbits: Sequence[float] = (),
) -> RingMeasurement:
    """Return what is measured, from the command line's options. Options that are None or empty keep the
    default.

    quick: True: the defaults are those of a quick look.
    rtts: Round trips, in milliseconds.
    stages: Numbers of stages.
    rounds: Measured rounds of all ways.
    only: Name of the only ring.
    tokens: Tokens of every branch.
    mbits: Megabits per second of every hop.

    Raises InvalidRequest for an unknown ring.

    0 rounds count as None. The numbers of branches and everything that has no argument here keep the default.
    """
    defaults = QUICK if quick else RingMeasurement()
    rings = (*defaults.rings, "answers")
    if only not in (None, *rings):
        raise InvalidRequest(f"only {' or '.join(rings)}, got {only!r}", field="only")
    return replace(
        defaults,
        rtts=tuple(rtts or defaults.rtts),
        stages=tuple(stages or defaults.stages),
        rounds=rounds or defaults.rounds,
        rings=(only,) if only else defaults.rings,
        tokens=tuple(tokens or defaults.tokens),
        mbits=tuple(mbits),
    )


def measure(measurement: RingMeasurement, output: Path | None) -> int:
    """Measure everything, then publish it. If an error ends the measurement, what was measured before is
    published. Return the exit status 0.

    measurement: What is measured.
    output: The JSON file; None: the table is only printed.

    Raises InvalidRequest for a ring of a model without a head, Unavailable if a ring breaks, and TextsDiffer
    if two ways write different texts.

    Nothing is published if no ring was measured to its end. A signal interrupts the measurement, and what was
    measured is published.
    """
    if measurement.rings != ("mock",) and measurement.weights.draft_model is None:
        raise InvalidRequest("the ring of a model needs --draft-model, an EAGLE head", field="draft-model")
    if "answers" in measurement.rings and not measurement.answer_tokens:
        raise InvalidRequest("--only answers needs --answer-tokens", field="answer-tokens")
    quiet_logs()
    results = list[RingRuns]()
    answers = list[Row]()
    try:
        run_until_signal(_measure(measurement, results, answers), exact_loop)
    finally:
        _publish(measurement, [row for distance in results for row in rows_of(distance)], answers, output)
    return 0


def rows_of(runs: RingRuns) -> list[Row]:
    """Return the rows of each way as measured, and after each the row that is computed for stages on hosts of
    their own.

    runs: The runs of all ways with one ring at one distance.

    The computed rows have ", own hosts" after the name of the way. The order is that of METHODS.
    """
    hosted = runs.on_own_hosts()
    hosted_rows = {way: {**hosted.row(way), "way": f"{way}, own hosts"} for way in METHODS}
    return [row for way in METHODS for row in (runs.row(way), hosted_rows[way])]


def _publish(
    measurement: RingMeasurement, rows: Sequence[Row], answers: Sequence[Row], output: Path | None
) -> None:
    """Publish the tables, as JSON and as a page if there is an output file. Without rows of either kind,
    nothing is published.

    measurement: What was measured.
    rows: The rows of branches; empty if whole answers alone were measured.
    answers: The rows of whole answers; empty if they were not measured.
    output: The JSON file; None: the table is only printed.

    With several numbers of tokens, the number is part of each row's name. Rows of whole answers are added to
    the rows with the ring "answers", and to the page as a second table.
    """
    if not (rows or answers):
        return
    page = ""
    if rows:
        page = page_of(measurement, rows, output.name) if output else table_of(rows)
    if answers:
        table = table_of_answers(answers)
        questions = "`, `".join(plan_questions(measurement.weights.base))
        page += ANSWERS.format(questions=questions, tokens=measurement.answer_tokens, table=table)
    answer_rows = [{**row, "ring": "answers"} for row in answers]
    names = ("branch_tokens",) if len(measurement.tokens) > 1 else ()
    publish("ring", settings_of(measurement), named([*rows, *answer_rows], *NAME_KEYS, *names), page, output)


# Keys of a row that make up its name.
NAME_KEYS: Final = ("ring", "stages", "rtt_ms", "mbit", "way")


def page_of(measurement: RingMeasurement, rows: Sequence[Row], file: str) -> str:
    """Return the page that says what was measured and how.

    measurement: What was measured.
    rows: The rows of branches.
    file: Name of the JSON file.

    Begins with the command that repeats the measurement: its flags name the model, and --quantization and
    --hop-dtype if they differ from the default, only for another model than the demo model. The machine and
    its load average are those of this moment.
    """
    machine = describe_machine()
    weights = measurement.weights
    flag_values = {
        "rtt": measurement.rtts,
        "stages": measurement.stages,
        "mbit": measurement.mbits,
        "rounds": (measurement.rounds,),
    }
    if not is_small(weights.base):
        flag_values = {"model": (weights.model,), "draft-model": (weights.draft_model,)} | flag_values
        flag_values["quantization"] = (weights.quantization,) if weights.quantization else ()
        flag_values["hop-dtype"] = (measurement.hop,) if measurement.hop != "auto" else ()
    flags = " ".join(f"--{name} {_cell(value)}" for name, values in flag_values.items() for value in values)
    return PAGE.format(
        command=f"specsot bench ring {flags} --json {file}",
        cores=machine["cores"],
        processor=machine["processor"],
        rounds=measurement.rounds,
        branches=measurement.branches,
        skill=SKILL,
        load=os.getloadavg()[0],
        file=file,
        table=table_of(rows),
    )


def settings_of(measurement: RingMeasurement) -> Row:
    """Return the settings of the run, by name.

    measurement: What was measured.
    """
    return {
        "rounds": measurement.rounds,
        "branches": measurement.branches,
        "model": str(measurement.weights.base),
        "dtype": measurement.weights.dtype,
        "quantization": measurement.weights.quantization,
        "hop_dtype": measurement.hop,
        "answer_tokens": measurement.answer_tokens,
        "tokens": measurement.tokens,
        "mock": MOCK,
    }


async def _measure(measurement: RingMeasurement, results: list[RingRuns], answers: list[Row]) -> None:
    """Measure with a new ring at every distance, because what members have learned at one distance is wrong
    at the next.

    measurement: What is measured.
    results: Gets the runs.
    answers: Gets the rows of whole answers.

    The progress bar on stderr counts every run, unmeasured ones included. `results` and `answers` get what is
    complete, also if an error ends the measurement. Whole answers are measured only of the rings "model" and
    "answers", and only if `answer_tokens` is above 0.
    """
    plan = measurement.plan()
    tokens = measurement.answer_tokens
    questions = plan_questions(measurement.weights.base)
    with_branches = [place for place in plan if place.ring != "answers"]
    with_answers = [place for place in plan if place.ring != "mock" and tokens]
    turns = len(with_branches) * (measurement.rounds + 1) * len(METHODS)
    turns += len(with_answers) * (len(questions) * measurement.rounds + 1) * len(METHODS)
    with counting_bar(sys.stderr, "measuring", turns) as advance:
        for place in plan:
            site, task = set_up(
                place.ring, place.stages, measurement.branches, place.tokens, measurement.weights
            )
            if place.ring != "mock":
                site = replace(site, hop=measurement.hop)
            if place in with_branches:
                async with ring_of(site, place.line) as ring:
                    results.append(await measure_ways(ring, place, task, measurement.rounds, advance))
            if place in with_answers:
                line: Row = {"stages": place.stages, "rtt_ms": place.rtt, "mbit": place.mbit}
                async with answers_of(site, place.line) as answer:
                    runs = await ask_all(answer, line, questions, tokens, measurement.rounds, advance)
                answers += runs.rows()


def _column(heading: str, key: str) -> Column:
    """Return a column of any values.

    heading: Heading of the column.
    key: Entry of a row that has the value.
    """
    return Column(heading, lambda row: _cell(row[key]), text=heading == "ring")


def _cell(value: Any) -> str:
    """Return a value as text: lists with spaces, None as "", numbers with four digits.

    value: The value of a row.

    Lists and tuples are converted value by value. A float from 1000 on has no decimal places; integers and
    texts are written as they are.
    """
    if isinstance(value, (list, tuple)):
        return " ".join(map(_cell, cast("Sequence[Any]", value)))
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
    return str(value)


# The columns of the table.
COLUMNS: Final = (
    _column("ring", "ring"),
    _column("stages", "stages"),
    _column("RTT ms", "rtt_ms"),
    _column("Mbit/s", "mbit"),
    _column("tokens", "branch_tokens"),
    _column("way", "way"),
    _column("tau", "tau"),
    _column("tokens/step", "tokens_per_step"),
    _column("speedup", "speedup"),
    _column("quartiles", "quartiles"),
    _column("of B x tau", "of_branches_x_tau"),
    _column("aim", "aim"),
    _column("tokens/s", "tokens_per_second"),
    _column("frames/step", "frames_per_step"),
    _column("idle %", "idle_percent"),
    _column("hop ms", "hop_ms"),
    _column("queue ms", "queue_ms"),
    _column("bytes/token", "wire_bytes_per_token"),
)


def table_of(rows: Sequence[Row]) -> str:
    """Return the table in Markdown. Without rows, the table has only its heading.

    rows: The rows of branches.
    """
    return markdown(COLUMNS, rows)
