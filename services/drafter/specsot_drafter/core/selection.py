"""Candidates of grown trees, and the choice of those that are sent: arrays of scores in, trees out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsot.core.tree import Tree, children

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
# How many nodes of a frontier [B, k] of scores, best first, at a depth to feed; 0: no other level.
KeepGrowing = Callable[[Floats, int], int]


@dataclass(frozen=True, slots=True)
class Candidates:
    """All candidates of B trees grown together, n per tree, parents before children.

    tokens:  [B, n] token ids of the base.
    scores:  [B, n] cumulative log-probability from the root; -inf where a candidate is barred.
    parents: [B, n]; 0 is the root, p + 1 is candidate p.
    depths:  [n] distance from the root, at least 1.
    """

    tokens: Ints
    scores: Floats
    parents: Ints
    depths: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def levels(self) -> int:
        """How deep it goes."""
        return int(self.depths.max())


@dataclass(slots=True)
class Nodes:
    """One tree's candidates, parents before children: node n has number n + 1, and 0 is the root.

    depths: at least 1. scores: see `Candidates`.
    """

    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    depths: list[int] = field(default_factory=list[int])
    scores: list[float] = field(default_factory=list[float])

    def add(self, token: int, parent: int, score: float) -> int:
        """A child of `parent`; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 + (self.depths[parent - 1] if parent else 0))
        self.scores.append(score)
        return len(self.tokens)


def pad_rows(candidates: Candidates, present: Sequence[bool]) -> Candidates:
    """The offer with a row without candidates for every tree that is not present in it."""
    if all(present):
        return candidates
    rows = np.flatnonzero(present)
    shape = (len(present), candidates.tokens.shape[1])
    scores = np.full(shape, -np.inf, candidates.scores.dtype)
    tokens = np.zeros(shape, np.int64)
    parents = np.zeros(shape, np.int64)
    scores[rows], tokens[rows], parents[rows] = candidates.scores, candidates.tokens, candidates.parents
    return Candidates(tokens, scores, parents, candidates.depths)


def merge_trees(
    candidates: Candidates, values: Floats, others: Candidates, other_values: Floats
) -> tuple[Candidates, Floats]:
    """An offer with other trees joined into its own; a node of both is worth what it is worth to either.

    values [B, n], other_values [B, m]: what the candidates of each are worth, never more than their parents.
    Candidates n, n + 1, ... of the result are the others' own; their scores say nothing.
    """
    own = candidates.tokens.shape[1]
    nothing = np.full(other_values.shape, -np.inf)
    joined = np.concatenate((values, nothing), 1)
    parents = np.concatenate((candidates.parents, np.zeros_like(others.parents)), 1)
    for row in range(len(candidates)):
        # by number in the other tree that in the result
        places = {0: 0}
        open_to = np.isfinite(values[row])
        for step in np.flatnonzero(np.isfinite(other_values[row])).tolist():
            parent = places[int(others.parents[row, step])]
            alike = (
                open_to
                & (candidates.parents[row] == parent)
                & (candidates.tokens[row] == others.tokens[row, step])
            )
            shared = np.flatnonzero(alike)
            number = int(shared[0]) if len(shared) else own + step
            joined[row, number] = max(joined[row, number], other_values[row, step])
            if number >= own:
                parents[row, number] = parent
            places[step + 1] = number + 1
    tokens = np.concatenate((candidates.tokens, others.tokens), 1)
    scores = np.concatenate((candidates.scores, nothing), 1)
    return Candidates(tokens, scores, parents, np.concatenate((candidates.depths, others.depths))), joined


def likeliest_paths(scores: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], nodes: int) -> Nodes:
    """A tree of the `nodes` likeliest beginnings of a block whose places were drafted each by itself, as in
    DDTree. scores: of every place's tokens, falling log-probabilities; a beginning's is their sum.

    A node is offered once its parent and its better sibling are in the tree: neither is less likely.
    """
    tree = Nodes()
    offers = [(-scores[0][0], 0, 0, 0, 0.0)]
    while offers and len(tree.tokens) < nodes:
        score, parent, place, rank, before = heappop(offers)
        number = tree.add(tokens[place][rank], parent, -score)
        if rank + 1 < len(scores[place]):
            heappush(offers, (-(before + scores[place][rank + 1]), parent, place, rank + 1, before))
        if place + 1 < len(scores):
            heappush(offers, (score - scores[place + 1][0], number, place + 1, 0, -score))
    return tree


