"""Forecasts of how long an answer takes, from measured step times and the lengths of past answers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any, Final, NamedTuple

from specsot.core.cost_curve import CostCurve
from specsot.core.frames import Result
from specsot.core.skeleton import Point
from specsot.events import BranchFinished, Event, Finished, Forecast, Planned, Reason
from specsot.members import Curve
from specsot.params import Limits
from specsot_master.core.plans.router import CODE, SEVERAL_POINTS, SHORT_FACT, SMALL_TALK, YES_OR_NO
from specsot_master.core.stats import SECONDS_DIGITS

# Fraction. The weight of all earlier turns after each new one, so that about the last 500 turns (several
# answers) count. Drafts help by a different amount in each text: 1.3 to 5.6 tokens a step over eight answers
# of SmolLM2-135M.
KEPT = 0.998
# Ratio. A turn that takes longer than so many times the mean counts as that long. Untuned.
MAX_OUTLIER = 5.0
# Answers, and branches. Bounds the remembered lengths. Untuned.
REMEMBERED = 64
# Turns. Bounds the weight of an earlier ring's measurements, so that new ones soon outweigh them. Untuned.
RESTORED = 100.0
# Tokens. The length of a point's line in a plan before any plan was seen. Untuned.
PLANNED_TOKENS = 12.0
# Answers. From so many answers to questions of other kinds on, their lengths stand in for a kind that has
# none of its own. Untuned.
OTHERS = 3
# Forecasts. From so many past forecasts for a kind of question on, eight of ten later answers end between two
# of their errors. Chosen by measurement: with 9, 68 % of 159 answers of Qwen2.5-Coder-1.5B-Instruct did.
LEAST_MISSES: Final = 14
# Of so many errors in a row, one is left out at each end of the range, so that eight of ten are within it.
MISSES_PER_END: Final = 10
# Ratio. A forecast whose range is wider, most to least, is not sent: it would say nothing. Given by the aim
# of the feature.
WIDEST: Final = 3.0
# Tokens. The usual direct answers to questions whose form tells that they are short, until some were seen.
# Chosen by measurement: Qwen2.5-Coder-1.5B-Instruct's answers have 21 and 34 (small talk), 8 and 9 tokens.
SHORT_ANSWERS: Final[Mapping[str, int]] = {SMALL_TALK: 24, SHORT_FACT: 10, YES_OR_NO: 24}
# Between the router's reason and the language in the kind of a question.
KIND_SEPARATOR: Final = ", "
# Fraction. Lengths that differ by at most this share count as near one another.
NEAR = 0.2


@dataclass(slots=True)
class TurnSums:
    """Sums over a ring's past turns (the time from one result of a sequence to its next), in which the newest
    turns have the largest weight.

    turns: the sum of the weights; 0.0 before the first turn.
    seconds: the weighted seconds of the turns.
    tokens: the weighted number of tokens that a turn added to each sequence.
    computing: the seconds of compute that the stages' curve gives for one turn.
    """

    turns: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    computing: float = 0.0

    def add(self, seconds: float, tokens: float) -> None:
        """Add one turn. An outlier counts as MAX_OUTLIER times the mean; the first turn counts as it is. The
        weight of all earlier turns is reduced by KEPT. `computing` is not changed.

        seconds: how long the turn took.
        tokens: how many tokens it added to each sequence, on average.
        """
        if self.turns:
            seconds = min(seconds, MAX_OUTLIER * self.seconds / self.turns)
        self.turns = self.turns * KEPT + 1
        self.seconds = self.seconds * KEPT + seconds
        self.tokens = self.tokens * KEPT + tokens


class RingStepTimes:
    """The measured turns of one ring, by the number of sequences that take part in them.

    A turn is the time from one result of a sequence to its next one, with the tokens that the sequence gains.
    Steps that also carry prompts are measured separately. `curve` gives seconds of compute by tokens in the
    batch, as the stages measured it; it predicts turns with numbers of sequences that no step has had yet.

        results at 0.0 s {a, b}, 0.1 s {a}, 0.12 s {b}  -> turns of 2 sequences take 0.1 s and 0.12 s
    """

    def __init__(self, curve: Curve = (), kept: Mapping[str, Sequence[float]] | None = None) -> None:
        """Create the measurements of a ring. Prompts are measured anew.

        curve: seconds of compute of one step by tokens in its batch; empty if the stages have not measured.
        kept: the measurements of another ring of the same model, as the method `kept` returned them; None for
            none. They are scaled by the ratio of both rings' curves.
        """
        self._curve = CostCurve(curve)
        self._sums = {int(count): self._restored(int(count), *told) for count, told in (kept or {}).items()}
        # Steps that carried prompts. The field `tokens` holds the seconds that the curve predicts for them.
        self._prompts = TurnSums()
        # When the last result of each sequence arrived.
        self._turns: dict[int, float] = {}
        # When the last step that carried a prompt ended.
        self._prompted = float("-inf")

    def _restored(
        self, count: int, turns: float, seconds: float, tokens: float, computing: float
    ) -> TurnSums:
        """Return another ring's sums for this ring: with at most the weight RESTORED, and scaled by the
        curves. Without a curve the seconds stay as they were. Fewer turns than RESTORED keep their weight.

        count: the number of sequences that took part in the turns.
        turns: the weight of the other ring's turns, greater than 0.
        seconds: the weighted seconds of its turns.
        tokens: the weighted number of tokens that a turn added to each sequence.
        computing: the seconds of compute that its curve gives for one turn; 0.0 without a curve.
        """
        here = self._curve.at(count)
        share = min(1.0, RESTORED / turns)
        slower = here / computing if here and computing else 1.0
        return TurnSums(turns * share, seconds * share * slower, tokens * share, here or computing)

    def kept(self) -> dict[str, list[float]]:
        """Return the measurements for `__init__` of a later ring, by the number of sequences as text; {}
        before any turn was measured.
        """
        return {
            str(count): [one.turns, one.seconds, one.tokens, one.computing]
            for count, one in self._sums.items()
        }

    def on_result(self, result: Result, now: float) -> None:
        """Measure one result. It measures no turn if it is the first one of its sequences, or only computes
        prompts. A result without a number never counts as one that computes prompts. Ended sequences are
        forgotten. The seconds are recorded under the number of sequences that take turns now.

        The result ends a turn unless a prompt was computed since the sequences' last result, which would have
        made the turn longer. Sequences whose last result is older than the first one's last result take no
        turns any more.

        result: what the last stage has reported.
        now: the present time, in seconds of the engine's clock.
        """
        turns = [outcome for outcome in result.outcomes if outcome.draft_round]
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
        """Return the seconds of a turn in which `count` sequences take part; None before any turn was
        measured. For a count that was not measured, the nearest measured count is scaled by the ratio of the
        curve's values at both counts, or taken as it is without a curve.

        count: how many sequences take part.
        """
        known = self._nearest(count)
        if known is None:
            return None
        sums = self._sums[known]
        shown = self._curve.at(known)
        return sums.seconds / sums.turns * (self._curve.at(count) / shown if shown else 1.0)

    def tokens(self, count: int) -> float:
        """Return the tokens that a turn adds to each of `count` sequences; 1.0 before any turn was measured.
        For a count that was not measured, the nearest measured count is used; the result is at least 1.0.

        count: how many sequences take part.
        """
        known = self._nearest(count)
        return 1.0 if known is None else max(self._sums[known].tokens / self._sums[known].turns, 1.0)

    def prompt(self, rows: int) -> float:
        """Return the seconds of prefilling tokens; 0.0 for none. The curve's seconds are scaled by how much
        longer measured steps with prompts took than the curve says; before any, they are not scaled.

        rows: how many tokens are prefilled.
        """
        slower = self._prompts.seconds / self._prompts.tokens if self._prompts.tokens else 1.0
        return self._curve.at(rows) * slower if rows > 0 else 0.0

    def _nearest(self, count: int) -> int | None:
        """Return the measured number of sequences that is nearest to `count`, or None if no turn was
        measured. `count` itself is returned if it was measured; of two equally near ones, the one measured
        first.

        count: how many sequences take part.
        """
        return (
            count if count in self._sums else min(self._sums, key=lambda one: abs(one - count), default=None)
        )


class Ended(NamedTuple):
    """A past direct answer, from whose length later answers are forecast.

    kind: the kind of its question.
    steps: the steps that it took.
    tokens: how many tokens it has.
    cut: True if a limit ended it, so that it would have been longer.
    """

    kind: str
    steps: int
    tokens: int
    cut: bool


# Names of the attributes of `AnswerLengths` that are kept.
LENGTHS = ("direct", "plan", "points", "branch")


class AnswerLengths:
    """Lengths of one model's past answers, from which those of later answers are forecast.

    `direct` holds direct answers, `plan` tokens of plans, `points` the numbers of points of plans, and
    `branch` tokens of branches. A branch that a limit cut is stored as 0 tokens, because its full length is
    unknown.

    Direct answers are compared by their steps rather than tokens: text that repeats itself is long, but
    drafts predict it well, so steps vary less than tokens do.
    """

    def __init__(self, kept: Mapping[str, Iterable[Any]] | None = None) -> None:
        """Start with the lengths of an earlier process.

        kept: what the method `kept` has returned there, as JSON values; None for no lengths, and a missing
            name counts as empty. At most REMEMBERED of each are kept.

        Raises ValueError or TypeError if the values have another form.
        """
        known = kept or {}
        direct = (
            Ended(str(kind), int(steps), max(int(tokens), 1), bool(cut))
            for kind, steps, tokens, cut in known.get("direct", ())
        )
        self.direct = deque(direct, REMEMBERED)
        self.plan, self.points, self.branch = (
            deque(map(int, known.get(name, ())), REMEMBERED) for name in LENGTHS[1:]
        )

    def kept(self) -> dict[str, list[Any]]:
        """Return the lengths for `__init__` of a later process, as JSON values; the lists are empty before
        any answer.
        """
        return {name: list(getattr(self, name)) for name in LENGTHS}

    def on_event(self, event: Event) -> None:
        """Learn from one client event; other events are ignored. Text that was cancelled or failed says
        nothing about lengths and is ignored too. A plan teaches its number of points, a branch its tokens (0
        if a limit cut it), and the end of an answer with branches the tokens of its plan. A plan without
        points and a branch without tokens are ignored.

        event: an event of any request of this model.
        """
        match event:
            case Planned(points) if points:
                self.points.append(len(points))
            case BranchFinished(_, Reason.STOP | Reason.LENGTH as reason, tokens) if tokens:
                self.branch.append(tokens if reason is Reason.STOP else 0)
            case Finished(Reason.STOP | Reason.LENGTH, _, _, told) if told.branches:
                self.plan.append(told.plan_tokens)
            case _:
                pass

    def steps(self, kind: str, limit: int) -> list[float]:
        """Return how many steps past direct answers took, as samples for an answer of a certain length; [] if
        no answer says anything about it.

        Answers to the same kind of question are used if there are any. Otherwise a question whose form tells
        that its answer is short gets the usual length of such answers (SHORT_ANSWERS). For any other kind the
        answers to questions that are not short are used, if there are at least OTHERS; not for code and for
        questions that are usually planned, whose lengths are others. An answer that a limit cut is assumed to
        run into the new limit too, so its steps are scaled by limit / tokens. Other answers are scaled so
        only if they are longer than the limit.

        kind: the kind of the question, see `kind_of_question`.
        limit: the most tokens that the answer may have.
        """
        alike = [one for one in self.direct if one.kind == kind]
        if not alike and kind in SHORT_ANSWERS:
            return [min(SHORT_ANSWERS[kind], limit) / self._pace()]
        long = [one for one in self.direct if one.kind not in SHORT_ANSWERS]
        others = [] if reason_of(kind) in (SEVERAL_POINTS, CODE) or len(long) < OTHERS else long
        known = [(one.steps, limit / one.tokens, one.cut) for one in alike or others]
        return [steps * (share if cut else min(share, 1.0)) for steps, share, cut in known]

    def _pace(self) -> float:
        """Return the tokens per step of past direct answers; 1.0 before any answer."""
        steps = sum(one.steps for one in self.direct)
        return max(sum(one.tokens for one in self.direct) / steps, 1.0) if steps else 1.0

    def branches(self, count: int) -> list[float]:
        """Return the expected lengths of `count` branches, the longest first, as quantiles of past branches.
        A branch that a limit cut counts as infinitely long. Return [] if there is no past branch. For fewer
        past branches than `count`, lengths repeat.

            past branches 30, 60, 90: count 1 -> [60]; count 3 -> [90, 60, 30]

        count: how many branches there will be.
        """
        known = sorted((tokens or inf for tokens in self.branch), reverse=True)
        return [known[(2 * place + 1) * len(known) // (2 * count)] for place in range(count)] if known else []


@dataclass(frozen=True, slots=True)
class Workload:
    """What a forecast depends on: the sizes of one request, and what else runs.

    prompt: number of tokens that must be prefilled before the first token.
    limits: the request's limits.
    suffix: number of tokens that must be prefilled for each branch; None if that is not known yet.
    others: number of sequences of other requests that take turns at the same time.
    kind: the kind of the question, see `kind_of_question`; "" if it is unknown.
    """

    prompt: int
    limits: Limits
    suffix: int | None = None
    others: int = 0
    kind: str = ""


class Forecaster:
    """Forecasts of one ring, in seconds from now. A forecast is None as long as nothing was measured.

    `misses` holds the errors of past forecasts, as the ratio of the real to the forecast time, by the name
    that `name_of_misses` returns.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        """Create a forecaster.

        kept: what `Forecaster.kept` has returned in an earlier process; None for no measurements. Step times
            are kept without a curve, until `begin`.

        Raises ValueError, TypeError or KeyError if `kept` has another form.
        """
        known = kept or {"steps": {}, "lengths": {}, "misses": {}, "suffix": 0}
        self.steps = RingStepTimes((), known["steps"])
        self.lengths = AnswerLengths(known["lengths"])
        self.misses = defaultdict[str, deque[float]](lambda: deque(maxlen=REMEMBERED))
        for way, shares in known["misses"].items():
            self.misses[way].extend(map(float, shares))
        self._suffix = int(known["suffix"])

    def kept(self) -> dict[str, Any]:
        """Return the measurements that a later process can start with, as JSON values. The object has the
        members steps, lengths, misses and suffix.
        """
        misses = {way: list(shares) for way, shares in self.misses.items()}
        known = {"steps": self.steps.kept(), "lengths": self.lengths.kept()}
        return known | {"misses": misses, "suffix": self._suffix}

    def begin(self, curve: Curve) -> None:
        """Start measuring another ring. The lengths of past answers stay valid.

        curve: seconds of compute of one step of that ring by tokens in its batch.
        """
        self.steps = RingStepTimes(curve, self.steps.kept())

    def forecast(self, workload: Workload) -> Forecast:
        """Return the seconds of a direct and of a planned answer, before either was started; None for each of
        which nothing is known. The direct answer needs a measured turn and past lengths; the planned one
        needs past plans as well. The workload's `suffix`, if it is known, is remembered for later forecasts
        of branches.

        workload: the sizes of the request.
        """
        if workload.suffix is not None:
            self._suffix = workload.suffix
        known = self.lengths
        direct = None
        planned = None
        turn = self.steps.turn(1 + workload.others)
        steps = known.steps(workload.kind, workload.limits.new_tokens)
        if steps and turn is not None:
            direct = self.steps.prompt(workload.prompt) + likeliest(steps) * turn
        if known.points and known.plan:
            planned = self.planned(workload, round(median(known.points)))
        return Forecast(direct, planned)

    def planned(self, workload: Workload, count: int) -> float | None:
        """Return the seconds of a plan and all of its branches, or None if nothing was measured. Return None
        also if no branch was measured, or if the plan leaves no tokens.

        workload: the sizes of the request.
        count: how many points the plan has.
        """
        points = tuple(Point(id, 0, "") for id in range(1, count + 1))
        written = self.plan_tokens(count)
        plan = self.direct(workload, written)
        branches = self.branches(workload, points, written)
        return plan + branches if plan is not None and branches is not None else None

    def plan_tokens(self, count: int) -> float:
        """Return the expected tokens of a plan, by past plans. Before any plan was seen, each point takes
        PLANNED_TOKENS.

        count: how many points the plan has.
        """
        known = self.lengths
        each = median(known.plan) / median(known.points) if known.plan and known.points else PLANNED_TOKENS
        return each * count

    def direct(self, workload: Workload, tokens: float) -> float | None:
        """Return the seconds of one sequence, its prompt included; None if no turn was measured. At most as
        many tokens as the request's limit are counted.

        workload: the sizes of the request.
        tokens: how many tokens the sequence decodes.
        """
        writing = self.writing(1 + workload.others, min(tokens, workload.limits.new_tokens))
        return None if writing is None else self.steps.prompt(workload.prompt) + writing

    def branches(self, workload: Workload, points: Sequence[Point], plan: float = 0.0) -> float | None:
        """Return the seconds of all branches of a plan that took `plan` tokens. Branches wait for those that
        they need. Prompts of all branches are counted first.

        Each branch is as long as past branches, or as its share of the tokens allows. As many branches run in
        parallel as the request allows. Return None if no branch or no turn was measured, or if the plan
        leaves no tokens.

        workload: the sizes of the request.
        points: the points of the plan, with their needs.
        plan: number of tokens that the plan took; 0.0 if they do not count.
        """
        limits = workload.limits
        lengths = self.lengths.branches(len(points))
        if not lengths or plan >= limits.new_tokens:
            return None
        most = min((limits.new_tokens - plan) / len(points), limits.max_branch_tokens or float("inf"))
        left = {point.id: min(length, most) for point, length in zip(points, lengths)}
        seconds = self.steps.prompt(self._suffix * len(points))
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

    def spread(self, about: str, workload: Workload, seconds: float) -> tuple[float, float, float] | None:
        """Return the likeliest seconds of an answer, and the seconds between which eight of ten answers end,
        for a forecast that was computed as `seconds`.

        All three follow from the errors of past forecasts for this kind of question, each of which was made
        before its answer ended: their median, and two of their quantiles. Return None if there are fewer than
        LEAST_MISSES: errors of other kinds say nothing. No time of a direct answer is longer than the time in
        which the answer reaches its token limit.

            19 errors 0.3, 0.5, ... 1.1 ... 2.0, 4.0 -> 1.1, 0.5 and 2.0 x `seconds`

        A range that is sent was chosen for being narrow (WIDEST), so that fewer than eight of ten answers end
        within it. The range therefore takes in one more error at each end as long as it can still be sent.
        Simulated with 14 to 60 errors whose middle eight of ten differ by 2.6 times, 79 % of the answers end
        within the ranges that are sent without this rule, and 81 % with it.

            19 errors 0.8, 0.9, ... 1.1 ... 1.5, 1.6 -> 1.1, 0.8 and 1.6 x `seconds`, as 1.6 <= 3 * 0.8

        about: "direct", "planned" or "branches".
        workload: the sizes of the request.
        seconds: the computed time, since the arrival of the request.
        """
        misses = sorted(self.misses.get(name_of_misses(about, workload.kind), ()))
        if len(misses) < LEAST_MISSES:
            return None
        outside = (len(misses) + 1) // MISSES_PER_END
        wider = max(outside - 1, 1)
        outside = wider if misses[-wider] <= WIDEST * misses[wider - 1] else outside
        longest = self.longest(workload) if about == "direct" else inf
        usual, least, most = (
            min(seconds * miss, longest) for miss in (median(misses), misses[outside - 1], misses[-outside])
        )
        return usual, least, most

    def longest(self, workload: Workload) -> float:
        """Return the seconds of a direct answer that reaches its token limit, at the slowest pace of tokens
        per step seen so far; infinity if no turn was measured. Without past direct answers the pace is one
        token per step.

        workload: the sizes of the request.
        """
        turn = self.steps.turn(1 + workload.others)
        limit = workload.limits.new_tokens
        pace = min((one.tokens / one.steps for one in self.lengths.direct if one.steps), default=1.0)
        return inf if turn is None else self.steps.prompt(workload.prompt) + turn * limit / pace

    def writing(self, count: int, tokens: float) -> float | None:
        """Return the seconds in which sequences decode; None if no turn was measured.

        count: how many sequences decode in parallel.
        tokens: how many tokens each of them decodes.
        """
        turn = self.steps.turn(count)
        return None if turn is None else turn * tokens / self.steps.tokens(count)


