"""`specsot bench ring`: what drafting and branches bring when the stages are far from each other.

Every hop passes a TCP proxy that delays it by half a round trip, and carries no more bytes a second than it
is told to. Two rings: "mock", stages without weights that take a known time, with a drafter that knows the
text and errs as often as it is told to; and "model", the small pair or another model with its head.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from specsot.errors import InvalidRequest, SpecsotError
from specsot.members import HopDtype
from specsot.service.options import DraftModelOptions
from specsot_app.fleet.demo import is_small
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_app.terminal.show import counting_bar
from specsot_bench.core.pairing import Comparison, Sample, order
from specsot_bench.core.tables import Column, markdown
from specsot_bench.results import Row, describe_machine, named, publish
from specsot_lab.bench.delay_proxy import exact_loop
from specsot_lab.bench.ring_answers import ask_all, table_of_answers
from specsot_lab.bench.ring_fleet import Line, RingFleet, StepTimes, Written, answers_of, ring_of
from specsot_lab.bench.ring_sites import MOCK, SKILL, RingTask, question, set_up, small_weights

METHODS = ("plain", "eagle", "sot", "both")
# Fraction of branches times tau that is wanted where hops are most of a step. Untuned.
AIM = 0.7  # of branches x tau, where hops are most of a step
FREE = 0.97  # of plain split decoding, where nothing can be gained


class TextsDiffer(SpecsotError):
    """Two ways to write the same text wrote different ones."""


@dataclass(frozen=True, slots=True)
class RingRuns:
    """All ways at one round trip between neighbours, in seconds; the runs of each in order."""

    name: str
    stages: int
    rtt: float
    mbit: float | None
    tokens: int
    runs: Mapping[str, tuple[Written, ...]]

    def on_own_hosts(self) -> RingRuns:
        """Computed from the same runs, see `own_hosts`; plain split decoding as well."""
        return replace(self, runs={way: tuple(map(own_hosts, runs)) for way, runs in self.runs.items()})

    def comparison(self, way: str) -> Comparison:
        """Return the comparison of one way with plain split decoding: one step a token. What is not plain
        must not lose to it.
        """
        ours, plain = (tuple(map(_sample, self.runs[one])) for one in (way, "plain"))
        return Comparison(f"{self.name} {way}", ours, plain, None if way == "plain" else self.aim(way))

    def aim(self, way: str) -> float:
        """Return the least speedup that is wanted of this way."""
        far = self.rtt >= 0.1 and self.mbit is None
        return AIM * self.ideal(way) if far else FREE

    def ideal(self, way: str) -> float:
        """Return branches times tau: the tokens that a step could bring at most."""
        return len(self.runs[way][0].texts) * self.tau(way)

    def tau(self, way: str) -> float:
        """Return the tokens that a tree brought, bonus included."""
        runs = self.runs[way]
        return sum(run.tokens for run in runs) / max(sum(sum(run.draft_rounds) for run in runs), 1)

    def row(self, way: str) -> dict[str, object]:
        """Return the figures of one way as a row."""
        runs, comparison = self.runs[way], self.comparison(way)
        quartiles = comparison.spread
        return {
            "ring": self.name,
            "stages": self.stages,
            "rtt_ms": round(self.rtt * 1000, 3),
            "mbit": self.mbit,
            "branch_tokens": self.tokens,
            "way": way,
            "branches": len(runs[0].texts),
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
            "idle_percent": [round(100 * one) for one in _medians(map(_idle, runs))],
            "stage_ms": [round(1000 * one, 2) for one in _medians(map(_stages, runs))],
            "hop_ms": round(1000 * _median(_hop(run) for run in runs), 2),
            "queue_ms": [round(1000 * one, 2) for one in _medians(map(_queues, runs))],
            "wire_bytes_per_token": round(_median(run.carried / run.tokens for run in runs)),
        }


async def go(
    ring: RingFleet, ring_place: RingPlace, task: RingTask, rounds: int, advance: Callable[[], None]
) -> RingRuns:
    """Write with every way once unmeasured, then round by round, forwards and backwards in turns; return all
    runs.

    ring: the ring. ring_place: which one, and where. task: what is written. rounds: measured ones. advance:
        called after each run.
    Raises TextsDiffer.
    """
    runs: dict[str, list[Written]] = {way: [] for way in METHODS}
    for number in range(rounds + 1):
        for way in order(METHODS, number + 1):
            written = await ring.write(task.job(way))
            check(task, way, written)
            if number:
                runs[way].append(written)
            advance()
    same([run for ways in runs.values() for run in ways], ring_place.ring)
    return RingRuns(
        ring_place.ring,
        ring_place.stages,
        ring_place.rtt / 1000,
        ring_place.mbit,
        ring_place.tokens,
        {way: tuple(way_runs) for way, way_runs in runs.items()},
    )


def check(task: RingTask, way: str, written: Written) -> None:
    """Raise TextsDiffer if a branch did not write what is known beforehand; return if nothing is known."""
    if task.expected is None:
        return
    for branch, text in enumerate(written.texts):
        if tuple(task.expected(branch, len(text))) != text:
            raise TextsDiffer(f"{way}: branch {branch} wrote {text[:8]}..., not what plain decoding writes")


def same(runs: Sequence[Written], name: str) -> None:
    """Raise TextsDiffer unless every branch wrote the same in all runs, as far as each went. name: of the
    ring, for the error.
    """
    longest: dict[int, tuple[int, ...]] = {}
    for run in runs:
        for branch, text in enumerate(run.texts):
            known = longest.get(branch, ())
            if any(token != other for token, other in zip(text, known)):
                raise TextsDiffer(f"{name}: branch {branch} wrote different texts")
            longest[branch] = max(text, known, key=len)


def own_hosts(run: Written) -> Written:
    """Computed: the run as if every stage had a host like this of its own, the drafter with the last one.

    Then no stage computes beside another: no frame waits for its turn, and none takes a stage longer than
    the median of those of as many rows that flew alone. Steps shrink by that, and the run as steps do on
    average. It is the most that such hosts can bring: where several frames fly, some of the waiting is for
    the stage's own work. What both ends of a hop take stays as measured.
    """
    seconds_alone: dict[tuple[int, int], list[float]] = {}
    for step in run.steps:
        for stage, seconds in enumerate(step.seconds if step.alone else ()):
            seconds_alone.setdefault((stage, step.rows), []).append(seconds)
    usual_seconds = {key: statistics.median(all_seconds) for key, all_seconds in seconds_alone.items()}

    def spared(step: StepTimes) -> tuple[float, ...]:
        """Return the seconds of each stage in a step, at most what steps of as many rows took alone."""
        if step.alone:
            return step.seconds
        return tuple(
            min(stage_seconds, usual_seconds.get((stage, step.rows), stage_seconds))
            for stage, stage_seconds in enumerate(step.seconds)
        )

    steps = [replace(step, seconds=spared(step)) for step in run.steps]
    saved = sum(run.queued) + sum(sum(old.seconds) - sum(new.seconds) for old, new in zip(run.steps, steps))
    factor = 1 - saved / sum(step.elapsed for step in steps) if steps else 1.0
    shorter = tuple(replace(step, elapsed=step.elapsed * factor) for step in steps)
    return replace(run, seconds=run.seconds * factor, steps=shorter, queued=(0.0,) * len(run.queued))


def _sample(run: Written) -> Sample:
    """Return tokens and seconds of a run."""
    return Sample(run.tokens, run.seconds)


def _idle(run: Written) -> list[float]:
    """Return, for every stage, the fraction of the time in which it computed nothing."""
    busy = [sum(step.seconds[stage] for step in run.steps) for stage in range(len(run.queued))]
    return [max(1 - one / run.seconds, 0.0) for one in busy]


def _stages(run: Written) -> list[float]:
    """Return, for every stage, the mean seconds of a step."""
    return [_mean(step.seconds[stage] for step in run.steps) for stage in range(len(run.queued))]


def _hop(run: Written) -> float:
    """Return the mean seconds of a step's hops, without what frames waited at stages."""
    between = sum(step.elapsed - sum(step.seconds) for step in run.steps) - sum(run.queued)
    return max(between, 0.0) / max(len(run.steps) * len(run.queued), 1)


