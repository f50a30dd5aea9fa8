"""Queueing rules: fairness between clients, retry hints."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from specsot.core.skeleton import Point


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
    """Somebody who wants a place. `held`: places its client has; `own`: places it has itself.

    waited: seconds.
    """

    request: str
    client: str
    held: int
    own: int
    arrival: int
    priority: int = 0
    waited: float = 0.0


def pick_fairest(claims: Iterable[Claim], aging: float | None = None) -> Claim | None:
    """Whose turn it is: the highest priority; there the client that holds least, there the request that
    holds least, then first come.

    aging: seconds of waiting that raise a claim by one priority, up to the highest there is; None: never.
    So priorities order those who wait, but keep nobody waiting for ever: whoever has risen to the top
    competes there like everybody else.
    """
    listed = list(claims)
    highest = max((claim.priority for claim in listed), default=0)

    def turn(claim: Claim) -> tuple[int, int, int, int]:
        risen = int(claim.waited // aging) if aging else 0
        return -min(claim.priority + risen, highest), claim.held, claim.own, claim.arrival

    return min(listed, key=turn, default=None)


def pick_displaced(waiting: Iterable[Claim], newcomer: Claim) -> Claim | None:
    """Who makes room in a full queue: the last of the client that has most places in it, the lowest
    priority first, if the newcomer's client would even then have fewer; None: nobody, it is refused.

    So one client can fill the queue while nobody else comes, but keeps nobody out.
    """
    listed = list(waiting)
    places = Counter(claim.client for claim in listed)
    most = max(places.values(), default=0)
    if places[newcomer.client] + 1 >= most:
        return None
    crowd = [claim for claim in listed if places[claim.client] == most]
    return max(crowd, key=lambda claim: (-claim.priority, claim.arrival))


# Seconds that a refused client is told to wait, least and most; not measured.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 60.0
MAX_DEPARTURES = 32  # departures of which the rate is taken; not measured


class RetryHints:
    """The n-th caller refused since a request left is sent to the n-th place that will become free.

    usual: seconds to hint before anything is known.
    """

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._left: deque[float] = deque(maxlen=MAX_DEPARTURES)
        self._refused = 0

    def on_departure(self, now: float) -> None:
        """A request is over, so that another can be taken."""
        self._left.append(now)
        self._refused = 0

    def refuse(self, now: float) -> float:
        """Seconds after which this caller may try again."""
        self._refused += 1
        return min(max(self._interval(now) * self._refused, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _interval(self, now: float) -> float:
        """Seconds between departures; what has passed since the last one counts too, once it is longer."""
        if len(self._left) < 2:
            return self._usual
        mean = (self._left[-1] - self._left[0]) / (len(self._left) - 1)
        return max(mean, now - self._left[-1])
