"""The scheduler of stage 0: joins results with drafts and composes the next frame.

Every change of the KV cache leaves this module as part of a frame header, so that all stages apply the same
changes in the same order. Callers pass in the time, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specsot.core.frames import (
    Close,
    Drafts,
    End,
    Frame,
    Lease,
    Open,
    Opening,
    Order,
    Outcome,
    PromptChunk,
    Result,
    Segment,
    TreeSegment,
    rows_of,
)
from specsot.core.pages import PageTable, max_held_pages
from specsot.errors import SpecsotError
from specsot_model.core.kv_plan import open_sequence, policy_of
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget, InFlightFrame, PipelineDepth
from specsot_worker.core.sequence_state import SequenceState

# Divisor. While prompts wait, trees leave 1 / PREFILL_SHARE of a frame's tokens to prompts. Untuned.
PREFILL_SHARE = 4


class Sequencer:
    """Schedules all sequences of one epoch. Apply orders, results and drafts as they arrive, then call
    `compose`.

    There is no prefill or decode phase: a frame carries the trees of sequences that can decode and prompt
    chunks of other sequences, up to a token budget (`FrameBudget.rows`).

    Fairness between prompts and decoding sequences: while prompts wait, trees leave 1 / PREFILL_SHARE of a
    frame's tokens to prompts, so that a new sequence produces its first token after a bounded number of
    frames. A frame may carry fewer prompt tokens than that if they would take long
    (`PipelineDepth.prompt_rows`), so that decoding sequences do not stall.

    Fairness between trees: if not all trees fit into a frame, a sequence whose tree was truncated is
    scheduled first in the next frame.

        # room for 8 tokens, trees of 5, 2 and 2 nodes in the order of their turns:
        # first: share 8 - 2 = 6 -> all 5 nodes; second: share 3 - 1 = 2 -> both nodes;
        # third: share 1 -> its root alone; it keeps its turn, so it comes first in the next frame
    """

    def __init__(
        self,
        epoch: int,
        budget: FrameBudget,
        table: PageTable,
        draft_timeout: DraftTimeout,
        depth: PipelineDepth | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """Start an epoch without sequences.

        epoch: Messages of any other epoch are dropped.
        budget: What a frame and the ring may hold.
        table: The page table, on which this object applies the same operations as every stage does.
        draft_timeout: Decides how long sequences wait for trees.
        depth: Decides how many frames are in flight and how many prompt tokens a frame carries. None: all
            that `budget` allows, and a family of sequences always shares a frame.
        vocabulary: Number of token ids of the base model. None: token ids are not checked.
        """
        self._epoch = epoch
        self._budget = budget
        self._table = table
        self._draft_timeout = draft_timeout
        self._depth = depth
        self._vocabulary = vocabulary
        # Sequences that are open or wait to be opened, by id, in order of arrival.
        self._sequences: dict[int, SequenceState] = {}
        # Ids that the next frame closes on every stage.
        self._closings = list[int]()
        # Outcomes of sequences that could not be opened, until the master is sent them.
        self._rejected = list[Outcome]()
        # Frames whose results have not arrived, by frame number.
        self._in_flight: dict[int, InFlightFrame] = {}
        # Number of the newest frame, and number of trees that were scheduled without being truncated.
        self._number = self._turns = 0
        # Time in seconds of the newest call of `compose`.
        self._composed = float("-inf")

    @property
    def idle(self) -> bool:
        """True if there is no sequence, no closing to send and no frame in flight."""
        return not (self._sequences or self._closings or self._in_flight)

    @property
    def prompt_rows_due(self) -> int:
        """Number of prompt tokens that the next frame could carry."""
        return sum(self._feedable_rows(one) for one in self._sequences.values() if not one.prefilled)

    def apply_order(self, order: Order) -> None:
        """Apply an order of the master: open a sequence, close one, or extend a lease.

        A sequence whose prompt has token ids beyond the vocabulary is rejected. Orders for sequences that
        have ended are ignored.
        """
        match order:
            case Open(opening, tokens, lease):
                self._sequences.setdefault(opening.sequence, SequenceState(opening, tokens, lease))
                if not self._valid_ids(tokens):
                    self._reject(opening.sequence)
            case Close(sequence, kept):
                self._closings += [sequence] if kept else []
                self._close(sequence)
            case Lease(sequence, position):
                if live := self._sequences.get(sequence):
                    live.lease = max(live.lease, position)

    def apply_result(self, result: Result, now: float, awaits: bool = True) -> None:
        """Apply a result: its frame is no longer in flight, and its outcomes advance their sequences. Results
        of other epochs are dropped.

        now: Time in seconds.
        awaits: False if the drafter has already answered this result, so that its sequences wait for no tree.
        """
        if result.epoch != self._epoch:
            return
        flown = self._in_flight.pop(result.number, None)
        if flown and self._depth:
            self._depth.record_step(result.rows, result.seconds, now - flown.since, flown.alone)
        for outcome in result.outcomes:
            live = self._sequences.get(outcome.sequence)
            if live is None:
                continue
            if outcome.end:
                self._close(outcome.sequence)
            else:
                live.apply_outcome(outcome, now, awaits)

    def add_drafts(self, drafts: Drafts, now: float | None = None) -> None:
        """Store trees for their sequences. Trees that come too late, and trees of other epochs, are dropped.

        now: Time in seconds, from which the usual wait for a tree is estimated. None: nothing is estimated.

        A tree with invalid token ids, with the wrong root, or for an unverified root counts as a miss of its
        drafter. While the
        drafter still receives features that a pause held back, it answers all results that it was sent at
        once: if it answers one sequence of a result, the other sequences that wait since that result stop
        waiting. If the drafter pauses (`drafts.paused_trees`), no tree is asked for until the pause is over.
        """
        if drafts.epoch != self._epoch:
            return
        self._draft_timeout.drafter_spoke(drafts.drafter)
        # Arrival times of the results for which a tree has come.
        answered = set[float | None]()
        for draft in drafts.drafts:
            if (live := self._sequences.get(draft.sequence)) is None:
                continue
            since = live.waiting_since
            live.drafter = drafts.drafter
            # A tree that grows from an unverified node needs a second tree frame in flight.
            unverified = draft.parent is not None
            if unverified or not self._valid_ids(draft.tree.tokens) or live.contradicts(draft):
                self._stop_waiting(live, draft.draft_round)
            elif live.offer_tree(draft.draft_round, draft.tree):
                waited = None if now is None or since is None else now - since
                self._draft_timeout.record_tree(waited, drafts.drafter)
                answered.add(since)
        for live in self._sequences.values() if self._draft_timeout.sends_backlog else ():
            live.waiting_since = None if live.waiting_since in answered else live.waiting_since
        if drafts.paused_trees:
            self._draft_timeout.start_pause(drafts.paused_trees, self._drafted())

    def _valid_ids(self, tokens: Sequence[int]) -> bool:
        """Return whether the base model has all these token ids. Its embedding would read out of bounds for
        others.
        """
        most = self._vocabulary
        return most is None or not tokens or (min(tokens) >= 0 and max(tokens) < most)

    def _stop_waiting(self, live: SequenceState, draft_round: int) -> None:
        """Stop waiting for the tree of draft round `draft_round`, because the drafter has sent an unusable
        one, and
        record a miss.
        """
        if draft_round == live.draft_round and live.waiting_since is not None:
            live.waiting_since = None
            self._draft_timeout.record_miss(live.drafter)

    def lose_drafter(self, drafter: str) -> None:
        """Handle the loss of a drafter: its sequences, and the sequences that no drafter has drafted for yet,
        stop waiting for trees until one arrives. If no other drafter has sent anything, no sequence waits at
        all.
        """
        self._draft_timeout.drafter_left(drafter)
        for live in self._sequences.values():
            if live.drafter in (drafter, ""):
                live.drafter = None

    def rejections(self) -> tuple[Outcome, ...]:
        """Return the sequences that could not be opened since the last call, as outcomes for the master."""
        rejected = tuple(self._rejected)
        self._rejected = []
        return rejected

    def compose(self, now: float) -> Frame | None:
        """Return the next frame. Return None if nothing is ready, or if the maximum number of frames is in
        flight.

        With one frame at a time, also return None while a sequence waits for its tree within its family
        deadline: a frame that left without that sequence would delay it by a whole step.
        """
        self._composed = now
        credits = self._max_in_flight()
        if len(self._in_flight) >= credits or (credits == 1 and self._waiting_families(now)):
            return None
        growths = self._compose_trees(now, self._budget.rows - self._reserved_for_prompts())
        openings, chunks = self._compose_prompts(sum(map(rows_of, growths)))
        closings = self._take_closings() if self._closings else ()
        frame = Frame(self._epoch, self._number + 1, tuple(openings), (*growths, *chunks), closings)
        return self._launch(frame, now) if frame.openings or frame.segments or closings else None

    def deadline(self) -> float | None:
        """Return the earliest draft-timeout deadline among waiting sequences, in seconds.

        Return None if no sequence waits for a draft, or if no frame may be launched before the next result
        arrives. Deadlines that had passed when `compose` was called last are left out, because that call
        already took them into account.
        """
        if len(self._in_flight) >= self._max_in_flight():
            return None
        able = [(live.waiting_since, live.drafter) for live in self._sequences.values() if live.can_decode]
        untils = self._draft_timeout.family_deadline, self._draft_timeout.deadline
        due = (until(since, by) for since, by in able if since is not None for until in untils)
        return min((one for one in due if one > self._composed), default=None)

    def _max_in_flight(self) -> int:
        """Return how many frames may be in flight now."""
        limit = self._budget.flight
        return self._depth.max_frames(limit - 1, limit) if self._depth and limit > 1 else limit

    def _take_closings(self) -> tuple[int, ...]:
        """Return the sequences to close, and forget them.

        Closed sequences of the previous epoch are kept back while a queued sequence is still to reuse their
        KV.
        """
        waiting = (one.opening.reused for one in self._sequences.values() if not one.opened)
        wanted = {kept.sequence for kept in waiting if kept}
        due = self._closings
        self._closings = [one for one in due if one in wanted]
        return tuple(one for one in due if one not in wanted)

    def _launch(self, frame: Frame, now: float) -> Frame:
        """Apply the closings to the page table, record the frame as in flight, and return it with the state
        of the drafting pause.
        """
        for sequence in frame.closings:
            self._table.close(sequence)
        self._number = frame.number
        segments = frame.segments
        self._record_launch(segments, now)
        paused = self._draft_timeout.paused
        catching_up = self._draft_timeout.catching_up
        drafted = [self._sequences[one.sequence].mark_sent(paused or catching_up) for one in segments]
        self._draft_timeout.record_launch(sum(drafted), sum(map(rows_of, segments)), self._drafted())
        return replace(frame, paused=paused, catching_up=catching_up)

    def _drafted(self) -> int:
        """Return the number of sequences that decode and have a drafter."""
        return sum(live.opening.drafted and live.root is not None for live in self._sequences.values())

    def _record_launch(self, segments: tuple[Segment, ...], now: float) -> None:
        """Record the frame as in flight, and, for `PipelineDepth`, how long its sequences stayed at stage 0
        before it.
        """
        grown = [self._sequences[one.sequence] for one in segments if isinstance(one, TreeSegment)]
        for other in self._in_flight.values():
            other.alone = False
        families = frozenset(live.place[0] for live in grown)
        self._in_flight[self._number] = InFlightFrame(now, families, not self._in_flight)
        returned = [live.returned_at for live in grown if live.returned_at is not None]
        if self._depth and returned:
            self._depth.record_gap(now - max(returned))

    def _waiting_families(self, now: float) -> set[int]:
        """Return the families in which a sequence waits for its tree and its family is still to wait for it.

        A family consists of the sequences of one request, or of the forks of one prefix.
        """
        return {
            live.place[0]
            for live in self._sequences.values()
            if live.waiting_since is not None
            and live.can_decode
            and now < self._draft_timeout.family_deadline(live.waiting_since, live.drafter)
        }

    def _ready(self, now: float) -> list[SequenceState]:
        """Return the sequences whose trees the next frame carries, sorted by `place`.

        With one frame at a time: every sequence that can decode and does not wait for its tree. With several
        frames in flight: a share of each family, or all its runnable sequences if the family no longer waits
        for a tree.

        One step costs nearly the same for one sequence as for a whole family, so a family usually shares one
        frame. Where that is not so, `PipelineDepth` spreads a family over several frames, which then follow
        each other through the stages.

            # 8 sequences over 2 frames -> share 4: a frame leaves as soon as 4 of them can decode
        """
        # Nothing is in flight and no family waits: `compose` has checked both.
        if self._budget.flight == 1:
            able = [one for one in self._sequences.values() if one.can_decode and not self._waits(one, now)]
            return sorted(able, key=lambda live: live.place)
        held = self._waiting_families(now)
        ready = list[SequenceState]()
        families = self._families()
        for family, members in families.items():
            under_way = sum(family in flown.families for flown in self._in_flight.values())
            parts = self._spread(members, len(families) - 1)
            share = -(-len(members) // parts)
            able = [live for live in members if live.can_decode and not self._waits(live, now)]
            if under_way < parts and (len(able) >= share or family not in held):
                ready += able[:share]
        return sorted(ready, key=lambda live: live.place)

    def _families(self) -> dict[int, list[SequenceState]]:
        """Return the decoding sequences by family, those whose last result arrived first at the front."""
        families: dict[int, list[SequenceState]] = {}
        writing = (live for live in self._sequences.values() if live.root is not None)
        for live in sorted(writing, key=lambda live: live.returned_at or 0.0):
            families.setdefault(live.place[0], []).append(live)
        return families

    def _waits(self, live: SequenceState, now: float) -> bool:
        """Return whether the sequence still waits for its tree at time `now`."""
        since = live.waiting_since
        return since is not None and now < self._draft_timeout.deadline(since, live.drafter)

    def _spread(self, members: list[SequenceState], others: int) -> int:
        """Return over how many frames a family of `members` is spread.

        others: Number of other families. Their frames take precedence over splitting this family further.
        """
        if self._depth is None or len(members) < 2:
            return 1
        sizes = [len(live.tree) for live in members if live.tree]
        rows = round(len(members) * sum(sizes) / len(sizes)) if sizes else len(members)
        return self._depth.frames_per_family(rows, len(members), max(self._budget.flight - 1 - others, 1))

    def _compose_trees(self, now: float, room: int) -> list[TreeSegment]:
        """Return the tree segments of the next frame, with at most `room` tokens in total.

        Sequences get their tokens in the order of their turns. Each may take what the sequences after it
        leave, of which every one keeps one token for its root. If pages are short, a tree is also cut to the
        pages that its sequence can have. A sequence whose tree was not truncated moves to the end of the
        order; see the example in the class docstring.
        """
        ready = self._ready(now)
        grown = dict[int, TreeSegment]()
        table = self._table
        queue = sorted(ready, key=lambda live: live.turn)
        slots = max(self._budget.slots, 1)
        for place, live in enumerate(queue):
            others = len(queue) - place - 1
            sequence = live.opening.sequence
            # Every later sequence keeps one token for its root. With fewer tokens than sequences, the first
            # sequences get one token each.
            share = max(room - others, min(room, 1))
            # The table is asked only if the free pages might not hold a whole tree.
            plenty = table.free * table.page_rows >= slots
            most = slots if plenty else min(table.reservable_rows(sequence, live.committed), slots)
            if (rows := min(share, most)) < 1:
                continue
            # The sequence's draft timeout has passed.
            if live.waiting_since is not None and live.tree is None:
                self._draft_timeout.record_miss(live.drafter)
            self._free_after(sequence, live.committed)
            # The tree was not truncated for lack of room in the frame, so the sequence moves to the end of
            # the order.
            if min(live.wanted_rows, most) <= share:
                self._turns += 1
                live.turn = self._turns
            grown[sequence] = growth = live.next_growth(rows)
            table.reserve(sequence, live.committed + len(growth.tree))
            room -= len(growth.tree)
        return [grown[live.opening.sequence] for live in ready if live.opening.sequence in grown]

    def _reserved_for_prompts(self) -> int:
        """Return how many tokens of the next frame the trees leave to prompts.

        With a budget of one token per frame, prompts may have that token in every second frame.
        """
        rows = self._budget.rows
        share = max(rows // PREFILL_SHARE, 1) if rows > 1 else self._number % 2
        return min(self.prompt_rows_due, share)

    def _feedable_rows(self, live: SequenceState) -> int:
        """Return how many tokens of the sequence's prompt the next frame could carry, given its source and
        the free pages.
        """
        rows = live.opening.prompt - live.fed
        if not rows:
            return 0
        if live.opened:
            return min(rows, max(self._table.reservable_rows(live.opening.sequence, live.fed), 0))
        fork = live.opening.fork
        source = self._sequences.get(fork.sequence) if fork else None
        there = fork is None or (source is not None and source.opened and source.fed >= fork.length)
        return rows if there and self._fits(live.opening) else 0

    def _compose_prompts(self, beside: int) -> tuple[list[Opening], list[PromptChunk]]:
        """Open the sequences that can be opened, and feed prompts in order of arrival.

        beside: Number of tree tokens in the frame.

        Returns the frame's openings and prompt chunks. A sequence may be opened and fed in the same frame.
        """
        openings = list[Opening]()
        chunks = list[PromptChunk]()
        unfed = [live for live in self._sequences.values() if not (live.opened and live.prefilled)]
        room = self._prompt_room(beside, unfed) if unfed else 0
        every = self._sequences.items() if unfed else ()
        # How far each sequence was fed by earlier frames: a fork's source must be fed that far before this
        # frame, because stages apply openings before new tokens. A sequence with reused KV is left out until
        # it was fed a token of its own, because its pages are filled in only then.
        fed = {id: one.fed for id, one in every if one.fed > one.opening.begun or not one.opening.reused}
        for live in unfed:
            there = live.opened
            if not there and not self._open(live, fed, openings):
                continue
            sequence = live.opening.sequence
            rows = min(room, self._chunk_rows(live), self._table.reservable_rows(sequence, live.fed))
            if rows > 0 and not live.prefilled:
                if there:
                    self._free_after(sequence, live.fed)
                chunks.append(live.next_chunk(rows))
                self._table.reserve(sequence, live.fed)
                room -= len(chunks[-1].tokens)
        return openings, chunks

    def _prompt_room(self, beside: int, unfed: Sequence[SequenceState]) -> int:
        """Return how many prompt tokens the frame may carry.

        beside: Number of tree tokens in the frame.
        unfed: Sequences that are not open, or whose prompts are not fed completely.

        If no sequence decodes, this is the larger budget `FrameBudget.alone`. Otherwise it is what the trees
        leave, or less if decoding sequences would stall for too long.
        """
        writing = max(beside, sum(live.root is not None for live in self._sequences.values()))
        room = self._budget.rows - beside if writing else self._budget.alone
        if self._depth is None or not writing:
            return room
        waiting = sum(self._feedable_rows(live) > 0 for live in unfed)
        return self._depth.prompt_rows(writing, waiting, room)

    def _free_after(self, sequence: int, row: int) -> None:
        """Free or prune the pages before position `row`, as every stage does before the sequence's next
        tokens.
        """
        if self._table.policy(sequence):
            self._table.trim(sequence, row)
            self._table.prune(sequence, row)

    def _chunk_rows(self, live: SequenceState) -> int:
        """Return the maximum number of tokens of one prompt chunk: all that fit, if there is one stage."""
        rows = self._budget.rows if live.policy else self._budget.alone
        return self._depth.chunk_rows(live.opening.prompt - live.fed, rows) if self._depth else rows

    def _open(self, live: SequenceState, fed: dict[int, int], openings: list[Opening]) -> bool:
        """Open one sequence if its source is fed far enough and there are pages. Return whether it was
        opened.

        fed: By sequence, how many tokens earlier frames have fed.
        openings: The opening is appended to this list.

        A fork of a sequence that has ended, or of a sequence with a grammar, is rejected. So is an opening
        that the page table refuses.
        """
        opening = live.opening
        fork = live.opening.fork
        source = self._sequences.get(fork.sequence) if fork else None
        # The last stage may hold back the segments of a sequence with a grammar until that is compiled
        # (`PendingGrammars`), and then does not know the tokens of the source yet.
        held = source is None or source.opening.plan or source.opening.form
        if fork and held:
            self._reject(opening.sequence)
            return False
        there = not fork or (fork.sequence in self._table and fed.get(fork.sequence, 0) >= fork.length)
        if not (there and self._fits(opening)):
            return False
        try:
            open_sequence(self._table, opening)
        except SpecsotError:
            self._reject(opening.sequence)
            return False
        # Without a bound on its pages, a sequence gets the pages of its whole prompt at once, so that its
        # chunks cannot run out of pages halfway.
        if self._max_pages_held(opening) is None:
            self._table.reserve(opening.sequence, opening.prompt)
        openings.append(opening)
        if opening.reused and opening.drafted:
            self._draft_timeout.require_catch_up(len(opening.reused.tokens))
        live.opened = True
        return True

    def _fits(self, opening: Opening) -> bool:
        """Return whether there are pages for the whole prompt and for one tree, less the pages shared with
        the source.
        """
        shared = opening.forked // self._table.page_rows
        slots = self._budget.slots if opening.decodes else 0
        pages = self._table.pages_for(opening.prompt + slots) - shared
        most = self._max_pages_held(opening)
        return (pages if most is None else min(pages, most)) <= self._table.free

    def _max_pages_held(self, opening: Opening) -> int | None:
        """Return how many pages the sequence holds at most, if a KV policy such as a window bounds that;
        otherwise None.
        """
        return max_held_pages(policy_of(opening), self._budget.rows, self._table.page_rows)

    def _reject(self, sequence: int) -> None:
        """End a sequence that could not be opened, and keep an outcome for the master."""
        self._close(sequence)
        self._rejected.append(Outcome(sequence, 0, (), (), End.FAILED))

    def _close(self, sequence: int) -> None:
        """Remove a sequence, and have the next frame close it if it was opened.

        If it was not opened, and was to decode from reused KV of the previous epoch, the next frame closes
        that KV instead.
        """
        live = self._sequences.pop(sequence, None)
        if live and live.opened:
            self._closings.append(sequence)
        # No other sequence will reuse this KV.
        elif live and live.opening.reused and live.opening.decodes:
            self._closings.append(live.opening.reused.sequence)
