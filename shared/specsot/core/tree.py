"""A draft tree as a value, its ancestry and depths, and the rule by which its nodes are accepted.

A tree is two tuples of equal length, the tokens and the parents of its nodes, in an order in which every
parent precedes its children. Worked example: the root a has the children b and c, and b has the child d.

    node      0  1  2  3
    tokens    a  b  c  d
    parents   0  0  0  1
    depths    0  1  1  2
    ancestry  {0} {0, 1} {0, 2} {0, 1, 3}     as bits: 0b0001 0b0011 0b0101 0b1011

If the targets at the nodes are [b d x y], the nodes (0, 1, 3) are accepted and y is the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from specsot.errors import WireError
from specsot.values import value


@value
class Tree:
    """A draft tree: nodes in an order in which parents precede their children; node 0 is the root.

    tokens: token id of each node. The root's token belongs to the sequence already, but has no KV yet.
    parents: node number of each node's parent; the root is its own parent.

    Raises WireError if the tuples have different lengths or are empty, or if a parent does not precede its
    child.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise WireError if the tuples have different lengths or are empty, or if a parent does not precede
        its child.
        """
        if len(self.tokens) != len(self.parents) or not self.tokens:
            raise WireError(f"tree has {len(self.tokens)} tokens and {len(self.parents)} parents")
        shape_of(self.parents)

    @classmethod
    def of_ordered(cls, tokens: tuple[int, ...], parents: tuple[int, ...]) -> Tree:
        """Return the tree with these nodes without checking them, for callers that have made the nodes in
        order. The check of the constructor computes the shape of the tree, which takes thirty times as long,
        and a step that was launched with trees selected on the GPU needs their shapes nowhere else.

        tokens: token id of each node, at least one.
        parents: node number of each node's parent, as many as tokens. Every parent precedes its children, and
            the root is its own parent.
        """
        tree = cls.__new__(cls)
        tree.tokens = tokens  # pyrefly: ignore[read-only]
        tree.parents = parents  # pyrefly: ignore[read-only]
        return tree

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.tokens)


class Shape(NamedTuple):
    """The shape of a draft tree: what follows from its parents alone.

    depths: by node, its distance from the root.
    ancestry: by node, the bit set of the nodes that it may attend, see `ancestry`.
    """

    depths: tuple[int, ...]
    ancestry: tuple[int, ...]


# Shapes. Many sequences draft trees of the same shape, so shapes are cached. Size of the cache: at most 50
# MiB with CACHED_TREE_NODES, where trees of 4,096 nodes would take 1.4 GiB. Untuned.
CACHED_TREE_SHAPES = 1024
# Nodes. The shape of a larger tree is computed each time. Untuned.
CACHED_TREE_NODES = 512


def shape_of(parents: tuple[int, ...]) -> Shape:
    """Return the depths and the ancestry of a tree with these parents.

    Raises WireError if a node's parent does not precede the node.

    parents: by node, the node number of its parent; the root is its own parent.
    """
    return _cached_shape(parents) if len(parents) <= CACHED_TREE_NODES else _shape(parents)


def _shape(parents: tuple[int, ...]) -> Shape:
    """Return the depth of each node, and the set of nodes that each node may attend. Raises WireError if a
    node's parent does not precede the node.

    parents: by node, the node number of its parent; the root is its own parent.

    The ancestry is one bit set per node, with the node itself and its ancestors. A root with a parent other
    than 0 raises WireError too.
    """
    for node, parent in enumerate(parents):
        if not 0 <= parent < (node or 1):
            raise WireError(f"tree node {node} has parent {parent}; parents come first")
    return Shape(depths(parents), ancestry(parents))


_cached_shape = lru_cache(CACHED_TREE_SHAPES)(_shape)


# Trees. Every step makes a tree of one node for each sequence, often of the same tokens. Untuned.
CACHED_SINGLE_TREES = 4096


@lru_cache(CACHED_SINGLE_TREES)
def single(token: int) -> Tree:
    """Return the tree of one node, which decodes without speculation.

    token: token id of the root, which is the newest token of the sequence.
    """
    return Tree.of_ordered((token,), (0,))


def chain(tokens: Sequence[int]) -> Tree:
    """Return the tree in which each token is the only child of the token before it; the root is the first.

    tokens: token ids, root first. Raises WireError if there are none.
    """
    return Tree(tuple(tokens), (0, *range(len(tokens) - 1)))


def shallow(tree: Tree, levels: int) -> Tree:
    """Return the tree of the nodes on the first `levels` levels, the root's level included.

    tree: the tree to cut.
    levels: number of levels to keep, at least 1. A tree with no more levels is returned unchanged.

    >>> shallow(Tree((7, 8, 9, 5), (0, 0, 1, 0)), levels=2)  # node 2 has depth 2; node 3 becomes node 2
    Tree(tokens=(7, 8, 5), parents=(0, 0, 0))

    The order of the nodes stays the same; their numbers are counted anew.
    """
    kept_nodes = [node for node, depth in enumerate(shape_of(tree.parents).depths) if depth < levels]
    if len(kept_nodes) == len(tree):
        return tree
    number = {node: place for place, node in enumerate(kept_nodes)}
    return Tree(
        tuple(tree.tokens[node] for node in kept_nodes),
        tuple(number[tree.parents[node]] for node in kept_nodes),
    )


def first_nodes(tree: Tree, nodes: int) -> Tree:
    """Return the tree of the first `nodes` nodes: as parents precede children, any beginning is a tree.

    tree: the tree to cut. It is returned unchanged if it has no more nodes than that.
    nodes: number of nodes to keep, the root included, at least 1.
    """
    return tree if len(tree.tokens) <= nodes else Tree(tree.tokens[:nodes], tree.parents[:nodes])


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Return the depth of each node; the root has depth 0.

    parents: by node, the node number of its parent; the root is its own parent.

    >>> depths((0, 0, 0, 1))
    (0, 1, 1, 2)

    Parents must precede their children. The result is empty without nodes.
    """
    result: list[int] = []
    for node, parent in enumerate(parents):
        result.append(result[parent] + 1 if node else 0)
    return tuple(result)


