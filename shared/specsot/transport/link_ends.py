"""The two ends of every link that leaves a process, whatever carries its bytes.

The sender encodes at once and writes in order from a bounded queue; the receiver checks what a peer may say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Any, Protocol

from specsot.core.frames import Frame
from specsot.errors import Refused, Unavailable, WireError
from specsot.members import MASTER, PROTOCOL
from specsot.tasks import start
from specsot.transport.grpc_channel import Role, check_role, names_of
from specsot.transport.links import Inbox, Lost, SendQueue
from specsot.transport.wire.carry import CarryReader, encode_carry
from specsot.transport.wire.schema import check_name, parse
from specsot.transport.wire.tensors import Beside
from specsot.transport.wires import Wire
from specsot.v1 import ring_pb2

# What those who are no workers may say, by the field of a message.
ALLOWED_SPEAKERS: dict[str, tuple[Role, ...]] = {
    "drafts": ("drafter", "worker"),  # a worker passes on what came from the drafter
    "tap": ("drafter", "worker"),
}


def hello_of(sender: str, epoch: int) -> ring_pb2.Hello:
    return ring_pb2.Hello(sender=sender, epoch=epoch, protocol=PROTOCOL)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who said hello. names: in its certificate, where it must show one."""

    name: str
    epoch: int
    names: frozenset[str] | None


def check_hello(hello: ring_pb2.Hello, context: Any) -> Peer:
    """context: of the call that brought it. Raises WireError, Refused."""
    check_name(hello.sender, "a sender's name")
    if hello.sender == MASTER:
        raise Refused(f"no peer is named {MASTER}")
    if hello.protocol != PROTOCOL:
        raise Refused(f"{hello.sender} speaks protocol {hello.protocol}, this member {PROTOCOL}")
    names = names_of(context)
    check_role(names, hello.sender, "worker", "drafter")
    return Peer(hello.sender, hello.epoch, names)


Take = Callable[[Peer, Any], Any]


def refuse_rows_elsewhere(peer: Peer, message: Any) -> Any:
    """Raises WireError: some are elsewhere, where nobody knows of any such place."""
    if isinstance(message, Frame) and any(
        isinstance(rows, Beside) for rows in (message.hidden, message.fused)
    ):
        raise WireError(f"frame {message.number} has its rows beside it, where no channel is")
    return message


class Receiver:
    """Puts what a peer says into the inbox, while it is entered; left without goodbye, the peer is lost."""

    def __init__(self, peer: Peer, inbox: Inbox, take: Take = refuse_rows_elsewhere) -> None:
        """take: what to make of a message whose rows are elsewhere."""
        self._peer = peer
        self._inbox = inbox
        self._reader = CarryReader()
        self._take = take
        self.over = False  # it said goodbye

    def hear(self, data: bytes) -> None:
        """See `receive`."""
        self.receive(parse(ring_pb2.CarryRequest, data))

    def receive(self, request: ring_pb2.CarryRequest) -> None:
        """Raises WireError, and Refused for what it may not say."""
        if request.HasField("goodbye"):
            self.over = True
            return
        speakers = ALLOWED_SPEAKERS.get(request.WhichOneof("message") or "", ("worker",))
        check_role(self._peer.names, self._peer.name, *speakers)
        message = self._reader.read(request)
        if message is not None:
            self._inbox.put(self._peer.name, self._take(self._peer, message), self._peer.names)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.over:
            lost = Lost(self._peer.name, _reason(error), self._peer.epoch)
            self._inbox.put(self._peer.name, lost, self._peer.names)


def _reason(error: BaseException | None) -> str:
    match error:
        case WireError():
            return f"it sent what does not decode: {error}"
        case Refused():
            return str(error)
        case _:
            return "its link broke"


# Seconds in which a closing link must get on with what is still in it: a piece of 1 MiB, or in the end what
# lies in buffers, which at 2 Mbit/s takes 18 s.
FAREWELL = 20.0


