"""Moving messages between members: the interface, its in-process form, and the queue of a sending end.

Links over gRPC, ZMQ and NCCL are defined in the other modules of this package.

Guarantees of every link: messages arrive whole, once, in the order in which they were sent; or the link is
lost and both ends are notified. A link has one direction; two members that send to each other have two links.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from specsot.core.device_verification import ColocatedDrafter
from specsot.errors import Unavailable
from specsot.members import Kind, Transport
from specsot.tasks import IdleTimer

# Bytes. Bounds the queue of a link to two of the largest frames. Untuned.
MAX_QUEUED_BYTES = 512 << 20
# Seconds. How long `close_in_background` waits; live peers close within milliseconds. Untuned.
CLOSE_SECONDS = 0.1

T = TypeVar("T")
Prepare = Callable[[Any], Any]


class SendQueue(Generic[T]):
    """The bounded queue of messages of a link's sending end.

    `put` adds a message from any thread and never waits. `write_all`, on an event loop, writes the messages
    in order until `finish` or `lose` is called. If the peer does not read and the queue grows beyond its
    limit, the link is lost, so that the peer delays no other link.

    waiting: bytes in the queue.
    lost: why the link was lost, or None while it is not.
    """

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES, write_now: Callable[[T], T] | None = None) -> None:
        """Create an empty queue. Nothing is written before `write_all` runs, except by `write_now`.

        max_bytes: limit of the queue in bytes.
        write_now: writes as much of a message as is possible without waiting, and returns the rest. Called
            from `put` if the queue is empty and no other message is being written. None: only `write_all`
            writes.
        """
        self._items: deque[tuple[T, int] | None] = deque()
        self._lock = Lock()
        self._item_added = asyncio.Event()
        self._writing = False
        # The event loop on which `write_all` runs, and its thread.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self.waiting = 0
        self._max_bytes = max_bytes
        self._write_now = write_now
        self.lost: str | None = None

    def put(self, message: T, size: int) -> None:
        """Add a message of `size` bytes.

        message: the encoded message.
        size: its number of bytes, which counts toward the limit until the message is written.

        Raises Unavailable if the link is lost, and if this message exceeds the limit, which loses the link.

        A message that `write_now` writes as a whole is not queued. If it writes a part, the rest is queued,
        and counts with the full `size`.
        """
        with self._lock:
            self.check()
            if self._write_now and not self._items and not self._writing:
                message = self._write_now(message)
                if not message:
                    return
            self.waiting += size
            if self.waiting > self._max_bytes:
                self.lost = f"the peer does not read: {self.waiting} bytes wait"
            self._items.append((message, size))
        self._wake()
        self.check()

    def check(self) -> None:
        """Raise Unavailable if the link is lost."""
        if self.lost is not None:
            raise Unavailable(self.lost)

    def finish(self) -> None:
        """Declare that no more messages follow: `write_all` returns once all messages are written."""
        self._items.append(None)
        self._wake()

    def lose(self, reason: str) -> None:
        """Mark the link as lost, which ends `write_all`. Does nothing if the link is lost already, so that
        the first reason stays.

        reason: why the link is lost, in one clear line.
        """
        if self.lost is None:
            self.lost = reason
            self.finish()

    async def write_all(
        self,
        write: Callable[[T], Awaitable[object]],
        heartbeat: T | None = None,
        heartbeat_seconds: float = math.inf,
    ) -> None:
        """Write messages until the queue is finished or lost. After a loss, the messages that are left are
        not written.

        write: writes one message, and returns when there is room for more.
        heartbeat: a message that is written after `heartbeat_seconds` without any other message. None: no
            heartbeats.
        heartbeat_seconds: seconds without a message before a heartbeat.

        Raises what `write` raises.

        A heartbeat is queued only if no message waits.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        # One idle timer for all messages costs less than a timeout for each wait.
        idle = IdleTimer(heartbeat_seconds, lambda: self._put_heartbeat(heartbeat), self._loop)
        if heartbeat is not None:
            idle.restart()
        try:
            while (item := await self._next()) is not None and self.lost is None:
                message, size = item
                await write(message)
                with self._lock:
                    self.waiting -= size
                    self._writing = False
                if heartbeat is not None:
                    idle.restart()
        finally:
            idle.stop()

    def _put_heartbeat(self, heartbeat: T | None) -> None:
        """Queue a heartbeat, which counts as 0 bytes, unless messages are waiting.

        heartbeat: the encoded heartbeat. None: nothing is queued.

        Must be called on the event loop of `write_all`.
        """
        with self._lock:
            if heartbeat is not None and not self._items:
                self._items.append((heartbeat, 0))
                self._item_added.set()

    async def _next(self) -> tuple[T, int] | None:
        """Wait for the next message; return it with its size, or None if the queue is finished or lost.

        While the message is being written, `put` does not write directly.
        """
        while not self._items:
            self._item_added.clear()
            await self._item_added.wait()
        with self._lock:
            self._writing = True
            return self._items.popleft()

    def _wake(self) -> None:
        """Wake `write_all` after something was queued, from whichever thread this is called.

        Does nothing if that event loop is closed.
        """
        if self._loop is None or self._thread == get_ident():
            self._item_added.set()
        else:
            # The event loop is closed if the process ends; then no message is written any more.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._item_added.set)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that a member has received, with its sender.

    sender: name of the member that sent the message, or "master".
    message: the message.
    at: time of arrival in seconds of the monotonic clock. None if unknown.
    names: names in the sender's certificate. None if members need no certificates.
    """

    sender: str
    message: Any
    at: float | None = None
    names: frozenset[str] | None = None

    def may_act_as(self, role: str) -> bool:
        """Return whether the sender's certificate allows it to act as `role`; True if members need no
        certificates.

        role: "master", "worker" or "drafter".
        """
        return self.names is None or role in self.names


@dataclass(frozen=True, slots=True)
class Lost:
    """The message that the link from or to a peer is lost. The receiving end puts it into the inbox.

    peer: name of the peer.
    reason: why the link is lost, in one clear line.
    epoch: epoch of the link, so that a loss that is noticed late does not end a newer epoch. 0 for a link
        that outlives epochs, to the master.
    """

    peer: str
    reason: str
    epoch: int = 0


class Link(Protocol):
    """The sending end of a link: one direction between two peers."""

    async def send(self, message: Any) -> None:
        """Send one message. Returns when the message is queued, not when it has arrived. Raises Unavailable
        if the link is lost.

        message: a value that the link's codec knows, such as a Frame.
        """
        ...

    async def close(self) -> bool | None:
        """End the link after all sent messages have arrived.

        Returns True if they have arrived, as far as this end knows, False if they have not or if that is
        unknown, and None from a link within a process, where no message can be lost.
        """
        ...


@runtime_checkable
class RingLink(Link, Protocol):
    """The sending end of a link between members, which a compute thread may use without the event loop."""

    def post(self, message: Any) -> None:
        """Send one message from any thread, without waiting. Raises Unavailable if the link is lost.

        message: a value that the ring carries, such as a Frame.
        """
        ...


# Tasks that close links in the background. The event loop holds only weak references to tasks.
_closing_tasks = set[asyncio.Task[Any]]()


async def close_in_background(closing: Coroutine[Any, Any, object]) -> None:
    """Close links, but wait at most CLOSE_SECONDS for peers that may be dead; then continue in the
    background.

    closing: the coroutine that closes the links.

    An error of the coroutine is not raised. If the coroutine ends earlier, this returns at once.
    """
    task = asyncio.get_running_loop().create_task(closing)
    _closing_tasks.add(task)
    task.add_done_callback(_closing_tasks.discard)
    await asyncio.wait([task], timeout=CLOSE_SECONDS)


class Dialer(Protocol):
    """Opens links to members by their addresses."""

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> RingLink:
        """Open a link of an epoch to a member.

        address: the member's address, as it registered it: host:port or unix:path.
        epoch: number of the epoch to which the link belongs.
        kind: what the member must be, "worker" or "drafter"; its certificate must say so if certificates are
            needed.

        Raises Unavailable if the peer cannot be reached, and Refused if it rejects the link.
        """
        ...


class Dialers:
    """Dials with the transport that the epoch's configuration names."""

    def __init__(self, dialers: Mapping[Transport, Dialer]) -> None:
        """dialers: the dialer of each transport; "grpc" must be among them. Until `turn_to` is called, "grpc"
        is used.
        """
        self._dialers = dialers
        self._current = dialers["grpc"]

    def turn_to(self, transport: Transport) -> None:
        """Use this transport for all later links.

        transport: one of the transports with a dialer.
        """
        self._current = self._dialers[transport]

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> RingLink:
        """Open a link with the current transport, see `Dialer.dial`.

        address: the member's address, host:port or unix:path.
        epoch: number of the epoch to which the link belongs.
        kind: what the member must be, "worker" or "drafter".

        Raises Unavailable if the peer cannot be reached, and Refused if it rejects the link.
        """
        return await self._current.dial(address, epoch, kind)


