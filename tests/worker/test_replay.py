"""Reused tokens whose lost layers are computed again: which frames carry them, and what a stage logs."""

from __future__ import annotations

from dataclasses import replace

import torch

from specsot.core.frames import (
    Close,
    Fork,
    Open,
    Opening,
    Outcome,
    PromptChunk,
    Result,
    ReusedKV,
    TreeSegment,
)
from specsot.core.pages import PageTable
from specsot.core.run_ahead import MAX_PASSES
from specsot_model.core.kv_plan import plan_frame
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from specsot_worker.hidden_log import HiddenLog
from tests.there import there


def sequencer(rows: int) -> Sequencer:
    return Sequencer(1, FrameBudget(rows, 9, 1, rows), PageTable(16, 8), DraftTimeout(1.0, False))


def reopened(sequence: int, reused: int, fork: Fork | None = None, **more: bool) -> Opening:
    """It has computed so many tokens behind its fork, and the newest one is to be fed."""
    forked = fork.length if fork else 0
    tokens = tuple(range(forked, forked + reused))
    return Opening(
        sequence, forked + reused + 1, fork, reused=ReusedKV(sequence + 50, tokens, True), limit=9, **more
    )


def test_reused_tokens_are_replayed_in_chunks_before_the_sequence_goes_on() -> None:
    stage0 = sequencer(rows=8)
    for opening in (reopened(1, 11), reopened(2, 2)):
        stage0.apply_order(Open(opening, (*there(opening.reused).tokens, 77), lease=99))
    frames = [there(stage0.compose(0.0)) for _ in range(3)]
    chunks = [[(one.sequence, one.start, one.tokens) for one in frame.segments] for frame in frames]
    assert chunks == [
        [(1, 0, tuple(range(8)))],
        [(1, 8, (8, 9, 10)), (2, 0, (0, 1))],
        [(1, 11, (77,)), (2, 2, (77,))],
    ]
    assert [frame.replay for frame in frames] == [True, True, False]
    assert [[one.sequence for one in frame.openings] for frame in frames] == [[1], [2], []]
    assert not any(
        one.final for frame in frames[:2] for one in frame.segments if isinstance(one, PromptChunk)
    )


def test_a_fork_of_a_replayed_prefix_waits_for_the_prefix() -> None:
    stage0 = sequencer(rows=8)
    prefix, fork = reopened(1, 5, decodes=False), reopened(2, 3, Fork(1, 6))
    stage0.apply_order(Open(prefix, (*range(5), 77), lease=6))
    stage0.apply_order(Open(fork, (*range(6, 9), 78), lease=99))
    frames = [there(stage0.compose(0.0)) for _ in range(4)]
    assert [(frame.replay, [one.sequence for one in frame.segments]) for frame in frames] == [
        (True, [1]),
        (False, [1]),
        (True, [2]),
        (False, [2]),
    ]


def test_a_sequence_that_is_closed_amid_its_replay_leaves_no_page() -> None:
    stage0 = sequencer(rows=8)
    stage0.apply_order(Open(reopened(1, 11), (*range(11), 77), lease=99))
    assert there(stage0.compose(0.0)).replay
    stage0.apply_order(Close(1))
    assert there(stage0.compose(0.0)).closings == (1,)
    assert stage0._table.free == 16


def test_a_log_of_hidden_states_follows_forks_and_says_what_it_lacks() -> None:
    stage0, table = sequencer(rows=8), PageTable(16, 8)
    log = HiddenLog(16, 8, 2, torch.float32, torch.device("cpu"))
    stage0.apply_order(Open(Opening(1, 6, decodes=False), tuple(range(6)), lease=6))
    first = there(stage0.compose(0.0))
    plan = plan_frame(table, first)
    hidden = torch.arange(12.0).view(6, 2)
    log.record(first, plan, hidden)
    stage0.apply_order(Open(Opening(2, 8, Fork(1, 6), limit=9), (6, 7), lease=99))
    second = there(stage0.compose(0.0))
    log.record(second, plan_frame(table, second), -torch.ones(2, 2))
    found = there(log.rows_at(2, table.slots(2, 0, 8)))
    assert torch.equal(found, torch.cat((hidden, -torch.ones(2, 2))))
    log.put_rows_at(2, table.slots(2, 0, 1), None)
    assert log.rows_at(2, table.slots(2, 0, 8)) is None
    assert torch.equal(there(log.rows_at(1, table.slots(1, 0, 6))), hidden)


def test_replay_comes_before_frames_of_several_passes() -> None:
    """On a ring of one stage; afterwards they go on."""
    budget, waits = FrameBudget(64, 1, MAX_PASSES, 64), DraftTimeout(0.0, present=False)
    stage0 = Sequencer(1, budget, PageTable(16, 8), waits, runs_ahead=lambda: True)
    seen = list[tuple[bool, int, list[int]]]()

    def step() -> None:
        frame = there(stage0.compose(0.0))
        seen.append((frame.replay, frame.extra_passes, [one.sequence for one in frame.segments]))
        done = list[Outcome]()
        for one in frame.segments if not frame.replay else ():
            nodes = len(one.tree.tokens) if isinstance(one, TreeSegment) else 0
            rounds = one.draft_round if isinstance(one, TreeSegment) else 0
            tokens = (5,) * max(nodes, 1)
            done.append(Outcome(one.sequence, rounds, tuple(range(nodes)), tokens))
        stage0.apply_result(Result(1, frame.number, tuple(done)), 0.0)

    stage0.apply_order(Open(replace(reopened(1, 11), limit=99, drafted=False), (*range(11), 77), lease=99))
    for _ in range(3):
        step()
    stage0.apply_order(Open(replace(reopened(2, 3), limit=99, drafted=False), (0, 1, 2, 77), lease=99))
    for _ in range(3):
        step()
    ahead = MAX_PASSES - 1
    assert seen[:3] == [(True, 0, [1]), (False, 0, [1]), (False, ahead, [1])]
    assert seen[3:6] == [(True, 0, [2]), (False, 0, [2]), (False, ahead, [1, 2])]