def _queues(run: Written) -> list[float]:
    """Return, for every stage, the mean seconds that a frame waited there."""
    return [one / max(len(run.steps), 1) for one in run.queued]


def _medians(lists: Iterable[list[float]]) -> list[float]:
    """Return the medians of lists of equal length, place by place."""
    return [statistics.median(values) for values in zip(*lists)]


def _median(values: Iterable[float]) -> float:
    """Return the median of the values, of which there must be some."""
    return statistics.median(values)


def _mean(values: Iterable[float]) -> float:
    """Return the mean of the values; 0 without values."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


# Milliseconds of a round trip. Below it, steps are short, and OFTEN times as many tokens are written.
# Untuned.
NEAR = 50.0
OFTEN = 3


@dataclass(frozen=True, slots=True)
class RingPlace:
    """A ring by its name. rtt: milliseconds between its stages; mbit: of every hop, None: no limit.

    tokens: of every branch, twice as many where they are drafted.
    """

    ring: str
    stages: int
    rtt: float
    mbit: float | None = None
    tokens: int = 10

    @property
    def line(self) -> Line:
        """Return what lies between two hosts: half of the round trip each way, and the rate in bytes a
        second.
        """
        return Line(self.rtt / 2000, self.mbit and self.mbit * 1e6 / 8)


@dataclass(frozen=True, slots=True)
class RingMeasurement:
    """What is measured. rtts in milliseconds, mbits in megabits a second (none: lines without a limit).

    rounds: pairs of each way and plain. tokens: of every branch, more where steps are short.
    answer_tokens: of whole answers, 0: none.
    weights, hop: of the "model" ring, in fp32 where nothing else is said, and what its rows travel in.
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
        """Return every ring to measure, at every distance and rate."""
        lines = [
            (rtt, mbit, self.written(rtt, tokens))
            for rtt in self.rtts for mbit in self.mbits or (None,) for tokens in self.tokens
        ]  # fmt: skip
        return [
            RingPlace(name, stages, *line) for name in self.rings for stages in self.stages for line in lines
        ]

    def written(self, rtt: float, tokens: int) -> int:
        """Return the tokens of every branch at this distance, more where steps are short. rtt:
        milliseconds.
        """
        return tokens * (OFTEN if rtt < NEAR else 1)


