"""A draft tree as a value, its ancestry and depths, and the rule by which its nodes are accepted.

Tokens and parents of all nodes in one order: a parent comes before its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from specsot.errors import WireError
from specsot.values import value


@value
class Tree:
    """Nodes in an order in which parents come first; node 0 is the root.

    tokens:  token id of each node; the root's token is committed text that has no KV yet.
    parents: node number of each node's parent; the root is its own parent.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not self.tokens:
            raise WireError(f"tree has {len(self.tokens)} tokens and {len(self.parents)} parents")
        shape_of(self.parents)

    def __len__(self) -> int:
        return len(self.tokens)


class Shape(NamedTuple):
    """Of a tree, by node: its depth; and the nodes that it may attend, see `ancestry`."""

    depths: tuple[int, ...]
    ancestry: tuple[int, ...]


# Trees of many texts are often alike. As many of 4,096 nodes would take 1.4 GiB, of these 50 MiB. Not tuned.
KEPT_SHAPES = 1024
KEPT_NODES = 512


def shape_of(parents: tuple[int, ...]) -> Shape:
    """Raises WireError where no tree has these parents."""
    return _kept_shape(parents) if len(parents) <= KEPT_NODES else _shape(parents)


def _shape(parents: tuple[int, ...]) -> Shape:
    for node, parent in enumerate(parents):
        if not 0 <= parent < (node or 1):
            raise WireError(f"tree node {node} has parent {parent}; parents come first")
    return Shape(depths(parents), ancestry(parents))


_kept_shape = lru_cache(KEPT_SHAPES)(_shape)


def single(token: int) -> Tree:
    """The tree of one node: plain decoding."""
    return Tree((token,), (0,))


def chain(tokens: Sequence[int]) -> Tree:
    """A tree without branching, root first."""
    return Tree(tuple(tokens), tuple(max(i - 1, 0) for i in range(len(tokens))))


def shallow(tree: Tree, levels: int) -> Tree:
    """What of a tree lies on its first levels; the root is one."""
    near = [node for node, depth in enumerate(shape_of(tree.parents).depths) if depth < levels]
    if len(near) == len(tree):
        return tree
    number = {node: place for place, node in enumerate(near)}
    return Tree(tuple(tree.tokens[node] for node in near), tuple(number[tree.parents[node]] for node in near))


def first_nodes(tree: Tree, nodes: int) -> Tree:
    """So many of a tree; parents come first, so any beginning is a tree."""
    return tree if len(tree.tokens) <= nodes else Tree(tree.tokens[:nodes], tree.parents[:nodes])


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    result: list[int] = []
    for node, parent in enumerate(parents):
        result.append(result[parent] + 1 if node else 0)
    return tuple(result)


def ancestry(parents: Sequence[int]) -> tuple[int, ...]:
    """For each node the set of nodes it may attend, as bits: itself and its ancestors."""
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append((bits[parent] if node else 0) | (1 << node))
    return tuple(bits)


def children(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each node its children, in node order."""
    found: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if node:
            found[parent].append(node)
    return tuple(tuple(nodes) for nodes in found)


def accept(tree: Tree, targets: Sequence[int | None]) -> tuple[int, ...]:
    """Accepted node numbers, root first.

    targets: the target token at each node, in node order; None: no token is. A child is accepted iff its
    token is the target at its parent; among siblings with the same token the first counts.
    """
    accepted = [0]
    newest = 0
    wanted = targets[0]
    parents = tree.parents
    for node, token in enumerate(tree.tokens):  # parents come first: what is behind the newest comes later
        if token == wanted and parents[node] == newest and node:
            accepted.append(node)
            newest = node
            wanted = targets[node]
    return tuple(accepted)
