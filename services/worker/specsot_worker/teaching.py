"""What the drafter is told of what was judged: as it comes, or later, when it has rested or was not here.

Refuses to know logits and links. What it tells at once is bounded, so that a drafter that must hear
everything holds no lap up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specsot.errors import NotFound, Overloaded
from specsot.frames import Chunk, Features, Frame, Growth, Lesson, Opening, Outcome, Segment, rows_of
from specsot_worker.features import FeatureStore, Rows
from specsot_worker.pace import Pace

AT_ONCE = 512  # rows of features that go along with one lap at most: as many as a frame has


@dataclass(slots=True)
class _Course:
    """One sequence: what was committed, and what the drafter knows of that.

    told:  so many tokens; None: not even that it was opened.
    step:  the tree that is wanted next; None in a prompt.
    over:  it ended; nothing more is told but that it closed.
    """

    opening: Opening
    committed: int
    told: int | None = None
    step: int | None = None
    forced: tuple[int, ...] = ()
    over: bool = False

    @property
    def lag(self) -> int:
        """Tokens it has and the drafter, which knows of it, has not."""
        return 0 if self.told is None or self.over else self.committed - self.told


class Teaching:
    """Knows every drafted sequence, and how much of each the drafter does."""

    def __init__(self, texts: Mapping[int, Sequence[int]], store: FeatureStore | None = None) -> None:
        """texts: the tokens of every open sequence, those not fed yet included. store: None where a drafter
        wants no features.
        """
        self._texts, self._store = texts, store
        self._courses: dict[int, _Course] = {}
        self._gone: dict[int, int] = {}  # closed, which the drafter was not told: how much it knows of each
        self._later: list[tuple[Frame, Mapping[int, Outcome]]] = []  # judged, and not noted yet
        self._listens = True
        self._rested = 0
        self._pace = Pace()

    def begin(self, listens: bool = True) -> None:
        """Whoever listens from now on, if anybody, knows nothing."""
        self.catch_up()
        self._listens, self._rested = listens, 0
        self._gone.clear()
        for course in self._courses.values():
            course.told = None

    def tell(self, frame: Frame, outcomes: Mapping[int, Outcome], now: float) -> tuple[Features, ...]:
        """What to send about this frame and those before it; nothing while the drafter rests.

        Several messages, to be learned in order, where sequences fork what is told only now.
        """
        wall = self._pace.wall(frame, now)
        if frame.resting or not self._listens:
            self._later.append((replace(frame, hidden=None), outcomes))
            return ()
        self.catch_up()
        self._note(frame, outcomes)
        ahead = self._unforked()
        told = self._messages(frame)
        if ahead:
            told.insert(0, Features(frame.epoch, frame.number, closings=ahead))
        for sequence in frame.closings:
            self._close(sequence)
        if self._gone:
            told = told or [Features(frame.epoch, frame.number)]
            told[-1] = replace(told[-1], closings=tuple(sorted(self._gone)))
            self._gone.clear()
        if told:
            told[-1] = self._timed(told[-1], frame, wall)
            self._rested = 0
        return tuple(told)

    def catch_up(self) -> None:
        """Note what nobody was told of. Best called while a device computes: a lap that rests does not wait
        for it.
        """
        later, self._later = self._later, []
        for frame, outcomes in later:
            self._note(frame, outcomes)
            for sequence in frame.closings:
                self._close(sequence)
            self._rested += self._trees(frame)

    def _unforked(self) -> tuple[int, ...]:
        """Closed sequences from which nothing is opened any more. They are told first: behind a rest there
        may be no room for those that came since, as long as these hold theirs."""
        forks = [course.opening.fork for course in self._courses.values() if course.told is None]
        wanted = {fork.sequence for fork in forks if fork}
        ahead = tuple(sorted(self._gone.keys() - wanted))
        for sequence in ahead:
            del self._gone[sequence]
        return ahead

    def _timed(self, features: Features, frame: Frame, wall: float) -> Features:
        fed, seconds = sum(map(rows_of, frame.segments)), sum(frame.seconds)
        return replace(features, fed=fed, seconds=seconds, wall=wall, rested=self._rested, trace=frame.trace)

    def _trees(self, frame: Frame) -> int:
        return sum(isinstance(one, Growth) and one.sequence in self._courses for one in frame.segments)

    # --- what happened ---

    def _note(self, frame: Frame, outcomes: Mapping[int, Outcome]) -> None:
        for opening in frame.openings:
            if opening.drafted:
                self._open(opening)
        parts, rows = list[Rows](), list[int]()
        first = 0
        for segment in frame.segments:
            nodes = self._go_on(segment, outcomes.get(segment.sequence), parts)
            rows += [first + node for node in nodes]
            first += rows_of(segment)
        if self._store and rows and frame.fused is not None:
            self._store.keep(parts, frame.fused, None if len(rows) == first else rows)

    def _open(self, opening: Opening) -> None:
        """A fork of what is not known here is never drafted."""
        fork = opening.fork
        if fork and fork.sequence not in self._courses:
            return
        try:
            if self._store:
                self._store.open(opening)
        except (NotFound, Overloaded):
            return
        self._courses[opening.sequence] = _Course(opening, fork.length if fork else 0)

    def _go_on(self, segment: Segment, outcome: Outcome | None, parts: list[Rows]) -> Sequence[int]:
        """Which rows of a segment were committed; noted, and added to `parts`, where it is drafted."""
        course = self._courses.get(segment.sequence)
        if course is None or course.over:
            return ()
        if outcome and outcome.end:
            course.over = True
            return ()
        nodes = _committed(segment, outcome)
        part = Rows(segment.sequence, course.committed, course.committed + len(nodes))
        try:
            if self._store:
                self._store.reserve(part)
        except Overloaded:
            self._close(segment.sequence)
            return ()
        parts.append(part)
        course.committed = part.stop
        if outcome:
            course.step, course.forced = outcome.step + 1, outcome.forced
        return nodes

    def _close(self, sequence: int) -> None:
        course = self._courses.pop(sequence, None)
        if course and course.told is not None:
            self._gone[sequence] = course.told
        if course and self._store:
            self._store.close(sequence)

    # --- what of that is told ---

    def _messages(self, frame: Frame) -> list[Features]:
        told: list[Features] = []
        room = AT_ONCE
        while room > 0:
            openings = tuple(filter(None, map(self._opening, self._courses.values())))
            parts = self._parts(room)
            if not (openings or parts):
                break
            rows = self._store.recall(parts) if self._store and parts else None
            lessons = tuple(map(self._lesson, parts))
            told.append(Features(frame.epoch, frame.number, openings, lessons, (), rows))
            room -= sum(part.stop - part.start for part in parts)
        return told

    def _opening(self, course: _Course) -> Opening | None:
        """How the drafter is to open it, if it may now: a fork behind its source, or as a text of its own
        where the source was never told and is closed.
        """
        if course.told is not None or course.over:
            return None
        fork = course.opening.fork
        source = self._courses.get(fork.sequence) if fork else None
        known = source.told if source else self._gone.get(fork.sequence) if fork else None
        if fork is None or (known is not None and known >= fork.length):
            course.told = fork.length if fork else 0
            return course.opening
        if source and not source.over:
            return None
        course.told = 0
        return replace(course.opening, fork=None)

    def _parts(self, room: int) -> list[Rows]:
        """What the drafter lacks, at most `room` rows; those first who lack least."""
        parts: list[Rows] = []
        for course in sorted(self._courses.values(), key=lambda one: one.lag):
            if course.lag and room > 0 and self._has(course):
                assert course.told is not None
                start, course.told = course.told, course.told + min(course.lag, room)
                parts.append(Rows(course.opening.sequence, start, course.told))
                room -= course.told - start
        return parts

    def _has(self, course: _Course) -> bool:
        """Whether its features are all here still; else it cannot be drafted for any more."""
        sequence, told = course.opening.sequence, course.told or 0
        if self._store is None or self._store.since(sequence) <= told:
            return True
        self._close(sequence)
        return False

    def _lesson(self, part: Rows) -> Lesson:
        """A tree is asked for behind the newest token alone."""
        course, text = self._courses[part.sequence], self._texts[part.sequence]
        tokens = tuple(text[part.start : part.stop])
        if course.step is None or part.stop < course.committed:
            return Lesson(part.sequence, part.start, tokens, None, None)
        return Lesson(part.sequence, part.start, tokens, text[part.stop], course.step, course.forced)


def _committed(segment: Segment, outcome: Outcome | None) -> Sequence[int]:
    if isinstance(segment, Chunk):
        return range(len(segment.tokens))
    return outcome.accepted if outcome else (0,)
