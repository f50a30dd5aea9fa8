"""Masks of a tree's nodes: each is made once, when it is read, from the state of the node's parent."""

from __future__ import annotations

import numpy as np

from specsot.core.frames import Opening
from specsot.core.tree import Tree
from specsot.core.vocabulary import Vocabulary, describe
from specsot_worker.core.accept import DecodeState, grammar_masks


class Counting:
    """Letters in ascending order; a state is the last one written. Notes what it is asked for."""

    vocabulary: Vocabulary = describe([b"a", b"b", b"c", b"d"])

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def start(self) -> int:
        return -1

    def advance(self, state: int, token: int) -> int | None:
        return token if token > state else None

    def finished(self, state: int) -> bool:
        return state == 3

    def forced(self, state: int) -> tuple[int, ...]:
        return ()

    def mask(self, state: int, remaining: int) -> np.ndarray:
        self.asked.append((state, remaining))
        return np.arange(4) > state


def tree_of(*nodes: tuple[int, int]) -> Tree:
    tokens, parents = zip(*nodes)
    return Tree(tokens, parents)


def written(grammar: Counting, limit: int = 9) -> DecodeState:
    one = DecodeState(Opening(1, 5, limit=limit), grammar)
    one.write((0,))
    return one


def test_a_mask_is_made_when_it_is_looked_at_and_once() -> None:
    grammar = Counting()
    masks = grammar_masks(tree_of((0, 0), (1, 0), (2, 0), (2, 1)), written(grammar))
    assert len(masks) == 4
    assert grammar.asked == []
    for _ in range(2):
        mask = masks[3]
        assert mask is not None
        assert mask.tolist() == [False, False, False, True]
    assert grammar.asked == [(2, 6)], "two tokens below the root, which is the first of nine"


def test_forbidden_and_finished_nodes_and_those_after_the_limit_have_no_mask() -> None:
    grammar = Counting()
    growth = tree_of((0, 0), (2, 0), (1, 1), (3, 1), (3, 2))
    assert [mask is None for mask in grammar_masks(growth, written(grammar))] == [
        False,
        False,
        True,
        True,
        True,
    ]
    short = grammar_masks(growth, written(Counting(), limit=2))
    assert [mask is None for mask in short] == [False, True, True, True, True]
    assert [mask is None for mask in short[:2]] == [False, True]


def test_an_unconstrained_sequence_has_no_masks() -> None:
    free = DecodeState(Opening(1, 5, limit=9), None)
    assert not grammar_masks(tree_of((0, 0), (1, 0)), free)
