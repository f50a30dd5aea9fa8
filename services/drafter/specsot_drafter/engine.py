"""The draft engine of one epoch: observes committed tokens and drafts the requested trees.

The engine is synchronous; only one thread may call it at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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
from specsot_drafter.speculator import IDLE_PAUSE_STEPS, Clock, Growth, PendingTree, Speculator
from specsot_kernels.device_waits import waited_seconds
from specsot_model.inference import inference_mode

# Token ids. The bound of a kernel's token ids where a proposer names none: the largest int32.
MAX_IDS = 2**31 - 1

Proposers = Mapping[DrafterName, tuple[Proposer, BudgetPolicy]]


class DraftEngine:
    """Engine of one epoch that drafts for every sequence whose opening it observed; any other sequence gets a
    tree of its root only.

    Call `observe` for every message of features that has arrived, then `begin` and `finish` once, whether or
    not a tree is requested. `observe` does bookkeeping; `begin` launches the computation of trees and
    `finish` returns them. Between `begin` and `finish` nothing may be observed, since a device may be
    computing.

    If drafting is not profitable, `finish` returns no trees and sets `paused_trees`. The ring then runs
    without the drafter. When the pause is over, the last stage sends what the drafter missed, and no step
    waits for drafts until the drafter has caught up:

        paused     `finish` has set `paused_trees`, and the ring sends no features
        resumed    a message with `paused_trees` has arrived: what was missed during the pause (`_resumed`)
        awake      `begin` has turned `_resumed` into `awake`; outstanding rows are computed
        drafting   feature batches ask for trees again; if it is still not profitable, the next pause begins

    speculators: The ways to draft, by name of the drafter; each has a proposer and a policy.
    paused_trees: Number of trees for which drafting is paused; 0 if it is not paused.
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

        proposers: Each proposer with its policy, by name. The first one drafts for sequences that name none.
        configuration: The epoch as the master has configured it; gives the token budget of a frame and the
            tree slots of a sequence.
        vocabulary: Bytes of each token, to follow grammars with. None: no sequence counts as constrained.
        blend: A second proposer whose candidates may join the trees of the others. None: there is none.
        clock: Returns the time in seconds; times the growth of trees.
        ids: Number of token ids that every proposer can embed. A sequence with a higher id is no longer
            drafted for. None: ids are not checked.

        The blend is not blended with itself. Proposers are listed once, even if several speculators use
        them.
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
        used = (*(proposer for proposer, _ in proposers.values()), blend)
        self._proposers = list({id(one): one for one in used if one}.values())
        self._sequences = DraftSequences(vocabulary)
        # The speculator that drafts for each sequence, by sequence id.
        self._speculator_by_id = dict[int, Speculator]()
        # The tree that was sent last and is not verified yet, by sequence id.
        self._pending: dict[int, PendingTree] = {}
        # The newest feature batch of each sequence that requests a tree, until `begin`.
        self._requested: dict[int, FeatureBatch] = {}
        # The feature batches whose trees are growing, between `begin` and `finish`.
        self._growing_batches: Mapping[int, FeatureBatch] = {}
        self._growing: list[tuple[Speculator, list[DraftSequence], Growth | None]] = []
        # Seconds that growing the last trees took, until the step that verifies these trees is recorded.
        self._growing_seconds = 0.0
        # Whether the trees that grew last grew asynchronously. With several speculators, the last one counts.
        self._overlapped = False
        # The value of `waited_seconds` when the last step outside of a pause was recorded.
        self._waited_before = 0.0
        # True after a pause has ended, until the next `begin`.
        self._resumed = False
        # True while other drafters draft for other sequences, which a pause of the whole ring would stop.
        self._must_answer = False
        self.paused_trees = 0
        self.awake = False

    @property
    def free_pages(self) -> int:
        """The number of free KV pages of the proposer that has the fewest; all pages are free without
        sequences.
        """
        return min(drafter.free_pages for drafter in self._proposers)

    @inference_mode
    def observe(self, batch: Features) -> None:
        """Apply one message of the last stage: its openings, feature batches and closings, in this order.

        batch: The message: what one frame opened, committed and closed, with the features of the committed
            tokens.

        Batches of unknown sequences are ignored. A sequence is dropped if a batch of it was missed, or if it
        has a token id that the proposers cannot embed. Raises WireError if the feature rows do not have the
        shape that the batches imply.

        A tree is requested by each batch with a draft round and a bonus token, unless its sequence is not to
        be drafted; a later batch of the same sequence replaces the request. A closed sequence requests none.
        """
        self._must_answer = batch.must_answer
        for opening in batch.openings:
            self._open(opening)
        self._record_outcomes(batch)
        # One look at the ids of all batches takes much less time than a look at those of each batch.
        for feature_batch in () if self._valid_ids(batch.feature_batches) else batch.feature_batches:
            if not self._valid_ids((feature_batch,)):
                self._close(feature_batch.sequence)
        for sequence in self._sequences.observe(batch.feature_batches):
            self._close(sequence)
        for drafter in self._proposers:
            drafter.observe(batch)
        find = self._sequences.find
        self._requested |= {
            one.sequence: one
            for one in batch.feature_batches
            if one.draft_round is not None
            and one.bonus is not None
            and ((known := find(one.sequence)) is None or known.opening.drafted)
        }
        for sequence in batch.closings:
            self._requested.pop(sequence, None)
            self._close(sequence)

    @inference_mode
    def start_growth(self, verification: DeviceVerification) -> AsyncGrowth | None:
        """Start growing the next trees before the host has read the verification result of the current ones.
        Return the growth, which `begin` continues or discards.

        verification: The trees that the device is verifying, and where their results will be on the device.

        Return None, and grow nothing, unless one speculator drafts for all sequences of the frame. The
        feature batches that follow decide whether the growth can be used.
        """
        speculator = self._common_speculator(verification.trees)
        ids = MAX_IDS if self._ids is None else self._ids
        return speculator.start_growth(verification, ids) if speculator else None

    def select(self, verified: Sequence[TreeSegment]) -> DeviceTrees | None:
        """Let the device select the trees that are growing, and return the selected trees, which the host has
        not read; see `DraftHandle.select`. Return None if the device cannot select, or if no single
        speculator drafts for all sequences, so that the host must select.

        verified: The next tree segments of all sequences that continue; each tree is its root only.

        A speculator may also fail to select; then the result is None.
        """
        # Sequences whose first draft round is next have no tree that is growing; each takes one root row.
        trees = [one for one in verified if one.draft_round > 1]
        speculator = self._common_speculator(trees)
        found = self._sequences.find
        sequences = [(sequence, one.committed) for one in trees if (sequence := found(one.sequence))]
        return speculator.select(sequences, self._rows - len(verified) + len(trees)) if speculator else None

    def _common_speculator(self, trees: Sequence[TreeSegment]) -> Speculator | None:
        """Return the speculator that drafts for all sequences of these segments. Return None if a sequence is
        unknown, if two sequences have different speculators, or if there are no segments.

        trees: Tree segments of a frame.
        """
        find = self._speculator_by_id.get
        first = find(trees[0].sequence) if trees else None
        return None if [tree for tree in trees if find(tree.sequence) is not first] else first

    @inference_mode
    def begin(self) -> int:
        """Launch the growth of the requested trees. Return the number of rows of committed tokens that must
        be computed before the trees can grow; 0 if nothing grows.

        The requests are used up. `awake` becomes True if a pause has just ended, else False. If a pause has
        ended but no tree is requested, and no other drafter serves the ring, `paused_trees` is the smallest
        number of the speculators. Speculators that may grow no levels grow nothing.
        """
        self._growing_batches = self._requested
        self._requested = {}
        self.paused_trees = 0
        self.awake = self._resumed
        self._resumed = False
        if self.awake and not self._growing_batches and not self._must_answer:
            self.paused_trees = min(speculator.paused_trees for speculator in self.speculators.values())
        self._growing = []
        self._growing_seconds = 0.0
        for speculator, sequences in self._by_speculator(self._growing_batches):
            levels = speculator.plan_levels(sequences, self._sequences.drafted)
            self._growing.append((speculator, sequences, speculator.begin(levels) if levels else None))
        return sum(growth.due for *_, growth in self._growing if growth)

    @inference_mode
    def finish(self) -> tuple[Draft, ...]:
        """Return a tree for every sequence that requested one in the batches before `begin`. Return () if
        none did.

        A sequence for which nothing was grown gets its root and its forced tokens. If no sequence has a grown
        tree and every policy may pause, return () and set `paused_trees`; but where other drafters serve the
        same ring, return the roots instead of pausing.

        The pause is as long as the shortest one that a speculator asks for, or IDLE_PAUSE_STEPS steps if none
        asks. If no tree was requested, outstanding rows of prompts are computed.
        """
        wanted = self._growing_batches
        self._growing_batches = {}
        if not wanted:
            self._catch_up()
            return ()
        trees = dict[int, PendingTree]()
        for speculator, sequences, growth in self._growing:
            trees |= self._grow(speculator, sequences, growth, wanted) if growth else {}
        self._pending |= trees
        if not (trees or self._must_answer) and all(one.budget.adaptive for one in self.speculators.values()):
            pauses = [speculator.paused_trees for speculator, _, _ in self._growing]
            self.paused_trees = min(pauses, default=0) or IDLE_PAUSE_STEPS * len(wanted)
            return ()
        drafts = list[Draft]()
        for sequence, request in wanted.items():
            assert request.draft_round is not None
            grown = trees.get(sequence)
            tree = grown.tree if grown else self._root(request)
            drafts.append(Draft(sequence, request.draft_round, tree))
        return tuple(drafts)

    def _open(self, opening: Opening) -> None:
        """Follow a new sequence from now on. Nothing happens for a fork whose source is not known up to the
        fork: it stays unknown.

        opening: What every stage knows about the sequence.

        The sequence is opened in its speculator's proposer, and in the blended proposer if there is one.
        """
        try:
            opened = self._sequences.open(opening)
        except NotFound:
            return
        self._speculator_by_id[opened.id] = speculator = self._speculator(opening)
        speculator.proposer.open(opened)
        if speculator.blend is not None:
            speculator.blend.open(opened)

    def _valid_ids(self, feature_batches: Sequence[FeatureBatch]) -> bool:
        """Return whether the proposers can embed all token ids of some batches, bonus tokens included. Return
        True if ids are not checked, or if there are no tokens, and False if an id is out of range.

        feature_batches: Committed tokens, a batch for each sequence.
        """
        if self._ids is None:
            return True
        tokens = [token for one in feature_batches for token in one.tokens]
        tokens += [one.bonus for one in feature_batches if one.bonus is not None]
        return not tokens or (min(tokens) >= 0 and max(tokens) < self._ids)

    def _close(self, sequence: int) -> None:
        """Forget a sequence in the engine and in all proposers. An unknown sequence is ignored.

        sequence: Id of the sequence.

        A tree that was sent for the sequence is forgotten as well.
        """
        self._sequences.close(sequence)
        self._speculator_by_id.pop(sequence, None)
        self._pending.pop(sequence, None)
        for drafter in self._proposers:
            drafter.close(sequence)

    def _speculator(self, opening: Opening) -> Speculator:
        """Return the speculator that drafts for a sequence: the one that its opening names, or the first if
        the opening names none or an unknown one.

        opening: What every stage knows about the sequence.
        """
        name = opening.drafter
        return self.speculators[name if name in self.speculators else self._default]

    def _by_speculator(
        self, requests: Mapping[int, FeatureBatch]
    ) -> Iterator[tuple[Speculator, list[DraftSequence]]]:
        """Yield each speculator that has requested trees, with the sequences that it drafts for. Unknown
        sequences are left out. Nothing is yielded without requests.

        requests: The newest feature batch of each sequence that requests a tree, by sequence id.

        Speculators without a requested tree are skipped.
        """
        sequences = [*map(self._sequences.find, requests)]
        owners = [*map(self._speculator_by_id.get, requests)]
        for speculator in self.speculators.values():
            if own := [one for one, owner in zip(sequences, owners) if one and owner is speculator]:
                yield speculator, own

    def _grow(
        self,
        speculator: Speculator,
        sequences: list[DraftSequence],
        growth: Growth,
        requests: Mapping[int, FeatureBatch],
    ) -> dict[int, PendingTree]:
        """Wait for the trees of one speculator, and return them by sequence id, with forced tokens added.
        Sequences for which no tree was grown are left out. Return {} if no tree was grown at all.

        speculator: The speculator that has launched the growth.
        sequences: All sequences for which the speculator was asked for trees.
        growth: The growing trees, from `Speculator.begin`.
        requests: The feature batches that request the trees, by sequence id.

        At most as many forced tokens are added as the sequence may still generate before its last token, and
        as the tree has slots left. For the step that verifies the trees, the seconds of growth are added up,
        and `_overlapped` records whether the trees grew asynchronously.
        """
        pending = speculator.finish(growth, self._rows - (len(sequences) - len(growth.sequences)))
        self._growing_seconds += speculator.growing_seconds
        self._overlapped = growth.overlapped
        for sequence in growth.sequences:
            if (forced := requests[sequence.id].forced) and (grown := pending.get(sequence.id)):
                max_forced = max(min(sequence.remaining - 1, self._slots - len(grown.tree)), 0)
                tree = graft(grown.tree, forced[:max_forced])
                pending[sequence.id] = replace(grown, tree=tree, forced=forced)
        return pending

    def _root(self, feature_batch: FeatureBatch) -> Tree:
        """Return the tree that answers a request for which no tree was grown: the root and, below it, as many
        forced tokens as fit, which is one less than the number of tree slots.

        feature_batch: The request. It must have a bonus token, which is the root.
        """
        assert feature_batch.bonus is not None
        return graft(single(feature_batch.bonus), feature_batch.forced[: self._slots - 1])

    def _catch_up(self) -> None:
        """Compute outstanding rows of prompts, since no sequence waits for a tree. Nothing happens if no rows
        are outstanding.

        Speculators that are paused are left out, because their rows may never be needed.
        """
        for speculator in self.speculators.values():
            if speculator.budget.drafting or (self.awake and not speculator.paused_trees):
                speculator.proposer.catch_up()

    def _record_outcomes(self, batch: Features) -> None:
        """Record the verification results of one frame's trees; must run before the sequences advance.
        Nothing happens for a message that describes no step.

        batch: The message of the last stage about the frame.

        If the message says that trees were verified during a pause, the pause has ended; the paused
        speculators record it, and the step counts as one without trees. If the frame had fewer rows than the
        trees, every tree counts as a root alone; if it had another number of rows than the trees, the step's
        duration counts as unknown. Trees of draft round 1 are not recorded.

        Outside of pauses, each tree is removed from `_pending`. A sequence to which no tree was sent counts
        as one with a root alone.
        """
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
            self._resumed, live = True, max(self._sequences.drafted, 1)
            for speculator in [one for one in self.speculators.values() if one.paused_trees]:
                speculator.record_pause(batch.paused_trees, live)
            self._record_baseline_step(batch, feature_batches)
            return
        pop = self._pending.pop
        # The outcome of each sequence's tree.
        trees = {
            one.sequence: pending.resolve(one) if (pending := pop(one.sequence, None)) else ROOT_ONLY
            for one in feature_batches
        }
        rows = sum([tree.rows for tree in trees.values()])
        # If the frame had fewer rows than the trees, some trees arrived too late or were truncated. It is
        # unknown which, so that no outcome can be learned from.
        if rows > batch.fed:
            trees = dict.fromkeys(trees, ROOT_ONLY)
        total_waited = waited_seconds()
        waited_in_step = total_waited - self._waited_before if self._overlapped else None
        duration = StepSeconds(batch.seconds, batch.wall, self._growing_seconds, waited_in_step)
        self._growing_seconds = 0.0
        self._waited_before = total_waited
        spent = duration if rows == batch.fed else UNKNOWN_SECONDS
        self._record_steps(trees, spent)

    def _record_baseline_step(self, batch: Features, feature_batches: Sequence[FeatureBatch]) -> None:
        """Record a typical step of a pause, in which no sequence had a tree. The seconds of growth are
        dropped.

        batch: The message with the step's times and its number of sequences.
        feature_batches: The batches of sequences that have left their prompts. Each speculator of such
            sequences records the step; sequences without a speculator count for the first one. Without
            batches, the first speculator records it.
        """
        self._growing_seconds = 0.0
        default = self.speculators[self._default]
        speculators = [self._speculator_by_id.get(one.sequence, default) for one in feature_batches]
        distinct = {id(speculator): speculator for speculator in speculators or [default]}
        for speculator in distinct.values():
            speculator.record_step([ROOT_ONLY] * batch.fed, StepSeconds(batch.seconds, batch.wall))

    def _record_steps(self, trees: Mapping[int, TreeOutcome], spent: StepSeconds) -> None:
        """Record the outcomes with the speculator of each sequence; outcomes of unknown sequences go to the
        first speculator.

        trees: Outcome of each tree, by sequence id. Empty: nothing is recorded.
        spent: Duration of the step. It is passed on only if all trees belong to one speculator, since it
            cannot be divided between several.

        Speculators without a tree in the step record nothing.
        """
        default = self.speculators[self._default]
        owners = [self._speculator_by_id.get(sequence, default) for sequence in trees]
        for speculator in self.speculators.values():
            if own := [tree for tree, owner in zip(trees.values(), owners) if owner is speculator]:
                speculator.record_step(own, spent if len(own) == len(trees) else UNKNOWN_SECONDS)
