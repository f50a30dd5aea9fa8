"""Links over ZMQ, by TCP with CURVE and by a unix socket: order, loss at both ends, and who is not let in.

Knows nothing of members; a ring service with an inbox and a ZMQ host stands for one.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
import zmq

from specsot.core.frames import Drafts, Frame
from specsot.errors import Refused, SpecsotError, Unavailable, WireError
from specsot.members import PROTOCOL, Tap
from specsot.transport.grpc_channel import Keepalive, Terms
from specsot.transport.grpc_links import SERVICE, RingService, negotiate
from specsot.transport.grpc_server import open_server
from specsot.transport.link_ends import Peer, SendingEnd
from specsot.transport.links import Inbox, Lost
from specsot.transport.security import PLAIN, Tls
from specsot.transport.zmq_links import Keys, SocketEvents, Sockets, ZmqDialer, ZmqHost, ZmqWire, endpoint_of
from specsot.v1 import ring_pb2, ring_pb2_grpc
from tests.security.tls_files import Authority

pytestmark = pytest.mark.timeout(60)


@dataclass
class There:
    """A member's receiving side, and a dialer of another."""

    address: str
    inbox: Inbox
    host: ZmqHost
    dialer: ZmqDialer
    own: Inbox
    sockets: Sockets


@asynccontextmanager
async def meeting(
    listen: str,
    largest: int = 4 << 20,
    keepalive: Keepalive | None = None,
    mine: Tls = PLAIN,
    theirs: Tls = PLAIN,
) -> AsyncIterator[There]:
    inbox, own = Inbox(), Inbox()
    here, away = Sockets(keepalive, largest), Sockets(keepalive)
    host = ZmqHost(listen, inbox, here, timeout_seconds=5)
    async with AsyncExitStack() as stack:
        ring = RingService(inbox, "there", host)
        endpoint = await open_server(listen, {SERVICE: ring.attach}, Terms(tls=theirs))
        stack.push_async_callback(endpoint.close, 0)
        address = listen if listen.startswith("unix:") else f"127.0.0.1:{endpoint.port}"
        stack.callback(here.close)
        stack.callback(away.close)
        stack.push_async_callback(host.close)
        yield There(address, inbox, host, ZmqDialer("here", away, own, tls=mine), own, away)


@pytest.fixture(params=["tcp", "ipc"])
async def there(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[There]:
    async with meeting("127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/endpoint") as one:
        yield one


async def test_messages_arrive_whole_once_and_in_order_and_goodbye_is_no_loss(there: There) -> None:
    hidden = torch.arange(5 << 18, dtype=torch.float32).reshape(-1, 1024)
    sent = [
        Tap(3, 1, hidden),
        Frame(3, 0, hidden=hidden),
        *(Drafts(3, (), paused_trees=n) for n in range(200)),
    ]
    link = await there.dialer.dial(there.address, 3)
    for message in sent:
        await link.send(message)
    came = [await there.inbox.get() for _ in sent]
    await link.close()
    assert {arrival.sender for arrival in came} == {"here"}
    assert torch.equal(came[0].message.weight, hidden)
    assert torch.equal(came[1].message.hidden, hidden)
    assert [arrival.message for arrival in came[2:]] == sent[2:]
    assert there.inbox.pop() is None
    assert there.own.pop() is None
    with pytest.raises(Unavailable, match="the link is closed"):
        await link.send(Drafts(3))


@pytest.fixture
def only_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the folder for temporary files, and the current one; named as links are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "0").touch()
    return tmp_path / "0"


async def test_over_tcp_nothing_lies_on_the_disk(only_file: Path) -> None:
    """So a member that is killed leaves nothing; and what lies there under a link's name is not its own."""
    async with meeting("127.0.0.1:0") as there:
        link = await there.dialer.dial(there.address, 3)
        assert os.listdir(only_file.parent) == ["0"]
        await link.close()
    assert os.listdir(only_file.parent) == ["0"]


