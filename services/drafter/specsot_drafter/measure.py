"""Times one level of growth at several numbers of rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from specsot.members import Curve
from specsot.model.cost_curve import measure_curve
from specsot.model.cuda_graphs import GraphCapture
from specsot_drafter.eagle_kv import DraftPages, DueRows
from specsot_drafter.graph_growth import GraphInput, TreeGraphs
from specsot_drafter.growth import TreeGrowth, TreeRoom
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.fused import fuse_head

MEASURED_ROWS = (1, 4, 16, 64)
CONTEXT_ROWS = 256  # committed rows in front of each measured tree
MEASURED_LEVELS = 3
MIN_TURNS = 5  # turns that are told
MAX_SECONDS = 0.3  # roughly, at most

Grow = Callable[[int], object]  # grows so many levels


@torch.inference_mode()
def measure_levels(head: DraftHead, clock: Callable[[], float] = time.perf_counter) -> Curve:
    """(rows, seconds) of one level of growth, everything included; a fraction of a second in all."""

    def level_seconds(grow: Grow) -> float:
        """Per level behind the first."""
        one, many = (_time(grow, levels, clock) for levels in (1, MEASURED_LEVELS))
        return max(many - one, many / MEASURED_LEVELS) / (MEASURED_LEVELS - 1)

    growers = {rows: _graphs(head, rows) or _grower(head, rows) for rows in MEASURED_ROWS}
    timers = {rows: partial(level_seconds, grow) for rows, grow in growers.items()}
    return measure_curve(timers, MAX_SECONDS, MIN_TURNS, head.device, clock)


def _time(grow: Grow, levels: int, clock: Callable[[], float]) -> float:
    began = clock()
    grow(levels)
    return clock() - began


def _grower(head: DraftHead, rows: int) -> Grow:
    """Grows trees whose levels have so many rows in all, each behind its own context."""
    trees, top_k = _shape(rows)
    page_rows = CONTEXT_ROWS + MEASURED_LEVELS * top_k
    kv = head.make_kv(trees, page_rows)
    grounds = [_room_of(tree, page_rows) for tree in range(trees)]
    last = torch.ones(trees, head.hidden, dtype=head.dtype, device=head.device)
    return lambda levels: TreeGrowth(head, kv, grounds, top_k).run(last, levels)


def _room_of(tree: int, page_rows: int) -> TreeRoom:
    """A page of its own."""
    first = tree * page_rows
    return TreeRoom(CONTEXT_ROWS, (tree,), range(first + CONTEXT_ROWS, first + page_rows), CONTEXT_ROWS)


def _graphs(head: DraftHead, rows: int) -> Grow | None:
    """The same by graphs, where this head has them."""
    fused, (trees, top_k) = fuse_head(head), _shape(rows)
    if fused is None:
        return None
    from specsot.kernels.gpu.growing import grow

    memory = DraftPages(head, trees, CONTEXT_ROWS + MEASURED_LEVELS * top_k)
    seeds = [_graph_input(memory, tree, top_k) for tree in range(trees)]
    graphs = TreeGraphs(fused, memory, top_k, MEASURED_LEVELS, GraphCapture(), grow, (trees,))
    return lambda levels: graphs.run(seeds, levels)


def _graph_input(pages: DraftPages, tree: int, top_k: int) -> GraphInput:
    pages.table.open(tree)
    ground = pages.reserve_tree(tree, CONTEXT_ROWS, MEASURED_LEVELS * top_k)
    assert ground is not None, "a page of its own"
    return GraphInput(DueRows(tree, CONTEXT_ROWS - 1, (0,), True), ground)


def _shape(rows: int) -> tuple[int, int]:
    """Trees, and nodes of a level of each."""
    top_k = min(rows, 4)
    return rows // top_k, top_k
