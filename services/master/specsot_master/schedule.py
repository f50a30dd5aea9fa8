"""Who goes next: which points of a plan, which request's branch, which client's request.

Pure. Refuses to know text, pages and the ring.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from specsot.skeleton import Point


def critical_paths(points: Sequence[Point]) -> dict[int, int]:
    """For each point the longest chain of wished lengths from it through the points that need it."""
    paths: dict[int, int] = {}
    for point in reversed(points):  # needs are smaller ids, so whoever needs a point is already done
        behind = (paths[other.id] for other in points if point.id in other.needs)
        paths[point.id] = point.length + max(behind, default=0)
    return paths


def pick_ready(
    points: Sequence[Point], done: AbstractSet[int], taken: Collection[int], places: int
) -> tuple[Point, ...]:
    """At most `places` points to start now, longest critical path first, then in id order.

    done: points whose text is there. taken: points that are running or over, however they ended.
    """
    paths = critical_paths(points)
    free = [point for point in points if point.id not in taken and done >= set(point.needs)]
    free.sort(key=lambda point: (-paths[point.id], point.id))
    return tuple(free[: max(places, 0)])


@dataclass(frozen=True, slots=True)
class Claim:
    """Somebody who wants a place. `held`: places its client has; `own`: places it has itself."""

    request: str
    client: str
    held: int
    own: int
    arrival: int


def fairest(claims: Iterable[Claim]) -> Claim | None:
    """Whose turn it is: the client that holds least, there the request that holds least, then first come."""
    return min(claims, key=lambda claim: (claim.held, claim.own, claim.arrival), default=None)
