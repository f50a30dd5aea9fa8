"""A member's stream to the master, with a real server in between and a fake fleet behind it.

Knows nothing of how rings are formed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from threading import Event, Thread

import grpc
import pytest
import uvloop

from specsot.core.frames import Close, Lease, Open, Opening, Outcome, Result
from specsot.errors import Refused, Unavailable, WireError
from specsot.members import (
    Beat,
    Broken,
    Configuration,
    Disband,
    MemberLeaving,
    Range,
    Ready,
    Registration,
    Stage,
)
from specsot.transport.grpc_server import GrpcServer, open_server
from specsot.transport.heartbeat import BUSY_FACTOR, Heartbeat, SilenceTimer
from specsot.transport.links import Inbox, Link, Lost, SendQueue
from specsot.transport.uplink import join
from specsot.transport.wire.members import encode_upward
from specsot.v1 import fleet_pb2, fleet_pb2_grpc
from specsot_master.grpc_api import Downlink, FleetService
from tests.conftest import some

pytestmark = pytest.mark.timeout(30)

WORKER = Registration("worker", "w0", "127.0.0.1:1", "abc", 8, 2048, 1 << 20, 512, Range(0, 4))
EPOCH = Configuration(1, "w0", (Stage("w0", "127.0.0.1:1", Range(0, 8)),), 16, 256, 25)


class FakeFleet:
    """Takes whoever has the right fingerprint; remembers everything."""

    def __init__(self) -> None:
        self.downlinks: dict[str, Link] = {}
        self.said: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self.gone: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def join(self, registration: Registration, downlink: Link) -> None:
        if registration.fingerprint != WORKER.fingerprint:
            raise Refused(f"fingerprint {registration.fingerprint}, here {WORKER.fingerprint}")
        self.downlinks[registration.name] = downlink
        await downlink.send(replace(EPOCH, you=registration.name))

    def on_message(self, name: str, message: object, by: Link | None = None) -> None:
        self.said.put_nowait((name, message))

    def on_disconnect(self, name: str, reason: str, by: Link | None = None) -> None:
        self.gone.put_nowait((name, reason))


class Master:
    """An endpoint with a fleet service behind it."""

    def __init__(self, fleet: FakeFleet, service: FleetService, endpoint: GrpcServer, nearby: bool) -> None:
        self.fleet, self.service, self.endpoint, self.nearby = fleet, service, endpoint, nearby
        self.address = f"127.0.0.1:{endpoint.port}"

    async def close(self) -> None:
        await self.service.close()
        await self.endpoint.close(0)


async def opened(nearby: bool, pulse: Heartbeat | None = None) -> Master:
    fleet = FakeFleet()
    service = FleetService(fleet, pulse, with_unix_socket=nearby)
    attach = {"specsot.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(service, s)}
    return Master(fleet, service, await open_server("127.0.0.1:0", attach), nearby)


NEARBY = pytest.mark.parametrize("nearby", [False, True], ids=["stream", "socket"])


@pytest.fixture(params=[False, True], ids=["stream", "socket"])
async def master(request: pytest.FixtureRequest) -> AsyncIterator[Master]:
    """It hears by the stream alone, or offers a unix socket."""
    made = await opened(request.param)
    yield made
    await made.close()


async def test_both_directions_in_order(master: Master) -> None:
    inbox = Inbox()
    uplink = await join(master.address, WORKER, inbox)
    result = Result(1, 3, (Outcome(7, 1, (0, 2), (5, 6)),), (0.25,), 4)
    for message in (Ready(1), result, Broken(1, "out of memory")):
        await uplink.send(message)
    assert [await master.fleet.said.get() for _ in range(3)] == [
        ("w0", Ready(1)),
        ("w0", result),
        ("w0", Broken(1, "out of memory")),
    ]
    orders = [Open(Opening(7, 2), (1, 2), 256), Lease(7, 512), Close(7), Disband(1, "enough")]
    for order in orders:
        await master.fleet.downlinks["w0"].send(order)
    assert [(await inbox.get()).message for _ in range(5)] == [EPOCH, *orders]
    await uplink.close()


async def test_the_inbox_names_the_master_as_master(master: Master) -> None:
    inbox = Inbox()
    uplink = await join(master.address, WORKER, inbox)
    assert (await inbox.get()).sender == "master"
    await uplink.close()
    assert inbox.pop() is None, "who closes is not told that the link is lost"


async def test_a_member_that_does_not_belong_here(master: Master) -> None:
    with pytest.raises(Refused, match="fingerprint xyz, here abc"):
        await join(master.address, replace(WORKER, fingerprint="xyz"), Inbox())
    assert master.fleet.gone.empty(), "who was never taken is never lost"


async def test_a_master_that_does_not_say_how_often_it_beats_is_not_watched_with_no_patience() -> None:
    class Mute(fleet_pb2_grpc.FleetServicer):
        async def Join(self, requests, context):
            await anext(requests)
            await context.write(fleet_pb2.JoinResponse(joined=fleet_pb2.Joined(heartbeat=1)))

    endpoint = await open_server(
        "127.0.0.1:0", {"specsot.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(Mute(), s)}
    )
    try:
        with pytest.raises(WireError, match="no heartbeat intervals"):
            await join(f"127.0.0.1:{endpoint.port}", WORKER, Inbox())
    finally:
        await endpoint.close(0)


async def test_the_last_message_is_received_by_a_master_that_reads_late() -> None:
    """A member that hung up before it was heard would be lost to a broken link, not by its own will."""
    reads, heard = asyncio.Event(), list[str | None]()

    class Late(fleet_pb2_grpc.FleetServicer):
        async def Join(self, requests, context):
            await anext(requests)
            await context.write(fleet_pb2.JoinResponse(joined=fleet_pb2.Joined(heartbeat=1, silence=10)))
            await reads.wait()
            heard.extend([request.WhichOneof("message") async for request in requests])

    endpoint = await open_server(
        "127.0.0.1:0", {"specsot.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(Late(), s)}
    )
    try:
        uplink = await join(f"127.0.0.1:{endpoint.port}", WORKER, Inbox())
        await uplink.send(MemberLeaving())
        closing = asyncio.create_task(uplink.close())
        await asyncio.wait({closing}, timeout=0.2)
        reads.set()
        await closing
    finally:
        await endpoint.close(0)
    assert heard == ["leaving"]


async def test_leaving(master: Master) -> None:
    uplink = await join(master.address, WORKER, Inbox())
    await uplink.send(MemberLeaving())
    await uplink.close()
    assert await master.fleet.said.get() == ("w0", MemberLeaving())
    assert await master.fleet.gone.get() == ("w0", "its link broke")
    with pytest.raises(Unavailable, match="the link is closed"):
        await uplink.send(Ready(1))


async def test_a_master_says_how_often_it_beats_and_members_wait_longer_for_it(master: Master) -> None:
    uplink, pulse = await join(master.address, WORKER, Inbox()), Heartbeat()
    assert uplink.heartbeat == Heartbeat(pulse.every, 4 * pulse.silence)
    await uplink.close()


async def test_a_member_that_gets_ready_may_be_silent_longer() -> None:
    """Longer than the limit; one that is ready may not, however long it took before."""
    loop, calls = asyncio.get_running_loop(), list[tuple[bool, float]]()
    for busy in (False, True):
        begun, over = loop.time(), asyncio.Event()
        SilenceTimer(0.05, over.set, lambda busy=busy: busy)
        await over.wait()
        calls.append((busy, loop.time() - begun))
    assert [round(seconds / 0.05) >= (BUSY_FACTOR if busy else 1) for busy, seconds in calls] == [True, True]


async def test_a_member_that_was_sent_a_configuration_is_busy_until_it_reports_ready(master: Master) -> None:
    uplink = await join(master.address, WORKER, Inbox())
    downlink = master.fleet.downlinks["w0"]
    assert isinstance(downlink, Downlink)
    assert downlink.busy  # it was sent a Configuration
    for message, busy in ((Beat(), True), (Ready(1), False)):
        await uplink.send(message)
        if not isinstance(message, Beat):
            await master.fleet.said.get()
        assert downlink.busy is busy
    await uplink.close()


@pytest.mark.parametrize("gpus", [(), ("GPU-1",)])
async def test_a_worker_on_a_gpu_may_always_be_silent_longer(
    gpus: tuple[str, ...], master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles kernels when it must; others may be while they get ready alone."""
    lenient: list[Callable[[], bool]] = []

    def watched(silence: float, told: Callable[[], None], busy: Callable[[], bool]) -> SilenceTimer:
        lenient.append(busy)
        return SilenceTimer(silence, told, busy)

    monkeypatch.setattr("specsot_master.grpc_api.SilenceTimer", watched)
    uplink = await join(master.address, replace(WORKER, gpus=gpus), Inbox())
    await uplink.send(Ready(1))
    await master.fleet.said.get()
    assert [busy() for busy in lenient] == [bool(gpus)]
    await uplink.close()


