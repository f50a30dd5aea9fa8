"""Several ways to draft in one engine: who is asked, who rests, and what may join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from specsot.core.frames import FeatureBatch, Features
from specsot.core.overlap import OverlapEvent
from specsot.core.tree import Tree
from specsot.members import TreeShape
from specsot.params import DrafterName
from specsot_drafter import speculator
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.budget import ROOT_ONLY, BudgetPolicy, FixedBudget, TreeOutcome
from specsot_drafter.core.control import DraftPolicy
from specsot_drafter.core.selection import Candidates, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.core.step_costs import LOOK_STEPS
from specsot_drafter.engine import DraftEngine
from specsot_drafter.proposers import Proposer
from specsot_drafter.proposers.suffix import SuffixProposer, SuffixShape
from specsot_drafter.speculator import Speculator
from tests.drafter.curves import DEMO, QUICK_HEAD, SLOW_HEAD, STEEP
from tests.drafter.ring import configuration, drafts_of, opening

SHAPE = TreeShape(3, 1, 8)
WIDTHS = (1, 1, 1)


@dataclass
class Parrot(Proposer):
    """Drafts a chain of one token."""

    token: int
    widths: tuple[int, ...] = (1, 1, 1)
    asked: list[int] = field(default_factory=list)
    followed: set[int] = field(default_factory=set)

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        return len(sequences)

    def open(self, sequence: DraftSequence) -> None:
        self.followed.add(sequence.id)

    @property
    def free_pages(self) -> int:
        return 9

    def follows(self, sequence: int) -> bool:
        return sequence in self.followed

    def close(self, sequence: int) -> None:
        self.followed.discard(sequence)

    def max_levels(self, sequence: DraftSequence) -> int:
        return 4 if sequence.id in self.followed else 0

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        self.asked += [text.id for text in sequences]
        row = np.arange(levels)
        shape = (len(sequences), 1)
        scores = np.log(0.9) * (row + 1)
        tokens = np.full((len(sequences), levels), self.token)
        return Candidates(tokens, np.tile(scores, shape), np.tile(row, shape), row + 1)


def looked(tuner: DraftPolicy) -> DraftPolicy:
    """First steps were plain, and large trees were seen."""
    for live in (1, 2, 4, 8):
        assert tuner.plan_levels(live, 6) == 0
    tuner.record_step([TreeOutcome(1, 9, (0.9,), 0)])
    tuner.record_step([ROOT_ONLY])
    return tuner


def cheap(shape: TreeShape = SHAPE) -> DraftPolicy:
    return looked(DraftPolicy(shape, DEMO, QUICK_HEAD, WIDTHS))


def dear(shape: TreeShape = SHAPE) -> DraftPolicy:
    return DraftPolicy(shape, STEEP, SLOW_HEAD, WIDTHS)


def ngrams(tokens: int) -> SuffixProposer:
    return SuffixProposer(SuffixShape(tokens, tokens), 9)


def engine_with(
    ways: dict[DrafterName, tuple[Parrot, BudgetPolicy]], blend: SuffixProposer | None = None, **more: object
) -> DraftEngine:
    ring = configuration(SHAPE, **more)  # type: ignore[arg-type]
    return DraftEngine(ways, ring, blend=blend, clock=lambda: 0.0)


def teach(engine: DraftEngine, sequence: int, tokens: Sequence[int], **more: object) -> None:
    opened = opening(sequence, len(tokens) - 1, limit=999, **more)  # type: ignore[arg-type]
    feature_batch = FeatureBatch(sequence, 0, tuple(tokens[:-1]), tokens[-1], 1)
    engine.observe(Features(1, 0, (opened,), (feature_batch,)))


def trees(engine: DraftEngine) -> dict[int, Tree]:
    return {draft.sequence: draft.tree for draft in drafts_of(engine)}


def test_each_sequence_is_drafted_by_whom_it_named() -> None:
    first, second = Parrot(7), Parrot(8)
    engine = engine_with({"eagle": (first, FixedBudget(SHAPE)), "model": (second, FixedBudget(SHAPE))})
    for sequence, who in ((1, None), (2, "eagle"), (3, "model"), (4, "ngram")):
        teach(engine, sequence, [1, 2, 3], drafter=who)
    grown = trees(engine)
    assert {n: set(tree.tokens[1:]) for n, tree in grown.items()} == {1: {7}, 2: {7}, 3: {8}, 4: {7}}
    assert (first.followed, second.followed) == ({1, 2, 4}, {3})
    engine.observe(Features(1, 0, closings=(1, 2, 3, 4)))
    assert first.followed == second.followed == set()


def test_while_one_drafter_is_paused_the_others_draft_and_it_receives_nothing() -> None:
    busy, idle = Parrot(7), Parrot(8)
    engine = engine_with({"eagle": (busy, cheap()), "model": (idle, dear())})
    teach(engine, 1, [1, 2, 3])
    teach(engine, 2, [1, 2, 3], drafter="model")
    committed = 2
    for step in range(20):
        grown = trees(engine)
        assert engine.paused_trees == 0
        assert len(grown[1]) > 1
        assert len(grown[2]) == 1
        fed = grown[1].tokens
        feature_batches = (
            FeatureBatch(1, committed, fed, 7, step + 2),
            FeatureBatch(2, 2 + step, (3,), 3, step + 2),
        )
        engine.observe(Features(1, 0, feature_batches=feature_batches, fed=len(fed) + 1, seconds=3e-3))
        committed += len(fed)
    assert idle.asked == []


def test_if_all_drafters_pause_the_ring_receives_the_length_of_the_pause() -> None:
    one, other = Parrot(7), Parrot(8)
    engine = engine_with({"eagle": (one, dear()), "model": (other, dear())})
    teach(engine, 1, [1, 2, 3])
    teach(engine, 2, [1, 2, 3], drafter="model")
    assert drafts_of(engine) == ()
    assert engine.paused_trees == LOOK_STEPS, "each looks at the baseline first"
    feature_batches = tuple(FeatureBatch(sequence, 2, (3,), 4, 2) for sequence in (1, 2))
    engine.observe(
        Features(
            1, 0, feature_batches=feature_batches, fed=2, seconds=1e-3, wall=1e-3, paused_trees=2 * LOOK_STEPS
        )
    )
    assert drafts_of(engine) == ()
    before = engine.paused_trees
    assert before >= 32
    feature_batches = tuple(FeatureBatch(sequence, 3, (4, 5, 7), 6, 5) for sequence in (1, 2))
    engine.observe(Features(1, 0, feature_batches=feature_batches, fed=2, seconds=1e-3, paused_trees=10))
    assert drafts_of(engine) == ()
    assert engine.paused_trees == before - 11, "what is left of it, this step's trees taken off"


class Hopes(FixedBudget):
    """Rests, but for new texts."""

    adaptive = True

    def __init__(self, *hopes: bool) -> None:
        super().__init__(SHAPE)
        self.hopes, self.draft_paused = list(hopes), list[int]()

    def start_sequences(self, num_sequences: int) -> bool:
        return self.hopes.pop(0)

    def record_pause(self, trees: int, live: int) -> None:
        self.draft_paused.append(trees)

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        self.paused_trees = 0 if self.draft_paused else 50
        return 1 if self.draft_paused else 0


@pytest.mark.parametrize("hope", [True, False])
def test_a_pause_ends_for_new_sequences_but_not_for_one_among_others(hope: bool) -> None:
    budget = Hopes(False, hope)
    engine = engine_with({"eagle": (Parrot(7), budget)})
    teach(engine, 1, [1, 2, 3])
    assert (trees(engine), engine.paused_trees) == ({}, 50)
    teach(engine, 2, [1, 2, 3])
    engine.observe(Features(1, 0, feature_batches=(FeatureBatch(1, 2, (3,), 4, 2),), fed=1, paused_trees=3))
    assert (trees(engine), engine.paused_trees) == ({}, 45)
    assert len(budget.hopes) == 1, "one of those it rests for is there"
    engine.observe(Features(1, 0, closings=(1, 2), fed=1, paused_trees=4))
    teach(engine, 3, [1, 2, 3])
    assert [*trees(engine)] == ([3] if hope else [])
    assert (engine.paused_trees, budget.draft_paused) == ((0, [9]) if hope else (40, []))


def test_a_pause_does_not_end_for_the_branches_of_a_plan() -> None:
    """What was not profitable for its direct answer is not tried again for more sequences at once."""
    budget = Hopes(False, True)
    engine = engine_with({"eagle": (Parrot(7), budget)})
    teach(engine, 1, [1, 2, 3], family=1)
    assert (trees(engine), engine.paused_trees) == ({}, 50)
    engine.observe(Features(1, 0, closings=(1,), fed=1))
    teach(engine, 2, [1, 2, 3], family=1)
    assert trees(engine) == {}
    assert len(budget.hopes) == 1
    engine.observe(Features(1, 0, closings=(2,), fed=1))
    teach(engine, 3, [1, 2, 3], family=3)
    assert [*trees(engine)] == [3]


@pytest.mark.parametrize("rule", [cheap, lambda: FixedBudget(SHAPE)], ids=["tuned", "always"])
def test_suffix_drafts_are_added_if_a_drafter_measures_profit(rule) -> None:  # type: ignore[no-untyped-def]
    engine = engine_with({"eagle": (Parrot(7), rule())}, blend=ngrams(4))
    teach(engine, 1, [1, 2, 5, 6, 1, 2])
    (tree,) = trees(engine).values()
    below = [tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == 0]
    assert set(below) == ({7, 5} if isinstance(engine.speculators["eagle"].budget, DraftPolicy) else {7})


@pytest.mark.parametrize(("least", "joins"), [(0.1, True), (9.0, False)])
def test_with_asynchronous_growth_suffix_drafts_are_added_only_if_they_save_much(
    least: float, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the host would choose trees that a device has chosen already."""
    monkeypatch.setattr(speculator, "MIN_BLEND_GAIN", least)
    parrot = Parrot(7)
    engine = engine_with({"eagle": (parrot, cheap())}, blend=ngrams(8))
    begin, growth = parrot.begin, AsyncGrowth(frozenset({1}))

    def continue_growth(*given: object) -> object:
        growth.apply(OverlapEvent.MATCHED)
        return begin(*given)  # type: ignore[arg-type]

    parrot.begin = continue_growth  # type: ignore[method-assign]
    engine.speculators["eagle"]._async_growth = growth
    teach(engine, 1, [5, 6] * 6)
    (tree,) = trees(engine).values()
    assert (5 in tree.tokens[1:]) is joins


