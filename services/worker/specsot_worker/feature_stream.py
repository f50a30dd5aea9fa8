"""Features of committed tokens for the drafters: sent at once or after a rest.

Every sequence belongs to one drafter, which alone is sent its features and asked for its trees. What goes
along with one lap is bounded, so that a drafter that must hear everything holds no lap up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """One sequence: what was committed, and which drafter drafts for it.

    drafter: its name; None: no drafter is present.
    step:    the tree that is wanted next; None in a prompt.
    ended:   nothing more is sent but that it closed.
    """

    opening: Opening
    committed: int
    drafter: str | None = None
    step: int | None = None
    forced: tuple[int, ...] = ()
    ended: bool = False


@dataclass(slots=True)
class _Receiver:
    """One drafter: what it was sent.

    sent:            by sequence that it drafts for, or from which one of these forks, how many tokens it has;
                     None: it was not even sent that the sequence was opened.
    unsent_closings: closed sequences of which it was not sent that they closed; by sequence, how many tokens
    it has.
    unsent_trees:    trees that were verified while drafting paused.
    """

    sent: dict[int, int | None] = field(default_factory=dict[int, int | None])
    unsent_closings: dict[int, int] = field(default_factory=dict[int, int])
    unsent_trees: int = 0

    def lag(self, drafted: _DraftedSequence) -> int:
        """How many tokens the sequence has and the drafter, which knows of it, has not."""
        sent = self.sent.get(drafted.opening.sequence)
        return 0 if sent is None or drafted.ended else drafted.committed - sent

    def drafted_trees(self, frame: Frame) -> int:
        """How many trees of a frame are of this drafter's sequences."""
        return sum(isinstance(one, TreeSegment) and one.sequence in self.sent for one in frame.segments)


SOLE_DRAFTER = ""  # Name of a ring's only drafter, where nobody has said another one.


