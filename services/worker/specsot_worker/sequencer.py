"""The only sequencer and batcher: joins results and drafts, and composes the next frame.

Refuses to know tensors, transports and clocks (the time is passed in). Everything that changes KV
leaves here as part of a frame header, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsot.arrange import open_one, policy_of
from specsot.errors import SpecsotError
from specsot.frames import (
    Chunk,
    Close,
    Drafts,
    End,
    Frame,
    Growth,
    Lease,
    Open,
    Opening,
    Order,
    Outcome,
    Result,
    Segment,
    rows_of,
)
from specsot.pages import PageTable, most_held
from specsot_worker.flow import Flow
from specsot_worker.live import Live, open_live
from specsot_worker.patience import Patience

PREFILL_SHARE = 4  # one row in so many is kept from trees while prompts wait


@dataclass(frozen=True, slots=True)
class Budget:
    """What a frame and the ring may hold.

    rows: of one frame. flight: frames under way at most. slots: KV rows kept free per live sequence.
    """

    rows: int = 512
    flight: int = 1
    slots: int = 64


@dataclass(slots=True)
class _Flown:
    """A frame under way. at: since when. families: whose trees it carries. alone: with no other so far."""

    at: float
    families: frozenset[int]
    alone: bool


class Sequencer:
    """State of every sequence of one epoch. Feed it what arrives, then ask it to `compose`.

    Nobody starves. While prompts wait, trees leave them a share of a frame's rows: whoever is opened writes
    its first token within as many frames as all prompt rows in front of it, and its own, make shares. Where
    trees do not all fit, each takes its turn, and who was cut short goes first in the next frame.
    """

    def __init__(
        self,
        epoch: int,
        budget: Budget,
        table: PageTable,
        patience: Patience,
        flow: Flow | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """flow: says how many frames pay, in a ring of several stages; None: as many as `budget` grants, and
        families stay whole. vocabulary: how many token ids the base has; None: they are not checked."""
        self._epoch, self._budget, self._table = epoch, budget, table
        self._patience, self._flow, self._vocabulary = patience, flow, vocabulary
        self._live: dict[int, Live] = {}
        self._closings: list[int] = []
        self._rejected: list[Outcome] = []
        self._flying: dict[int, _Flown] = {}
        self._number = 0
        self._turns = 0  # trees fed whole so far
        self._composed = float("-inf")  # when `compose` was asked last

    @property
    def idle(self) -> bool:
        """Nothing lives, nothing flies."""
        return not (self._live or self._closings or self._flying)

    def obey(self, order: Order) -> None:
        """Take an order of the master. Orders for sequences that are over are ignored."""
        match order:
            case Open():
                self._live.setdefault(order.opening.sequence, open_live(order))
                if not self._known(order.tokens):
                    self._reject(order.opening.sequence)
            case Close(sequence):
                self._end(sequence)
            case Lease(sequence, position):
                if live := self._live.get(sequence):
                    live.lease = max(live.lease, position)

    def learn(self, result: Result, now: float) -> None:
        """Take a result: it returns a credit and moves its sequences on. Stale epochs are dropped."""
        if result.epoch != self._epoch:
            return
        flown = self._flying.pop(result.number, None)
        if flown and self._flow:
            self._flow.returned(result.rows, result.seconds, now - flown.at, flown.alone)
        for outcome in result.outcomes:
            live = self._live.get(outcome.sequence)
            if live is None:
                continue
            if outcome.end:
                self._end(outcome.sequence)
            else:
                live.learn(outcome, now)

    def offer(self, drafts: Drafts, now: float | None = None) -> None:
        """Take trees; late ones and those of a stale epoch are dropped. now: teaches how long trees take.

        A drafter may be wrong in any way: a tree that no base could have asked for counts as missed.
        """
        if drafts.epoch != self._epoch:
            return
        self._patience.begin()
        for draft in drafts.drafts:
            live = self._live.get(draft.sequence)
            if live is None:
                continue
            since = live.waiting
            if not self._known(draft.tree.tokens) or live.contradicts(draft):
                self._go_without(live, draft.step)
            elif live.offer(draft.step, draft.tree):
                self._patience.kept(None if now is None or since is None else now - since)
        if drafts.rest:
            self._patience.rest(drafts.rest)

    def _known(self, tokens: Sequence[int]) -> bool:
        """Whether the base has all these ids: its embedding reads past its end otherwise."""
        most = self._vocabulary
        return most is None or not tokens or (min(tokens) >= 0 and max(tokens) < most)

    def _go_without(self, live: Live, step: int) -> None:
        """Its drafter has spoken; waiting longer brings nothing."""
        if step == live.step and live.waiting is not None:
            live.waiting = None
            self._patience.missed()

    def lose_drafter(self) -> None:
        """Nobody drafts any more: nothing waits for a tree, until one comes after all."""
        self._patience.end()

    def rejections(self) -> tuple[Outcome, ...]:
        """Sequences that could not be opened since the last call; for the master."""
        rejected, self._rejected = tuple(self._rejected), []
        return rejected

    def compose(self, now: float) -> Frame | None:
        """The next frame, or None when nothing is ready or every credit is out."""
        self._composed = now
        most = self._most()
        if len(self._flying) >= most or (most == 1 and self._held(now)):
            return None
        growths = self._grow(now, self._budget.rows - self._kept_for_prompts())
        room = self._budget.rows - sum(map(rows_of, growths))
        openings, chunks = self._feed(room)
        if not (growths or chunks or openings or self._closings):
            return None
        return self._launch(tuple(openings), (*growths, *chunks), now)

    def deadline(self) -> float | None:
        """When the next waiting sequence loses patience; None when nobody waits, or no credit is left: then
        the next result is what to wait for. So it is for those who had lost it when `compose` was asked."""
        if len(self._flying) >= self._most():
            return None
        waits = [live.waiting for live in self._live.values() if live.growable and live.waiting is not None]
        due = [until(since) for since in waits for until in (self._patience.others, self._patience.deadline)]
        return min((one for one in due if one > self._composed), default=None)

    def _most(self) -> int:
        """Frames that may fly now."""
        limit = self._budget.flight
        return self._flow.most(limit - 1, limit) if self._flow and limit > 1 else limit

    def _launch(self, openings: tuple[Opening, ...], segments: tuple[Segment, ...], now: float) -> Frame:
        closings, self._closings = tuple(self._closings), []
        for sequence in closings:
            self._table.close(sequence)
        self._number += 1
        self._take_off(segments, now)
        resting = self._patience.resting
        drafted = [self._live[one.sequence].send(resting) for one in segments]
        self._patience.spend(sum(drafted), sum(map(rows_of, segments)))
        return Frame(self._epoch, self._number, openings, segments, closings, resting=resting)

    def _take_off(self, segments: tuple[Segment, ...], now: float) -> None:
        grown = [self._live[one.sequence] for one in segments if isinstance(one, Growth)]
        for other in self._flying.values():
            other.alone = False
        families = frozenset(live.family for live in grown)
        self._flying[self._number] = _Flown(now, families, not self._flying)
        returned = [live.returned for live in grown if live.returned is not None]
        if self._flow and returned:
            self._flow.rested(now - max(returned))

    def _held(self, now: float) -> set[int]:
        """Families (of one request, or of one prefix) that wait for the tree of one of theirs."""
        return {
            live.family
            for live in self._live.values()
            if live.waiting is not None and live.growable and now < self._patience.others(live.waiting)
        }

    def _ready(self, now: float) -> list[Live]:
        """Who goes with the next frame: of every family its share, or all who are able if none is waited for.

        A lap costs nearly the same for one sequence as for all of a family, so one frame usually is for all
        of it; where it is not, `Flow` spreads a family, and each of its frames laps for itself.
        """
        held, ready = self._held(now), list[Live]()
        families = self._families()
        for family, members in families.items():
            under_way = sum(family in flown.families for flown in self._flying.values())
            parts = self._spread(members, len(families) - 1)
            share = -(-len(members) // parts)
            able = [live for live in members if live.growable and not self._waits(live, now)]
            if under_way < parts and (len(able) >= share or family not in held):
                ready += able[:share]
        return sorted(ready, key=lambda live: (live.family, live.opening.sequence))

    def _families(self) -> dict[int, list[Live]]:
        """All who write, by family; those first who have been here longest."""
        families: dict[int, list[Live]] = {}
        writing = (live for live in self._live.values() if live.root is not None)
        for live in sorted(writing, key=lambda live: live.returned or 0.0):
            families.setdefault(live.family, []).append(live)
        return families

    def _waits(self, live: Live, now: float) -> bool:
        return live.waiting is not None and now < self._patience.deadline(live.waiting)

    def _spread(self, members: list[Live], others: int) -> int:
        """Over how many frames a family goes; other requests' frames come first."""
        if self._flow is None or len(members) < 2:
            return 1
        sizes = [len(live.tree) for live in members if live.tree]
        rows = round(len(members) * sum(sizes) / len(sizes)) if sizes else len(members)
        return self._flow.spread(rows, len(members), max(self._budget.flight - 1 - others, 1))

    def _grow(self, now: float, room: int) -> list[Growth]:
        """Trees of all who go now, in at most `room` rows; whoever is cut short keeps its turn."""
        ready, grown = self._ready(now), dict[int, Growth]()
        queue = sorted(ready, key=lambda live: live.turn)
        for place, live in enumerate(queue):
            others, sequence = len(queue) - place - 1, live.opening.sequence
            share = max(room - others, min(room, 1))
            most = min(self._table.room(sequence, live.committed), max(self._budget.slots, 1))
            if (rows := min(share, most)) < 1:
                continue
            if live.waiting is not None and live.tree is None:
                self._patience.missed()
            self._tidy(sequence, live.committed)
            if min(live.wants, most) <= share:
                self._turns += 1
                live.turn = self._turns
            grown[sequence] = growth = live.next_growth(rows)
            self._table.reserve(sequence, live.committed + rows_of(growth))
            room -= rows_of(growth)
        return [grown[live.opening.sequence] for live in ready if live.opening.sequence in grown]

    def _kept_for_prompts(self) -> int:
        """Rows of the next frame that trees leave to prompts, if any can be fed."""
        rows, kept = self._budget.rows, 0
        share = max(rows // PREFILL_SHARE, 1) if rows > 1 else self._number % 2
        for live in self._live.values():
            if kept >= share:
                break
            kept += self._feedable(live)
        return min(kept, share)

    def _feedable(self, live: Live) -> int:
        """Rows of its prompt that could go with the next frame."""
        rows = live.opening.prompt - live.fed
        if not rows:
            return 0
        if live.opened:
            return min(rows, max(self._table.room(live.opening.sequence, live.fed), 0))
        fork = live.opening.fork
        source = self._live.get(fork.sequence) if fork else None
        there = fork is None or (source is not None and source.opened and source.fed >= fork.length)
        return rows if there and self._fits(live.opening) else 0

    def _feed(self, room: int) -> tuple[list[Opening], list[Chunk]]:
        """Open what can be opened, and feed prompts in order of arrival."""
        openings: list[Opening] = []
        chunks: list[Chunk] = []
        fed = {sequence: live.fed for sequence, live in self._live.items()}
        for live in [live for live in self._live.values() if not (live.prefilled and live.opened)]:
            there = live.opened
            if not there and not self._open(live, fed, openings):
                continue
            sequence = live.opening.sequence
            rows = min(room, self._chunk(live), self._table.room(sequence, live.fed))
            if rows > 0 and not live.prefilled:
                if there:
                    self._tidy(sequence, live.fed)
                chunks.append(live.next_chunk(rows))
                self._table.reserve(sequence, live.fed)
                room -= len(chunks[-1].tokens)
        return openings, chunks

    def _tidy(self, sequence: int, row: int) -> None:
        """What every stage does with a sequence's pages before its next rows, from this one on."""
        self._table.trim(sequence, row)
        self._table.prune(sequence, row)

    def _chunk(self, live: Live) -> int:
        """Rows of its prompt that go with one frame: all that fit, where there is one stage."""
        rows = self._budget.rows
        return self._flow.chunk(live.opening.prompt - live.fed, rows) if self._flow else rows

    def _open(self, live: Live, fed: dict[int, int], openings: list[Opening]) -> bool:
        """Open one sequence if its source is fed that far and its pages are there."""
        opening = live.opening
        fork = opening.fork
        if fork and fork.sequence not in self._table:
            if fork.sequence not in self._live:
                self._reject(opening.sequence)
            return False
        if fork and fed[fork.sequence] < fork.length:
            return False
        if not self._fits(opening):
            return False
        try:
            open_one(self._table, opening)
        except SpecsotError:
            self._reject(opening.sequence)
            return False
        if self._most_held(opening) is None:
            self._table.reserve(opening.sequence, opening.prompt)
        openings.append(opening)
        live.opened = True
        return True

    def _fits(self, opening: Opening) -> bool:
        shared = (opening.fork.length if opening.fork else 0) // self._table.page_rows
        slots = self._budget.slots if opening.decodes else 0
        pages = self._table.pages_for(opening.prompt + slots) - shared
        most = self._most_held(opening)
        return (pages if most is None else min(pages, most)) <= self._table.free

    def _most_held(self, opening: Opening) -> int | None:
        return most_held(policy_of(opening), self._budget.rows, self._table.page_rows)

    def _reject(self, sequence: int) -> None:
        del self._live[sequence]
        self._rejected.append(Outcome(sequence, 0, (), (), End.FAILED))

    def _end(self, sequence: int) -> None:
        live = self._live.pop(sequence, None)
        if live and live.opened:
            self._closings.append(sequence)
