"""Moving messages between members: the interface, its in-process form, and the queue of a sending end.

Links over gRPC, ZMQ and NCCL stand in the modules beside this one.

Guarantees of every link: messages arrive whole, once, in the order they were sent, or the link is
lost and both ends hear of it. A link is one direction; two members that talk in both directions have two.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from specsot.core.frames import Drafts, Features, TreeSegment
from specsot.core.verdict import UnreadTrees, UnreadVerdict
from specsot.errors import Unavailable
from specsot.members import Kind, Transport
from specsot.tasks import IdleTimer

MAX_QUEUED_BYTES = 512 << 20  # bytes of a link's queue: two of the largest frames; not measured
CLOSE_SECONDS = 0.1  # seconds; peers that live close within milliseconds; not measured

T = TypeVar("T")
Prepare = Callable[[Any], Any]


class SendQueue(Generic[T]):
    """Messages go in by `put`, which never waits, from any thread, and out by `write_all`, in order, until
    `finish` or `lose`.

    A peer that does not read stops nobody: past the limit the link is lost.
    """

    def __init__(self, most: int = MAX_QUEUED_BYTES, write_now: Callable[[T], T] | None = None) -> None:
        """write_now: writes what goes without waiting, and returns the rest; asked while nothing waits."""
        self._items: deque[tuple[T, int] | None] = deque()
        self._lock = Lock()
        self._news = asyncio.Event()
        self._writing = False
        self._loop: asyncio.AbstractEventLoop | None = None  # of who writes
        self._thread = 0
        # bytes
        self.waiting = 0
        self._most = most
        self._write_now = write_now
        self.lost: str | None = None  # why, once it is

    def put(self, message: T, size: int) -> None:
        """size: in bytes. Raises Unavailable once the link is lost, or when its peer is too far behind."""
        with self._lock:
            self.check()
            if self._write_now and not self._items and not self._writing:
                message = self._write_now(message)
                if not message:
                    return
            self.waiting += size
            if self.waiting > self._most:
                self.lost = f"the peer does not read: {self.waiting} bytes wait"
            self._items.append((message, size))
        self._wake()
        self.check()

    def check(self) -> None:
        if self.lost is not None:
            raise Unavailable(self.lost)

    def finish(self) -> None:
        """Nothing more comes; `write_all` returns when all is written."""
        self._items.append(None)
        self._wake()

    def lose(self, reason: str) -> None:
        """The first reason counts."""
        if self.lost is None:
            self.lost = reason
            self.finish()

    async def write_all(
        self, write: Callable[[T], Awaitable[object]], beat: T | None = None, every: float = math.inf
    ) -> None:
        """Write until finished or lost; `beat` goes out after `every` seconds without anything else.

        Raises what `write` raises.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        idle = IdleTimer(every, lambda: self._say(beat), self._loop)  # a timeout for each wait costs more
        if beat is not None:
            idle.restart()
        try:
            while (taken := await self._next()) is not None and self.lost is None:
                message, size = taken
                await write(message)
                with self._lock:
                    self.waiting -= size
                    self._writing = False
                if beat is not None:
                    idle.restart()
        finally:
            idle.stop()

    def _say(self, beat: T | None) -> None:
        """What takes no room; not amid what another thread writes."""
        with self._lock:
            if beat is not None and not self._items:
                self._items.append((beat, 0))
                self._news.set()

    async def _next(self) -> tuple[T, int] | None:
        while not self._items:
            self._news.clear()
            await self._news.wait()
        with self._lock:
            self._writing = True
            return self._items.popleft()

    def _wake(self) -> None:
        if self._loop is None or self._thread == get_ident():
            self._news.set()
        else:
            with suppress(RuntimeError):  # the process ends, and nobody writes any more
                self._loop.call_soon_threadsafe(self._news.set)


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
    """The sending end of one direction between two peers."""

    async def send(self, message: Any) -> None:
        """Hand over one message. Raises Unavailable once the link is lost."""
        ...

    async def close(self) -> bool | None:
        """End the link in good order; what was sent still arrives. False: it did not, or nobody knows."""
        ...


@runtime_checkable
class RingLink(Link, Protocol):
    """The sending end between two members, which a thread that computes may use by itself."""

    def post(self, message: Any) -> None:
        """The same as `send`, from any thread. Raises Unavailable once the link is lost."""
        ...


