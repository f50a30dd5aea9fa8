"""`specsot bench ring`: what drafting and branches bring when the stages are far from each other.

Every hop passes a TCP proxy that delays it by half a round trip. Two rings:
"mock", stages without weights that take a known time, with a drafter that knows the text and errs as often as
it is told to; and "demo", the demo model with its head. At the least distance also "taps", the mock whose
features travel as three rows instead of one, and "steep", the mock where rows cost what they would past the
knee, beside "steep, whole", where a family may not be spread over frames.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from specsot.core.skeleton import PlanRules, Point
from specsot.errors import InvalidRequest, SpecsotError
from specsot.members import Curve, TreeShape
from specsot.params import Message
from specsot.service.membership import RingMember
from specsot.service.options import DraftModelOptions, ModelOptions
from specsot.transport.links import Dialer
from specsot_app.bench.core.pairing import Comparison, Sample, order
from specsot_app.bench.core.tables import Column, markdown
from specsot_app.bench.results import Row, describe_machine, named, publish
from specsot_app.fleet.demo import is_small, small_pair
from specsot_app.runtime import quiet_logs, run_until_signal
from specsot_app.simulator.members import Simulator
from specsot_app.terminal.show import counting_bar
from specsot_lab.bench.delay_proxy import exact_loop
from specsot_lab.bench.ring_fleet import BranchJob, RingFleet, Site, Written, ring_of
from specsot_worker.observer import WorkerObserver

METHODS = ("plain", "eagle", "sot", "both")
AIM = 0.7  # of branches x tau, where hops are most of a lap
FREE = 0.97  # of plain split decoding, where nothing can be gained


class TextsDiffer(SpecsotError):
    """Two ways to write the same text wrote different ones."""


@dataclass(frozen=True, slots=True)
class RingTask:
    """What is written. tokens: of every branch behind its first, in laps that bring one; drafted: in others.

    expected: what branch n begins with, where that is known beforehand.
    """

    prefix: Sequence[int]
    suffixes: Sequence[Sequence[int]]
    tokens: int
    drafted: int
    expected: Callable[[int, int], Sequence[int]] | None = None

    def job(self, way: str) -> BranchJob:
        drafts, branches = way in ("eagle", "both"), way in ("sot", "both")
        suffixes = self.suffixes if branches else self.suffixes[:1]
        return BranchJob(self.prefix, suffixes, self.drafted if drafts else self.tokens, drafts)


@dataclass(frozen=True, slots=True)
class RingRuns:
    """All ways at one round trip between neighbours, in seconds; the runs of each in order."""

    name: str
    stages: int
    rtt: float
    runs: Mapping[str, tuple[Written, ...]]

    def comparison(self, way: str) -> Comparison:
        """Against plain split decoding: one lap a token. What is not plain must not lose to it."""
        ours, plain = (tuple(map(_sample, self.runs[one])) for one in (way, "plain"))
        return Comparison(f"{self.name} {way}", ours, plain, None if way == "plain" else self.aim(way))

    def aim(self, way: str) -> float:
        """The least speedup that is wanted."""
        far = self.rtt >= 0.1
        return AIM * self.ideal(way) if far else FREE

    def ideal(self, way: str) -> float:
        """Branches x tau: tokens that a lap could bring at most."""
        return len(self.runs[way][0].texts) * self.tau(way)

    def tau(self, way: str) -> float:
        """Tokens a tree brought, bonus included."""
        runs = self.runs[way]
        return sum(run.tokens for run in runs) / max(sum(sum(run.steps) for run in runs), 1)

    def row(self, way: str) -> dict[str, object]:
        """One way as a row of the results."""
        runs, comparison = self.runs[way], self.comparison(way)
        quartiles = comparison.spread
        return {
            "ring": self.name,
            "stages": self.stages,
            "rtt_ms": round(self.rtt * 1000, 3),
            "way": way,
            "branches": len(runs[0].texts),
            "tau": round(self.tau(way), 3),
            "tokens_per_lap": round(_median(run.tokens / max(run.steps) for run in runs), 2),
            "tokens_per_second": round(comparison.rates[0], 2),
            "speedup": round(comparison.ratio, 3),
            "quartiles": [round(value, 3) for value in quartiles],
            "aim": round(self.aim(way), 3),
            "of_branches_x_tau": round(comparison.ratio / self.ideal(way), 3),
            "pairs": len(runs),
            "frames_per_lap": round(_median(len(run.laps) / max(run.steps) for run in runs), 2),
            "rows_per_frame": round(_median(_mean(lap.rows for lap in run.laps) for run in runs), 1),
            "idle_percent": [round(100 * one) for one in _medians(map(_idle, runs))],
            "stage_ms": [round(1000 * one, 2) for one in _medians(map(_stages, runs))],
            "hop_ms": round(1000 * _median(_hop(run) for run in runs), 2),
            "queue_ms": [round(1000 * one, 2) for one in _medians(map(_queues, runs))],
            "wire_bytes_per_token": round(_median(run.carried / run.tokens for run in runs)),
        }


async def go(
    ring: RingFleet, name: str, stages: int, rtt: float, task: RingTask, rounds: int, step: Callable[[], None]
) -> RingRuns:
    """Every way once unmeasured, then round by round, forwards and backwards in turns. Raises Different."""
    runs: dict[str, list[Written]] = {way: [] for way in METHODS}
    for number in range(rounds + 1):
        for way in order(METHODS, number + 1):
            written = await ring.write(task.job(way))
            check(task, way, written)
            if number:
                runs[way].append(written)
            step()
    same([run for ways in runs.values() for run in ways], name)
    return RingRuns(name, stages, rtt, {way: tuple(ones) for way, ones in runs.items()})


def check(task: RingTask, way: str, written: Written) -> None:
    """Raises Different where a branch did not write what is known beforehand."""
    if task.expected is None:
        return
    for branch, text in enumerate(written.texts):
        if tuple(task.expected(branch, len(text))) != text:
            raise TextsDiffer(f"{way}: branch {branch} wrote {text[:8]}..., not what plain decoding writes")


def same(runs: Sequence[Written], name: str) -> None:
    """Raises Different unless every branch wrote the same each time, as far as each went."""
    longest: dict[int, tuple[int, ...]] = {}
    for run in runs:
        for branch, text in enumerate(run.texts):
            known = longest.get(branch, ())
            if any(one != other for one, other in zip(text, known)):
                raise TextsDiffer(f"{name}: branch {branch} wrote different texts")
            longest[branch] = max(text, known, key=len)


def _sample(run: Written) -> Sample:
    return Sample(run.tokens, run.seconds)


def _idle(run: Written) -> list[float]:
    """Of every stage, the part of the time in which it computed nothing."""
    busy = [sum(lap.seconds[stage] for lap in run.laps) for stage in range(len(run.queued))]
    return [max(1 - one / run.seconds, 0.0) for one in busy]


def _stages(run: Written) -> list[float]:
    return [_mean(lap.seconds[stage] for lap in run.laps) for stage in range(len(run.queued))]


def _hop(run: Written) -> float:
    """Mean of a lap's hops, without what frames waited at stages."""
    between = sum(lap.elapsed - sum(lap.seconds) for lap in run.laps) - sum(run.queued)
    return max(between, 0.0) / max(len(run.laps) * len(run.queued), 1)


