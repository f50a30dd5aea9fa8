"""Sends features of committed tokens to the drafters: at once, or after a pause of drafting.

A feature is what the draft head needs from the base model for one token: a fused hidden state. Every sequence
belongs to one drafter, which alone is sent its features and asked for its trees. The number of features sent
with one step is bounded, so that catching up a drafter never delays a step.

    drafting    verify -> features of the accepted tokens -> ring
                                                          -> message to the drafter
    paused      verify -> features of the accepted tokens -> ring, whose oldest features are overwritten
    resuming    ring -> message: tokens whose features were overwritten (the drafter skips them)
                     -> message: tokens with the features that the ring still holds
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter

import structlog
from torch import Tensor

from specsot.core.frames import (
    FeatureBatch,
    Features,
    Frame,
    Opening,
    Outcome,
    Payload,
    TreeSegment,
    num_tokens_of,
)
from specsot.members import RowsOf
from specsot_worker.core.pipeline import MAX_ROWS_PER_STEP, StepTimer
from specsot_worker.feature_ring import FeatureRing, StepFeatures
from specsot_worker.migrated_kv import MigratedKV

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _DraftedSequence:
    """State of one drafted sequence: what has been committed, and which drafter drafts for it.

    Two of these values are equal only if they are the same object, so that token ranges are compared fast.

    opening: What every stage knows about the sequence.
    committed: Number of tokens whose features are final.
    drafter: Name of the sequence's drafter. None if no drafter is present.
    draft_round: Number of the draft round that is wanted next. None while the prompt is being fed.
    forced: Ids of the tokens after the newest token that the grammar leaves no choice about. Empty if nothing
        is forced.
    ended: True if the sequence has ended. Then its drafter is sent nothing more about it but that it closed.
    source: The sequence from which this one forks, until `FeatureStream._numbers_of` has added the numbers of
        the shared features to `numbers`. None after that, without a fork, and if the features of reused
        tokens, which lie between the shared tokens and the sequence's own, were not migrated.
    numbers: Numbers in the ring of the features of the newest committed tokens, ascending; the last one
        belongs to position committed - 1. Empty if the drafters read no features. Read the numbers with
        `FeatureStream._numbers_of`, because the newest ones are added only there.
    """

    opening: Opening
    committed: int
    drafter: str | None = None
    draft_round: int | None = None
    forced: tuple[int, ...] = ()
    ended: bool = False
    source: _DraftedSequence | None = None
    numbers: deque[int] = field(default_factory=deque[int])

    def forget_before(self, oldest: int) -> None:
        """Drop the numbers of overwritten features.

        oldest: Number of the oldest feature in the ring.
        """
        numbers = self.numbers
        while numbers and numbers[0] < oldest:
            numbers.popleft()


# (sequence, start, stop): positions start .. stop - 1 of one sequence.
TokenRange = tuple[_DraftedSequence, int, int]


@dataclass(slots=True)
class _Receiver:
    """Record of what one drafter has been sent.

    sent: By sequence, how many tokens the drafter has. It has the sequences that it drafts for, and those
        from which one of them forks. None: the drafter was not even sent the opening.
    unopened: The sequences of `sent` whose opening the drafter was not sent, in the same order. All values
        are None.
    lagging: Ids of the sequences of which the drafter may lack tokens. Most sequences of `sent` are prefixes
        that it has completely, so a step does not look at all of them. A sequence whose opening was not sent
        yet may be missing; it is added with its opening.
    unsent_closings: By closed sequence, how many tokens the drafter has. It was not sent that these sequences
        closed.
    unsent_trees: Number of draft rounds (one for each tree and each pass of its frame) that were verified
        while drafting was paused or resuming, since the last message.
    """

    sent: dict[int, int | None] = field(default_factory=dict[int, int | None])
    unopened: dict[int, None] = field(default_factory=dict[int, None])
    lagging: set[int] = field(default_factory=set[int])
    unsent_closings: dict[int, int] = field(default_factory=dict[int, int])
    unsent_trees: int = 0

    def add(self, sequence: int) -> None:
        """Record that the drafter is to be sent a sequence. Nothing happens if that is recorded already.

        sequence: Id of the sequence.
        """
        if sequence not in self.sent:
            self.sent[sequence] = None
            self.unopened[sequence] = None

    def remove(self, sequence: int) -> None:
        """Record that a sequence is closed. The drafter has to be sent that if it was sent the opening.
        Nothing happens if the drafter was not to be sent the sequence.

        sequence: Id of the sequence.
        """
        self.unopened.pop(sequence, None)
        self.lagging.discard(sequence)
        num_sent = self.sent.pop(sequence, None)
        if num_sent is not None:
            self.unsent_closings[sequence] = num_sent

    def record_opening(self, sequence: int, num_tokens: int) -> None:
        """Record that the drafter is sent the opening of a sequence.

        sequence: Id of the sequence.
        num_tokens: Number of tokens that the drafter has with the opening: those of the fork, or 0.
        """
        self.sent[sequence] = num_tokens
        self.unopened.pop(sequence, None)
        self.lagging.add(sequence)

    def drafted_trees(self, frame: Frame) -> int:
        """Return how many trees of a frame belong to this drafter's sequences. Every pass of a frame of
        several passes counts as a tree, as it does where stage 0 counts how long a pause lasts.

        frame: The frame whose tree segments are counted.
        """
        trees = sum(isinstance(one, TreeSegment) and one.sequence in self.sent for one in frame.segments)
        return trees * (1 + frame.extra_passes)


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
        ring: FeatureRing | None = None,
        drafters: Sequence[str] = (SOLE_DRAFTER,),
    ) -> None:
        """Start without sequences.

        tokens: Tokens of every open sequence by id, including tokens that were not fed yet.
        ring: Keeps the features. None if the drafters want none.
        drafters: Names of the drafters that are present.
        """
        self._tokens = tokens
        self._ring = ring
        self._sequences: dict[int, _DraftedSequence] = {}
        self._receivers = {name: _Receiver() for name in drafters}
        # The newest append to the ring: the number of its first feature, and the token ranges of all its
        # features, in the order in which they were appended.
        self._newest: tuple[int, list[TokenRange]] = (0, [])
        # Appends, as in `_newest` and oldest first, whose features are not in `numbers` of their sequences
        # yet. Most features are sent as they were appended and never loaded by number, so `_numbers_of` adds
        # the numbers when they are needed. Appends that the ring has overwritten completely are removed.
        self._unnumbered = deque[tuple[int, list[TokenRange]]]()
        # Verified frames and their outcomes that are not recorded yet.
        self._deferred: list[tuple[Frame, Mapping[int, Outcome]]] = []
        self._step_timer = StepTimer()
        self.migrated = MigratedKV()

    def copies(self, requests: Sequence[RowsOf]) -> list[Tensor | None]:
        """Return copies of features on the host, each [last - first, feature_size], one for each request.
        None for a sequence of which the ring does not hold all these features.

        requests: A sequence and a range of its positions each.

        Also None for an unknown sequence, for positions that are not committed yet, for an empty range, and
        if the drafters read no features. Frames that were left aside during a pause are recorded first.
        """
        self.catch_up()
        found = list[Tensor | None]()
        for request in requests:
            drafted = self._sequences.get(request.sequence)
            first, last = request.first, request.last
            rows = None
            is_committed = drafted is not None and first < last <= drafted.committed
            if drafted and is_committed and self._first_available(drafted, first) == first:
                rows = self._load([(drafted, first, last)])
            found.append(None if rows is None else rows.to("cpu"))
        return found

    def set_drafters(self, drafters: Collection[str]) -> None:
        """Send to these drafters from now on. A new drafter knows no sequence.

        drafters: Names of the drafters. Empty: nothing is sent until there are drafters again.

        Sequences of a drafter that is missing now are divided among the others, which are then sent
        everything that belongs to these sequences.

        What was sent to a drafter that stays is remembered; what was sent to a missing drafter is forgotten.
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

        Drafters that have nothing to be sent are missing in the result. A frame that is recorded later is
        kept without its hidden states. Frames that were left aside earlier are recorded before this one.
        """
        computed, wall = self._step_timer.step_seconds(frame, now)
        if frame.paused or not self._receivers:
            self._deferred.append((replace(frame, hidden=None), outcomes))
            return {}
        self.catch_up()
        committed = self._record_frame(frame, outcomes)
        fed = frame.num_tokens
        messages = {
            name: self._begin_messages(one, frame, committed, fed) for name, one in self._receivers.items()
        }
        for sequence in frame.closings:
            self._close(sequence)
        ended = dict[str, tuple[Features, ...]]()
        for name, one in self._receivers.items():
            timing = self._fed_tokens(one, frame, outcomes, fed), computed, wall
            if sent := self._end_messages(one, messages[name], frame, timing):
                ended[name] = sent
        return ended

    def _fed_tokens(
        self, receiver: _Receiver, frame: Frame, outcomes: Mapping[int, Outcome], num_tokens: int
    ) -> int:
        """Return for how many tokens of a frame one drafter decides. The drafter compares the number with the
        features that it is sent: if both are equal, the step's time tells what its trees cost.

        receiver: What the drafter has been sent.
        frame: The verified frame.
        outcomes: The outcomes of the frame by sequence.
        num_tokens: Number of tokens of the whole frame, in all of its passes.

        All tokens of the frame count if there is only one drafter, or if the frame carries prompts; with
        prompts, no drafter learns the cost of its own trees from the frame.

        Tokens of sequences that end are left out, because no features of these sequences are sent. Otherwise
        a drafter would learn little with many clients, of which one ends in nearly every step, although a
        step takes as long without its few tokens. If all sequences end, their tokens count.

            # one drafter, trees of 4, 3 and 3 tokens; the second sequence ends -> 7; all end -> 10

        For each of several drafters, a step takes as long as it does with the trees of the others, which it
        cannot change.

        A tree of an unknown sequence, or of another drafter's sequence, is not counted. Of a frame of several
        passes, the tokens of one pass count, because its times are those of one pass, too.
        """
        counted = frame.segments
        if len(self._receivers) > 1 and all(isinstance(one, TreeSegment) for one in counted):
            counted = [one for one in counted if one.sequence in receiver.sent]
        ended = {sequence for sequence, outcome in outcomes.items() if outcome.end}
        if ended or counted is not frame.segments:
            continuing = [one for one in counted if one.sequence not in ended]
            num_tokens = num_tokens_of(continuing or counted)
        return num_tokens // (1 + frame.extra_passes)

    def _begin_messages(
        self, receiver: _Receiver, frame: Frame, committed: list[TokenRange], num_tokens: int
    ) -> list[Features]:
        """Return what one drafter is sent about a frame, before the frame's closings are applied. [] if
        nothing.

        receiver: What the drafter has been sent. It is updated.
        frame: The verified frame.
        committed: The token ranges that the frame has committed, from `_record_frame`.
        num_tokens: Number of the frame's tokens. If the drafter lacks more than what the frame has committed,
            MAX_ROWS_PER_STEP features are sent at most, or `num_tokens` if that is larger.

        Trees of a frame during resuming are counted. Closings that were not sent so far come first, in a
        message of their own.
        """
        receiver.unsent_trees += receiver.drafted_trees(frame) if frame.catching_up else 0
        first_closings = self._pop_closings(receiver)
        own = committed
        if len(self._receivers) > 1:
            own = [one for one in committed if one[0].opening.sequence in receiver.sent]
        if receiver.lagging or receiver.unopened:
            receiver.lagging.update([drafted.opening.sequence for drafted, _, _ in own])
            messages = self._messages(receiver, frame, max(MAX_ROWS_PER_STEP, num_tokens))
        else:
            # The drafter lacks only what this frame has committed, which is mostly so.
            receiver.sent.update([(drafted.opening.sequence, stop) for drafted, _, stop in own])
            messages = [self._message(frame, (), own, self._load(own))] if own else []
        if first_closings:
            messages.insert(0, Features(frame.epoch, frame.number, closings=first_closings))
        return messages

    def _end_messages(
        self, receiver: _Receiver, messages: list[Features], frame: Frame, timing: tuple[int, float, float]
    ) -> tuple[Features, ...]:
        """Return the messages that one drafter is sent about a frame, with the unsent closings and the step's
        times added to the last of them. If there are closings but no messages, a message is made for the
        closings. Return () if there are neither.

        receiver: What the drafter has been sent. It is updated.
        messages: The messages of `_begin_messages`. The last one is replaced in this list.
        frame: The verified frame.
        timing: Number of the step's tokens for which the drafter decides (`_fed_tokens`), and the step's
            compute seconds and wall-clock seconds.

        The last message also has the number of trees that were verified during a pause and not reported yet.
        If there are any, its times and its number of tokens are those of the pause's `baseline_step`. If no
        step without trees was measured in the pause, the number of tokens is that of `timing`, at least 1,
        and the times are 0, which means unknown. The message also says that the drafter must answer if there
        are several drafters.
        """
        closings: tuple[int, ...] = ()
        if receiver.unsent_closings:
            closings = tuple(sorted(receiver.unsent_closings))
            receiver.unsent_closings.clear()
            messages = messages or [Features(frame.epoch, frame.number)]
        if messages:
            last = messages[-1]
            if receiver.unsent_trees:
                # The drafter reads the times of a message that reports a pause as those of the pause's steps.
                timing = self._step_timer.baseline_step() or (max(timing[0], 1), 0.0, 0.0)
            # `dataclasses.replace` takes three times as long.
            messages[-1] = Features(
                last.epoch,
                last.number,
                last.openings,
                last.feature_batches,
                (*last.closings, *closings),
                last.rows,
                *timing,
                receiver.unsent_trees,
                frame.trace,
                must_answer=len(self._receivers) > 1,
            )
            receiver.unsent_trees = 0
        return tuple(messages)

    def catch_up(self) -> None:
        """Record the verified frames that were left aside during a pause of drafting. Nothing happens if
        there are none.

        Call it while a device computes, so that steps during a pause do not wait for it.

        The frames are recorded in order, and their closings are applied.
        """
        later = self._deferred
        self._deferred = []
        for frame, outcomes in later:
            committed = {drafted.opening.sequence for drafted, _, _ in self._record_frame(frame, outcomes)}
            for sequence in frame.closings:
                self._close(sequence)
            for receiver in self._receivers.values():
                receiver.lagging |= committed & receiver.sent.keys()
                receiver.unsent_trees += receiver.drafted_trees(frame)

    def _pop_closings(self, receiver: _Receiver) -> tuple[int, ...]:
        """Remove and return the closed sequences whose closing the drafter was not sent, except those from
        which an unknown sequence forks. Return () if there are none.

        receiver: What the drafter has been sent. It is updated.

        These closings are sent first, because after a pause the drafter may have no room for new sequences
        before the closed ones are gone.

        The ids are returned in ascending order.
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
        return [self._sequences[sequence] for sequence in receiver.unopened]

    # --- which drafter a sequence belongs to ---

    def _assign(self, drafted: _DraftedSequence) -> None:
        """Give a sequence to the drafter with the fewest decoding sequences. Among equals, prefer the drafter
        of the sequence's fork source. Without drafters, its drafter becomes None.

        drafted: The sequence, whose `drafter` is set.

        The drafter of a fork needs the source as well. A prefix, which never decodes, is therefore sent to
        every drafter of its forks.

            # drafter a drafts for sequence 1, b for 2; then 3 forks from 2
            # -> both have one sequence, so the source decides: b drafts for 3

        In addition, each ancestor of the sequence that does not decode and that the drafter does not have is
        marked in the drafter's record as not sent. Sequences that the record already has stay as they are.
        """
        source = self._source_of(drafted)
        drafted.drafter = self._least_loaded(source.drafter if source else None)
        if drafted.drafter is None:
            return
        receiver = self._receivers[drafted.drafter]
        chain = [drafted]
        while source and not source.opening.decodes and source.opening.sequence not in receiver.sent:
            chain.append(source)
            source = self._source_of(source)
        for one in reversed(chain):
            # The drafter may have been sent a lost drafter's prefix already.
            receiver.add(one.opening.sequence)

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

        Sequences that have ended do not count. With a single drafter, its name is returned whatever is
        preferred.
        """
        if len(self._receivers) < 2:
            return next(iter(self._receivers), None)
        live = (one for one in self._sequences.values() if one.opening.decodes and not one.ended)
        loads = Counter(one.drafter for one in live)
        return min(self._receivers, key=lambda name: (loads[name], name != preferred))

    # --- what frames committed ---

    def _record_frame(self, frame: Frame, outcomes: Mapping[int, Outcome]) -> list[TokenRange]:
        """Record what a verified frame opened and committed, and append the features of committed tokens to
        the ring. Return the positions whose features are final now, in the order of the frame; no range is
        empty.

        frame: The frame, with its fused features.
        outcomes: Its outcomes by sequence. There is none for a prompt chunk that is not final.

        For example:

            # tokens [t0 t1 t2 | p0 p1], accepted nodes (0, 2) -> features of tokens [0, 2, 3, 4] are appended

        Openings that are not drafted are skipped. Segments of sequences that are not drafted, that have ended
        or that end now commit nothing; the latter are marked as ended. With an outcome, the wanted draft
        round becomes the outcome's plus one and its forced tokens are remembered. Of a tree without an
        outcome, the root is committed. Nothing is appended without a ring.
        """
        for opening in frame.openings:
            migrated_features = self.migrated.rows(opening) if opening.reused else None
            if opening.drafted:
                self._open(opening, migrated_features)
        committed = list[TokenRange]()
        rows = list[int]()
        first = 0
        for segment in frame.segments:
            drafted = self._sequences.get(segment.sequence)
            outcome = outcomes.get(segment.sequence)
            if isinstance(segment, TreeSegment):
                nodes = outcome.accepted if outcome else (0,)
                num_tokens = len(segment.tree.tokens)
            else:
                num_tokens = len(segment.tokens)
                nodes = range(num_tokens)
            if drafted and not drafted.ended:
                if outcome:
                    drafted.ended = outcome.end is not None
                    drafted.draft_round = outcome.draft_round + 1
                    drafted.forced = outcome.forced
                if nodes and not drafted.ended:
                    start = drafted.committed
                    drafted.committed = start + len(nodes)
                    committed.append((drafted, start, drafted.committed))
                    rows += [first + node for node in nodes]
            first += num_tokens
        if self._ring and rows:
            assert frame.fused is not None
            self._append(self._ring, committed, frame.fused, None if len(rows) == first else rows)
        return committed

    def _append(
        self, ring: FeatureRing, ranges: list[TokenRange], features: Tensor, rows: list[int] | None = None
    ) -> None:
        """Append features to the ring, and remember to which token ranges they belong, in `_newest` and in
        `_unnumbered`.

        ring: The ring.
        ranges: The token ranges of the appended features, in the order of the features.
        features: [n, feature_size].
        rows: Which rows of `features` are appended, in this order. None: all.
        """
        self._newest = ring.appended, ranges
        self._unnumbered.append(self._newest)
        ring.append(features, rows)
        # All features of an entry have smaller numbers than the first feature of the entry after it.
        while len(self._unnumbered) > 1 and self._unnumbered[1][0] <= ring.oldest:
            self._unnumbered.popleft()

    def _open(self, opening: Opening, migrated_features: Tensor | None) -> None:
        """Start to draft for a sequence. Nothing happens if it forks from an unknown sequence.

        opening: What every stage knows about the sequence.
        migrated_features: Features of the tokens after the forked ones, from the previous epoch, [num_reused,
            feature_size]. None: there are none.

        If the opening reuses tokens from the previous epoch but their features are missing, the sequence
        starts without any features in the ring, and this is logged. A fork shares those features of its
        source that lie before the fork's length and are still in the ring when they are asked for. Without a
        ring, no features are recorded.
        """
        fork = opening.fork
        if fork and fork.sequence not in self._sequences:
            return
        drafted = _DraftedSequence(opening, opening.num_computed_tokens)
        self._assign(drafted)
        self._sequences[opening.sequence] = drafted
        if self._ring is None:
            return
        if opening.reused and migrated_features is None:
            log.info("features not migrated, drafts follow later", sequence=opening.sequence)
            return
        drafted.source = self._source_of(drafted)
        if migrated_features is not None:
            stop = drafted.committed
            self._append(self._ring, [(drafted, stop - len(migrated_features), stop)], migrated_features)

    def _close(self, sequence: int) -> None:
        """Forget a sequence. The next message to each drafter that has it says that it closed. An unknown
        sequence is ignored.

        sequence: Id of the sequence.

        A drafter that was not even sent the opening is not sent the closing. Migrated features of the
        sequence are dropped.
        """
        self.migrated.drop(sequence, features=True)
        self._sequences.pop(sequence, None)
        for receiver in self._receivers.values():
            receiver.remove(sequence)

    # --- what is sent ---

    def _messages(self, receiver: _Receiver, frame: Frame, max_features: int) -> list[Features]:
        """Return messages with the openings and features that a drafter lacks. [] if it lacks nothing.

        receiver: What the drafter has been sent. It is updated.
        frame: The verified frame.
        max_features: Maximum number of features in all messages together.

        A further message is needed while the drafter still had unknown sequences: these may fork from what
        was just sent. Tokens whose features were overwritten have a message of their own, without features.

        With max_features 0 or less, the result is []. Unknown sequences that have ended are not opened.
        Openings and ranges without features do not count toward `max_features`.
        """
        messages: list[Features] = []
        while max_features > 0:
            unknown = [one for one in self._unknown_to(receiver) if not one.ended]
            found = (self._opening_to_send(receiver, one) for one in unknown)
            openings = tuple(opening for opening in found if opening)
            lost, parts = self._pop_ranges_to_send(receiver, frame, max_features)
            if not (openings or lost or parts):
                break
            if lost:
                messages.append(self._message(frame, openings, lost, None))
                openings = ()
            if openings or parts:
                messages.append(self._message(frame, openings, parts, self._load(parts)))
            max_features -= sum([stop - start for _, start, stop in parts])
            # No sequence waits for the openings and features of this message.
            if not unknown:
                break
        return messages

    def _message(
        self, frame: Frame, openings: tuple[Opening, ...], parts: Sequence[TokenRange], rows: Payload | None
    ) -> Features:
        """Return a message with openings and feature batches.

        frame: The verified frame.
        openings: The sequences that the drafter opens first.
        parts: The positions of the batches.
        rows: Their features, [num_tokens, feature_size]. None: there are none.
        """
        feature_batches = tuple(self._feature_batches(parts, not frame.catching_up))
        return Features(frame.epoch, frame.number, openings, feature_batches, (), rows)

    def _load(self, parts: list[TokenRange]) -> Tensor | StepFeatures | None:
        """Return the features of all parts, one after the other: [num_tokens, feature_size]. None if there
        are no parts, or if the drafters read no features. If the parts are what was appended last, the
        features are not gathered yet.

        parts: Sequences and ranges of their positions, whose features the ring holds.
        """
        if self._ring is None or not parts:
            return None
        # Mostly the parts are exactly what was appended last. Then the numbers of single features are not
        # needed.
        if self._newest == (self._ring.appended - len(self._ring.newest), parts):
            return self._ring.newest
        numbers = list[int]()
        for drafted, start, stop in parts:
            # Positions are counted from the end, because mostly the newest are asked for, and a deque is read
            # fastest near its ends.
            own = self._numbers_of(drafted)
            numbers += [own[place] for place in range(start - drafted.committed, stop - drafted.committed)]
        return self._ring.load(numbers)

    def _opening_to_send(self, receiver: _Receiver, drafted: _DraftedSequence) -> Opening | None:
        """Return how the drafter is to open a sequence that it does not know. Return None if it cannot be
        opened yet.

        receiver: What the drafter has been sent. The sequence is added to it.
        drafted: The sequence.

        A fork is opened once the drafter has the source's tokens that the fork shares. If the drafter will
        never get them, because the source has ended, is unknown or belongs to another drafter, the fork is
        opened as a sequence of its own.

        None means that the source is still running but the drafter does not have enough of its tokens.
        Otherwise the drafter's record of the sequence becomes the number of forked tokens, or 0 without a
        fork.
        """
        sequence = drafted.opening.sequence
        fork = drafted.opening.fork
        sent = receiver.sent
        source = self._sequences.get(fork.sequence) if fork and fork.sequence in sent else None
        num_known = None
        if fork:
            num_known = sent[fork.sequence] if source else receiver.unsent_closings.get(fork.sequence)
        if fork is None or (num_known is not None and num_known >= fork.length):
            receiver.record_opening(sequence, fork.length if fork else 0)
            return drafted.opening
        if source and not source.ended:
            return None
        receiver.record_opening(sequence, 0)
        return replace(drafted.opening, fork=None)

    def _pop_ranges_to_send(
        self, receiver: _Receiver, frame: Frame, max_features: int
    ) -> tuple[list[TokenRange], list[TokenRange]]:
        """Return two lists of ranges of positions that the drafter lacks, and record them as sent: ranges
        whose features were overwritten, and ranges whose features are sent. Both lists are [] if the drafter
        lacks nothing.

        receiver: What the drafter has been sent. It is updated.
        frame: The verified frame.
        max_features: Maximum number of features, that is of positions in all ranges of the second list.

        The ranges are in the order of the frame, in which the features were appended; sequences that are not
        in the frame follow. If the sequences lack more than `max_features` tokens in all, those that lack the
        fewest are first.

            # the drafter has 4 tokens of 9, and the ring holds the last 3 -> [4, 6) is lost, [6, 9) is sent

        Ended sequences, sequences that the drafter does not know, and sequences of which it lacks nothing
        give no range. With max_features 0 or less, both lists are []. A range is cut where the maximum is
        reached; its remaining positions stay unsent.
        """
        sent = receiver.sent
        lagging = receiver.lagging
        order = [one for one in dict.fromkeys([one.sequence for one in frame.segments]) if one in lagging]
        if len(order) < len(lagging):
            others = lagging.difference(order)
            order += [sequence for sequence in self._sequences if sequence in others]
        # Lag, id and state of every sequence of which the drafter lacks tokens.
        lags = [
            (drafted.committed - num_sent, sequence, drafted)
            for sequence in order
            if (drafted := self._sequences.get(sequence)) is not None
            and not drafted.ended
            and (num_sent := sent.get(sequence)) is not None
            and num_sent != drafted.committed
        ]
        if sum([lag for lag, _, _ in lags]) > max_features:
            lags.sort(key=itemgetter(0))
        receiver.lagging = {sequence for _, sequence, _ in lags}
        lost: list[TokenRange] = []
        parts: list[TokenRange] = []
        # By sequence, the first position of the newest append, whose features can always be loaded. Features
        # have to be looked up by number only for earlier positions.
        newest = {drafted.opening.sequence: start for drafted, start, _ in self._newest[1]}
        for lag, sequence, drafted in lags:
            if max_features <= 0:
                break
            stop = drafted.committed
            first = start = stop - lag
            if start < newest.get(sequence, stop):
                first = self._first_available(drafted, start)
            if first > start:
                lost.append((drafted, start, first))
            if stop - first > max_features:
                stop = first + max_features
            sent[sequence] = stop
            if stop == drafted.committed:
                receiver.lagging.discard(sequence)
            if first < stop:
                parts.append((drafted, first, stop))
                max_features -= stop - first
        return lost, parts

    def _first_available(self, drafted: _DraftedSequence, start: int) -> int:
        """Return the first position, from `start` on, from which on all features are in the ring. Return
        `start` if the drafters read no features.

        drafted: The sequence.
        start: The first position that the drafter lacks.
        """
        first_numbered = drafted.committed - len(self._numbers_of(drafted)) if self._ring else start
        return max(first_numbered, start)

    def _numbers_of(self, drafted: _DraftedSequence) -> deque[int]:
        """Return the numbers in the ring of the features of a sequence's newest committed tokens, ascending,
        as far as they have not been overwritten. Features of all sequences that were appended since the last
        call are numbered first, and then those that the sequence shares with the source of its fork. Empty if
        the drafters read no features.

        drafted: The sequence. The result is its own `numbers`, which the next call may change.

            # appended from number 7 on: positions 4 .. 6 of a, and 9 .. 10 of b -> a: 7 8 9, b: 10 11
        """
        oldest = self._ring.oldest if self._ring else 0
        for number, ranges in self._unnumbered:
            for one, start, stop in ranges:
                one.forget_before(oldest)
                one.numbers.extend(range(number, number + stop - start))
                number += stop - start
        self._unnumbered.clear()
        drafted.forget_before(oldest)
        fork = drafted.opening.fork
        source = drafted.source
        drafted.source = None
        if fork and source and drafted.committed - len(drafted.numbers) == fork.length:
            shared = self._numbers_of(source)
            num_shared = max(fork.length - source.committed + len(shared), 0)
            drafted.numbers.extendleft(reversed([*islice(shared, num_shared)]))
        return drafted.numbers

    def _feature_batches(self, parts: Sequence[TokenRange], asks_for_tree: bool) -> list[FeatureBatch]:
        """Return a feature batch for each part: the tokens of one range of positions, and, if the range ends
        with the newest committed token, the token after it and the draft round of the wanted tree.

        parts: The sequences and their ranges of positions.
        asks_for_tree: False while drafting is resuming, when no tree is asked for.

        A tree is asked for only with the newest committed token; a batch that ends before it has no `bonus`.

            # tokens [a b c d], committed 3, draft round 5 is wanted:
            # part [0, 2) -> tokens (a, b), bonus None, draft round None
            # part [0, 3) -> tokens (a, b, c), bonus d, draft round 5

        `bonus` and the draft round are also None while the sequence's prompt is being fed. While drafting is
        resuming, a batch up to the newest committed token has a `bonus` and the forced tokens but no draft
        round.
        """
        batches = list[FeatureBatch]()
        for drafted, start, stop in parts:
            sequence = drafted.opening.sequence
            tokens = self._tokens[sequence]
            bonus = draft_round = None
            forced: tuple[int, ...] = ()
            if drafted.draft_round is not None and stop == drafted.committed:
                bonus = tokens[stop]
                draft_round = drafted.draft_round if asks_for_tree else None
                forced = drafted.forced
            own_tokens = tuple(tokens[start:stop])
            batches.append(FeatureBatch(sequence, start, own_tokens, bonus, draft_round, forced))
        return batches


def with_gathered_rows(messages: Mapping[str, tuple[Features, ...]]) -> Mapping[str, tuple[Features, ...]]:
    """Return messages to the drafters whose features are tensors, so that they can be sent to other threads.

    messages: Messages by name of the drafter, from `FeatureStream.advance`.
    """
    return {name: tuple(map(_with_gathered_rows, ordered)) for name, ordered in messages.items()}


def _with_gathered_rows(message: Features) -> Features:
    """Return a message whose features are a tensor, if it has features.

    message: A message to a drafter.
    """
    rows = message.rows
    return replace(message, rows=rows.gathered()) if isinstance(rows, StepFeatures) else message
