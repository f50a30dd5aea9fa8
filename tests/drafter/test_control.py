"""The draft policy: what it may lose, what it learns of costs, and when it pauses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specsot.members import Curve, TreeShape
from specsot_drafter.core.acceptance import PRIOR_ACCEPTANCE, AcceptanceRates, TreeWorth
from specsot_drafter.core.budget import ROOT_ONLY, StepSeconds, TreeOutcome
from specsot_drafter.core.control import POOL, REGRET, REGRET_SHARE, DraftPolicy, RegretBudget, RegretPool
from specsot_drafter.core.selection import Candidates
from specsot_drafter.core.step_costs import HELD_STEPS, LOOK_STEPS
from tests.drafter.curves import BF16, BF16_HEAD, DEAR, DEMO, LARGE, QUICK_HEAD, SHAPE, SLOW_HEAD, STEEP
from tests.drafter.replay import H200_STEP, measured, replay

WIDTHS = (SHAPE.top_k,) * SHAPE.depth
FLAT: Curve = ((1, 1e-3), (64, 1e-3))
FLAT_LEVEL: Curve = ((1, 1e-5), (64, 1e-5))


def policy(step: Curve = LARGE, level: Curve = QUICK_HEAD, stepwise: bool = True) -> DraftPolicy:
    return DraftPolicy(SHAPE, step, level, WIDTHS, stepwise)


def looked(one: DraftPolicy, sequences: int = 1, seconds: float = 7e-3) -> DraftPolicy:
    """The first steps had no drafts, and took so long."""
    assert one.plan_levels(sequences, 8) == 0
    assert one.paused_trees == LOOK_STEPS * sequences
    one.record_pause(one.paused_trees, sequences)
    one.record_step([ROOT_ONLY] * sequences, StepSeconds(seconds, seconds))
    return one


def offer_chains(one: DraftPolicy, worth: float) -> None:
    """Chains of eight nodes, each of which is accepted with this probability."""
    scores, depths = np.full((1, 8), np.log(worth)), np.arange(1, 9)
    candidates = Candidates(np.zeros((1, 8), np.int64), scores, depths[None] - 1, depths)
    one.record_worth(one.score(candidates), depths)
    one.keep_sample(candidates)


def write(one: DraftPolicy, tokens: int, accepted: Sequence[int], seconds: float, baseline: float) -> float:
    """One sequence of so many tokens, whose steps with drafts accept so many in turns and take so many
    seconds. Returns the baseline steps that it lost.
    """
    one.start_sequences(1)
    written = drafted = 0
    lost = 0.0
    while written < tokens:
        if levels := one.plan_levels(1, SHAPE.depth + 1):
            right = min(accepted[drafted % len(accepted)], levels)
            tree = TreeOutcome(levels, 1 + levels, (0.7,) * levels, right)
            one.record_step([tree], StepSeconds(seconds, seconds, 0.3 * seconds))
            lost += seconds / baseline - 1 - right
            written, drafted = written + 1 + right, drafted + 1
        else:
            steps = min(one.paused_trees, tokens - written)
            one.record_pause(steps, 1)
            one.record_step([ROOT_ONLY], StepSeconds(baseline, baseline))
            written += max(steps, 1)
    return lost


@pytest.mark.parametrize("accepted", [(0,), (0, 0, 1), (1, 0, 2, 0, 0)])
@pytest.mark.parametrize("stepwise", [True, False])
def test_no_sequence_loses_more_than_its_budget(accepted: tuple[int, ...], stepwise: bool) -> None:
    """Beyond what is saved up: twice REGRET at most, and the one step that shows what such steps take."""
    one = policy(FLAT, FLAT_LEVEL, stepwise)
    for _ in range(6):
        assert write(one, 200, accepted, 2.5e-3, 1e-3) <= 2 * REGRET + 1.5


def test_a_head_that_is_never_right_loses_the_pool_and_then_next_to_nothing() -> None:
    one = policy(FLAT, FLAT_LEVEL)
    lost = [write(one, 200, (0,), 2.5e-3, 1e-3) for _ in range(2 * int(POOL))]
    # The first steps are booked at twice the estimate at most, and really cost more.
    assert sum(lost) <= POOL * REGRET + len(lost) * 200 * REGRET_SHARE + 4 * REGRET
    assert sum(lost[-4:]) <= 0.01 * 4 * 200


def test_where_drafts_pay_they_are_drafted_for_every_sequence() -> None:
    one = policy(FLAT, FLAT_LEVEL)
    assert sum(write(one, 200, (4, 3, 0), 2.5e-3, 1e-3) for _ in range(3)) < -100


def test_drafts_return_after_sequences_that_the_head_could_not_predict() -> None:
    one = policy(FLAT, FLAT_LEVEL)
    write(one, 400, (4,), 2.5e-3, 1e-3)
    for _ in range(3):
        write(one, 200, (0,), 2.5e-3, 1e-3)
    assert write(one, 200, (4,), 2.5e-3, 1e-3) < -50


def test_what_would_lose_even_if_all_of_it_were_accepted_is_tried_once() -> None:
    """The curves may have been measured beside other work."""
    one = looked(policy(STEEP, SLOW_HEAD), seconds=1e-3)
    growing, tries = SLOW_HEAD[0][1], 0
    for _ in range(20):
        if one.plan_levels(1, 8):
            tries += 1
            one.record_step([TreeOutcome(1, 2, (0.9,), 1)], StepSeconds(2e-3, 2e-3 + growing, growing))
        else:
            assert one.paused_trees >= LOOK_STEPS
            one.record_pause(one.paused_trees, 1)
    assert tries == 1


def test_a_pause_lasts_until_the_next_step_with_drafts_is_paid_for() -> None:
    budget = RegretBudget(RegretPool())
    budget.record(-REGRET)
    steps = budget.steps_until(2.0)
    budget.record(0.0, steps)
    assert budget.available == pytest.approx(2.0)
    assert budget.steps_until(2.0) == pytest.approx(0.0, abs=1e-9)


def test_new_sequences_may_lose_what_others_did_not_and_no_more_than_is_in_the_pool() -> None:
    budget = RegretBudget(RegretPool())
    budget.record(-REGRET)
    budget.begin_sequences()
    assert budget.available == pytest.approx(REGRET, rel=0.01)
    budget.record(-POOL * REGRET)
    budget.begin_sequences()
    assert budget.available < 0


def test_all_numbers_of_sequences_share_what_future_ones_may_lose() -> None:
    pool = RegretPool()
    few, many = RegretBudget(pool), RegretBudget(pool)
    many.record(-POOL * REGRET)
    few.record(-REGRET)
    few.begin_sequences()
    assert few.available < 0.1


def test_what_64_sequences_lost_does_not_stop_drafts_for_one() -> None:
    one = looked(policy(FLAT, FLAT_LEVEL, stepwise=False), 64, seconds=1e-3)
    assert one.plan_levels(64, 8)
    one._regret.available = one._pool.left = -REGRET
    assert one.plan_levels(64, 8) == 0
    assert one.paused_trees > 64 * REGRET / REGRET_SHARE
    looked(one, 1, seconds=1e-3)
    assert one.plan_levels(1, 8)
    assert one.plan_levels(60, 8) == 0, "about as many as before"


def test_a_step_of_64_sequences_that_catches_up_does_not_stop_drafts_for_one() -> None:
    """Chains of a small model on an H200: the step took 25 ms, because prompts had to be computed first. The
    one sequence that came next was paused for good, although drafts had gained 1.36 with it.
    """
    one = DraftPolicy(TreeShape(6, 4), H200_STEP, ((1, 0.5e-3), (64, 1e-3)), (1,) * 5, stepwise=False)
    looked(one, 1, seconds=1.6e-3)
    chain = TreeOutcome(2, 3, (0.9, 0.8), 1)
    for _ in range(HELD_STEPS):
        one.plan_levels(1, 5)
        one.record_step([chain], StepSeconds(2e-3, 2.4e-3, 0.1e-3, waited=0.3e-3))
    one.record_step([chain] * 64, StepSeconds(9e-3, 25e-3, growing=20e-3))
    one._choices.clear()
    assert one.plan_levels(1, 5), "it chooses anew"


def test_after_a_pause_the_budget_covers_one_step_for_a_start() -> None:
    """The first step with drafts took three baseline steps more than the next one would, but a single slow
    step must not keep drafts away.
    """
    one = looked(policy(FLAT, FLAT_LEVEL, stepwise=False), seconds=1e-3)
    assert one.plan_levels(1, 8)
    one.record_step([TreeOutcome(8, 9, (0.7,) * 8, 8)], StepSeconds(5e-3, 5e-3))
    one._regret.available = one._pool.left = -1.0
    assert one.plan_levels(1, 8) == 0
    assert one.paused_trees > LOOK_STEPS
    for available, drafts in ((0.5, False), (1.5, True)):
        one._regret.available = available
        assert bool(one.plan_levels(1, 8)) is drafts


def steps_before_look(one: DraftPolicy, tree: TreeOutcome) -> int:
    """Steps with drafts of eight sequences, which take 2.2 ms, until drafting is paused; 1,000 at most."""
    for number in range(1000):
        if not one.plan_levels(8, 8):
            assert one.paused_trees == 8 * LOOK_STEPS
            one.record_pause(one.paused_trees, 8)
            one.record_step([ROOT_ONLY] * 8, StepSeconds(1.4e-3, 1.4e-3))
            return number
        offer_chains(one, 0.7)
        one.record_step([tree] * 8, StepSeconds(2e-3, 2.2e-3, waited=0.1e-3))
    return 1000


def test_a_look_is_due_where_it_could_stop_drafts() -> None:
    """The first one is due at once. The baseline of eight sequences is 1 ms or more: eight tokens each in
    2.2 ms are more than a later look could find, and two tokens may be fewer.
    """
    good, poor = (looked(policy(FLAT, FLAT_LEVEL, stepwise=False), seconds=1e-3) for _ in range(2))
    masses = tuple(0.7 ** np.arange(1, 9))
    assert steps_before_look(good, TreeOutcome(8, 9, masses, 7)) == 0
    assert steps_before_look(good, TreeOutcome(8, 9, masses, 7)) == 1000
    assert steps_before_look(poor, TreeOutcome(8, 9, masses, 1)) == 0
    assert 100 <= steps_before_look(poor, TreeOutcome(8, 9, masses, 1)) <= 200


@pytest.mark.parametrize("stepwise", [True, False])
def test_what_is_expected_to_lose_leaves_half_of_the_budget(stepwise: bool) -> None:
    for worth in (0.02, 0.9):
        one = looked(policy(FLAT, FLAT_LEVEL, stepwise), seconds=1e-3)
        assert one.plan_levels(1, 8)
        for _ in range(2):
            one.record_step([TreeOutcome(8, 9, (0.7,) * 8, 8)], StepSeconds(1.5e-3, 1.5e-3, 1e-5))
        offer_chains(one, worth)
        one._choice.reuses_left = 0
        one._regret.available = REGRET / 2
        one._pool.left = 0.0
        assert bool(one.plan_levels(1, 8)) is (worth > 0.5)


def test_catching_up_with_prompts_is_paid_for() -> None:
    """A drafter of its own size, and a prompt of 20,000 tokens: the pause is as long as that is worth."""
    one = looked(policy(LARGE, ((1, 1e-3), (64, 8e-3))))
    assert one.plan_levels(1, 8, num_due=20_000) == 0
    assert one.paused_trees > 1000


@pytest.mark.parametrize("stepwise", [True, False])
def test_trees_begin_small_where_growth_can_stop_and_whole_where_it_cannot(stepwise: bool) -> None:
    """A host-bound step takes as long whatever is drafted, so that one node would show that nothing pays."""
    one = looked(policy(FLAT, FLAT_LEVEL, stepwise), seconds=1e-3)
    assert one.plan_levels(1, 8) == 8
    assert one.predict_nodes(1, 8, 100) == (0 if stepwise else max(one.predict_nodes(1, 8, 100), 6))
    worth = np.linspace(0.99, 0.5, 16)[None]
    assert one.select(worth, 2, 100).sum() == (2 if stepwise else 16)


def test_a_choice_is_held_as_long_as_nothing_changes() -> None:
    one = looked(policy(FLAT, FLAT_LEVEL, stepwise=False), seconds=1e-3)
    held = list[bool]()
    for _ in range(40):
        levels = one.plan_levels(1, 8)
        held.append(one.holding)
        tree = TreeOutcome(levels, 1 + levels, (0.7,) * levels, 3)
        one.record_step([tree], StepSeconds(2e-3, 2e-3))
    assert 40 // (HELD_STEPS + 1) <= held.count(False) <= 12


def test_choices_are_made_more_rarely_the_longer_a_gpu_drafts() -> None:
    one = looked(policy(FLAT, FLAT_LEVEL, stepwise=False), seconds=1e-3)
    choices = list[bool]()
    for _ in range(3000):
        if levels := one.plan_levels(1, 8):
            choices.append(not one.holding)
            tree = TreeOutcome(levels, 1 + levels, (0.7,) * levels, 3)
            one.record_step([tree], StepSeconds(2e-3, 2e-3))
        else:
            one.record_pause(one.paused_trees, 1)
            one.record_step([ROOT_ONLY], StepSeconds(1e-3, 1e-3))
    early, late = sum(choices[:500]), sum(choices[-500:])
    assert early >= 500 // (4 * HELD_STEPS)
    assert late < early


def test_the_end_of_an_answer_leaves_the_next_one_with_whole_trees() -> None:
    """A choice that was bounded by the last tokens of an answer was reused for the next one, on an H200."""
    one = looked(policy(FLAT, FLAT_LEVEL, stepwise=False), seconds=1e-3)
    levels = 0
    for max_levels in (*[8] * 40, 2, 1, *[8] * 3):
        levels = one.plan_levels(1, max_levels)
        assert levels <= max_levels
        one.record_step(
            [TreeOutcome(levels, 1 + levels, (0.9,) * levels, levels)], StepSeconds(1.5e-3, 1.5e-3)
        )
    assert levels == 8


def test_prompts_of_other_sequences_cause_no_new_choice() -> None:
    """A choice is reused although 300 or 200 rows of prompts are due in the step."""
    for stepwise in (True, False):
        one = looked(policy(FLAT, FLAT_LEVEL, stepwise), 8, seconds=1e-3)
        reused = list[bool]()
        for num_due in (*[8] * 40, 300, 8, 200):
            before = one._choice.num_choices
            levels = one.plan_levels(8, 8, num_due)
            reused.append(one._choice.num_choices == before)
            tree = TreeOutcome(levels, 1 + levels, (0.9,) * levels, levels)
            one.record_step([tree] * 8, StepSeconds(1.5e-3, 1.5e-3, 1e-5))
        assert [reused[-3], reused[-1]] == [True, True]


def test_the_first_tree_does_not_decide_for_long_what_trees_are_worth() -> None:
    one = looked(policy(FLAT, FLAT_LEVEL, stepwise=False), seconds=1e-3)
    for worth, steps in ((0.01, 1), (0.9, 2), (0.9, 5)):
        for _ in range(steps):
            offer_chains(one, worth)
        one._learn_worth()
    expected = (1 * 0.01 + 7 * 0.9) / 8
    assert one._worth.best(8, 8)[0, 1] == pytest.approx(expected)


def test_candidates_of_other_depths_replace_those_that_were_kept() -> None:
    """Trees of two levels of eight sequences have as many candidates as trees of five levels of 32."""
    one = policy(FLAT, FLAT_LEVEL, stepwise=False)
    for depths in ([1, 1, 2, 2], [1, 1, 2, 2], [1, 2, 3, 4]):
        none = np.zeros((2, 4), np.int64)
        one.keep_sample(Candidates(none, np.zeros((2, 4)), none, np.array(depths)))
    assert [kept.depths.tolist() for kept in one._samples] == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("live", "beside", "held"), [(50, 1, True), (90, 0, True), (46, 0, True), (45, 0, False)]
)
def test_a_choice_is_held_for_about_as_many_sequences(live: int, beside: int, held: bool) -> None:
    """With many clients, sequences begin and end in nearly every step."""
    one = looked(policy(FLAT, FLAT_LEVEL, stepwise=False), sequences=48, seconds=1e-3)
    for _ in range(2 * HELD_STEPS):
        one.plan_levels(48, 8)
        one.record_step([TreeOutcome(8, 9, (0.7,) * 8, 3)] * 48, StepSeconds(2e-3, 2e-3))
        if one.holding:
            break
    one.plan_levels(live, 8, 0, beside)
    assert one.holding is held


def test_steps_that_include_prompts_are_not_measured() -> None:
    one = policy()
    one.record_step([TreeOutcome(1, 2, (0.9,), 1)] * 4)
    assert not one.looks_next(4)


def test_nothing_is_planned_for_no_sequence_and_no_level() -> None:
    one = policy()
    assert (one.plan_levels(0, 6), one.plan_levels(3, 0), one.paused_trees) == (0, 0, 0)


def test_a_frontier_is_fed_where_its_children_bring_more_than_they_take() -> None:
    likely, unlikely = np.log(np.array([[0.99, 0.01]])), np.log(np.array([[0.02, 0.01]]))
    one = looked(policy(DEMO, QUICK_HEAD), seconds=3.2e-3)
    one.plan_levels(1, 8)
    assert one.is_deeper_profitable(likely, 1) == 1
    assert one.is_deeper_profitable(unlikely, 1) == 0


# Seconds of four hops between stages 100 ms apart.
HOPS = 0.216


def test_six_sequences_on_far_stages_are_drafted_at_once() -> None:
    """12 rows take twice as long to compute as 6, but a step is hops for the most part."""
    one = policy(DEAR, FLAT_LEVEL)
    one.start_sequences(6)
    assert one.plan_levels(6, 8) == 0
    for _ in range(LOOK_STEPS):
        one.record_step([ROOT_ONLY] * 6, StepSeconds(0.025, HOPS + 0.025))
    one.record_pause(one.paused_trees, 6)
    assert one.plan_levels(6, 8)
    chances = np.tile((0.7, 0.5), (6, 1))
    assert one.select(chances, 2, 48).sum() == 12


def test_a_choice_that_is_sure_to_gain_borrows_from_the_pool_where_levels_are_launched_at_once() -> None:
    """Every draft of the first steps was accepted; then a slow restart used up the sequences' budget."""
    for stepwise in (True, False):
        one = looked(policy(FLAT, FLAT_LEVEL, stepwise), seconds=1e-3)
        for _ in range(3 * HELD_STEPS):
            levels = one.plan_levels(1, 4)
            if levels:
                outcome = TreeOutcome(levels, 1 + levels, (0.9,) * levels, levels)
                one.record_step([outcome], StepSeconds(1.5e-3, 1.5e-3, 1e-5))
            else:
                one.record_pause(one.paused_trees, 1)
                one.record_step([ROOT_ONLY], StepSeconds(1e-3, 1e-3))
        one._regret.available = -1.0
        one._choice.reuses_left = 0
        assert bool(one.plan_levels(1, 4)) is not stepwise


