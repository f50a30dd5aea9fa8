"""How long an answer will take: turns as laps have shown them, lengths as past answers had them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import NormalDist, median
from typing import Any, NamedTuple

from specsot.core.cost_curve import CostCurve
from specsot.core.frames import Result
from specsot.core.skeleton import Point
from specsot.events import BranchFinished, Event, Finished, Forecast, Planned, Reason
from specsot.members import Curve
from specsot.params import Limits
from specsot_master.core.plans.router import SEVERAL_POINTS
from specsot_master.core.stats import SECONDS_DIGITS

# Share of what is known that a lap leaves: the last 500 count, some answers, for what drafts bring depends on
# the text (1.3 to 5.6 tokens a lap over eight answers of SmolLM2-135M).
KEPT = 0.998
MAX_OUTLIER = 5.0  # times the mean, beyond which a lap counts as that long; not measured
REMEMBERED = 64  # past answers, and branches, whose lengths are known; not measured
RESTORED = 100.0  # turns that an earlier ring counts for: this one's own soon outweigh it; not measured
PLANNED_TOKENS = 12.0  # of a point in a plan, before any was seen; not measured
OTHERS = 3  # answers to other kinds of questions that together tell of one of a new kind; not measured
ALIKE = 4  # past forecasts of a kind from which on they alone make its range; 3 to 6 cover the same
# What forecasts miss by before any has ended, as a deviation of logarithms, and how many past ones that is
# worth: docs/results/forecast.md. A plan adds up many lengths; its figure is not measured.
MISSES = {"direct": 0.8, "planned": 0.5, "branches": 0.5}
PRIOR = 4
COVERED = 0.8  # share of the answers that end within a range
NEAR = 0.2  # share by which a forecast may miss and still be called right


@dataclass(slots=True)
class TurnSums:
    """Past turns, the newest counting most; their seconds, and tokens of each sequence in them.

    computing: seconds that the stages' curve gives one.
    """

    turns: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    computing: float = 0.0

    def add(self, seconds: float, tokens: float) -> None:
        if self.turns:
            seconds = min(seconds, MAX_OUTLIER * self.seconds / self.turns)
        self.turns = self.turns * KEPT + 1
        self.seconds = self.seconds * KEPT + seconds
        self.tokens = self.tokens * KEPT + tokens


class LapCosts:
    """A turn is a sequence's way from one result to the next: the seconds it takes and the tokens it brings,
    by how many sequences take turns. Laps that carry prompts are told apart.

    curve: compute seconds by rows, as the stages measured it; the shape of what no lap has shown yet.
    """

    def __init__(self, curve: Curve = (), kept: Mapping[str, Sequence[float]] | None = None) -> None:
        """kept: what another ring of the same model had measured; slower or faster as the curves are."""
        self._curve = CostCurve(curve)
        self._sums = {int(count): self._restored(int(count), *told) for count, told in (kept or {}).items()}
        self._prompts = TurnSums()  # their seconds, and in the place of tokens those of the curve
        self._turns: dict[int, float] = {}  # when each sequence had its last one
        self._prompted = float("-inf")

    def _restored(
        self, count: int, turns: float, seconds: float, tokens: float, computing: float
    ) -> TurnSums:
        here = self._curve.at(count)
        share = min(1.0, RESTORED / turns)
        slower = here / computing if here and computing else 1.0
        return TurnSums(turns * share, seconds * share * slower, tokens * share, here or computing)

    def kept(self) -> dict[str, list[float]]:
        return {
            str(count): [one.turns, one.seconds, one.tokens, one.computing]
            for count, one in self._sums.items()
        }

    def on_result(self, result: Result, now: float) -> None:
        turns = [outcome for outcome in result.outcomes if outcome.step]
        if result.rows > result.drafted + len(turns) and result.number:
            self._prompted = now
            self._prompts.add(sum(result.seconds), self._curve.at(result.rows))
        since = next((self._turns[one.sequence] for one in turns if one.sequence in self._turns), None)
        if since is not None and since > self._prompted:
            self._turns = {id: when for id, when in self._turns.items() if when >= since}
            brought = sum(len(one.tokens) for one in turns) / len(turns)
            count = len(self._turns)
            if count not in self._sums:
                self._sums[count] = TurnSums(computing=self._curve.at(count))
            self._sums[count].add(now - since, brought)
        self._turns |= dict.fromkeys((one.sequence for one in result.outcomes), now)
        for one in result.outcomes:
            if one.end:
                del self._turns[one.sequence]

    def turn(self, count: int) -> float | None:
        """Seconds, where so many sequences take turns; None before any lap was seen."""
        known = self._nearest(count)
        if known is None:
            return None
        sums = self._sums[known]
        shown = self._curve.at(known)
        return sums.seconds / sums.turns * (self._curve.at(count) / shown if shown else 1.0)

    def tokens(self, count: int) -> float:
        """That a turn brings each of so many sequences."""
        known = self._nearest(count)
        return 1.0 if known is None else max(self._sums[known].tokens / self._sums[known].turns, 1.0)

    def prompt(self, rows: int) -> float:
        """Seconds for so many tokens of prompts."""
        slower = self._prompts.seconds / self._prompts.tokens if self._prompts.tokens else 1.0
        return self._curve.at(rows) * slower if rows > 0 else 0.0

    def _nearest(self, count: int) -> int | None:
        return (
            count if count in self._sums else min(self._sums, key=lambda one: abs(one - count), default=None)
        )


class Ended(NamedTuple):
    """A text. cut: by a limit, so that it would have been longer."""

    kind: str
    laps: int
    tokens: int
    cut: bool


LENGTHS = ("direct", "plan", "points", "branch")


class AnswerLengths:
    """Of one model: past direct answers; tokens of past plans and branches, points of plans. A branch that a
    limit cut has 0 tokens: how many there would have been is not known.

    A text that repeats itself is drafted well, so laps differ less than tokens do.
    """

    def __init__(self, kept: Mapping[str, Iterable[Any]] | None = None) -> None:
        known = kept or {}
        direct = (
            Ended(str(kind), int(laps), max(int(tokens), 1), bool(cut))
            for kind, laps, tokens, cut in known.get("direct", ())
        )
        self.direct = deque(direct, REMEMBERED)
        self.plan, self.points, self.branch = (
            deque(map(int, known.get(name, ())), REMEMBERED) for name in LENGTHS[1:]
        )

    def kept(self) -> dict[str, list[Any]]:
        return {name: list(getattr(self, name)) for name in LENGTHS}

    def on_event(self, event: Event) -> None:
        """What somebody cut short tells nothing."""
        match event:
            case Planned(points) if points:
                self.points.append(len(points))
            case BranchFinished(_, Reason.STOP | Reason.LENGTH as reason, tokens) if tokens:
                self.branch.append(tokens if reason is Reason.STOP else 0)
            case Finished(Reason.STOP | Reason.LENGTH, _, _, told) if told.branches:
                self.plan.append(told.plan_tokens)
            case _:
                pass

    def laps(self, kind: str, limit: int) -> list[float]:
        """Of direct answers like one of at most so many tokens: those to questions of its kind, for small
        talk is shorter than most; of all kinds where they are enough, and no plan is usual. What a limit cut
        is taken to run into the next limit, too.
        """
        alike = [one for one in self.direct if one.kind == kind]
        others = [] if kind == SEVERAL_POINTS or len(self.direct) < OTHERS else self.direct
        known = [(one.laps, limit / one.tokens, one.cut) for one in alike or others]
        return [laps * (share if cut else min(share, 1.0)) for laps, share, cut in known]

    def branches(self, count: int) -> list[float]:
        """Lengths that so many branches will have between them, the longest first; no end to what was cut."""
        known = sorted((tokens or inf for tokens in self.branch), reverse=True)
        return [known[(2 * place + 1) * len(known) // (2 * count)] for place in range(count)] if known else []


@dataclass(frozen=True, slots=True)
class Workload:
    """What a forecast depends on. prompt: tokens to be computed before the first one. suffix: the same for
    each branch; None where it is not known yet. others: sequences that take turns beside it.
    kind: of question, as the router's rules know it.
    """

    prompt: int
    limits: Limits
    suffix: int | None = None
    others: int = 0
    kind: str = ""


class Forecaster:
    """Of one ring. Everything it tells is seconds from now on; None where nothing was measured yet.

    misses: of past forecasts, what the answer took as a share of what was told, by what was told.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        """kept: see there. Raises ValueError, TypeError, KeyError for what is no such thing."""
        known = kept or {"laps": {}, "lengths": {}, "misses": {}, "suffix": 0}
        self.laps = LapCosts((), known["laps"])
        self.lengths = AnswerLengths(known["lengths"])
        self.misses = defaultdict[str, deque[float]](lambda: deque(maxlen=REMEMBERED))
        for way, shares in known["misses"].items():
            self.misses[way].extend(map(float, shares))
        self._suffix = int(known["suffix"])

    def kept(self) -> dict[str, Any]:
        """What a later process may begin with, for JSON."""
        misses = {way: list(shares) for way, shares in self.misses.items()}
        known = {"laps": self.laps.kept(), "lengths": self.lengths.kept()}
        return known | {"misses": misses, "suffix": self._suffix}

    def begin(self, curve: Curve) -> None:
        """Another ring: the lengths stay."""
        self.laps = LapCosts(curve, self.laps.kept())

    def forecast(self, workload: Workload) -> Forecast:
        """Both ways, before anything of it was computed."""
        if workload.suffix is not None:
            self._suffix = workload.suffix
        known = self.lengths
        direct = None
        planned = None
        turn = self.laps.turn(1 + workload.others)
        laps = known.laps(workload.kind, workload.limits.new_tokens)
        if laps and turn is not None:
            direct = self.laps.prompt(workload.prompt) + likeliest(laps) * turn
        if known.points and known.plan:
            planned = self.planned(workload, round(median(known.points)))
        return Forecast(direct, planned)

    def planned(self, workload: Workload, count: int) -> float | None:
        """A plan of so many points, and their branches."""
        points = tuple(Point(id, 0, "") for id in range(1, count + 1))
        written = self.plan_tokens(count)
        plan = self.direct(workload, written)
        branches = self.branches(workload, points, written)
        return plan + branches if plan is not None and branches is not None else None

    def plan_tokens(self, count: int) -> float:
        """Of a plan of so many points, by past ones."""
        known = self.lengths
        each = median(known.plan) / median(known.points) if known.plan and known.points else PLANNED_TOKENS
        return each * count

    def direct(self, workload: Workload, tokens: float) -> float | None:
        """One sequence of so many tokens, its prompt included."""
        writing = self.writing(1 + workload.others, min(tokens, workload.limits.new_tokens))
        return None if writing is None else self.laps.prompt(workload.prompt) + writing

    def branches(self, workload: Workload, points: Sequence[Point], plan: float = 0.0) -> float | None:
        """All of a plan of so many tokens, each as long as past ones or as its share allows, as many side by
        side as may be. None where nothing is known, or where the plan leaves no tokens.
        """
        limits = workload.limits
        lengths = self.lengths.branches(len(points))
        if not lengths or plan >= limits.new_tokens:
            return None
        most = min((limits.new_tokens - plan) / len(points), limits.max_branch_tokens or float("inf"))
        left = {point.id: min(length, most) for point, length in zip(points, lengths)}
        seconds = self.laps.prompt(self._suffix * len(points))
        while left:
            ready = [one.id for one in points if one.id in left and left.keys().isdisjoint(one.needs)]
            live = ready[: limits.max_parallel]
            least = min(left[id] for id in live)
            writing = self.writing(len(live) + workload.others, least)
            if writing is None:
                return None
            seconds += writing
            left = {id: rest - least * (id in live) for id, rest in left.items()}
            left = {id: rest for id, rest in left.items() if rest > 0}
        return seconds

    def spread(self, about: str, workload: Workload, seconds: float) -> tuple[float, float]:
        """Between which eight of ten answers end of which so much is told: as past ones missed theirs, to
        questions of this kind if they were enough; wider where few are known. Nothing outlasts its limit.
        """
        alike = self.misses.get(f"{about}: {workload.kind}", ())
        misses = [log(miss) for miss in (alike if len(alike) >= ALIKE else self.misses.get(about, ()))]
        lengths = len(self.lengths.direct if about == "direct" else self.lengths.points)
        few = 1 / (len(misses) + 1) + (0 if misses else 1 / max(lengths, 1))
        middle = sum(misses) / (len(misses) + 1)
        freedom = PRIOR + len(misses)
        squares = PRIOR * MISSES[about] ** 2 + sum((miss - middle) ** 2 for miss in misses)
        wide = student((1 + COVERED) / 2, freedom) * sqrt(squares / freedom * (1 + few))
        least, most = seconds * exp(middle - wide), seconds * exp(middle + wide)
        return least, max(min(most, self.longest(workload)), least, seconds) if about == "direct" else most

    def longest(self, workload: Workload) -> float:
        """Seconds of a direct answer that runs into its limit, at the slowest pace that was seen."""
        turn = self.laps.turn(1 + workload.others)
        limit = workload.limits.new_tokens
        pace = min((one.tokens / one.laps for one in self.lengths.direct if one.laps), default=1.0)
        return inf if turn is None else self.laps.prompt(workload.prompt) + turn * limit / pace

    def writing(self, count: int, tokens: float) -> float | None:
        """So many sequences write so many tokens each."""
        turn = self.laps.turn(count)
        return None if turn is None else turn * tokens / self.laps.tokens(count)