async def test_a_master_that_goes(master: Master) -> None:
    inbox = Inbox()
    uplink = await join(master.address, WORKER, inbox)
    await inbox.get()
    await master.service.close()
    assert (await inbox.get()).message == MemberLeaving()
    assert (await inbox.get()).message == Lost("master", "it ended the stream")
    assert master.fleet.gone.empty()  # nothing is formed anew for it
    await uplink.send(Ready(1))  # under way when the master left: no failure of this member's
    assert master.fleet.said.empty()
    await uplink.close()


async def test_who_takes_a_place_is_not_taken_for_who_had_it(master: Master) -> None:
    """What the old stream still says, and its end, are nobody's once the fleet has closed it."""
    old = await join(master.address, WORKER, Inbox())
    replaced = master.fleet.downlinks["w0"]
    new = await join(master.address, WORKER, Inbox())
    await old.send(Ready(1))
    assert await master.fleet.said.get() == ("w0", Ready(1)), "as long as the fleet has not closed it"
    await replaced.close()
    with contextlib.suppress(Unavailable):  # it may have heard of it
        await old.send(MemberLeaving())
    await old.close()
    await new.send(Ready(2))
    assert await master.fleet.said.get() == ("w0", Ready(2))
    await new.close()
    assert await master.fleet.gone.get() == ("w0", "its link broke")
    assert master.fleet.gone.empty()


