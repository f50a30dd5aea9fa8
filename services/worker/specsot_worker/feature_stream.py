"""Features of committed tokens for the drafter: sent at once or after a rest.

What goes along with one lap is bounded, so that a drafter that must hear everything holds no lap up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from torch import Tensor

from specsot.core.frames import (
    FeatureBatch,
    Features,
    Frame,
    Opening,
    Outcome,
    PromptChunk,
    Segment,
    TreeSegment,
    rows_of,
)
from specsot.errors import NotFound, Overloaded
from specsot.members import RowsOf
from specsot_worker.core.pipeline import MAX_ROWS_PER_LAP, LapTimer
from specsot_worker.feature_store import FeatureRows, FeatureStore
from specsot_worker.handed_rows import HandedRows


@dataclass(slots=True)
class _DraftedSequence:
    """One sequence: what was committed, and what the drafter was sent of that.

    sent:  tokens; None: not even that it was opened.
    step:  the tree that is wanted next; None in a prompt.
    ended: nothing more is sent but that it closed.
    """

    opening: Opening
    committed: int
    sent: int | None = None
    step: int | None = None
    forced: tuple[int, ...] = ()
    ended: bool = False

    @property
    def lag(self) -> int:
        """Tokens it has and the drafter, which knows of it, has not."""
        return 0 if self.sent is None or self.ended else self.committed - self.sent


class FeatureStream:
    """Knows every drafted sequence, and how much of each the drafter does."""

    def __init__(self, tokens: Mapping[int, Sequence[int]], store: FeatureStore | None = None) -> None:
        """tokens: those of every open sequence, those not fed yet included. store: None where a drafter
        wants no features.
        """
        self._tokens, self._store = tokens, store
        self._sequences: dict[int, _DraftedSequence] = {}
        self._unsent_closings: dict[int, int] = {}  # by closed sequence, tokens that the drafter has of it
        self._later: list[tuple[Frame, Mapping[int, Outcome]]] = []  # judged, and not noted yet
        self._drafter_present = True
        self._unsent_trees = 0
        self._lap_clock = LapTimer()
        self.handed = HandedRows()  # of an epoch before

    def copies(self, asked: Sequence[RowsOf]) -> list[Tensor | None]:
        """[last - first, width] of each, on the host; None where a sequence has none."""
        self.catch_up()
        found = list[Tensor | None]()
        for one in asked:
            drafted, part = self._sequences.get(one.sequence), FeatureRows(one.sequence, one.first, one.last)
            here = self._store is not None and drafted is not None and drafted.committed >= one.last
            found.append(self._store.load([part]).cpu() if self._store and here else None)
        return found

    def restart(self, drafter_present: bool = True) -> None:
        """Whoever listens from now on, if anybody, knows nothing."""
        self.catch_up()
        self._drafter_present, self._unsent_trees = drafter_present, 0
        self._unsent_closings.clear()
        for drafted in self._sequences.values():
            drafted.sent = None

    def advance(self, frame: Frame, outcomes: Mapping[int, Outcome], now: float) -> tuple[Features, ...]:
        """What to send about this frame and those before it; nothing while the drafter rests.

        Several messages, to be learned in order, where sequences fork what is told only now.
        """
        computed, wall = self._lap_clock.lap_seconds(frame, now)
        if frame.resting or not self._drafter_present:
            self._later.append((replace(frame, hidden=None), outcomes))
            return ()
        self.catch_up()
        self._record_frame(frame, outcomes)
        self._unsent_trees += self._drafted_trees(frame) if frame.waking else 0
        first_closings = self._take_unforked()
        fed = sum(map(rows_of, frame.segments))
        messages = self._messages(frame, max(MAX_ROWS_PER_LAP, fed))
        if first_closings:
            messages.insert(0, Features(frame.epoch, frame.number, closings=first_closings))
        for sequence in frame.closings:
            self._close(sequence)
        if self._unsent_closings:
            messages = messages or [Features(frame.epoch, frame.number)]
            messages[-1] = replace(messages[-1], closings=tuple(sorted(self._unsent_closings)))
            self._unsent_closings.clear()
        if messages:
            timing = {"fed": fed, "seconds": computed, "wall": wall, "rested": self._unsent_trees}
            messages[-1] = replace(messages[-1], trace=frame.trace, **timing)
            self._unsent_trees = 0
        return tuple(messages)

    def catch_up(self) -> None:
        """Note what nobody was told of. Best called while a device computes: a lap that rests does not wait
        for it.
        """
        later, self._later = self._later, []
        for frame, outcomes in later:
            self._record_frame(frame, outcomes)
            for sequence in frame.closings:
                self._close(sequence)
            self._unsent_trees += self._drafted_trees(frame)

    def _take_unforked(self) -> tuple[int, ...]:
        """Closed sequences from which nothing is opened any more. They are told first: behind a rest there
        may be no room for those that came since, as long as these hold theirs."""
        if not self._unsent_closings:
            return ()
        forks = [course.opening.fork for course in self._sequences.values() if course.sent is None]
        wanted = {fork.sequence for fork in forks if fork}
        unforked = tuple(sorted(self._unsent_closings.keys() - wanted))
        for sequence in unforked:
            del self._unsent_closings[sequence]
        return unforked

    def _drafted_trees(self, frame: Frame) -> int:
        return sum(isinstance(one, TreeSegment) and one.sequence in self._sequences for one in frame.segments)

    # --- what happened ---

    def _record_frame(self, frame: Frame, outcomes: Mapping[int, Outcome]) -> None:
        for opening in frame.openings:
            kept = self.handed.rows(opening) if opening.kept else None
            if opening.drafted:
                self._open(opening, kept)
        parts, slots, rows = list[FeatureRows](), list[int](), list[int]()
        first = 0
        for segment in frame.segments:
            nodes = self._record_segment(segment, outcomes.get(segment.sequence), parts, slots)
            rows += [first + node for node in nodes] if first else nodes
            first += rows_of(segment)
        if self._store and rows and frame.fused is not None:
            self._store.store(parts, slots, frame.fused, None if len(rows) == first else rows)

    def _open(self, opening: Opening, kept: Tensor | None) -> None:
        """A fork of what is not known here is never drafted, nor what has KV rows and no features.

        kept: features behind the fork's.
        """
        fork = opening.fork
        if fork and fork.sequence not in self._sequences:
            return
        if self._store and not self._stores(self._store, opening, kept):
            return
        self._sequences[opening.sequence] = _DraftedSequence(opening, opening.begun)

    def _stores(self, store: FeatureStore, opening: Opening, kept: Tensor | None) -> bool:
        """Whether there is room for its features, and those are here that it begins with."""
        if opening.kept and kept is None:
            return False
        try:
            store.open(opening)
            if kept is not None:
                store.fill(FeatureRows(opening.sequence, opening.forked, opening.begun), kept)
        except (NotFound, Overloaded):
            store.close(opening.sequence)
            return False
        return True

    def _record_segment(
        self, segment: Segment, outcome: Outcome | None, parts: list[FeatureRows], slots: list[int]
    ) -> Sequence[int]:
        """Which rows of a segment were committed; noted, and added to what is stored, where it is drafted."""
        drafted = self._sequences.get(segment.sequence)
        if drafted is None or drafted.ended:
            return ()
        if outcome and outcome.end:
            drafted.ended = True
            return ()
        nodes = _committed(segment, outcome)
        part = FeatureRows(segment.sequence, drafted.committed, drafted.committed + len(nodes))
        try:
            if self._store:
                slots += self._store.place(part)
        except Overloaded:
            self._close(segment.sequence)
            return ()
        parts.append(part)
        drafted.committed = part.stop
        if outcome:
            drafted.step, drafted.forced = outcome.step + 1, outcome.forced
        return nodes

    def _close(self, sequence: int) -> None:
        self.handed.drop(sequence, features=True)
        drafted = self._sequences.pop(sequence, None)
        if drafted and drafted.sent is not None:
            self._unsent_closings[sequence] = drafted.sent
        if drafted and self._store:
            self._store.close(sequence)

    # --- what of that is told ---

    def _messages(self, frame: Frame, room: int) -> list[Features]:
        """room: for so many rows."""
        messages: list[Features] = []
        while room > 0:
            unknown = [one for one in self._sequences.values() if one.sent is None and not one.ended]
            openings = tuple(filter(None, map(self._opening_to_send, unknown)))
            rows_by_sequence = self._rows_to_send(frame, room)
            if not (openings or rows_by_sequence):
                break
            rows = self._store.load(rows_by_sequence) if self._store and rows_by_sequence else None
            lessons = tuple(self._lesson(part, not frame.waking) for part in rows_by_sequence)
            messages.append(Features(frame.epoch, frame.number, openings, lessons, (), rows))
            room -= sum(part.stop - part.start for part in rows_by_sequence)
            if not unknown:  # nothing waits for what was told just now
                break
        return messages

    def _opening_to_send(self, drafted: _DraftedSequence) -> Opening | None:
        """How the drafter, which does not know it, is to open it, if it may now: a fork behind its source, or
        as a text of its own where the source was never told and is closed.
        """
        fork = drafted.opening.fork
        source = self._sequences.get(fork.sequence) if fork else None
        known = source.sent if source else self._unsent_closings.get(fork.sequence) if fork else None
        if fork is None or (known is not None and known >= fork.length):
            drafted.sent = fork.length if fork else 0
            return drafted.opening
        if source and not source.ended:
            return None
        drafted.sent = 0
        return replace(drafted.opening, fork=None)

    def _rows_to_send(self, frame: Frame, room: int) -> list[FeatureRows]:
        """What the drafter lacks, at most `room` rows: in the frame's order, as they were stored, or, where
        they are too many, those first who lack least.
        """
        order = dict.fromkeys(segment.sequence for segment in frame.segments) | self._sequences
        lags = [(lag, one) for one in map(self._sequences.get, order) if one and (lag := one.lag)]
        if sum(lag for lag, _ in lags) > room:
            lags.sort(key=itemgetter(0))
        parts: list[FeatureRows] = []
        for lag, drafted in lags:
            if room > 0 and self._still_stored(drafted):
                assert drafted.sent is not None
                start, drafted.sent = drafted.sent, drafted.sent + min(lag, room)
                parts.append(FeatureRows(drafted.opening.sequence, start, drafted.sent))
                room -= drafted.sent - start
        return parts

    def _still_stored(self, drafted: _DraftedSequence) -> bool:
        """Whether its features are all here still; else it cannot be drafted for any more."""
        sequence, sent = drafted.opening.sequence, drafted.sent or 0
        if self._store is None or self._store.available_from(sequence) <= sent:
            return True
        self._close(sequence)
        return False

    def _lesson(self, part: FeatureRows, asking: bool) -> FeatureBatch:
        """A tree is asked for behind the newest token alone; none unless `asking`."""
        course, text = self._sequences[part.sequence], self._tokens[part.sequence]
        told = part.sequence, part.start, tuple(text[part.start : part.stop])
        if course.step is None or part.stop < course.committed:
            return FeatureBatch(*told, None, None)
        return FeatureBatch(*told, text[part.stop], course.step if asking else None, course.forced)


def _committed(segment: Segment, outcome: Outcome | None) -> Sequence[int]:
    if isinstance(segment, PromptChunk):
        return range(len(segment.tokens))
    return outcome.accepted if outcome else (0,)
