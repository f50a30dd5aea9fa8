"""One way to draft with the rule that says how much of it pays, and the rest it takes while nothing does.

Refuses to know the ring, and other ways to draft but the one whose candidates may join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specsot.core.tree import Tree, single
from specsot_drafter.drafters import Proposer
from specsot_drafter.flights import PendingTree
from specsot_drafter.rules import BudgetPolicy
from specsot_drafter.selection import (
    Candidates,
    Floats,
    build_trees,
    depth_masses,
    graft,
    limit_depths,
    merge_chains,
)
from specsot_drafter.texts import DraftSequence

Clock = Callable[[], float]

IDLE_REST_LAPS = 8  # laps to rest where nothing can grow


@dataclass(slots=True)
class Speculator:
    """rest: for how many more trees nothing will be drafted; 0 while it drafts.

    blend: whose chains may join its trees.
    """

    proposer: Proposer
    budget: BudgetPolicy
    blend: Proposer | None
    clock: Clock
    rest: int = 0
    _rested: int = field(default=0, init=False)

    def plan_levels(self, sequences: Sequence[DraftSequence]) -> int:
        """Levels to grow for these; 0 begins a rest, or goes on with one."""
        live = [text for text in sequences if self.proposer.max_levels(text)]
        if self.rest and not self.record_rest(len(sequences), len(sequences)):
            return 0
        most = max(map(self.proposer.max_levels, live), default=0)
        levels = self.budget.plan_levels(len(live), most, self.proposer.due_rows(live))
        if not levels and self.budget.adaptive:  # who drafts always drafts again with the next text
            self.rest = self.budget.rest or IDLE_REST_LAPS * len(sequences)
        return levels

    def record_rest(self, trees: int, live: int) -> bool:
        """So many trees went without drafts, `live` of them a lap. Returns whether the rest is over."""
        self._rested += trees
        self.rest = max(self.rest - trees, 0)
        if self.rest == 0:
            self.budget.record_rest(self._rested, live)
            self._rested = 0
        return self.rest == 0

    def grow(self, sequences: Sequence[DraftSequence], levels: int, rows: int) -> dict[int, PendingTree]:
        """Trees of at most `rows` rows in all, roots included, for those of the texts that can have one."""
        live = [text for text in sequences if self.proposer.max_levels(text)]
        due, began = self.proposer.due_rows(live), self.clock()
        candidates = self.proposer.propose(live, levels, self.budget.keep_growing)
        if candidates is None:
            return {}
        depth = candidates.levels
        self.budget.record_growth(len(live), depth, due, self.clock() - began)
        candidates = limit_depths(candidates, [self.proposer.max_levels(text) for text in live])
        whole, values = self._blended(live, candidates)
        chosen = self.budget.select(values, depth, rows - len(live))
        trees = build_trees(whole, [text.tokens[-1] for text in live], chosen)
        mine = chosen[:, : candidates.tokens.shape[1]]
        by_depth = depth_masses(candidates, mine).tolist()
        return {
            text.id: PendingTree(text.committed, tree, depth, tuple(mass), 1 + int(own))
            for text, tree, mass, own in zip(live, trees, by_depth, mine.sum(1))
        }

    def _blended(
        self, sequences: Sequence[DraftSequence], candidates: Candidates
    ) -> tuple[Candidates, Floats]:
        """The offer, with what the text itself suggests hung into it, and what all of it is worth."""
        values = self.budget.score(candidates)
        if self.blend is None or not self.budget.adaptive:
            return candidates, values
        chains = self.blend.propose(sequences, len(self.blend.widths) + 1)
        if chains is None:
            return candidates, values
        return merge_chains(candidates, values, chains, np.exp(chains.scores))


def graft_forced(tree: Tree, forced: Sequence[int], sequence: DraftSequence, slots: int) -> Tree:
    """A tree with what a grammar forces below its root, as far as it is of use and there is room."""
    room = min(sequence.remaining - 1, slots - len(tree))
    return graft(tree, forced[: max(room, 0)])


def forced_chain(root: int, forced: Sequence[int], slots: int) -> Tree:
    """What is fed where nothing is grown."""
    return graft(single(root), forced[: slots - 1])
