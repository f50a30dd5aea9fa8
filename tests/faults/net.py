"""Hosts and the lanes between them: messages take their time, lanes are cut, hosts freeze and die.

Refuses to know what is sent. A lane keeps what every link promises: in order, once, or lost at both ends.
What cannot pass waits, as TCP has it, until keepalive takes the lane for dead.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from specsot.errors import Unavailable

KEEPALIVE = 15.0  # seconds a lane may be blocked; gRPC's pings and their patience in rpc/options.py

Act = Callable[[], None]


class Host:
    """One process. What it is told while it is frozen reaches it when it thaws. hung: its compute is."""

    def __init__(self, name: str) -> None:
        self.name, self.alive, self.frozen, self.hung = name, True, False, False
        self._held: list[Act] = []

    def tell(self, act: Act) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._held.append(act)
        else:
            act()

    def thaw(self) -> None:
        self.frozen = False
        held, self._held = self._held, []
        for act in held:
            self.tell(act)


class Lane:
    """One direction of one connection; the sending end is a Link."""

    def __init__(self, net: Net, source: Host, target: Host, deliver: Callable[[Any], None]) -> None:
        self._net, self.source, self.target, self._deliver = net, source, target, deliver
        self._queue: deque[tuple[float, Any]] = deque()
        self._last, self._since = 0.0, None
        self._done = False
        self.lost: str | None = None
        self.on_lost: list[tuple[Host, Callable[[str], None]]] = []

    @property
    def closed(self) -> bool:
        """By who sends."""
        return self._done

    async def send(self, message: Any) -> None:
        if self.lost or self._done:
            raise Unavailable(self.lost or "the link is closed")
        self._last = max(self._last, self._net.now + self._net.delay())
        self._queue.append((self._last, message))
        self._wait()

    async def close(self) -> None:
        self._done = True

    def lose(self, reason: str) -> None:
        """Each end hears of it as soon as it can hear."""
        if self.lost is None and not (self._done and not self._queue):
            self.lost = reason
            self._queue.clear()
            for host, hear in self.on_lost:
                host.tell(lambda hear=hear: hear(reason))

    def look(self) -> None:
        """Something about its two hosts, or what lies between them, has changed."""
        if not self._net.blocked(self):
            self._since = None
            self._pump()
        elif self._since is None:
            self._since = since = self._net.now
            asyncio.get_running_loop().call_later(KEEPALIVE, self._give_up, since)

    def _give_up(self, since: float) -> None:
        if self._since == since:
            self.lose("keepalive")

    def _wait(self) -> None:
        asyncio.get_running_loop().call_at(self._queue[-1][0], self._pump)

    def _pump(self) -> None:
        while self._queue and self._queue[0][0] <= self._net.now and not self._net.blocked(self):
            _, message = self._queue.popleft()
            self.target.tell(lambda message=message: self._deliver(message))


class Net:
    """All lanes there ever were, and what lies between hosts."""

    def __init__(self, rng: random.Random, slowest: float = 0.05) -> None:
        self._rng, self._slowest = rng, slowest
        self._cut: set[frozenset[str]] = set()
        self._lanes: list[Lane] = []

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def delay(self) -> float:
        return self._rng.uniform(0.0005, self._slowest)

    def open(self, source: Host, target: Host, deliver: Callable[[Any], None]) -> Lane:
        """Raises Unavailable: nobody can be reached there now."""
        if not target.alive or target.frozen or self.apart(source, target):
            raise Unavailable(f"{target.name} cannot be reached")
        lane = Lane(self, source, target, deliver)
        self._lanes = [one for one in self._lanes if one.lost is None]
        self._lanes.append(lane)
        return lane

    def apart(self, one: Host, other: Host) -> bool:
        return frozenset((one.name, other.name)) in self._cut

    def blocked(self, lane: Lane) -> bool:
        return lane.source.frozen or lane.target.frozen or self.apart(lane.source, lane.target)

    def cut(self, one: str, other: str) -> None:
        self._cut.add(frozenset((one, other)))
        self._look()

    def heal(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))
        self._look()

    def freeze(self, host: Host) -> None:
        host.frozen = True
        self._look()

    def thaw(self, host: Host) -> None:
        host.thaw()
        self._look()

    def kill(self, host: Host) -> None:
        """Its kernel hangs up for it."""
        host.alive = False
        for lane in tuple(self._lanes):
            if host in (lane.source, lane.target):
                lane.lose("connection reset")

    def _look(self) -> None:
        for lane in tuple(self._lanes):
            lane.look()
