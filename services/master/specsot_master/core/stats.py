"""Counters: costs of a request, how requests ended, recent laps, a stalled ring, when to try again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specsot.core.frames import Outcome, Result
from specsot.core.info import LapsInfo, RequestsInfo
from specsot.errors import SpecsotError
from specsot.events import Statistics

# Digits behind the point of figures that clients read: seconds to a microsecond, ratios, rates.
SECONDS_DIGITS = 6
RATIO_DIGITS = 4


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """Tokens of a request's output. written: by the model, up to where each sequence was over; what drafts
    brought behind that is not counted, so the count does not depend on them. plan: those of them that no
    answer holds. merged: of the answer. headings: what its headings take. polish: of the turn that wrote it.
    """

    written: int
    plan: int
    merged: int
    headings: int = 0
    polish: int = 0


@dataclass(slots=True)
class RequestTally:
    """Running figures of one request that arrived at `began`."""

    began: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    laps: int = 0
    trees: int = 0
    tree_tokens: int = 0
    rested_trees: int = 0
    first_token: float | None = None
    phase: str | None = None
    phase_began: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def enter(self, phase: str | None, now: float) -> None:
        """The phase before ends here. None: no phase follows. Before the first one it waited."""
        before = self.phase or "queue"
        if self.phase or not self.phases:
            since = self.phase_began if self.phase else self.began
            self.phases[before] = self.phases.get(before, 0.0) + now - since
        self.phase = phase
        self.phase_began = now

    def rename(self, phase: str) -> None:
        """The running phase turned out to be another one."""
        self.phase = phase

    def lap(self, outcomes: Iterable[Outcome], now: float) -> None:
        """One lap of the ring that brought these outcomes for this request."""
        self.laps += 1
        if self.phase is not None:
            self.phases.setdefault(f"{self.phase}_prefill", now - self.phase_began)
        for outcome in outcomes:
            if outcome.step:
                self.trees += 1
                self.rested_trees += outcome.rested
                self.tree_tokens += len(outcome.tokens)
            if self.first_token is None and outcome.tokens and self.phase != "decision":
                self.first_token = now

    def close(self, mode: str, decision: str, counts: OutputTokens, branches: int, now: float) -> Statistics:
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
            seconds=round(seconds, SECONDS_DIGITS),
            seconds_to_first_token=0.0 if first is None else round(first - self.began, SECONDS_DIGITS),
            tokens_per_second=round(counts.merged / seconds, RATIO_DIGITS) if seconds > 0 else 0.0,
            laps=self.laps,
            mean_accepted=round(self.tree_tokens / self.trees, RATIO_DIGITS) if self.trees else 1.0,
            rested=round(self.rested_trees / self.trees, RATIO_DIGITS) if self.trees else 0.0,
            branches=branches,
            phases={name: round(took, SECONDS_DIGITS) for name, took in self.phases.items()},
        )


class RequestCounts:
    """refused: for lack of room. asked, found: prompt tokens of requests that entered the ring, and those
    of them that it had already.
    """

    def __init__(self) -> None:
        self.refused = self.asked = self.found = 0
        self._ended: Counter[str] = Counter()

    @property
    def ended(self) -> tuple[tuple[str, int], ...]:
        """(why, how many), by name."""
        return tuple(sorted(self._ended.items()))

    def enter(self, prompt: int, found: int) -> None:
        self.asked += prompt
        self.found += found

    def end(self, why: str | SpecsotError) -> None:
        """A request is over: by a reason of its own, or by an error."""
        self._ended[why if isinstance(why, str) else error_label(why)] += 1

    def info(self, waiting: int, running: int, writing: int, kept: int) -> RequestsInfo:
        counted = {"refused": self.refused, "prompt_tokens": self.asked, "cached_tokens": self.found}
        return RequestsInfo(waiting, running, writing, kept=kept, ended=self.ended, **counted)


def error_label(error: SpecsotError) -> str:
    """TimedOut -> timed_out."""
    name = type(error).__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")


WINDOW_SECONDS = 2.0  # seconds over which rates are taken; not measured
MAX_LAPS = 4096  # laps remembered: 2,000 a second for that window


@dataclass(frozen=True, slots=True)
class _Lap:
    when: float
    tokens: int
    rows: int


class LapMeter:
    """Hears every result. `clock`: seconds that only go forward."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: deque[_Lap] = deque(maxlen=MAX_LAPS)
        self._stages: tuple[float, ...] = ()
        self._laps = self._tokens = 0
        self._listeners: list[Callable[[Result], None]] = []

    def follow(self, listener: Callable[[Result], None]) -> None:
        """From now on `listener` hears of every lap too; what it does must be quick."""
        self._listeners.append(listener)

    def on_result(self, result: Result) -> None:
        """One more lap; or what belongs to none, which has the number 0."""
        tokens = sum(len(outcome.tokens) for outcome in result.outcomes)
        if not result.number:
            self._tokens += tokens
            return
        self._newest.append(_Lap(self._clock(), tokens, result.rows))
        self._stages = _smoothed(self._stages, result.seconds)
        self._laps = self._laps + 1
        self._tokens = self._tokens + tokens
        for listener in self._listeners:
            listener(result)

    def info(self) -> LapsInfo:
        """As of now. May be asked from another thread, while laps are heard: that looks at a copy."""
        since = self._clock() - WINDOW_SECONDS
        recent = [lap for lap in tuple(self._newest) if lap.when >= since]
        return LapsInfo(
            laps=self._laps,
            tokens=self._tokens,
            per_second=len(recent) / WINDOW_SECONDS,
            tokens_per_lap=_mean(lap.tokens for lap in recent),
            rows_per_lap=_mean(lap.rows for lap in recent),
            stages=tuple(round(seconds, SECONDS_DIGITS) for seconds in self._stages),
        )


def _smoothed(before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
    """So that a figure on a screen can be read; another number of stages begins anew."""
    if len(before) != len(now):
        return now
    return tuple(0.8 * old + 0.2 * new for old, new in zip(before, now))


def _mean(values: Iterable[int]) -> float:
    listed = list(values)
    return round(sum(listed) / len(listed), RATIO_DIGITS) if listed else 0.0


class StallDetector:
    """Look at it now and then. `patience`: seconds without a lap, while one is owed."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._laps = 0
        self._since = float("inf")

    def is_moving(self, laps: int, owed: bool, now: float) -> bool:
        """laps: how many there have been. owed: something in the ring may go on. Idle is healthy."""
        if self._since > now or not owed or laps != self._laps:
            self._laps = laps
            self._since = now
        return now - self._since < self._patience


# Seconds that a refused client is told to wait, least and most; not measured.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 60.0
MAX_DEPARTURES = 32  # departures of which the rate is taken; not measured


class RetryHints:
    """The n-th caller refused since a request left is sent to the n-th place that will become free.

    usual: seconds to hint before anything is known.
    """

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._left: deque[float] = deque(maxlen=MAX_DEPARTURES)
        self._refused = 0

    def on_departure(self, now: float) -> None:
        self._left.append(now)
        self._refused = 0

    def refuse(self, now: float) -> float:
        """Seconds after which this caller may try again."""
        self._refused += 1
        return min(max(self._interval(now) * self._refused, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _interval(self, now: float) -> float:
        """Seconds between departures; what has passed since the last one counts too, once it is longer."""
        if len(self._left) < 2:
            return self._usual
        mean = (self._left[-1] - self._left[0]) / (len(self._left) - 1)
        return max(mean, now - self._left[-1])
