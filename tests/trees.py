"""Paths in draft trees."""

from __future__ import annotations

from collections.abc import Sequence


def path(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Return the node numbers from the root (0) to `node`, both included."""
    walk = [node]
    while walk[-1]:
        walk.append(parents[walk[-1]])
    return tuple(reversed(walk))
