"""The sending and the receiving end of every link between processes, for any wire protocol.

The sending end encodes messages at once and writes them in order from a bounded queue. The receiving end
checks which messages a peer is allowed to send.
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
from specsot.transport.wire.tensors import SeparateTensor
from specsot.transport.wires import Wire
from specsot.v1 import ring_pb2

# The roles that may send a message, by the message's field. Only workers may send all other messages.
# A worker may send drafts and taps, because it passes on what a drafter sent.
ALLOWED_SENDERS: dict[str, tuple[Role, ...]] = {
    "drafts": ("drafter", "worker"),
    "tap": ("drafter", "worker"),
}


def hello_of(sender: str, epoch: int) -> ring_pb2.Hello:
    """Return the hello of a link, with the protocol version of this program.

    sender: name of the member that opens the link.
    epoch: epoch of the link; 0 for a link that outlives epochs.
    """
    return ring_pb2.Hello(sender=sender, epoch=epoch, protocol=PROTOCOL)


@dataclass(frozen=True, slots=True)
class Peer:
    """The sending peer of a link, which has sent its hello.

    name: the peer's name.
    epoch: epoch of the link.
    names: names in the peer's certificate. None if peers need no certificates.
    """

    name: str
    epoch: int
    names: frozenset[str] | None


def check_hello(hello: ring_pb2.Hello, context: Any) -> Peer:
    """Return the peer that a hello describes.

    hello: the first message of the peer.
    context: context of the gRPC call that carried the hello.

    Raises WireError if the peer's name is invalid. Raises Refused if the name is the master's, if the
    protocol version differs, or if the certificate is neither a worker's nor a drafter's.

    Without certificates, the role is not checked and `names` is None.
    """
    check_name(hello.sender, "a sender's name")
    if hello.sender == MASTER:
        raise Refused(f"a peer must not have the name {MASTER}")
    if hello.protocol != PROTOCOL:
        raise Refused(f"{hello.sender} speaks protocol {hello.protocol}, this member {PROTOCOL}")
    certificate_names = names_of(context)
    check_role(certificate_names, hello.sender, "worker", "drafter")
    return Peer(hello.sender, hello.epoch, certificate_names)


# Returns the message that is put into the inbox, for a peer and the message that it sent.
Take = Callable[[Peer, Any], Any]


def refuse_rows_elsewhere(peer: Peer, message: Any) -> Any:
    """Return a message unchanged.

    peer: the peer that sent the message.
    message: the decoded message.

    Raises WireError for a frame whose rows travel by a separate channel, because this link has no such
    channel.
    """
    if isinstance(message, Frame) and any(
        isinstance(rows, SeparateTensor) for rows in (message.hidden, message.fused)
    ):
        raise WireError(
            f"frame {message.number} has its rows in a separate channel, but there is no such channel"
        )
    return message


class Receiver:
    """A context manager that puts the messages of a peer into the inbox.

    If the context is left before the peer sent its goodbye, `Lost` is put into the inbox.

    over: True once the peer has sent its goodbye.
    """

    def __init__(self, peer: Peer, inbox: Inbox, convert: Take = refuse_rows_elsewhere) -> None:
        """Create the receiver of one link. Messages may be received within its context.

        peer: the sending peer.
        inbox: where messages are put.
        convert: a function of the peer and a message that returns the message to put into the inbox; it finds
            rows that travel by a separate channel. By default, a message that announces such rows raises
            WireError.
        """
        self._peer = peer
        self._inbox = inbox
        self._reader = CarryReader()
        self._convert = convert
        self.over = False

    def receive_bytes(self, data: bytes) -> None:
        """Decode one message and pass it to `receive`. Raises WireError if it cannot be decoded, Refused if
        it is not allowed.

        data: the bytes of one CarryRequest.
        """
        self.receive(parse(ring_pb2.CarryRequest, data))

    def receive(self, request: ring_pb2.CarryRequest) -> None:
        """Put one message into the inbox, once all its parts have arrived.

        request: the decoded protobuf message, or one part of a message.

        Raises WireError if the message cannot be decoded, and Refused if the peer may not send it.

        Goodbye sets `over` and puts nothing into the inbox. Drafts and taps may be sent by a drafter or a
        worker, all other messages by a worker only; without certificates, by every peer.
        """
        if request.HasField("goodbye"):
            self.over = True
            return
        senders = ALLOWED_SENDERS.get(request.WhichOneof("message") or "", ("worker",))
        check_role(self._peer.names, self._peer.name, *senders)
        message = self._reader.read(request)
        if message is not None:
            self._inbox.put(self._peer.name, self._convert(self._peer, message), self._peer.names)

    def __enter__(self) -> Receiver:
        """Enter the context, in which messages are received."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put `Lost` into the inbox unless the peer has sent its goodbye.

        kind, error, trace: the error that ended the context, or None.

        An error that ended the context is not suppressed.
        """
        if not self.over:
            lost = Lost(self._peer.name, _reason(error), self._peer.epoch)
            self._inbox.put(self._peer.name, lost, self._peer.names)


def _reason(error: BaseException | None) -> str:
    """Return why a link is lost, in one line.

    error: the error that ended the link, or None if the connection just ended.

    WireError gives its text after "it sent a message that cannot be decoded", Refused its text, and any other
    error or None "its link broke".
    """
    match error:
        case WireError():
            return f"it sent a message that cannot be decoded: {error}"
        case Refused():
            return str(error)
        case _:
            return "its link broke"


# Seconds. While a link closes, its queue must get shorter within this time: by a piece of 1 MiB, or at the
# end by what lies in buffers, which takes 18 s at 2 Mbit/s.
FAREWELL_SECONDS = 20.0


class SendingEnd:
    """The sending end of a link between processes.

    `send` and `post` encode a message and write what can be written without waiting; a task writes the rest.
    If the link breaks, `Lost` is put into the inbox.
    """

    def __init__(
        self,
        wire: Wire,
        peer: str,
        epoch: int,
        inbox: Inbox | None,
        farewell_seconds: float = FAREWELL_SECONDS,
    ) -> None:
        """Start the tasks that write the queue and wait for the end of the connection, on the running event
        loop.

        wire: the open connection.
        peer: name of the receiving member.
        epoch: epoch of the link.
        inbox: where `Lost` is put if the link breaks. None: the loss is not reported.
        farewell_seconds: seconds without progress after which `close` gives up.
        """
        self._wire = wire
        self._peer = peer
        self._epoch = epoch
        self._inbox = inbox
        self._farewell_seconds = farewell_seconds
        self._outbox: SendQueue[bytes] = SendQueue(write_now=wire.write_now)
        # Held while the parts of one message are queued, so that they are not mixed with another message's.
        self._message_lock = Lock()
        self._closing = self._loss_reported = False
        self._writing = start(self._write(), self._fail)
        self._ending = start(self._end(), self._fail)

    async def send(self, message: Any) -> None:
        """Send one message, see `post`.

        message: a value that the ring carries.

        Raises Unavailable if the link is lost, and WireError for a message that the ring does not carry.
        """
        self.post(message)

    def post(self, message: Any) -> None:
        """Encode a message and queue its parts, from any thread.

        message: a value that the ring carries, such as a Frame.

        Raises Unavailable if the link is lost, and WireError for a message that the ring does not carry.

        Raises Unavailable also if the peer does not read and the queue exceeds its limit, which loses the
        link. The parts of one message are never mixed with those of another.
        """
        self._outbox.check()
        # Encoding may wait for a GPU, so it happens before the lock is taken.
        requests = list(encode_carry(message))
        with self._message_lock:
            for request in requests:
                self._put(request)

    def _put(self, request: ring_pb2.CarryRequest) -> None:
        """Queue one part of a message. Raises Unavailable if the link is lost or its queue is full.

        request: the protobuf message of the part.
        """
        data = self._wire.encode(request)
        self._outbox.put(data, len(data))

    async def close(self) -> bool:
        """Write the queue and a goodbye, wait until the peer closes the connection, and return whether the
        peer has received everything. Never raises.

        Gives up if the queue does not get shorter within `farewell_seconds`.

        Returns whether the peer has received everything, as far as this end knows; False if the link was
        closed before. A connection that breaks after the goodbye looks like one that the peer closed. That
        does no harm, because the peer then either reports this link as lost or is itself lost to the master.

        The connection is closed in any case. A link that is lost already gives False.
        """
        if self._closing:
            return False
        self._closing = True
        with contextlib.suppress(Unavailable):
            with self._message_lock:
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
        """Wait until the peer closes the connection, or for `farewell_seconds` without progress.

        Large messages may take long on a slow network.

        Progress means that the number of bytes in the queue has changed. Raises nothing.
        """
        previous_bytes = None
        while previous_bytes != self._outbox.waiting and not self._ending.done():
            previous_bytes = self._outbox.waiting
            await asyncio.wait({self._ending}, timeout=self._farewell_seconds)

    async def _write(self) -> None:
        """Write the queue. If writing fails, the wire ends too, and `_end` reports the loss."""
        with contextlib.suppress(Unavailable):
            await self._outbox.write_all(self._wire.write)
            await (self._wire.finish() if self._outbox.lost is None else self._wire.hang_up())

    async def _end(self) -> None:
        """Wait until the connection has ended, then report the loss of the link unless it is being closed."""
        await self._wire.wait_closed()
        self._lose(f"the link to {self._peer} broke")

    def _fail(self, error: BaseException) -> None:
        """Mark the link as lost because a task of it failed.

        error: the error of the task.
        """
        self._lose(f"the link to {self._peer} failed: {type(error).__name__}")

    def _lose(self, reason: str) -> None:
        """Report the loss of the link once, unless it is being closed.

        reason: why the link is lost; an earlier reason of the queue has precedence.

        `Lost` is put into the inbox, if there is one, and later messages raise Unavailable.
        """
        if self._closing or self._loss_reported:
            return
        self._loss_reported = True
        self._outbox.lose(reason)
        if self._inbox is not None:
            self._inbox.put(self._peer, Lost(self._peer, str(self._outbox.lost), self._epoch))


class LinkHost(Protocol):
    """Receives links that gRPC negotiated but that other sockets carry."""

    async def expect(self, peer: Peer, key: bytes) -> ring_pb2.MeetResponse:
        """Open an endpoint for one link from a peer, and return it, without this member's name.

        peer: the peer that will connect.
        key: the peer's public key. Empty if the endpoint needs none.

        Raises WireError if the key is invalid, Overloaded if there are too many links.
        """
        ...


class RowsHost(Protocol):
    """Receives the rows of frames by separate channels, if links have such channels."""

    def expect(self, peer: Peer) -> ring_pb2.MeetResponse:
        """Open an endpoint for one channel from a peer, in the place of an earlier one of the same epoch, and
        return it, without this member's name.

        peer: the peer that will send rows.

        Raises Overloaded if there are too many channels.
        """
        ...

    def attach_rows(self, peer: Peer, message: Any) -> Any:
        """Return a message with handles for the rows that the peer's channel carries.

        A message whose rows travel within it, or that has none, is returned unchanged. Raises WireError if
        the peer has no channel.

        peer: the peer that sent the message.
        message: the decoded message.
        """
        ...

    def close_channel(self, peer: Peer) -> None:
        """Close the channel of a peer whose link has ended. Does nothing if it has none.

        peer: the peer of the ended link.
        """
        ...
