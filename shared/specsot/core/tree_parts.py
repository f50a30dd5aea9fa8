"""Cuts a frame with one tree into parts, so that several stages compute nodes of the same tree at a time.

A single sequence has one tree frame in flight. If the frame travels whole, every stage but one is idle. So
stage 0 may cut it: each part carries some of the tree's nodes, in node order, and a stage passes a part on
before it computes the next one.

    whole                                    in two parts
    stage 0  [a b c d]                       [a b][c d]
    stage 1           [a b c d]                   [a b][c d]
    stage 2                    [a b c d]               [a b][c d]

The parts of a frame follow each other on every link. No other frame comes between them. Parents precede their
children, so the nodes of a part attend to the committed tokens and to nodes whose KV this part or an earlier
one has written.

The last stage verifies part by part. The result is known once the accepted path ends: the target at its last
node is not the token of any of that node's children, neither in this part nor in a later one (`is_decided`).
The result is sent at once, and is the frame's only one. The nodes that are left do not matter any more: the
other stages may be computing them already, and the last stage skips them unless it must receive their hidden
states apart from the frame (`--transport direct`). So a round takes only as long as the parts that the
accepted path needs. On a GPU, and with a soft end, the last stage awaits all parts.

    tree a -> (b, c), b -> d in the parts [a b] and [c d]
    target at a is x: decided by the first part, a is accepted and x is the next token
    target at a is b, target at b is d: the second part is awaited, because only it has the target at d

A part costs each stage the time of a frame with as few nodes. Where a stage takes the same time for many
nodes as for few, parts are not worth it: `fewest_parts` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from specsot.core.frames import Frame, TreeSegment
from specsot.core.tree import Tree, children
from specsot.errors import WireError

# Parts. Maximum number of parts of a frame. Every part is a message on every link. Untuned.
MAX_PARTS: Final = 8
# Fraction of a step. The fewest parts are used from which the fastest cut would save at most this fraction,
# so that estimates that are slightly wrong do not cut a tree without benefit. Untuned.
MIN_PARTS_GAIN: Final = 0.05


def cut_frame(frame: Frame) -> tuple[Frame, ...]:
    """Return the parts of a frame in the order in which they are sent: as many as its `last_part` says. A
    frame that travels whole is returned as it is.

    frame: A frame without hidden states, whose `part` is 0. If its `last_part` is not 0, it carries one tree
        with at least as many nodes as parts, and nothing else.

    All parts feed equally many nodes, or one more. Every part has the whole tree, so that the last stage
    knows what later parts may bring; `TreeSegment.nodes` are those that it feeds:

        # tree [a b c d e], last_part 1 -> nodes 0 and 1; nodes 2 to 4
    """
    if not frame.last_part:
        return (frame,)
    (segment,) = frame.segments
    assert isinstance(segment, TreeSegment)
    nodes = len(segment.tree)
    ends = part_ends(nodes, frame.last_part + 1)
    return tuple(
        replace(frame, segments=(replace(segment, earlier=start, later=nodes - end),), part=part)
        for part, (start, end) in enumerate(pairwise((0, *ends)))
    )


def part_ends(num_nodes: int, num_parts: int) -> list[int]:
    """Return for each part of a tree the number of nodes in it and the parts before it.

    num_nodes: Number of nodes of the tree.
    num_parts: Number of parts, at most `num_nodes`.

    >>> part_ends(5, 2)
    [2, 5]
    """
    return [num_nodes * part // num_parts for part in range(1, num_parts + 1)]


def tree_of(frame: Frame) -> TreeSegment:
    """Return the segment of a frame that travels in parts, as if it travelled whole: in the result, `earlier`
    and `later` are 0. Raises WireError if the frame does not carry exactly one tree segment and its hidden
    states.

    frame: Any part of the frame.
    """
    segment = frame.segments[0] if len(frame.segments) == 1 else None
    if not isinstance(segment, TreeSegment) or frame.hidden is None:
        where = f"part {frame.part} of frame {frame.number}"
        raise WireError(f"{where} must carry exactly one tree segment and its hidden states")
    return replace(segment, earlier=0, later=0)


def is_decided(tree: Tree, targets: Sequence[int | None]) -> bool:
    """Return whether the targets of the first nodes decide which nodes of a tree are accepted.

    tree: The whole tree.
    targets: The target token at each of its first nodes, in node order; at least that of the root. None at a
        node means that no child of it is accepted.

    >>> tree = Tree(("a", "b", "c", "d"), (0, 0, 0, 2))  # strings, for clarity; d is below c
    >>> is_decided(tree, ("b", "x")), is_decided(tree, ("c", "x")), is_decided(tree, ("x", "d"))
    (True, False, True)

    In the second case, the target at c is not known yet.
    """
    below = children(tree.parents)
    node: int | None = 0
    while node is not None and node < len(targets):
        target = targets[node]
        node = next((child for child in below[node] if tree.tokens[child] == target), None)
    return node is None


def fewest_parts(num_nodes: int, seconds: Callable[[int], float]) -> int:
    """Return into how many parts a tree is cut: the fewest whose step takes at most 1 / (1 - MIN_PARTS_GAIN)
    times as long as the fastest step. The result is 1 if no cut saves more than MIN_PARTS_GAIN of the whole
    tree's step.

    num_nodes: Number of nodes of the tree, at least 1. Together with MAX_PARTS, it bounds the number of
        parts.
    seconds: Returns the estimated seconds of the step in so many parts.

        # steps of 1, 2, 3 and 4 parts: 10, 7, 6.2 and 6 ms -> 3 parts, because 6.2 <= 6 / 0.95 < 7
    """
    times = [seconds(parts) for parts in range(1, min(num_nodes, MAX_PARTS) + 1)]
    limit = min(times) / (1 - MIN_PARTS_GAIN)
    return next(parts for parts, time in enumerate(times, 1) if time <= limit)


def path_seconds(seconds: Sequence[float], parts: int) -> float:
    """Return the compute seconds on the critical path of a frame in equal parts: the first part passes every
    stage, and each further part adds the slowest stage's time for one part.

    seconds: Seconds that each stage computed the frame, all parts together. At least one stage.
    parts: Number of equal parts of the frame.

        # stages of 3, 6 and 3 ms in 3 parts -> 1 + 2 + 1 ms, and 2 more parts of 2 ms: 8 of 12 ms

    For a frame that travelled whole, this is the sum.
    """
    return (sum(seconds) + (parts - 1) * max(seconds)) / parts