PAGE = """# Stages that are far from each other

`{command}`,
one run on {cores} cores ({processor}), all members in one process: {rounds} runs of each way, all ways
in turns, ratios of pairs with plain split decoding (one step a token), their median and quartiles. Every hop
passes a TCP proxy that delays it by half the round trip. B = {branches} branches; tau = tokens a tree
brings. Every text was compared: all ways write the same. What the columns mean: [the ring](../ring.md). Raw
figures: [{file}]({file}). Load average at the end: {load:.1f}; where it is above 1, others worked there too.

The mock's drafts come from a drafter that knows the text and is right {skill:.0%} of the time: they show what
steps cost, not how good a head is. The model's come from its own head.

Rows of *own hosts* are computed from the runs above them, as if every stage had a host like this of its own:
no frame waits for its turn, and none takes a stage longer than frames as large do that fly alone.

{table}
"""
ANSWERS = """
Whole answers of the model, asked of a master beside stage 0: `{question}`, at most {tokens} tokens (a quarter
of it for direct ones, whose speed stays the same). Tokens are all that was written, the plan included; drafts
changed no text.

{table}
"""


QUICK = RingMeasurement((0.0, 100.0), (2,), rounds=1, tokens=(6,))


def wanted(
    quick: bool,
    rtts: Sequence[float] | None = None,
    stages: Sequence[int] | None = None,
    rounds: int | None = None,
    only: str | None = None,
    tokens: Sequence[int] = (),
    mbits: Sequence[float] = (),
) -> RingMeasurement:
    """Return what is measured, as asked on the command line; None or empty keeps the default. Raises
    InvalidRequest for an unknown ring.

    quick: begin with a quick look's defaults. rtts: milliseconds. stages: numbers of stages. rounds: pairs.
        only: one ring's name. tokens: of every branch. mbits: megabits a second.
    """
    usual = QUICK if quick else RingMeasurement()
    if only not in (None, *usual.rings):
        raise InvalidRequest(f"only {' or '.join(usual.rings)}, got {only!r}", field="only")
    return replace(
        usual,
        rtts=tuple(rtts or usual.rtts),
        stages=tuple(stages or usual.stages),
        rounds=rounds or usual.rounds,
        rings=(only,) if only else usual.rings,
        tokens=tuple(tokens or usual.tokens),
        mbits=tuple(mbits),
    )


def measure(what: RingMeasurement, output: Path | None) -> int:
    """Run everything, then publish it; if something breaks, publish what was measured before. Return the exit
    status 0.

    what: to measure. output: the JSON file; None: only print.
    Raises InvalidRequest, Unavailable, TextsDiffer.
    """
    if "model" in what.rings and what.weights.draft_model is None:
        raise InvalidRequest("the ring of a model needs --draft-model, an EAGLE head", field="draft-model")
    quiet_logs()
    found = list[RingRuns]()
    answers = list[Row]()
    try:
        run_until_signal(_measure(what, found, answers), exact_loop)
    finally:
        _show(what, [row for distance in found for row in rows_of(distance)], answers, output)
    return 0


