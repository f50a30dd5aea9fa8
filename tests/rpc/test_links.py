"""Links over real streams on this machine: order, loss at both ends, refusals.

Knows nothing of members; a ring service with an inbox stands for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import torch

from specsot.core.frames import Drafts, Frame, PromptChunk, Result
from specsot.errors import Refused, Unavailable, WireError
from specsot.members import Tap
from specsot.transport.grpc_channel import Terms
from specsot.transport.grpc_links import SERVICE, GrpcDialer, RingService
from specsot.transport.grpc_server import GrpcServer, open_server
from specsot.transport.links import Inbox, Lost, close_in_background
from specsot.v1 import ring_pb2, ring_pb2_grpc

pytestmark = pytest.mark.timeout(30)


@asynccontextmanager
async def listening(
    inbox: Inbox, name: str = "there", largest: int = 64 << 20
) -> AsyncIterator[tuple[GrpcServer, str]]:
    endpoint = await open_server("127.0.0.1:0", {SERVICE: RingService(inbox, name).attach}, Terms(largest))
    try:
        yield endpoint, f"127.0.0.1:{endpoint.port}"
    finally:
        await endpoint.close(0)


async def test_messages_arrive_whole_once_and_in_order() -> None:
    inbox = Inbox()
    hidden = torch.arange(300_000.0).reshape(300, 1000)
    sent = [
        Tap(3, 1, hidden),
        Frame(3, 0, segments=(PromptChunk(1, 0, (5, 6), True),), hidden=hidden),
        *(Drafts(3, (), paused_trees=n) for n in range(200)),
    ]
    async with listening(inbox) as (_, address):
        link = await GrpcDialer("here").dial(address, 3)
        for message in sent:
            await link.send(message)
        await link.close()
        came = [await inbox.get() for _ in sent]
    assert {arrival.sender for arrival in came} == {"here"}
    assert torch.equal(came[0].message.weight, hidden)
    assert torch.equal(came[1].message.hidden, hidden)
    assert [arrival.message for arrival in came[2:]] == sent[2:]
    assert inbox.pop() is None, "a link that was closed in good order is not lost"


async def test_what_was_sent_before_close_arrives() -> None:
    inbox = Inbox()
    async with listening(inbox) as (_, address):
        link = await GrpcDialer("here").dial(address, 1)
        await link.send(Drafts(1))
        await link.close()
        await link.close()
        with pytest.raises(Unavailable):
            await link.send(Drafts(1))
        assert (await inbox.get()).message == Drafts(1)


async def test_a_receiver_that_goes_is_lost_to_the_sender() -> None:
    own = Inbox()
    async with listening(Inbox(), "there") as (endpoint, address):
        link = await GrpcDialer("here", own).dial(address, 7)
        await endpoint.close(0)
        assert (await own.get()).message == Lost("there", "the link to there broke", 7)
        with pytest.raises(Unavailable, match="the link to there broke"):
            await link.send(Drafts(7))
        await link.close()


async def test_a_sender_that_goes_is_lost_to_the_receiver() -> None:
    inbox = Inbox()
    async with listening(inbox) as (_, address):
        link = await GrpcDialer("here").dial(address, 7)
        await link.send(Drafts(7))
        assert (await inbox.get()).message == Drafts(7)
        await link._wire.hang_up()
        assert (await inbox.get()).message == Lost("here", "its link broke", 7)


async def test_a_stream_without_goodbye_is_lost() -> None:
    inbox = Inbox()
    async with listening(inbox) as (_, address), grpc.aio.insecure_channel(address) as channel:
        hello = ring_pb2.CarryRequest(hello=ring_pb2.Hello(sender="here", epoch=4, protocol=1))
        await ring_pb2_grpc.RingStub(channel).Carry(iter([hello]))
        assert (await inbox.get()).message == Lost("here", "its link broke", 4)


async def test_an_address_without_a_process_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unavailable, match=f"no process answers at {address}"):
        await GrpcDialer("here").dial(address, 1)


async def test_a_peer_that_is_busy_when_it_is_dialed_first() -> None:
    """It takes connections, and shakes no hands before the second one."""
    inbox, came = Inbox(), list[asyncio.StreamWriter]()
    async with listening(inbox) as (_, address):
        host, _, port = address.rpartition(":")

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(writer)
            if len(came) > 1:
                there, back = await asyncio.open_connection(host, int(port))
                await asyncio.gather(pass_bytes(reader, back), pass_bytes(there, writer))

        async with await asyncio.start_server(take, "127.0.0.1", 0) as busy:
            endpoint = f"127.0.0.1:{busy.sockets[0].getsockname()[1]}"
            link = await GrpcDialer("here", timeout_seconds=60).dial(endpoint, 7)
            await link.close()
            for writer in came:
                writer.close()
    assert len(came) == 2


async def pass_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while some := await reader.read(1 << 16):
            writer.write(some)
    writer.close()


async def test_a_silent_socket_is_unavailable() -> None:
    """A socket that accepts and never speaks."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(Unavailable, match=rf"no process answered at {address} within 0\.3 s"):
            await GrpcDialer("here", timeout_seconds=0.3).dial(address, 1)