async def test_a_receiver_that_goes_is_lost_to_the_sender(there: There) -> None:
    link = await there.dialer.dial(there.address, 7)
    await there.host.close()
    assert (await there.own.get()).message == Lost("there", "the link to there broke", 7)
    with pytest.raises(Unavailable, match="the link to there broke"):
        await link.send(Drafts(7))
    await link.close()


async def test_a_lost_sender_is_reported_after_its_last_message(there: There) -> None:
    link = await there.dialer.dial(there.address, 7)
    await link.send(Drafts(7))
    assert (await there.inbox.get()).message == Drafts(7)
    await wire_of(link).hang_up()
    assert (await there.inbox.get()).message == Lost("here", "its link broke", 7)


def wire_of(link: SendingEnd):
    return link._wire


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"\xff\xff\xff", "it sent a message that cannot be decoded: not a specsot.v1.CarryRequest: 3 bytes"),
        (
            ring_pb2.CarryRequest().SerializeToString(),
            "it sent a message that cannot be decoded: CarryRequest has no known field",
        ),
        (b"x" * (5 << 20), "its link broke"),  # more than was granted: not even taken in
    ],
)
async def test_what_a_peer_may_not_send_ends_the_link_at_both_ends(
    there: There, said: bytes, reason: str
) -> None:
    link = await there.dialer.dial(there.address, 2)
    await wire_of(link).write(said)
    lost = (await there.inbox.get()).message
    assert isinstance(lost, Lost)
    assert lost.reason.startswith(reason)
    assert (await there.own.get()).message == Lost("there", "the link to there broke", 2)
    await link.close()


async def test_another_protocol_is_refused_with_both_values(there: There) -> None:
    async with grpc.aio.insecure_channel(there.address) as channel:
        hello = ring_pb2.Hello(sender="old", epoch=4, protocol=99)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ring_pb2_grpc.RingStub(channel).Meet(ring_pb2.MeetRequest(hello=hello))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == f"old speaks protocol 99, this member {PROTOCOL}"


async def test_only_the_named_key_is_accepted_and_strangers_interrupt_no_link() -> None:
    async with meeting("127.0.0.1:0") as there:
        named, stranger = Keys.generate(), Keys.generate()
        place = await negotiate(there.address, "here", 1, named.public, "worker")
        endpoint = endpoint_of(there.address, place)
        outcomes = {}
        for who, keys in (("stranger", stranger), ("named", named)):
            socket = there.sockets.sending(keys, place.key)
            monitor = socket.get_monitor_socket(
                zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH
            )
            socket.connect(endpoint)
            outcomes[who] = int.from_bytes((await monitor.recv_multipart())[0][:2], "little")
        assert outcomes == {
            "stranger": zmq.Event.HANDSHAKE_FAILED_AUTH,
            "named": zmq.Event.HANDSHAKE_SUCCEEDED,
        }
        hello = ring_pb2.Hello(sender="here", epoch=1, protocol=PROTOCOL)
        for request in (ring_pb2.CarryRequest(hello=hello), ring_pb2.CarryRequest(drafts={"epoch": 1})):
            await socket.send(request.SerializeToString())
        assert (await there.inbox.get()).message == Drafts(1)
        raw_reader, raw_writer = await asyncio.open_connection("127.0.0.1", place.port)
        raw_writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            await raw_reader.read()
        raw_writer.close()
        await socket.send(ring_pb2.CarryRequest(drafts={"epoch": 2}).SerializeToString())
        assert (await there.inbox.get()).message == Drafts(2)


async def test_links_that_are_over_leave_no_descriptor(there: There) -> None:
    """Those that a peer opened and closed, and those where nobody came: libzmq has 1,023 sockets, no more."""
    there.host._timeout_seconds = 0.1

    async def come_and_go() -> int:
        for number in range(3):
            link = await there.dialer.dial(there.address, number)
            await link.close()
            await there.host.expect(Peer("nobody", number, None), Keys.generate().public)
        await asyncio.wait_for(asyncio.gather(*there.host._links), 5)
        return len(os.listdir("/proc/self/fd"))

    first = await come_and_go()
    async with asyncio.timeout(60):  # a thread of libzmq closes them when it comes to it
        while await come_and_go() > first:
            pass


