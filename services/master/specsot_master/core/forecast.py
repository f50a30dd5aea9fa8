"""How long an answer will take: turns as laps have shown them, lengths as past answers had them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from specsot.core.frames import Result
from specsot.core.skeleton import Point
from specsot.events import BranchFinished, Event, Finished, Forecast, Planned, Reason
from specsot.members import Curve
from specsot.params import Limits

# Share of what is known that a lap leaves: the last 500 count, some answers, for what drafts bring depends on
# the text (1.3 to 5.6 tokens a lap over eight answers of SmolLM2-135M).
KEPT = 0.998
MAX_OUTLIER = 5.0  # times the mean, beyond which a lap counts as that long; not measured
REMEMBERED = 64  # past answers, and branches, whose lengths are known; not measured


@dataclass(slots=True)
class TurnSums:
    """Past turns, the newest counting most; their seconds, and tokens of each sequence in them."""

    turns: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0

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

    def __init__(self, curve: Curve = ()) -> None:
        self._curve = curve
        self._sums: dict[int, TurnSums] = {}
        self._prompts = TurnSums()  # their seconds, and in the place of tokens those of the curve
        self._turns: dict[int, float] = {}  # when each sequence had its last one
        self._prompted = float("-inf")

    def on_result(self, result: Result, now: float) -> None:
        turns = [outcome for outcome in result.outcomes if outcome.step]
        if result.rows > result.drafted + len(turns) and result.number:
            self._prompted = now
            self._prompts.add(sum(result.seconds), self._computing(result.rows))
        since = next((self._turns[one.sequence] for one in turns if one.sequence in self._turns), None)
        if since is not None and since > self._prompted:
            self._turns = {id: when for id, when in self._turns.items() if when >= since}
            brought = sum(len(one.tokens) for one in turns) / len(turns)
            self._sums.setdefault(len(self._turns), TurnSums()).add(now - since, brought)
        self._turns |= dict.fromkeys((one.sequence for one in result.outcomes), now)
        for one in result.outcomes:
            if one.end:
                del self._turns[one.sequence]

    def turn(self, count: int) -> float | None:
        """Seconds, where so many sequences take turns; None before any lap was seen."""
        known = self._nearest(count)
        if known is None:
            return None
        sums, shown = self._sums[known], self._computing(known)
        return sums.seconds / sums.turns * (self._computing(count) / shown if shown else 1.0)

    def tokens(self, count: int) -> float:
        """That a turn brings each of so many sequences."""
        known = self._nearest(count)
        return 1.0 if known is None else max(self._sums[known].tokens / self._sums[known].turns, 1.0)

    def prompt(self, rows: int) -> float:
        """Seconds for so many tokens of prompts."""
        slower = self._prompts.seconds / self._prompts.tokens if self._prompts.tokens else 1.0
        return self._computing(rows) * slower if rows > 0 else 0.0

    def _nearest(self, count: int) -> int | None:
        return min(self._sums, key=lambda one: abs(one - count), default=None)

    def _computing(self, rows: int) -> float:
        """Straight between the curve's points, and beyond the last; 0 where there is no curve."""
        curve = self._curve
        if len(curve) < 2 or rows <= curve[0][0]:
            return curve[0][1] if curve else 0.0
        (low, before), (high, behind) = next(
            ((one, other) for one, other in pairwise(curve) if rows <= other[0]), (curve[-2], curve[-1])
        )
        return before + (behind - before) * (rows - low) / (high - low)


def _lengths() -> deque[int]:
    return deque(maxlen=REMEMBERED)


