"""The draft engine of one epoch: observes what was committed and drafts the trees that are wanted.

Synchronous; called by one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from specsot.core.frames import Draft, FeatureBatch, Features, Opening, TreeSegment
from specsot.core.tree import Tree, single
from specsot.core.verdict import UnreadTrees, UnreadVerdict
from specsot.core.vocabulary import Vocabulary
from specsot.errors import NotFound
from specsot.members import Configuration
from specsot.params import DrafterName
from specsot_drafter.core.budget import ROOT_ONLY, UNKNOWN_SECONDS, BudgetPolicy, LapSeconds, TreeOutcome
from specsot_drafter.core.selection import graft
from specsot_drafter.core.sequences import DraftSequence, DraftSequences
from specsot_drafter.proposers import Proposer
from specsot_drafter.speculator import IDLE_REST_LAPS, Clock, Growth, PendingTree, Speculator

Proposers = Mapping[DrafterName, tuple[Proposer, BudgetPolicy]]


class DraftEngine:
    """Follows every sequence it saw open; those it missed get their root back as a tree.

    `observe` is bookkeeping, `begin` and `finish` compute: call them after the last `observe` of a burst,
    whether or not a tree is wanted; between them nothing is observed, but a device may be at it. rest:
    instead of trees, for how many of them nothing will be drafted, because it does not pay now. The ring
    then turns without us, and tells what we missed when it is over; nobody waits while that is caught up
    with. awake: that is done, and trees may be asked for.
    """

    def __init__(
        self,
        proposers: Proposers,
        configuration: Configuration,
        vocabulary: Vocabulary | None = None,
        blend: Proposer | None = None,
        clock: Clock = time.perf_counter,
        ids: int | None = None,
    ) -> None:
        """proposers: the first is for sequences that name none. blend: its candidates may join other trees.

        vocabulary: to follow grammars with; without it all text counts as free.
        ids: how many token ids all that drafts can be fed; None: they are not checked.
        """
        self._ids = ids
        self._rows = configuration.rows
        self._slots = configuration.shape.slots
        self._clock = clock
        self.speculators = {
            name: Speculator(drafter, rule, None if drafter is blend else blend, clock)
            for name, (drafter, rule) in proposers.items()
        }
        self._default = next(iter(self.speculators))
        used = (*(way[0] for way in proposers.values()), blend)
        self._proposers = list({id(one): one for one in used if one}.values())
        self._sequences = DraftSequences(vocabulary)
        self._lanes = dict[int, Speculator]()
        self._pending: dict[int, PendingTree] = {}  # by sequence the tree that was sent last
        self._wanted: dict[int, FeatureBatch] = {}
        self._begun: Mapping[int, FeatureBatch] = {}  # by sequence: trees grow for these
        self._growing: list[tuple[Speculator, list[DraftSequence], Growth | None]] = []
        self._growing_seconds = 0.0  # of growing, since the last lap came back
        self._woken = False  # a rest is over, and nothing was said since
        # True while other drafters draft for other sequences, which a pause of the whole ring would stop.
        self._must_answer = False
        self.rest = 0
        self.awake = False

    @property
    def free_pages(self) -> int:
        """Pages nobody owns; all of them once every sequence is closed."""
        return min(drafter.free_pages for drafter in self._proposers)

    @torch.inference_mode()
    def observe(self, batch: Features) -> None:
        """Apply one frame's openings, lessons and closings. Sequences that were missed are ignored, and so
        are those with tokens that what drafts does not have.
        """
        self._must_answer = batch.must_answer
        for opening in batch.openings:
            self._open(opening)
        self._record_outcomes(batch)
        for lesson in batch.lessons if self._ids is not None else ():
            if not self._valid_ids(lesson):
                self._close(lesson.sequence)
        for sequence in self._sequences.observe(batch.lessons):
            self._close(sequence)
        for drafter in self._proposers:
            drafter.observe(batch)
        for lesson in batch.lessons:
            known = self._sequences.find(lesson.sequence)
            drafted = known is None or known.opening.drafted
            if drafted and lesson.step is not None and lesson.bonus is not None:
                self._wanted[lesson.sequence] = lesson
        for sequence in batch.closings:
            self._wanted.pop(sequence, None)
            self._close(sequence)

    @torch.inference_mode()
    def begin_early(self, verdict: UnreadVerdict) -> None:
        """Begin what `begin` would behind these trees, if all are drafted in one way. Lessons will tell."""
        if lane := self._lane_of(verdict.trees):
            lane.begin_early(verdict, 2**31 - 1 if self._ids is None else self._ids)

    def choose_early(self, verified: Sequence[TreeSegment]) -> UnreadTrees | None:
        """See `NearDrafter`."""
        trees = [one for one in verified if one.step > 1]  # others have just written their first token
        lane = self._lane_of(trees)
        found = self._sequences.find
        texts = [(text, one.committed) for one in trees if (text := found(one.sequence))]
        return lane.choose_early(texts, self._rows - len(verified) + len(trees)) if lane else None

    def _lane_of(self, trees: Sequence[TreeSegment]) -> Speculator | None:
        """Where all these texts are known, and drafted in one way."""
        lanes = [self._lanes.get(tree.sequence) for tree in trees]
        return lanes[0] if lanes and all(lane is lanes[0] for lane in lanes) else None

    @torch.inference_mode()
    def begin(self) -> int:
        """Launch what can be launched of trees. Returns how many rows must be computed before they grow."""
        self._begun = self._wanted
        self._wanted = {}
        self.rest = 0
        self.awake = self._woken
        self._woken = False
        if self.awake and not self._begun and not self._must_answer:
            self.rest = min(lane.rest for lane in self.speculators.values())
        self._growing = []
        self._growing_seconds = 0.0
        for speculator, texts in self._by_speculator(self._begun):
            levels = speculator.plan_levels(texts, self._sequences.drafted)
            self._growing.append((speculator, texts, speculator.begin(levels) if levels else None))
        return sum(growth.due for *_, growth in self._growing if growth)

    @torch.inference_mode()
    def finish(self) -> tuple[Draft, ...]:
        """A tree for the newest state of every sequence that wants one, or none at all and a rest. Where
        other drafters are present, roots alone instead of a rest.
        """
        wanted = self._begun
        self._begun = {}
        if not wanted:
            self._catch_up()
            return ()
        trees = dict[int, Tree]()
        for speculator, texts, growth in self._growing:
            trees |= self._grow(speculator, texts, growth, wanted) if growth else {}
        adaptive = all(lane.budget.adaptive for lane in self.speculators.values())
        if not trees and adaptive and not self._must_answer:
            rests = [speculator.rest for speculator, _, _ in self._growing]
            self.rest = min(rests, default=0) or IDLE_REST_LAPS * len(wanted)
            return ()
        return tuple(self._draft(lesson, trees) for lesson in wanted.values())

    def _open(self, opening: Opening) -> None:
        try:
            opened = self._sequences.open(opening)
        except NotFound:
            return
        self._lanes[opened.id] = speculator = self._speculator(opening)
        speculator.proposer.open(opened)
        if speculator.blend is not None:
            speculator.blend.open(opened)

    def _valid_ids(self, lesson: FeatureBatch) -> bool:
        tokens = lesson.tokens if lesson.bonus is None else (*lesson.tokens, lesson.bonus)
        return self._ids is None or not tokens or (min(tokens) >= 0 and max(tokens) < self._ids)

    def _close(self, sequence: int) -> None:
        self._sequences.close(sequence)
        self._lanes.pop(sequence, None)
        self._pending.pop(sequence, None)
        for drafter in self._proposers:
            drafter.close(sequence)

    def _speculator(self, opening: Opening) -> Speculator:
        name = opening.drafter
        return self.speculators[name if name in self.speculators else self._default]

    def _by_speculator(
        self, wanted: Mapping[int, FeatureBatch]
    ) -> Iterator[tuple[Speculator, list[DraftSequence]]]:
        """The texts of those who want a tree, by the way they are drafted."""
        found = [text for text in map(self._sequences.find, wanted) if text]
        lanes = self._lanes
        for lane in self.speculators.values():
            if texts := [text for text in found if lanes[text.id] is lane]:
                yield lane, texts

    def _grow(
        self,
        speculator: Speculator,
        sequences: list[DraftSequence],
        growth: Growth,
        wanted: Mapping[int, FeatureBatch],
    ) -> dict[int, Tree]:
        """Trees by sequence; what is sent is remembered until it comes back."""
        pending = speculator.finish(growth, self._rows - (len(sequences) - len(growth.texts)))
        self._growing_seconds += speculator.growing_seconds
        trees: dict[int, Tree] = {}
        for text in sequences:
            if flight := pending.get(text.id):
                if forced := wanted[text.id].forced:
                    room = max(min(text.remaining - 1, self._slots - len(flight.tree)), 0)
                    flight = flight._replace(tree=graft(flight.tree, forced[:room]), forced=forced)
                trees[text.id], self._pending[text.id] = flight.tree, flight
        return trees

    def _draft(self, lesson: FeatureBatch, trees: Mapping[int, Tree]) -> Draft:
        assert lesson.step is not None
        assert lesson.bonus is not None
        if (tree := trees.get(lesson.sequence)) is None:
            tree = graft(single(lesson.bonus), lesson.forced[: self._slots - 1])
        return Draft(lesson.sequence, lesson.step, tree)

    def _catch_up(self) -> None:
        """Nobody waits: what prompts left to do is done now, where it will be of use."""
        for lane in self.speculators.values():
            if lane.budget.drafting or (self.awake and not lane.rest):
                lane.proposer.catch_up()

    def _record_outcomes(self, batch: Features) -> None:
        """Hear how the trees of this frame fared, before the texts move on."""
        if not batch.fed:  # it tells of no lap
            return
        lessons = [lesson for lesson in batch.lessons if lesson.step is not None and lesson.step > 1]
        if batch.rested:
            self._woken, live = True, max(self._sequences.drafted, 1)
            for lane in [one for one in self.speculators.values() if one.rest]:
                lane.record_rest(batch.rested, live)
            self._record_plain_laps(batch, lessons)
            return
        trees = {lesson.sequence: self._resolve(lesson) for lesson in lessons}
        rows = sum(tree.rows for tree in trees.values())
        if rows > batch.fed:  # some came too late, or were cut
            trees = dict.fromkeys(trees, ROOT_ONLY)
        took = (batch.seconds, batch.wall, self._growing_seconds)
        self._growing_seconds = 0.0
        spent = LapSeconds(*took) if rows == batch.fed else UNKNOWN_SECONDS
        self._record_laps(trees, spent)

    def _resolve(self, lesson: FeatureBatch) -> TreeOutcome:
        pending = self._pending.pop(lesson.sequence, None)
        return pending.resolve(lesson) if pending else ROOT_ONLY

    def _record_plain_laps(self, batch: Features, lessons: Sequence[FeatureBatch]) -> None:
        """Behind a rest a lesson is of many laps, and not everybody has one; but none of them had a tree."""
        self._growing_seconds = 0.0
        default = self.speculators[self._default]
        told = (self._lanes.get(one.sequence, default) for one in lessons)
        lanes = {id(lane): lane for lane in told}
        for lane in lanes.values():
            lane.record_lap([ROOT_ONLY] * batch.fed, LapSeconds(batch.seconds, batch.wall))

    def _record_laps(self, trees: Mapping[int, TreeOutcome], spent: LapSeconds) -> None:
        """Every lane hears of its own; what the lap took is told where all of it is one lane's."""
        lanes = self._lanes
        default = self.speculators[self._default]
        laned = [(lanes.get(sequence, default), tree) for sequence, tree in trees.items()]
        for lane in self.speculators.values():
            if mine := [tree for other, tree in laned if other is lane]:
                lane.record_lap(mine, spent if len(mine) == len(laned) else UNKNOWN_SECONDS)
