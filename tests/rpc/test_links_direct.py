"""Links whose rows go beside them, here by gloo: what arrives, what the stream does not carry, who is lost.

Knows nothing of members; a ring service with an inbox and a host for rows stands for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch

from specsot.core.frames import Drafts, Frame, PromptChunk
from specsot.errors import Refused, Unavailable, WireError
from specsot.transport.grpc_links import SERVICE, GrpcDialer, RingService, negotiate
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Inbox, Lost
from specsot.transport.nccl_links import (
    RECEIVER,
    SENDER,
    Channel,
    DirectDialer,
    DirectHost,
    Make,
    group_on,
    pack,
    stamp_of,
)
from specsot.transport.pending_rows import PendingRows
from specsot.transport.wire.carry import CarryReader, encode_carry
from specsot.transport.wire.tensors import SeparateTensor
from specsot.v1 import ring_pb2

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")
HIDDEN = torch.arange(6000.0).reshape(3, 2000)
FUSED = torch.ones(3, 5).to(torch.bfloat16)


@dataclass
class There:
    """A member's receiving side, and a dialer of another."""

    address: str
    inbox: Inbox
    rows: DirectHost
    dialer: DirectDialer
    own: Inbox
    passed_on: DirectHost


@asynccontextmanager
async def meeting(with_rows: bool = True, make: Make | None = None) -> AsyncGenerator[There]:
    inbox, own, rows, passed_on = Inbox(), Inbox(), DirectHost(make), DirectHost()
    service = RingService(inbox, "there", rows=rows if with_rows else None)
    endpoint = await open_server("127.0.0.1:0", {SERVICE: service.attach})
    dialer = DirectDialer("here", GrpcDialer("here", own), passed_on, make=make)
    try:
        yield There(f"127.0.0.1:{endpoint.port}", inbox, rows, dialer, own, passed_on)
    finally:
        rows.close()
        await endpoint.close(0)


def frame(number: int, hidden: object = HIDDEN, fused: object = None) -> Frame:
    return Frame(7, number, segments=(PromptChunk(1, 0, (5, 6, 7), True),), hidden=hidden, fused=fused)


async def come(there: There) -> Any:
    """A frame."""
    message = (await there.inbox.get()).message
    assert isinstance(message, Frame), message
    return message


