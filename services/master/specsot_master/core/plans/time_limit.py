"""Answers that end, complete, within a time: which way, how many points, and where each text ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from specsot.core.skeleton import MAX_LIST_POINTS, Point
from specsot.errors import InvalidRequest
from specsot.params import Ask
from specsot_master.core.plans.forecast import Forecaster, Outlook, Workload
from specsot_master.core.plans.router import UNDECIDED, Decision
from specsot_master.core.plans.text_pieces import TextPiece

LEAST_TOKENS = 24  # of the smallest answer, one sentence; not measured
SHORT_TOKENS = 8  # of a sentence that is not begun any more where there is no time for so many; not measured
# Times the last turn, or the usual one: so long before the end a text is over. Turns of a busy machine
# differ by more now and then; not measured.
SLOWEST_TURN = 2.0
ENDS = (".", "!", "?", "。", "！", "？", "\n")


def choose(decision: Decision, ask: Ask, costs: Forecaster, workload: Workload) -> Decision:
    """The way that was decided, unless only the other one ends in time. Raises InvalidRequest where not even
    a sentence does, as far as anything was measured.
    """
    most = ask.finish_within_s
    if most is None:
        return decision
    least = costs.direct(workload, LEAST_TOKENS)
    if least is not None and least > most:
        raise InvalidRequest(
            f"finish_within_s {most:g}: one sentence takes about {least:.1f} s here", field="finish_within_s"
        )
    told = costs.forecast(workload)
    if ask.mode == "auto" and decision.mode == "sot" and _least_plan(workload, costs) > most:
        return Decision("direct", "a plan would take too long")
    if ask.mode != "auto" or told.direct is None or told.planned is None:
        return decision
    if decision.mode == "sot" and told.planned > most >= told.direct:
        return Decision("direct", "a plan would take too long")
    if decision.mode == "direct" and decision.reason == UNDECIDED and told.direct > most >= told.planned:
        return Decision("sot", "a direct answer would take too long")
    return decision


def points_in_time(ask: Ask, costs: Forecaster, workload: Workload) -> int | None:
    """How many points a plan has that ends in time, two at least; None where time is no matter."""
    most = ask.finish_within_s
    if most is None or costs.planned(workload, 2) is None:
        return None
    fits = ((costs.planned(workload, count) or 0.0) <= most for count in range(3, MAX_LIST_POINTS + 1))
    return 2 + sum(takewhile(bool, fits))


def _least_plan(workload: Workload, costs: Forecaster) -> float:
    """Seconds of two points with a sentence each, as far as anything was measured."""
    plan = costs.direct(workload, costs.plan_tokens(2))
    return 0.0 if plan is None else plan + _sentence(costs, 2 + workload.others)


def _sentence(costs: Forecaster, live: int) -> float:
    """Seconds in which each of so many texts writes a short one."""
    return costs.writing(live, LEAST_TOKENS) or 0.0


def ends_sentence(text: str) -> bool:
    """A full stop behind a figure may be one of a number, or of a list."""
    bare = text.rstrip(" \"'*”’)")
    return bare.endswith(ENDS) and bool(bare.strip()) and not bare[:-1].endswith(tuple("0123456789"))


@dataclass(slots=True)
class TimeLimit:
    """Of one request, whose texts are shown by whole sentences and lines, so that they may end at any time:
    the sentence that is being written then is left out.

    at: by the clock that `now` is of. whole: seconds it had; a last turn is left half. passed: it ended one.
    """

    at: float
    whole: float
    outlook: Outlook | None = None
    polishes: bool = False
    passed: bool = False
    _shows: bool = False  # something is shown
    _held: dict[int, list[TextPiece]] = field(default_factory=dict[int, list[TextPiece]])
    _times: dict[int, float] = field(default_factory=dict[int, float])  # when a sequence last wrote

    def fit(self, points: Sequence[Point], now: float) -> Sequence[Point]:
        """As many of the first as end in time, two at least."""
        outlook = self.outlook
        while outlook and len(points) > 2:
            seconds = outlook.costs.branches(outlook.workload, points)
            if seconds is None or now + seconds <= self._end_of(branch=True):
                break
            points = points[:-1]
        return points

    def ends_plan(self, now: float) -> bool:
        """No more time for the plan, if two points are to have a sentence each."""
        if self.outlook is None:
            return False
        left = self._end_of(branch=True) - now
        return left <= _sentence(self.outlook.costs, 2 + self.outlook.workload.others)

    def take(
        self, ordinal: int, pieces: Sequence[TextPiece], now: float, live: int
    ) -> tuple[Sequence[TextPiece], bool]:
        """What of a sequence's text is shown by now, and whether it ends there. live: how many write."""
        left = self._end_of(branch=ordinal > 0) - now
        turn = self._turn(live)
        pause = max(turn or 0.0, now - self._times.get(ordinal, now))
        self._times[ordinal] = now
        held = [*self._held.get(ordinal, ()), *pieces]
        cut = 0
        tail = ""
        for count, piece in enumerate(held, 1):
            tail = (tail + piece.text)[-16:]
            cut = count if ends_sentence(tail) else cut
        self._held[ordinal], self._shows = held[cut:], self._shows or cut > 0
        short = 0.0 if self.outlook is None else self.outlook.costs.writing(live, SHORT_TOKENS) or 0.0
        over = left <= SLOWEST_TURN * pause or (cut == len(held) and left <= short)
        self.passed = self.passed or over
        return held[:cut], over

    def rest(self, ordinal: int, whole: bool) -> Sequence[TextPiece]:
        """What is shown of a sequence's last words, which end no sentence. whole: it ended by itself."""
        held = self._held.pop(ordinal, [])
        shown = held if whole or not self._shows else []
        self._shows = self._shows or bool(shown)
        return shown

    def allows(self, tokens: int, now: float) -> bool:
        """So many can be read and written once more; where nothing was measured, too."""
        outlook = self.outlook
        if outlook is None:
            return now < self.at
        seconds = outlook.costs.direct(replace(outlook.workload, prompt=tokens), tokens)
        return now + (seconds or 0.0) < self.at

    def _end_of(self, branch: bool) -> float:
        return self.at - self.whole / 2 if branch and self.polishes else self.at

    def _turn(self, live: int) -> float | None:
        if self.outlook is None:
            return None
        return self.outlook.costs.laps.turn(max(live, 1) + self.outlook.workload.others)
