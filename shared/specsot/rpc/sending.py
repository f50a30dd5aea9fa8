"""A link's sending end, whatever carries its bytes: encodes at once, writes in order, says goodbye.

Refuses to know transports: a wire takes bytes, and tells when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

from specsot.errors import Unavailable
from specsot.links import Inbox, Lost
from specsot.rpc.outbox import SendQueue
from specsot.tasks import start
from specsot.v1 import ring_pb2
from specsot.wire.carry import encode_carry

FAREWELL = 2.0  # seconds in which a closing link must deliver some of what is still in it


class Wire(Protocol):
    """One connection, from here to there."""

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more. Raises Unavailable once it has ended."""
        ...

    async def finish(self) -> None:
        """Nothing more will be written."""
        ...

    async def ended(self) -> None:
        """Returns when the peer has hung up, or the connection broke."""
        ...

    async def hang_up(self) -> None: ...


class SendingEnd:
    """`send` encodes and returns; one task writes. A link that breaks is told to the inbox as Lost."""

    def __init__(
        self, wire: Wire, peer: str, epoch: int, inbox: Inbox | None, farewell: float = FAREWELL
    ) -> None:
        self._wire, self._peer, self._epoch, self._inbox = wire, peer, epoch, inbox
        self._farewell = farewell
        self._outbox: SendQueue[bytes] = SendQueue()
        self._closing = self._told = False
        self._writing = start(self._write(), self._fail)
        self._ending = start(self._end(), self._fail)

    async def send(self, message: Any) -> None:
        self._outbox.check()
        for request in encode_carry(message):
            self._put(request)

    def _put(self, request: ring_pb2.CarryRequest) -> None:
        data = request.SerializeToString()
        self._outbox.put(data, len(data))

    async def close(self) -> None:
        """Deliver what waits, say goodbye, wait until the peer hangs up. Never waits long, never raises."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(Unavailable):
            self._put(ring_pb2.CarryRequest(goodbye=ring_pb2.Goodbye()))
            self._outbox.finish()
            await self._deliver()
        self._outbox.lose("the link is closed")
        self._writing.cancel()
        self._ending.cancel()
        await self._wire.hang_up()

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
        await self._wire.ended()
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
