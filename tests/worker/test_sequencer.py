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
    Lease,
    Open,
    Opening,
    Outcome,
    ParentNode,
    PromptChunk,
    Result,
    ReusedKV,
    TreeSegment,
    rows_of,
)
from specsot.core.pages import PageTable
from specsot.core.tree import chain
from specsot.params import Window
from specsot_model.core.kv_plan import plan_frame
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from tests.conftest import seeds
from tests.cut_trees import CutTrees
from tests.there import there
from tests.worker.mock_ring import VOCABULARY, MockRing, MockStage, write_plainly

PAGES, ROWS = 96, 8


def ring_of(rng: random.Random, flight: int = 1, rows: int = 40, skill: float = 0.7) -> MockRing:
    sequencer = Sequencer(1, FrameBudget(rows, flight, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    return MockRing(sequencer, [MockStage(PageTable(PAGES, ROWS)) for _ in range(2)], rng, skill)


def ring_in_parts(rng: random.Random, flight: int, parts: int) -> MockRing:
    table = PageTable(PAGES, ROWS)
    depth = CutTrees(parts, stages=2)
    sequencer = Sequencer(1, FrameBudget(40, flight, 9), table, DraftTimeout(0.5), depth)
    return MockRing(sequencer, [MockStage(PageTable(PAGES, ROWS)) for _ in range(2)], rng, 0.7)


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


@pytest.mark.parametrize("seed", seeds(20, quick=5))
def test_law_1_trees_in_parts_write_what_plain_decoding_writes(seed):
    rng = random.Random(seed)
    ring = ring_in_parts(rng, rng.choice([1, 2, 3]), rng.choice([2, 3, 9]))
    wanted = {}
    for sequence in range(1, 1 + rng.choice([1, 1, 3])):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 30))]
        limit = rng.randrange(10, 40)
        ring.sequencer.apply_order(order_of(sequence, prompt, limit))
        wanted[sequence] = write_plainly(prompt, limit)
    run(ring)
    assert ring.log == wanted
    assert ring.cut or len(wanted) > 1, "several sequences share frames, which are not cut"
    assert_empty(ring)


def test_a_frame_is_cut_if_it_carries_one_tree_and_nothing_else_is_in_flight() -> None:
    table = PageTable(PAGES, ROWS)
    sequencer = Sequencer(1, FrameBudget(40, 3, 9), table, DraftTimeout(0.5), CutTrees(2, stages=2))
    rounds = dict.fromkeys((1, 2, 3), 0)

    def draft(*sequences: int) -> Frame:
        """The frame that follows trees of these sequences, whose last result was the token 5."""
        trees = [Draft(one, rounds[one], chain([5, 6, 7])) for one in sequences]
        sequencer.add_drafts(Drafts(1, tuple(trees)))
        return there(sequencer.compose(0.0))

    def finish(frame: Frame) -> None:
        """The result of a frame: every sequence has one more token."""
        outcomes = []
        for one in frame.segments:
            kept = (0,) if isinstance(one, TreeSegment) else ()
            outcomes.append(Outcome(one.sequence, rounds[one.sequence], kept, (5,)))
            rounds[one.sequence] += 1
        sequencer.apply_result(Result(1, frame.number, tuple(outcomes)), 0.0)

    sequencer.apply_order(order_of(1, [1, 2], 20))
    finish(there(sequencer.compose(0.0)))
    alone = draft(1)
    assert alone.last_part == 1
    finish(alone)
    sequencer.apply_order(order_of(2, [1, 2], 20, window=Window(4, 16)))
    prompt = there(sequencer.compose(0.0))
    after_prompt = draft(1)
    assert [one.sequence for one in after_prompt.segments] == [1]
    assert after_prompt.last_part == 0, "another frame is in flight"
    finish(prompt)
    finish(after_prompt)
    both = draft(1, 2)
    assert (len(both.segments), both.last_part) == (2, 0)
    finish(both)
    sequencer.apply_order(Close(1))
    closing = draft(2)
    assert (closing.closings, closing.last_part) == ((1,), 0)
    finish(closing)
    assert draft(2).last_part == 0, "trees under a KV policy travel whole"


@pytest.mark.parametrize("seed", seeds(30, quick=8))
def test_law_4_and_5_cancels_at_any_time_change_no_other_sequence_and_leave_no_page(seed):
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
    assert sequencer.compose(0.0) is not None
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