class Inbox:
    """The receiving end of all of a member's links: an unbounded queue, with arrivals in order per sender."""

    def __init__(self) -> None:
        """Make an empty inbox."""
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()

    def put(self, sender: str, message: Any, names: frozenset[str] | None = None) -> None:
        """Add a message, with the present time as its time of arrival. Only on the event loop's thread.

        sender: name of the member that sent the message, or "master".
        message: the decoded message.
        names: names in the sender's certificate, or None if members need no certificates.
        """
        self._queue.put_nowait(Arrival(sender, message, time.monotonic(), names))

    def arrived(self) -> bool:
        """Return whether a message waits in the inbox. May be called from any thread."""
        return not self._queue.empty()

    async def get(self) -> Arrival:
        """Remove and return the next message; wait for one if there is none."""
        return await self._queue.get()

    def pop(self) -> Arrival | None:
        """Remove and return the next message if one waits in the inbox, otherwise return None."""
        return None if self._queue.empty() else self._queue.get_nowait()


class LocalLink:
    """A link within one process, which passes the values themselves without a copy.

    drafter: the receiving drafter, if it computes on the sender's thread; otherwise None.
    """

    def __init__(
        self,
        sender: str,
        inbox: Inbox,
        prepare: Prepare | None = None,
        drafter: ColocatedDrafter | None = None,
    ) -> None:
        """Open a link to another member of this process.

        sender: name of the sending member, which the receiver sees.
        inbox: the receiving member's inbox.
        prepare: a function that returns the message to send in the place of each message, or None to send
            messages unchanged.
        drafter: the receiving drafter, if it computes on the sender's thread; otherwise None.

        Must be called on the event loop of the receiving member.
        """
        self._sender = sender
        self._inbox = inbox
        self._prepare = prepare
        self._open = True
        self.drafter = drafter
        self._loop = asyncio.get_running_loop()

    async def send(self, message: Any) -> None:
        """Put a message into the receiver's inbox. Raises Unavailable after `close`.

        message: the value, which the receiver gets without a copy.
        """
        self._inbox.put(self._sender, self._prepared(message))

    def post(self, message: Any) -> None:
        """Put a message into the receiver's inbox from any thread. Raises Unavailable after `close`.

        message: the value, which the receiver gets without a copy.

        Does nothing if the event loop is closed. Raises what `prepare` raises.
        """
        prepared = self._prepared(message)
        # The event loop is closed if the process ends; then no message is read any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._inbox.put, self._sender, prepared)

    def _prepared(self, message: Any) -> Any:
        """Return a message as it is put into the inbox. Raises Unavailable after `close`.

        message: the value to send.
        """
        if not self._open:
            raise Unavailable("link is closed")
        return self._prepare(message) if self._prepare else message

    async def close(self) -> None:
        """End the link: later messages raise Unavailable. Messages that were sent are in the inbox already.
        Closing it again does nothing.
        """
        self._open = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """The members of one process, which exchange messages without encoding them.

    inboxes: the inbox of each member, by its address.
    drafters: the drafters, by address and compute thread. If a sender computes on the same thread, it calls
        the drafter directly instead of sending a message.
    """

    inboxes: dict[str, Inbox] = field(default_factory=dict[str, Inbox])
    drafters: dict[tuple[str, Executor | None], ColocatedDrafter] = field(
        default_factory=dict[Any, ColocatedDrafter]
    )

    def listen(self, address: str) -> Inbox:
        """Return the inbox of the member at `address`, which is created at the first call.

        address: the member's address, host:port or unix:path.
        """
        return self.inboxes.setdefault(address, Inbox())

    def introduce(self, address: str, member: object, compute: Executor) -> None:
        """Register a member, so that a stage on the same compute thread calls it directly if it is a drafter.

        address: the member's address, host:port or unix:path.
        member: the worker or drafter. Workers are not registered.
        compute: the thread on which the member computes.
        """
        if isinstance(member, ColocatedDrafter):
            self.drafters[address, compute] = member


@dataclass(frozen=True, slots=True)
class LocalDialer:
    """Opens links within one Exchange.

    sender: name of the dialing member.
    exchange: the members of the process.
    compute: the thread on which the dialing member computes.
    prepare: a function that is applied to each message before it is sent.
    fallback: the dialer for members that are not in this process, or None if there are none.
    """

    sender: str
    exchange: Exchange
    compute: Executor | None = None
    prepare: Prepare | None = None
    fallback: Dialer | None = None

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> RingLink:
        """Return a new link to a member of this process, or dial with `fallback` if no such member has the
        address.

        address: the member's address, host:port or unix:path.
        epoch: number of the epoch to which the link belongs.
        kind: what the member must be; not checked within the process.

        Raises Unavailable if the address is not of this process and there is no `fallback`, and what the
        `fallback` raises.
        """
        if (inbox := self.exchange.inboxes.get(address)) is not None:
            drafter = self.exchange.drafters.get((address, self.compute))
            return LocalLink(self.sender, inbox, self.prepare, drafter)
        if self.fallback is None:
            raise Unavailable(f"no member of this process listens at {address}")
        return await self.fallback.dial(address, epoch, kind)
