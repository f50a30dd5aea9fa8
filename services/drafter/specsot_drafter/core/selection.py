"""Candidate nodes of draft trees, and the selection of the nodes that are sent to the base model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsot.core.tree import Tree, children
from specsot.values import value

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
# Called with the scores [B, k] of a frontier, best first in each row, and with the depth of the frontier.
# Returns how many nodes of each row to expand; 0: grow no further level.
KeepGrowing = Callable[[Floats, int], int]


@value
class Candidates:
    """All candidates of B trees that were grown together: n per tree, parents before children.

    All trees have the same depths, but each tree has its own parents. The root is no candidate. Two trees of
    two levels, with k = 2 children of the root and 2 children of one node per tree:

        depths  [1 1 2 2]
        parents [0 0 1 1]   the first tree expanded candidate 0
                [0 0 2 2]   the second tree expanded candidate 1

    tokens:  [B, n] token ids in the vocabulary of the base model.
    scores:  [B, n] cumulative log-probability from the root; -inf where a candidate is barred.
    parents: [B, n] number of each candidate's parent: 0 is the root, p + 1 is candidate p.
    depths:  [n] distance of each candidate from the root, at least 1.
    """

    tokens: Ints
    scores: Floats
    parents: Ints
    depths: Ints

    def __len__(self) -> int:
        """Return the number of trees."""
        return len(self.tokens)

    def every(self, step: int) -> Candidates:
        """Return the candidates of every `step`-th tree, from the first on.

        step: At least 1.
        """
        return Candidates(self.tokens[::step], self.scores[::step], self.parents[::step], self.depths)

    def only(self, tree: int) -> Candidates:
        """Return the candidates of one tree, as arrays of one row: tokens, scores and parents [1, n]. These
        three arrays are copies, so that they stay as they are if the arrays of this object are overwritten.
        `depths` is the array of this object.

        tree: Index of the tree, 0 .. len(self) - 1. An index beyond the last tree gives arrays of no row.
        """
        rows = slice(tree, tree + 1)
        return Candidates(
            self.tokens[rows].copy(), self.scores[rows].copy(), self.parents[rows].copy(), self.depths
        )

    @property
    def levels(self) -> int:
        """The depth of the deepest candidate, at least 1."""
        return int(self.depths.max())


@dataclass(slots=True)
class Nodes:
    """The candidates of one tree, parents before children: entry n has number n + 1, and 0 is the root.

    tokens:  Token id of each candidate.
    parents: Number of each candidate's parent.
    depths:  Distance of each candidate from the root, at least 1.
    scores:  Cumulative log-probability of each candidate from the root.
    """

    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    depths: list[int] = field(default_factory=list[int])
    scores: list[float] = field(default_factory=list[float])

    def add(self, token: int, parent: int, score: float) -> int:
        """Append a node, and return its number.

        token: Token id.
        parent: Number of its parent; 0 is the root.
        score: Cumulative log-probability from the root.

        Numbers count from 1. The depth of the node is one more than its parent's.
        """
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 + (self.depths[parent - 1] if parent else 0))
        self.scores.append(score)
        return len(self.tokens)


def stacked(offers: Sequence[Candidates]) -> Candidates:
    """Return the trees of several `Candidates` objects as one object, in the given order: with B1, B2, ...
    trees, the result has B1 + B2 + ... trees.

    offers: The objects. At least one; all must have the same depths.
    """
    tokens, scores, parents = (
        np.concatenate(parts) for parts in zip(*((one.tokens, one.scores, one.parents) for one in offers))
    )
    return Candidates(tokens, scores, parents, offers[0].depths)


def pad_rows(candidates: Candidates, present: Sequence[bool]) -> Candidates:
    """Return the candidates with a row added for every tree that is not present. All candidates of added rows
    are barred. If every tree is present, the candidates are returned unchanged.

    candidates: Candidates of the trees that are present.
    present: One flag per tree of the result; the true ones are the rows of `candidates`, in order.

    For example:

        # rows [a b], present [True False True] -> rows [a, barred, b]

    All trees of the result have the depths of `candidates`.
    """
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
    """Merge two sets of trees, tree by tree. Return the merged candidates and their worth, [B, n + m] each.

    candidates: Candidates of the first trees, n each.
    values: Worth of these, [B, n]; -inf where barred, never more than a parent's worth.
    others: Candidates of the second trees, m each.
    other_values: Worth of these, [B, m], likewise.

    A node that both trees have (the same token below the same parent) is kept once, as the candidate of the
    first tree, with the larger of its two worths. Candidates n, n + 1, ... of the result are those of the
    second tree; their scores are -inf, only their worth is meaningful. Duplicates keep their column, barred.

        # own tree: A(parent 0) B(parent 1); other tree: A(0) C(1) -> A(0) B(1) A(barred) C(1)

    A node of the second tree below a node that is barred there is not reached, so barred parents must have
    barred children.
    """
    num_own = candidates.tokens.shape[1]
    nothing = np.full(other_values.shape, -np.inf)
    joined = np.concatenate((values, nothing), 1)
    parents = np.concatenate((candidates.parents, np.zeros_like(others.parents)), 1)
    for row in range(len(candidates)):
        # Maps the number of a node in the other tree to its number in the result; 0 is the root.
        places = {0: 0}
        open_to = np.isfinite(values[row])
        for column in np.flatnonzero(np.isfinite(other_values[row])).tolist():
            parent = places[int(others.parents[row, column])]
            alike = (
                open_to
                & (candidates.parents[row] == parent)
                & (candidates.tokens[row] == others.tokens[row, column])
            )
            shared = np.flatnonzero(alike)
            number = int(shared[0]) if len(shared) else num_own + column
            joined[row, number] = max(joined[row, number], other_values[row, column])
            if number >= num_own:
                parents[row, number] = parent
            places[column + 1] = number + 1
    tokens = np.concatenate((candidates.tokens, others.tokens), 1)
    scores = np.concatenate((candidates.scores, nothing), 1)
    return Candidates(tokens, scores, parents, np.concatenate((candidates.depths, others.depths))), joined


def likeliest_paths(scores: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], nodes: int) -> Nodes:
    """Return the tree of the likeliest prefixes of a block whose places were drafted independently. It has
    fewer than `nodes` nodes if there are no more prefixes.

    scores: For every place of the block, the log-probabilities of its tokens, falling. At least one place.
    tokens: The token ids that belong to `scores`.
    nodes: Maximum number of nodes, without the root.

    This is the tree of DDTree. The log-probability of a prefix is the sum over its places. A best-first
    search offers a node once its parent and its next better sibling are in the tree, as neither is less
    likely.

    Probabilities [.6 .3], [.9 .1] of tokens [A B], [C D], 3 nodes -> A (.6), AC (.54), B (.3)

    With `nodes` 0 the tree is empty. Each place offers at most the listed tokens.
    """
    tree = Nodes()
    # (negated score of the prefix, parent's number, place, rank of the token there, score of the parent)
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
    """Return trees of different shapes as candidates of one shape: every level has as many columns as its
    widest tree has nodes. Unused columns are barred (score -inf).

    trees: The trees. At least one of them has a node.

    With one node at depth 1 and two at depth 2 in the first tree, and two nodes at depth 1 in the second
    tree, the columns are:

        depths [1 1 2 2]: first tree [a - b c], second tree [d e - -]

    Without any node in any tree the result has no columns. Within a level, a tree's nodes keep their order.
    """
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
    """Return the candidates with those barred that are deeper than their tree's limit. If there are none, the
    candidates are returned unchanged.

    candidates: Candidates of B trees.
    limits: The largest depth of each tree that stays, B numbers.
    """
    too_deep = candidates.depths[None, :] > np.asarray(limits)[:, None]
    return (
        replace(candidates, scores=np.where(too_deep, -np.inf, candidates.scores))
        if too_deep.any()
        else candidates
    )


def acceptance_chances(candidates: Candidates, trust: Floats) -> Floats:
    """Return the chance of acceptance of each candidate, [B, n]; -inf where a candidate is barred.

    candidates: Candidates of B trees, n each.
    trust: Factor for depth 1, 2, ..., [levels]. The chance is the head's cumulative probability times the
        factor, at most 1.
    """
    chances = np.minimum(np.exp(candidates.scores) * trust[candidates.depths - 1], 1.0)
    return np.where(np.isfinite(candidates.scores), chances, -np.inf)


def depth_masses(candidates: Candidates, chosen: Flags) -> Floats:
    """Return the head's probability of the chosen candidates, summed per depth: [B, levels]. A depth without
    chosen candidates has 0.

    candidates: Candidates of B trees, n each.
    chosen: Flags of the chosen candidates, bool [B, n].

    The probability of a candidate is the exponential of its score.
    """
    rows, nodes = np.nonzero(chosen)
    shape = len(chosen), candidates.levels
    # One bin per (tree, depth), as one flat index: tree 1 at depth 2 of 3 levels has bin 1 * 3 + 2 - 1 = 4.
    places = rows * shape[1] + candidates.depths[nodes] - 1
    return np.bincount(places, np.exp(candidates.scores[rows, nodes]), math.prod(shape)).reshape(shape)  # pyrefly: ignore[bad-return]


def build_trees(candidates: Candidates, roots: Sequence[int], chosen: Flags) -> tuple[Tree, ...]:
    """Return one tree per root, built from its chosen candidates in the order of the candidates. A tree
    without chosen candidates is its root alone.

    candidates: Candidates of B trees, n each.
    roots: The token id of each tree's root.
    chosen: Flags of the chosen candidates, bool [B, n]; the parent of every chosen candidate is chosen, too.

    Barred candidates must not be chosen.
    """
    # numbers[b, p] is the node number, in the built tree, of candidate p - 1; column 0 is the root.
    # chosen [1 0 1 1], parents [0 0 1 3] -> numbers [0 1 1 2 3], parents of the kept nodes [0 1 2]
    numbers = np.zeros((len(chosen), chosen.shape[1] + 1), np.int64)
    np.cumsum(chosen, 1, out=numbers[:, 1:])
    rows, picked = np.nonzero(chosen)
    tokens = candidates.tokens[rows, picked].tolist()
    parents = numbers[rows, candidates.parents[rows, picked]].tolist()
    stops = numbers[:, -1].cumsum().tolist()
    trees = list[Tree]()
    start = 0
    for root, stop in zip(roots, stops):
        trees.append(Tree((root, *tokens[start:stop]), (0, *parents[start:stop])))
        start = stop
    return tuple(trees)


class ChosenNodes(NamedTuple):
    """The nodes of B trees that a device has selected from their candidates, roots left out. All trees have
    the same number k of nodes.

    nodes: For each tree, two lists with an entry for each node, in the order of the candidates: [B][2][k].
        The first list has the token ids of the nodes, the second one the node numbers of their parents. Node
        0 is the root, and the first entry is node 1.
    masses: For each tree, the head's probability of its nodes, summed per depth: [B][levels], with an entry
        for each level of the candidates.

        # candidates [a b c d] with parents [0 0 1 3], of which a, c and d are chosen as nodes 1, 2 and 3
        # -> nodes of the tree [[a c d] [0 1 2]]
    """

    nodes: list[list[list[int]]]
    masses: list[list[float]]


def likeliest_first(tree: Tree, worth: Floats) -> Tree:
    """Return the same tree with its likeliest nodes first, so that the parts in which it travels are awaited
    as seldom as possible.

    tree: A tree.
    worth: Chance of each of its nodes but the root to be accepted, [nodes - 1]. No node is likelier than its
        parent.

    >>> likeliest_first(Tree((9, 1, 2, 3), (0, 0, 0, 1)), np.array([0.6, 0.2, 0.5]))
    Tree(tokens=(9, 1, 3, 2), parents=(0, 0, 1, 0))
    """
    order = [0, *(1 + np.argsort(-worth, kind="stable")).tolist()]
    number = {node: place for place, node in enumerate(order)}
    return Tree(
        tuple(tree.tokens[node] for node in order), tuple(number[tree.parents[node]] for node in order)
    )


def best_each(values: Floats, count: int) -> Flags:
    """Return flags of the best candidates of each row, bool [B, n]. Barred ones (-inf) are never chosen. Of
    equal candidates the earlier one is chosen.

    values: Worth of each candidate, [B, n].
    count: Maximum number of candidates per row. 0 or less: none is chosen.

    If no candidate is worth more than its parent, the parent of every chosen candidate is chosen, because a
    parent comes earlier.

        # values [.6 .3 .3 .1], count 2 -> [1 1 0 0]

    A count of n or more chooses every candidate that is not barred.
    """
    if not 0 < count < values.shape[1]:
        return np.isfinite(values) & (count > 0)
    # The count-th best value of each row. Partitioning takes a tenth of the time of sorting.
    threshold = -np.partition(-values, count - 1, axis=1)[:, count - 1 : count]
    better = values > threshold
    tied = values == threshold
    num_tied_taken = count - better.sum(1, keepdims=True)
    return (better | (tied & (tied.cumsum(1) <= num_tied_taken))) & np.isfinite(values)


def keep_best(values: Floats, count: int) -> Floats:
    """Return the values with all but the best of each row barred (-inf): [B, n].

    values: Worth of each candidate, [B, n]; -inf where barred.
    count: Maximum number of candidates per row that stay. 0 or less: none stays.
    """
    return np.where(best_each(values, count), values, -np.inf)


def best_overall(values: Floats, count: int) -> Flags:
    """Return flags of the best candidates of all rows together, bool [B, n].

    values: Worth of each candidate, [B, n]; -inf where barred. Barred candidates are never chosen.
    count: Maximum number of candidates of all rows together. 0 or less: none is chosen.
    """
    return best_each(values.reshape(1, -1), count).reshape(values.shape)


def falling(values: Floats) -> Floats:
    """Return the values of all candidates that are not barred, best first, as one array, which is empty if
    all are barred. This is the order of `best_overall`.

    values: Worth of each candidate, [B, n]; -inf where barred.
    """
    return np.sort(values[np.isfinite(values)])[::-1]


def graft(tree: Tree, tokens: Sequence[int]) -> Tree:
    """Return the tree with a chain of tokens added below its root. Nodes that exist already are shared.

    tree: A tree.
    tokens: Token ids of the chain. Empty: the tree itself is returned.

    For example:

        # tree root-A-B, tokens [A C D] -> the tree has the nodes root, A, B and, below A, C-D

    If the whole chain exists already, the tree itself is returned.
    """
    below = children(tree.parents)
    node = 0
    added = list(tokens)
    while added and (found := next((one for one in below[node] if tree.tokens[one] == added[0]), None)):
        node = found
        added.pop(0)
    if not added:
        return tree
    size = len(tree)
    # Below node 1 of a tree of 3 nodes, the parents of 3 more tokens are (1, 3, 4).
    parents = (node, *range(size, size + len(added) - 1))
    return Tree((*tree.tokens, *added), (*tree.parents, *parents))