def test_a_drafter_is_blamed_and_praised_for_its_own_nodes_alone() -> None:
    """The n-gram is always right here, the parrot never."""
    engine = engine_with({"eagle": (Parrot(7), cheap())}, blend=ngrams(4))
    teach(engine, 1, [5, 6] * 4)
    rule, committed = engine.speculators["eagle"].budget, 7
    assert isinstance(rule, DraftPolicy)
    for step in range(12):
        if not (tree := trees(engine).get(1)):
            break
        right = [token for token, parent in zip(tree.tokens[1:], tree.parents[1:]) if token != 7]
        fed = (tree.tokens[0], *right)
        bonus = 5 if fed[-1] == 6 else 6
        feature_batch = FeatureBatch(1, committed, fed, bonus, step + 2)
        engine.observe(Features(1, 0, feature_batches=(feature_batch,), fed=len(tree), seconds=3e-3))
        committed += len(fed)
    assert rule.acceptance.by_depth()[0] < 0.5


def test_of_many_sequences_all_get_a_tree_at_once() -> None:
    one = Parrot(7)
    engine = engine_with({"eagle": (one, cheap())}, rows=64)
    for sequence in range(8):
        teach(engine, sequence, [1, 2, 3])
    grown = trees(engine)
    assert all(len(grown[sequence]) > 1 for sequence in range(8))
    assert one.asked == [*range(8)]


