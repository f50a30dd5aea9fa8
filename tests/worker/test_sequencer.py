"""The sequencer over a mock ring: token identity, leases, credits, cancels, and no page lost."""

import random

import pytest

from specsot.core.frames import (
    Close,
    Draft,
    Drafts,
    End,
    Fork,
    Frame,
    Kept,
    Lease,
    Open,
    Opening,
    Outcome,
    Result,
    TreeSegment,
    rows_of,
)
from specsot.core.kv_plan import plan_frame
from specsot.core.pages import PageTable
from specsot.core.tree import chain
from specsot.params import Window
from specsot_worker.core.pipeline import (
    MAX_ROWS_PER_LAP,
    MAX_UNSENT_ROWS,
    MAX_WAKING_LAPS,
    DraftTimeout,
    FrameBudget,
)
from specsot_worker.core.sequencer import Sequencer
from tests.conftest import seeds
from tests.worker.mock_ring import VOCABULARY, MockRing, MockStage, write_plainly

PAGES, ROWS = 96, 8


def ring_of(rng: random.Random, flight: int = 1, rows: int = 40, skill: float = 0.7) -> MockRing:
    sequencer = Sequencer(1, FrameBudget(rows, flight, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    return MockRing(sequencer, [MockStage(PageTable(PAGES, ROWS)) for _ in range(2)], rng, skill)


def order_of(sequence: int, tokens: list[int], limit: int, fork: Fork | None = None, **more) -> Open:
    prompt = len(tokens) + (fork.length if fork else 0)
    opening = Opening(sequence, prompt, fork=fork, limit=limit, **more)
    return Open(opening, tuple(tokens), lease=10**6)


def run(ring: MockRing) -> None:
    while ring.turn():
        assert len(ring.flying) <= 4
    assert not ring.flying


def assert_empty(ring: MockRing) -> None:
    assert ring.sequencer.idle
    assert [stage.table.free for stage in ring.stages] == [PAGES, PAGES]


@pytest.mark.parametrize("flight", [1, 2, 3])
@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("part", seeds(4, quick=1))
def test_law_1_branches_forked_from_a_prefix_write_what_plain_decoding_writes(flight, skill, part):
    for seed in range(3 * part, 3 * part + 3):
        rng = random.Random(seed)
        ring = ring_of(rng, flight, rng.choice([5, 17, 64]), skill)
        prefix = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 30))]
        ring.sequencer.apply_order(order_of(1, prefix, 1, decodes=False))
        wanted = {}
        for sequence in range(2, 2 + rng.randrange(1, 7)):
            suffix = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 12))]
            limit = rng.randrange(1, 40)
            drafted = rng.random() < 0.8
            ring.sequencer.apply_order(
                order_of(sequence, suffix, limit, Fork(1, len(prefix)), drafted=drafted)
            )
            wanted[sequence] = write_plainly(prefix + suffix, limit)
        run(ring)
        assert ring.log == wanted
        assert set(ring.ends.values()) == {End.LENGTH}
        ring.sequencer.apply_order(Close(1))
        run(ring)
        assert_empty(ring)


@pytest.mark.parametrize("seed", seeds(30, quick=8))
def test_law_4_and_5_cancels_at_any_time_disturb_nobody_and_leave_no_page(seed):
    rng = random.Random(seed)
    ring = ring_of(rng, rng.choice([1, 2, 3]))
    prompts = {s: [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))] for s in range(1, 9)}
    for sequence, prompt in prompts.items():
        ring.sequencer.apply_order(order_of(sequence, prompt, 30))
    doomed = rng.sample(sorted(prompts), 4)
    while doomed or not ring.sequencer.idle:
        moved = ring.turn()
        if doomed and (not moved or rng.random() < 0.1):
            ring.sequencer.apply_order(Close(doomed.pop()))
    run(ring)
    for sequence, tokens in ring.log.items():
        assert tokens == write_plainly(prompts[sequence], 30)[: len(tokens)]
        assert sequence not in ring.ends or len(tokens) == 30
    assert_empty(ring)


@pytest.mark.parametrize("seed", seeds(10, quick=2))
def test_the_row_budget_and_the_credits_hold(seed):
    ring = ring_of(random.Random(seed), flight=2, rows=11)
    for sequence in range(1, 9):
        ring.sequencer.apply_order(order_of(sequence, [sequence % VOCABULARY] * 25, 20))
    run(ring)
    assert max(sum(map(rows_of, frame.segments)) for frame in ring.frames) <= 11
    assert len(ring.log) == 8


