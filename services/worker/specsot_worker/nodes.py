"""Grammar masks for the rows of a segment: one for a prompt's last row, one per node of a tree.

Refuses to know logits. A node that the grammar cannot reach gets no mask; it can never be accepted,
because its parent's target token is never it.
"""

from __future__ import annotations

import numpy as np

from specsot.frames import Chunk, Growth
from specsot.tree import Tree
from specsot_worker.judge import Grammar, Written


def grammar_masks(segment: Chunk | Growth, written: Written) -> list[np.ndarray | None]:
    """Allowed tokens behind each judged row, or None where anything goes."""
    nodes = 1 if isinstance(segment, Chunk) else len(segment.tree)
    if written.grammar is None or written.state is None:
        return [None] * nodes
    if isinstance(segment, Chunk):
        return [written.grammar.mask(written.state, written.remaining)]
    return _tree_masks(written.grammar, written.state, written.remaining, segment.tree)


def _tree_masks(grammar: Grammar, root: object, remaining: int, tree: Tree) -> list[np.ndarray | None]:
    """The state behind the root is known (the root is written); children advance from their parent."""
    states: list[object | None] = [root]
    left = [remaining]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        above = states[parent]
        states.append(None if above is None else grammar.advance(above, tree.tokens[node]))
        left.append(left[parent] - 1)
    return [
        None if state is None or spare < 1 or grammar.finished(state) else grammar.mask(state, spare)
        for state, spare in zip(states, left)
    ]