def fed_positions(ring: MockRing, sequence: int) -> list[int]:
    """The positions of a prompt that frames have carried, in order."""
    chunks = [one for frame in ring.frames for one in frame.segments if isinstance(one, PromptChunk)]
    return [one.start + n for one in chunks if one.sequence == sequence for n in range(len(one.tokens))]


def test_a_prefix_is_fed_no_further_than_its_lease_and_continues_where_it_ended():
    ring = ring_of(random.Random(1), rows=8)
    prefix = [n % VOCABULARY for n in range(50)]
    ring.sequencer.apply_order(order_of(1, prefix, 1, decodes=False))
    for _ in range(2):
        ring.turn()
    fed = len(fed_positions(ring, 1))
    ring.sequencer.apply_order(Lease(1, 0))
    ring.sequencer.apply_order(order_of(2, [1, 2], 5))
    run(ring)
    assert 0 < fed == len(fed_positions(ring, 1)) < 50, "no token of an interrupted prefill is fed"
    assert not ring.sequencer.prompt_tokens_due
    ring.sequencer.apply_order(order_of(3, [3], 5, Fork(1, 30)))
    run(ring)
    assert 3 not in ring.log
    ring.sequencer.apply_order(Lease(1, 30))
    run(ring)
    assert ring.log[3] == write_plainly([*prefix[:30], 3], 5)
    ring.sequencer.apply_order(order_of(4, [4], 5, Fork(1, 50)))
    ring.sequencer.apply_order(Lease(1, 50))
    run(ring)
    assert ring.log[4] == write_plainly([*prefix, 4], 5)
    assert fed_positions(ring, 1) == list(range(50)), "each token once"
    ring.sequencer.apply_order(Close(1))
    run(ring)
    assert_empty(ring)


def test_an_interrupted_prefix_that_was_never_fed_is_not_even_opened():
    ring = ring_of(random.Random(1))
    ring.sequencer.apply_order(order_of(1, [1] * 20, 1, decodes=False))
    ring.sequencer.apply_order(Lease(1, 0))
    assert ring.sequencer.compose(0.0) is None
    ring.sequencer.apply_order(Close(1))
    assert_empty(ring)


@pytest.mark.parametrize("seed", seeds(40, quick=8))
def test_law_1_forks_of_a_prefix_that_is_interrupted_at_any_time_write_what_plain_decoding_writes(seed):
    rng = random.Random(seed)
    ring = ring_of(rng, rng.choice([1, 2, 3]), rng.choice([5, 17]))
    prefix = [rng.randrange(VOCABULARY) for _ in range(60)]
    ring.sequencer.apply_order(order_of(1, prefix, 1, decodes=False))
    wanted = dict[int, list[int]]()
    for sequence in range(2, 8):
        length = rng.randrange(1, 61)
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))]
        for _ in range(rng.randrange(9)):
            ring.turn()
        ring.sequencer.apply_order(order_of(sequence, own, 9, Fork(1, length)))
        ring.sequencer.apply_order(Lease(1, rng.choice([0, length, 60])))
        wanted[sequence] = write_plainly([*prefix[:length], *own], 9)
    run(ring)
    ring.sequencer.apply_order(Lease(1, 60))
    run(ring)
    assert ring.log == wanted
    assert fed_positions(ring, 1) == list(range(60))
    ring.sequencer.apply_order(Close(1))
    run(ring)
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


def test_stale_results_and_drafts_change_nothing():
    sequencer = Sequencer(2, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    frame = there(sequencer.compose(0.0))
    sequencer.apply_result(Result(1, frame.number), 0.0)
    assert sequencer.compose(0.0) is None
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 4])),)))
    assert sequencer.deadline() is None


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_draft_may_overtake_the_result_that_it_builds_on(overtaken: bool):
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    for draft_round, root in enumerate((3, 5)):  # behind the prompt, and behind a tree
        frame = there(sequencer.compose(0.0))
        result, drafts = (
            Result(1, frame.number, (Outcome(1, draft_round, (), (root,)),)),
            Drafts(1, (Draft(1, draft_round + 1, chain([root, 4])),)),
        )
        if overtaken:
            sequencer.add_drafts(drafts)
        sequencer.apply_result(result, 0.0)
        if not overtaken:
            assert sequencer.compose(0.0) is None
            sequencer.add_drafts(drafts)
    growth = only_tree(sequencer.compose(0.0))
    assert (growth.draft_round, growth.tree) == (2, chain([5, 4]))