class AnswerLengths:
    """Of one model: laps of past direct answers, tokens of past plans and branches, points of plans.

    A text that repeats itself is drafted well, so laps differ less than tokens do.
    """

    def __init__(self) -> None:
        self.direct, self.plan, self.points, self.branch = _lengths(), _lengths(), _lengths(), _lengths()

    def on_event(self, event: Event) -> None:
        """What somebody cut short tells nothing."""
        match event:
            case Planned(points) if points:
                self.points.append(len(points))
            case BranchFinished(_, Reason.STOP | Reason.LENGTH, tokens):
                self.branch.append(tokens)
            case Finished(Reason.STOP | Reason.LENGTH, _, _, told) if told.branches:
                self.plan.append(told.plan_tokens)
            case Finished(Reason.STOP | Reason.LENGTH, _, _, told):
                self.direct.append(told.laps)
            case _:
                pass

    def branches(self, count: int) -> list[int]:
        """Lengths that so many branches will have between them, the longest first."""
        known = sorted(self.branch, reverse=True)
        return [known[(2 * place + 1) * len(known) // (2 * count)] for place in range(count)] if known else []


@dataclass(frozen=True, slots=True)
class Workload:
    """What a forecast depends on. prompt: tokens to be computed before the first one. suffix: the same for
    each branch; None where it is not known yet. others: sequences that take turns beside it.
    """

    prompt: int
    limits: Limits
    suffix: int | None = None
    others: int = 0


class Forecaster:
    """Of one ring. Everything it tells is seconds from now on; None where nothing was measured yet."""

    def __init__(self) -> None:
        self.laps, self.lengths = LapCosts(), AnswerLengths()
        self._suffix = 0

    def begin(self, curve: Curve) -> None:
        """Another ring: the lengths stay."""
        self.laps = LapCosts(curve)

    def forecast(self, workload: Workload) -> Forecast:
        """Both ways, before anything of it was computed."""
        if workload.suffix is not None:
            self._suffix = workload.suffix
        known, direct, planned = self.lengths, None, None
        if known.direct:
            direct = self.direct(workload, median(known.direct) * self.laps.tokens(1 + workload.others))
        if known.points and known.plan:
            points = tuple(Point(id, 0, "") for id in range(1, round(median(known.points)) + 1))
            plan, branches = self.direct(workload, median(known.plan)), self.branches(workload, points)
            planned = plan + branches if plan is not None and branches is not None else None
        return Forecast(direct, planned)

    def direct(self, workload: Workload, tokens: float) -> float | None:
        """One sequence of so many tokens, its prompt included."""
        writing = self._writing(1 + workload.others, min(tokens, workload.limits.max_new_tokens))
        return None if writing is None else self.laps.prompt(workload.prompt) + writing

    def branches(self, workload: Workload, points: Sequence[Point]) -> float | None:
        """All of a plan, each as long as past ones, as many side by side as may be."""
        lengths, most = self.lengths.branches(len(points)), workload.limits.max_branch_tokens
        if not lengths:
            return None
        left = {point.id: float(min(length, most or length)) for point, length in zip(points, lengths)}
        seconds = self.laps.prompt(self._suffix * len(points))
        while left:
            ready = [one.id for one in points if one.id in left and left.keys().isdisjoint(one.needs)]
            live = ready[: workload.limits.max_parallel]
            least = min(left[id] for id in live)
            writing = self._writing(len(live) + workload.others, least)
            if writing is None:
                return None
            seconds += writing
            left = {id: rest - least * (id in live) for id, rest in left.items()}
            left = {id: rest for id, rest in left.items() if rest > 0}
        return seconds

    def _writing(self, count: int, tokens: float) -> float | None:
        turn = self.laps.turn(count)
        return None if turn is None else turn * tokens / self.laps.tokens(count)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one request may expect. passed: seconds since it came."""

    costs: Forecaster
    workload: Workload

    def of_both(self, passed: float) -> Forecast | None:
        told = self.costs.forecast(self.workload)
        return _later(told, passed)

    def of_plan(self, points: Sequence[Point], passed: float) -> Forecast | None:
        """Its points are known now."""
        return _later(Forecast(None, self.costs.branches(self.workload, points)), passed)


def _later(told: Forecast, passed: float) -> Forecast | None:
    direct, planned = (None if one is None else one + passed for one in (told.direct, told.planned))
    return None if direct is None and planned is None else Forecast(direct, planned)
