"""Masks for all nodes of a draft tree at once.

Refuses to know who drafted the tree and what the target tokens are.
"""

from __future__ import annotations

import numpy as np

from specsot.constraint.automaton import Mask, State, TokenAutomaton
from specsot.tree import Tree, depths


def mask_tree(
    automaton: TokenAutomaton, state: State, tree: Tree, remaining: int
) -> tuple[Mask, tuple[State | None, ...]]:
    """What may follow each node, and the state behind each.

    state:     behind everything written; the root's token, which is written, included.
    remaining: tokens the sequence may still write, behind the root's.
    Returns masks [nodes, V] and a state per node; a node whose token the grammar forbids, and all nodes
    below it, have None and a mask of all False, as have (with their state) finished nodes.
    """
    states: list[State | None] = [state]
    for node in range(1, len(tree)):
        before = states[tree.parents[node]]
        states.append(None if before is None else automaton.advance(before, tree.tokens[node]))
    masks = np.zeros((len(tree), len(automaton.vocabulary)), dtype=np.bool_)
    for node, (behind, depth) in enumerate(zip(states, depths(tree.parents))):
        if behind is not None:
            masks[node] = automaton.mask(behind, remaining - depth)
    return masks, tuple(states)
