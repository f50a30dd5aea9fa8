"""Which nodes of a tree are accepted: by the one rule, and by the reference's residual walk.

Refuses to know logits, sampling parameters and where uniforms come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a residual walk ended.

    accepted: node numbers, root first.
    final:    distribution over the vocabulary from which the bonus token is drawn.
    drawn:    how many uniforms were used.
    """

    accepted: tuple[int, ...]
    final: tuple[float, ...]
    drawn: int


def residual_walk(
    tree: Tree,
    rows: Sequence[Sequence[int]],
    targets: Sequence[Sequence[float]],
    uniforms: Sequence[float],
) -> Walk:
    """The acceptance walk of EAGLE's `evaluate_posterior`, sampling case, drafts as point masses.

    rows:     leaf paths as node numbers, root first; children are tried in the order of these rows.
    targets:  [nodes][vocabulary] target distribution at each node.
    uniforms: one number in [0, 1) per child tried. Too few of them is a ValueError.
    """
    accepted, drawn = [0], 0
    while True:
        chances, taken = list(targets[accepted[-1]]), None
        for child in _next_nodes(rows, accepted):
            if drawn == len(uniforms):
                raise ValueError("fewer uniforms than children tried")
            drawn += 1
            if uniforms[drawn - 1] <= chances[tree.tokens[child]]:
                taken = child
                break
            chances = _without(chances, tree.tokens[child])
        if taken is None:
            return Walk(tuple(accepted), tuple(chances), drawn)
        accepted.append(taken)


def _next_nodes(rows: Sequence[Sequence[int]], accepted: Sequence[int]) -> tuple[int, ...]:
    """Children of the last accepted node, in row order, each once."""
    depth = len(accepted)
    begun = (row for row in rows if len(row) > depth and list(row[:depth]) == list(accepted))
    return tuple(dict.fromkeys(row[depth] for row in begun))


def _without(chances: Sequence[float], token: int) -> list[float]:
    """Zero one token and renormalise; all zeros stay zeros."""
    total = sum(chances) - chances[token]
    scale = 1.0 / total if total > 0 else 0.0
    return [0.0 if other == token else chance * scale for other, chance in enumerate(chances)]