def likeliest(lengths: Sequence[float]) -> float:
    """The one that is near most of them: answers are short, or run into their limit, and few are as long as
    the median. Of several, the nearest to that; the median itself where no two are near one another.
    """
    known = sorted(lengths)
    middle = median(lengths)
    near = {
        one: bisect_right(known, one * (1 + NEAR)) - bisect_left(known, one * (1 - NEAR)) for one in known
    }
    most = max(near.values())
    return (
        middle
        if most < 2
        else min((one for one in near if near[one] == most), key=lambda one: abs(one - middle))
    )


def student(share: float, freedom: int) -> float:
    """Quantile of Student's t, by Cornish and Fisher's series; within 1 % from 3 degrees of freedom on."""
    z = NormalDist().inv_cdf(share)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(slots=True)
class Outlook:
    """What one request may expect, and what it was told.

    The argument `passed` of its methods is the number of seconds since the request arrived.
    """

    costs: Forecaster
    workload: Workload
    _told: dict[str, float] = field(default_factory=dict[str, float])

    def of_both(self, passed: float) -> Forecast | None:
        told = self.costs.forecast(self.workload)
        direct, planned = (
            self._tell("direct", told.direct, passed),
            self._tell("planned", told.planned, passed),
        )
        if direct[0] is None and planned[0] is None:
            return None
        return Forecast(direct[0], planned[0], *direct[1:], *planned[1:])

    def of_plan(self, points: Sequence[Point], passed: float, plan: float = 0.0) -> Forecast | None:
        """Its points are known now. plan: tokens it took."""
        told = self._tell("branches", self.costs.branches(self.workload, points, plan), passed)
        return None if told[0] is None else Forecast(None, told[0], None, None, *told[1:])

    def on_end(self, planned: bool, seconds: float, laps: int, tokens: int, cut: bool) -> None:
        """It ended so many seconds after it came. cut: by its limit of tokens."""
        kind = self.workload.kind
        if not planned and tokens:
            self.costs.lengths.direct.append(Ended(kind, laps, tokens, cut))
        for about in ("planned", "branches") if planned else ("direct",):
            if (told := self._told.get(about)) and seconds > 0:
                for name in (about, f"{about}: {kind}"):
                    self.costs.misses[name].append(seconds / told)

    def _tell(
        self, about: str, seconds: float | None, passed: float
    ) -> tuple[float | None, float | None, float | None]:
        if seconds is None:
            return None, None, None
        whole = self._told[about] = seconds + passed
        least, most = self.costs.spread(about, self.workload, whole)
        return (round(whole, SECONDS_DIGITS), round(least, SECONDS_DIGITS), round(most, SECONDS_DIGITS))
