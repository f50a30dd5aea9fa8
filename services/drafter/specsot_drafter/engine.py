"""Learns from true features and drafts the trees that are wanted: one drafter, one epoch.

Refuses to know transports, text and the base's layers. Synchronous; called by one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

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
from specsot_drafter.tuning import Returned, Spent, Tuner

Clock = Callable[[], float]

ALONE = Returned(0, 1, (), 0)  # a root without anything below
UNFOLLOWED = 8  # trees to rest for each that is wanted, where nothing can grow


class DraftEngine:
    """Follows every sequence it saw open; those it missed get their root back as a tree.

    `learn` is bookkeeping, `draft` computes: call it after the last `learn` of a burst, whether or not
    a tree is wanted. rest: instead of trees, for how many of them nothing will be drafted, because it
    does not pay now. The ring then turns without us, and tells what we missed in one when it is over.
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
        self._growing = 0.0  # seconds, since the last lap came back
        self.rest = 0

    @property
    def free_pages(self) -> int:
        """Pages nobody owns; all of them once every sequence is closed."""
        return self._following.memory.table.free

    @torch.inference_mode()
    def learn(self, batch: Features) -> None:
        """Apply one frame's openings, lessons and closings. Sequences that were missed are ignored."""
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
        """A tree for the newest state of every sequence that wants one, or none at all and a rest."""
        wanted, self._wanted, self.rest = self._wanted, {}, 0
        if not wanted:
            if self._shape.fixed or self.tuner.drafting:
                self._following.catch_up(())
            return ()
        began = self._clock()
        streams = [stream for stream in map(self._stream, wanted) if stream and self._most_levels(stream)]
        levels = self._plan(streams)
        if not (levels or self._shape.fixed):
            self.rest = self.tuner.rest or UNFOLLOWED * len(wanted)
            return ()
        growing = self._grounded(streams)
        trees = self._grow(growing, levels) if growing else {}
        for stream, _ in growing:
            self._follow_grammar(stream, wanted[stream.sequence].forced, trees)
        self._growing = self._clock() - began
        return tuple(_draft(lesson, trees) for lesson in wanted.values())

    def _stream(self, sequence: int) -> Stream | None:
        return self._following.streams.get(sequence)

    def _want(self, lesson: Lesson) -> None:
        stream = self._stream(lesson.sequence)
        drafted = stream is None or stream.opening.drafted
        if drafted and lesson.step is not None and lesson.bonus is not None:
            self._wanted[lesson.sequence] = lesson

    def _grounded(self, streams: Sequence[Stream]) -> list[tuple[Stream, Ground]]:
        """Those that have room to grow, and where."""
        rows = self._shape.top_k * self._shape.depth
        grounds = [self._following.ground(stream, rows) for stream in streams]
        return [(stream, ground) for stream, ground in zip(streams, grounds) if ground]

    def _most_levels(self, stream: Stream) -> int:
        """As deep as the shape, the sequence's limit and the base's context allow."""
        return max(min(self._shape.depth + 1, self._most_depth(stream)), 0)

    def _most_depth(self, stream: Stream) -> int:
        """A node at this depth is the last that can be of use, in the text and in the context."""
        return min(stream.room - 1, self._head.positions - 1 - stream.length)

    def _plan(self, streams: Sequence[Stream]) -> int:
        most = max(map(self._most_levels, streams), default=0)
        return most if self._shape.fixed else self.tuner.plan_levels(len(streams), most, self._following.due)

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
        began, due = self._clock(), self._following.due
        streams, grounds = [stream for stream, _ in growing], [ground for _, ground in growing]
        last = self._following.catch_up(streams)
        caught = self._clock()
        kv, guide = self._following.memory.kv, _guide(self._head, streams)
        growth = Growth(self._head, kv, grounds, self._shape.top_k, guide)
        offer = growth.run(last, levels, None if self._shape.fixed else self.tuner.deserves)
        if due > len(streams) * (self._shape.depth + 2):  # a prompt's rows tell nothing about a level
            self.tuner.costs.note_catching(due, caught - began)
        else:
            self.tuner.costs.note_drafting(len(streams), int(offer.depths[-1]), self._clock() - began)
        return barred_below(offer, [self._most_levels(stream) for stream in streams])

    def _follow_grammar(self, stream: Stream, forced: tuple[int, ...], trees: dict[int, Tree]) -> None:
        """What a grammar forces is drafted for free, beside what was grown."""
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
        if self._shape.fixed or not batch.fed:
            return
        lessons = [lesson for lesson in batch.lessons if lesson.step is not None and lesson.step > 1]
        if batch.rested:
            self.tuner.rested(batch.rested, max(len(lessons), len(self._wanted), 1))
            trees = [ALONE for _ in lessons]
        else:
            trees = [self._returned(lesson) for lesson in lessons]
        rows = sum(tree.rows for tree in trees)
        if rows > batch.fed:  # some came too late and were not sent
            trees = [ALONE for _ in trees]
        computed = batch.seconds if rows == batch.fed else 0.0
        self.tuner.settle(trees, Spent(computed, batch.wall, self._growing))
        self._growing = 0.0

    def _returned(self, lesson: Lesson) -> Returned:
        stream = self._stream(lesson.sequence)
        return (stream.outcome(lesson) if stream else None) or ALONE


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
