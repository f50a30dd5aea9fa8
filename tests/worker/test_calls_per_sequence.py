"""How much Python a step runs for each of its sequences: with 64 sequences, that bounds the whole ring."""

from __future__ import annotations

import sys
from collections.abc import Callable

from specsot.core.frames import Draft, Drafts, Frame, Open, Opening, Outcome, Result
from specsot.core.pages import PageTable
from specsot.core.tree import chain
from specsot_model.core.kv_plan import plan_frame
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer

# Function calls for each sequence of a drafted step: of stage 0's scheduler, and of a stage's page table.
MAX_SCHEDULING_CALLS = 13
MAX_PLANNING_CALLS = 8


def num_calls(work: Callable[[], object]) -> int:
    """Run something, and return how many Python functions were called."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    work()
    sys.setprofile(None)
    return calls


def calls_of_step(num_sequences: int) -> tuple[int, int]:
    """Return how many functions a drafted step calls in the scheduler, and in the plan of a stage."""
    budget = FrameBudget(1024, 1, 9)
    sequencer = Sequencer(1, budget, PageTable(999, 16), DraftTimeout(0.5, True), vocabulary=999)
    table = PageTable(999, 16)
    sequences = range(num_sequences)
    for one in sequences:
        sequencer.apply_order(Open(Opening(one, 2, limit=99), (1, 2), 99))
    frames = [sequencer.compose(0.0)]

    def schedule(result: Result, drafts: Drafts) -> None:
        sequencer.apply_result(result, 0.0, awaits_drafts=False)
        sequencer.add_drafts(drafts)
        frames.append(sequencer.compose(0.0))

    def plan(frame: Frame | None) -> None:
        assert frame is not None
        plan_frame(table, frame)

    scheduling = planning = 0
    for draft_round in range(1, 4):
        accepted = (0,) if draft_round > 1 else ()
        outcomes = [Outcome(one, draft_round - 1, accepted, (3,)) for one in sequences]
        drafts = [Draft(one, draft_round, chain([3, 4, 5, 6])) for one in sequences]
        given = Result(1, draft_round, tuple(outcomes)), Drafts(1, tuple(drafts))
        planning = num_calls(lambda: plan(frames[-1]))
        scheduling = num_calls(lambda given=given: schedule(*given))
    assert all(frames)
    return scheduling, planning


def test_a_further_sequence_costs_few_calls() -> None:
    few, many = calls_of_step(8), calls_of_step(64)
    scheduling, planning = ((after - before) / 56 for before, after in zip(few, many))
    assert scheduling <= MAX_SCHEDULING_CALLS
    assert planning <= MAX_PLANNING_CALLS
