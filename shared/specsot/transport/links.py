"""Moving messages between members: the interface, its in-process form, and the queue of a sending end.

Links over gRPC, ZMQ and NCCL stand in the modules beside this one.

Guarantees of every link: messages arrive whole, once, in the order they were sent, or the link is
lost and both ends hear of it. A link is one direction; two members that talk in both directions have two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from specsot.errors import Unavailable
from specsot.members import Kind, Transport

MAX_QUEUED_BYTES = 512 << 20  # bytes of a link's queue: two of the largest frames; not measured
CLOSE_SECONDS = 0.1  # seconds; peers that live close within milliseconds; not measured

T = TypeVar("T")
Prepare = Callable[[Any], Any]


class SendQueue(Generic[T]):
    """Messages go in by `put`, which never waits, and out by `write_all`, in order, until `finish` or `lose`.

    A peer that does not read stops nobody: past the limit the link is lost.
    """

    def __init__(self, most: int = MAX_QUEUED_BYTES) -> None:
        self._queue: asyncio.Queue[tuple[T, int] | None] = asyncio.Queue()
        self.waiting, self._most = 0, most  # bytes
        self.lost: str | None = None  # why, once it is

    def put(self, message: T, size: int) -> None:
        """size: in bytes. Raises Unavailable once the link is lost, or when its peer is too far behind."""
        self.check()
        self.waiting += size
        if self.waiting > self._most:
            self.lose(f"the peer does not read: {self.waiting} bytes wait")
        self.check()
        self._queue.put_nowait((message, size))

    def check(self) -> None:
        if self.lost is not None:
            raise Unavailable(self.lost)

    def finish(self) -> None:
        """Nothing more comes; `write_all` returns when all is written."""
        self._queue.put_nowait(None)

    def lose(self, reason: str) -> None:
        """The first reason counts."""
        if self.lost is None:
            self.lost = reason
            self._queue.put_nowait(None)

    async def write_all(
        self, write: Callable[[T], Awaitable[object]], beat: T | None = None, every: float | None = None
    ) -> None:
        """Write until finished or lost; `beat` goes out after `every` seconds without anything else.

        Raises what `write` raises.
        """
        while (message := await self._next(beat, every)) is not None and self.lost is None:
            await write(message)

    async def _next(self, beat: T | None, every: float | None) -> T | None:
        try:
            taken = self._queue.get_nowait()
        except asyncio.QueueEmpty:
            try:
                async with asyncio.timeout(every):
                    taken = await self._queue.get()
            except TimeoutError:
                return beat
        if taken is None:
            return None
        message, size = taken
        self.waiting -= size
        return message


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message and who sent it (a member's name, or "master").

    at: when it came here, by the monotonic clock in seconds; None where nobody noted it.
    names: in the certificate of who sent it; None where none is asked for.
    """

    sender: str
    message: Any
    at: float | None = None
    names: frozenset[str] | None = None

    def of(self, role: str) -> bool:
        """Whoever sent it may be this."""
        return self.names is None or role in self.names


@dataclass(frozen=True, slots=True)
class Lost:
    """The link from (or to) this peer broke; `reason` is one clear line. Arrives as a message.

    epoch: the link's own, so that a loss noticed late does not end a newer ring; 0 for a link that
           outlives epochs (to the master).
    """

    peer: str
    reason: str
    epoch: int = 0


class Link(Protocol):
    """The sending end."""

    async def send(self, message: Any) -> None:
        """Hand over one message. Raises Unavailable once the link is lost."""
        ...

    async def close(self) -> None:
        """End the link in good order; what was sent still arrives."""
        ...


_parting: set[asyncio.Task[None]] = set()


async def close_in_background(closing: Coroutine[Any, Any, None]) -> None:
    """Close links, but do not wait for who may be dead: what takes longer happens beside."""
    task = asyncio.get_running_loop().create_task(closing)
    _parting.add(task)
    task.add_done_callback(_parting.discard)
    await asyncio.wait([task], timeout=CLOSE_SECONDS)


class Dialer(Protocol):
    """Opens links to peers by address."""

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> Link:
        """kind: what must be there. Raises Unavailable when the peer cannot be reached."""
        ...


class Dialers:
    """Dials by the transport that the epoch's configuration names."""

    def __init__(self, by: Mapping[Transport, Dialer]) -> None:
        self._by, self._now = by, by["grpc"]

    def turn_to(self, transport: Transport) -> None:
        self._now = self._by[transport]

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> Link:
        return await self._now.dial(address, epoch, kind)


class Inbox:
    """The receiving end of all of a member's links: one queue, arrivals in order per sender."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()

    def put(self, sender: str, message: Any, names: frozenset[str] | None = None) -> None:
        self._queue.put_nowait(Arrival(sender, message, time.monotonic(), names))

    async def get(self) -> Arrival:
        return await self._queue.get()

    def take(self) -> Arrival | None:
        """An arrival that is already here, or None."""
        return None if self._queue.empty() else self._queue.get_nowait()

    async def __aiter__(self) -> AsyncIterator[Arrival]:
        while True:
            yield await self._queue.get()


class LocalLink:
    """A link within one process: the values themselves, no copy."""

    def __init__(self, sender: str, inbox: Inbox, prepare: Prepare | None = None) -> None:
        self._sender, self._inbox, self._prepare, self._open = sender, inbox, prepare, True

    async def send(self, message: Any) -> None:
        if not self._open:
            raise Unavailable("link is closed")
        self._inbox.put(self._sender, self._prepare(message) if self._prepare else message)

    async def close(self) -> None:
        self._open = False


class Exchange:
    """The addresses of one process: who listens where. Addresses are plain names."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}

    def listen(self, address: str) -> Inbox:
        return self._inboxes.setdefault(address, Inbox())

    def dialer(self, sender: str, prepare: Prepare | None = None) -> Dialer:
        """prepare: what becomes of a message before it is sent."""
        return LocalDialer(sender, self._inboxes, prepare)


@dataclass(frozen=True, slots=True)
class LocalDialer:
    """Dials within one Exchange, in the name of `sender`."""

    sender: str
    inboxes: Mapping[str, Inbox]
    prepare: Prepare | None

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> Link:
        if address not in self.inboxes:
            raise Unavailable(f"nobody listens at {address}")
        return LocalLink(self.sender, self.inboxes[address], self.prepare)