def test_of_two_drafts_for_one_step_the_first_wins():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    frame = there(sequencer.compose(0.0))
    sequencer.apply_result(Result(1, frame.number, (Outcome(1, 0, (), (3,)),)), 0.0)
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 4])),)))
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 5, 6])),)))
    assert only_tree(sequencer.compose(0.0)).tree == chain([3, 4])


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


def test_a_tree_for_an_unverified_root_counts_as_missed() -> None:
    """It needs a second tree frame of its sequence in flight."""
    sequencer = answered()
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 4]), ParentNode(0, 0)),)), 0.0)
    assert only_tree(sequencer.compose(0.0)).tree == chain([3])


def test_every_tree_frame_grows_from_the_verified_root_in_the_scratch_slots_from_0_on() -> None:
    sequencer = answered()
    for draft_round, root in ((1, 3), (2, 5), (3, 6)):
        sequencer.add_drafts(Drafts(1, (Draft(1, draft_round, chain([root, 4])),)))
        frame = there(sequencer.compose(0.0))
        tree = only_tree(frame)
        assert (tree.draft_round, tree.parent, tree.scratch, tree.freed) == (draft_round, None, 0, ())
        outcome = Outcome(1, draft_round, (0,), ({1: 5, 2: 6, 3: 7}[draft_round],))
        assert outcome.dropped == ()
        sequencer.apply_result(Result(1, frame.number, (outcome,)), 0.0)


def test_a_wrong_early_tree_does_not_shut_out_the_right_one_that_comes_early_too():
    sequencer = answered()
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3])),)))
    frame = there(sequencer.compose(0.0))
    for root in (6, 5):
        sequencer.add_drafts(Drafts(1, (Draft(1, 2, chain([root, 4])),)))
    sequencer.apply_result(Result(1, frame.number, (Outcome(1, 1, (0,), (5,)),)), 0.0)
    assert only_tree(sequencer.compose(0.0)).tree == chain([5, 4])


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
def test_a_prompt_with_ids_that_the_base_lacks_is_rejected_alone(wrong):
    sequencer = answered()
    sequencer.apply_order(order_of(2, [1, wrong], 30))
    assert [(one.sequence, one.end) for one in sequencer.rejections()] == [(2, End.FAILED)]
    frame = there(sequencer.compose(0.5))
    assert [one.sequence for one in frame.segments] == [1]


def test_a_second_opening_of_a_sequence_changes_nothing_whatever_its_ids():
    sequencer = answered()
    sequencer.apply_order(order_of(1, [1, VOCABULARY], 30))
    assert sequencer.rejections() == ()
    assert [one.sequence for one in there(sequencer.compose(0.5)).segments] == [1]


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
    frame = there(sequencer.compose(0.2))
    assert [segment.sequence for segment in frame.segments] == [2, 3]
    assert sequencer.compose(0.2) is None


def first_answer(sequencer: Sequencer, forced: tuple[int, ...] = ()) -> None:
    """A prompt of two tokens passes; its sequence waits for its first tree then, if it may."""
    frame = there(sequencer.compose(0.0))
    sequencer.apply_result(Result(1, frame.number, (Outcome(1, 0, (), (3,), forced=forced),)), 0.0)


def only_tree(frame: Frame | None) -> TreeSegment:
    """The frame's one segment."""
    (growth,) = there(frame).segments
    assert isinstance(growth, TreeSegment)
    return growth


def step(sequencer: Sequencer, now: float = 0.0, forced: tuple[int, ...] = ()) -> tuple[str, int] | None:
    """One frame and its result: whether the drafter rests or wakes, and its rows."""
    frame = sequencer.compose(now)
    if frame is None:
        return None
    growth = only_tree(frame)
    outcome = Outcome(1, growth.draft_round, (0,), (3,), forced=forced)
    sequencer.apply_result(Result(1, frame.number, (outcome,)), now)
    return "resting" * frame.paused + "waking" * frame.catching_up, len(growth.tree)


