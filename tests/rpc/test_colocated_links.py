"""Links over unix sockets, within one machine and user: order from any thread, loss at both ends, and gRPC
where the socket cannot be reached.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.core.frames import Drafts, Frame
from specsot.errors import Unavailable
from specsot.members import Tap
from specsot.transport import unix_links
from specsot.transport.grpc_links import SERVICE, GrpcDialer, GrpcWire, RingService
from specsot.transport.grpc_server import open_server
from specsot.transport.link_ends import SendingEnd
from specsot.transport.links import Inbox, Lost
from specsot.transport.unix_links import UnixWire, connect, is_local_socket
from specsot.transport.wire.carry import encode_carry
from specsot.transport.wires import is_private
from specsot.v1 import ring_pb2, ring_pb2_grpc

pytestmark = pytest.mark.timeout(30)

ROWS = torch.arange(300_000.0).reshape(300, 1000)  # larger than a socket takes at once


@dataclass
class There:
    inbox: Inbox
    ring: RingService
    address: str

    async def come(self, count: int) -> list[Any]:
        return [(await self.inbox.get()).message for _ in range(count)]


@asynccontextmanager
async def listening() -> AsyncGenerator[There]:
    inbox = Inbox()
    ring = RingService(inbox, "there", nearby=True)
    endpoint = await open_server("127.0.0.1:0", {SERVICE: ring.attach})
    try:
        yield There(inbox, ring, f"127.0.0.1:{endpoint.port}")
    finally:
        await ring.close()
        await endpoint.close(0)


def wire(link: SendingEnd) -> Any:
    return link._wire


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("specsot-*"))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def test_messages_arrive_whole_once_and_in_order(temporary: Path) -> None:
    async with listening() as there:
        link = await GrpcDialer("here").dial(there.address, 3)
        assert isinstance(wire(link), UnixWire)
        await link.send(Tap(3, 1, ROWS))
        for number in range(200):
            await link.send(Drafts(3, (), paused_trees=number))
        await link.close()
        tap, *drafts = await there.come(201)
        assert torch.equal(tap.weight, ROWS)
        assert drafts == [Drafts(3, (), paused_trees=number) for number in range(200)]
        assert there.inbox.pop() is None, "a link that was closed in good order is not lost"
        with pytest.raises(Unavailable):
            await link.send(Drafts(3))
    assert not folders(), "sockets and their folder are gone"


async def test_a_member_that_is_killed_leaves_no_folder_once_its_peers_have_come(temporary: Path) -> None:
    """Two are expected at once; the folder goes with the last, and comes again for the next."""
    async with listening() as there:
        for _ in range(2):
            places = [await meet(there), await meet(there)]
            lines = []
            for place in places:
                assert folders() == {place.parent}
                lines.append(await connect(place))
                await lines[-1].write(b"\0\0\0\0")
                await there.come(1)
            assert not folders()
            for line in lines:
                await line.hang_up()


async def test_threads_and_the_loop_post_at_once_and_each_ones_messages_stay_whole_and_in_order() -> None:
    count = 60

    def post(link: SendingEnd, epoch: int) -> None:
        for number in range(count):
            link.post(Frame(epoch, number, hidden=ROWS if number % 20 == 0 else ROWS[:2]))

    async with listening() as there:
        link = await GrpcDialer("here").dial(there.address, 1)
        threads = [asyncio.to_thread(post, link, epoch) for epoch in (1, 2)]
        posting = asyncio.gather(*threads)
        for number in range(count):
            await link.send(Drafts(1, (), paused_trees=number))
            await asyncio.sleep(0)
        await posting
        came = await there.come(3 * count)
        await link.close()
    frames = [message for message in came if isinstance(message, Frame)]
    for epoch in (1, 2):
        assert [frame.number for frame in frames if frame.epoch == epoch] == list(range(count))
    for frame in frames:
        assert frame.hidden is not None
        assert torch.equal(frame.hidden, ROWS[: len(frame.hidden)])
    assert [message.paused_trees for message in came if isinstance(message, Drafts)] == list(range(count))


async def test_a_thread_that_posts_while_the_link_is_closed_gets_an_error_and_harms_no_other() -> None:
    """What came before arrives, in order; no file descriptor of another connection is written to."""
    started = threading.Event()
    sent = 0

    def post(link: SendingEnd) -> None:
        nonlocal sent
        while True:
            link.post(Drafts(1, (), paused_trees=sent))
            sent += 1
            started.set()

    async with listening() as there:
        for _ in range(5):
            sent = 0
            started.clear()
            link = await GrpcDialer("here").dial(there.address, 1)
            posting = asyncio.create_task(asyncio.to_thread(post, link))
            await asyncio.to_thread(started.wait)
            await link.close()
            with pytest.raises(Unavailable):
                await posting
            numbers: list[int] = []
            while (arrival := there.inbox.pop()) is not None:
                assert isinstance(arrival.message, Drafts)
                numbers.append(arrival.message.paused_trees)
            assert numbers == list(range(len(numbers)))
            assert 0 < len(numbers) <= sent


async def test_a_receiver_that_goes_is_lost_to_the_sender_and_to_its_threads() -> None:
    own = Inbox()
    async with listening() as there:
        link = await GrpcDialer("here", own).dial(there.address, 7)
        await there.ring.close()
        assert (await own.get()).message == Lost("there", "the link to there broke", 7)
        with pytest.raises(Unavailable, match="the link to there broke"):
            await asyncio.to_thread(link.post, Drafts(7))
        await link.close()


async def test_a_sender_that_goes_is_lost_to_the_receiver() -> None:
    async with listening() as there:
        link = await GrpcDialer("here").dial(there.address, 7)
        await link.send(Drafts(7))
        assert await there.come(1) == [Drafts(7)]
        await wire(link).hang_up()
        assert await there.come(1) == [Lost("here", "its link broke", 7)]


async def meet(there: There) -> Path:
    """The socket for one link."""
    async with ring_pb2_grpc.grpc.aio.insecure_channel(there.address) as channel:
        hello = ring_pb2.Hello(sender="here", epoch=4, protocol=1)
        request = ring_pb2.MeetRequest(hello=hello, nearby=True)
        return Path((await ring_pb2_grpc.RingStub(channel).Meet(request)).socket)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (
            b"\x03\0\0\0\xff\xff\xff",
            "it sent a message that cannot be decoded: not a specsot.v1.CarryRequest",
        ),
        (b"\xff\xff\xff\xff", "it sent a message that cannot be decoded: a message of 4294967295 bytes"),
        (b"\x03\0\0\0\xff", "its link broke"),
    ],
)
async def test_bytes_that_do_not_decode_end_the_link(data: bytes, why: str) -> None:
    async with listening() as there:
        line = await connect(await meet(there))
        await line.write(data)
        await line.finish()
        (lost,) = await there.come(1)
        assert isinstance(lost, Lost)
        assert (lost.peer, lost.epoch) == ("here", 4)
        assert lost.reason.startswith(why)
        await line.wait_closed()
        await line.hang_up()


async def test_messages_that_arrive_byte_by_byte_or_at_once_are_received_one_by_one() -> None:
    async with listening() as there:
        line = await connect(await meet(there))
        said = [Drafts(4, (), paused_trees=number) for number in range(3)]
        data = b"".join(line.encode(request) for one in said for request in encode_carry(one))
        for at in range(len(data)):
            await line.write(data[at : at + 1])
            await asyncio.sleep(0)
        await line.write(data)
        assert await there.come(6) == said * 2
        await line.hang_up()


async def test_a_socket_takes_one_peer_and_only_its_user_can_come_to_it() -> None:
    async with listening() as there:
        place = await meet(there)
        assert is_private(place)
        assert place.parent.stat().st_mode & 0o777 == 0o700
        line = await connect(place)
        await line.write(b"\0\0\0\0")  # a message without anything: who answers has accepted
        await there.come(1)
        with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
            await connect(place)
        await line.hang_up()


async def test_without_a_way_to_the_socket_the_link_is_grpcs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another container: the address may be this machine's, the path is not there."""
    elsewhere = iter([tmp_path / "specsot-gone" / "0", tmp_path / "0"])  # not there, and open to others

    async def named(self: object, peer: object) -> str:
        return str(next(elsewhere))

    monkeypatch.setattr(unix_links.UnixHost, "expect", named)
    async with listening() as there:
        for epoch in (1, 2):
            link = await GrpcDialer("here").dial(there.address, epoch)
            assert isinstance(wire(link), GrpcWire)
            await link.send(Drafts(epoch))
            assert await there.come(1) == [Drafts(epoch)]
            await link.close()


