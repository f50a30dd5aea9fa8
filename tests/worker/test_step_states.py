"""The states of a predicted step: what leads to each of them, and what each leaves of its reservations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specsot.core.frames import Frame, Opening, ParentNode, PromptChunk, TreeSegment
from specsot.core.overlap import OverlapState
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, chain, single
from specsot_model.core.kv_plan import plan_frame
from specsot_worker.overlap.next_step import NextStep, SpeculativeStep

PAGE_ROWS, PAGES, VOCABULARY = 2, 6, 100
IDLE, PREPARED, LAUNCHED, CONFIRMED, DISCARDED = OverlapState
TREE = chain((7, 8))


class Device:
    """Graphs and KV pages that record what they are asked for."""

    accepts_device_trees = True

    def __init__(self) -> None:
        self.calls = list[str]()
        self.cleared = list[int]()
        self.has_room = True

    def fill(self, rows: Any) -> Any:
        self.calls.append("fill")
        return SimpleNamespace(rows=rows) if self.has_room else None

    def launch(self, filled: Any, entry: Any) -> Any:
        self.calls.append("launch")
        return torch.zeros(len(filled.rows.positions), 1), None

    def launch_device_trees(self, filled: Any, roots: Any, trees: Any) -> Any:
        self.calls.append("launch_device_trees")
        return torch.zeros(len(filled.rows.positions), 1), None

    def clear_pages(self, pages: Sequence[int]) -> None:
        self.cleared += pages


class Written:
    """A sequence that has written one token after a prompt of two, and the step that follows."""

    def __init__(self, tree: Tree = TREE) -> None:
        self.device = Device()
        self.table = PageTable(PAGES, PAGE_ROWS)
        self.started = list[str]()
        device: Any = self.device
        timer = lambda: self.started.append("start")  # noqa: E731
        self.draft_round = NextStep(self.table, device, device, VOCABULARY, timer)
        plan_frame(self.table, Frame(1, 1, (Opening(1, 2, limit=9),), (PromptChunk(1, 0, (5, 6), True),)))
        newest = Frame(1, 2, segments=(TreeSegment(1, 1, 2, (), tree),))
        plan_frame(self.table, newest)
        self.free = self.table.free
        self.draft_round.predict(newest)
        self.next = TreeSegment(1, 2, 4, (0, 1), TREE)

    def frame(self, segment: TreeSegment) -> Frame:
        return Frame(1, 3, segments=(segment,))


def test_a_step_with_drafts_is_prepared_launched_and_confirmed_and_its_frame_gets_it() -> None:
    one = Written()
    assert one.draft_round.state is IDLE
    assert one.draft_round.prepare([one.next], [one.next.tree])
    assert one.draft_round.state is PREPARED
    assert one.table.free < one.free
    assert one.draft_round.launch_drafts([TREE])
    assert (one.draft_round.state, one.started) == (CONFIRMED, ["start"])
    step = one.draft_round.take(one.frame(one.next))
    assert isinstance(step, SpeculativeStep)
    assert (step.confirmed, step.timed, one.draft_round.state) == (True, True, IDLE)
    assert one.device.calls == ["fill", "launch"]


def test_a_step_that_is_only_prepared_is_launched_by_its_frame() -> None:
    one = Written()
    one.draft_round.prepare([one.next], [one.next.tree])
    step = one.draft_round.take(one.frame(one.next))
    assert step
    assert (step.state, step.timed) == (PREPARED, False)
    one.draft_round.run_prepared(step, [7, 8])
    assert step.confirmed
    assert one.device.calls == ["fill", "launch"]


def test_prompts_and_openings_ride_with_a_launched_step_but_not_with_a_prepared_one() -> None:
    prompts = (PromptChunk(2, 0, (5, 6), True), PromptChunk(3, 0, (5,), False))
    for launched in (True, False):
        one = Written()
        one.draft_round.prepare([one.next], [one.next.tree])
        if launched:
            one.draft_round.launch_drafts([TREE])
        frame = Frame(1, 3, (Opening(2, 2), Opening(3, 2)), (one.next, *prompts))
        assert (one.draft_round.take(frame) is not None) == launched


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("prompts", [(), (PromptChunk(2, 0, (5, 6), True),)], ids=["nothing", "a prompt"])
def test_a_launched_step_without_sequences_left_is_discarded(
    prompts: tuple[PromptChunk, ...], passes: int
) -> None:
    """The only sequence is closed, and the next request is there already."""
    one = Written()
    one.draft_round.prepare([one.next], [one.next.tree])
    one.draft_round.launch_drafts([TREE])
    if passes > 1:
        step: Any = one.draft_round._step
        step.chosen = SimpleNamespace(keep=lambda numbers: None)
    openings = tuple(Opening(chunk.sequence, 2) for chunk in prompts)
    assert one.draft_round.take(Frame(1, 3, openings, prompts, closings=(1,))) is None
    assert (one.draft_round.state, one.table.free) == (IDLE, one.free)


def test_another_tree_does_not_ride_with_a_launched_step() -> None:
    one = Written()
    one.draft_round.prepare([one.next], [one.next.tree])
    one.draft_round.launch_drafts([TREE])
    assert one.draft_round.take(Frame(1, 3, (), (one.next, replace(one.next, sequence=2)))) is None


@pytest.mark.parametrize(
    "other",
    [
        TreeSegment(1, 2, 4, (0, 1), chain((7, 9))),
        TreeSegment(1, 2, 4, (0, 1), single(7)),
        TreeSegment(1, 2, 3, (0,), TREE),
        TreeSegment(1, 2, 4, (0, 1), TREE, ParentNode(1, 1)),
        TreeSegment(1, 2, 4, (0, 1), TREE, scratch=2),
    ],
    ids=["token", "shape", "committed", "parent", "scratch"],
)
def test_another_frame_discards_a_confirmed_step_and_its_pages_are_given_back_cleared(
    other: TreeSegment,
) -> None:
    one = Written()
    one.draft_round.prepare([one.next], [one.next.tree])
    one.draft_round.launch_drafts([TREE])
    assert one.draft_round.take(one.frame(other)) is None
    assert (one.draft_round.state, one.table.free) == (IDLE, one.free)
    assert one.device.cleared, "the step may have written to its pages"


def test_a_discarded_step_has_moved_accepted_rows_which_are_not_moved_again() -> None:
    """Only if the frame's segment begins at the same position."""
    one = Written()
    one.draft_round.prepare([one.next], [one.next.tree])
    one.draft_round.launch_drafts([TREE])
    other = one.frame(TreeSegment(1, 2, 4, (0, 1), single(9)))
    assert one.draft_round.take(other) is None
    (segment,) = one.draft_round.without_applied_moves(other).segments
    assert isinstance(segment, TreeSegment)
    assert segment.keep == (0,)
    assert one.draft_round.without_applied_moves(other) is other, "it is remembered for one frame"


