"""Answers that must be complete within a time: whether to plan, how many points, and where each text ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from specsot.core.skeleton import MAX_LIST_POINTS, Point
from specsot.errors import InvalidRequest
from specsot.params import Ask
from specsot_master.core.plans.forecast import Forecaster, Outlook, Workload
from specsot_master.core.plans.router import UNDECIDED, Decision
from specsot_master.core.plans.sentences import SentenceBuffer
from specsot_master.core.plans.text_pieces import TextPiece

# Tokens. The length of the shortest useful answer, one sentence. Untuned.
LEAST_TOKENS = 24
# Tokens. No sentence is begun if there is no time for so many. Untuned.
SHORT_TOKENS = 8
# Ratio. A text is ended when less time is left than so many times its last turn or the usual one, whichever
# is longer. On a busy machine turns sometimes differ by more. Untuned.
SLOWEST_TURN = 2.0


def choose(decision: Decision, ask: Ask, costs: Forecaster, workload: Workload) -> Decision:
    """Return the decision, or the opposite one if only that way ends within the client's time limit. Without
    a time limit, or before anything was measured, the decision is returned unchanged. In mode auto, a plan
    whose shortest form is too long becomes a direct answer. Beyond that, only a decision of mode auto is
    changed, if both ways have a forecast: a plan that is too long becomes a direct answer that is not, and an
    undecided direct answer that is too long becomes a plan that is not.

    decision: what was decided without the time limit.
    ask: what the client asks for.
    costs: the measured costs.
    workload: the sizes of this request.

    Raises InvalidRequest if not even a sentence can end in time, as far as anything was measured.
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
    """Return the most points of a plan that ends in time, at least 2; None if the client set no time limit,
    or if nothing was measured. It is at most MAX_LIST_POINTS.

    ask: what the client asks for.
    costs: the measured costs.
    workload: the sizes of this request.
    """
    most = ask.finish_within_s
    if most is None or costs.planned(workload, 2) is None:
        return None
    fits = ((costs.planned(workload, count) or 0.0) <= most for count in range(3, MAX_LIST_POINTS + 1))
    return 2 + sum(takewhile(bool, fits))


def _least_plan(workload: Workload, costs: Forecaster) -> float:
    """Return the seconds of a plan with two points of a sentence each; 0.0 if nothing was measured.

    workload: the sizes of this request.
    costs: the measured costs.
    """
    plan = costs.direct(workload, costs.plan_tokens(2))
    return 0.0 if plan is None else plan + _sentence(costs, 2 + workload.others)


def _sentence(costs: Forecaster, live: int) -> float:
    """Return the seconds in which `live` sequences write a short sentence each; 0.0 if nothing was
    measured.

    costs: the measured costs.
    live: how many sequences decode in parallel.
    """
    return costs.writing(live, LEAST_TOKENS) or 0.0


