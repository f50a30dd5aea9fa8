"""Masks over draft trees: those of each node's own path.

Refuses to know how trees are drafted.
"""

from __future__ import annotations

import itertools
import random

import numpy as np

from specsot.constraint import State, automaton, mask_tree
from specsot.skeleton import PlanRules
from specsot.tree import Tree, path
from tests.constraint.vocabularies import CROSSING, token_ids

MACHINE = automaton(CROSSING, PlanRules(max_points=3))


def state_behind(text: bytes) -> State:
    state: State | None = MACHINE.start()
    for token in token_ids(CROSSING, text):
        state = MACHINE.advance(state, token) if state else None
    assert state is not None
    return state


def random_tree(dice: random.Random, nodes: int) -> Tree:
    parents = (0, *(dice.randrange(node) for node in range(1, nodes)))
    pool = token_ids(CROSSING, b"abc1,2]\n2.<-][END]")
    return Tree(tuple(dice.choice(pool) for _ in range(nodes)), parents)


def test_each_node_is_masked_as_its_path_alone() -> None:
    dice = random.Random(3)
    texts = (b"[PLAN]\n", b"[PLAN]\n1.<80><None>[-]A", b"[PLAN]\n1.<80><None>[-]A\n", b"[DIRECT]\n")
    for text, remaining in itertools.product(texts, (3, 4, 5, 40)):
        tree, before = random_tree(dice, 24), state_behind(text)
        masks, states = mask_tree(MACHINE, before, tree, remaining)
        for node in range(len(tree)):
            alone: State | None = before
            steps = path(tree.parents, node)[1:]
            for step in steps:
                alone = MACHINE.advance(alone, tree.tokens[step]) if alone else None
            assert states[node] == alone
            expected = (
                MACHINE.mask(alone, remaining - len(steps)) if alone else np.zeros(len(CROSSING), dtype=bool)
            )
            assert np.array_equal(masks[node], expected)


def test_dead_and_finished_nodes_allow_nothing() -> None:
    root, end, dead, below = (
        *token_ids(CROSSING, b"\n[END]", longest=1)[:1],
        *token_ids(CROSSING, b"[END]Zx"),
    )
    tree = Tree((root, end, dead, below, below), (0, 0, 0, 2, 1))
    masks, states = mask_tree(MACHINE, state_behind(b"[PLAN]\n1.<80><None>[-]A\n"), tree, remaining=40)
    assert masks[0].any()
    assert states[1] is not None
    assert MACHINE.finished(states[1])
    assert states[2:] == (None, None, None)
    assert not masks[1:].any()
