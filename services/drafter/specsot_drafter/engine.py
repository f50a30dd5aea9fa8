"""Learns from true features and drafts the trees that are wanted: one drafter, one epoch.

Refuses to know transports, text and the base's layers. Synchronous; called by one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specsot.frames import Draft, Features, Lesson
from specsot.members import Configuration, Curve
from specsot.tree import Tree, single
from specsot.vocabulary import Vocabulary
from specsot_drafter.following import Following
from specsot_drafter.grammar import GrammarGuide
from specsot_drafter.growth import Ground, Growth
from specsot_drafter.heads import DraftHead
from specsot_drafter.measure import measure_levels
from specsot_drafter.selection import (
    Flags,
    Offer,
    barred_below,
    best_each,
    best_overall,
    graft,
    masses,
    ranked,
    trees_of,
    worth,
)
from specsot_drafter.streams import Flight, Stream
from specsot_drafter.tuning import Returned, Tuner

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Turn:
    """When the ring last went on, in seconds of our clock, and whether it had waited for trees."""

    drafted: bool
    since: float


class DraftEngine:
    """Follows every sequence it saw open; those it missed get their root back as a tree.

    `learn` is bookkeeping, `draft` computes: call it after the last `learn` of a burst, whether or not
    a tree is wanted. rest: further trees that need not be waited for, because drafting does not pay now;
    said once, when a rest begins, and kept by both sides as trees come and go.
    """

    def __init__(
        self,
        head: DraftHead,
        configuration: Configuration,
        vocabulary: Vocabulary | None = None,
        curve: Curve | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """curve: seconds per rows of one pass of the head; measured here when absent and needed."""
        self._head, self._shape, self._rows = head, configuration.shape, configuration.rows
        if curve is None:
            curve = () if self._shape.fixed else measure_levels(head)
        self.tuner = Tuner(self._shape, configuration.curve, curve)
        self._following = Following(head, configuration.pages, configuration.page_rows, vocabulary)
        self._wanted: dict[int, Lesson] = {}
        self._clock = clock
        self._arrived = 0.0
        self._turned: Turn | None = None
        self.rest = 0

    @property
    def free_pages(self) -> int:
        """Pages nobody owns; all of them once every sequence is closed."""
        return self._following.memory.table.free

    @torch.inference_mode()
    def learn(self, batch: Features) -> None:
        """Apply one frame's openings, lessons and closings. Sequences that were missed are ignored."""
        self._arrived = self._clock()
        for opening in batch.openings:
            self._following.open(opening)
        self._settle(batch)
        self._following.hear(batch)
        for lesson in batch.lessons:
            self._want(lesson)
        for sequence in batch.closings:
            self._following.close(sequence)
            self._wanted.pop(sequence, None)

    @torch.inference_mode()
    def draft(self) -> tuple[Draft, ...]:
        """A tree for the newest state of every sequence that wants one: its root alone while more does
        not pay, for those who still wait. Under a grammar nobody is told not to wait: what it forces
        costs nothing to draft.
        """
        wanted, self._wanted, self.rest = self._wanted, {}, 0
        growing, resting = self._growing(wanted), self.tuner.rest
        levels = self._plan(growing)
        trees = self._grow(growing, levels) if levels else {}
        for stream, _ in growing:
            self._follow_grammar(stream, trees)
        self._turned = Turn(True, self._clock()) if trees else Turn(False, self._arrived)
        if self.tuner.rest > resting and not any(stream.standing for stream, _ in growing):
            self._turned = None  # the ring waited for us, and got nothing: neither kind of lap
            self.rest = len(wanted) * (self.tuner.rest - 1)  # this lap has its trees
        if not wanted:
            self._following.catch_up(())
        return tuple(_draft(lesson, trees) for lesson in wanted.values())

    def _want(self, lesson: Lesson) -> None:
        stream = self._following.streams.get(lesson.sequence)
        drafted = stream is None or stream.opening.drafted
        if drafted and lesson.step is not None and lesson.bonus is not None:
            self._wanted[lesson.sequence] = lesson

    def _growing(self, wanted: dict[int, Lesson]) -> list[tuple[Stream, Ground]]:
        """Streams that can grow at least one level, and where."""
        rows = self._shape.top_k * self._shape.depth
        found: list[tuple[Stream, Ground]] = []
        for sequence in wanted:
            stream = self._following.streams.get(sequence)
            ground = self._following.ground(stream, rows) if stream and self._most_levels(stream) else None
            if stream and ground:
                found.append((stream, ground))
        return found

    def _most_levels(self, stream: Stream) -> int:
        """As deep as the shape, the sequence's limit and the base's context allow."""
        return max(min(self._shape.depth + 1, self._most_depth(stream)), 0)

    def _most_depth(self, stream: Stream) -> int:
        """A node at this depth is the last that can be of use, in the text and in the context."""
        return min(stream.room - 1, self._head.positions - 1 - stream.length)

    def _plan(self, growing: Sequence[tuple[Stream, Ground]]) -> int:
        most = max((self._most_levels(stream) for stream, _ in growing), default=0)
        return most if self._shape.fixed else self.tuner.plan_levels(len(growing), most)

    def _grow(self, growing: Sequence[tuple[Stream, Ground]], levels: int) -> dict[int, Tree]:
        """Trees by sequence; what was sent is remembered until it comes back."""
        offer = self._offer(growing, levels)
        grown = int(offer.depths[-1])
        chosen = self._choose(offer, grown)
        streams = [stream for stream, _ in growing]
        trees = trees_of(offer, [_root(stream) for stream in streams], chosen)
        for stream, tree, mass in zip(streams, trees, masses(offer, chosen).tolist()):
            stream.flight = Flight(stream.length, grown, len(tree), tuple(mass))
        return {stream.sequence: tree for stream, tree in zip(streams, trees)}

    def _offer(self, growing: Sequence[tuple[Stream, Ground]], levels: int) -> Offer:
        """Catch up with the true features, then grow; the tuner hears how long it took."""
        began, fresh = self._clock(), self._is_fresh()
        streams, grounds = [stream for stream, _ in growing], [ground for _, ground in growing]
        last = self._following.catch_up(streams)
        kv, guide = self._following.memory.kv, _guide(self._head, streams)
        growth = Growth(self._head, kv, grounds, self._shape.top_k, guide)
        offer = growth.run(last, levels, None if self._shape.fixed else self.tuner.deserves)
        if fresh:
            self.tuner.note_drafting(len(streams), int(offer.depths[-1]), self._clock() - began)
        return barred_below(offer, [self._most_levels(stream) for stream in streams])

    def _is_fresh(self) -> bool:
        """Nothing is due but last lap's rows; a prompt's say nothing about what a level costs."""
        usual = self._shape.depth + 2
        return all(len(stream.waiting) <= usual for stream in self._following.streams.values())

    def _follow_grammar(self, stream: Stream, trees: dict[int, Tree]) -> None:
        """What the grammar forces is drafted for free, whether or not anything else is."""
        forced = stream.standing.forced() if stream.standing else ()
        before = trees.get(stream.sequence) or single(_root(stream))
        room = min(self._most_depth(stream), self._shape.slots - len(before))
        tree = graft(before, forced[: max(room, 0)])
        if tree is not before:
            trees[stream.sequence] = tree
            stream.flight = Flight(stream.length, 0, len(tree), ())

    def _choose(self, offer: Offer, levels: int) -> Flags:
        """The reference's nodes for a fixed shape; else as many as pay, wherever they are worth most."""
        each = self._shape.nodes - 1
        if self._shape.fixed:
            return best_each(offer.scores, each)
        chances = worth(offer, self.tuner.acceptance.trust())
        count = self.tuner.choose_rows(ranked(chances, each), len(offer), levels)
        return best_overall(chances, min(count, self._rows - len(offer)), each)

    def _settle(self, batch: Features) -> None:
        """Hear how the trees of this frame fared, before the streams move on."""
        if self._shape.fixed:
            return
        trees = [
            self._returned(lesson) for lesson in batch.lessons if lesson.step is not None and lesson.step > 1
        ]
        rows = sum(tree.rows for tree in trees)
        if rows > batch.fed:  # some came too late and were not sent
            trees = [Returned(0, 1, (), 0) for _ in trees]
        self.tuner.settle(trees, batch.seconds if rows == batch.fed else None)
        if trees and self._turned:
            hop = self._arrived - self._turned.since - batch.seconds
            self.tuner.note_hop(self._turned.drafted, hop, batch.seconds)

    def _returned(self, lesson: Lesson) -> Returned:
        stream = self._following.streams.get(lesson.sequence)
        known = stream.outcome(lesson) if stream else None
        return known or Returned(0, 1, (), len(lesson.tokens) - 1)


def _draft(lesson: Lesson, trees: dict[int, Tree]) -> Draft:
    assert lesson.step is not None
    assert lesson.bonus is not None
    return Draft(lesson.sequence, lesson.step, trees.get(lesson.sequence) or single(lesson.bonus))


def _root(stream: Stream) -> int:
    assert stream.last is not None
    return stream.last


def _guide(head: DraftHead, streams: Sequence[Stream]) -> GrammarGuide | None:
    if not any(stream.standing for stream in streams):
        return None
    return GrammarGuide(head, [stream.standing for stream in streams], [stream.room for stream in streams])