def test_what_is_forced_hangs_below_every_root() -> None:
    engine = engine_with({"eagle": (Parrot(7), FixedBudget(SHAPE))})
    teach(engine, 1, [1, 2, 3])
    feature_batch = FeatureBatch(1, 2, (3,), 4, 2, forced=(7, 9, 9))
    engine.observe(Features(1, 0, feature_batches=(feature_batch,)))
    (tree,) = trees(engine).values()
    assert tree.tokens[0] == 4
    assert len(tree) <= SHAPE.slots
    assert 9 in tree.tokens
    unseen = replace(feature_batch, sequence=5)
    engine.observe(Features(1, 0, feature_batches=(unseen,)))
    assert trees(engine)[5].tokens == (4, 7, 9, 9)


def test_the_row_budget_is_shared() -> None:
    tuner = looked(DraftPolicy(SHAPE, ((1, 1.0), (64, 1.0001)), ((1, 1e-6), (64, 1e-6)), WIDTHS))
    engine = engine_with({"eagle": (Parrot(7), tuner)}, ngrams(4), rows=9)
    for sequence in range(4):
        teach(engine, sequence, [1, 2, 5, 6, 1, 2])
    assert sum(map(len, trees(engine).values())) == 9


class Tired(FixedBudget):
    """Rests for three steps of all whom it is told of."""

    adaptive = True

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.told = list[tuple[int, int]]()

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        self.told.append((live, beside))
        self.paused_trees = 3 * (live + beside)
        return 0


def test_after_a_pause_all_sequences_count_though_some_are_reported_with_later_steps() -> None:
    """Otherwise pauses were for those few, and over for all 64 after a third of their steps. And a policy
    that finds a step with trees for few of 64 sequences not worth it begins the next pause at once.
    """
    proposer, tuner = Parrot(7), Tired()
    lane = Speculator(proposer, tuner, None, lambda: 0.0)
    texts = [DraftSequence(opening(number, 2, limit=999)) for number in range(8)]
    for text in texts:
        proposer.open(text)
    for told, drafted, counted in ((8, 8, 8), (2, 8, 8), (5, 9, 8), (3, 4, 4), (4, 4, 4), (3, 8, 4)):
        lane.plan_levels(texts[:told], drafted)
        assert (tuner.told[-1], lane.paused_trees) == ((counted, 0), 3 * counted)
        lane.record_pause(lane.paused_trees, counted)
