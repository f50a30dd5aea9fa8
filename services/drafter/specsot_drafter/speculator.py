"""One way to draft: a proposer, the policy of how much to draft, and the trees that await verification.

Trees may grow asynchronously: they are launched before the host has read the verification result that they
follow. `specsot_drafter.overlap` has the timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Final

import numpy as np

from specsot.core.device_verification import DeviceTrees, DeviceVerification
from specsot.core.draft_pause import DraftPause, PauseEvent, PauseState
from specsot.core.frames import FeatureBatch
from specsot.core.tree import Tree, children
from specsot.values import value
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.budget import ROOT_ONLY, BudgetPolicy, StepSeconds, TreeOutcome
from specsot_drafter.core.selection import (
    Candidates,
    Floats,
    build_trees,
    depth_masses,
    likeliest_first,
    limit_depths,
    merge_trees,
)
from specsot_drafter.core.sequences import DraftSequence, common_prefix
from specsot_drafter.grammar import bar_after_ends
from specsot_drafter.proposers import ChosenTrees, Offer, Proposer

Clock = Callable[[], float]

# Steps. How long drafting pauses where no tree can grow. Untuned.
IDLE_PAUSE_STEPS = 8
# Fraction of a step's expected tokens without the second proposer. Where trees grow asynchronously, the
# second proposer's candidates are used only if they add at least this fraction. With these candidates the
# host must select nodes, and a step takes 1.4 times as long with one client, and 1.5 times with eight. Chosen
# by measurement: steps of one run with and without these candidates (1.5B, H200).
MIN_BLEND_GAIN: Final = 0.5
# Trees. If the device selects the nodes, the host scores the candidates of at most this number of trees after
# each new choice of the policy, to find out whether the second proposer's candidates are worth joining the
# next trees. Scoring those of 64 trees took the host 8 ms, more than half of a step (1.5B, H200). Untuned.
SAMPLED_TREES: Final = 8
NO_SEQUENCES = frozenset[int]()


@dataclass(slots=True)
class Speculator:
    """One way to draft: plans, grows and selects the trees of the sequences that one proposer drafts for.

    proposer: Offers the candidates.
    budget: Policy that decides how much to draft.
    blend: A second proposer whose candidates may join the trees. None: there is none.
    clock: Returns the time in seconds.
    growing_seconds: Seconds that growing the last trees took; waiting for other work is not included.
    """

    proposer: Proposer
    budget: BudgetPolicy
    blend: Proposer | None
    clock: Clock
    growing_seconds: float = field(default=0.0, init=False)
    # The last plan: sequences to draft for, the most levels of each, and rows to compute before they grow.
    _planned: tuple[list[DraftSequence], list[int], int] = field(default=([], [], 0), init=False)
    # Levels of the trees that grew last.
    _levels: int = field(default=0, init=False)
    # Finished steps that the policy has not learned from yet.
    _unlearned: list[tuple[Sequence[TreeOutcome], StepSeconds]] = field(
        default_factory=list[tuple[Sequence[TreeOutcome], StepSeconds]], init=False
    )
    # The trees that grow asynchronously, until `begin` continues or discards them.
    _async_growth: AsyncGrowth | None = field(default=None, init=False)
    # The nodes that the device selects from these trees; None if the host selects.
    _chosen: ChosenTrees | None = field(default=None, init=False)
    # True if candidates of the second proposer joined the last trees.
    _blends: bool = field(default=False, init=False)
    # Families of the sequences that were running when the last set of entirely new families began.
    _families: frozenset[int] = field(default=NO_SEQUENCES, init=False)
    # Whether this speculator drafts, is paused, or catches up. After a pause it catches up until all
    # sequences that requested trees before the pause have sent feature batches again.
    _pause: DraftPause = field(default=DraftPause(), init=False)
    # Number of sequences that requested trees in the last step that covered all of them.
    _num_requested: int = field(default=0, init=False)

    @property
    def paused_trees(self) -> int:
        """The number of trees for which drafting is still paused; 0 if it is not paused."""
        return self._pause.trees_left

    def record_step(self, trees: Sequence[TreeOutcome], spent: StepSeconds) -> None:
        """Record a finished step for the policy.

        trees: Outcomes of the step's trees, one per sequence of this speculator.
        spent: Duration of the step.

        If the next trees grow asynchronously, learning is put off until the device computes the next step, so
        that the host delays nothing.
        """
        self._unlearned.append((trees, spent))
        if self._async_growth is None:
            self._learn()

    def _learn(self) -> None:
        """Pass the recorded steps on to the policy. Nothing happens if there are none.

        They are passed on oldest first, and then forgotten.
        """
        steps = self._unlearned
        self._unlearned = []
        for trees, spent in steps:
            self.budget.record_step(trees, spent)

    def plan_levels(self, sequences: Sequence[DraftSequence], num_drafted: int = 0) -> int:
        """Plan the next trees and return the number of levels to grow; 0 if nothing is drafted.

        sequences: The sequences that request a tree.
        num_drafted: Number of all sequences that are drafted for.

        If the policy may pause, a result of 0 starts a pause or continues one. If trees of some sequences
        grow asynchronously, only those sequences are planned. Other sequences, whose prompts have just been
        processed, get their first tree one step later, so that the growing trees do not wait for them.

        While the drafter catches up after a pause, the policy plans as if all sequences had trees, because
        all of them will have one within a few steps. The few that have one now would not save as much time as
        a step with drafts costs, so the policy would pause again.

        A pause that is not over counts these sequences as trees that passed, and the result is 0. A pause
        ends for entirely new requests if the policy allows that. If the result is 0, trees that grow
        asynchronously are discarded, unless a pause has still to pass.
        """
        ahead_of = self._async_sequences
        live = self._draftable(sequences, ahead_of)
        planned = [each for each in live if each[0].id in ahead_of] or live
        own = [sequence for sequence, _ in planned]
        limits = [max_levels for _, max_levels in planned]
        self._planned = own, limits, self.proposer.due_rows(own)
        self._start_families(sequences)
        if self.paused_trees and not self.record_pause(len(sequences), len(sequences)):
            return 0
        num_sequences = self._count(len(sequences), num_drafted)
        max_levels = max(limits, default=0)
        due = self._planned[-1]
        num_trees, others = len(own), num_sequences - len(sequences) + len(live) - len(own)
        if num_trees and self._pause.state is PauseState.CATCHING_UP:
            num_trees, others = num_trees + others, 0
        levels = self.budget.plan_levels(num_trees, max_levels, due, others)
        # A policy that never pauses returns 0 only if no tree fits; it drafts again with the next sequence.
        if not levels and self.budget.adaptive:
            self._pause = self._pause.begin(
                self.budget.paused_trees or IDLE_PAUSE_STEPS * num_sequences, num_sequences
            )
        if not levels:
            self._drop_async_growth()
        return levels

    def _start_families(self, sequences: Sequence[DraftSequence]) -> None:
        """Inform the policy if all sequences are of new requests, that is, if none of their families ran when
        the last new set began. A pause may end for new requests. The branches of a plan are no new request:
        drafting that was not profitable for one or two sequences is hardly profitable for more of them.

        sequences: The sequences that request a tree; at least one.

        Nothing happens while the speculator catches up. Recorded steps are passed on to the policy first.
        """
        # Mostly the family of the first sequence is known. Then no other family is looked at, because `map`
        # yields them one by one.
        families = map(attrgetter("family"), sequences)
        if self._pause.state is PauseState.CATCHING_UP or not self._families.isdisjoint(families):
            return
        self._families = frozenset(map(attrgetter("family"), sequences))
        self._learn()
        if self.budget.start_sequences(len(sequences)) and self._pause.paused:
            self._resume(self._pause.end(), 1)

    def _count(self, num_requests: int, num_drafted: int) -> int:
        """Return the number of sequences that the step counts as having. After a pause, the feature batches
        of some sequences arrive with later steps. Until then, return the number from before the pause, at
        most `num_drafted`.

        num_requests: Number of sequences that request trees in this step.
        num_drafted: Number of all sequences that are drafted for.

        Once at least as many sequences request trees as before the pause, the speculator has caught up.
        Outside of catching up, the number of requests is remembered and returned.
        """
        known = min(self._num_requested, num_drafted)
        if num_requests >= known:
            self._pause = self._pause.on(PauseEvent.CAUGHT_UP)
        if self._pause.state is PauseState.CATCHING_UP:
            return known
        self._num_requested = num_requests
        return num_requests

    def record_pause(self, num_trees: int, num_sequences: int) -> bool:
        """Record that trees were not drafted because of the pause. Return whether the pause is over: False
        while more trees are to pass.

        num_trees: Number of trees that were not drafted since the last call.
        num_sequences: Number of sequences per step.

        Recorded steps are passed on to the policy first.
        """
        self._learn()
        pause = self._pause.passed(num_trees, num_sequences)
        if pause.paused:
            self._pause = pause
            return False
        self._resume(pause, num_sequences)
        return True

    def _resume(self, pause: DraftPause, num_sequences: int) -> None:
        """End the pause, and inform the policy how many trees it lasted.

        pause: The state after the pause; `passed_trees` counts its trees.
        num_sequences: Number of sequences per step.
        """
        self.budget.record_pause(pause.passed_trees, num_sequences)
        self._pause = replace(pause, passed_trees=0)

    def begin(self, levels: int) -> Growth:
        """Launch trees for the planned sequences, or continue asynchronous growth. Return the growing trees
        for `finish`.

        levels: Number of levels to grow, from `plan_levels`; at least 1.

        A selection of the device is dropped unless the asynchronous growth was confirmed for exactly these
        sequences, in this order.
        """
        (live, limits, due), began = self._planned, self.clock()
        self._levels = levels
        ahead = self._async_growth
        chosen = self._chosen
        self._async_growth = self._chosen = None
        offer = self.proposer.begin(live, levels, self.budget.keep_growing)
        confirmed = ahead is not None and ahead.confirmed
        if chosen and not (confirmed and chosen.sequences == tuple([sequence.id for sequence in live])):
            chosen = None
        return Growth(live, limits, due, offer, self.clock() - began, ahead, chosen)

    def start_growth(self, verification: DeviceVerification, ids: int) -> AsyncGrowth | None:
        """Launch the next trees asynchronously, while the host has not read the verification result of the
        current ones. Return the growth.

        verification: The trees that are being verified, and their results on the device.
        ids: Number of token ids that may be fed, see `Proposer.start_growth`.

        Return None, and launch nothing, if drafting is paused or if the policy would not draft for all these
        sequences in the next step. The trees have as many levels as the last ones.

        Asynchronous growth that was launched before is discarded. The result is also None if no tree has
        grown yet.
        """
        self._learn()
        self._drop_async_growth()
        budget = self.budget
        many = len(verification.trees)
        if self._levels and not self.paused_trees and not budget.looks_next(many):
            self._async_growth = self.proposer.start_growth(verification, ids, self._levels)
        return self._async_growth

    @property
    def _async_sequences(self) -> frozenset[int]:
        """Ids of the sequences whose next trees grow asynchronously. Empty if none do."""
        return self._async_growth.sequences if self._async_growth else NO_SEQUENCES

    def _drop_async_growth(self) -> None:
        """Discard the trees that grow asynchronously, and the selection among them. Nothing happens if there
        are none.
        """
        if self._async_growth:
            self._async_growth.discard()
        self._async_growth = self._chosen = None

    def select(self, sequences: Sequence[tuple[DraftSequence, int]], max_rows: int) -> DeviceTrees | None:
        """Let the device select the nodes of the trees that grow asynchronously. Return the selected trees,
        or None if the host must select.

        sequences: The sequences of the next step, each with its number of committed tokens after the
            verification result, which the sequence itself does not have yet.
        max_rows: Maximum number of nodes of all trees together, roots included.

        The host must select if a second proposer's candidates joined the last trees, if all sequences may
        write only their bonus token, or if the policy does not fix the number of nodes.

        None is also returned if no trees grow asynchronously, or if the proposer cannot select on the
        device. A previous selection is forgotten.
        """
        self._chosen = None
        live = len(sequences)
        ahead = None if self._blends else self._async_growth
        if ahead is None:
            return None
        # For each sequence, the number of tokens that it may write after the root of its next tree. If no
        # sequence may write more than the bonus token, roots suffice.
        remaining = [sequence.end - num_committed - 1 for sequence, num_committed in sequences]
        if max(remaining, default=0) <= 1:
            return None
        if nodes := self.budget.predict_nodes(live, self._levels, max_rows - live):
            # The longest sequence has room for the fewest levels.
            longest, num_committed = max(sequences, key=itemgetter(1))
            levels = self.proposer.levels_at(longest, num_committed - longest.committed)
            own = [sequence.id for sequence, _ in sequences]
            trust = self.budget.log_trust()
            self._chosen = self.proposer.select(ahead, own, 1 + nodes, levels, trust)
        return self._chosen

    def finish(self, growth: Growth, max_rows: int) -> dict[int, PendingTree]:
        """Wait for the growth, select nodes, and return the trees by sequence id. Return {} if nothing grew.

        growth: The growing trees, from `begin`.
        max_rows: Maximum number of nodes of all trees together, roots included.

        The time between `begin` and this call is not counted as time of growing.

        A tree may have its root alone, if no node is worth sending. If the host selects, nodes deeper than a
        sequence's limit, nodes after an end of its text, and nodes that its grammar forbids are barred. If
        the device has selected, its nodes stay as they are, because the next step was launched with them
        already. In this case, if the policy has made a new choice for these trees, up to SAMPLED_TREES of
        them are used to decide whether the second proposer's candidates are worth joining the next trees;
        `select` reads the decision.
        """
        live = growth.sequences
        began = self.clock()
        self.growing_seconds = 0.0
        candidates = growth.offer()
        if candidates is None:
            return {}
        self.budget.keep_sample(candidates)
        self.growing_seconds = growth.seconds + self.clock() - began
        roots = [sequence.tokens[-1] for sequence in live]
        chosen_nodes = growth.chosen.take() if growth.chosen and growth.overlapped else None
        if chosen_nodes is not None:
            depth = len(chosen_nodes.masses[0])
            own = 1 + len(chosen_nodes.nodes[0][0])
            trees_by_id = {
                one.id: PendingTree(
                    one.committed, Tree.of_ordered((root, *tokens), (0, *parents)), depth, mass, own
                )
                for one, root, (tokens, parents), mass in zip(live, roots, *chosen_nodes)
            }
            if self.blend and not self.budget.holding:
                # Only `_blends` matters, which `_blended` sets; the joined candidates are not sent.
                step = math.ceil(len(live) / SAMPLED_TREES)
                sample = growth.every(step)
                sampled = self._barred(sample, candidates.every(step))
                self._blended(sample, sampled, self.budget.score(sampled))
            return trees_by_id
        depth = candidates.levels
        own_candidates = self._barred(growth, candidates)
        values = self._score(own_candidates)
        all_candidates, values = self._blended(growth, own_candidates, values)
        chosen = self.budget.select(values, depth, max_rows - len(live))
        # The proposer's own candidates are the first columns, those of the second proposer follow.
        trees = build_trees(all_candidates, roots, chosen)
        own_flags = chosen[:, : own_candidates.tokens.shape[1]]
        # The proposer's own nodes must stay in front of a second proposer's.
        own_alone = own_flags.sum() == chosen.sum()
        if self.budget.likeliest_first and len(trees) == 1 and own_alone:
            trees = (likeliest_first(trees[0], values[0][chosen[0]]),)
        by_depth = depth_masses(own_candidates, own_flags).tolist()
        return {
            sequence.id: PendingTree(sequence.committed, tree, depth, mass, 1 + own)
            for sequence, tree, mass, own in zip(live, trees, by_depth, own_flags.sum(1).tolist())
        }

    def _barred(self, growth: Growth, candidates: Candidates) -> Candidates:
        """Return candidates with those barred that cannot be accepted: those deeper than a sequence's limit,
        those after an end of its text, and those that its grammar forbids.

        growth: The growing trees.
        candidates: The candidates of these trees. If the trees were not launched asynchronously, those that a
            grammar forbids are barred already.
        """
        if growth.ahead:
            candidates = self.proposer.bar_forbidden(candidates, growth.sequences)
        if min(growth.limits) < candidates.levels:
            candidates = limit_depths(candidates, growth.limits)
        return bar_after_ends(candidates, growth.sequences)

    def _score(self, candidates: Candidates) -> Floats:
        """Return the chance of each candidate to be accepted, [trees, n], and let the policy learn from these
        chances. Barred candidates have the chance -inf.

        candidates: The first proposer's own candidates.
        """
        values = self.budget.score(candidates)
        self.budget.record_worth(values, candidates.depths)
        return values

    def _draftable(
        self, sequences: Sequence[DraftSequence], ahead_of: frozenset[int]
    ) -> list[tuple[DraftSequence, int]]:
        """Return the sequences that can have a tree, each with the maximum number of its levels. Return [] if
        no sequence can have one.

        sequences: The sequences that request a tree. One whose tree grows asynchronously is included even if
            it can have no level by now.
        ahead_of: Ids of the sequences whose trees grow asynchronously.

        A tree that is still growing keeps its sequence in the list, with 0 as its number of levels if it can
        have none.
        """
        limits = map(self.proposer.max_levels, sequences)
        return [
            (sequence, most) for sequence, most in zip(sequences, limits) if most or sequence.id in ahead_of
        ]

    def _blended(self, growth: Growth, candidates: Candidates, values: Floats) -> tuple[Candidates, Floats]:
        """Return the candidates joined with those of the second proposer, and the worth of all of them.

        growth: The growing trees, of whose sequences the second proposer is asked.
        candidates: Candidates of the first proposer.
        values: Their worth, [live, n].

        Candidates and worth are returned unchanged if there is no second proposer, if the policy never
        pauses, or if the second proposer has no candidates. They are also unchanged if the trees grew
        asynchronously and the second proposer adds less than MIN_BLEND_GAIN of the step's expected tokens.

        `_blends` records whether the second proposer's candidates joined; it stays as it was if there is no
        second proposer or the policy never pauses.
        """
        if self.blend is None or not self.budget.adaptive:
            return candidates, values
        others = self.blend.propose(growth.sequences, len(self.blend.widths) + 1)
        self._blends = False
        if others is None:
            return candidates, values
        chances = np.exp(others.scores)
        own = _total(values)
        min_gain = MIN_BLEND_GAIN * (len(growth.sequences) + own) if growth.overlapped else -math.inf
        # The joined trees are expected to add at most what all of the second proposer's candidates are worth.
        # If that is too little, merging, which takes the host much longer, is left out.
        if _total(chances) < min_gain:
            return candidates, values
        joined, worth = merge_trees(candidates, values, others, chances)
        if _total(worth) - own < min_gain:
            return candidates, values
        self._blends = True
        return joined, worth


def _total(chances: Floats) -> float:
    """Return the expected number of accepted tokens if all candidates were sent; barred ones count 0.

    chances: Chance of acceptance of each candidate, [live, n]; -inf where a candidate is barred.
    """
    return float(chances[np.isfinite(chances)].sum())


@value
class Growth:
    """Trees that are growing.

    sequences: The sequence of each tree.
    limits: Maximum number of levels of each tree.
    due: Number of rows of committed tokens that are computed before the trees grow.
    offer: Waits for the growth and returns its candidates, or None if there are none.
    seconds: Seconds that launching the growth took.
    ahead: The trees that were launched asynchronously for this step. None if there were none.
    chosen: The nodes that the device selects. None if the host selects.
    """

    sequences: list[DraftSequence]
    limits: list[int]
    due: int
    offer: Offer
    seconds: float
    ahead: AsyncGrowth | None = None
    chosen: ChosenTrees | None = None

    def every(self, step: int) -> Growth:
        """Return a copy for every `step`-th tree, from the first on. Only `sequences` and `limits` are
        reduced; `due` and `offer` are still those of all trees.

        step: At least 1.
        """
        return replace(self, sequences=self.sequences[::step], limits=self.limits[::step])

    @property
    def overlapped(self) -> bool:
        """True if the candidates are those of trees that grew asynchronously."""
        return self.ahead is not None and self.ahead.confirmed


@value
class PendingTree:
    """A tree that was sent and is not verified yet.

    committed: Number of the sequence's tokens before the tree's root.
    tree:      The tree as it was sent.
    levels:    Number of levels that were grown for the tree.
    masses:    The drafter's probability of its own nodes in the tree, summed per depth.
    own_nodes: Number of leading nodes that are the root or the drafter's own; others came from elsewhere.
    forced:    Tokens after the root that the grammar determines; these are fed even without a drafter.
    """

    committed: int
    tree: Tree
    levels: int
    masses: Sequence[float]
    own_nodes: int
    forced: tuple[int, ...] = ()

    def resolve(self, feature_batch: FeatureBatch) -> TreeOutcome:
        """Return the outcome of the tree. Return ROOT_ONLY if the batch is of another tree or ends the
        sequence.

        feature_batch: The batch with the tree's verification result: the accepted tokens after the root, and
            the bonus token.

        Forced tokens do not count as accepted: with forced (5, 6), and 5, 6, 9 written after the root, one
        token is accepted.

        The outcome also says how many of the accepted tokens lie on a path of the drafter's own nodes.
        """
        if self.committed != feature_batch.start or feature_batch.bonus is None:
            return ROOT_ONLY
        written = feature_batch.tokens[1:]
        rows = len(self.tree.tokens)
        own = len(written) if self.own_nodes == rows else _own_depth(self, written)
        free = common_prefix(self.forced, written) if self.forced else 0
        return TreeOutcome(self.levels, rows, self.masses, len(written) - free, own)


def _own_depth(pending: PendingTree, written: Sequence[int]) -> int:
    """Return how many of the accepted tokens follow a path of the drafter's own nodes from the root.

    pending: The tree; its first `own_nodes` nodes are the drafter's own.
    written: Ids of the accepted tokens after the root.

    The depth of the last own node on the path is returned: 0 if the first accepted token is no own node, and
    the number of tokens if all are.
    """
    below = children(pending.tree.parents)
    tokens = pending.tree.tokens
    node = 0
    for depth, token in enumerate(written):
        found = [child for child in below[node] if child < pending.own_nodes and tokens[child] == token]
        if not found:
            return depth
        node = found[0]
    return len(written)
