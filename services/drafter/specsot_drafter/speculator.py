"""One way to draft: a proposer, the rule of how much, and what it sends until that comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from specsot.core.draft_pause import DraftPause, PauseEvent, PauseState
from specsot.core.frames import FeatureBatch
from specsot.core.tree import Tree, children
from specsot.core.verdict import UnreadTrees, UnreadVerdict
from specsot_drafter.core.budget import ROOT_ONLY, BudgetPolicy, LapSeconds, TreeOutcome
from specsot_drafter.core.selection import (
    Candidates,
    Floats,
    build_trees,
    depth_masses,
    limit_depths,
    merge_trees,
)
from specsot_drafter.core.sequences import DraftSequence, common_prefix
from specsot_drafter.proposers import ChosenTrees, Offer, Proposer

Clock = Callable[[], float]

IDLE_REST_LAPS = 8  # laps to rest where nothing can grow; not measured
# Tokens that candidates of others must bring each text where trees grow early: with them the host chooses,
# and a lap of three to five tokens takes a tenth longer (SmolLM2-135M, H100). The number was not measured.
LEAST_GAIN = 0.5
NOBODY = frozenset[int]()


@dataclass(slots=True)
class Speculator:
    """blend: whose candidates may join its trees. growing_seconds: what growing its last trees took."""

    proposer: Proposer
    budget: BudgetPolicy
    blend: Proposer | None
    clock: Clock
    growing_seconds: float = field(default=0.0, init=False)
    _planned: tuple[list[DraftSequence], list[int], int] = field(default=([], [], 0), init=False)
    _levels: int = field(default=0, init=False)  # that grew last
    _unlearned: list[tuple[Sequence[TreeOutcome], LapSeconds]] = field(
        default_factory=list[tuple[Sequence[TreeOutcome], LapSeconds]], init=False
    )
    _early: frozenset[int] = field(default=NOBODY, init=False)  # whose trees, as `begin` will be asked, grow
    _chosen: ChosenTrees | None = field(default=None, init=False)  # of that, by a device
    _blends: bool = field(default=False, init=False)  # others had candidates for the last trees
    _texts: frozenset[int] = field(default=NOBODY, init=False)  # that wrote when all of them were new
    # Whether drafting is paused here, and for how long. It is catching up after a pause until all sequences
    # that wanted trees before it are heard of again.
    _pause: DraftPause = field(default=DraftPause(), init=False)
    _many: int = field(default=0, init=False)  # texts that wanted trees, when all were told of

    @property
    def rest(self) -> int:
        """For how many more trees nothing will be drafted; 0 while it drafts."""
        return self._pause.trees_left

    def record_lap(self, trees: Sequence[TreeOutcome], spent: LapSeconds) -> None:
        """A lap came back. Where trees grow behind it already, it is learned from while a device is at the
        next one.
        """
        self._unlearned.append((trees, spent))
        if not self._early:
            self._learn()

    def _learn(self) -> None:
        laps = self._unlearned
        self._unlearned = []
        for trees, spent in laps:
            self.budget.record_lap(trees, spent)

    def plan_levels(self, sequences: Sequence[DraftSequence], drafted: int = 0) -> int:
        """Levels to grow for these; 0 begins a rest, or goes on with one. drafted: texts that there are.

        Where trees grow already, those wait for nobody whose prompt has just been read: its own come a lap
        later.
        """
        live = self._live(sequences)
        growing = [(text, most) for text, most in live if text.id in self._early] or live
        planned = growing[: self.budget.limit_texts(len(live))]
        own = [text for text, _ in planned]
        limits = [most for _, most in planned]
        self._planned = own, limits, self.proposer.due_rows(own)
        self._begin_texts(frozenset(text.id for text in sequences))
        if self.rest and not self.record_rest(len(sequences), len(sequences)):
            return 0
        texts = self._count(len(sequences), drafted)
        most = max(limits, default=0)
        due = self._planned[-1]
        others = texts - len(sequences)
        levels = self.budget.plan_levels(len(own), most, due, others + len(live) - len(own))
        if not levels and self.budget.adaptive:  # who drafts always drafts again with the next text
            self._pause = self._pause.begin(self.budget.rest or IDLE_REST_LAPS * texts, texts)
        if not levels:
            self._early = NOBODY
            self._chosen = None
        return levels

    def _begin_texts(self, texts: frozenset[int]) -> None:
        """Where none of them was there when others began."""
        if self._pause.state is PauseState.CATCHING_UP or not self._texts.isdisjoint(texts):
            return
        self._texts = texts
        self._learn()
        if self.budget.begin_texts() and self._pause.paused:
            self._resume(self._pause.end(), 1)

    def _count(self, told: int, drafted: int) -> int:
        """Texts of a lap, where so many want trees: behind a rest some are told of with later laps."""
        known = min(self._many, drafted)
        if told >= known:
            self._pause = self._pause.on(PauseEvent.CAUGHT_UP)
        if self._pause.state is PauseState.CATCHING_UP:
            return known
        self._many = told
        return told

    def record_rest(self, trees: int, live: int) -> bool:
        """So many trees went without drafts, `live` of them a lap. Returns whether the rest is over."""
        self._learn()
        pause = self._pause.passed(trees, live)
        if pause.paused:
            self._pause = pause
            return False
        self._resume(pause, live)
        return True

    def _resume(self, pause: DraftPause, live: int) -> None:
        """A pause is over, `pause` says after how many trees."""
        self.budget.record_rest(pause.passed_trees, live)
        self._pause = replace(pause, passed_trees=0)

    def begin(self, levels: int) -> Growth:
        """Trees of so many levels grow, for those texts that it was planned for and that can have one."""
        (live, limits, due), began = self._planned, self.clock()
        self._levels = levels
        early = self._early
        self._early = NOBODY
        self.proposer.took_early = False
        offer = self.proposer.begin(live, levels, self.budget.keep_growing)
        took = self.proposer.took_early
        chosen = self._chosen
        self._chosen = None
        own = tuple(text.id for text in live)
        if chosen and not (took and chosen.sequences == own):
            chosen = None
        spoilt = not (took or early.isdisjoint(own))
        return Growth(live, limits, due, offer, self.clock() - began, spoilt, chosen)

    def begin_early(self, verdict: UnreadVerdict, ids: int) -> None:
        """What `begin` will be asked for behind these trees, if it goes on as before. ids: see `Proposer`."""
        self._learn()
        budget = self.budget
        many = len(verdict.trees)
        self._early = NOBODY
        goes_on = self._levels and not self.rest and budget.limit_texts(many) >= many
        if goes_on and not budget.looks_next(many) and self.proposer.begin_early(verdict, ids, self._levels):
            self._early = frozenset(tree.sequence for tree in verdict.trees)

    def choose_early(self, texts: Sequence[tuple[DraftSequence, int]], rows: int) -> UnreadTrees | None:
        """Trees that grow already, as a device chooses them: at most `rows` rows in all. None: the host must.

        texts: and how many tokens each one has had since its verdict is known.
        """
        self._chosen = None
        live = len(texts)
        ahead = bool(self._early) and not self._blends
        ahead &= any(text.remaining + text.committed - told > 1 for text, told in texts)  # else roots do
        if nodes := ahead and self.budget.foreseen_nodes(live, self._levels, rows - live):
            levels = [self.proposer.levels_at(text, told - text.committed) for text, told in texts]
            own = [text.id for text, _ in texts]
            trust = self.budget.log_trust()
            self._chosen = self.proposer.choose_early(own, 1 + nodes, min(levels), trust)
        return self._chosen

    def finish(self, growth: Growth, rows: int) -> dict[int, PendingTree]:
        """Of what grew, at most `rows` rows in all, roots included. No clock counts what was between."""
        limits = growth.limits
        live = growth.texts
        began = self.clock()
        self.growing_seconds = 0.0
        candidates = growth.offer()
        if candidates is None:
            return {}
        depth = candidates.levels
        self.growing_seconds = growth.seconds + self.clock() - began
        if not growth.spoilt:
            self.budget.record_growth(len(live), depth, growth.due, self.growing_seconds)
        candidates = candidates if min(limits) >= depth else limit_depths(candidates, limits)
        whole = candidates
        chosen = None
        if growth.chosen and self.proposer.took_early:
            chosen = growth.chosen.take()
        if chosen is None or not self.budget.holding:
            values = self.budget.score(candidates)
            self.budget.record_worth(values, candidates.depths)
            joined, values = self._blended(live, candidates, values)
            if chosen is None:
                whole = joined
                chosen = self.budget.select(values, depth, rows - len(live))
        trees = build_trees(whole, [text.tokens[-1] for text in live], chosen)
        mine = chosen[:, : candidates.tokens.shape[1]]
        by_depth = depth_masses(candidates, mine).tolist()
        return {
            text.id: PendingTree(text.committed, tree, depth, mass, 1 + own)
            for text, tree, mass, own in zip(live, trees, by_depth, mine.sum(1).tolist())
        }

    def _live(self, sequences: Sequence[DraftSequence]) -> list[tuple[DraftSequence, int]]:
        """Those that can have a tree, and how deep; and those who have one by now, though they end here."""
        limits = map(self.proposer.max_levels, sequences)
        return [(text, most) for text, most in zip(sequences, limits) if most or text.id in self._early]

    def _blended(
        self, sequences: Sequence[DraftSequence], candidates: Candidates, values: Floats
    ) -> tuple[Candidates, Floats]:
        """The offer, with what the text itself suggests hung into it, and what all of it is worth."""
        if self.blend is None or not self.budget.adaptive:
            return candidates, values
        others = self.blend.propose(sequences, len(self.blend.widths) + 1)
        self._blends = False
        if others is None:
            return candidates, values
        joined, worth = merge_trees(candidates, values, others, np.exp(others.scores))
        if self.proposer.took_early and _total(worth) - _total(values) < LEAST_GAIN * len(sequences):
            return candidates, values
        self._blends = True
        return joined, worth


def _total(chances: Floats) -> float:
    """Of all candidates: what they are expected to bring, if all are sent."""
    return float(chances[np.isfinite(chances)].sum())


@dataclass(frozen=True, slots=True)
class Growth:
    """Trees that grow. limits: levels of each. due: rows computed before. seconds: that it took to begin.

    spoilt: they wait for others that grew in vain, so that no clock tells what these cost.
    chosen: by a device.
    """

    texts: list[DraftSequence]
    limits: list[int]
    due: int
    offer: Offer
    seconds: float
    spoilt: bool = False
    chosen: ChosenTrees | None = None


class PendingTree(NamedTuple):
    """A tree that was sent.

    committed: tokens in front of its root. levels: how many were grown for it.
    masses:    the drafter's probability of its nodes, summed per depth.
    own_nodes: how many first nodes are the drafter's; the others came from elsewhere.
    forced:    what would have been fed without any drafter.
    """

    committed: int
    tree: Tree
    levels: int
    masses: Sequence[float]
    own_nodes: int
    forced: tuple[int, ...] = ()

    def resolve(self, lesson: FeatureBatch) -> TreeOutcome:
        """What became of it, when this lesson of its sequence tells."""
        if self.committed != lesson.start or lesson.bonus is None:
            return ROOT_ONLY
        written = lesson.tokens[1:]
        rows = len(self.tree.tokens)
        own = len(written) if self.own_nodes == rows else _own_depth(self, written)
        free = common_prefix(self.forced, written) if self.forced else 0
        return TreeOutcome(self.levels, rows, self.masses, len(written) - free, own)


def _own_depth(pending: PendingTree, written: Sequence[int]) -> int:
    """How deep the drafter's own nodes go along what was written."""
    below = children(pending.tree.parents)
    tokens = pending.tree.tokens
    node = 0
    for depth, token in enumerate(written):
        found = [child for child in below[node] if child < pending.own_nodes and tokens[child] == token]
        if not found:
            return depth
        node = found[0]
    return len(written)
