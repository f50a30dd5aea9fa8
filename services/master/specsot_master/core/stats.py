"""Counters: the costs of one request, how requests ended, recent steps, stalled rings, and retry hints."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specsot.core.frames import Outcome, Result
from specsot.core.info import RequestsInfo, StepsInfo
from specsot.errors import SpecsotError
from specsot.events import Statistics

# Decimal digits. Seconds that clients receive are rounded to microseconds.
SECONDS_DIGITS = 6
# Decimal digits. Ratios and rates that clients receive are rounded to so many.
RATIO_DIGITS = 4


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """Tokens of one request's output, by what became of them.

    written: number of tokens that the model wrote, up to the end of each sequence. Accepted drafts after the
        end are not counted, so that the count does not depend on the drafter.
    plan: the written tokens that are not part of the answer's text, such as the plan.
    merged: number of tokens of the answer.
    headings: number of tokens of the headings in the answer, which the model did not write.
    polish: number of tokens of the turn that rewrote the answer; 0 if there was none.
    discarded: number of tokens that the model wrote in addition, and that the answer does not use: those of a
        direct answer that a plan replaced, of a plan that was not used, or of the beginning of a branch that
        was opened again.
    """

    written: int
    plan: int
    merged: int
    headings: int = 0
    polish: int = 0
    discarded: int = 0


@dataclass(slots=True)
class RequestTally:
    """Running figures of one request, which become its statistics at the end.

    began: when the request arrived, in seconds; all times are on the same clock.
    prompt_tokens: number of tokens of the prompt.
    cached_tokens: number of tokens of the prompt whose KV the ring had already.
    steps: number of steps of the ring that returned at least one outcome of the request.
    trees: number of draft rounds, over all sequences.
    tree_tokens: number of tokens that the draft rounds added.
    paused_trees: number of draft rounds without drafts, because the drafter was paused as unprofitable.
    first_token: when the first token arrived that was not part of the router's score, in seconds; None
        before.
    phase: the name of the phase that runs now, such as "decode"; None before the first and after the last.
    phase_began: when that phase began, in seconds; 0.0 before the first phase.
    phases: seconds of each phase that has ended. The first step of a phase adds "<phase>_prefill".
    """

    began: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    trees: int = 0
    tree_tokens: int = 0
    paused_trees: int = 0
    first_token: float | None = None
    phase: str | None = None
    phase_began: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def enter(self, phase: str | None, now: float) -> None:
        """End the running phase and begin the next one. The time before the first phase counts as "queue".
        The seconds of a phase that ran before are added up. Nothing is recorded if no phase runs and others
        have ended already.

        phase: the name of the next phase; None ends the last phase.
        now: the present time, in seconds of the engine's clock.
        """
        before = self.phase or "queue"
        if self.phase or not self.phases:
            since = self.phase_began if self.phase else self.began
            self.phases[before] = self.phases.get(before, 0.0) + now - since
        self.phase = phase
        self.phase_began = now

    def rename(self, phase: str) -> None:
        """Give the running phase another name, for a skeleton that turns out to be a direct answer.

        phase: the new name.
        """
        self.phase = phase

    def step(self, outcomes: Iterable[Outcome], now: float) -> None:
        """Count one step of the ring. The first step of each phase records its prefill seconds. Outcomes of
        draft round 0 count as no tree. The first token's time is kept once it is set; tokens of the phase
        "decision" do not set it.

        outcomes: what the step did for the request's sequences, at least one. Each of its forward passes
            counts as a step, and, if it is one of several, as a draft round of its own.
        now: the time of the step, in seconds of the engine's clock.
        """
        outcomes = tuple(outcomes)
        self.steps += max(1 + outcome.extra_passes for outcome in outcomes)
        if self.phase is not None:
            self.phases.setdefault(f"{self.phase}_prefill", now - self.phase_began)
        for outcome in outcomes:
            if outcome.draft_round:
                rounds = len(outcome.tokens) if outcome.extra_passes else 1
                self.trees += rounds
                self.paused_trees += rounds * outcome.draft_paused
                self.tree_tokens += len(outcome.tokens)
            if self.first_token is None and outcome.tokens and self.phase != "decision":
                self.first_token = now

    def close(
        self, mode: str, decision: str, counts: OutputTokens, num_branches: int, now: float
    ) -> Statistics:
        """Return the statistics of the finished request, and end its last phase. Without a first token its
        seconds are 0.0, and without a draft round `mean_accepted` is 1.0. Without elapsed time
        `tokens_per_second` is 0.0, and without a draft round `paused_share` is 0.0. The headings count as
        completion tokens.

        mode: "direct" or "sot": how the request was answered.
        decision: why, in the router's words.
        counts: the tokens of its output.
        num_branches: how many branches were opened; 0 for a direct answer.
        now: the time of its end, in seconds of the engine's clock.
        """
        self.enter(None, now)
        seconds = now - self.began
        first = self.first_token
        return Statistics(
            mode=mode,
            decision=decision,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=counts.written + counts.headings,
            merged_tokens=counts.merged,
            plan_tokens=counts.plan,
            heading_tokens=counts.headings,
            polish_tokens=counts.polish,
            discarded_tokens=counts.discarded,
            seconds=round(seconds, SECONDS_DIGITS),
            seconds_to_first_token=0.0 if first is None else round(first - self.began, SECONDS_DIGITS),
            tokens_per_second=round(counts.merged / seconds, RATIO_DIGITS) if seconds > 0 else 0.0,
            steps=self.steps,
            mean_accepted=round(self.tree_tokens / self.trees, RATIO_DIGITS) if self.trees else 1.0,
            paused_share=round(self.paused_trees / self.trees, RATIO_DIGITS) if self.trees else 0.0,
            branches=num_branches,
            phases={name: round(took, SECONDS_DIGITS) for name, took in self.phases.items()},
        )


class RequestCounts:
    """Counts of requests since the engine started.

    `refused` counts requests that found the queue full. `asked` counts prompt tokens of all requests that
    entered the ring, and `found` those of them whose KV the ring had already.
    """

    def __init__(self) -> None:
        """Start with all counts at 0."""
        self.refused = self.asked = self.found = 0
        self._ended: Counter[str] = Counter()

    def enter(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a request that entered the ring.

        num_prompt_tokens: number of tokens of its prompt.
        num_cached_tokens: number of tokens of its prompt whose KV the ring had already.
        """
        self.asked += num_prompt_tokens
        self.found += num_cached_tokens

    def end(self, reason: str | SpecsotError) -> None:
        """Count a request that ended.

        reason: how it ended, such as "stop"; or the error with which it failed, which counts under its
            class's name.
        """
        self._ended[reason if isinstance(reason, str) else error_label(reason)] += 1

    def info(self, waiting: int, running: int, writing: int, kept: int) -> RequestsInfo:
        """Return the counts together with the present numbers. `ended`, `refused` and the prompt tokens are
        those since the engine started.

        waiting: number of requests in the queue.
        running: number of requests in the ring.
        writing: number of sequences that decode.
        kept: finished requests that can be resumed.
        """
        return RequestsInfo(
            waiting,
            running,
            writing,
            kept=kept,
            ended=tuple(sorted(self._ended.items())),
            refused=self.refused,
            prompt_tokens=self.asked,
            cached_tokens=self.found,
        )


