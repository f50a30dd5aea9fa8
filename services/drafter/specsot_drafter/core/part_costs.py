"""What trees cost that travel through the stages in parts, as the rows of trees that travel whole.

If stages compute at the same time, stage 0 may cut the tree of a single sequence into parts
(`specsot.core.tree_parts`). A step then takes the time of its first part, and a stage's time for each further
part that is awaited: the verification ends as soon as the accepted path does. A tree in parts therefore takes
as long as some smaller tree that travels whole, and counts as one with that tree's rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from specsot.core.cost_curve import CostCurve
from specsot.core.tree_parts import MAX_PARTS, fewest_parts, part_ends
from specsot_drafter.core.selection import Floats, Ints

# Rows. The largest tree for which parts are estimated. Each further row counts as one more row of a whole
# tree. Twice the largest trees that were found to be profitable. Untuned.
MAX_CUT_ROWS: Final = 256


class PartCosts:
    """Rows of whole trees that take as long as trees in parts, by the measured curve of steps.

    overlap: True if trees may travel in parts at all.
    """

    def __init__(self, step: CostCurve, stages: int) -> None:
        """Cut trees of every size as stage 0 would if hops took no time, stages were equal and all parts were
        awaited.

        step: Seconds of a step whose tree travels whole, by its rows.
        stages: Number of stages that may compute at the same time.
        """
        self.overlap = stages > 1
        sizes = np.arange(1, MAX_CUT_ROWS * self.overlap + 1)
        # Seconds of a whole tree by rows, rising, so that rows follow from seconds.
        self._sizes = sizes
        self._seconds = step.at_each(sizes) + 1e-12 * sizes
        # By draft nodes of a tree: seconds of the first part, seconds of a further one, and, for each further
        # part, whether it exists, and how many draft nodes are in the parts before it.
        self._first = np.zeros(len(sizes))
        self._further = np.zeros(len(sizes))
        self._exists = np.zeros((len(sizes), MAX_PARTS - 1), bool)
        self._before = np.zeros((len(sizes), MAX_PARTS - 1), int)
        for nodes, rows in enumerate(sizes.tolist()):

            def seconds(parts: int, rows: int = rows) -> float:
                """Return the seconds of a tree of which all parts are awaited.

                parts: Number of its parts.
                rows: Number of its rows.
                """
                return step.at(-(-rows // parts)) * (1 + (parts - 1) / stages)

            parts = fewest_parts(rows, seconds)
            ends = part_ends(rows, parts)
            self._first[nodes] = step.at(-(-rows // parts))
            self._further[nodes] = self._first[nodes] / stages
            self._exists[nodes, : parts - 1] = True
            self._before[nodes, : parts - 1] = np.array(ends[:-1]) - 1

    def whole_rows(self, nodes: Ints, worth: Floats | None = None) -> Floats:
        """Return how many rows a tree has that travels whole, and takes as long as a tree in parts. Call only
        if `overlap`.

        nodes: Draft nodes of trees, without roots, [n].
        worth: Expected number of accepted nodes among the first 0, 1, 2, ... draft nodes of a tree, [...,
            more than max(nodes)]. Part 2 is awaited if a node of it or of a later part is accepted, which is
            at most as likely as their summed worth; and so on. None: all parts are awaited.

        Return [..., n].

            # 4 stages, parts of 4 rows take 4 ms; a tree of 8 rows whose last 4 nodes are accepted with a
            # chance of 0.5: 4 + 0.5 * 1 ms, as long as a whole tree of some 5 rows
        """
        known = np.minimum(nodes, len(self._sizes) - 1)
        awaited = self._exists[known].astype(float)
        if worth is not None:
            last = worth.shape[-1] - 1
            tails = worth[..., np.minimum(known, last), None] - worth[..., self._before[known]]
            awaited = awaited * np.minimum(tails, 1.0)
        seconds = self._first[known] + self._further[known] * awaited.sum(-1)
        cut = self._exists[known].any(-1)
        rows = np.where(cut, np.interp(seconds, self._seconds, self._sizes), known + 1.0)
        return rows + (nodes - known).astype(float)
