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
FAREWELL_SECONDS = 2.0

_Call = StreamStreamCall[bytes, fleet_pb2.JoinResponse]


async def join(
    address: str,
    registration: Registration,
    inbox: Inbox,
    heartbeat: Heartbeat | None = None,
    tls: Tls = PLAIN,
) -> Uplink:
    """Register at the master and return the link to it.

    address: the master's address, host:port or unix:path.
    registration: what this member is. Its `rtt` is measured here.
    inbox: where the master's messages are put.
    heartbeat: intervals of heartbeats. None: the master's, as members watch it.
    tls: the TLS files of this member.

    Raises Refused if the master rejects the member, Occupied if the member's place is taken, Unavailable if
    the master cannot be reached, and WireError if its answer is invalid.

    If the master is on this machine and offers a unix socket, messages to the master travel over that socket.
    The channel is closed before an error is raised.
    """
    channel = await reach(address, tls=tls, name=MASTER)
    try:
        measured = replace(registration, rtt=await _round_trip(channel))
        call, joined = await _register(channel, measured, address)
    except BaseException:
        await channel.close()
        raise
    intervals = Heartbeat(joined.heartbeat, joined.silence).of_master
    socket = await reach_nearby(joined.socket) if joined.socket and is_local_socket(address) else None
    return Uplink(channel, call, inbox, heartbeat or intervals, socket)


async def _round_trip(channel: grpc.aio.Channel) -> float | None:
    """Return the seconds of a round trip to the master, or None if the master does not answer.

    The second of two calls is measured, because the first has additional costs. Any answer counts, also an
    error.

    channel: a connected channel to the master.

    Returns None if either call exceeds one second or the master is unavailable.
    """
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    seconds = None
    for _ in range(2):
        started = time.perf_counter()
        try:
            await check(b"", timeout=1)
        except AioRpcError as failure:
            if failure.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                return None
        seconds = time.perf_counter() - started
    return seconds


async def _register(
    channel: grpc.aio.Channel, registration: Registration, address: str
) -> tuple[_Call, fleet_pb2.Joined]:
    """Send the registration, and return the open stream with the master's first message.

    channel: a connected channel to the master.
    registration: what this member is.
    address: the master's address, for error messages.

    Raises the error with which the master rejects the member, Unavailable if it does not answer in time, and
    WireError if its first message is invalid.

    Intervals of heartbeats that are not above 0 raise WireError too.
    """
    method = channel.stream_stream(
        "/specsot.v1.Fleet/Join", response_deserializer=fleet_pb2.JoinResponse.FromString
    )
    call: _Call = method()
    silent = f"the master at {address} does not answer a registration"
    async with greeting(call, encode_upward(registration).SerializeToString(), silent):
        response = await call.read()
    if not isinstance(response, fleet_pb2.JoinResponse) or not response.HasField("joined"):
        raise WireError(f"the first message of the master at {address} is not `joined`")
    # Without intervals, the master would count as lost at once.
    if not (response.joined.heartbeat > 0 and response.joined.silence > 0):
        raise WireError(f"the master at {address} names no heartbeat intervals")
    return call, response.joined