@dataclass(slots=True)
class TimeLimit:
    """The time limit of one request, and when each of its texts must end. Texts are shown in whole sentences
    and lines, so that they can end at any time: the sentence that is being written then is left out.

    at: when the answer must be complete, in seconds of the clock that `now` is read from.
    whole: the seconds that the request had in all. The branches of an answer that is polished must end after
        half of them.
    outlook: the request's forecasts, or None before they are known; the plan sets it.
    polishes: True if the client asked for a polished answer.
    passed: True once the limit has ended a text.
    """

    at: float
    whole: float
    outlook: Outlook | None = None
    polishes: bool = False
    passed: bool = False
    # True once a piece of any sequence was shown.
    _shows: bool = False
    # The unfinished sentence of each sequence, by ordinal.
    _buffers: dict[int, SentenceBuffer] = field(default_factory=dict[int, SentenceBuffer])
    # When each sequence last wrote, by ordinal.
    _times: dict[int, float] = field(default_factory=dict[int, float])

    def fit(self, points: Sequence[Point], now: float) -> Sequence[Point]:
        """Return as many of the first points as can be written in time, at least 2; all of them without
        forecasts. They are also kept if no branch was measured.

        points: the points of the plan, in order.
        now: the present time, in seconds of the clock of `at`.
        """
        outlook = self.outlook
        while outlook and len(points) > 2:
            seconds = outlook.costs.branches(outlook.workload, points)
            if seconds is None or now + seconds <= self._end_of(branch=True):
                break
            points = points[:-1]
        return points

    def ends_plan(self, now: float) -> bool:
        """Return True if the plan must end now so that two points can still have a sentence each; False
        without forecasts. Return True also once the time for branches is over.

        now: the present time, in seconds.
        """
        if self.outlook is None:
            return False
        left = self._end_of(branch=True) - now
        return left <= _sentence(self.outlook.costs, 2 + self.outlook.workload.others)

    def take(
        self, ordinal: int, pieces: Sequence[TextPiece], now: float, live: int
    ) -> tuple[Sequence[TextPiece], bool]:
        """Add pieces of a sequence. Return the pieces that end a sentence or line by now, which may be none,
        and True if the sequence must end. The sequence must end if the time left is less than SLOWEST_TURN
        times the pause since its last pieces or the usual turn, or if a sentence has just ended and there is
        no time for SHORT_TOKENS more. `passed` is then set.

        ordinal: 0 for the answer, else the point's id.
        pieces: the next pieces of the sequence, one per token.
        now: the present time, in seconds.
        live: how many sequences of this request decode in parallel.
        """
        left = self._end_of(branch=ordinal > 0) - now
        turn = self._turn(live)
        pause = max(turn or 0.0, now - self._times.get(ordinal, now))
        self._times[ordinal] = now
        buffer = self._buffers.setdefault(ordinal, SentenceBuffer())
        shown = [ready for piece in pieces for ready in buffer.add(piece)]
        self._shows = self._shows or bool(shown)
        short = 0.0 if self.outlook is None else self.outlook.costs.writing(live, SHORT_TOKENS) or 0.0
        over = left <= SLOWEST_TURN * pause or (not buffer.held and left <= short)
        self.passed = self.passed or over
        return shown, over

    def rest(self, ordinal: int, whole: bool) -> Sequence[TextPiece]:
        """Return the pieces after a sequence's last complete sentence that are shown at its end: all of them
        if the sequence ended by itself, or if nothing else was shown yet; else none. Return none for a
        sequence that has written nothing. The sequence's unfinished sentence is forgotten.

        ordinal: 0 for the answer, else the point's id.
        whole: True if the sequence ended by itself.
        """
        buffer = self._buffers.pop(ordinal, None)
        held = buffer.held if buffer else []
        shown = held if whole or not self._shows else []
        self._shows = self._shows or bool(shown)
        return shown

    def allows(self, tokens: int, now: float) -> bool:
        """Return True if so many tokens can be read and written once more in time. If nothing was measured,
        any time left is enough. Without forecasts, any time before the limit is enough.

        tokens: how many tokens are read as a prompt and written anew.
        now: the present time, in seconds.
        """
        outlook = self.outlook
        if outlook is None:
            return now < self.at
        seconds = outlook.costs.direct(replace(outlook.workload, prompt=tokens), tokens)
        return now + (seconds or 0.0) < self.at

    def _end_of(self, branch: bool) -> float:
        """Return when a text must be complete: half of the time earlier for a branch whose text will be
        polished.

        branch: True for the text of a branch.
        """
        return self.at - self.whole / 2 if branch and self.polishes else self.at

    def _turn(self, live: int) -> float | None:
        """Return the usual seconds of a turn, or None if nothing was measured. At least one sequence of this
        request counts, in addition to those of other requests.

        live: how many sequences of this request decode in parallel.
        """
        if self.outlook is None:
            return None
        return self.outlook.costs.steps.turn(max(live, 1) + self.outlook.workload.others)