def name_of_misses(about: str, kind: str) -> str:
    """Return the name under which the errors of forecasts of one kind are stored.

    about: "direct", "planned" or "branches": what the forecasts are of.
    kind: the kind of the question; "" if it is unknown.
    """
    return f"{about}: {kind}"


def reason_of(kind: str) -> str:
    """Return the router's reason in the kind of a question; see `kind_of_question`.

        "the answer has several points, de" -> "the answer has several points"

    kind: the kind of a question.
    """
    return kind.partition(KIND_SEPARATOR)[0]


def kind_of_question(reason: str, language: str) -> str:
    """Return the kind of a question, by which lengths and errors are remembered: the router's reason, and the
    language if the answer is not short. The same answer has twice as many tokens in one language as in
    another.

    reason: the router's reason.
    language: the language of the question.
    """
    return reason if reason in SHORT_ANSWERS else f"{reason}{KIND_SEPARATOR}{language}"


def likeliest(lengths: Sequence[float]) -> float:
    """Return the length that most other lengths are near to, within NEAR. The median would be wrong: many
    answers are short, others reach their limit, and few are in between.

    Among several such lengths the one nearest to the median is returned, and the median itself if no two
    lengths are near one another. With an even number of lengths, the median may lie between two of them.

        [10, 11, 12, 100, 300] -> 12 (10, 11 and 12 are near one another, and 12 is the median)

    lengths: at least one length.
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


@dataclass(slots=True)
class Outlook:
    """The forecasts of one request, and what is learned from its end. The argument `passed` is the number of
    seconds since the request arrived.

    costs: the ring's forecaster.
    workload: what the request's forecasts depend on.
    """

    costs: Forecaster
    workload: Workload
    # The forecast seconds since the arrival, by what was forecast.
    _told: dict[str, float] = field(default_factory=dict[str, float])

    def of_both(self, passed: float) -> Forecast | None:
        """Return the forecast of both ways to answer, before the request starts; None if nothing is known of
        either. A forecast without a known range is None here, though it is remembered.

        passed: seconds since the request arrived.
        """
        told = self.costs.forecast(self.workload)
        direct, planned = (
            self._tell("direct", told.direct, passed),
            self._tell("planned", told.planned, passed),
        )
        if direct[0] is None and planned[0] is None:
            return None
        return Forecast(direct[0], planned[0], *direct[1:], *planned[1:])

    def of_plan(self, points: Sequence[Point], passed: float, plan: float = 0.0) -> Forecast | None:
        """Return the forecast of a plan whose points are known; None if nothing is known.

        points: the points of the plan, with their needs.
        passed: seconds since the request arrived.
        plan: number of tokens that the plan took; 0.0 if they do not count.
        """
        told = self._tell("branches", self.costs.branches(self.workload, points, plan), passed)
        return None if told[0] is None else Forecast(None, told[0], None, None, *told[1:])

    def on_end(self, planned: bool, seconds: float, steps: int, tokens: int, cut: bool) -> None:
        """Learn from the end of the request: the length of a direct answer, and the errors of the forecasts
        that were made. The length is learned only from a direct answer with tokens, and errors only if
        `seconds` is greater than 0.

        planned: True if the answer had branches.
        seconds: seconds from its arrival to its end.
        steps: number of steps of the ring that it took.
        tokens: number of tokens of the answer.
        cut: True if its token limit ended it.
        """
        kind = self.workload.kind
        if not planned and tokens:
            self.costs.lengths.direct.append(Ended(kind, steps, tokens, cut))
        for about in ("planned", "branches") if planned else ("direct",):
            if (told := self._told.get(about)) and seconds > 0:
                self.costs.misses[name_of_misses(about, kind)].append(seconds / told)

    def _tell(
        self, about: str, seconds: float | None, passed: float
    ) -> tuple[float | None, float | None, float | None]:
        """Remember a forecast, and return its seconds since the arrival with the lower and upper ends of its
        range. Return None for all three if there is no forecast, or if its range is unknown or wider than
        WIDEST. The forecast is remembered all the same, so that the range of later forecasts follows from its
        error.

        about: "direct", "planned" or "branches": what the forecast is of.
        seconds: the forecast in seconds from now, or None if nothing is known.
        passed: seconds since the request arrived.
        """
        if seconds is None:
            return None, None, None
        whole = self._told[about] = seconds + passed
        spread = self.costs.spread(about, self.workload, whole)
        if spread is None or spread[2] > WIDEST * spread[1]:
            return None, None, None
        usual, least, most = (round(one, SECONDS_DIGITS) for one in spread)
        return usual, least, most