async def test_another_protocol_is_refused_with_both_values() -> None:
    async with listening(Inbox()) as (_, address), grpc.aio.insecure_channel(address) as channel:
        hello = ring_pb2.CarryRequest(hello=ring_pb2.Hello(sender="old", epoch=4, protocol=99))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ring_pb2_grpc.RingStub(channel).Carry(iter([hello]))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == "old speaks protocol 99, this member 1"


async def test_bytes_that_do_not_decode_end_the_link() -> None:
    inbox = Inbox()
    async with listening(inbox) as (_, address), grpc.aio.insecure_channel(address) as channel:
        hello = ring_pb2.CarryRequest(hello=ring_pb2.Hello(sender="here", epoch=4, protocol=1))
        raw = channel.stream_unary(f"/{SERVICE}/Carry")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(iter([hello.SerializeToString(), b"\xff\xff\xff"]))
        lost = (await inbox.get()).message
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the message does not parse"
    assert lost == Lost("here", "it sent a message that cannot be decoded: the message does not parse", 4)


async def test_a_message_larger_than_allowed_ends_the_link() -> None:
    inbox, own = Inbox(), Inbox()
    async with listening(inbox, largest=1 << 20) as (_, address):
        link = await GrpcDialer("here", own).dial(address, 2)
        await link.send(Frame(2, 0, hidden=torch.zeros(1024, 512)))
        assert (await own.get()).message.peer == "there"
        assert (await inbox.get()).message == Lost("here", "its link broke", 2)
        await link.close()


async def test_what_the_ring_does_not_carry() -> None:
    async with listening(Inbox()) as (_, address):
        link = await GrpcDialer("here").dial(address, 2)
        with pytest.raises(WireError, match="does not carry str"):
            await link.send("words")
        await link.close()


async def test_a_loss_is_reported_while_messages_flow_both_ways() -> None:
    """Two members, two links; one dies."""
    one, two = Inbox(), Inbox()
    async with listening(one, "one") as (_, first), listening(two, "two") as (endpoint, second):
        there = await GrpcDialer("one", one).dial(second, 1)
        back = await GrpcDialer("two", two).dial(first, 1)
        await there.send(Drafts(1))
        await back.send(Result(1, 0))
        assert (await one.get()).message == Result(1, 0)
        await endpoint.close(0)
        assert (await one.get()).message == Lost("two", "the link to two broke", 1)
        await asyncio.gather(there.close(), back.close())


async def test_refused_by_a_peer() -> None:
    """The dialer learns it while dialing, not with its first frame."""

    class Unwilling(ring_pb2_grpc.RingServicer):
        async def Carry(
            self, request_iterator: AsyncIterator[ring_pb2.CarryRequest], context: object
        ) -> ring_pb2.CarryResponse:
            await anext(request_iterator)
            raise Refused("not you")

    attach = {SERVICE: lambda server: ring_pb2_grpc.add_RingServicer_to_server(Unwilling(), server)}
    endpoint = await open_server("127.0.0.1:0", attach)
    try:
        with pytest.raises(Refused, match="not you"):
            await GrpcDialer("here").dial(f"127.0.0.1:{endpoint.port}", 1)
    finally:
        await endpoint.close(0)


async def test_who_is_dead_is_not_waited_for_when_links_are_closed() -> None:
    """What is left to say to it is said beside, while the next epoch begins."""
    silent, ended = asyncio.Event(), asyncio.Event()

    async def closing() -> None:
        await silent.wait()
        ended.set()

    await close_in_background(closing())
    assert not ended.is_set()
    silent.set()
    await ended.wait()
