"""How deep stage 0 keeps the pipeline, and how long it waits for drafts.

PipelineDepth: frames in flight, frames per family, rows of prompts, from measured lap times. A lap of
n rows takes the stages' time for n rows one after the other, and the hops. While a stage takes the same
time for many rows as for few, one frame for all is best; past the knee, or where rows take long to travel,
frames of fewer rows follow each other through the stages. No answer depends on it.

DraftTimeout: a drafter that misses is not waited for again for a while, so that one slow drafter costs one
timeout and not one per lap; a drafter that rests is not even told of frames.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from specsot.core.cost_curve import UNIT_CURVE, CostCurve
from specsot.core.draft_pause import DraftPause, PauseEvent, PauseState
from specsot.core.frames import Frame, Opening, TreeSegment
from specsot.members import Curve

LAP_WEIGHT = 0.2  # of one lap in the exponential mean of stage shares and gaps; not measured
# Laps of about as many rows; their median counts, so one slow lap changes nothing; not measured.
RECENT_LAPS = 9
# Share of a lap that another spread must bring. At less, times that waver by noise change the spread: on a
# simulated ring families were spread for nothing (commit e4c2ef9). 0.2 itself is not measured.
MIN_GAIN = 0.2
# How many times as long as without prompts a frame may take: those who write pause for no longer. A clock in
# place of stages (tests/worker/test_many_clients.py) has the 99th percentile between texts at 1.2 to 2.9
# times the median with this, at 3.1 with 2.5; with 2 fewer write.
MAX_PROMPT_STALL = 2.25
LEAST_PROMPT_ROWS = 8  # of a frame, however long they take; not measured
CHUNK_DIVISORS = (1, 2, 4, 8)  # a prompt's chunk is the row budget divided by one of these; not measured

# trees not waited for after a miss; doubles; not measured
FIRST_BACKOFF_TREES = 32
MAX_BACKOFF_TREES = 1024
MAX_UNSENT_ROWS = 8192  # rows of features that the last stage may have to keep through one rest; not measured
# Rows of features sent with one lap at most, unless that has more itself: as many as a frame has by default
# (--rows). What a drafter lacks beyond that, behind a rest, follows with later laps.
MAX_ROWS_PER_LAP = 512
PLAIN_LAPS = 15  # laps without trees of which the median counts; not measured
MAX_CATCH_UP_STEPS = 32  # steps after a pause in which trees are not waited for; not measured
SLOW_TREE_FACTOR = 4.0  # times the usual wait, after which the rest of a family goes on; not measured
WAIT_WEIGHT = 0.2  # of one wait in the exponential mean of waits; not measured


def place_of(opening: Opening) -> tuple[int, int]:
    """A sequence's family and its own id: trees of a frame are in this order."""
    source = opening.fork.sequence if opening.fork else opening.sequence
    return source if opening.family is None else opening.family, opening.sequence


def are_in_order(openings: Iterable[Opening]) -> bool:
    """Whether a frame's trees would be in this order."""
    places = [place_of(one) for one in openings]
    return places == sorted(places)


@dataclass(frozen=True, slots=True)
class FrameBudget:
    """What a frame and the ring may hold.

    rows: of one frame. flight: frames under way at most. slots: KV rows kept free per live sequence.
    prompts: rows of a frame while nobody writes; fewer than `rows` mean as many as those.
    """

    rows: int = 512
    flight: int = 1
    slots: int = 64
    prompts: int = 0

    @property
    def alone(self) -> int:
        """Rows of a frame while nobody writes."""
        return max(self.rows, self.prompts)


@dataclass(slots=True)
class InFlightFrame:
    """A frame under way. families: whose trees it carries. alone: with no other so far."""

    since: float
    families: frozenset[int]
    alone: bool


class RecentMedians:
    """Medians of the newest seconds of steps, one for every doubling of their rows."""

    def __init__(self) -> None:
        self._bins: dict[int, deque[tuple[int, float]]] = {}

    def __bool__(self) -> bool:
        return bool(self._bins)

    def record(self, rows: int, seconds: float) -> None:
        self._bins.setdefault(rows.bit_length(), deque(maxlen=RECENT_LAPS)).append((rows, seconds))

    @property
    def points(self) -> list[tuple[float, float]]:
        """(median rows, median seconds) of every bin: a slow step or two, as when a process begins, say
        nothing about the next.
        """
        return [
            (median(rows for rows, _ in seen), median(seconds for _, seconds in seen))
            for seen in self._bins.values()
        ]