def test_acceptance_learns_per_depth_and_forgets() -> None:
    acceptance = AcceptanceRates(3)
    for _ in range(200):
        acceptance.record([(3, (0.9, 0.8, 0.7), 1)])
    first, second, _ = acceptance.by_depth()
    assert first > 0.9
    assert second < 0.2
    assert acceptance.trust()[1] < 0.2
    for _ in range(60):
        acceptance.record([(1, (0.9,), 0)])
    assert acceptance.by_depth()[0] < 0.3


def test_trees_count_the_same_together_and_one_after_the_other() -> None:
    """A choice records hundreds of trees at once; some sent no node of their deepest levels."""
    draw = np.random.default_rng(3)
    trees = [
        (levels, tuple(draw.random(draw.integers(0, levels + 1)).tolist()), int(draw.integers(0, levels + 1)))
        for levels in draw.integers(1, 6, 300).tolist()
    ]
    together, apart = AcceptanceRates(5), AcceptanceRates(5)
    together.record([])
    together.record(trees)
    for tree in trees:
        apart.record([tree])
    assert together.by_depth() == pytest.approx(apart.by_depth())
    assert together.trust() == pytest.approx(apart.trust())
    assert together.by_depth()[0] != pytest.approx(PRIOR_ACCEPTANCE, rel=0.02)


