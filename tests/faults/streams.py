"""A member's stream to the master over two lanes: what the product's Uplink and FleetService need of gRPC.

Beats, silence and who takes whose place are the product's own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

from specsot.errors import SpecsotError, Unavailable
from specsot.members import Registration
from specsot.transport import uplink
from specsot.transport.links import Inbox, Link
from specsot.v1 import fleet_pb2
from specsot_master.grpc_api import FleetService
from tests.faults.net import Host, Net

TURNS = 4  # of the loop, by which the end of a stream may reach its handler later than other news


class _Ended:
    """The other end has said its last word."""


class _HungUp:
    """Nobody listens any more, either."""


class Stream:
    """A call of `Fleet.Join`: grpc.aio's call for the member, its context for the master.

    name: the member's, once it has registered.
    """

    def __init__(self, net: Net, rng: random.Random, here: Host, there: Host, service: FleetService) -> None:
        """Raises Unavailable: nobody can be reached there now."""
        self._rng, self._here, self._there = rng, here, there
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._responses: asyncio.Queue[Any] = asyncio.Queue()
        self._up = net.open(here, there, self._take_request)
        self._down = net.open(there, here, self._responses.put_nowait)
        self._up.on_lost = [(there, self._cut_there), (here, self._cut_here)]
        self._down.on_lost = [(there, self._cut_there), (here, self._cut_here)]
        self._service, self._handler = service, None
        self.name = ""
        self._hung_up = False
        self._broken = False

    @property
    def alive(self) -> bool:
        """Both ends talk."""
        return self._handler is not None and not self._handler.done() and not self._up.lost

    # --- the member's end ---

    async def write(self, request: bytes) -> None:
        await _send(self._up.send, request)

    async def read(self) -> Any:
        response = await self._responses.get()
        if isinstance(response, SpecsotError):
            raise response
        return None if isinstance(response, _Ended) else response

    async def done_writing(self) -> None:
        await _send(self._up.send, _Ended())

    def cancel(self) -> None:
        """The channel is closed behind it."""

    async def close(self) -> None:
        """The member hangs up, behind what it has said."""
        if not self._hung_up:
            self._hung_up = True
            self._responses.put_nowait(_Ended())
            with suppress(Unavailable):
                await self._up.send(_HungUp())
                await self._up.close()

    # --- the master's end ---

    async def _read_requests(self) -> AsyncIterator[fleet_pb2.JoinRequest]:
        while not isinstance(request := await self._requests.get(), _Ended):
            yield fleet_pb2.JoinRequest.FromString(request)

    async def _write(self, response: Any) -> None:
        """To a peer that is gone it takes until the call is cancelled: that is on its way."""
        try:
            await self._down.send(response)
        except Unavailable:
            await asyncio.Event().wait()

    def _take_request(self, request: Any) -> None:
        if isinstance(request, _HungUp):
            self._cut_there("cancelled")
            return
        if self._handler is None:
            self._handler = asyncio.create_task(self._serve(), context=self._there.context.copy())
        self._requests.put_nowait(request)

    async def _serve(self) -> None:
        try:
            await self._service.Join(self._read_requests(), _Context(self._write))
        except SpecsotError as error:
            await self._last(error)
        except asyncio.InvalidStateError:
            pass  # nobody hears it any more
        else:
            await self._last(_Ended())

    async def _last(self, word: Any) -> None:
        if not self._down.lost:
            await self._down.send(word)

    def _cut_here(self, reason: str) -> None:
        self._down.lose(reason)
        self._up.lose(reason)
        self._responses.put_nowait(Unavailable(reason))

    def _cut_there(self, reason: str) -> None:
        """The call's handler is cancelled, and reads no more; at once, or a few turns later."""
        self._up.lose(reason)
        self._down.lose(reason)
        if self._handler and not self._broken:
            self._broken = True
            self._end_in(self._rng.randrange(TURNS))

    def _end_in(self, turns: int) -> None:
        assert self._handler
        if turns:
            asyncio.get_running_loop().call_soon(self._end_in, turns - 1)
        else:
            self._requests.put_nowait(_Ended())
            self._handler.cancel()


class _Context:
    def __init__(self, write: Callable[[Any], Any]) -> None:
        self.write = write

    def auth_context(self) -> dict[str, Any]:
        return {}


class _Channel:
    """What `specsot.transport.uplink.join` needs of a channel: one stream, and a timed answer."""

    def __init__(self, net: Net, stream: Stream) -> None:
        self._net, self._stream = net, stream

    def unary_unary(self, method: str) -> Callable[..., Any]:
        async def ask(request: bytes, timeout: float) -> bytes:
            await asyncio.sleep(self._net.delay())
            return request

        return ask

    def stream_stream(self, method: str, **more: Any) -> Callable[[], Stream]:
        return lambda: self._stream

    async def close(self) -> None:
        await self._stream.close()


async def join(net: Net, stream: Stream, registration: Registration, inbox: Inbox) -> Link:
    """The product's, over this stream. Raises Refused, Unavailable."""
    token = _CHANNEL.set(_Channel(net, stream))
    try:
        link = await uplink.join("master", registration, inbox)
    except asyncio.InvalidStateError as error:
        raise Unavailable(str(error)) from None
    finally:
        _CHANNEL.reset(token)
    stream.name = registration.name
    return link


_CHANNEL: ContextVar[_Channel | None] = ContextVar("CHANNEL", default=None)


@contextmanager
def reaching() -> Iterator[None]:
    """The product's way to a master leads over streams of this house."""
    really = uplink.reach

    async def reach(*where: Any, **how: Any) -> Any:
        return _CHANNEL.get() or await really(*where, **how)

    with patch.object(uplink, "reach", reach):
        yield


async def _send(send: Callable[[Any], Any], message: Any) -> None:
    try:
        await send(message)
    except Unavailable as error:
        raise asyncio.InvalidStateError(str(error)) from None