def test_what_is_forced_is_fed_when_no_tree_comes_and_never_beyond_the_slots():
    sequencer = Sequencer(1, FrameBudget(64, 1, 4), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    first_answer(sequencer, forced=(4, 5))
    sequencer.add_drafts(Drafts(1, (), paused_trees=2))
    assert step(sequencer, forced=(4, 5, 6, 4, 5, 6)) == ("resting", 3)
    assert step(sequencer, forced=(4, 5)) == ("resting", 4)
    assert step(sequencer, forced=(4, 5)) == ("waking", 3)
    sequencer.add_drafts(Drafts(1, (Draft(1, 4, chain([3, 6])),)))
    assert step(sequencer) == ("", 2), "a tree that came is better"


@pytest.mark.parametrize(("family", "drafting"), [(1, "resting"), (2, "waking")])
def test_a_pause_does_not_end_between_a_plan_and_its_branches(family: int, drafting: str):
    """It ends where all sequences are of new requests.

    family: Of the sequence that follows one of family 1.
    """
    sequencer = Sequencer(1, FrameBudget(64, 1, 4), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30, family=1, drafted=True))
    first_answer(sequencer)
    sequencer.add_drafts(Drafts(1, (), paused_trees=100))
    assert step(sequencer) == ("resting", 1)
    sequencer.apply_order(order_of(2, [3, 4], 30, family=family, drafted=True))
    sequencer.apply_order(Close(1))
    for _ in range(2):
        frame = there(sequencer.compose(0.0))
        outcome = Outcome(2, int(isinstance(frame.segments[0], TreeSegment)), (), (3,))
        sequencer.apply_result(Result(1, frame.number, (outcome,)), 0.0)
    assert "resting" * frame.paused + "waking" * frame.catching_up == drafting


def test_families_of_one_prefix_do_not_wait_for_each_other():
    sequencer = Sequencer(1, FrameBudget(64, 3, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2, 3], 1, decodes=False))
    for sequence in (2, 3):
        sequencer.apply_order(order_of(sequence, [4], 9, Fork(1, 3), family=sequence, drafted=False))
    assert sequencer.compose(0.0) is not None
    prompts = there(sequencer.compose(0.0))
    sequencer.apply_result(Result(1, prompts.number, (Outcome(2, 0, (), (5,)),)), 0.0)
    first = there(sequencer.compose(0.0))
    assert [segment.sequence for segment in first.segments] == [2]
    sequencer.apply_result(Result(1, prompts.number, (Outcome(3, 0, (), (6,)),)), 0.0)
    second = sequencer.compose(0.0)
    assert second is not None, "the other family's tree is still under way"
    assert [segment.sequence for segment in second.segments] == [3]


def test_prompts_alone_run_in_wide_frames_but_no_decoding_sequence_waits_for_one():
    """Nor does whoever has a policy, whose pages are counted by the rows of other frames."""
    budget = FrameBudget(16, 1, 9, prompts=40)
    sequencer = Sequencer(1, budget, PageTable(PAGES, ROWS), DraftTimeout(0.0))

    def fed(number: int) -> dict[int, int]:
        frame = there(sequencer.compose(0.0))
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


def test_no_sequence_forks_reused_rows_that_are_not_in_pages_yet():
    """A stage puts them there with the first rows that are fed behind them."""
    stage = PageTable(PAGES, ROWS)
    sequencer = Sequencer(1, FrameBudget(8, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.0))
    sequencer.apply_order(order_of(1, [1] * 20, 9))
    kept = ReusedKV(9, tuple(range(30)))
    sequencer.apply_order(order_of(2, [*kept.tokens, 7, 7], 1, decodes=False, reused=kept))
    sequencer.apply_order(order_of(3, [4], 9, Fork(2, 12)))
    frames = list[Frame]()
    while not any(one.sequence == 3 for frame in frames for one in frame.openings):
        frame = there(sequencer.compose(0.0))
        frames.append(frame)
        plan_frame(stage, frame)
        answers = [Outcome(one.sequence, 0, (), (3,)) for one in frame.segments if one.sequence != 2]
        done = [one for one in answers if sequencer._sequences[one.sequence].prefilled]
        sequencer.apply_result(Result(1, frame.number, tuple(done)), 0.0)
    assert [one.sequence for one in frames[0].openings] == [1, 2]
    assert all(one.sequence == 1 for one in frames[0].segments), "no room for the other's rows"
