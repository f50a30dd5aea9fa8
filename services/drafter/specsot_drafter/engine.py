"""The draft engine of one epoch: observes committed tokens and drafts the requested trees.

The engine is synchronous; only one thread may call it at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from specsot.core.device_verification import DeviceTrees, DeviceVerification
from specsot.core.frames import Draft, FeatureBatch, Features, Opening, TreeSegment
from specsot.core.tree import Tree, single
from specsot.core.vocabulary import Vocabulary
from specsot.errors import NotFound
from specsot.members import Configuration
from specsot.params import DrafterName
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.budget import ROOT_ONLY, UNKNOWN_SECONDS, BudgetPolicy, StepSeconds, TreeOutcome
from specsot_drafter.core.selection import graft
from specsot_drafter.core.sequences import DraftSequence, DraftSequences
from specsot_drafter.proposers import Proposer
from specsot_drafter.speculator import IDLE_REST_STEPS, Clock, Growth, PendingTree, Speculator

# Token ids. The bound of a kernel's token ids where a proposer names none: the largest int32.
MAX_IDS = 2**31 - 1

Proposers = Mapping[DrafterName, tuple[Proposer, BudgetPolicy]]


class DraftEngine:
    """Drafts for every sequence whose opening it observed; any other sequence gets a tree of its root only.

    Call `observe` for every feature batch that has arrived, then `begin` and `finish` once, whether or not a
    tree is requested. `observe` does bookkeeping; `begin` launches the computation of trees and `finish`
    returns them. Between `begin` and `finish` nothing may be observed, since a device may be computing.

    If drafting is not profitable, `finish` returns no trees and sets `rest`. The ring then runs without the
    drafter. When the pause is over, the last stage sends what the drafter missed, and no step waits for
    drafts until the drafter has caught up.

    rest:  Number of trees for which drafting is paused; 0 if it is not paused.
    awake: True if a pause has ended and the drafter has caught up, so that trees may be requested again.
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
        """Create the engine without sequences.

        proposers: each proposer with its policy, by name. The first one drafts for sequences that name none.
        configuration: gives the row budget of a frame and the tree slots of a sequence.
        vocabulary: token bytes, to follow grammars with; None: no sequence counts as constrained.
        blend: a second proposer whose candidates may join the trees of the others.
        clock: returns seconds; times the growth of trees.
        ids: the number of token ids that every proposer can embed. A sequence with a higher id is no longer
        drafted for. None: ids are not checked.
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
        # The speculator that drafts for each sequence, by sequence id.
        self._lanes = dict[int, Speculator]()
        # The tree that was sent last and is not verified yet, by sequence id.
        self._pending: dict[int, PendingTree] = {}
        # The newest feature batch of each sequence that requests a tree, until `begin`.
        self._wanted: dict[int, FeatureBatch] = {}
        # The feature batches whose trees are growing, between `begin` and `finish`.
        self._begun: Mapping[int, FeatureBatch] = {}
        self._growing: list[tuple[Speculator, list[DraftSequence], Growth | None]] = []
        # Seconds that growing the last trees took, until the step that verifies them is recorded.
        self._growing_seconds = 0.0
        # True after a pause has ended, until the next `begin`.
        self._woken = False
        # True while other drafters draft for other sequences, which a pause of the whole ring would stop.
        self._must_answer = False
        self.paused_trees = 0
        self.awake = False

    @property
    def free_pages(self) -> int:
        """Return the free KV pages of the proposer that has the fewest; all are free without sequences."""
        return min(drafter.free_pages for drafter in self._proposers)

    @torch.inference_mode()
    def observe(self, batch: Features) -> None:
        """Apply one frame's openings, feature batches and closings, in this order.

        Batches of unknown sequences are ignored. A sequence is dropped if a batch of it was missed, or if it
        has a token id that the proposers cannot embed.
        Raises WireError if the feature rows do not have the shape that the batches imply.
        """
        self._must_answer = batch.must_answer
        for opening in batch.openings:
            self._open(opening)
        self._record_outcomes(batch)
        for feature_batch in batch.feature_batches if self._ids is not None else ():
            if not self._valid_ids(feature_batch):
                self._close(feature_batch.sequence)
        for sequence in self._sequences.observe(batch.feature_batches):
            self._close(sequence)
        for drafter in self._proposers:
            drafter.observe(batch)
        for feature_batch in batch.feature_batches:
            known = self._sequences.find(feature_batch.sequence)
            drafted = known is None or known.opening.drafted
            if drafted and feature_batch.draft_round is not None and feature_batch.bonus is not None:
                self._wanted[feature_batch.sequence] = feature_batch
        for sequence in batch.closings:
            self._wanted.pop(sequence, None)
            self._close(sequence)

    @torch.inference_mode()
    def start_growth(self, verification: DeviceVerification) -> AsyncGrowth | None:
        """Start growing the next trees before the host has read the verification result of these trees.

        Return None, and grow nothing, unless one speculator drafts for all sequences of the frame. The
        feature batches that follow decide whether the growth can be used.
        """
        lane = self._lane_of(verification.trees)
        ids = MAX_IDS if self._ids is None else self._ids
        return lane.start_growth(verification, ids) if lane else None

    def select(self, verified: Sequence[TreeSegment]) -> DeviceTrees | None:
        """Let the device select the trees that are growing; see `DraftHandle.select`. Return None if it
        cannot.
        """
        # Sequences whose first draft round is next have no tree that is growing; each takes one root row.
        trees = [one for one in verified if one.draft_round > 1]
        lane = self._lane_of(trees)
        found = self._sequences.find
        sequences = [(sequence, one.committed) for one in trees if (sequence := found(one.sequence))]
        return lane.select(sequences, self._rows - len(verified) + len(trees)) if lane else None

    def _lane_of(self, trees: Sequence[TreeSegment]) -> Speculator | None:
        """Return the speculator of these sequences; None if one is unknown or they have different ones."""
        lanes = [self._lanes.get(tree.sequence) for tree in trees]
        return lanes[0] if lanes and all(lane is lanes[0] for lane in lanes) else None

    @torch.inference_mode()
    def begin(self) -> int:
        """Launch the growth of the requested trees.

        Return the number of rows of committed tokens that must be computed before the trees can grow.
        """
        self._begun = self._wanted
        self._wanted = {}
        self.paused_trees = 0
        self.awake = self._woken
        self._woken = False
        if self.awake and not self._begun and not self._must_answer:
            self.paused_trees = min(lane.paused_trees for lane in self.speculators.values())
        self._growing = []
        self._growing_seconds = 0.0
        for speculator, sequences in self._by_speculator(self._begun):
            levels = speculator.plan_levels(sequences, self._sequences.drafted)
            self._growing.append((speculator, sequences, speculator.begin(levels) if levels else None))
        return sum(growth.due for *_, growth in self._growing if growth)

    @torch.inference_mode()
    def finish(self) -> tuple[Draft, ...]:
        """Return a tree for every sequence that requested one in the batches before `begin`.

        A sequence for which nothing was grown gets its root and its forced tokens. If no sequence has a grown
        tree and every policy may pause, return nothing and set `rest`; but where other drafters serve the
        same ring, return the roots instead of pausing.
        """
        wanted = self._begun
        self._begun = {}
        if not wanted:
            self._catch_up()
            return ()
        trees = dict[int, Tree]()
        for speculator, sequences, growth in self._growing:
            trees |= self._grow(speculator, sequences, growth, wanted) if growth else {}
        adaptive = all(lane.budget.adaptive for lane in self.speculators.values())
        if not trees and adaptive and not self._must_answer:
            rests = [speculator.paused_trees for speculator, _, _ in self._growing]
            self.paused_trees = min(rests, default=0) or IDLE_REST_STEPS * len(wanted)
            return ()
        return tuple(self._draft(feature_batch, trees) for feature_batch in wanted.values())

    def _open(self, opening: Opening) -> None:
        """Follow a new sequence; ignore a fork whose source is not known up to the fork."""
        try:
            opened = self._sequences.open(opening)
        except NotFound:
            return
        self._lanes[opened.id] = speculator = self._speculator(opening)
        speculator.proposer.open(opened)
        if speculator.blend is not None:
            speculator.blend.open(opened)

    def _valid_ids(self, feature_batch: FeatureBatch) -> bool:
        """Return whether the proposers can embed all token ids of the batch."""
        tokens = (
            feature_batch.tokens
            if feature_batch.bonus is None
            else (*feature_batch.tokens, feature_batch.bonus)
        )
        return self._ids is None or not tokens or (min(tokens) >= 0 and max(tokens) < self._ids)

    def _close(self, sequence: int) -> None:
        """Forget a sequence in the engine and in all proposers; unknown ones are ignored."""
        self._sequences.close(sequence)
        self._lanes.pop(sequence, None)
        self._pending.pop(sequence, None)
        for drafter in self._proposers:
            drafter.close(sequence)

    def _speculator(self, opening: Opening) -> Speculator:
        """Return the speculator that drafts for a sequence: the one that its opening names, or the first."""
        name = opening.drafter
        return self.speculators[name if name in self.speculators else self._default]

    def _by_speculator(
        self, wanted: Mapping[int, FeatureBatch]
    ) -> Iterator[tuple[Speculator, list[DraftSequence]]]:
        """Yield each speculator that has requested trees, with the sequences that it drafts for."""
        found = [sequence for sequence in map(self._sequences.find, wanted) if sequence]
        lanes = self._lanes
        for lane in self.speculators.values():
            if sequences := [sequence for sequence in found if lanes[sequence.id] is lane]:
                yield lane, sequences

    def _grow(
        self,
        speculator: Speculator,
        sequences: list[DraftSequence],
        growth: Growth,
        wanted: Mapping[int, FeatureBatch],
    ) -> dict[int, Tree]:
        """Return the grown trees by sequence id, with forced tokens added.

        Each tree is kept in `_pending` until its verification result arrives.
        """
        pending = speculator.finish(growth, self._rows - (len(sequences) - len(growth.sequences)))
        self._growing_seconds += speculator.growing_seconds
        trees: dict[int, Tree] = {}
        for sequence in sequences:
            if flight := pending.get(sequence.id):
                if forced := wanted[sequence.id].forced:
                    room = max(min(sequence.remaining - 1, self._slots - len(flight.tree)), 0)
                    flight = flight._replace(tree=graft(flight.tree, forced[:room]), forced=forced)
                trees[sequence.id], self._pending[sequence.id] = flight.tree, flight
        return trees

    def _draft(self, feature_batch: FeatureBatch, trees: Mapping[int, Tree]) -> Draft:
        """Return the answer to a request: its grown tree, or its root and as many forced tokens as fit."""
        assert feature_batch.draft_round is not None
        assert feature_batch.bonus is not None
        if (tree := trees.get(feature_batch.sequence)) is None:
            tree = graft(single(feature_batch.bonus), feature_batch.forced[: self._slots - 1])
        return Draft(feature_batch.sequence, feature_batch.draft_round, tree)

    def _catch_up(self) -> None:
        """Compute outstanding rows of prompts, since no sequence waits for a tree.

        Speculators that are paused are left out, because their rows may never be needed.
        """
        for lane in self.speculators.values():
            if lane.budget.drafting or (self.awake and not lane.paused_trees):
                lane.proposer.catch_up()

    def _record_outcomes(self, batch: Features) -> None:
        """Record the verification results of this frame's trees; must run before the sequences advance."""
        # Without rows the message describes no step, for example because it only closes sequences.
        if not batch.fed:
            return
        # In draft round 1 there is no tree to verify: the prompt has just been processed.
        feature_batches = [
            feature_batch
            for feature_batch in batch.feature_batches
            if feature_batch.draft_round is not None and feature_batch.draft_round > 1
        ]
        if batch.paused_trees:
            self._woken, live = True, max(self._sequences.drafted, 1)
            for lane in [one for one in self.speculators.values() if one.paused_trees]:
                lane.record_pause(batch.paused_trees, live)
            self._record_plain_steps(batch, feature_batches)
            return
        trees = {feature_batch.sequence: self._resolve(feature_batch) for feature_batch in feature_batches}
        rows = sum(tree.rows for tree in trees.values())
        # If the frame had fewer rows than the trees, some trees arrived too late or were truncated. It is
        # unknown which, so that no outcome can be learned from.
        if rows > batch.fed:
            trees = dict.fromkeys(trees, ROOT_ONLY)
        took = (batch.seconds, batch.wall, self._growing_seconds)
        self._growing_seconds = 0.0
        spent = StepSeconds(*took) if rows == batch.fed else UNKNOWN_SECONDS
        self._record_steps(trees, spent)

    def _resolve(self, feature_batch: FeatureBatch) -> TreeOutcome:
        """Return the outcome of the tree that was sent for this sequence, and forget the tree."""
        pending = self._pending.pop(feature_batch.sequence, None)
        return pending.resolve(feature_batch) if pending else ROOT_ONLY

    def _record_plain_steps(self, batch: Features, feature_batches: Sequence[FeatureBatch]) -> None:
        """Record the newest step of a pause, in which no sequence had a tree.

        After a pause a feature batch covers many steps, and not every sequence has one. So the number of
        sequences is taken from the rows of the newest frame.
        """
        self._growing_seconds = 0.0
        default = self.speculators[self._default]
        told = (self._lanes.get(one.sequence, default) for one in feature_batches)
        lanes = {id(lane): lane for lane in told}
        for lane in lanes.values():
            lane.record_step([ROOT_ONLY] * batch.fed, StepSeconds(batch.seconds, batch.wall))

    def _record_steps(self, trees: Mapping[int, TreeOutcome], spent: StepSeconds) -> None:
        """Record the outcomes with the speculator of each sequence.

        The duration of the step is passed on only if all trees belong to one speculator, since it cannot be
        divided between several.
        """
        lanes = self._lanes
        default = self.speculators[self._default]
        laned = [(lanes.get(sequence, default), tree) for sequence, tree in trees.items()]
        for lane in self.speculators.values():
            if mine := [tree for other, tree in laned if other is lane]:
                lane.record_step(mine, spent if len(mine) == len(laned) else UNKNOWN_SECONDS)