async def test_a_member_that_dies(master: Master) -> None:
    async with grpc.aio.insecure_channel(master.address) as channel:
        call = fleet_pb2_grpc.FleetStub(channel).Join()
        await call.write(encode_upward(WORKER))
        assert (await call.read()).HasField("joined")
    assert await master.fleet.gone.get() == ("w0", "its link broke")


async def test_what_any_thread_posts_arrives_whole_and_in_order_amid_beats(master: Master) -> None:
    """More than a socket takes at once, to a master on the same machine without a stream's help."""
    uplink = await join(master.address, WORKER, Inbox(), Heartbeat(every=0.001, silence=60))
    assert (uplink._socket is not None) is master.nearby
    told = [Result(1, n, (Outcome(7, 1, (), tuple(range(1, 16_000))),)) for n in range(60)]
    await asyncio.to_thread(lambda: [uplink.post(one) for one in told])
    assert [await master.fleet.said.get() for _ in told] == [("w0", one) for one in told]
    await uplink.close()


async def test_a_socket_that_breaks_costs_the_member_but_not_the_master() -> None:
    master, inbox = await opened(True), Inbox()
    uplink = await join(master.address, WORKER, inbox)
    assert uplink._socket is not None
    uplink._socket.write_now(b"\x02\x00\x00\x00\xff\xff")
    why = "it sent a message that cannot be decoded: not a specsot.v1.JoinRequest: 2 bytes that do not parse"
    assert await master.fleet.gone.get() == ("w0", why)
    assert [(await inbox.get()).message for _ in range(2)] == [EPOCH, Lost("master", "it ended the stream")]
    await master.close()


async def test_who_cannot_enter_the_folder_of_the_socket_speaks_by_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master = await opened(True)
    monkeypatch.setattr("specsot.transport.unix_links.is_private", lambda place: False)
    uplink = await join(master.address, WORKER, Inbox())
    await uplink.send(Ready(1))
    assert await master.fleet.said.get() == ("w0", Ready(1))
    assert uplink._socket is None
    await uplink.close()
    await master.close()


async def test_an_address_without_a_process_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unavailable, match=f"no process answers at {address}"):
        await join(address, WORKER, Inbox())