def test_at_most_one_tree_of_a_sequence_flies():
    sequencer = Sequencer(1, FrameBudget(64, 4, 9), PageTable(PAGES, ROWS), DraftTimeout(1.0))
    sequencer.apply_order(order_of(1, [1, 2, 3], 10, drafted=False))
    prompt = sequencer.compose(0.0)
    assert prompt is not None
    assert sequencer.compose(0.0) is None


def test_a_sequence_pauses_at_its_lease_and_goes_on_with_a_new_one():
    ring = ring_of(random.Random(1))
    prompt = [1, 2, 3]
    opening = Opening(1, 3, limit=50)
    ring.sequencer.apply_order(Open(opening, tuple(prompt), lease=10))
    run(ring)
    paused = len(ring.log[1])
    assert 7 <= paused < 7 + 10
    assert not ring.sequencer.idle
    ring.sequencer.apply_order(Lease(1, 1000))
    run(ring)
    assert ring.log[1] == write_plainly(prompt, 50)
    assert_empty(ring)


def test_a_fork_of_a_sequence_that_is_gone_is_reported_not_hung():
    ring = ring_of(random.Random(1))
    ring.sequencer.apply_order(order_of(5, [1], 3, Fork(4, 2)))
    run(ring)
    rejected = ring.sequencer.rejections()
    assert [(one.sequence, one.end) for one in rejected] == [(5, End.FAILED)]
    assert_empty(ring)


def test_without_pages_an_opening_waits_for_its_turn():
    ring = ring_of(random.Random(3))
    for sequence in range(1, 30):
        ring.sequencer.apply_order(order_of(sequence, [sequence % VOCABULARY] * 30, 10))
    run(ring)
    assert len(ring.log) == 29
    assert all(len(tokens) == 10 for tokens in ring.log.values())
    assert_empty(ring)


def test_a_silent_drafter_costs_one_timeout_not_one_per_lap():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    ring = MockRing(sequencer, [MockStage(PageTable(PAGES, ROWS))], random.Random(1), 0.0)
    ring._draft = lambda outcomes: None
    sequencer.apply_order(order_of(1, [1, 2], 30))
    run(ring)
    assert ring.now == pytest.approx(0.5)
    assert ring.log[1] == write_plainly([1, 2], 30)


def test_stale_results_and_drafts_change_nothing():
    sequencer = Sequencer(2, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    frame = sequencer.compose(0.0)
    assert frame is not None
    sequencer.apply_result(Result(1, frame.number), 0.0)
    assert sequencer.compose(0.0) is None
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 4])),)))
    assert sequencer.deadline() is None


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_draft_may_overtake_the_result_that_it_builds_on(overtaken: bool):
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    for step, root in enumerate((3, 5)):  # behind the prompt, and behind a tree
        frame = sequencer.compose(0.0)
        assert frame is not None
        result, drafts = (
            Result(1, frame.number, (Outcome(1, step, (), (root,)),)),
            Drafts(1, (Draft(1, step + 1, chain([root, 4])),)),
        )
        if overtaken:
            sequencer.add_drafts(drafts)
        sequencer.apply_result(result, 0.0)
        if not overtaken:
            assert sequencer.compose(0.0) is None
            sequencer.add_drafts(drafts)
    grown = sequencer.compose(0.0)
    assert grown is not None
    (growth,) = grown.segments
    assert isinstance(growth, TreeSegment)
    assert (growth.step, growth.tree) == (2, chain([5, 4]))


def test_of_two_drafts_for_one_step_the_first_wins():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    frame = sequencer.compose(0.0)
    assert frame is not None
    sequencer.apply_result(Result(1, frame.number, (Outcome(1, 0, (), (3,)),)), 0.0)
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 4])),)))
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 5, 6])),)))
    grown = sequencer.compose(0.0)
    assert grown is not None
    (growth,) = grown.segments
    assert isinstance(growth, TreeSegment)
    assert growth.tree == chain([3, 4])


def answered(vocabulary: int = VOCABULARY) -> Sequencer:
    """A prompt was answered with token 3; its sequence waits for the tree of step 1."""
    table, patience = PageTable(PAGES, ROWS), DraftTimeout(0.5)
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), table, patience, vocabulary=vocabulary)
    sequencer.apply_order(order_of(1, [1, 2], 30))
    first_answer(sequencer)
    return sequencer


