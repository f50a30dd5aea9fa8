"""Sends features of committed tokens to the drafters: at once, or after a pause of drafting.

A feature is what the draft head needs from the base model for one token: a fused hidden state. Every sequence
belongs to one drafter, which alone is sent its features and asked for its trees. The number of features sent
with one step is bounded, so that catching up a drafter never delays a step.
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
from specsot_worker.core.pipeline import MAX_ROWS_PER_STEP, StepTimer
from specsot_worker.feature_store import FeatureRows, FeatureStore
from specsot_worker.migrated_kv import MigratedKV


@dataclass(slots=True)
class _DraftedSequence:
    """State of one drafted sequence: what has been committed, and which drafter drafts for it.

    opening: What every stage knows about the sequence.
    committed: Number of tokens whose features are final.
    drafter: Name of the sequence's drafter. None if no drafter is present.
    draft_round: Number of the draft round that is wanted next. None while the prompt is being fed.
    forced: Ids of the tokens after the newest token that the grammar leaves no choice about. Empty if nothing
        is forced.
    ended: True if the sequence has ended. Then its drafter is sent nothing more about it but that it closed.
    """

    opening: Opening
    committed: int
    drafter: str | None = None
    draft_round: int | None = None
    forced: tuple[int, ...] = ()
    ended: bool = False


@dataclass(slots=True)
class _Receiver:
    """Record of what one drafter has been sent.

    sent: By sequence, how many tokens the drafter has. It has the sequences that it drafts for, and those
        from which one of them forks. None: the drafter was not even sent the opening.
    unsent_closings: By closed sequence, how many tokens the drafter has. It was not sent that these sequences
        closed.
    unsent_trees: Number of trees that were verified while drafting was paused or resuming, since the last
        message.
    """

    sent: dict[int, int | None] = field(default_factory=dict[int, int | None])
    unsent_closings: dict[int, int] = field(default_factory=dict[int, int])
    unsent_trees: int = 0

    def lag(self, drafted: _DraftedSequence) -> int:
        """Return how many tokens of a sequence the drafter lacks. 0 if the drafter does not know the
        sequence, or if the sequence has ended.

        drafted: The sequence.
        """
        sent = self.sent.get(drafted.opening.sequence)
        return 0 if sent is None or drafted.ended else drafted.committed - sent

    def drafted_trees(self, frame: Frame) -> int:
        """Return how many trees of a frame belong to this drafter's sequences.

        frame: The frame whose tree segments are counted.
        """
        return sum(isinstance(one, TreeSegment) and one.sequence in self.sent for one in frame.segments)


# Name of a ring's only drafter, if the configuration names none.
SOLE_DRAFTER = ""


class FeatureStream:
    """Source of the drafters' features: knows every drafted sequence, which drafter it belongs to, and how
    much of it that drafter has been sent.

    migrated: Features that were migrated from the previous epoch. The verifier sets it.
    """

    def __init__(
        self,
        tokens: Mapping[int, Sequence[int]],
        store: FeatureStore | None = None,
        drafters: Sequence[str] = (SOLE_DRAFTER,),
    ) -> None:
        """Start without sequences.

        tokens: Tokens of every open sequence by id, including tokens that were not fed yet.
        store: Keeps the features. None if the drafters want none.
        drafters: Names of the drafters that are present.
        """
        self._tokens = tokens
        self._store = store
        self._sequences: dict[int, _DraftedSequence] = {}
        self._receivers = {name: _Receiver() for name in drafters}
        # Verified frames and their outcomes that are not recorded yet.
        self._deferred: list[tuple[Frame, Mapping[int, Outcome]]] = []
        self._step_clock = StepTimer()
        self.migrated = MigratedKV()

    def copies(self, requests: Sequence[RowsOf]) -> list[Tensor | None]:
        """Return copies of features on the host, each [last - first, feature_size], one for each request.
        None for a sequence that has no such features.

        requests: A sequence and a range of its positions each.
        """
        self.catch_up()
        found = list[Tensor | None]()
        for request in requests:
            drafted = self._sequences.get(request.sequence)
            part = FeatureRows(request.sequence, request.first, request.last)
            available = self._store is not None and drafted is not None and drafted.committed >= request.last
            found.append(self._store.load([part]).cpu() if self._store and available else None)
        return found

    def set_drafters(self, drafters: Collection[str]) -> None:
        """Send to these drafters from now on. A new drafter knows no sequence.

        drafters: Names of the drafters. Empty: nothing is sent until there are drafters again.

        Sequences of a drafter that is missing now are divided among the others, which are then sent
        everything that belongs to these sequences.
        """
        self.catch_up()
        previous = self._receivers
        self._receivers = {name: previous.get(name) or _Receiver() for name in drafters}
        for drafted in self._sequences.values():
            if drafted.drafter not in self._receivers:
                self._assign(drafted)

    def advance(
        self, frame: Frame, outcomes: Mapping[int, Outcome], now: float
    ) -> Mapping[str, tuple[Features, ...]]:
        """Record a verified frame, and return by drafter the messages to send now, in order. Return {} while
        drafting is paused, or if no drafter is present; the frame is recorded later then.

        frame: The frame that was verified, with its fused features.
        outcomes: Its outcomes by sequence.
        now: Time in seconds of the verification.

        A drafter may get several messages: if it does not know the source of a fork yet, the source is sent
        before the fork.
        """
        computed, wall = self._step_clock.step_seconds(frame, now)
        if frame.paused or not self._receivers:
            self._deferred.append((replace(frame, hidden=None), outcomes))
            return {}
        self.catch_up()
        self._record_frame(frame, outcomes)
        fed = sum(map(rows_of, frame.segments))
        messages = {name: self._begin_messages(one, frame, fed) for name, one in self._receivers.items()}
        for sequence in frame.closings:
            self._close(sequence)
        timing = Features(frame.epoch, frame.number, seconds=computed, wall=wall, trace=frame.trace)
        ended = {
            name: self._end_messages(
                one, messages[name], replace(timing, fed=self._fed_tokens(one, frame, fed))
            )
            for name, one in self._receivers.items()
        }
        return {name: sent for name, sent in ended.items() if sent}

    def _fed_tokens(self, receiver: _Receiver, frame: Frame, num_tokens: int) -> int:
        """Return for how many tokens of a frame one drafter decides. The drafter estimates from it what its
        trees cost.

        receiver: What the drafter has been sent.
        frame: The verified frame.
        num_tokens: Number of tokens of the frame. It is the result if there is only one drafter, or if the
            frame carries prompts; with prompts, no drafter learns the cost of its own trees from it.

        For each of several drafters, a step takes as long as it does with the trees of the others, which it
        cannot change.
        """
        trees = [one for one in frame.segments if isinstance(one, TreeSegment)]
        if len(self._receivers) == 1 or len(trees) < len(frame.segments):
            return num_tokens
        return sum(rows_of(tree) for tree in trees if tree.sequence in receiver.sent)

    def _begin_messages(self, receiver: _Receiver, frame: Frame, num_tokens: int) -> list[Features]:
        """Return what one drafter is sent about a frame, before the frame's closings are applied. [] if
        nothing.

        receiver: What the drafter has been sent. It is updated.
        frame: The verified frame.
        num_tokens: Number of its tokens. At least MAX_ROWS_PER_STEP features may be sent, or this number if
            it is larger.
        """
        receiver.unsent_trees += receiver.drafted_trees(frame) if frame.catching_up else 0
        first_closings = self._pop_closings(receiver)
        messages = self._messages(receiver, frame, max(MAX_ROWS_PER_STEP, num_tokens))
        if first_closings:
            messages.insert(0, Features(frame.epoch, frame.number, closings=first_closings))
        return messages

    def _end_messages(
        self, receiver: _Receiver, messages: list[Features], timing: Features
    ) -> tuple[Features, ...]:
        """Return the messages with the closings, and with the step's times in the last message. Without
        messages and closings, return ().

        receiver: What the drafter has been sent. It is updated.
        messages: What the drafter is sent about the frame so far.
        timing: A message that has the step's times and nothing else.
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
                paused_trees=receiver.unsent_trees,
                must_answer=len(self._receivers) > 1,
            )
            receiver.unsent_trees = 0
        return tuple(messages)

    def catch_up(self) -> None:
        """Record the verified frames that were left aside during a pause of drafting. Nothing happens if
        there are none.

        Call it while a device computes, so that steps during a pause do not wait for it.
        """
        later = self._deferred
        self._deferred = []
        for frame, outcomes in later:
            self._record_frame(frame, outcomes)
            for sequence in frame.closings:
                self._close(sequence)
            for receiver in self._receivers.values():
                receiver.unsent_trees += receiver.drafted_trees(frame)

    def _pop_closings(self, receiver: _Receiver) -> tuple[int, ...]:
        """Remove and return the closed sequences whose closing the drafter was not sent, except those from
        which an unknown sequence forks. Return () if there are none.

        receiver: What the drafter has been sent. It is updated.

        These closings are sent first, because after a pause the drafter may have no room for new sequences
        before the closed ones are gone.
        """
        if not receiver.unsent_closings:
            return ()
        forks = [one.opening.fork for one in self._unknown_to(receiver)]
        fork_sources = {fork.sequence for fork in forks if fork}
        unforked = tuple(sorted(receiver.unsent_closings.keys() - fork_sources))
        for sequence in unforked:
            del receiver.unsent_closings[sequence]
        return unforked

    def _unknown_to(self, receiver: _Receiver) -> list[_DraftedSequence]:
        """Return the sequences of a drafter whose opening it has not been sent; [] if there are none.

        receiver: What the drafter has been sent.
        """
        return [self._sequences[sequence] for sequence, sent in receiver.sent.items() if sent is None]

    # --- which drafter a sequence belongs to ---

    def _assign(self, drafted: _DraftedSequence) -> None:
        """Give a sequence to the drafter with the fewest decoding sequences. Among equals, prefer the drafter
        of the sequence's fork source. Without drafters, its drafter becomes None.

        drafted: The sequence, whose `drafter` is set.

        The drafter of a fork needs the source as well. A prefix, which never decodes, is therefore sent to
        every drafter of its forks.

            # drafter a drafts for sequence 1, b for 2; then 3 forks from 2
            # -> both have one sequence, so the source decides: b drafts for 3
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
            # The drafter may have been sent a lost drafter's prefix already.
            sent.setdefault(one.opening.sequence, None)

    def _source_of(self, drafted: _DraftedSequence) -> _DraftedSequence | None:
        """Return the sequence from which a sequence forks. None if it does not fork, or if the source is not
        known.

        drafted: The sequence that may be a fork.
        """
        fork = drafted.opening.fork
        return self._sequences.get(fork.sequence) if fork else None

    def _least_loaded(self, preferred: str | None) -> str | None:
        """Return the name of the drafter with the fewest decoding sequences. None if there is no drafter.

        preferred: Name of the drafter to choose among equals. None: none is preferred.
        """
        if len(self._receivers) < 2:
            return next(iter(self._receivers), None)
        live = (one for one in self._sequences.values() if one.opening.decodes and not one.ended)
        loads = Counter(one.drafter for one in live)
        return min(self._receivers, key=lambda name: (loads[name], name != preferred))

    # --- what frames committed ---

    def _record_frame(self, frame: Frame, outcomes: Mapping[int, Outcome]) -> None:
        """Record what a verified frame opened and committed, and store the features of committed tokens.

        frame: The frame, with its fused features.
        outcomes: Its outcomes by sequence.

        For example:

            # tokens [t0 t1 t2 | p0 p1], accepted nodes (0, 2) -> features of tokens [0, 2, 3, 4] are stored
        """
        for opening in frame.openings:
            migrated_features = self.migrated.rows(opening) if opening.reused else None
            if opening.drafted:
                self._open(opening, migrated_features)
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

    def _open(self, opening: Opening, migrated_features: Tensor | None) -> None:
        """Start to draft for a sequence. Nothing happens if it forks from an unknown sequence, or if its
        features cannot be stored.

        opening: What every stage knows about the sequence.
        migrated_features: Features of the tokens after the forked ones, from the previous epoch, [num_reused,
            feature_size]. None: there are none.
        """
        fork = opening.fork
        if fork and fork.sequence not in self._sequences:
            return
        if self._store and not self._open_stored(self._store, opening, migrated_features):
            return
        drafted = _DraftedSequence(opening, opening.num_computed_tokens)
        self._assign(drafted)
        self._sequences[opening.sequence] = drafted

    def _open_stored(self, store: FeatureStore, opening: Opening, migrated_features: Tensor | None) -> bool:
        """Open a sequence in the feature store, and return whether that succeeded: the store has room, and
        the features that the sequence begins with are available.

        store: Keeps the features.
        opening: What every stage knows about the sequence.
        migrated_features: Features of its reused tokens, [num_reused, feature_size]. None: there are none.
        """
        if opening.reused and migrated_features is None:
            return False
        try:
            store.open(opening)
            if migrated_features is not None:
                store.fill(
                    FeatureRows(opening.sequence, opening.forked, opening.num_computed_tokens),
                    migrated_features,
                )
        except (NotFound, Overloaded):
            store.close(opening.sequence)
            return False
        return True

    def _record_segment(
        self, segment: Segment, outcome: Outcome | None, parts: list[FeatureRows], slots: list[int]
    ) -> Sequence[int]:
        """Record what a segment committed, and return the numbers of its committed tokens within the segment.

        segment: A segment of a verified frame.
        outcome: Outcome of its sequence in this frame. None: the segment is a prompt chunk that is not final,
            or a tree whose outcome is not known.
        parts: Extended by the positions whose features are to be stored.
        slots: Extended by the slots of the feature store for these positions.

        Returns () if the sequence is not drafted or has ended. If the store has no room for it, the sequence
        is closed here and not drafted any more.
        """
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
            drafted.draft_round = outcome.draft_round + 1
            drafted.forced = outcome.forced
        return nodes

    def _close(self, sequence: int) -> None:
        """Forget a sequence. The next message to each drafter that has it says that it closed. An unknown
        sequence is ignored.

        sequence: Id of the sequence.
        """
        self.migrated.drop(sequence, features=True)
        drafted = self._sequences.pop(sequence, None)
        for receiver in self._receivers.values():
            sent = receiver.sent.pop(sequence, None)
            if sent is not None:
                receiver.unsent_closings[sequence] = sent
        if drafted and self._store:
            self._store.close(sequence)

    # --- what is sent ---

    def _messages(self, receiver: _Receiver, frame: Frame, max_features: int) -> list[Features]:
        """Return messages with the openings and features that a drafter lacks. [] if it lacks nothing.

        receiver: What the drafter has been sent. It is updated.
        frame: The verified frame.
        max_features: Maximum number of features in all messages together.

        A further message is needed while the drafter still had unknown sequences: these may fork from what
        was just sent.
        """
        messages: list[Features] = []
        while max_features > 0:
            unknown = [one for one in self._unknown_to(receiver) if not one.ended]
            found = (self._opening_to_send(receiver, one) for one in unknown)
            openings = tuple(opening for opening in found if opening)
            rows_by_sequence = self._pop_rows_to_send(receiver, frame, max_features)
            if not (openings or rows_by_sequence):
                break
            rows = self._store.load(rows_by_sequence) if self._store and rows_by_sequence else None
            feature_batches = tuple(
                self._feature_batch(part, not frame.catching_up) for part in rows_by_sequence
            )
            messages.append(Features(frame.epoch, frame.number, openings, feature_batches, (), rows))
            max_features -= sum(part.stop - part.start for part in rows_by_sequence)
            # No sequence waits for the openings and features of this message.
            if not unknown:
                break
        return messages

    def _opening_to_send(self, receiver: _Receiver, drafted: _DraftedSequence) -> Opening | None:
        """Return how the drafter is to open a sequence that it does not know. Return None if it cannot be
        opened yet.

        receiver: What the drafter has been sent. The sequence is added to it.
        drafted: The sequence.

        A fork is opened once the drafter has the source's tokens that the fork shares. If the drafter will
        never get them, because the source has ended, is unknown or belongs to another drafter, the fork is
        opened as a sequence of its own.
        """
        sequence = drafted.opening.sequence
        fork = drafted.opening.fork
        sent = receiver.sent
        source = self._sequences.get(fork.sequence) if fork and fork.sequence in sent else None
        num_known = None
        if fork:
            num_known = sent[fork.sequence] if source else receiver.unsent_closings.get(fork.sequence)
        if fork is None or (num_known is not None and num_known >= fork.length):
            sent[sequence] = fork.length if fork else 0
            return drafted.opening
        if source and not source.ended:
            return None
        sent[sequence] = 0
        return replace(drafted.opening, fork=None)

    def _pop_rows_to_send(self, receiver: _Receiver, frame: Frame, max_features: int) -> list[FeatureRows]:
        """Return ranges of positions whose features the drafter lacks, and record them as sent. [] if it
        lacks nothing.

        receiver: What the drafter has been sent. It is updated.
        frame: The verified frame.
        max_features: Maximum number of features, that is of positions in all ranges together.

        They are in the order of the frame, in which they were stored. If they are too many, sequences that
        lack the fewest come first.
        """
        order = dict.fromkeys(segment.sequence for segment in frame.segments) | self._sequences
        lags = [(lag, one) for one in map(self._sequences.get, order) if one and (lag := receiver.lag(one))]
        if sum(lag for lag, _ in lags) > max_features:
            lags.sort(key=itemgetter(0))
        parts: list[FeatureRows] = []
        for lag, drafted in lags:
            sequence = drafted.opening.sequence
            start = receiver.sent[sequence] or 0
            if max_features > 0 and self._still_stored(sequence, start):
                stop = start + min(lag, max_features)
                receiver.sent[sequence] = stop
                parts.append(FeatureRows(sequence, start, stop))
                max_features -= stop - start
        return parts

    def _still_stored(self, sequence: int, sent: int) -> bool:
        """Return whether the features of a sequence that the drafter lacks are still stored. If not, the
        sequence is closed here and not drafted any more.

        sequence: Id of the sequence.
        sent: Number of its tokens that the drafter has: the features from this position on are needed.
        """
        if self._store is None or self._store.available_from(sequence) <= sent:
            return True
        self._close(sequence)
        return False

    def _feature_batch(self, part: FeatureRows, asks_for_tree: bool) -> FeatureBatch:
        """Return one feature batch: the tokens of one range of positions, and, if the range ends with the
        newest committed token, the token after it and the draft round of the wanted tree.

        part: The sequence and its range of positions.
        asks_for_tree: False while drafting is resuming, when no tree is asked for.

        A tree is asked for only with the newest committed token; a batch that ends before it has no `bonus`.

            # tokens [a b c d], committed 3, draft round 5 is wanted:
            # part [0, 2) -> tokens (a, b), bonus None, draft round None
            # part [0, 3) -> tokens (a, b, c), bonus d, draft round 5
        """
        drafted = self._sequences[part.sequence]
        tokens = self._tokens[part.sequence]
        head = part.sequence, part.start, tuple(tokens[part.start : part.stop])
        if drafted.draft_round is None or part.stop < drafted.committed:
            return FeatureBatch(*head, None, None)
        return FeatureBatch(
            *head, tokens[part.stop], drafted.draft_round if asks_for_tree else None, drafted.forced
        )


def _committed(segment: Segment, outcome: Outcome | None) -> Sequence[int]:
    """Return the numbers of a segment's committed tokens within the segment: all of a prompt chunk, the
    accepted nodes of a tree.

    segment: A segment of a verified frame.
    outcome: Outcome of its sequence. None for a tree: only the root counts.
    """
    if isinstance(segment, PromptChunk):
        return range(len(segment.tokens))
    return outcome.accepted if outcome else (0,)
