"""The sequencer and batcher of stage 0: joins results and drafts, and composes the next frame.

Every change of KV leaves here as part of a frame header, in order. Time is passed in, in seconds.
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
from specsot.core.pages import PageTable, most_held
from specsot.errors import SpecsotError
from specsot_model.core.kv_plan import open_one, policy_of
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget, InFlightFrame, PipelineDepth
from specsot_worker.core.sequence_state import SequenceState

PREFILL_SHARE = 4  # one row of a frame in so many is for prompts while any waits; not measured


class Sequencer:
    """State of every sequence of one epoch. Feed it what arrives, then ask it to `compose`.

    Nobody starves. While prompts wait, trees leave them a share of a frame's rows: whoever is opened writes
    its first token within as many frames as all prompt rows in front of it, and its own, make shares. A frame
    may take fewer of those where rows take long, so that whoever writes does not stand still for a prompt.
    Where trees do not all fit, each takes its turn, and who was cut short goes first in the next frame.
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
        """depth: says how many frames and rows of prompts pay; None: all that `budget` grants, and families
        stay whole. vocabulary: how many token ids the base has; None: they are not checked."""
        self._epoch = epoch
        self._budget = budget
        self._table = table
        self._draft_timeout = draft_timeout
        self._depth = depth
        self._vocabulary = vocabulary
        self._sequences: dict[int, SequenceState] = {}
        self._closings = list[int]()
        self._rejected = list[Outcome]()
        self._in_flight: dict[int, InFlightFrame] = {}
        self._number = self._turns = 0  # frames launched, and trees fed whole, so far
        self._composed = float("-inf")  # when `compose` was asked last

    @property
    def idle(self) -> bool:
        """Nothing lives, nothing flies."""
        return not (self._sequences or self._closings or self._in_flight)

    @property
    def prompt_rows_due(self) -> int:
        """Rows of prompts that could go with the next frame."""
        return sum(self._feedable_rows(one) for one in self._sequences.values() if not one.prefilled)

    def apply_order(self, order: Order) -> None:
        """Take an order of the master. Orders for sequences that are over are ignored."""
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
        """Take a result: it returns a credit and moves its sequences on. Stale epochs are dropped. awaits:
        the drafter has not answered yet."""
        if result.epoch != self._epoch:
            return
        flown = self._in_flight.pop(result.number, None)
        if flown and self._depth:
            self._depth.record_lap(result.rows, result.seconds, now - flown.since, flown.alone)
        for outcome in result.outcomes:
            live = self._sequences.get(outcome.sequence)
            if live is None:
                continue
            if outcome.end:
                self._close(outcome.sequence)
            else:
                live.apply_outcome(outcome, now, awaits)

    def add_drafts(self, drafts: Drafts, now: float | None = None) -> None:
        """Take trees; late ones and those of a stale epoch are dropped. now: teaches how long trees take.

        A drafter may be wrong in any way: a tree that no base could have asked for counts as missed. Behind
        a rest it answers at once for all that it was told of, and the others of a result wait no longer.
        """
        if drafts.epoch != self._epoch:
            return
        self._draft_timeout.drafter_spoke(drafts.drafter)
        answered = set[float | None]()  # when their results came
        for draft in drafts.drafts:
            if (live := self._sequences.get(draft.sequence)) is None:
                continue
            since = live.waiting_since
            live.drafter = drafts.drafter
            if not self._valid_ids(draft.tree.tokens) or live.contradicts(draft):
                self._stop_waiting(live, draft.step)
            elif live.offer_tree(draft.step, draft.tree):
                waited = None if now is None or since is None else now - since
                self._draft_timeout.record_tree(waited, drafts.drafter)
                answered.add(since)
        for live in self._sequences.values() if self._draft_timeout.sends_backlog else ():
            live.waiting_since = None if live.waiting_since in answered else live.waiting_since
        if drafts.rest:
            self._draft_timeout.start_rest(drafts.rest, self._drafted())

    def _valid_ids(self, tokens: Sequence[int]) -> bool:
        """Whether the base has all these ids: its embedding reads past its end otherwise."""
        most = self._vocabulary
        return most is None or not tokens or (min(tokens) >= 0 and max(tokens) < most)

    def _stop_waiting(self, live: SequenceState, step: int) -> None:
        """Its drafter has spoken; waiting longer brings nothing."""
        if step == live.step and live.waiting_since is not None:
            live.waiting_since = None
            self._draft_timeout.record_miss(live.drafter)

    def lose_drafter(self, drafter: str) -> None:
        """A drafter is lost: its sequences, and those that nobody has drafted for yet, wait for no tree
        until one comes. Without any other drafter nothing waits.
        """
        self._draft_timeout.drafter_left(drafter)
        for live in self._sequences.values():
            if live.drafter in (drafter, ""):
                live.drafter = None

    def rejections(self) -> tuple[Outcome, ...]:
        """Sequences that could not be opened since the last call; for the master."""
        rejected = tuple(self._rejected)
        self._rejected = []
        return rejected

    def compose(self, now: float) -> Frame | None:
        """The next frame, or None when nothing is ready or every credit is out."""
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
        """When the next waiting sequence loses patience; None when nobody waits, or no credit is left: then
        the next result is what to wait for. So it is for those who had lost it when `compose` was asked."""
        if len(self._in_flight) >= self._max_in_flight():
            return None
        able = [(live.waiting_since, live.drafter) for live in self._sequences.values() if live.can_decode]
        untils = self._draft_timeout.family_deadline, self._draft_timeout.deadline
        due = (until(since, by) for since, by in able if since is not None for until in untils)
        return min((one for one in due if one > self._composed), default=None)

    def _max_in_flight(self) -> int:
        """Frames that may fly now."""
        limit = self._budget.flight
        return self._depth.max_frames(limit - 1, limit) if self._depth and limit > 1 else limit

    def _take_closings(self) -> tuple[int, ...]:
        """But for texts of an epoch before with whose rows somebody begins who waits to be opened."""
        waiting = (one.opening.kept for one in self._sequences.values() if not one.opened)
        wanted = {kept.sequence for kept in waiting if kept}
        due = self._closings
        self._closings = [one for one in due if one in wanted]
        return tuple(one for one in due if one not in wanted)

    def _launch(self, frame: Frame, now: float) -> Frame:
        for sequence in frame.closings:
            self._table.close(sequence)
        self._number = frame.number
        segments = frame.segments
        self._record_launch(segments, now)
        resting = self._draft_timeout.resting
        waking = self._draft_timeout.waking
        drafted = [self._sequences[one.sequence].mark_sent(resting or waking) for one in segments]
        self._draft_timeout.record_launch(sum(drafted), sum(map(rows_of, segments)), self._drafted())
        return replace(frame, resting=resting, waking=waking)

    def _drafted(self) -> int:
        """How many sequences write, and are drafted for."""
        return sum(live.opening.drafted and live.root is not None for live in self._sequences.values())

    def _record_launch(self, segments: tuple[Segment, ...], now: float) -> None:
        grown = [self._sequences[one.sequence] for one in segments if isinstance(one, TreeSegment)]
        for other in self._in_flight.values():
            other.alone = False
        families = frozenset(live.place[0] for live in grown)
        self._in_flight[self._number] = InFlightFrame(now, families, not self._in_flight)
        returned = [live.returned_at for live in grown if live.returned_at is not None]
        if self._depth and returned:
            self._depth.record_gap(now - max(returned))

    def _waiting_families(self, now: float) -> set[int]:
        """Families (of one request, or of one prefix) that wait for the tree of one of theirs."""
        return {
            live.place[0]
            for live in self._sequences.values()
            if live.waiting_since is not None
            and live.can_decode
            and now < self._draft_timeout.family_deadline(live.waiting_since, live.drafter)
        }

    def _ready(self, now: float) -> list[SequenceState]:
        """Who goes with the next frame: of every family its share, or all who are able if none is waited for.

        A lap costs nearly the same for one sequence as for all of a family, so one frame usually is for all
        of it; where it is not, `PipelineDepth` spreads a family, and each of its frames laps for itself.
        """
        if self._budget.flight == 1:  # nothing flies, and nobody is waited for: `compose` has looked
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
        """All who write, by family; those first who have been here longest."""
        families: dict[int, list[SequenceState]] = {}
        writing = (live for live in self._sequences.values() if live.root is not None)
        for live in sorted(writing, key=lambda live: live.returned_at or 0.0):
            families.setdefault(live.place[0], []).append(live)
        return families

    def _waits(self, live: SequenceState, now: float) -> bool:
        since = live.waiting_since
        return since is not None and now < self._draft_timeout.deadline(since, live.drafter)

    def _spread(self, members: list[SequenceState], others: int) -> int:
        """Over how many frames a family goes; other requests' frames come first."""
        if self._depth is None or len(members) < 2:
            return 1
        sizes = [len(live.tree) for live in members if live.tree]
        rows = round(len(members) * sum(sizes) / len(sizes)) if sizes else len(members)
        return self._depth.frames_per_family(rows, len(members), max(self._budget.flight - 1 - others, 1))

    def _compose_trees(self, now: float, room: int) -> list[TreeSegment]:
        """Trees of all who go now, in at most `room` rows; whoever is cut short keeps its turn."""
        ready = self._ready(now)
        grown = dict[int, TreeSegment]()
        table = self._table
        queue = sorted(ready, key=lambda live: live.turn)
        slots = max(self._budget.slots, 1)
        for place, live in enumerate(queue):
            others = len(queue) - place - 1
            sequence = live.opening.sequence
            share = max(room - others, min(room, 1))
            plenty = table.free * table.page_rows >= slots
            most = slots if plenty else min(table.room(sequence, live.committed), slots)
            if (rows := min(share, most)) < 1:
                continue
            if live.waiting_since is not None and live.tree is None:
                self._draft_timeout.record_miss(live.drafter)
            self._free_behind(sequence, live.committed)
            if min(live.wanted_rows, most) <= share:
                self._turns += 1
                live.turn = self._turns
            grown[sequence] = growth = live.next_growth(rows)
            table.reserve(sequence, live.committed + len(growth.tree))
            room -= len(growth.tree)
        return [grown[live.opening.sequence] for live in ready if live.opening.sequence in grown]

    def _reserved_for_prompts(self) -> int:
        """Rows of the next frame that trees leave to prompts, if any can be fed."""
        rows = self._budget.rows
        share = max(rows // PREFILL_SHARE, 1) if rows > 1 else self._number % 2
        return min(self.prompt_rows_due, share)

    def _feedable_rows(self, live: SequenceState) -> int:
        """Rows of its prompt that could go with the next frame."""
        rows = live.opening.prompt - live.fed
        if not rows:
            return 0
        if live.opened:
            return min(rows, max(self._table.room(live.opening.sequence, live.fed), 0))
        fork = live.opening.fork
        source = self._sequences.get(fork.sequence) if fork else None
        there = fork is None or (source is not None and source.opened and source.fed >= fork.length)
        return rows if there and self._fits(live.opening) else 0

    def _compose_prompts(self, beside: int) -> tuple[list[Opening], list[PromptChunk]]:
        """Open what can be opened, and feed prompts in order of arrival. beside: the frame's other rows."""
        openings = list[Opening]()
        chunks = list[PromptChunk]()
        unfed = [live for live in self._sequences.values() if not (live.opened and live.prefilled)]
        room = self._prompt_room(beside, unfed) if unfed else 0
        every = self._sequences.items() if unfed else ()
        # where rows are kept, pages come with the first that are not
        fed = {id: one.fed for id, one in every if one.fed > one.opening.begun or not one.opening.kept}
        for live in unfed:
            there = live.opened
            if not there and not self._open(live, fed, openings):
                continue
            sequence = live.opening.sequence
            rows = min(room, self._chunk_rows(live), self._table.room(sequence, live.fed))
            if rows > 0 and not live.prefilled:
                if there:
                    self._free_behind(sequence, live.fed)
                chunks.append(live.next_chunk(rows))
                self._table.reserve(sequence, live.fed)
                room -= len(chunks[-1].tokens)
        return openings, chunks

    def _prompt_room(self, beside: int, unfed: Sequence[SequenceState]) -> int:
        """Rows that prompts may take of a frame: all that are left, unless who writes would wait too long."""
        writing = max(beside, sum(live.root is not None for live in self._sequences.values()))
        room = self._budget.rows - beside if writing else self._budget.alone
        if self._depth is None or not writing:
            return room
        waiting = sum(self._feedable_rows(live) > 0 for live in unfed)
        return self._depth.prompt_rows(writing, waiting, room)

    def _free_behind(self, sequence: int, row: int) -> None:
        """What every stage does with a sequence's pages before its next rows, from this one on."""
        if self._table.policy(sequence):
            self._table.trim(sequence, row)
            self._table.prune(sequence, row)

    def _chunk_rows(self, live: SequenceState) -> int:
        """Rows of its prompt that go with one frame: all that fit, where there is one stage."""
        rows = self._budget.rows if live.policy else self._budget.alone
        return self._depth.chunk_rows(live.opening.prompt - live.fed, rows) if self._depth else rows

    def _open(self, live: SequenceState, fed: dict[int, int], openings: list[Opening]) -> bool:
        """Open one sequence if its source is fed that far and its pages are there."""
        opening = live.opening
        fork = live.opening.fork
        source = self._sequences.get(fork.sequence) if fork else None
        held = source is None or source.opening.plan or source.opening.form  # or its tokens may be
        if fork and held:
            self._reject(opening.sequence)
            return False
        there = not fork or (fork.sequence in self._table and fed.get(fork.sequence, 0) >= fork.length)
        if not (there and self._fits(opening)):
            return False
        try:
            open_one(self._table, opening)
        except SpecsotError:
            self._reject(opening.sequence)
            return False
        if self._max_pages_held(opening) is None:
            self._table.reserve(opening.sequence, opening.prompt)
        openings.append(opening)
        if opening.kept and opening.drafted:
            self._draft_timeout.tell_first(len(opening.kept.tokens))
        live.opened = True
        return True

    def _fits(self, opening: Opening) -> bool:
        shared = opening.forked // self._table.page_rows
        slots = self._budget.slots if opening.decodes else 0
        pages = self._table.pages_for(opening.prompt + slots) - shared
        most = self._max_pages_held(opening)
        return (pages if most is None else min(pages, most)) <= self._table.free

    def _max_pages_held(self, opening: Opening) -> int | None:
        return most_held(policy_of(opening), self._budget.rows, self._table.page_rows)

    def _reject(self, sequence: int) -> None:
        self._close(sequence)
        self._rejected.append(Outcome(sequence, 0, (), (), End.FAILED))

    def _close(self, sequence: int) -> None:
        live = self._sequences.pop(sequence, None)
        if live and live.opened:
            self._closings.append(sequence)
        elif live and live.opening.kept and live.opening.decodes:  # its rows wait for it in vain
            self._closings.append(live.opening.kept.sequence)