def error_label(error: SpecsotError) -> str:
    """Return the name of an error's class as a label: TimedOut -> timed_out.

    error: the error with which a request failed.
    """
    name = type(error).__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")


# Seconds. The window over which rates are averaged. Untuned.
WINDOW_SECONDS = 2.0
# Steps. Bounds the remembered steps: enough for 2,000 steps a second within the window.
MAX_STEPS = 4096


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the ring, as the meter remembers it.

    when: when its result arrived, in seconds.
    tokens: number of tokens that it added to all sequences.
    rows: number of tokens in the batch of each of its forward passes.
    passes: number of forward passes.
    """

    when: float
    tokens: int
    rows: int
    passes: int


class StepMeter:
    """Measures the steps of a ring from its results."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without steps.

        clock: returns monotonic seconds.
        """
        self._clock = clock
        self._newest: deque[_Step] = deque(maxlen=MAX_STEPS)
        self._stages: tuple[float, ...] = ()
        self._steps = self._tokens = 0
        self._listeners: list[Callable[[Result], None]] = []

    def follow(self, listener: Callable[[Result], None]) -> None:
        """Report the result of every later step to a listener.

        listener: called with each result; it must return quickly.
        """
        self._listeners.append(listener)

    def on_result(self, result: Result) -> None:
        """Count one result. A result with number 0 belongs to no step; only its tokens are counted. For a
        step, the listeners are called after the figures were updated.

        result: what the last stage, or stage 0, has reported.
        """
        tokens = sum(len(outcome.tokens) for outcome in result.outcomes)
        if not result.number:
            self._tokens += tokens
            return
        passes = result.passes
        self._newest.append(_Step(self._clock(), tokens, result.rows, passes))
        self._stages = _smoothed(self._stages, tuple(seconds / passes for seconds in result.seconds))
        self._steps = self._steps + passes
        self._tokens = self._tokens + tokens
        for listener in self._listeners:
            listener(result)

    def info(self) -> StepsInfo:
        """Return the current figures; all of them are 0 before the first step. Another thread may call this
        while results arrive, as the method reads a copy. Rates and means cover the last WINDOW_SECONDS;
        without a step in them they are 0. The totals count from the start.
        """
        since = self._clock() - WINDOW_SECONDS
        recent = [step for step in tuple(self._newest) if step.when >= since]
        return StepsInfo(
            steps=self._steps,
            tokens=self._tokens,
            per_second=sum(step.passes for step in recent) / WINDOW_SECONDS,
            tokens_per_step=_mean(step.tokens / step.passes for step in recent),
            rows_per_step=_mean(step.rows for step in recent),
            stages=tuple(round(seconds, SECONDS_DIGITS) for seconds in self._stages),
        )


def _smoothed(smoothed: tuple[float, ...], newest: tuple[float, ...]) -> tuple[float, ...]:
    """Return the stages' seconds smoothed over steps (a fifth of the newest value), so that a figure on a
    screen stays readable. If the number of stages has changed, smoothing starts again with the newest values.

    smoothed: what this function returned for the previous step, in seconds per stage; empty at first.
    newest: the seconds of the newest step, per stage.
    """
    if len(smoothed) != len(newest):
        return newest
    return tuple(0.8 * old + 0.2 * new for old, new in zip(smoothed, newest))


def _mean(values: Iterable[float]) -> float:
    """Return the rounded mean, or 0.0 for no values.

    values: the numbers, in any order.
    """
    listed = list(values)
    return round(sum(listed) / len(listed), RATIO_DIGITS) if listed else 0.0


class StallDetector:
    """Detects a ring that has work, but makes no step."""

    def __init__(self, patience: float) -> None:
        """Watch a ring that has made no steps.

        patience: seconds without a step after which a ring with work counts as stalled.
        """
        self._patience = patience
        self._steps = 0
        self._since = float("inf")

    def is_moving(self, num_steps: int, has_work: bool, now: float) -> bool:
        """Return False if the ring has stalled: it had work, but made no step, for longer than the patience.
        Call this regularly. An idle ring, a new step, and a clock that was set back each restart the
        patience; then True is returned.

        num_steps: how many steps the ring has made so far.
        has_work: True if the ring has work, so that a step must come. An idle ring never counts as stalled.
        now: the present time, in seconds of a monotonic clock.
        """
        if self._since > now or not has_work or num_steps != self._steps:
            self._steps = num_steps
            self._since = now
        return now - self._since < self._patience


# Seconds. Bound the hint after which a refused client may try again. Untuned.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 60.0
# Requests. The rate of departures is averaged over this many. Untuned.
MAX_DEPARTURES = 32


class RetryHints:
    """Computes how many seconds a refused client should wait before it tries again.

    The n-th client that is refused since a request left is sent to the n-th place that will become free.
    """

    def __init__(self, default_interval: float) -> None:
        """Start without departures.

        default_interval: seconds between two departures that are assumed until two requests have left.
        """
        self._usual = default_interval
        self._left: deque[float] = deque(maxlen=MAX_DEPARTURES)
        self._refused = 0

    def on_departure(self, now: float) -> None:
        """Record that a request has left, which frees a place.

        now: the present time, in seconds of a monotonic clock.
        """
        self._left.append(now)
        self._refused = 0

    def refuse(self, now: float) -> float:
        """Count a refused client and return the seconds after which it may try again, from MIN_RETRY_SECONDS
        to MAX_RETRY_SECONDS. The seconds grow with every client that was refused since the last departure.

        now: the present time, in seconds of a monotonic clock.
        """
        self._refused += 1
        return min(max(self._interval(now) * self._refused, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _interval(self, now: float) -> float:
        """Return the mean seconds between departures, or the time since the last one if that is longer; the
        default until two requests have left. At most the last MAX_DEPARTURES departures count.

        now: the present time, in seconds of a monotonic clock.
        """
        if len(self._left) < 2:
            return self._usual
        mean = (self._left[-1] - self._left[0]) / (len(self._left) - 1)
        return max(mean, now - self._left[-1])
