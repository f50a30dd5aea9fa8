"""Random draftings as linked nodes, and what follows from them by plain counting: the tests' own truth.

Shares no code with what it checks; the arrays' contract is written down here a second time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

VOCABULARY = 40


@dataclass(eq=False)
class Node:
    """A candidate, or the root (no parent, flat None)."""

    token: int
    score: float = 1.0
    parent: Node | None = None
    flat: int | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def line(self) -> list[Node]:
        """From the root down to this one."""
        return [*(self.parent.line if self.parent else []), self]


@dataclass
class Drafting:
    """One request's: the root, all candidates in flat order, and the three lists as a drafter makes them."""

    root: Node
    pool: list[Node]
    scores: list[np.ndarray]
    tokens: list[np.ndarray]
    parents: list[np.ndarray]


def draft(rng: random.Random, k: int, steps: int, coarse: bool = False) -> Drafting:
    """Random followers of random chances; the frontier is the k best of a level. coarse: many ties."""
    root = Node(rng.randrange(VOCABULARY))
    made = Drafting(root, [], [], [], [])
    frontier = [root]
    for step in range(steps):
        level: list[Node] = []
        for node in frontier:
            chances = sorted((_chance(rng, coarse) for _ in range(k)), reverse=True)
            for token, chance in zip(rng.sample(range(VOCABULARY), k), chances):
                level.append(Node(token, node.score * chance, node, len(made.pool) + len(level)))
        made.pool += level
        made.scores.append(np.array([node.score for node in level]).reshape(-1, k))
        made.tokens.append(np.array([node.token for node in level]))
        frontier = sorted(level, key=lambda node: -node.score)[:k]
        kept = list(range(-1, k)) if step == 0 else [node.flat for node in frontier]
        made.parents.append(np.array(kept))
        if step == 0:
            frontier = level
    return made


def _chance(rng: random.Random, coarse: bool) -> float:
    return rng.choice((0.5, 1.0)) if coarse else rng.random()


def lists_of(draftings: list[Drafting]) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """score_list, token_list, parents_list of a batch."""
    steps = range(len(draftings[0].scores))
    return tuple(  # type: ignore[return-value]
        [np.stack([getattr(one, name)[step] for one in draftings]) for step in steps]
        for name in ("scores", "tokens", "parents")
    )


def tree_of(drafting: Drafting, nodes: int) -> list[Node]:
    """Root and the nodes - 1 best in flat order, with their children linked, in that order."""
    best = sorted(drafting.pool, key=lambda node: (-node.score, node.flat))[: nodes - 1]
    best.sort(key=lambda node: node.flat or 0)
    for node in (drafting.root, *drafting.pool):
        node.children = [child for child in best if child.parent is node]
    return [drafting.root, *best]


def mask_of(tree: list[Node]) -> list[list[bool]]:
    """Row by row: each node attends those of its line."""
    return [[other in node.line for other in tree] for node in tree]


def links_of(tree: list[Node]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each node, by number; -1 for none."""
    numbers = {id(node): number for number, node in enumerate(tree)}
    first = [numbers[id(node.children[0])] if node.children else -1 for node in tree]
    following = [-1] * len(tree)
    for node in tree:
        for left, right in zip(node.children, node.children[1:]):
            following[numbers[id(left)]] = numbers[id(right)]
    return first, following


def greedy_walk(tree: list[Node], predict: list[int], steps: int) -> list[int]:
    """Accepted nodes by number, the root first; `predict` is the target's token behind each node."""
    walk = [0]
    while len(walk) <= steps:
        wanted = predict[walk[-1]]
        fits = [child for child in tree[walk[-1]].children if child.token == wanted]
        if not fits:
            break
        walk.append(next(i for i, node in enumerate(tree) if node is fits[0]))
    return walk
