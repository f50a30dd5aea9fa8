"""More to do than a frame has rows for: prompts get their share, trees take turns, and no text changes."""

import random

import pytest

from specsot.core.frames import (
    Draft,
    Drafts,
    Fork,
    Frame,
    Open,
    Opening,
    Outcome,
    PromptChunk,
    Result,
    TreeSegment,
    rows_of,
)
from specsot.core.pages import PageTable
from specsot.core.tree import Tree
from specsot_worker.core.pipeline import (
    CHUNK_DIVISORS,
    MIN_PROMPT_ROWS,
    DraftTimeout,
    FrameBudget,
    PipelineDepth,
)
from specsot_worker.core.sequencer import PREFILL_SHARE, Sequencer
from tests.conftest import seeds
from tests.worker.mock_ring import VOCABULARY, MockRing, MockStage, write_plainly

PROMPT = 40  # rows


class Steps:
    """A ring whose drafter always sends trees of so many nodes; `turn` is one frame there and back."""

    def __init__(self, rows: int, nodes: int = 1, flow: PipelineDepth | None = None, flight: int = 1) -> None:
        patience = DraftTimeout(1.0, nodes > 1)
        self.nodes, self.now, self.written = nodes, 0.0, dict[int, int]()
        self.sequencer = Sequencer(
            1, FrameBudget(rows, flight, max(nodes, 1)), PageTable(1 << 14, 16), patience, flow
        )

    def open(self, sequence: int, prompt: int = 1, fork: Fork | None = None, **more) -> None:
        length = prompt + (fork.length if fork else 0)
        opening = Opening(sequence, length, fork=fork, limit=10**6, drafted=self.nodes > 1, **more)
        self.sequencer.apply_order(Open(opening, (5,) * prompt, 1 << 30))

    def turn(self) -> Frame:
        self.now += 1.0
        frame = self.sequencer.compose(self.now)
        assert frame is not None
        judged = [one for one in frame.segments if isinstance(one, TreeSegment) or one.final]
        outcomes = tuple(_outcome(one) for one in judged)
        for one in judged:
            self.written[one.sequence] = self.written.get(one.sequence, 0) + 1
        self.sequencer.apply_result(Result(1, frame.number, outcomes), self.now)
        if self.nodes > 1:
            tree = Tree((7,) * self.nodes, (0,) * self.nodes)
            drafts = tuple(Draft(one.sequence, one.draft_round + 1, tree) for one in outcomes)
            self.sequencer.add_drafts(Drafts(1, drafts), self.now)
        return frame


def _outcome(segment: PromptChunk | TreeSegment) -> Outcome:
    if isinstance(segment, PromptChunk):
        return Outcome(segment.sequence, 0, (), (7,))
    return Outcome(segment.sequence, segment.draft_round, (0,), (7,))


