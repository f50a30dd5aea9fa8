"""The shapes in which a small model drafts: a chain, a tree of fixed breadth, a tree that is pruned.

Refuses to know models and texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from specsot.drafting import DraftOptions
from specsot.members import TreeShape

DEFAULT_DEPTH, DEFAULT_BREADTH, DEFAULT_NODES = 5, 2, 32  # tokens, breadth and nodes where nothing is said


@dataclass(frozen=True, slots=True)
class BeamShape:
    """breadth: children of every node that is fed. widths: nodes of level 1, 2, ... that are fed at most.
    floor: cumulative log-probability below which no node is fed. nodes: of a whole tree, its root included.
    """

    breadth: int
    widths: tuple[int, ...]
    floor: float
    nodes: int

    @property
    def tree_shape(self) -> TreeShape:
        """The same as the ring must know it."""
        return TreeShape(len(self.widths), self.breadth, self.nodes)


def beam_shape(options: DraftOptions) -> BeamShape:
    """A chain of `tokens`; or a tree as deep, in which every node that is fed has `breadth` children."""
    tokens = options.tokens or DEFAULT_DEPTH
    if options.mode in (None, "linear"):
        return BeamShape(1, (1,) * (tokens - 1), -math.inf, tokens + 1)
    breadth, nodes = options.breadth or DEFAULT_BREADTH, options.nodes or DEFAULT_NODES
    whole = [breadth**level for level in range(1, tokens)]
    fed = [min(size, max(nodes - before, 0)) for size, before in zip(whole, accumulate([0, *whole]))]
    floor = math.log(options.threshold or 1e-30) if options.mode == "pruned" else -math.inf
    return BeamShape(breadth, tuple(width for width in fed if width), floor, nodes + 1)