def ancestry(parents: Sequence[int]) -> tuple[int, ...]:
    """Return for each node the set of nodes that it may attend, itself and its ancestors, as bits.

    parents: by node, the node number of its parent; the root is its own parent.

    >>> [f"{nodes:04b}" for nodes in ancestry((0, 0, 0, 1))]  # bit 0, the root, is the last digit
    ['0001', '0011', '0101', '1011']

    Parents must precede their children. The result is empty without nodes.
    """
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append((bits[parent] if node else 0) | (1 << node))
    return tuple(bits)


def children(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the children of each node, in node order.

    parents: by node, the node number of its parent; the root is its own parent.

    >>> children((0, 0, 0, 1))
    ((1, 2), (3,), (), ())

    A node without children has an empty tuple.
    """
    found: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if node:
            found[parent].append(node)
    return tuple(tuple(nodes) for nodes in found)


def accept(tree: Tree, targets: Sequence[int | None]) -> tuple[int, ...]:
    """Return the accepted node numbers, root first. The root is always accepted.

    A child is accepted if and only if its token is the target token at its accepted parent. Among siblings
    with the same token, the first is accepted.

    tree: the tree that was verified.
    targets: the target token at each node, in node order. None at a node means that no child of it is
        accepted.

    >>> accept(Tree((7, 8, 9, 5), (0, 0, 0, 1)), targets=(8, 5, 3, 4))  # 7 -> 8 -> 5; the bonus token is 4
    (0, 1, 3)

    If no child of the root is accepted, the result is (0,). Acceptance follows one path from the root, and
    ends at the first node whose target is no child's token.
    """
    tokens = tree.tokens
    parents = tree.parents
    accepted = [0]
    newest = 0
    # Few nodes are accepted, so `in` and `index` take less time than a Python loop over all nodes. `index`
    # raises ValueError if no further node has the target token.
    while (target := targets[newest]) in tokens:
        # The children of the newest accepted node come after it.
        try:
            child = tokens.index(target, newest + 1)
            while parents[child] != newest:
                child = tokens.index(target, child + 1)
        except ValueError:
            break
        accepted.append(child)
        newest = child
    return tuple(accepted)
