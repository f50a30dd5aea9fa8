"""Likeliest paths through a block whose places were drafted independently: best first, as DDTree has it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from specsot_drafter.core.selection import Nodes


def likeliest_paths(scores: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], nodes: int) -> Nodes:
    """A tree of the `nodes` likeliest beginnings of a text. scores: of every place's tokens, falling
    log-probabilities; a beginning's is their sum.

    A node is offered once its parent and its better sibling are in the tree: neither is less likely.
    """
    tree, offers = Nodes(), [(-scores[0][0], 0, 0, 0, 0.0)]
    while offers and len(tree.tokens) < nodes:
        score, parent, place, rank, before = heappop(offers)
        number = tree.add(tokens[place][rank], parent, -score)
        if rank + 1 < len(scores[place]):
            heappush(offers, (-(before + scores[place][rank + 1]), parent, place, rank + 1, before))
        if place + 1 < len(scores):
            heappush(offers, (score - scores[place + 1][0], number, place + 1, 0, -score))
    return tree
