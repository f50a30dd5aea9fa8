"""Times one pass of a head at several numbers of rows.

Refuses to know weights, sequences and what the numbers are used for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from specsot.members import Curve
from specsot.model.kv import KVPages
from specsot_drafter.growth import Ground, Growth
from specsot_drafter.heads import DraftHead

ROWS = (1, 4, 16, 64)
CONTEXT = 256  # committed rows in front of each measured tree
LEVELS = 3
REPEATS = 4


@torch.inference_mode()
def measure_levels(head: DraftHead, clock: Callable[[], float] = time.perf_counter) -> Curve:
    """(rows, seconds) of one level of growth, everything included; a fraction of a second in all."""
    return tuple((rows, _seconds_per_level(head, rows, clock)) for rows in ROWS)


def _seconds_per_level(head: DraftHead, rows: int, clock: Callable[[], float]) -> float:
    """What the levels behind the first take, each, at best."""
    top_k = min(rows, 4)
    trees = rows // top_k
    page_rows = CONTEXT + LEVELS * top_k
    kv = KVPages(head.layers, trees, page_rows, head.kv_heads, head.head_dim, head.dtype, head.device)
    grounds = [_ground(tree, page_rows) for tree in range(trees)]
    last = torch.ones(trees, head.hidden, dtype=head.dtype, device=head.device)

    def grow(levels: int) -> float:
        began = clock()
        Growth(head, kv, grounds, top_k).run(last, levels)
        return clock() - began

    grow(LEVELS)  # the first run pays for things that never come again
    many, one = (min(grow(levels) for _ in range(REPEATS)) for levels in (LEVELS, 1))
    return max(many - one, many / LEVELS / 2) / (LEVELS - 1)


def _ground(tree: int, page_rows: int) -> Ground:
    """Each tree in a page of its own."""
    first = tree * page_rows
    return Ground(CONTEXT, (tree,), range(first + CONTEXT, first + page_rows))