class FeatureStream:
    """Knows every drafted sequence, which drafter it belongs to, and how much of it that drafter has."""

    def __init__(
        self,
        tokens: Mapping[int, Sequence[int]],
        store: FeatureStore | None = None,
        drafters: Sequence[str] = (SOLE_DRAFTER,),
    ) -> None:
        """tokens: those of every open sequence, those not fed yet included. store: None where a drafter
        wants no features.
        """
        self._tokens = tokens
        self._store = store
        self._sequences: dict[int, _DraftedSequence] = {}
        self._receivers = {name: _Receiver() for name in drafters}
        self._later: list[tuple[Frame, Mapping[int, Outcome]]] = []  # judged, and not noted yet
        self._lap_clock = LapTimer()
        self.handed = HandedRows()  # of an epoch before

    def copies(self, asked: Sequence[RowsOf]) -> list[Tensor | None]:
        """[last - first, width] of each, on the host; None where a sequence has none."""
        self.catch_up()
        found = list[Tensor | None]()
        for one in asked:
            drafted = self._sequences.get(one.sequence)
            part = FeatureRows(one.sequence, one.first, one.last)
            here = self._store is not None and drafted is not None and drafted.committed >= one.last
            found.append(self._store.load([part]).cpu() if self._store and here else None)
        return found

    def set_drafters(self, drafters: Collection[str]) -> None:
        """Send to these drafters from now on. A new one knows nothing; sequences of one that is missing now
        are divided over the others, which are sent all that belongs to these sequences.
        """
        self.catch_up()
        kept = self._receivers
        self._receivers = {name: kept.get(name) or _Receiver() for name in drafters}
        for drafted in self._sequences.values():
            if drafted.drafter not in self._receivers:
                self._assign(drafted)

    def advance(
        self, frame: Frame, outcomes: Mapping[int, Outcome], now: float
    ) -> Mapping[str, tuple[Features, ...]]:
        """What to send to each drafter about this frame and those before it; nothing while drafting pauses.

        Several messages to one drafter, to be learned in order, where sequences fork what is told only now.
        """
        computed, wall = self._lap_clock.lap_seconds(frame, now)
        if frame.resting or not self._receivers:
            self._later.append((replace(frame, hidden=None), outcomes))
            return {}
        self.catch_up()
        self._record_frame(frame, outcomes)
        fed = sum(map(rows_of, frame.segments))
        messages = {name: self._begin_messages(one, frame, fed) for name, one in self._receivers.items()}
        for sequence in frame.closings:
            self._close(sequence)
        timing = Features(frame.epoch, frame.number, seconds=computed, wall=wall, trace=frame.trace)
        ended = {
            name: self._end_messages(one, messages[name], replace(timing, fed=self._fed(one, frame, fed)))
            for name, one in self._receivers.items()
        }
        return {name: told for name, told in ended.items() if told}

    def _fed(self, receiver: _Receiver, frame: Frame, fed: int) -> int:
        """Rows of a frame for which one drafter decides, all of them (`fed`) where it is the only one. For
        each of several drafters a lap takes as long as it does beside the trees of the others, which it
        cannot change. A frame with prompts counts as a whole, so that no drafter learns from it what its own
        trees cost.
        """
        trees = [one for one in frame.segments if isinstance(one, TreeSegment)]
        if len(self._receivers) == 1 or len(trees) < len(frame.segments):
            return fed
        return sum(rows_of(tree) for tree in trees if tree.sequence in receiver.sent)

    def _begin_messages(self, receiver: _Receiver, frame: Frame, fed: int) -> list[Features]:
        """All that one drafter is sent of a frame before the frame's own sequences close."""
        receiver.unsent_trees += receiver.drafted_trees(frame) if frame.waking else 0
        first_closings = self._take_unforked(receiver)
        messages = self._messages(receiver, frame, max(MAX_ROWS_PER_LAP, fed))
        if first_closings:
            messages.insert(0, Features(frame.epoch, frame.number, closings=first_closings))
        return messages

    def _end_messages(
        self, receiver: _Receiver, messages: list[Features], timing: Features
    ) -> tuple[Features, ...]:
        """The same messages with the closings, and with the lap's times in the last one. timing: a message
        that has these times, and nothing else.
        """
        if receiver.unsent_closings:
            messages = messages or [Features(timing.epoch, timing.number)]
            messages[-1] = replace(messages[-1], closings=tuple(sorted(receiver.unsent_closings)))
            receiver.unsent_closings.clear()
        if messages:
            messages[-1] = replace(
                messages[-1],
                fed=timing.fed,
                seconds=timing.seconds,
                wall=timing.wall,
                trace=timing.trace,
                rested=receiver.unsent_trees,
                must_answer=len(self._receivers) > 1,
            )
            receiver.unsent_trees = 0
        return tuple(messages)

    def catch_up(self) -> None:
        """Note what nobody was told of. Best called while a device computes: a lap that rests does not wait
        for it.
        """
        later = self._later
        self._later = []
        for frame, outcomes in later:
            self._record_frame(frame, outcomes)
            for sequence in frame.closings:
                self._close(sequence)
            for receiver in self._receivers.values():
                receiver.unsent_trees += receiver.drafted_trees(frame)

    def _take_unforked(self, receiver: _Receiver) -> tuple[int, ...]:
        """Closed sequences from which nothing is opened any more. They are told first: behind a rest there
        may be no room for those that came since, as long as these hold theirs."""
        if not receiver.unsent_closings:
            return ()
        forks = [one.opening.fork for one in self._unknown_to(receiver)]
        wanted = {fork.sequence for fork in forks if fork}
        unforked = tuple(sorted(receiver.unsent_closings.keys() - wanted))
        for sequence in unforked:
            del receiver.unsent_closings[sequence]
        return unforked

    def _unknown_to(self, receiver: _Receiver) -> list[_DraftedSequence]:
        """Sequences of this drafter that it was not even sent the opening of."""
        return [self._sequences[sequence] for sequence, sent in receiver.sent.items() if sent is None]

    # --- which drafter a sequence belongs to ---

    def _assign(self, drafted: _DraftedSequence) -> None:
        """Give a sequence to the drafter that has the fewest; of equals to the one that has the sequence from
        which it forks. The drafter of a fork must have the source as well: a prefix, which nobody drafts
        for, is therefore sent to every drafter of its forks.

        Sequences 1 and 2 of drafters a and b, then 3 as a fork of 2 -> a drafts 1, b drafts 2 and 3.
        """
        source = self._source_of(drafted)
        drafted.drafter = self._least_loaded(source.drafter if source else None)
        if drafted.drafter is None:
            return
        sent = self._receivers[drafted.drafter].sent
        chain = [drafted]
        while source and not source.opening.decodes and source.opening.sequence not in sent:
            chain.append(source)
            source = self._source_of(source)
        for one in reversed(chain):
            sent.setdefault(one.opening.sequence, None)  # it may have a prefix of a lost drafter already

    def _source_of(self, drafted: _DraftedSequence) -> _DraftedSequence | None:
        fork = drafted.opening.fork
        return self._sequences.get(fork.sequence) if fork else None

    def _least_loaded(self, preferred: str | None) -> str | None:
        if len(self._receivers) < 2:
            return next(iter(self._receivers), None)
        live = (one for one in self._sequences.values() if one.opening.decodes and not one.ended)
        loads = Counter(one.drafter for one in live)
        return min(self._receivers, key=lambda name: (loads[name], name != preferred))

    # --- what happened ---

    def _record_frame(self, frame: Frame, outcomes: Mapping[int, Outcome]) -> None:
        for opening in frame.openings:
            kept = self.handed.rows(opening) if opening.kept else None
            if opening.drafted:
                self._open(opening, kept)
        parts = list[FeatureRows]()
        slots = list[int]()
        rows = list[int]()
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
        drafted = _DraftedSequence(opening, opening.begun)
        self._assign(drafted)
        self._sequences[opening.sequence] = drafted

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
            drafted.step = outcome.step + 1
            drafted.forced = outcome.forced
        return nodes

    def _close(self, sequence: int) -> None:
        self.handed.drop(sequence, features=True)
        drafted = self._sequences.pop(sequence, None)
        for receiver in self._receivers.values():
            sent = receiver.sent.pop(sequence, None)
            if sent is not None:
                receiver.unsent_closings[sequence] = sent
        if drafted and self._store:
            self._store.close(sequence)

    # --- what of that is told ---

    def _messages(self, receiver: _Receiver, frame: Frame, room: int) -> list[Features]:
        """room: for so many rows."""
        messages: list[Features] = []
        while room > 0:
            unknown = [one for one in self._unknown_to(receiver) if not one.ended]
            found = (self._opening_to_send(receiver, one) for one in unknown)
            openings = tuple(opening for opening in found if opening)
            rows_by_sequence = self._rows_to_send(receiver, frame, room)
            if not (openings or rows_by_sequence):
                break
            rows = self._store.load(rows_by_sequence) if self._store and rows_by_sequence else None
            lessons = tuple(self._lesson(part, not frame.waking) for part in rows_by_sequence)
            messages.append(Features(frame.epoch, frame.number, openings, lessons, (), rows))
            room -= sum(part.stop - part.start for part in rows_by_sequence)
            if not unknown:  # nothing waits for what was told just now
                break
        return messages

    def _opening_to_send(self, receiver: _Receiver, drafted: _DraftedSequence) -> Opening | None:
        """How the drafter, which does not know it, is to open it, if it may now: a fork behind its source, or
        as a text of its own where the source was never told and is closed, or is another drafter's.
        """
        sequence = drafted.opening.sequence
        fork = drafted.opening.fork
        sent = receiver.sent
        source = self._sequences.get(fork.sequence) if fork and fork.sequence in sent else None
        known = None
        if fork:
            known = sent[fork.sequence] if source else receiver.unsent_closings.get(fork.sequence)
        if fork is None or (known is not None and known >= fork.length):
            sent[sequence] = fork.length if fork else 0
            return drafted.opening
        if source and not source.ended:
            return None
        sent[sequence] = 0
        return replace(drafted.opening, fork=None)

    def _rows_to_send(self, receiver: _Receiver, frame: Frame, room: int) -> list[FeatureRows]:
        """What the drafter lacks, at most `room` rows: in the frame's order, as they were stored, or, where
        they are too many, those first who lack least.
        """
        order = dict.fromkeys(segment.sequence for segment in frame.segments) | self._sequences
        lags = [(lag, one) for one in map(self._sequences.get, order) if one and (lag := receiver.lag(one))]
        if sum(lag for lag, _ in lags) > room:
            lags.sort(key=itemgetter(0))
        parts: list[FeatureRows] = []
        for lag, drafted in lags:
            sequence = drafted.opening.sequence
            start = receiver.sent[sequence] or 0
            if room > 0 and self._still_stored(sequence, start):
                stop = start + min(lag, room)
                receiver.sent[sequence] = stop
                parts.append(FeatureRows(sequence, start, stop))
                room -= stop - start
        return parts

    def _still_stored(self, sequence: int, sent: int) -> bool:
        """Whether its features are all here still; else it cannot be drafted for any more."""
        if self._store is None or self._store.available_from(sequence) <= sent:
            return True
        self._close(sequence)
        return False

    def _lesson(self, part: FeatureRows, asking: bool) -> FeatureBatch:
        """A tree is asked for behind the newest token alone; none unless `asking`."""
        course = self._sequences[part.sequence]
        text = self._tokens[part.sequence]
        told = part.sequence, part.start, tuple(text[part.start : part.stop])
        if course.step is None or part.stop < course.committed:
            return FeatureBatch(*told, None, None)
        return FeatureBatch(*told, text[part.stop], course.step if asking else None, course.forced)


def _committed(segment: Segment, outcome: Outcome | None) -> Sequence[int]:
    if isinstance(segment, PromptChunk):
        return range(len(segment.tokens))
    return outcome.accepted if outcome else (0,)