def test_older_trees_than_those_that_are_kept_make_no_difference() -> None:
    one, all_trees = policy(FLAT, FLAT_LEVEL, stepwise=False), AcceptanceRates(SHAPE.depth + 1)
    for accepted in (5, 0, 1, 2) * 12:
        trees = [TreeOutcome(6, 7, (0.7,) * 6, (accepted + each) % 4) for each in range(64)]
        one.record_step(trees)
        all_trees.record([(tree.grown, tree.masses, tree.accepted) for tree in trees])
    one._learn_acceptance()
    assert one.acceptance.by_depth() == pytest.approx(all_trees.by_depth(), rel=1e-4)
    assert one.acceptance.trust().tolist() == pytest.approx(all_trees.trust().tolist(), rel=1e-4)


def test_trust_never_rises_with_depth() -> None:
    acceptance = AcceptanceRates(4)
    for _ in range(50):
        acceptance.record([(4, (0.9, 0.01, 0.01, 0.01), 4)])
    assert np.all(np.diff(acceptance.trust()) <= 0)


def test_what_nodes_are_worth_is_known_by_depth_whatever_grew_last() -> None:
    """A third node of trees of two levels is a sibling, and of three levels one more token: mixed up, neither
    a third level nor a third node was worth it.
    """
    worth, depths = TreeWorth(AcceptanceRates(4)), np.array([1, 1, 2, 2, 3, 3])
    values = np.array([[0.8, 0.1, 0.6, 0.05, 0.4, 0.02], [0.8, 0.1, 0.05, 0.6, 0.02, 0.4]])
    worth.record(values, depths)
    for _ in range(20):
        worth.record(values[:, :4] / 2, depths[:4])
    three = worth.best(4, 3)
    assert three[1] == pytest.approx(np.cumsum([0.0, 0.4, 0.3, 0.05]), rel=0.02)
    assert three[2] == pytest.approx(np.cumsum([0.0, 0.4, 0.3, 0.2]), rel=0.02)
    assert worth.best(4, 4)[3, 4] - three[2, 3] == pytest.approx(0.2 * PRIOR_ACCEPTANCE, rel=0.02)
    worth.record(np.full((1, 2), -np.inf), depths[:2])
    assert worth.best(2, 5)[1, 5] == worth.best(2, 4)[1, 4], "there are no more"


