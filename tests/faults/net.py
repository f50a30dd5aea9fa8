"""Hosts and the lanes between them: messages take their time, lanes are cut, hosts stall, freeze and die.

A lane keeps what every link promises: in order, once, or lost at both ends.
What cannot pass waits, as TCP has it, until keepalive takes the lane for dead.

A host that stalls runs nothing: its timers are late, and what arrives waits in its kernel, which still
answers keepalive. A host that is frozen does not answer that either. Behind both, what was due runs before
what came: an event loop runs its timers before the messages that it has just read reach anybody.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from specsot.errors import Unavailable
from tests.faults.virtual import PROCESS, VirtualLoop

KEEPALIVE = 15.0  # seconds a lane may be blocked; gRPC's pings and their patience in rpc/options.py
RETRANSMISSION = (0.2, 1.0)  # seconds until a lost packet was sent again

Act = Callable[[], object]


class Host:
    """One process: a virtual.Process. hung: its compute is. slow: times as long as it computes.

    context: of everything that runs on it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.alive, self.frozen, self.hung, self.slow = name, True, False, False, 1.0
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self._stops = 0
        self._held: list[asyncio.Handle] = []
        self._arrived: list[Act] = []

    @property
    def stalled(self) -> bool:
        return self._stops > 0

    def hold(self, handle: asyncio.Handle) -> None:
        self._held.append(handle)

    def tell(self, act: Act) -> None:
        """Something arrives."""
        if not self.alive:
            return
        if self.stalled:
            self._arrived.append(act)
        else:
            asyncio.get_running_loop().call_soon(act, context=self.context)

    def stall(self) -> None:
        """Until as many calls of `go_on`."""
        self._stops += 1

    def go_on(self) -> None:
        self._stops = max(self._stops - 1, 0)
        if self.stalled:
            return
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        held, self._held = self._held, []
        arrived, self._arrived = self._arrived, []
        for handle in held:
            loop.resume(handle)
        for act in arrived:
            self.tell(act)

    def release(self) -> None:
        """The run is over: nothing stands still any more."""
        self._stops = 0
        self.go_on()


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
        self.post(message)

    def post(self, message: Any) -> None:
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
            self._net.at(since + KEEPALIVE, self._give_up, since)

    def _give_up(self, since: float) -> None:
        """Where both stand still, nobody counts."""
        if self._since == since and not (self.source.frozen and self.target.frozen):
            self.lose("keepalive")

    def _wait(self) -> None:
        self._net.at(self._queue[-1][0], self._pump)

    def _pump(self) -> None:
        while self._queue and self._queue[0][0] <= self._net.now and not self._net.blocked(self):
            _, message = self._queue.popleft()
            self.target.tell(lambda message=message: self._deliver(message))


class Net:
    """All lanes there ever were, and what lies between hosts.

    losses: how many of all messages are sent a second time, as packets are that got lost.
    """

    def __init__(self, rng: random.Random, slowest: float = 0.05, losses: float = 0.0) -> None:
        self._rng, self._slowest, self._losses = rng, slowest, losses
        self.context = Context()  # of no host: what is under way gets there, whoever stands still
        self._cut: set[frozenset[str]] = set()
        self._lanes: list[Lane] = []

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def delay(self) -> float:
        if self._losses and self._rng.random() < self._losses:
            return self._rng.uniform(*RETRANSMISSION)
        return self._rng.uniform(0.0005, self._slowest)

    def at(self, when: float, act: Callable[..., object], *args: Any) -> None:
        """Whoever stands still then."""
        asyncio.get_running_loop().call_at(when, act, *args, context=self.context)

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

    def freeze(self, *hosts: Host) -> None:
        for host in hosts:
            host.frozen = True
            host.stall()
        self._look()

    def thaw(self, *hosts: Host) -> None:
        for host in hosts:
            host.frozen = False
            host.go_on()
        self._look()

    def kill(self, host: Host) -> None:
        """Its kernel hangs up for it. What it would still do, it does to nobody."""
        host.alive = False
        host.release()
        for lane in tuple(self._lanes):
            if host in (lane.source, lane.target):
                lane.lose("connection reset")

    def _look(self) -> None:
        for lane in tuple(self._lanes):
            lane.look()
