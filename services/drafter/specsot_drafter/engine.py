"""Learns what was committed and drafts the trees that are wanted: one drafter process, one epoch.

Refuses to know transports, tensors and how each way to draft works. Synchronous; called by one thread
at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from specsot.errors import NotFound
from specsot.frames import Draft, Features, Lesson, Opening
from specsot.members import Configuration
from specsot.params import DrafterName
from specsot.tree import Tree
from specsot.vocabulary import Vocabulary
from specsot_drafter.drafters import Drafter
from specsot_drafter.flights import ALONE, Flights
from specsot_drafter.lanes import UNGROWN, Clock, Lane, hang, lone
from specsot_drafter.rules import Rule
from specsot_drafter.texts import Text, Texts
from specsot_drafter.tuning import UNKNOWN, Returned, Spent

Ways = Mapping[DrafterName, tuple[Drafter, Rule]]


class DraftEngine:
    """Follows every sequence it saw open; those it missed get their root back as a tree.

    `learn` is bookkeeping, `draft` computes: call it after the last `learn` of a burst, whether or not
    a tree is wanted. rest: instead of trees, for how many of them nothing will be drafted, because it
    does not pay now. The ring then turns without us, and tells what we missed in one when it is over.
    """

    def __init__(
        self,
        ways: Ways,
        configuration: Configuration,
        vocabulary: Vocabulary | None = None,
        blend: Drafter | None = None,
        clock: Clock = time.perf_counter,
        ids: int | None = None,
    ) -> None:
        """ways: the first is for those who name none. blend: whose candidates may join the others' trees.
        vocabulary: to follow grammars with; without it all text counts as free.
        ids: how many token ids all that drafts can be fed; None: they are not checked.
        """
        self._ids = ids
        self._rows, self._slots, self._clock = configuration.rows, configuration.shape.slots, clock
        self.lanes = {
            name: Lane(drafter, rule, None if drafter is blend else blend, clock)
            for name, (drafter, rule) in ways.items()
        }
        self._default = next(iter(self.lanes))
        self._drafters = list(
            {id(one): one for one in (*(way[0] for way in ways.values()), blend) if one}.values()
        )
        self._blend = blend
        self._texts, self._flights = Texts(vocabulary), Flights()
        self._wanted: dict[int, Lesson] = {}
        self._busy = 0.0  # seconds of drafting since the last lap came back
        self.rest = 0

    @property
    def free_pages(self) -> int:
        """Pages nobody owns; all of them once every sequence is closed."""
        return min(drafter.free_pages for drafter in self._drafters)

    @torch.inference_mode()
    def learn(self, batch: Features) -> None:
        """Apply one frame's openings, lessons and closings. Sequences that were missed are ignored, and so
        are those with tokens that what drafts does not have.
        """
        for opening in batch.openings:
            self._open(opening)
        self._settle(batch)
        for lesson in batch.lessons:
            if not self._knows(lesson):
                self._close(lesson.sequence)
        for sequence in self._texts.hear(batch.lessons):
            self._close(sequence)
        for drafter in self._drafters:
            drafter.hear(batch)
        for lesson in batch.lessons:
            text = self._texts.find(lesson.sequence)
            drafted = text is None or text.opening.drafted
            if drafted and lesson.step is not None and lesson.bonus is not None:
                self._wanted[lesson.sequence] = lesson
        for sequence in batch.closings:
            self._wanted.pop(sequence, None)
            self._close(sequence)

    @torch.inference_mode()
    def draft(self) -> tuple[Draft, ...]:
        """A tree for the newest state of every sequence that wants one, or none at all and a rest."""
        wanted, self._wanted, self.rest = self._wanted, {}, 0
        if not wanted:
            self._catch_up()
            return ()
        began, trees, rests = self._clock(), dict[int, Tree](), list[int]()
        for lane, texts in self._by_lane(wanted):
            levels = lane.plan(texts)
            trees |= self._grow(lane, texts, levels, wanted) if levels else {}
            rests.append(lane.rest)
        self._busy = self._clock() - began if trees else 0.0
        if not trees and all(lane.rule.adapts for lane in self.lanes.values()):
            self.rest = min(rests, default=0) or UNGROWN * len(wanted)
            return ()
        return tuple(self._draft(lesson, trees) for lesson in wanted.values())

    def _open(self, opening: Opening) -> None:
        try:
            text = self._texts.open(opening)
        except NotFound:
            return
        lane = self._lane(text)
        lane.drafter.open(text)
        if lane.blend is not None:
            lane.blend.open(text)

    def _knows(self, lesson: Lesson) -> bool:
        tokens = lesson.tokens if lesson.bonus is None else (*lesson.tokens, lesson.bonus)
        return self._ids is None or not tokens or (min(tokens) >= 0 and max(tokens) < self._ids)

    def _close(self, sequence: int) -> None:
        self._texts.close(sequence)
        self._flights.forget(sequence)
        for drafter in self._drafters:
            drafter.close(sequence)

    def _lane(self, text: Text | None) -> Lane:
        name = text.opening.drafter if text else None
        return self.lanes[name if name in self.lanes else self._default]

    def _by_lane(self, wanted: Mapping[int, Lesson]) -> Iterator[tuple[Lane, list[Text]]]:
        """The texts of those who want a tree, by the way they are drafted."""
        found = [text for text in map(self._texts.find, wanted) if text]
        for lane in self.lanes.values():
            if texts := [text for text in found if self._lane(text) is lane]:
                yield lane, texts

    def _grow(
        self, lane: Lane, texts: list[Text], levels: int, wanted: Mapping[int, Lesson]
    ) -> dict[int, Tree]:
        """Trees by sequence; what is sent is remembered until it comes back."""
        flights = lane.grow(texts, levels, self._rows)
        trees: dict[int, Tree] = {}
        for text in texts:
            if flight := flights.get(text.sequence):
                forced = wanted[text.sequence].forced
                trees[text.sequence] = tree = hang(flight.tree, forced, text, self._slots)
                self._flights.send(text.sequence, replace(flight, tree=tree, forced=forced))
        return trees

    def _draft(self, lesson: Lesson, trees: Mapping[int, Tree]) -> Draft:
        assert lesson.step is not None
        assert lesson.bonus is not None
        tree = trees.get(lesson.sequence) or lone(lesson.bonus, lesson.forced, self._slots)
        return Draft(lesson.sequence, lesson.step, tree)

    def _catch_up(self) -> None:
        """Nobody waits: what prompts left to do is done now, where it will be of use."""
        for lane in self.lanes.values():
            if lane.rule.drafting:
                lane.drafter.catch_up()

    def _settle(self, batch: Features) -> None:
        """Hear how the trees of this frame fared, before the texts move on."""
        if not batch.fed:  # it tells of no lap
            return
        lessons = [lesson for lesson in batch.lessons if lesson.step is not None and lesson.step > 1]
        if batch.rested:
            live = max(len(lessons), len(self._wanted), 1)
            for lane in self.lanes.values():
                if lane.rest:
                    lane.sleep(batch.rested, live)
        if batch.rested:
            self._tell_of_plain(batch, lessons)
            return
        trees = {lesson.sequence: self._flights.land(lesson) for lesson in lessons}
        rows = sum(tree.rows for tree in trees.values())
        if rows > batch.fed:  # some came too late and were not sent
            trees = dict.fromkeys(trees, ALONE)
        spent = Spent(batch.seconds if rows == batch.fed else 0.0, batch.wall, self._busy)
        self._busy = 0.0
        self._tell(trees, spent)

    def _tell_of_plain(self, batch: Features, lessons: Sequence[Lesson]) -> None:
        """Behind a rest a lesson is of many laps, and not everybody has one; but none of them had a tree."""
        self._busy = 0.0
        lanes = {id(lane): lane for lane in (self._lane(self._texts.find(one.sequence)) for one in lessons)}
        for lane in lanes.values():
            lane.rule.settle([ALONE] * batch.fed, Spent(batch.seconds, batch.wall))

    def _tell(self, trees: Mapping[int, Returned], spent: Spent) -> None:
        """Every lane hears of its own; what the lap took is told where all of it is one lane's."""
        laned = [(self._lane(self._texts.find(sequence)), tree) for sequence, tree in trees.items()]
        for lane in self.lanes.values():
            if mine := [tree for other, tree in laned if other is lane]:
                lane.rule.settle(mine, spent if len(mine) == len(laned) else UNKNOWN)