async def test_a_member_without_a_place_for_sockets_takes_links_over_grpc(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = temporary / ("long" * 30)
    too_long.mkdir()
    for folder in (too_long, temporary / "gone"):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        async with listening() as there:
            link = await GrpcDialer("here").dial(there.address, 1)
            assert isinstance(wire(link), GrpcWire)
            await link.close()


def test_only_what_is_surely_of_this_machine_is_asked_for_a_socket() -> None:
    assert all(map(is_local_socket, ("127.0.0.1:5", "[::1]:5", "unix:/tmp/x")))
    assert not any(map(is_local_socket, ("192.0.2.1:5", "worker-1:5", "[2001:db8::1]:5")))


class SlowReceiver:
    """Notes each message, and computes for two milliseconds."""

    over = False

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def receive_bytes(self, data: bytes) -> None:
        self.messages.append(data)
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass


async def test_a_backlog_of_messages_lets_other_work_have_its_turns() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    messages = [bytes([number]) for number in range(40)]
    theirs.sendall(b"".join(len(one).to_bytes(unix_links.LENGTH, "little") + one for one in messages))
    theirs.close()
    receiver = SlowReceiver()
    seen = set[int]()

    def look() -> None:
        seen.add(len(receiver.messages))
        if len(receiver.messages) < len(messages):
            loop.call_soon(look)

    _, incoming = await loop.connect_accepted_socket(lambda: unix_links._Incoming(loop.create_future()), ours)
    loop.call_soon(look)
    await incoming.attend(receiver)
    assert receiver.messages == messages
    assert len(seen) > 5
