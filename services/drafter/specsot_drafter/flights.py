"""Trees on their way, until the ring tells what became of them.

Refuses to know drafters, costs and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsot.core.frames import FeatureBatch
from specsot.core.tree import Tree, children
from specsot_drafter.tuning import TreeOutcome

ROOT_ONLY = TreeOutcome(0, 1, (), 0)  # a root without anything below


@dataclass(frozen=True, slots=True)
class PendingTree:
    """A tree that was sent.

    committed: tokens in front of its root. grown: levels that were grown for it.
    masses:    the drafter's probability of its nodes, summed per depth.
    own:       its first nodes, which are the drafter's; the others came from elsewhere.
    forced:    what would have been fed without any drafter.
    """

    committed: int
    tree: Tree
    levels: int
    masses: tuple[float, ...]
    own_nodes: int
    forced: tuple[int, ...] = ()


class PendingTrees:
    """By sequence the tree that was sent last."""

    def __init__(self) -> None:
        self._trees: dict[int, PendingTree] = {}

    def add(self, sequence: int, pending: PendingTree) -> None:
        self._trees[sequence] = pending

    def drop(self, sequence: int) -> None:
        self._trees.pop(sequence, None)

    def resolve(self, lesson: FeatureBatch) -> TreeOutcome:
        """What became of the sequence's tree, when this lesson tells it."""
        pending = self._trees.pop(lesson.sequence, None)
        if pending is None or pending.committed != lesson.start or lesson.bonus is None:
            return ROOT_ONLY
        written = lesson.tokens[1:]
        own = len(written) if pending.own_nodes == len(pending.tree) else _own_depth(pending, written)
        free = common_prefix(pending.forced, written)
        return TreeOutcome(pending.levels, len(pending.tree), pending.masses, len(written) - free, own)


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two texts have in common, from their beginning on."""
    for place, (one, other) in enumerate(zip(ours, theirs)):
        if one != other:
            return place
    return min(len(ours), len(theirs))


def _own_depth(pending: PendingTree, written: Sequence[int]) -> int:
    """How deep the drafter's own nodes go along what was written."""
    below, tokens, node = children(pending.tree.parents), pending.tree.tokens, 0
    for depth, token in enumerate(written):
        found = [child for child in below[node] if child < pending.own_nodes and tokens[child] == token]
        if not found:
            return depth
        node = found[0]
    return len(written)