def test_trees_truncated_by_the_end_of_their_sequence_do_not_lower_the_value_of_others() -> None:
    """Otherwise eight sequences send fewer nodes whenever one of them ends."""
    alone, beside = TreeWorth(AcceptanceRates(4)), TreeWorth(AcceptanceRates(4))
    value, depths = np.array([0.8, 0.1, 0.6, 0.05]), np.array([1, 1, 2, 2])
    barred = np.full(2, -np.inf)
    alone.record(value[None], depths)
    beside.record(np.array([[*value[:2], *barred], value, [*barred, *barred]]), depths)
    assert beside.best(2, 4) == pytest.approx(alone.best(2, 4))


@pytest.mark.parametrize("slow_steps", [(1,), (1, 2, 3), (1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize(("machine", "live"), [("h100", 1), ("h100", 8), ("card", 1)])
def test_first_steps_that_compile_kernels_do_not_end_drafting(
    machine: str, live: int, slow_steps: tuple[int, ...]
) -> None:
    """On an H200, one step of 177 ms among steps of 3 ms left a new server without drafts for good."""
    policy = measured(machine=machine)
    before = None
    for first in range(6):
        turning = replay(policy, "calm", first, live, machine=machine)
        if before is None:
            turning.slow = dict.fromkeys(slow_steps, 0.17)
        else:
            turning.follow(before)
        drafted_before = turning.drafted
        turning.run(200)
        before = turning
    assert turning.drafted - drafted_before > 40  # steps of the last sequences, 200 tokens each


@pytest.mark.parametrize("factor", [1, 3, 5])
def test_a_busy_start_does_not_rule_drafts_out(factor: int) -> None:
    """The time of a level was told several times too long; trees of right drafts are grown all the same."""
    level = tuple((rows, factor * took) for rows, took in BF16_HEAD)
    one = policy(BF16, level)
    drafted = 0
    for _ in range(60):
        levels = one.plan_levels(1, 3)
        spent = BF16[0][1]
        if not levels:
            for _ in range(max(one.paused_trees, 1)):
                one.record_step([ROOT_ONLY], StepSeconds(spent, spent))
            one.record_pause(max(one.paused_trees, 1), 1)
            continue
        drafted += 1
        growing = 3 * BF16_HEAD[0][1]
        tree = TreeOutcome(3, 4, (0.9, 0.8, 0.7), 3)
        one.record_step([tree], StepSeconds(BF16[1][1], BF16[1][1] + growing, growing))
    assert drafted >= 20


def test_nodes_that_have_no_room_in_a_step_are_not_chosen() -> None:
    """512 rows are a root and 7 nodes for each of 64 sequences."""
    one = DraftPolicy(SHAPE, FLAT, FLAT_LEVEL, (10,) * SHAPE.depth, stepwise=False, max_rows=512)
    looked(one, 64, seconds=1e-3)
    assert one.plan_levels(64, 8)
    assert one.predict_nodes(64, 8, 10_000) == 7