class Uplink:
    """A member's end of its stream to the master.

    `send`, and `post` from any thread, accept Ready, Broken, MemberLeaving, Beat, Progress and Result. Once
    the loss of the master is in the inbox, further messages are dropped without an error, because a result
    that is being sent while the master leaves in good order is no failure of this member.

    heartbeat: the intervals of heartbeats.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: _Call,
        inbox: Inbox,
        heartbeat: Heartbeat,
        socket: UnixWire | None = None,
    ) -> None:
        """Start the tasks that write and read the stream, and watch for silence, on the running event loop.

        channel: the channel to the master, which `close` closes.
        call: the open stream.
        inbox: where the master's messages, and its loss, are put.
        heartbeat: the intervals of heartbeats.
        socket: the unix socket that carries the member's messages instead of the stream, or None.
        """
        self._channel = channel
        self._call = call
        self._inbox = inbox
        self.heartbeat = heartbeat
        self._socket = socket
        self._outbox: SendQueue[bytes] = SendQueue(write_now=self._write_now if socket else None)
        self._closing = self._loss_reported = False
        self._silence_timer = SilenceTimer(heartbeat.silence, self._silent)
        self._tasks = [start(work(), self._fail) for work in (self._write, self._read)]

    async def send(self, message: Upward | Any) -> None:
        """Send a message to the master, see `post`.

        message: one of the messages that members send to the master.
        """
        self.post(message)

    def post(self, message: Upward | Any) -> None:
        """Send a message from any thread. Does nothing once the loss of the master was reported.

        message: one of the messages that members send to the master. Others raise WireError.

        Raises Unavailable after `close`, and if the master does not read and the queue exceeds its limit.
        """
        if self._loss_reported:
            return
        data = self._encode(message)
        self._outbox.put(data, len(data))

    def _encode(self, message: Upward | Any) -> bytes:
        """Return a message as bytes for the unix socket if there is one, otherwise for the stream.

        message: one of the messages that members send to the master.
        """
        request = encode_upward(message)
        return self._socket.encode(request) if self._socket else request.SerializeToString()

    def _write_now(self, data: bytes) -> bytes:
        """Write to the unix socket if there is one, and return the rest. If the socket is broken, everything
        is returned and the stream reports the loss.

        data: the encoded message.
        """
        with contextlib.suppress(Unavailable):
            return self._socket.write_now(data) if self._socket else data
        return data

    async def close(self) -> None:
        """Deliver the queue and close the connection. Takes at most FAREWELL_SECONDS and never raises.

        Written messages may still be unread at the master, and cancelling the call would drop them. The last
        message has certainly been read only once the master has ended the stream too.

        A second call returns at once. Messages that were not written in that time are dropped. The loss of
        the master is not reported afterwards.
        """
        if self._closing:
            return
        self._closing = True
        self._outbox.finish()
        await asyncio.wait(self._tasks, timeout=FAREWELL_SECONDS)
        self._outbox.lose("the link is closed")
        await self._hang_up()

    async def _write(self) -> None:
        """Write the queue and heartbeats until the queue is finished or the connection ends, then end this
        direction.

        An error of the connection only ends the writing; the reading side reports the loss.
        """
        with contextlib.suppress(AioRpcError, asyncio.InvalidStateError, Unavailable):
            write = self._socket.write if self._socket else self._call.write
            await self._outbox.write_all(write, self._encode(Beat()), self.heartbeat.every)
            if self._socket:
                await self._socket.finish()
            await self._call.done_writing()

    async def _read(self) -> None:
        """Put messages into the inbox until the stream ends, then report the loss of the master.

        The reason is the master's error, the error in decoding a message, or that the master ended the
        stream. Every message, heartbeats included, resets the silence timer; heartbeats are not put into the
        inbox. Cancellation reports the loss too.
        """
        reason = "it ended the stream"
        try:
            while isinstance(response := await self._call.read(), fleet_pb2.JoinResponse):
                self._silence_timer.reset()
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
        """Report the loss of the master because a task of this link failed.

        error: the error of the task.
        """
        self._lose(f"the link failed with {type(error).__name__}")

    def _silent(self) -> None:
        """Report the loss of the master because it was silent for too long."""
        self._lose(f"silent for {self.heartbeat.silence:g} s")

    def _lose(self, reason: str) -> None:
        """Report the loss of the master once, and close the connection. Does nothing while the link is being
        closed.

        reason: why the master counts as lost, in one line.

        `Lost` is put into the inbox, and messages that are sent later are dropped without an error.
        """
        if self._closing or self._outbox.lost is not None:
            return
        self._loss_reported = True
        self._outbox.lose(f"lost the master: {reason}")
        self._inbox.put(MASTER, Lost(MASTER, reason))
        self._farewell = start(self._hang_up())

    async def _hang_up(self) -> None:
        """Stop all tasks and close the connection at once.

        Messages that were not written are lost.
        """
        self._silence_timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._socket:
            await self._socket.hang_up()
        await self._channel.close()
