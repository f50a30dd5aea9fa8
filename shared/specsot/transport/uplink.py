"""A member's stream to the master: registers, then carries messages in both directions, and heartbeats.

The master's messages are put into the member's inbox with the sender "master". If the master runs on the same
machine and offers a unix socket, the member's messages after the registration travel over that socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import grpc
from grpc.aio import AioRpcError, StreamStreamCall

from specsot.errors import SpecsotError, Unavailable, WireError
from specsot.members import MASTER, Beat, Registration
from specsot.tasks import start
from specsot.transport.grpc_channel import greeting, reach
from specsot.transport.grpc_status import error_of
from specsot.transport.heartbeat import Heartbeat, SilenceTimer
from specsot.transport.links import Inbox, Lost, SendQueue
from specsot.transport.security import PLAIN, Tls
from specsot.transport.unix_links import UnixWire, is_local_socket, reach_nearby
from specsot.transport.wire.members import Upward, decode_downward, encode_upward
from specsot.v1 import fleet_pb2

# Seconds in which a closing uplink may deliver its queue. Untuned.
FAREWELL = 2.0

_Call = StreamStreamCall[bytes, fleet_pb2.JoinResponse]


async def join(
    address: str, registration: Registration, inbox: Inbox, pulse: Heartbeat | None = None, tls: Tls = PLAIN
) -> Uplink:
    """Register at the master and return the link to it.

    pulse: intervals of heartbeats. None: the master's, as members watch it.

    Raises Refused if the master rejects the member, Unavailable if the master cannot be reached, and
    WireError if its answer is invalid.
    """
    channel = await reach(address, tls=tls, name=MASTER)
    try:
        measured = replace(registration, rtt=await _round_trip(channel))
        call, joined = await _register(channel, measured, address)
    except BaseException:
        await channel.close()
        raise
    said = Heartbeat(joined.heartbeat, joined.silence).of_master
    nearby = await reach_nearby(joined.socket) if joined.socket and is_local_socket(address) else None
    return Uplink(channel, call, inbox, pulse or said, nearby)


async def _round_trip(channel: grpc.aio.Channel) -> float | None:
    """Return the seconds of a round trip to the master, or None if the master does not answer.

    The second of two calls is measured, because the first has additional costs. Any answer counts, also an
    error.
    """
    ask = channel.unary_unary("/grpc.health.v1.Health/Check")
    taken = None
    for _ in range(2):
        begun = time.perf_counter()
        try:
            await ask(b"", timeout=1)
        except AioRpcError as failure:
            if failure.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                return None
        taken = time.perf_counter() - begun
    return taken


async def _register(
    channel: grpc.aio.Channel, registration: Registration, address: str
) -> tuple[_Call, fleet_pb2.Joined]:
    method = channel.stream_stream(
        "/specsot.v1.Fleet/Join", response_deserializer=fleet_pb2.JoinResponse.FromString
    )
    call: _Call = method()
    silent = f"the master at {address} does not answer a registration"
    async with greeting(call, encode_upward(registration).SerializeToString(), silent):
        response = await call.read()
    if not isinstance(response, fleet_pb2.JoinResponse) or not response.HasField("joined"):
        raise WireError(f"the master at {address} did not begin with joined")
    # Without intervals, the master would count as lost at once.
    if not (response.joined.heartbeat > 0 and response.joined.silence > 0):
        raise WireError(f"the master at {address} does not say how often it beats")
    return call, response.joined


class Uplink:
    """The member's end of the stream.

    `send`, and `post` from any thread, accept Ready, Broken, MemberLeaving, Beat, Progress and Result. Once
    the loss of the master is in the inbox, further messages are dropped without an error, because a result
    that is being sent while the master leaves in good order is no failure of this member.

    pulse: intervals of heartbeats.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: _Call,
        inbox: Inbox,
        pulse: Heartbeat,
        nearby: UnixWire | None = None,
    ) -> None:
        """nearby: the unix socket that carries the member's messages instead of the stream, or None."""
        self._channel = channel
        self._call = call
        self._inbox = inbox
        self.pulse = pulse
        self._nearby = nearby
        self._outbox: SendQueue[bytes] = SendQueue(write_now=self._write_now if nearby else None)
        self._closing = self._parted = False
        self._watch = SilenceTimer(pulse.silence, self._silent)
        self._tasks = [start(work(), self._fail) for work in (self._write, self._read)]

    async def send(self, message: Upward | Any) -> None:
        """Send a message to the master. See `post`."""
        self.post(message)

    def post(self, message: Upward | Any) -> None:
        """Send a message from any thread. Does nothing once the loss of the master was reported.

        Raises Unavailable after `close`, and if the master does not read and the queue exceeds its limit.
        """
        if self._parted:
            return
        data = self._encode(message)
        self._outbox.put(data, len(data))

    def _encode(self, message: Upward | Any) -> bytes:
        request = encode_upward(message)
        return self._nearby.encode(request) if self._nearby else request.SerializeToString()

    def _write_now(self, data: bytes) -> bytes:
        """Write to the unix socket if there is one. If it is broken, the stream reports the loss."""
        with contextlib.suppress(Unavailable):
            return self._nearby.write_now(data) if self._nearby else data
        return data

    async def close(self) -> None:
        """Deliver the queue and close the connection. Waits at most FAREWELL seconds and never raises.

        Written messages may still be unread at the master, and cancelling the call would drop them. The last
        message has certainly been read only once the master has ended the stream too.
        """
        if self._closing:
            return
        self._closing = True
        self._outbox.finish()
        await asyncio.wait(self._tasks, timeout=FAREWELL)
        self._outbox.lose("the link is closed")
        await self._hang_up()

    async def _write(self) -> None:
        with contextlib.suppress(AioRpcError, asyncio.InvalidStateError, Unavailable):
            write = self._nearby.write if self._nearby else self._call.write
            await self._outbox.write_all(write, self._encode(Beat()), self.pulse.every)
            if self._nearby:
                await self._nearby.finish()
            await self._call.done_writing()

    async def _read(self) -> None:
        """Put messages into the inbox until the stream ends, then report the loss of the master."""
        reason = "it ended the stream"
        try:
            while isinstance(response := await self._call.read(), fleet_pb2.JoinResponse):
                self._watch.reset()
                message = decode_downward(response)
                if not isinstance(message, Beat):
                    self._inbox.put(MASTER, message)
        except AioRpcError as failure:
            reason = str(error_of(failure))
        except SpecsotError as error:
            reason = str(error)
        except asyncio.CancelledError:
            reason = "the link was cut"
            raise
        finally:
            self._lose(reason)

    def _fail(self, error: BaseException) -> None:
        self._lose(f"{type(error).__name__} on the way")

    def _silent(self) -> None:
        self._lose(f"silent for {self.pulse.silence:g} s")

    def _lose(self, reason: str) -> None:
        if self._closing or self._outbox.lost is not None:
            return
        self._parted = True
        self._outbox.lose(f"lost the master: {reason}")
        self._inbox.put(MASTER, Lost(MASTER, reason))
        self._farewell = start(self._hang_up())

    async def _hang_up(self) -> None:
        self._watch.stop()
        for task in self._tasks:
            task.cancel()
        if self._nearby:
            await self._nearby.hang_up()
        await self._channel.close()