def rows_of(distance: RingRuns) -> list[Row]:
    """Return the rows of each way as measured, and after each what is computed for hosts of their own."""
    own = distance.on_own_hosts()
    charged = {way: {**own.row(way), "way": f"{way}, own hosts"} for way in METHODS}
    return [row for way in METHODS for row in (distance.row(way), charged[way])]


def _show(what: RingMeasurement, rows: Sequence[Row], answers: Sequence[Row], output: Path | None) -> None:
    """Publish the tables, as JSON and as a page if there is an output file; nothing without rows."""
    if not rows:
        return
    page = table_of(rows) if output is None else page_of(what, rows, output.name)
    if answers:
        told = table_of_answers(answers)
        page += ANSWERS.format(question=question(what.weights.base), tokens=what.answer_tokens, table=told)
    whole = [{**row, "ring": "answers"} for row in answers]
    names = ("branch_tokens",) if len(what.tokens) > 1 else ()
    publish("ring", settings_of(what), named([*rows, *whole], *NAMES, *names), page, output)


NAMES = ("ring", "stages", "rtt_ms", "mbit", "way")


def page_of(what: RingMeasurement, rows: Sequence[Row], file: str) -> str:
    """Return the page that says what was measured and how. file: name of the JSON file."""
    machine = describe_machine()
    weights = what.weights
    told = {"rtt": what.rtts, "stages": what.stages, "mbit": what.mbits, "rounds": (what.rounds,)}
    if not is_small(weights.base):
        told = {"model": (weights.model,), "draft-model": (weights.draft_model,)} | told
        told["quantization"] = (weights.quantization,) if weights.quantization else ()
        told["hop-dtype"] = (what.hop,) if what.hop != "auto" else ()
    flags = " ".join(f"--{name} {_cell(one)}" for name, values in told.items() for one in values)
    return PAGE.format(
        command=f"specsot bench ring {flags} --json {file}",
        cores=machine["cores"],
        processor=machine["processor"],
        rounds=what.rounds,
        branches=what.branches,
        skill=SKILL,
        load=os.getloadavg()[0],
        file=file,
        table=table_of(rows),
    )


def settings_of(wanted: RingMeasurement) -> Row:
    """Return the settings of the run, by name."""
    return {
        "rounds": wanted.rounds,
        "branches": wanted.branches,
        "model": str(wanted.weights.base),
        "dtype": wanted.weights.dtype,
        "quantization": wanted.weights.quantization,
        "hop_dtype": wanted.hop,
        "answer_tokens": wanted.answer_tokens,
        "tokens": wanted.tokens,
        "mock": MOCK,
    }


async def _measure(wanted: RingMeasurement, found: list[RingRuns], answers: list[Row]) -> None:
    """Measure with a new ring for every distance, since what members have learned at one is wrong at the
    next. found, answers: get the results.
    """
    plan = wanted.plan()
    tokens = wanted.answer_tokens
    asked = [place for place in plan if place.ring == "model" and tokens]
    turns = (len(plan) + len(asked)) * (wanted.rounds + 1) * len(METHODS)
    with counting_bar(sys.stderr, "measuring", turns) as step:
        for place in plan:
            site, task = set_up(place.ring, place.stages, wanted.branches, place.tokens, wanted.weights)
            if place.ring == "model":
                site = replace(site, hop=wanted.hop)
            async with ring_of(site, place.line) as ring:
                found.append(await go(ring, place, task, wanted.rounds, step))
            if place in asked:
                line: Row = {"stages": place.stages, "rtt_ms": place.rtt, "mbit": place.mbit}
                async with answers_of(site, place.line) as answer:
                    runs = await ask_all(
                        answer, line, question(wanted.weights.base), tokens, wanted.rounds, step
                    )
                answers += runs.rows()


def _column(heading: str, key: str) -> Column:
    """Return a column of any values. heading: of the column. key: of the entry in a row."""
    return Column(heading, lambda row: _cell(row[key]), text=heading == "ring")


def _cell(value: Any) -> str:
    """Return a value as text: lists with spaces, None as nothing, floats with four digits."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(_cell, cast("Sequence[Any]", value)))
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
    return str(value)


COLUMNS = (
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
    """Return the table in Markdown."""
    return markdown(COLUMNS, rows)