@runtime_checkable
class NearDrafter(Protocol):
    """A drafter on the thread of whoever tells it what was written."""

    def begin_early(self, verdict: UnreadVerdict) -> None:
        """What `draft` will be asked for behind these trees may be begun with that."""
        ...

    def choose_early(self, verified: Sequence[TreeSegment]) -> UnreadTrees | None:
        """Trees that grow already, as a device chooses them, where `draft` will return those and no others,
        but for first trees, which will be their roots. None: nobody knows before.

        verified: the next segments of all texts that go on, their trees the roots alone.
        """
        ...

    def draft(self, features: Sequence[Features], meanwhile: Callable[[], None]) -> tuple[Drafts, ...] | None:
        """Learn that, and draft; `meanwhile` is called while a device may be at it. Returns what stage 0 is
        to hear; None: nothing is taken in this way now.
        """
        ...


_parting = set[asyncio.Task[Any]]()


async def close_in_background(closing: Coroutine[Any, Any, object]) -> None:
    """Close links, but do not wait for who may be dead: what takes longer happens beside."""
    task = asyncio.get_running_loop().create_task(closing)
    _parting.add(task)
    task.add_done_callback(_parting.discard)
    await asyncio.wait([task], timeout=CLOSE_SECONDS)


class Dialer(Protocol):
    """Opens links to members by their addresses."""

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> RingLink:
        """kind: what must be there. Raises Unavailable when the peer cannot be reached."""
        ...


class Dialers:
    """Dials by the transport that the epoch's configuration names."""

    def __init__(self, by: Mapping[Transport, Dialer]) -> None:
        self._by = by
        self._now = by["grpc"]

    def turn_to(self, transport: Transport) -> None:
        self._now = self._by[transport]

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> RingLink:
        return await self._now.dial(address, epoch, kind)


class Inbox:
    """The receiving end of all of a member's links: one queue, arrivals in order per sender."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()

    def put(self, sender: str, message: Any, names: frozenset[str] | None = None) -> None:
        self._queue.put_nowait(Arrival(sender, message, time.monotonic(), names))

    def arrived(self) -> bool:
        """Whether anything waits here; from any thread."""
        return not self._queue.empty()

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

    def __init__(
        self, sender: str, inbox: Inbox, prepare: Prepare | None = None, drafter: NearDrafter | None = None
    ) -> None:
        """drafter: who is there, if it computes on the thread of who sends."""
        self._sender = sender
        self._inbox = inbox
        self._prepare = prepare
        self._open = True
        self.drafter = drafter
        self._loop = asyncio.get_running_loop()

    async def send(self, message: Any) -> None:
        self._inbox.put(self._sender, self._ready(message))

    def post(self, message: Any) -> None:
        ready = self._ready(message)
        with suppress(RuntimeError):  # the process ends, and nobody reads any more
            self._loop.call_soon_threadsafe(self._inbox.put, self._sender, ready)

    def _ready(self, message: Any) -> Any:
        if not self._open:
            raise Unavailable("link is closed")
        return self._prepare(message) if self._prepare else message

    async def close(self) -> None:
        self._open = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """The members of one process: what one sends another is not encoded, and a drafter on the thread of who
    sends is told by that thread itself.
    """

    inboxes: dict[str, Inbox] = field(default_factory=dict[str, Inbox])  # by address
    drafters: dict[tuple[str, Executor | None], NearDrafter] = field(default_factory=dict[Any, NearDrafter])

    def listen(self, address: str) -> Inbox:
        return self.inboxes.setdefault(address, Inbox())

    def introduce(self, address: str, part: object, compute: Executor) -> None:
        """Who is there, and the thread that it computes on."""
        if isinstance(part, NearDrafter):
            self.drafters[address, compute] = part


@dataclass(frozen=True, slots=True)
class LocalDialer:
    """Dials within one Exchange, in the name of `sender`. compute: the thread that it computes on.

    prepare: what becomes of a message before it is sent. others: dials who is not in this process.
    """

    sender: str
    exchange: Exchange
    compute: Executor | None = None
    prepare: Prepare | None = None
    others: Dialer | None = None

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> RingLink:
        if (near := self.exchange.inboxes.get(address)) is not None:
            drafter = self.exchange.drafters.get((address, self.compute))
            return LocalLink(self.sender, near, self.prepare, drafter)
        if self.others is None:
            raise Unavailable(f"nobody listens at {address}")
        return await self.others.dial(address, epoch, kind)
