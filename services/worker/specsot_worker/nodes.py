"""Grammar masks for the rows of a segment: one for a prompt's last row, one per node of a tree.

Refuses to know logits. A node that the grammar cannot reach gets no mask; it can never be accepted,
because its parent's target token is never it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from specsot.core.frames import PromptChunk, TreeSegment
from specsot.core.tree import Tree, depths, single
from specsot.grammar import Grammar
from specsot_worker.judge import DecodeState

Masks = Sequence[np.ndarray | None]


def grammar_masks(segment: PromptChunk | TreeSegment, state: DecodeState) -> Masks:
    """Allowed tokens behind each judged row, or None where anything goes."""
    tree = single(segment.tokens[-1]) if isinstance(segment, PromptChunk) else segment.tree
    if state.grammar is None or state.state is None:
        return [None] * len(tree)
    return TreeMasks(state.grammar, state.state, state.remaining, tree)


class TreeMasks(Masks):
    """Made when they are looked at: acceptance comes by few of a tree's nodes.

    root: the state behind the root, which is written; other nodes advance from their parent.
    """

    def __init__(self, grammar: Grammar, root: object, remaining: int, tree: Tree) -> None:
        self._grammar, self._tree = grammar, tree
        self._left = [remaining - depth for depth in depths(tree.parents)]
        self._states: dict[int, object | None] = {0: root}
        self._masks: dict[int, np.ndarray | None] = {}

    def __len__(self) -> int:
        return len(self._tree)

    @overload
    def __getitem__(self, index: int) -> np.ndarray | None: ...
    @overload
    def __getitem__(self, index: slice) -> Masks: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Masks | None:
        if isinstance(index, slice):
            return [self[node] for node in range(*index.indices(len(self)))]
        node = range(len(self))[index]
        if node not in self._masks:
            self._masks[node] = self._make(node)
        return self._masks[node]

    def _make(self, node: int) -> np.ndarray | None:
        state, spare = self._state(node), self._left[node]
        if state is None or spare < 1 or self._grammar.finished(state):
            return None
        return self._grammar.mask(state, spare)

    def _state(self, node: int) -> object | None:
        if node not in self._states:
            above = self._state(self._tree.parents[node])
            token = self._tree.tokens[node]
            self._states[node] = None if above is None else self._grammar.advance(above, token)
        return self._states[node]
