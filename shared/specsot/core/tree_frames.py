"""The tree frames of one sequence that are in flight: which node each of them grows from, and where it lies.

A *tree frame* is one draft round of a sequence on its way through the stages. It is identified by the number
of its draft round. It grows either from the verified root (the newest token of the sequence, which the last
result has named), or from a node of an earlier tree frame whose result has not arrived. Several tree frames
of one sequence therefore form trees of trees:

    verified root --- round 4: a -> (b, c) --- node 2 (c) --- round 5: d -> (e)
                                          \\-- node 1 (b) --- round 6: f

Until a node is accepted, its KV lies in a *scratch slot* of its sequence. Scratch slots are numbered from 0.
A tree frame names the first slot of its nodes, so that no stage has to count:

    round 4, scratch 0: nodes [a b c] in slots [0 1 2]
    round 5, scratch 3: nodes [d e]   in slots [3 4]
    round 6, scratch 5: nodes [f]     in slots [5]

A result verifies one tree frame and names the frames that it drops: those that grew from a node that was not
accepted. If a and c are accepted in round 4, and d follows, round 6 is dropped and round 5 stays in flight.

Today MAX_TREE_FRAMES is 1: every tree frame grows from the verified root, has its nodes in the scratch slots
from 0 on, and no result drops any frame. Stages reject other tree frames (`check_supported`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from specsot.core.frames import ParentNode, TreeSegment
from specsot.errors import WireError

# Tree frames. How many tree frames of one sequence may be in flight. The stages support one: see
# `check_supported`.
MAX_TREE_FRAMES: Final = 1


@dataclass(slots=True)
class TreeFrames:
    """The tree frames (draft rounds) of one sequence that are in flight, and their scratch slots.

    limit: how many there may be.
    trees: the scratch slots of each tree frame, by draft round, in the order in which the tree frames were
        launched.
    has_room: True if another tree frame may be launched.

    >>> frames = TreeFrames(limit=3)
    >>> [frames.launch(4, nodes=3), frames.launch(5, nodes=2, parent=ParentNode(4, 2))]
    [0, 3]
    >>> frames.launch(6, nodes=1, parent=ParentNode(4, 1)), frames.has_room
    (5, False)
    >>> frames.finish(4, dropped=[6])
    >>> list(frames.trees), frames.launch(7, nodes=3)  # the slots of round 4 are free again
    ([5], 0)
    """

    limit: int = MAX_TREE_FRAMES
    trees: dict[int, range] = field(default_factory=dict[int, range], init=False)
    has_room: bool = field(default=True, init=False)

    def launch(self, draft_round: int, nodes: int, parent: ParentNode | None = None) -> int:
        """Record a tree frame as in flight. Return its first scratch slot: the lowest from which on as many
        slots as it has nodes are free.

        draft_round: number of the draft round, which is not in flight yet.
        nodes: number of nodes of the tree, its root included.
        parent: the node that the tree grows from. Its tree frame must be in flight. None: the verified root.

        Raises AssertionError if the limit is reached, or if the parent's tree frame is not in flight.

        The slot is 0 if no tree frame is in flight. `has_room` becomes False if the limit is then reached.
        """
        assert self.has_room, "more tree frames than the limit"
        assert parent is None or parent.draft_round in self.trees, "the parent is not in flight"
        first = self._first_free(nodes) if self.trees else 0
        self.trees[draft_round] = range(first, first + nodes)
        self.has_room = len(self.trees) < self.limit
        return first

    def finish(self, draft_round: int, dropped: Iterable[int] = ()) -> None:
        """Record that a tree frame was verified, and that its result drops other ones: their scratch slots
        are free.

        draft_round: number of the verified draft round. A round that is not in flight is ignored.
        dropped: draft rounds that the result drops; rounds that are not in flight are ignored.

        `has_room` becomes True if fewer tree frames than the limit are left.
        """
        self.trees.pop(draft_round, None)
        for one in dropped:
            self.trees.pop(one, None)
        self.has_room = len(self.trees) < self.limit

    def _first_free(self, nodes: int) -> int:
        """Return the lowest scratch slot from which on enough slots are free; 0 if no tree frame is in
        flight.

        nodes: number of slots that are needed, one after the other.

        Slots after the last tree in flight are always free.
        """
        first = 0
        for slots in sorted(self.trees.values(), key=lambda one: one.start):
            if first + nodes <= slots.start:
                break
            first = slots.stop
        return first


def check_supported(segment: TreeSegment) -> None:
    """Raise WireError for a tree frame that the stages of this version cannot run: one that grows from an
    unverified node, that has its nodes elsewhere than in the scratch slots from 0 on, or that frees the
    scratch slots of rounds by name.

    segment: the tree of one draft round, as it was received.
    """
    if segment.parent is not None or segment.scratch or segment.freed:
        raise WireError(
            f"draft round {segment.draft_round} of sequence {segment.sequence} is one of several in flight; "
            f"the stages of this version run {MAX_TREE_FRAMES} tree frame of a sequence at a time"
        )