class SendingEnd:
    """`send` and `post` encode, and write what goes at once; one task writes the rest. A link that breaks is
    reported to the inbox as Lost.
    """

    def __init__(
        self, wire: Wire, peer: str, epoch: int, inbox: Inbox | None, farewell: float = FAREWELL
    ) -> None:
        self._wire = wire
        self._peer = peer
        self._epoch = epoch
        self._inbox = inbox
        self._farewell = farewell
        self._outbox: SendQueue[bytes] = SendQueue(write_now=wire.write_now)
        self._whole = Lock()  # parts of a message follow each other
        self._closing = self._told = False
        self._writing = start(self._write(), self._fail)
        self._ending = start(self._end(), self._fail)

    async def send(self, message: Any) -> None:
        self.post(message)

    def post(self, message: Any) -> None:
        self._outbox.check()
        requests = list(encode_carry(message))  # may wait for a GPU, for which nobody else is to wait
        with self._whole:
            for request in requests:
                self._put(request)

    def _put(self, request: ring_pb2.CarryRequest) -> None:
        data = self._wire.encode(request)
        self._outbox.put(data, len(data))

    async def close(self) -> bool:
        """Deliver what waits, say goodbye, wait until the peer hangs up. Never waits long, never raises.

        Returns whether the peer has it all, as far as is known here: one that breaks after the goodbye looks
        like one that hung up. Nothing is lost by that: it hears no goodbye, or is itself lost to the master.
        """
        if self._closing:
            return False
        self._closing = True
        with contextlib.suppress(Unavailable):
            with self._whole:
                self._put(ring_pb2.CarryRequest(goodbye=ring_pb2.Goodbye()))
            self._outbox.finish()
            await self._deliver()
        delivered = self._ending.done() and not self._outbox.waiting and self._outbox.lost is None
        self._outbox.lose("the link is closed")
        self._writing.cancel()
        self._ending.cancel()
        await self._wire.hang_up()
        return delivered

    async def _deliver(self) -> None:
        """Until the peer hangs up, or takes no more: what is large may take long on a narrow network."""
        before = None
        while before != self._outbox.waiting and not self._ending.done():
            before = self._outbox.waiting
            await asyncio.wait({self._ending}, timeout=self._farewell)

    async def _write(self) -> None:
        """A wire that fails here ends too, and `_end` tells why."""
        with contextlib.suppress(Unavailable):
            await self._outbox.write_all(self._wire.write)
            await (self._wire.finish() if self._outbox.lost is None else self._wire.hang_up())

    async def _end(self) -> None:
        await self._wire.wait_closed()
        self._lose(f"the link to {self._peer} broke")

    def _fail(self, error: BaseException) -> None:
        """What can be written no more is lost, whyever."""
        self._lose(f"the link to {self._peer} failed: {type(error).__name__}")

    def _lose(self, reason: str) -> None:
        if self._closing or self._told:
            return
        self._told = True
        self._outbox.lose(reason)
        if self._inbox is not None:
            self._inbox.put(self._peer, Lost(self._peer, str(self._outbox.lost), self._epoch))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port of the host that was asked, and the public key shown there; or a path of this machine."""

    port: int | None = None
    path: str | None = None
    key: bytes = b""


class LinkHost(Protocol):
    async def expect(self, peer: Peer, key: bytes) -> Endpoint:
        """A place for one link of this peer, who shows this public key. Raises WireError, Overloaded."""
        ...


class RowsHost(Protocol):
    """Receives what frames leave out, where links have channels for that."""

    def expect(self, peer: Peer) -> Endpoint:
        """A place for one channel of this peer. Raises Overloaded."""
        ...

    def take(self, peer: Peer, message: Any) -> Any:
        """A message by this peer, told where its rows are. Raises WireError: no channel is there."""
        ...

    def part(self, peer: Peer) -> None:
        """This peer's link is over."""
        ...