async def opened(rows: PendingRows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return await asyncio.to_thread(rows.to, CPU, dtype)


async def test_rows_arrive_whole_and_in_order_and_all_else_by_the_stream() -> None:
    async with meeting() as there:
        link: Any = await there.dialer.dial(there.address, 7)
        sending = asyncio.create_task(link.send(frame(1, HIDDEN, FUSED)))
        first = await come(there)
        assert tuple(first.hidden.shape) == (3, 2000), "known before they are here"
        assert torch.equal(await opened(first.hidden), HIDDEN)
        assert torch.equal(await opened(first.fused, torch.bfloat16), FUSED)
        first.hidden.check()
        await sending
        for message in (frame(2, HIDDEN + 1), Frame(7, 3, closings=(1,)), frame(4, HIDDEN + 2), Drafts(7)):
            await link.send(message)
        second, header, third = [await come(there) for _ in range(3)]
        assert header == Frame(7, 3, closings=(1,))
        assert torch.equal(await opened(second.hidden), HIDDEN + 1)
        assert torch.equal(await opened(third.hidden), HIDDEN + 2)
        assert (await there.inbox.get()).message == Drafts(7)
        await link.close()
        assert there.inbox.pop() is None, "a link that was closed in good order is not lost"


class Late:
    """Like NCCL's groups: made in no time, connected with the first bytes; then whoever asks must wait."""

    def __init__(self, waiting: list[Thread], *asked: Any) -> None:
        self._waiting, self._asked, self._group = waiting, asked, None

    def send(self, *what: Any) -> Any:
        return self._connected.send(*what)

    def recv(self, *what: Any) -> Any:
        return self._connected.recv(*what)

    def abort(self) -> None:
        self._connected.abort()

    @property
    def _connected(self) -> Any:
        if self._group is None:
            self._waiting.append(current_thread())
            self._group = group_on(*self._asked)
        return self._group


async def test_the_event_loop_never_waits_for_the_other_end() -> None:
    """It has yet to write the header that calls it."""
    waiting: list[Thread] = []
    async with meeting(make=partial(Late, waiting)) as there:
        link: Any = await there.dialer.dial(there.address, 7)
        sending = asyncio.create_task(link.send(frame(1)))
        assert torch.equal(await opened((await come(there)).hidden), HIDDEN)
        await sending
        await link.close()
    assert len(waiting) == 2
    assert current_thread() not in waiting


def test_a_header_carries_no_rows() -> None:
    requests = [*encode_carry(frame(1, SeparateTensor.of(HIDDEN)))]
    assert len(requests) == 1
    assert requests[0].ByteSize() < 100
    assert CarryReader().read(requests[0]) == frame(1, SeparateTensor((3, 2000), torch.float32))
    requests[0].frame.hidden.data = b"1234"
    with pytest.raises(WireError, match="a tensor that travels separately came with 4 bytes"):
        CarryReader().read(requests[0])


async def test_a_lost_peer_leaves_no_receiver_waiting_for_its_rows() -> None:
    """The header has arrived, the rows have not."""
    async with meeting() as there:
        link: Any = await there.dialer.dial(there.address, 7)
        sending = asyncio.create_task(link.send(frame(1)))
        await opened((await come(there)).hidden)
        await sending
        await link._link.send(frame(2, SeparateTensor.of(HIDDEN)))
        waiting = asyncio.create_task(opened((await come(there)).hidden))
        await link._link._wire.hang_up()
        link._channel.close()
        assert (await there.inbox.get()).message == Lost("here", "its link broke", 7)
        with pytest.raises(Unavailable, match="the channel for rows"):
            await waiting


async def test_a_stage_passes_on_the_stamp_that_came_and_the_last_one_believes_no_other() -> None:
    """On a GPU nobody sees that bytes did not come."""
    async with meeting() as there:
        link: Any = await there.dialer.dial(there.address, 7)
        for number, stamp in ((1, stamp_of(1, CPU)), (2, torch.zeros(16, dtype=torch.uint8))):
            await link._link.send(frame(number, SeparateTensor.of(HIDDEN)))
            sending = asyncio.create_task(asyncio.to_thread(link._channel.deliver, pack(stamp, [HIDDEN])))
            came = await come(there)
            assert torch.equal(await opened(came.hidden), HIDDEN)
            await sending
            taken: Any = there.rows.pop_received(7, number)
            assert torch.equal(taken.stamp, stamp)
            assert there.rows.pop_received(7, number) is None
        with pytest.raises(Unavailable, match="the rows of frame 2 did not arrive"):
            came.hidden.check()
        await link.close()


async def test_who_has_no_channel_takes_no_such_frames() -> None:
    async with meeting(with_rows=False) as there:
        with pytest.raises(Refused, match="accepts links over gRPC only"):
            await there.dialer.dial(there.address, 7)
        link = await GrpcDialer("here").dial(there.address, 7)
        await link.send(frame(1, SeparateTensor.of(HIDDEN)))
        lost = (await there.inbox.get()).message
        assert lost.reason.endswith(
            "frame 1 has its rows in a separate channel, but there is no such channel"
        )
        await link.close()


async def test_frames_of_another_epoch_find_no_channel() -> None:
    async with meeting() as there:
        await negotiate(there.address, "here", 6, b"", "worker", rows=True)
        link = await GrpcDialer("here").dial(there.address, 7)
        await link.send(frame(1, SeparateTensor.of(HIDDEN)))
        assert "there is no such channel" in (await there.inbox.get()).message.reason
        await link.close()


def test_rows_are_sent_only_over_a_path_that_is_private_to_the_user(tmp_path: Path) -> None:
    from specsot.transport.nccl_links import _checked_path

    with pytest.raises(Unavailable, match=r"10\.0\.0\.1:5 is on another machine"):
        _checked_path(ring_pb2.MeetResponse(path=str(tmp_path / "none" / "rows-0")), "10.0.0.1:5")
    tmp_path.chmod(0o755)
    with pytest.raises(Unavailable, match="which is not private to this user"):
        _checked_path(ring_pb2.MeetResponse(path=str(tmp_path / "rows-0")), "10.0.0.1:5")


def test_a_channel_without_a_receiver_is_unavailable(tmp_path: Path) -> None:
    channel = Channel(tmp_path / "rows", SENDER, timeout_seconds=0.2)
    with pytest.raises(Unavailable, match="the channel for rows broke"):
        channel.deliver(HIDDEN)
    channel.close()


def test_an_end_on_a_cpu_and_one_on_a_gpu(tmp_path: Path) -> None:
    """NCCL and gloo would wait for each other."""
    elsewhere: Any = torch.distributed
    elsewhere.FileStore(str(tmp_path / "rows"), 2).set("device 0", "GPU-1")
    with pytest.raises(Unavailable, match="one stage is on a GPU and the next on a CPU"):
        Channel(tmp_path / "rows", RECEIVER).receive(HIDDEN.clone())


class Deaf:
    """A group whose other end never says anything."""

    def __init__(self) -> None:
        self.aborted = Event()

    def recv(self, *what: Any) -> Any:
        return self

    def wait(self) -> None: ...

    def abort(self) -> None:
        self.aborted.set()


def test_a_channel_that_is_closed_while_its_ends_meet(tmp_path: Path) -> None:
    """What has just connected is aborted: nobody else would."""
    group = Deaf()

    def meet_late(*asked: Any) -> Deaf:
        channel.close()
        return group

    channel = Channel(tmp_path / "rows", RECEIVER, make=meet_late)
    with pytest.raises(Unavailable, match="is closed"):
        channel.receive(HIDDEN.clone())
    assert group.aborted.wait(100)
