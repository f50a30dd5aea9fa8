"""A link of messages over a connected unix socket: each message is its length and its bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
import structlog

log = structlog.get_logger()

# Bytes. The length that precedes each message.
LENGTH_BYTES: Final = 4

Message = TypeVar("Message")


class EngineLink(asyncio.Protocol, Generic[Message]):
    """One end of a link between the engine and an API process. The peer is a process of this program, so its
    messages are trusted; one that does not decode ends the link.

    The attribute `blocked` is True while the peer reads too slowly: what can wait should not be sent then.
    """

    def __init__(
        self,
        message_types: Any,
        on_message: Callable[[Message], object],
        on_lost: Callable[[], object],
        on_unblocked: Callable[[], object] = lambda: None,
    ) -> None:
        """Create an end that is not connected; see `open_link`.

        message_types: the union of the classes of messages that arrive here.
        on_message: called with each message that arrives.
        on_lost: called once, when the connection has ended for whatever reason.
        on_unblocked: called when `blocked` has become False again.
        """
        self._decoder = msgspec.msgpack.Decoder(message_types)
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_unblocked = on_unblocked
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.blocked = False

    def send(self, message: object) -> None:
        """Send a message; do nothing once the link has ended. The message is buffered if the peer is slow.

        message: an object of one of the classes of `messages`.
        """
        if self._transport is not None and not self._transport.is_closing():
            data = self._encoder.encode(message)
            self._transport.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)

    def close(self) -> None:
        """End the link after what is buffered has been sent. Has no effect on a link that has ended."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection.

        transport: the connection, as asyncio made it.
        """
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass on the messages that these bytes complete. A message that cannot be decoded or handled is
        logged, and ends the link.

        data: the next bytes from the peer.
        """
        self._received += data
        begin = 0
        try:
            while (message := self._message_at(begin)) is not None:
                begin += LENGTH_BYTES + len(message)
                self._on_message(self._decoder.decode(message))
        except Exception as error:
            log.error("a link between engine and API process failed", exc_info=error)
            if self._transport is not None:
                self._transport.abort()
        del self._received[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the link has ended.

        exc: the error that ended the connection, or None.
        """
        self._on_lost()

    def pause_writing(self) -> None:
        """Note that the peer is slow."""
        self.blocked = True

    def resume_writing(self) -> None:
        """Note that the peer has read most of what was sent."""
        self.blocked = False
        self._on_unblocked()

    def _message_at(self, begin: int) -> bytes | None:
        """Return the bytes of the message at a place of the received bytes, without its length; None if it is
        not complete.

        begin: the place of the message's length, in bytes.
        """
        first = begin + LENGTH_BYTES
        end = first + int.from_bytes(self._received[begin:first], "little")
        if len(self._received) < max(first, end):
            return None
        return bytes(memoryview(self._received)[first:end])


async def open_link(link: EngineLink[Message], connected: socket.socket) -> None:
    """Connect one end of a link.

    link: the end, which is not connected yet.
    connected: a connected unix socket, which the link closes.
    """
    connected.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connected)