async def test_silence_ends_a_link_at_both_ends() -> None:
    """The network takes what is sent and brings nothing any more; no connection is closed."""
    async with meeting("127.0.0.1:0", keepalive=Keepalive(0.2, 0.4, 0.4)) as there:
        keys = Keys.generate()
        place = await negotiate(there.address, "here", 7, keys.public, "worker")
        async with relay(place.port) as (port, cut):
            socket = there.sockets.sending(keys, place.key)
            events = SocketEvents(socket, sending=True)
            socket.connect(f"tcp://127.0.0.1:{port}")
            link = SendingEnd(ZmqWire(socket, events), "there", 7, there.own)
            hello = ring_pb2.Hello(sender="here", epoch=7, protocol=PROTOCOL)
            await wire_of(link).write(ring_pb2.CarryRequest(hello=hello).SerializeToString())
            await link.send(Drafts(7))
            assert (await there.inbox.get()).message == Drafts(7)
            cut.set()
            assert (await there.inbox.get()).message == Lost("here", "its link broke", 7)
            assert (await there.own.get()).message == Lost("there", "the link to there broke", 7)
        await link.close()


@asynccontextmanager
async def relay(port: int | None) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A port that passes everything on to another, until the event is set."""
    cut, pumps = asyncio.Event(), []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not cut.is_set():
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond_reader, beyond_writer = await asyncio.open_connection("127.0.0.1", port)
        pumps.append(asyncio.gather(pump(reader, beyond_writer), pump(beyond_reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], cut
    for one in pumps:
        one.cancel()
    server.close()


async def test_a_named_address_without_a_peer_is_unavailable() -> None:
    async with meeting("127.0.0.1:0") as there:
        place = await there.host.expect(Peer("x", 1, None), Keys.generate().public)
        await there.host.close()
        socket = there.sockets.sending(Keys.generate(), place.key)
        with pytest.raises(Unavailable, match="no ZMQ peer answers at tcp://127"):
            await there.dialer._connect(
                socket, SocketEvents(socket, sending=True), f"tcp://127.0.0.1:{place.port}"
            )


@pytest.mark.parametrize(
    ("address", "place", "complaint"),
    [
        (
            "10.0.0.1:5",
            ring_pb2.MeetResponse(path="/tmp/x"),
            "10.0.0.1:5 named a path, which is not where it is",
        ),
        (
            "unix:/tmp/endpoint",
            ring_pb2.MeetResponse(port=5, key=b"k"),
            "unix:/tmp/endpoint named a port, which is not where it is",
        ),
    ],
)
def test_an_endpoint_that_names_another_kind_of_address_is_refused(
    address: str, place: ring_pb2.MeetResponse, complaint: str
) -> None:
    with pytest.raises(WireError, match=complaint):
        endpoint_of(address, place)


async def test_a_key_that_is_none(there: There) -> None:
    if there.address.startswith("unix:"):
        await negotiate(there.address, "here", 1, b"short", "worker")  # nobody asks for one
        return
    with pytest.raises(SpecsotError, match="a CURVE key has 40 bytes, got 5"):
        await negotiate(there.address, "here", 1, b"short", "worker")


async def test_roles_hold_over_zmq_as_over_grpc(tmp_path: Path) -> None:
    """A drafter may draft, and not pose as the stage before; who has no role does not even meet."""
    authority = Authority.at(tmp_path / "certificates")
    theirs, drafter = authority.issue("worker"), authority.issue("drafter")
    async with meeting("127.0.0.1:0", mine=drafter, theirs=theirs) as there:
        link = await there.dialer.dial(there.address, 1)
        await link.send(Drafts(1))
        await link.send(Frame(1, 0))
        assert (await there.inbox.get()).message == Drafts(1)
        lost = (await there.inbox.get()).message
        assert lost.reason == "here shows a certificate for drafter, localhost; worker is needed"
        await link.close()
        with pytest.raises(Refused, match="worker or drafter is needed"):
            await negotiate(there.address, "x", 1, b"", "worker", tls=authority.issue("client"))