def test_a_step_that_was_only_prepared_leaves_no_state() -> None:
    one = Written()
    one.draft_round.prepare([one.next], [one.next.tree])
    other = one.frame(TreeSegment(1, 2, 4, (0, 1), single(9)))
    assert one.draft_round.take(other) is None
    assert (one.table.free, one.device.cleared) == (one.free, [])
    assert one.draft_round.without_applied_moves(other) is other


def selected(nodes: int) -> Any:
    return SimpleNamespace(nodes=nodes, confirmed=True)


def test_a_step_with_trees_of_the_device_is_confirmed_when_the_host_has_read_them() -> None:
    one = Written()
    root = TreeSegment(1, 2, 4, (0, 1), single(7))
    assert one.draft_round.launch_selected([root], selected(2))
    assert (one.draft_round.state, one.started) == (LAUNCHED, [])
    assert one.draft_round.confirm([TREE])
    assert (one.draft_round.state, one.started) == (CONFIRMED, ["start"])
    assert one.draft_round.take(one.frame(one.next))
    assert one.device.calls == ["fill", "launch_device_trees"]


def test_a_step_with_trees_of_another_size_is_never_confirmed() -> None:
    one = Written()
    root = TreeSegment(1, 2, 4, (0, 1), single(7))
    assert one.draft_round.launch_selected([root], selected(2))
    assert not one.draft_round.confirm([chain((7, 8, 9))])
    assert one.draft_round.state is LAUNCHED
    assert one.draft_round.take(one.frame(TreeSegment(1, 2, 4, (0, 1), chain((7, 8, 9))))) is None
    assert one.table.free == one.free


def test_an_unconfirmed_step_is_not_used_even_by_the_frame_that_it_was_launched_for() -> None:
    """The host does not know its tokens, so nobody can say whether they are those of the frame."""
    one = Written()
    one.draft_round.launch_selected([TreeSegment(1, 2, 4, (0, 1), single(7))], selected(2))
    assert one.draft_round.take(one.frame(one.next)) is None


def test_without_drafts_the_step_is_prepared_while_the_step_before_runs() -> None:
    one = Written(tree=single(7))
    newest = Frame(1, 3, segments=(TreeSegment(1, 2, 3, (0,), single(8)),))
    plan_frame(one.table, newest)
    assert one.draft_round.state is IDLE, "after one frame of single nodes, trees may follow"
    one.draft_round.predict(newest)
    assert one.draft_round.state is PREPARED
    assert not one.draft_round.launch([8, 9]), "it has one token"
    assert not one.draft_round.launch([VOCABULARY])
    assert one.draft_round.state is PREPARED
    assert one.draft_round.launch([9])
    one.draft_round.pause_timer()
    step = one.draft_round.take(one.frame(TreeSegment(1, 3, 4, (0,), single(9))))
    assert step
    assert not step.timed, "it waited for its frame, which is no compute time"


def test_a_step_for_which_no_graph_has_room_stays_idle_and_gives_its_pages_back() -> None:
    one = Written()
    one.device.has_room = False
    assert one.draft_round.prepare([one.next], [one.next.tree])
    assert one.draft_round.state is IDLE
    assert not one.draft_round.launch_drafts([TREE])
    assert one.draft_round.take(one.frame(one.next)) is None
    assert one.table.free == one.free
    assert one.device.calls == ["fill"]