def align_levels(trees: Sequence[Nodes]) -> Candidates:
    """Trees of any shapes as one offer: every level has as many columns as its widest tree has nodes."""
    levels = max((max(tree.depths, default=0) for tree in trees), default=0)
    orders = [sorted(range(len(tree.tokens)), key=tree.depths.__getitem__) for tree in trees]
    counts = np.array([np.bincount(tree.depths, minlength=levels + 1) for tree in trees], np.int64)
    widths = counts.max(0)
    firsts = np.cumsum(widths) - widths
    shape = (len(trees), int(widths.sum()))
    tokens = np.zeros(shape, np.int64)
    parents = np.zeros(shape, np.int64)
    scores = np.full(shape, -np.inf)
    for row, (tree, order) in enumerate(zip(trees, orders)):
        used = firsts.copy()
        numbers = {0: 0}
        for node in order:
            column = int(used[tree.depths[node]])
            used[tree.depths[node]] += 1
            numbers[node + 1] = column + 1
            tokens[row, column], scores[row, column] = tree.tokens[node], tree.scores[node]
            parents[row, column] = numbers[tree.parents[node]]
    return Candidates(tokens, scores, parents, np.repeat(np.arange(levels + 1), widths))


def limit_depths(candidates: Candidates, limits: Sequence[int]) -> Candidates:
    """The offer without candidates deeper than each tree's limit."""
    deep = candidates.depths[None, :] > np.asarray(limits)[:, None]
    return (
        replace(candidates, scores=np.where(deep, -np.inf, candidates.scores)) if deep.any() else candidates
    )


def acceptance_chances(candidates: Candidates, trust: Floats) -> Floats:
    """[B, n] chances of acceptance: the head's probability times the trust [levels] in its depth."""
    chances = np.minimum(np.exp(candidates.scores) * trust[candidates.depths - 1], 1.0)
    return np.where(np.isfinite(candidates.scores), chances, -np.inf)


def depth_masses(candidates: Candidates, chosen: Flags) -> Floats:
    """[B, levels] the head's probability of the chosen candidates, summed per depth."""
    rows, nodes = np.nonzero(chosen)
    shape = len(chosen), candidates.levels
    places = rows * shape[1] + candidates.depths[nodes] - 1
    return np.bincount(places, np.exp(candidates.scores[rows, nodes]), math.prod(shape)).reshape(shape)  # pyrefly: ignore[bad-return]


def build_trees(candidates: Candidates, roots: Sequence[int], chosen: Flags) -> tuple[Tree, ...]:
    """One tree per root from its chosen candidates ([B, n], ancestor-closed)."""
    numbers = np.zeros(
        (len(chosen), chosen.shape[1] + 1), np.int64
    )  # what candidates are called in their trees
    np.cumsum(chosen, 1, out=numbers[:, 1:])
    rows, picked = np.nonzero(chosen)
    tokens = candidates.tokens[rows, picked].tolist()
    parents = numbers[rows, candidates.parents[rows, picked]].tolist()
    stops = numbers[:, -1].cumsum().tolist()
    return tuple(
        Tree((root, *tokens[start:stop]), (0, *parents[start:stop]))
        for root, start, stop in zip(roots, (0, *stops), stops)
    )


def best_each(values: Floats, count: int) -> Flags:
    """[B, n] flags of the `count` best of each row; barred ones (-inf) never, ties to the earlier.

    Ancestor-closed wherever no candidate is worth more than its parent: a parent comes earlier.
    """
    if not 0 < count < values.shape[1]:
        return np.isfinite(values) & (count > 0)
    least = -np.partition(-values, count - 1, axis=1)[:, count - 1 : count]  # a tenth of what sorting takes
    better = values > least
    level = values == least
    spare = count - better.sum(1, keepdims=True)
    return (better | (level & (level.cumsum(1) <= spare))) & np.isfinite(values)


def keep_best(values: Floats, count: int) -> Floats:
    """[B, n] what the `count` best of each row are worth; the others are barred."""
    return np.where(best_each(values, count), values, -np.inf)


def best_overall(values: Floats, count: int) -> Flags:
    """[B, n] flags of the `count` best of all rows together."""
    return best_each(values.reshape(1, -1), count).reshape(values.shape)


def falling(values: Floats) -> Floats:
    """What nodes that are not barred are worth, best first, as `best_overall` takes them."""
    return np.sort(values[np.isfinite(values)])[::-1]


def graft(tree: Tree, tokens: Sequence[int]) -> Tree:
    """The tree with a chain of tokens below its root, sharing the nodes that are there already."""
    if not tokens:
        return tree
    below = children(tree.parents)
    node = 0
    shared = 0
    for token in tokens:
        found = next((child for child in below[node] if tree.tokens[child] == token), None)
        if found is None:
            break
        node = found
        shared = shared + 1
    return _append(tree, node, tokens[shared:])


def _append(tree: Tree, node: int, tokens: Sequence[int]) -> Tree:
    if not tokens:
        return tree
    size = len(tree)
    parents = (node, *range(size, size + len(tokens) - 1))
    return Tree((*tree.tokens, *tokens), (*tree.parents, *parents))
