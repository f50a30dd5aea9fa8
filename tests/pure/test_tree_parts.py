"""Trees that travel in parts: how a frame is cut, what a stage does with a part, and when that is faster."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specsot.core.cost_curve import CostCurve
from specsot.core.frames import Frame, Opening, PromptChunk, TreeSegment, num_tokens_of, rows_of, tokens_of
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, accept
from specsot.core.tree_parts import (
    MAX_PARTS,
    MIN_PARTS_GAIN,
    cut_frame,
    fewest_parts,
    is_decided,
    path_seconds,
)
from specsot.errors import WireError
from specsot.members import Curve
from specsot.params import Window
from specsot_model.core.kv_plan import plan_frame
from specsot_worker.core.pipeline import PipelineDepth
from tests.conftest import seeds

# Seconds of a step of the 1.5B in int8 without VNNI, by rows, and of a step that takes equally long.
DEAR: Curve = ((1, 0.1118), (2, 0.1264), (4, 0.1286), (8, 0.3255), (16, 0.596), (24, 0.9308), (48, 1.8029))
FLAT: Curve = ((1, 0.0017), (16, 0.0021), (64, 0.0024))


def tree_of(rng: random.Random, nodes: int) -> Tree:
    return Tree(tuple(range(nodes)), tuple(rng.randrange(max(node, 1)) for node in range(nodes)))


def frame_of(tree: Tree, parts: int) -> Frame:
    return Frame(1, 5, segments=(TreeSegment(3, 2, 11, (0, 2), tree),), last_part=parts - 1)


@pytest.mark.parametrize("seed", seeds(20, quick=6))
def test_the_parts_of_a_frame_carry_every_node_once_and_are_equally_large(seed: int) -> None:
    rng = random.Random(seed)
    tree = tree_of(rng, rng.randrange(1, 40))
    num_parts = rng.randrange(1, len(tree) + 1)
    parts = cut_frame(frame_of(tree, num_parts))
    segments = [part.segments[0] for part in parts]
    assert [(part.part, part.last_part, part.number) for part in parts] == [
        (number, num_parts - 1, 5) for number in range(num_parts)
    ]
    assert sum(map(tokens_of, segments), ()) == tree.tokens
    sizes = [*map(rows_of, segments)]
    assert [num_tokens_of(part.segments) for part in parts] == sizes
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-len(tree) // num_parts)
    assert all(isinstance(one, TreeSegment) and one.tree == tree for one in segments)


def table_of(window: Window | None = None) -> PageTable:
    """A page table of a sequence with 11 tokens, of which a tree follows whose nodes 0 and 2 are accepted."""
    table = PageTable(16, 4)
    opening = Opening(3, 9, window=window)
    plan_frame(table, Frame(1, 1, (opening,), (PromptChunk(3, 0, (1,) * 9, True),)))
    plan_frame(table, Frame(1, 2, segments=(TreeSegment(3, 1, 9, (), Tree((1, 2, 3, 4), (0, 0, 0, 2))),)))
    return table


@pytest.mark.parametrize("seed", seeds(20, quick=6))
def test_a_stage_does_with_the_parts_what_it_does_with_the_whole_frame(seed: int) -> None:
    rng = random.Random(seed)
    tree = tree_of(rng, rng.randrange(2, 20))
    frame = frame_of(tree, rng.randrange(2, len(tree) + 1))
    table = table_of()
    whole = plan_frame(table_of(), replace(frame, last_part=0))
    parts = [plan_frame(table, part) for part in cut_frame(frame)]
    assert sum([part.slots for part in parts], ()) == whole.slots
    assert sum([part.positions for part in parts], ()) == whole.positions
    assert whole.moves
    assert [part.moves for part in parts] == [whole.moves, *[()] * (len(parts) - 1)]
    spans = [part.spans[0] for part in parts]
    assert sum([span.seen for span in spans], ()) == whole.spans[0].seen
    assert {span.base for span in spans} == {11}
    assert spans[-1].tail == len(tree)
    assert all(span.pages == whole.spans[0].pages[: len(span.pages)] for span in spans)


def test_a_root_is_fed_once_more_by_the_first_part_alone() -> None:
    first, second = cut_frame(frame_of(Tree((1, 2), (0, 0)), 2))
    segments = [replace(part.segments[0], keep=()) for part in (first, second)]
    assert [isinstance(one, TreeSegment) and one.once_more for one in segments] == [True, False]


def test_a_stage_rejects_parts_under_a_policy_and_parts_without_nodes() -> None:
    frame = frame_of(Tree((1, 2), (0, 0)), 2)
    table = table_of(Window(4, 16))
    for part in cut_frame(frame):
        with pytest.raises(WireError, match="cannot travel in parts, because its KV policy hides tokens"):
            plan_frame(table, part)
    (segment,) = frame.segments
    assert isinstance(segment, TreeSegment)
    with pytest.raises(WireError, match="this part has no nodes"):
        plan_frame(table_of(), replace(frame, segments=(replace(segment, earlier=1, later=1),)))


def test_the_fewest_parts_whose_step_is_nearly_as_short_as_the_shortest() -> None:
    times = {1: 10.0, 2: 7.0, 3: 6.2, 4: 6.0}
    assert fewest_parts(4, times.__getitem__) == 3
    assert fewest_parts(2, times.__getitem__) == 2
    assert fewest_parts(1, times.__getitem__) == 1
    assert fewest_parts(100, lambda parts: 1 / parts) == MAX_PARTS
    barely = 1 - 0.9 * MIN_PARTS_GAIN
    assert fewest_parts(2, lambda parts: 1.0 if parts == 1 else barely) == 1


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_the_seconds_of_a_path_are_those_of_a_pipeline(parts: int) -> None:
    stages = [0.3, 0.6, 0.5, 0.1]
    done = 0.0
    free = [0.0] * len(stages)
    for _ in range(parts):
        done = 0.0
        for stage, seconds in enumerate(stages):
            done = free[stage] = max(done, free[stage]) + seconds / parts
    assert path_seconds(stages, parts) == pytest.approx(done)


@pytest.mark.parametrize("seed", seeds(40, quick=10))
def test_a_result_is_decided_if_no_later_target_changes_what_is_accepted(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randrange(1, 12)
    tree = Tree(tuple(rng.randrange(3) for _ in range(nodes)), tree_of(rng, nodes).parents)
    targets = [rng.choice([0, 1, 2, None]) for _ in range(nodes)]
    accepted = accept(tree, targets)
    for known in range(1, nodes + 1):
        assert is_decided(tree, targets[:known]) == (accepted[-1] < known)


def depth_of(curve: Curve, hop: float, overlap: bool = True) -> PipelineDepth:
    """Four equal stages; every hop of a step takes so many seconds."""
    depth = PipelineDepth(4, curve, overlap)
    seconds = CostCurve(curve).at(1)
    depth.record_step(1, [seconds / 4] * 4, seconds + 4 * hop, True)
    return depth


@pytest.mark.parametrize(
    ("curve", "hop", "overlap", "parts"),
    [
        (DEAR, 0.0, True, 6),
        (DEAR, 0.05, True, 6),
        (DEAR, 0.0, False, 1),
        (DEAR, 10.0, True, 1),
        (FLAT, 0.0, True, 1),
        (FLAT, 0.05, True, 1),
    ],
)
def test_a_tree_is_cut_where_stages_would_be_idle_and_fewer_nodes_are_faster(
    curve: Curve, hop: float, overlap: bool, parts: int
) -> None:
    assert depth_of(curve, hop, overlap).tree_parts(24) == parts


def test_stages_that_share_cores_are_found_out_by_the_clock() -> None:
    """Each computes as fast as alone, but only one at a time."""
    curve = ((1, 0.10), (24, 0.79))
    depth = depth_of(curve, 0.001)
    assert depth.tree_parts(24) > 1
    for _ in range(20):
        parts = depth.tree_parts(24)
        seconds = CostCurve(curve).at(-(-24 // parts))
        stages = [parts * seconds / 4] * 4
        depth.record_step(-(-24 // parts), stages, parts * seconds + 0.004, True, parts, parts)
    assert depth.tree_parts(24) == 1


def test_a_step_in_parts_tells_what_one_part_takes() -> None:
    depth = depth_of(DEAR, 0.05)
    for _ in range(9):
        depth.record_step(4, [6 * 0.04] * 4, 0.16 + 5 * 0.04 + 0.2, True, parts_verified=6)
    assert depth.step_seconds(4) == pytest.approx(0.16)
    assert depth._hop_seconds(4) == pytest.approx(0.2)