@pytest.mark.parametrize("tokens", [[3, VOCABULARY], [3, 4, 1 << 40], [3, -1], [VOCABULARY], [5, 4]])
def test_a_tree_that_no_base_could_ask_for_counts_as_missed(tokens):
    sequencer = answered()
    assert sequencer.compose(0.0) is None
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain(tokens)),)), 0.0)
    frame = sequencer.compose(0.0)
    assert frame is not None, "nobody waits any longer for a drafter that has spoken"
    (growth,) = frame.segments
    assert isinstance(growth, TreeSegment)
    assert growth.tree == chain([3])


def test_a_wrong_early_tree_does_not_shut_out_the_right_one_that_comes_early_too():
    sequencer = answered()
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3])),)))
    frame = sequencer.compose(0.0)
    assert frame is not None
    for root in (6, 5):
        sequencer.add_drafts(Drafts(1, (Draft(1, 2, chain([root, 4])),)))
    sequencer.apply_result(Result(1, frame.number, (Outcome(1, 1, (0,), (5,)),)), 0.0)
    grown = sequencer.compose(0.0)
    assert grown is not None
    (growth,) = grown.segments
    assert isinstance(growth, TreeSegment)
    assert growth.tree == chain([5, 4])


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
def test_a_prompt_with_ids_that_the_base_lacks_is_rejected_alone(wrong):
    sequencer = answered()
    sequencer.apply_order(order_of(2, [1, wrong], 30))
    assert [(one.sequence, one.end) for one in sequencer.rejections()] == [(2, End.FAILED)]
    frame = sequencer.compose(0.5)
    assert frame is not None
    assert [one.sequence for one in frame.segments] == [1]


def test_without_credits_nobody_is_hurried():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    first = sequencer.compose(0.0)
    assert first is not None
    sequencer.apply_result(Result(1, first.number, (Outcome(1, 0, (), (3,)),)), 0.0)
    assert sequencer.deadline() == 0.5
    sequencer.apply_order(order_of(2, [1, 2], 30))
    assert sequencer.compose(0.1) is None, "the tree is worth waiting for; what came rides with it"
    assert sequencer.compose(0.6) is not None
    assert sequencer.compose(9.0) is None
    assert sequencer.deadline() is None


def test_nobody_wakes_up_for_a_patience_that_is_lost():
    """A branch of a family of which another is under way: only the result helps, looking again does not."""
    sequencer = Sequencer(1, FrameBudget(2, 3, 1), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 9, decodes=False))
    for sequence in (2, 3):
        sequencer.apply_order(order_of(sequence, [4], 9, Fork(1, 2)))
    frames = [sequencer.compose(0.0) for _ in range(2)]
    assert frames[1] is not None
    sequencer.apply_result(Result(1, frames[1].number, (Outcome(2, 0, (), (3,)),)), 0.0)
    assert sequencer.deadline() == 0.5
    sequencer.apply_result(Result(1, frames[1].number, (Outcome(3, 0, (), (3,)),)), 0.2)
    assert sequencer.compose(0.5) is None
    assert sequencer.deadline() == 0.7
    assert sequencer.compose(0.7) is not None


def test_a_drafter_that_has_answered_already_is_not_waited_for():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(40, 8), DraftTimeout(0.5))
    for sequence in (1, 2):
        sequencer.apply_order(order_of(sequence, [1, 2], 30))
    first = sequencer.compose(0.0)
    assert first is not None
    outcomes = tuple(Outcome(one, 0, (), (3,)) for one in (1, 2))
    sequencer.apply_result(Result(1, first.number, outcomes), 0.1, awaits=False)
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 4])),)))
    frame = sequencer.compose(0.1)
    assert frame is not None
    trees = {one.sequence: one.tree for one in frame.segments if isinstance(one, TreeSegment)}
    assert trees == {1: chain([3, 4]), 2: chain([3])}


def test_behind_a_rest_nobody_waits_for_a_tree_that_the_drafter_was_not_told_to_grow():
    """Some texts are told of one lap later: its answer holds those alone that it knows."""
    sequencer = Sequencer(1, FrameBudget(2 * MAX_ROWS_PER_LAP, 1, 9), PageTable(400, 8), DraftTimeout(0.5))
    for sequence in (1, 2):
        sequencer.apply_order(order_of(sequence, [1, 2], 30))
    first = sequencer.compose(0.0)
    assert first is not None
    sequencer.apply_result(Result(1, first.number, tuple(Outcome(one, 0, (), (3,)) for one in (1, 2))), 0.1)
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 4])),)), 0.2)
    assert sequencer.compose(0.2) is None, "the other tree may come yet"
    sequencer.add_drafts(Drafts(1, (), rest=2))
    sequencer.apply_order(
        order_of(3, [1] * (MAX_ROWS_PER_LAP + 9), 9, drafted=False)
    )  # more than a lap tells
    for step in (1, 2, 3):
        frame = sequencer.compose(0.3)
        assert frame is not None
        assert (frame.resting, frame.waking) == (step == 1, step == 2)
        outcomes = tuple(Outcome(one, step, (0,), (3,)) for one in (1, 2))
        sequencer.apply_result(Result(1, frame.number, outcomes), 0.4)
        if step == 2:
            sequencer.add_drafts(Drafts(1))
    assert sequencer.compose(0.4) is None
    sequencer.add_drafts(Drafts(1, (Draft(1, 4, chain([3, 4])),)), 0.5)
    frame = sequencer.compose(0.5)
    assert frame is not None
    trees = {one.sequence: one.tree for one in frame.segments if isinstance(one, TreeSegment)}
    assert trees == {1: chain([3, 4]), 2: chain([3])}