class PipelineDepth:
    """Feed it every lap that returns; ask it before frames are composed."""

    def __init__(self, stages: int = 1, curve: Curve = (), overlap: bool = True) -> None:
        """curve: seconds per rows of all stages together, measured beforehand; corrected by every lap.
        overlap: several frames may fly."""
        self._measured = CostCurve(curve) if len(curve) > 1 else UNIT_CURVE
        self._stages = stages
        self._overlap = overlap and stages > 1
        self._shares = [1 / stages] * stages
        # Seconds of all stages, and of all hops between them.
        self._computed = RecentMedians()
        self._hop_times = RecentMedians()
        # Curves of both; None: they are made anew, because a step came back.
        self._compute_curve: CostCurve | None = None
        self._hop_curve: CostCurve | None = None
        self._gap = 0.0
        self.parts = 1

    def record_lap(self, rows: int, seconds: Sequence[float], elapsed: float, alone: bool) -> None:
        """A lap is over. seconds: of every stage; elapsed: of the whole. alone: nothing else flew then."""
        spent = sum(seconds)
        if not rows or spent <= 0 or len(seconds) != self._stages:
            return
        self._shares = [old + LAP_WEIGHT * (new / spent - old) for old, new in zip(self._shares, seconds)]
        self._computed.record(rows, spent)
        self._compute_curve = None
        if alone:
            self._hop_times.record(rows, max(elapsed - spent, 0.0))
            self._hop_curve = None

    def record_gap(self, seconds: float) -> None:
        """So long a family stayed with stage 0 between two of its laps: its trees were on their way."""
        self._gap += LAP_WEIGHT * (seconds - self._gap)

    def max_frames(self, least: int, limit: int) -> int:
        """Frames that may fly: as many as fit into a lap without waiting for each other, up to `limit`.
        least: as long as nothing is known.
        """
        if not self._hop_times:
            return min(least, limit)
        lap = self._lap_seconds(1)
        slowest = self._slowest_stage_seconds(1)
        return min(max(round(lap / slowest), 1), limit) if slowest else limit

    def frames_per_family(self, rows: int, branches: int, most: int) -> int:
        """Over how many frames (at most `most`) a family of so many rows goes: the fewest that are not worse
        than the best by MIN_GAIN; as many as now while they are better than those by half of that.
        """
        choices = range(1, max(min(branches, most), 1) + 1)
        cycles = {parts: self._cycle_seconds(rows, parts) for parts in choices}
        few = min(parts for parts in choices if (1 - MIN_GAIN) * cycles[parts] <= min(cycles.values()))
        now = min(self.parts, choices[-1])
        stays = now > few and cycles[now] <= (1 - MIN_GAIN / 2) * cycles[few]
        self.parts = now if stays else few
        return self.parts

    def chunk_rows(self, rows: int, budget: int) -> int:
        """Rows of a prompt's chunk, such that so many rows are through all stages soonest."""
        if not self._overlap:
            return budget
        sizes = [max(budget // part, 1) for part in CHUNK_DIVISORS]
        return min(sizes, key=lambda size: (self._prefill_seconds(rows, size), -size))

    def prompt_rows(self, writing: int, waiting: int, room: int) -> int:
        """Rows of prompts, at most `room`, that go with a frame while so many rows are written and so many
        texts wait for theirs. Those will write, too, and count as if they did: else few writers let few
        prompts in, and stay few. Of rows that stages compute side by side a frame has its share.
        """
        share = max(self._shares) if self._overlap else 1.0
        limit = MAX_PROMPT_STALL * self._compute_seconds((writing + waiting) * share)
        least = min(LEAST_PROMPT_ROWS, room)
        more = range(least + 1, room + 1)
        beside = writing * share
        return least + bisect_right(more, limit, key=lambda rows: self._compute_seconds(beside + rows))

    def _prefill_seconds(self, rows: int, size: int) -> float:
        """Chunks follow each other: the last one passes all stages behind the others."""
        return self._compute_seconds(min(rows, size)) + (-(-rows // size) - 1) * self._slowest_stage_seconds(
            min(rows, size)
        )

    def _cycle_seconds(self, rows: int, parts: int) -> float:
        """Seconds from a family's frame to its next: a whole lap, or as long as its frames keep a stage or a
        hop busy."""
        each = -(-rows // parts)
        sending = (self._hop_seconds(each) - self._hop_seconds(1)) / self._stages
        more = self._hop_seconds(rows) - self._hop_seconds(1)
        bound = more > self._compute_seconds(rows)  # else it is but noise
        lap = self._compute_seconds(each) + self._hop_seconds(each if bound else rows) + self._gap
        return max(lap, parts * self._slowest_stage_seconds(each), parts * sending if bound else 0.0)

    def _lap_seconds(self, rows: int) -> float:
        return self._compute_seconds(rows) + self._hop_seconds(rows)

    def _compute_seconds(self, rows: float) -> float:
        """All stages, one after the other."""
        if self._compute_curve is None:
            self._compute_curve = self._measured.corrected(self._computed.points)
        return self._compute_curve.at(rows)

    def _slowest_stage_seconds(self, rows: int) -> float:
        return self._compute_seconds(rows) * max(self._shares)

    def _hop_seconds(self, rows: int) -> float:
        if self._hop_curve is None:
            # Hops of more rows than were ever seen count as those of the most, because a slope of two noisy
            # points says nothing about far more rows: the last point is repeated at twice its rows.
            rows_seen, seconds = max(self._hop_times.points, default=(1.0, 0.0))
            self._hop_curve = CostCurve([*self._hop_times.points, (2 * rows_seen, seconds)])
        return self._hop_curve.at(rows)


@dataclass(slots=True)
class _Backoff:
    """How long one drafter is not waited for.

    trees: not to be waited for after its next miss. left: of those after its last miss.
    """

    trees: int = FIRST_BACKOFF_TREES
    left: int = 0


class DraftTimeout:
    """How long a sequence waits for a tree: `timeout` seconds while its drafter is timely, no time for a
    doubling number of trees after a miss, and no time while drafting is paused (`specsot.core.draft_pause`).

    Each of several drafters has its own misses: a slow one costs the sequences of the others nothing. A
    sequence that has not received a tree from any drafter yet has the drafter "".
    """

    def __init__(self, timeout: float, present: bool = True) -> None:
        self._timeout = timeout
        self._pause = DraftPause(PauseState.DRAFTING if present else PauseState.ABSENT)
        # Names of drafters that have sent something, and are not known to be lost.
        self._speaking = set[str]()
        self._backoffs = dict[str, _Backoff]()
        # Rows of features that were not sent during the pause, and rows of sequences that the drafter never
        # saw: both are sent later, MAX_ROWS_PER_LAP with every step.
        self._unsent_rows = 0
        self._missed_rows = 0
        # Steps for which the drafter may still catch up before its trees are asked for all the same.
        self._catch_up_steps = 0
        # True while part of what a pause kept back may not have been sent.
        self.sends_backlog = False
        self._usual_wait: float | None = None

    @property
    def resting(self) -> bool:
        """Whether drafting is paused: the drafter is sent nothing of the next frame, and will not answer."""
        return self._pause.paused

    @property
    def waking(self) -> bool:
        """Whether the drafter catches up: it is sent the next frame's features with all that it missed, and
        its trees are not waited for.
        """
        return self._pause.state is PauseState.CATCHING_UP

    def _backoff_of(self, drafter: str) -> _Backoff:
        """The misses of this drafter; a drafter that is the only one has the name ""."""
        return self._backoffs.setdefault(drafter if len(self._speaking) > 1 else "", _Backoff())

    def deadline(self, since: float, drafter: str | None = "") -> float:
        """Until when a sequence that has waited for `drafter` since `since` waits on.

        drafter: None for a drafter that is lost; its sequences do not wait.
        """
        present = self._pause.state is not PauseState.ABSENT and drafter is not None
        waits = present and not (self.resting or self._backoff_of(drafter or "").left)
        return since + self._timeout if waits else since

    def family_deadline(self, since: float, drafter: str | None = "") -> float:
        """Until when the rest of its family shall wait for a sequence that waits since `since`."""
        usual = self._timeout if self._usual_wait is None else SLOW_TREE_FACTOR * self._usual_wait
        return min(self.deadline(since, drafter), since + usual)

    def record_tree(self, waited: float | None = None, drafter: str = "") -> None:
        """A tree of this drafter came in time, after so many seconds."""
        backoff = self._backoff_of(drafter)
        backoff.trees = FIRST_BACKOFF_TREES
        backoff.left = 0
        if waited is not None:
            usual = waited if self._usual_wait is None else self._usual_wait
            self._usual_wait = usual + WAIT_WEIGHT * (waited - usual)

    def record_miss(self, drafter: str | None = "") -> None:
        """A sequence ran without the tree of this drafter."""
        if self.resting or drafter is None:
            return
        backoff = self._backoff_of(drafter)
        if backoff.left:
            backoff.left -= 1
            return
        backoff.left = backoff.trees
        backoff.trees = min(backoff.trees * 2, MAX_BACKOFF_TREES)

    def start_rest(self, trees: int, live: int = 1) -> None:
        """The drafter says that it will draft nothing for so many trees. live: sequences it drafts for."""
        self._pause = self._pause.begin(trees, live)
        self._unsent_rows = 0
        self.sends_backlog = False

    def tell_first(self, rows: int) -> None:
        """A sequence continues of which the drafter is sent so many rows first, some with every step."""
        self._missed_rows += rows
        self._catch_up_steps = MAX_CATCH_UP_STEPS
        self._pause = self._pause.on(PauseEvent.MISSED)

    def record_launch(self, trees: int, rows: int, live: int = 1) -> None:
        """A frame with so many rows, and so many trees of `live` drafted sequences, was launched."""
        if self.resting:
            self._unsent_rows += rows
            self._pause = self._pause.passed(trees, live)
            if self._unsent_rows >= MAX_UNSENT_ROWS:
                self._pause = self._pause.end()
            self._catch_up_steps = MAX_CATCH_UP_STEPS
            return
        self._catch_up_steps = max(self._catch_up_steps - 1, 0)
        if not self._catch_up_steps:
            self._pause = self._pause.on(PauseEvent.CAUGHT_UP)
        sent = MAX_ROWS_PER_LAP - rows  # of the backlog, beside this frame's own rows
        self._missed_rows = max(self._missed_rows - max(sent, 0), 0)
        self.sends_backlog = self._unsent_rows > 0
        self._unsent_rows = max(self._unsent_rows - max(sent, 0), 0)

    def drafter_left(self, drafter: str = "") -> None:
        """This drafter is lost. Drafting ends if no other drafter has sent anything."""
        self._speaking.discard(drafter)
        self._backoffs.pop(drafter, None)
        if not self._speaking:
            self._pause = self._pause.on(PauseEvent.LEFT)

    def drafter_spoke(self, drafter: str = "") -> None:
        """This drafter has caught up with all that it was sent, and owes nothing if there was none before."""
        self._speaking.add(drafter)
        if self._pause.state is PauseState.ABSENT:
            self._pause = DraftPause().on(PauseEvent.JOINED)
            self._backoffs.clear()
            self._unsent_rows = 0
        if not self._missed_rows:
            self._pause = self._pause.on(PauseEvent.CAUGHT_UP)


class LapTimer:
    """Seconds per lap: of one with trees its own; of one without, what such laps take when nobody drafts.

    A lap is from a sequence's verdict to its next, however many other frames are judged between.
    """

    def __init__(self) -> None:
        self._plain: dict[int, deque[tuple[float, float]]] = {}
        self._verified: dict[int, tuple[float, bool]] = {}  # by sequence: when, and whether in a rest

    def lap_seconds(self, frame: Frame, now: float) -> tuple[float, float]:
        """Note that `frame` was judged at `now` (seconds). Returns what the stages computed, and what it took
        by the clock; 0 for that where nothing is known of such laps.
        """
        before = [self._verified.get(one.sequence) for one in frame.segments]
        self._note(frame, now)
        sizes = [len(one.tree) for one in frame.segments if isinstance(one, TreeSegment)]
        known = [one for one in before if one is not None]
        computed = sum(frame.seconds)
        if not sizes or len(sizes) < len(frame.segments) or len(known) < len(before):
            return computed, 0.0
        seconds = now - max(at for at, _ in known)
        if sum(sizes) > len(sizes):
            self._plain.clear()  # the machine may be another one by the next rest
            return computed, seconds
        laps = self._plain.setdefault(len(sizes), deque(maxlen=PLAIN_LAPS))
        if all(rested for _, rested in known):
            laps.append((computed, seconds))
        if not laps or frame.resting:
            return computed, 0.0
        return median(one for one, _ in laps), median(one for _, one in laps)

    def _note(self, frame: Frame, now: float) -> None:
        self._verified |= dict.fromkeys((one.sequence for one in frame.segments), (now, frame.resting))
        for sequence in frame.closings:
            self._verified.pop(sequence, None)