def _queues(run: Written) -> list[float]:
    return [one / max(len(run.laps), 1) for one in run.queued]


def _medians(lists: Iterable[list[float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*lists)]


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


LAYER: Curve = ((1, 0.0020), (32, 0.0022), (64, 0.0026), (256, 0.0090))  # flat up to a knee, as on GPUs
STEEP: Curve = ((1, 0.0020), (2, 0.0020), (64, 0.0640))  # past the knee from the third row on
NEAR, OFTEN = 50.0, 3  # below so many milliseconds so many times as many tokens: laps are short there
GROWTH: Curve = ((1, 0.0010), (64, 0.0012))
SKILL = 0.8
SHAPE = TreeShape(depth=5, top_k=1, nodes=7)
HIDDEN, FUSED = 1024, 1024  # fp32 numbers of a row
TITLES = ("What it is", "Where it comes from", "How it works", "What it is good for", "Limits", "Outlook")


@dataclass(frozen=True, slots=True)
class RingMeasurement:
    """What is measured. rtts in milliseconds. rounds: pairs of each way and plain. tokens: see `written`.

    base, head: of the "demo" ring.
    """

    rtts: tuple[float, ...] = (0.0, 1.0, 10.0, 50.0, 100.0)
    stages: tuple[int, ...] = (2, 4)
    rounds: int = 4
    tokens: int = 10
    branches: int = 6
    rings: tuple[str, ...] = ("mock", "demo")
    base: Path = field(default_factory=lambda: small_pair() / "base")
    head: Path | None = field(default_factory=lambda: small_pair() / "eagle3")

    def plan(self) -> list[tuple[str, int, float]]:
        """Every ring that is set up: its name, its stages, and how far they are from each other."""
        far = [(name, stages, rtt) for name in self.rings for stages in self.stages for rtt in self.rtts]
        near = self.rtts[0]
        shown = [("taps", self.stages[0], near), ("steep", self.stages[-1], near),
                 ("steep, whole", self.stages[-1], near)]  # fmt: skip
        return far + (shown if "mock" in self.rings else [])

    def written(self, rtt: float) -> int:
        """Tokens of every branch at this distance; twice as many where they are drafted."""
        return self.tokens * (OFTEN if rtt < NEAR else 1)


PAGE = """# Stages that are far from each other

`{command}`,
one run on {cores} cores ({processor}), all members in one process: {rounds} runs of each way, all ways
in turns, ratios of pairs with plain split decoding (one lap a token), their median and quartiles. Every hop
passes a TCP proxy that delays it by half the round trip. B = {branches} branches; tau = tokens a tree
brings. Every text was compared: all ways write the same. What the columns mean: [the ring](../ring.md). Raw
figures: [{file}]({file}). Load average at the end: {load:.1f}; where it is above 1, others worked there too.

The mock's drafts come from a drafter that knows the text and is right {skill:.0%} of the time: they show what
laps cost, not how good a head is. The model's come from its own head.

{table}
"""
QUICK = RingMeasurement((0.0, 100.0), (2,), rounds=1, tokens=6)


def wanted(
    quick: bool,
    rtts: Sequence[float] | None = None,
    stages: Sequence[int] | None = None,
    rounds: int | None = None,
    only: str | None = None,
    tokens: int | None = None,
) -> RingMeasurement:
    """As asked on the command line. Raises InvalidRequest."""
    usual = QUICK if quick else RingMeasurement()
    if only not in (None, *usual.rings):
        raise InvalidRequest(f"only {' or '.join(usual.rings)}, got {only!r}", field="only")
    return replace(
        usual,
        rtts=tuple(rtts or usual.rtts),
        stages=tuple(stages or usual.stages),
        rounds=rounds or usual.rounds,
        rings=(only,) if only else usual.rings,
        tokens=tokens or usual.tokens,
    )


def measure(what: RingMeasurement, output: Path | None) -> int:
    """Run everything, then show it; when something breaks, what was measured before.

    Raises InvalidRequest, Unavailable, TextsDiffer.
    """
    if "demo" in what.rings and what.head is None:
        raise InvalidRequest("the ring of a model needs --draft-model, an EAGLE head", field="draft-model")
    quiet_logs()
    found = list[RingRuns]()
    try:
        run_until_signal(_measure(what, found), exact_loop)
    finally:
        _show(what, [distance.row(way) for distance in found for way in METHODS], output)
    return 0


def _show(what: RingMeasurement, rows: Sequence[Row], output: Path | None) -> None:
    """A table; where asked to, JSON, and beside it the same as a page."""
    if not rows:
        return
    page = table_of(rows) if output is None else page_of(what, rows, output.name)
    publish("ring", settings_of(what), named(rows, "ring", "stages", "rtt_ms", "way"), page, output)


def page_of(what: RingMeasurement, rows: Sequence[Row], file: str) -> str:
    """What was measured and how, for people."""
    machine = describe_machine()
    distances = " ".join(f"--rtt {rtt:g}" for rtt in what.rtts)
    sizes = " ".join(f"--stages {stages}" for stages in what.stages)
    models = "" if is_small(what.base) else f"--model {what.base} --draft-model {what.head} "
    return PAGE.format(
        command=f"specsot bench ring {models}{distances} {sizes} --rounds {what.rounds} --json {file}",
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
    return {
        "rounds": wanted.rounds,
        "branches": wanted.branches,
        "model": str(wanted.base),
        "tokens_plain_and_sot": {f"{rtt:g} ms": wanted.written(rtt) for rtt in wanted.rtts},
        "tokens_eagle_and_both": {f"{rtt:g} ms": 2 * wanted.written(rtt) for rtt in wanted.rtts},
        "mock": {
            "layers": 8,
            "layer_seconds_by_rows": LAYER,
            "layer_seconds_by_rows_steep": STEEP,
            "level_seconds_by_rows": GROWTH,
            "skill": SKILL,
            "hidden_bytes": 4 * HIDDEN,
            "fused_bytes": 4 * FUSED,
        },
    }


async def _measure(wanted: RingMeasurement, found: list[RingRuns]) -> None:
    """A ring for every distance: what members have learned at one is wrong at the next."""
    plan = wanted.plan()
    with counting_bar(sys.stderr, "measuring", len(plan) * (wanted.rounds + 1) * len(METHODS)) as step:
        for name, stages, rtt in plan:
            site, task = set_up(name, stages, replace(wanted, tokens=wanted.written(rtt)))
            async with ring_of(site, rtt / 2000) as ring:
                found.append(await go(ring, name, stages, rtt / 1000, task, wanted.rounds, step))


def set_up(name: str, stages: int, wanted: RingMeasurement) -> tuple[Site, RingTask]:
    """A ring by its name, and what it is asked to write."""
    match name:
        case "demo":
            return demo_ring(stages, wanted)
        case "taps":
            return mock_ring(stages, wanted, replace(_mock(), fused=3 * FUSED))
        case "steep":
            return mock_ring(stages, wanted, replace(_mock(), layer=STEEP))
        case "steep, whole":
            site, task = mock_ring(stages, wanted, replace(_mock(), layer=STEEP))
            return replace(site, flight=1), task
        case _:
            return mock_ring(stages, wanted, _mock())


def _mock() -> Simulator:
    return Simulator(
        small_pair() / "base", layer=LAYER, growth=GROWTH, skill=SKILL, shape=SHAPE, width=HIDDEN, fused=FUSED
    )


def mock_ring(stages: int, wanted: RingMeasurement, mock: Simulator) -> tuple[Site, RingTask]:
    """Stages of known cost. What they write is known beforehand."""

    def worker(name: str, dialer: Dialer, compute: Executor, watch: WorkerObserver) -> RingMember:
        return mock.worker(name, name, dialer, compute, watch)

    def drafter(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        return mock.drafter(name, name, dialer, compute)

    prefix = tuple(range(400, 440))
    suffixes = tuple((500 + n, 600 + n, 700 + n) for n in range(wanted.branches))

    def expected(branch: int, tokens: int) -> Sequence[int]:
        return mock.voice.write((*prefix, *suffixes[branch]), tokens)

    task = RingTask(prefix, suffixes, wanted.tokens, 2 * wanted.tokens, expected)
    return Site(mock.model, stages, worker, drafter), task


def demo_ring(stages: int, wanted: RingMeasurement) -> tuple[Site, RingTask]:
    """The demo model or another, with its head, asked for the branches of a plan."""
    base, head = wanted.base, wanted.head

    def worker(name: str, dialer: Dialer, compute: Executor, watch: WorkerObserver) -> RingMember:
        from specsot_worker.loader import StageLoader
        from specsot_worker.worker import Worker

        return Worker(StageLoader(ModelOptions(base, dtype="fp32"), name), dialer, compute, observer=watch)

    def drafter(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        from specsot_drafter.drafter import Drafter
        from specsot_drafter.loader import DraftLoader

        options = DraftModelOptions(base, dtype="fp32", draft_model=head)
        return Drafter(DraftLoader(options, name), dialer, compute)

    prefix, suffixes = _branch_turns(base, wanted.branches)
    return Site(base, stages, worker, drafter), RingTask(prefix, suffixes, wanted.tokens, 2 * wanted.tokens)


def _branch_turns(base: Path, branches: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The prefix that all branches share, and how each goes on."""
    from specsot_master.prompts import Prompts
    from specsot_master.text import Text

    question = (small_pair() / "topics.txt").read_text(encoding="utf-8").splitlines()[0]
    conversation = Prompts(base, Text(base)).plan((Message("user", question),), PlanRules())
    points = [Point(n + 1, 64, TITLES[n % len(TITLES)]) for n in range(branches)]
    turns = [conversation.branch(point, points, (), point.length) for point in points]
    shared = min(turn.shared for turn in turns)
    return turns[0].tokens[:shared], tuple(turn.tokens[shared:] for turn in turns)


def _column(heading: str, key: str) -> Column:
    return Column(heading, lambda row: _cell(row[key]), text=heading == "ring")


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_cell, cast("Sequence[Any]", value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


COLUMNS = (
    _column("ring", "ring"),
    _column("stages", "stages"),
    _column("RTT ms", "rtt_ms"),
    _column("way", "way"),
    _column("tau", "tau"),
    _column("tokens/lap", "tokens_per_lap"),
    _column("speedup", "speedup"),
    _column("quartiles", "quartiles"),
    _column("of B x tau", "of_branches_x_tau"),
    _column("aim", "aim"),
    _column("tokens/s", "tokens_per_second"),
    _column("frames/lap", "frames_per_lap"),
    _column("idle %", "idle_percent"),
    _column("hop ms", "hop_ms"),
    _column("queue ms", "queue_ms"),
    _column("bytes/token", "wire_bytes_per_token"),
)


def table_of(rows: Sequence[Row]) -> str:
    """One row a way."""
    return markdown(COLUMNS, rows)