async def test_joining_a_process_that_is_no_master_fails() -> None:
    endpoint = await open_server("127.0.0.1:0", {})
    with pytest.raises(Unavailable, match="Method not found"):
        await join(f"127.0.0.1:{endpoint.port}", WORKER, Inbox())
    await endpoint.close(0)


@NEARBY
async def test_beats_keep_a_quiet_stream_alive(nearby: bool) -> None:
    """Both ends say nothing for twice the silence that would end the stream, but for beats."""
    master, inbox = await opened(nearby, Heartbeat(every=0.05, silence=1.0)), Inbox()
    uplink = await join(master.address, WORKER, inbox, Heartbeat(every=0.05, silence=1.0))
    await inbox.get()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inbox.get(), 2.0)
    assert master.fleet.said.empty(), "beats are not passed on"
    assert master.fleet.gone.empty()
    await uplink.close()
    await master.close()


async def test_a_silent_master_is_lost() -> None:
    master, inbox = await opened(True, Heartbeat(every=60, silence=60)), Inbox()
    await join(master.address, WORKER, inbox, Heartbeat(every=0.05, silence=0.2))
    await inbox.get()
    assert (await inbox.get()).message == Lost("master", "silent for 0.2 s")
    await master.close()


@NEARBY
async def test_a_silent_member_is_lost(nearby: bool) -> None:
    master, inbox = await opened(nearby, Heartbeat(every=0.05, silence=0.2)), Inbox()
    await join(master.address, WORKER, inbox, Heartbeat(every=60, silence=60))
    assert await master.fleet.gone.get() == ("w0", "silent for 0.2 s")
    await master.close()


@pytest.mark.parametrize("loop", some([asyncio.new_event_loop, uvloop.new_event_loop], 1))
def test_a_loop_that_stood_still_does_not_call_its_peer_dead(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The peer spoke all the time, and is still noticed when it stops."""

    async def stand_still() -> None:
        silent, (ours, theirs) = asyncio.Event(), socket.socketpair()
        watch, stop, running = SilenceTimer(1.0, silent.set), Event(), asyncio.get_running_loop()

        def beat() -> None:
            while not stop.wait(0.02):
                theirs.send(b"x")

        def hear() -> None:
            """As gRPC tells what has come: some turns of the loop later."""
            ours.recv(1)
            running.call_soon(running.call_soon, watch.reset)

        ours.setblocking(False)
        running.add_reader(ours, hear)
        speaking = Thread(target=beat, daemon=True)
        speaking.start()
        await asyncio.sleep(0.01)
        time.sleep(1.4)  # noqa: ASYNC251 - that is what happens
        for _ in range(10):
            await asyncio.sleep(0.02)
        assert not silent.is_set()
        stop.set()
        speaking.join()
        await silent.wait()
        running.remove_reader(ours)
        ours.close()
        theirs.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(stand_still())


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "the first message must be register"),
        ([encode_upward(Beat())], "the first message must be register"),
        ([fleet_pb2.JoinRequest()], "JoinRequest has no known field set"),
        ([encode_upward(WORKER), fleet_pb2.JoinRequest()], "JoinRequest has no known field set"),
    ],
)
async def test_a_stranger_receives_the_reason_of_its_refusal(
    master: Master, requests: list[fleet_pb2.JoinRequest], words: str
) -> None:
    async with grpc.aio.insecure_channel(master.address) as channel:
        call = fleet_pb2_grpc.FleetStub(channel).Join(iter(requests))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == words


async def test_what_a_member_does_not_say(master: Master) -> None:
    uplink = await join(master.address, WORKER, Inbox())
    with pytest.raises(WireError, match="cannot send the master a Close"):
        await uplink.send(Close(1))
    await uplink.close()


async def test_a_peer_that_does_not_read_loses_its_link() -> None:
    outbox: SendQueue[bytes] = SendQueue(max_bytes=10)
    outbox.put(b"123456", 6)
    with pytest.raises(Unavailable, match="the peer does not read: 12 bytes wait"):
        outbox.put(b"123456", 6)
    with pytest.raises(Unavailable, match="the peer does not read"):
        outbox.put(b"", 0)


async def test_a_member_is_busy_from_its_configuration_on_not_before() -> None:
    downlink = Downlink()
    assert not downlink.busy
    await downlink.send(EPOCH)
    assert downlink.busy