def test_a_family_goes_out_whole():
    sequencer = Sequencer(1, FrameBudget(64, 3, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2, 3], 1, decodes=False))
    for sequence in (2, 3):
        sequencer.apply_order(order_of(sequence, [4], 9, Fork(1, 3)))
    prefix = sequencer.compose(0.0)
    branches = sequencer.compose(0.0)
    assert prefix is not None
    assert branches is not None
    outcomes = (Outcome(2, 0, (), (5,)), Outcome(3, 0, (), (6,)))
    sequencer.apply_result(Result(1, branches.number, outcomes), 0.0)
    sequencer.add_drafts(Drafts(1, (Draft(2, 1, chain([5, 5])),)))
    assert sequencer.compose(0.1) is None, "the other branch still waits for its tree"
    sequencer.add_drafts(Drafts(1, (Draft(3, 1, chain([6])),)))
    frame = sequencer.compose(0.2)
    assert frame is not None
    assert [segment.sequence for segment in frame.segments] == [2, 3]
    assert sequencer.compose(0.2) is None


def first_answer(sequencer: Sequencer, forced: tuple[int, ...] = ()) -> None:
    """A prompt of two tokens passes; its sequence waits for its first tree then, if it may."""
    frame = sequencer.compose(0.0)
    assert frame is not None
    sequencer.apply_result(Result(1, frame.number, (Outcome(1, 0, (), (3,), forced=forced),)), 0.0)


def lap(sequencer: Sequencer, now: float = 0.0, forced: tuple[int, ...] = ()) -> tuple[str, int] | None:
    """One frame and its result: whether the drafter rests or wakes, and its rows."""
    frame = sequencer.compose(now)
    if frame is None:
        return None
    (growth,) = frame.segments
    assert isinstance(growth, TreeSegment)
    outcome = Outcome(1, growth.step, (0,), (3,), forced=forced)
    sequencer.apply_result(Result(1, frame.number, (outcome,)), now)
    return "resting" * frame.resting + "waking" * frame.waking, len(growth.tree)


def test_a_resting_drafter_hears_nothing_and_behind_its_rest_it_is_waited_for_once_it_has_caught_up():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    first_answer(sequencer)
    assert sequencer.compose(0.1) is None
    sequencer.add_drafts(Drafts(1, (), rest=3))
    assert [lap(sequencer) for _ in range(5)] == [*[("resting", 1)] * 3, *[("waking", 1)] * 2]
    sequencer.add_drafts(Drafts(1))
    assert lap(sequencer) == ("", 1), "its tree is asked for with this one"
    assert lap(sequencer) is None, "now it is worth waiting for"
    assert lap(sequencer, now=0.6) == ("", 1)


def test_a_drafter_that_never_says_that_it_is_awake_is_asked_all_the_same():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 300))
    first_answer(sequencer)
    sequencer.add_drafts(Drafts(1, (), rest=1))
    laps = [lap(sequencer) for _ in range(MAX_WAKING_LAPS + 2)]
    assert laps == [("resting", 1), *[("waking", 1)] * MAX_WAKING_LAPS, ("", 1)]
    assert lap(sequencer) is None


def test_a_rest_that_began_with_many_writers_is_as_many_laps_of_few():
    patience = DraftTimeout(0.5)
    patience.start_rest(80, live=8)
    for _ in range(4):
        patience.record_launch(8, 8, live=8)
    for _ in range(6):
        assert patience.resting
        patience.record_launch(1, 1, live=1)
    assert patience.waking
    assert not patience.resting


