"""Which nodes of a tree are accepted: the one rule, for every temperature and every drafter.

Refuses to know logits, sampling parameters and where uniforms come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsot.tree import Tree, children


def accept(tree: Tree, targets: Sequence[int]) -> tuple[int, ...]:
    """Accepted node numbers, root first.

    targets: the target token at each node, in node order. A child is accepted iff its token is the
    target at its parent; among siblings with the same token the first counts.
    """
    below = children(tree.parents)
    accepted = [0]
    while True:
        wanted = targets[accepted[-1]]
        found = next((node for node in below[accepted[-1]] if tree.tokens[node] == wanted), None)
        if found is None:
            return tuple(accepted)
        accepted.append(found)