def within(prompts: list[int], share: int) -> int:
    """The law: steps from admission to the last one's first token, for prompts that wait in this order."""
    return -(-sum(prompts) // share)


@pytest.mark.parametrize(
    ("rows", "writers", "nodes"), [(8, 8, 1), (512, 9, 60), (64, 200, 4), (2, 5, 1), (1, 3, 1)]
)
def test_a_prompt_gets_its_first_token_within_a_bounded_number_of_steps(rows, writers, nodes):
    steps = Steps(rows, nodes)
    for sequence in range(1, writers + 1):
        steps.open(sequence)
    while len(steps.written) < writers:
        steps.turn()
    prompts = [PROMPT, 3, 2 * PROMPT]
    for n, prompt in enumerate(prompts):
        steps.open(1000 + n, prompt)
    share = max(rows // PREFILL_SHARE, 1)
    for step in range(2 * within(prompts, share) if rows == 1 else within(prompts, share)):
        steps.turn()
        for n in range(len(prompts)):
            due = within(prompts[: n + 1], share) * (2 if rows == 1 else 1)
            assert step + 1 < due or steps.written.get(1000 + n, 0) > 0, (n, step, due)


def test_branches_of_a_prefix_start_alongside_full_trees():
    steps = Steps(64, 16)
    for sequence in range(1, 9):
        steps.open(sequence)
    for _ in range(5):
        steps.turn()
    steps.open(100, PROMPT, decodes=False)
    for branch in range(4):
        steps.open(101 + branch, 5, Fork(100, PROMPT))
    for _ in range(within([PROMPT], 16) + within([5] * 4, 16) + 1):
        steps.turn()
    assert all(steps.written.get(101 + branch) for branch in range(4))


def test_with_several_stages_a_chunk_may_be_shorter_but_comes_with_every_frame():
    rows = 64
    steps = Steps(rows, 16, PipelineDepth(2, ((1, 1.0), (rows, 2.0))))
    for sequence in range(1, 9):
        steps.open(sequence)
    for _ in range(5):
        steps.turn()
    steps.open(100, PROMPT)
    for _ in range(within([PROMPT], rows // CHUNK_DIVISORS[-1])):
        steps.turn()
    assert steps.written.get(100)


def test_if_rows_are_slow_a_prompt_runs_in_small_chunks_alongside_sequences():
    steps = Steps(64, 1, PipelineDepth(1, ((1, 1.0), (64, 64.0))))
    steps.open(1)
    steps.turn()
    steps.open(2, PROMPT)
    fed = [len(one.tokens) for _ in range(-(-PROMPT // MIN_PROMPT_ROWS)) for one in steps.turn().segments
           if isinstance(one, PromptChunk)]  # fmt: skip
    assert max(fed) == MIN_PROMPT_ROWS
    assert sum(fed) == PROMPT
    assert steps.written.get(2) == 1


def test_frames_in_flight_share_the_time_that_a_sequence_may_wait_for_prompts():
    """Else stages wait for each other: behind a frame of many rows comes one of few."""
    steps = Steps(64, 1, PipelineDepth(2, ((1, 1.0), (64, 64.0))), flight=3)
    for sequence in range(16):
        steps.open(sequence)
    steps.turn()
    for sequence in range(16, 26):
        steps.open(sequence, PROMPT)
    frames = [steps.sequencer.compose(steps.now) for _ in range(2)]
    rows = [sum(rows_of(one) for one in frame.segments if isinstance(one, PromptChunk)) for frame in frames]
    assert rows == [21, 21], "8 and 21 rows take at most 2.25 times as long as 13"


def test_a_fork_that_waits_for_its_prefix_is_not_counted_as_soon_decoding():
    steps = Steps(64, 1, PipelineDepth(1, ((1, 1.0), (64, 64.0))))
    for sequence in range(9):
        steps.open(sequence)
    steps.turn()
    steps.open(9, PROMPT, decodes=False)
    for sequence in range(10, 30):
        steps.open(sequence, 5, Fork(9, PROMPT))
    assert [rows_of(one) for one in steps.turn().segments if isinstance(one, PromptChunk)] == [13]


def test_trees_give_up_rows_only_while_a_prompt_waits():
    steps = Steps(64, 16)
    for sequence in range(1, 5):
        steps.open(sequence)
    steps.turn()
    assert sum(len(one.tree) for one in steps.turn().segments if isinstance(one, TreeSegment)) == 64
    steps.open(9, 4)
    frame = steps.turn()
    assert sum(len(one.tree) for one in frame.segments if isinstance(one, TreeSegment)) == 60, (
        "no more than it needs"
    )
    steps.open(10, 400, Fork(777, 4))  # waits for what never comes: nobody gives anything up for it
    assert sum(len(one.tree) for one in steps.turn().segments if isinstance(one, TreeSegment)) == 64


@pytest.mark.parametrize(("rows", "writers"), [(8, 12), (512, 1024), (8, 9)])
def test_where_rows_run_short_everybody_writes_as_much(rows, writers):
    steps = Steps(rows)
    for sequence in range(1, writers + 1):
        steps.open(sequence)
    while len(steps.written) < writers:
        steps.turn()
    before = dict(steps.written)
    for _ in range(20):
        steps.turn()
    gains = [steps.written[one] - before[one] for one in steps.written]
    assert max(gains) - min(gains) <= 1, (min(gains), max(gains))


def test_where_rows_run_short_every_tree_is_whole_now_and_then():
    steps = Steps(20, 12)
    for sequence in range(1, 6):
        steps.open(sequence)
    for _ in range(8):
        steps.turn()
    frames = [steps.turn() for _ in range(30)]
    sizes = [
        (one.sequence, len(one.tree))
        for frame in frames
        for one in frame.segments
        if isinstance(one, TreeSegment)
    ]
    whole = [sum(who == sequence and size == 12 for who, size in sizes) for sequence in range(1, 6)]
    assert max(whole) - min(whole) <= 1, whole
    assert min(whole) > 0, whole


@pytest.mark.parametrize("seed", seeds(8, quick=3))
def test_law_1_prompts_that_arrive_while_others_decode_change_no_sequence(seed):
    rng = random.Random(seed)
    budget = FrameBudget(rng.choice([2, 5, 9, 17]), rng.choice([1, 2, 3]), 9)
    sequencer = Sequencer(1, budget, PageTable(96, 8), DraftTimeout(0.5))
    ring = MockRing(sequencer, [MockStage(PageTable(96, 8)) for _ in range(2)], rng, 0.7)
    wanted = {}
    for sequence in range(1, 9):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))]
        sequencer.apply_order(Open(Opening(sequence, len(prompt), limit=20), tuple(prompt), 10**6))
        wanted[sequence] = write_plainly(prompt, 20)
        for _ in range(rng.randrange(12)):
            ring.turn()
    while ring.turn():
        pass
    assert ring.log == wanted