def test_a_rest_counts_drafted_trees_alone_and_its_backlog_is_bounded():
    patience = DraftTimeout(0.5)
    patience.start_rest(5)
    patience.record_launch(0, 40)
    assert patience.resting
    patience.record_launch(4, 4)
    assert patience.resting
    patience.record_launch(1, 1)
    assert not patience.resting
    patience.start_rest(10**6)
    patience.record_launch(1, MAX_UNSENT_ROWS)
    assert not patience.resting


def test_nobody_rests_for_a_drafter_that_is_gone():
    patience = DraftTimeout(0.5)
    patience.start_rest(9)
    patience.drafter_left()
    assert not patience.resting


def test_what_is_forced_is_fed_when_no_tree_comes_and_never_beyond_the_slots():
    sequencer = Sequencer(1, FrameBudget(64, 1, 4), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    first_answer(sequencer, forced=(4, 5))
    sequencer.add_drafts(Drafts(1, (), rest=2))
    assert lap(sequencer, forced=(4, 5, 6, 4, 5, 6)) == ("resting", 3)
    assert lap(sequencer, forced=(4, 5)) == ("resting", 4)
    assert lap(sequencer, forced=(4, 5)) == ("waking", 3)
    sequencer.add_drafts(Drafts(1, (Draft(1, 4, chain([3, 6])),)))
    assert lap(sequencer) == ("", 2), "a tree that came is better"


def test_families_of_one_prefix_do_not_wait_for_each_other():
    sequencer = Sequencer(1, FrameBudget(64, 3, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2, 3], 1, decodes=False))
    for sequence in (2, 3):
        sequencer.apply_order(order_of(sequence, [4], 9, Fork(1, 3), family=sequence, drafted=False))
    assert sequencer.compose(0.0) is not None
    prompts = sequencer.compose(0.0)
    assert prompts is not None
    sequencer.apply_result(Result(1, prompts.number, (Outcome(2, 0, (), (5,)),)), 0.0)
    first = sequencer.compose(0.0)
    assert first is not None
    assert [segment.sequence for segment in first.segments] == [2]
    sequencer.apply_result(Result(1, prompts.number, (Outcome(3, 0, (), (6,)),)), 0.0)
    second = sequencer.compose(0.0)
    assert second is not None, "the other family's tree is still under way"
    assert [segment.sequence for segment in second.segments] == [3]


def test_prompts_alone_go_in_wide_frames_but_nobody_who_writes_waits_for_one():
    """Nor does whoever has a policy, whose pages are counted by the rows of other frames."""
    budget = FrameBudget(16, 1, 9, prompts=40)
    sequencer = Sequencer(1, budget, PageTable(PAGES, ROWS), DraftTimeout(0.0))

    def fed(number: int) -> dict[int, int]:
        frame = sequencer.compose(0.0)
        assert frame is not None
        sequences = {one.sequence: rows_of(one) for one in frame.segments}
        ends = tuple(Outcome(one, number, (), (3,)) for one in (2,) if number == 2)
        sequencer.apply_result(Result(1, frame.number, ends), 0.0)
        return sequences

    sequencer.apply_order(order_of(1, [1] * 100, 9, window=Window(2, 16)))
    sequencer.apply_order(order_of(2, [1] * 60, 9))
    assert fed(1) == {1: 16, 2: 24}
    sequencer.apply_order(Close(1))
    assert fed(2) == {2: 36}, "the prompt's end"
    sequencer.apply_order(order_of(3, [1] * 100, 9))
    assert fed(3) == {2: 1, 3: 15}


def test_nobody_forks_kept_rows_that_are_not_in_pages_yet():
    """A stage puts them there with the first rows that are fed behind them."""
    stage = PageTable(PAGES, ROWS)
    sequencer = Sequencer(1, FrameBudget(8, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.0))
    sequencer.apply_order(order_of(1, [1] * 20, 9))
    kept = Kept(9, tuple(range(30)))
    sequencer.apply_order(order_of(2, [*kept.tokens, 7, 7], 1, decodes=False, kept=kept))
    sequencer.apply_order(order_of(3, [4], 9, Fork(2, 12)))
    frames = list[Frame]()
    while not any(one.sequence == 3 for frame in frames for one in frame.openings):
        frame = sequencer.compose(0.0)
        assert frame is not None
        frames.append(frame)
        plan_frame(stage, frame)
        answers = [Outcome(one.sequence, 0, (), (3,)) for one in frame.segments if one.sequence != 2]
        done = [one for one in answers if sequencer._sequences[one.sequence].prefilled]
        sequencer.apply_result(Result(1, frame.number, tuple(done)), 0.0)
    assert [one.sequence for one in frames[0].openings] == [1, 2]
    assert all(one.sequence == 1 for one in frames[0].segments), "no room for the other's rows"
