"""Links over gRPC whose rows travel by a separate channel: NCCL on GPUs, gloo on CPUs.

A channel belongs to one link and ends with it; both members are on one host and of one user, as they meet
in a folder that nobody else may enter. Rows travel as one piece of memory with a stamp in front.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal

import torch
from torch import Tensor

from specsot.core.frames import Frame, Result
from specsot.errors import Unavailable, WireError
from specsot.members import Kind
from specsot.transport.grpc_links import negotiate
from specsot.transport.link_ends import Endpoint, Peer
from specsot.transport.links import Dialer, RingLink
from specsot.transport.pending_rows import PendingRows, copy_stream, use_device
from specsot.transport.security import PLAIN, Tls
from specsot.transport.wire.tensors import Beside
from specsot.transport.wires import Places, is_private

End = Literal[0, 1]
Make = Callable[[Path, End, torch.device, timedelta], Any]

CPU = "cpu"
SENDER: End = 0
RECEIVER: End = 1
PATIENCE = 30.0  # seconds until an absent end, or bytes that do not come, count as lost; not measured


class Channel:
    """One end. It meets the other one when it is first used, as only then its device is known."""

    def __init__(self, place: Path, end: End, patience: float = PATIENCE, make: Make | None = None) -> None:
        """place: a file for both ends to meet in. make: what sends and receives."""
        self.place = place
        self._patience = timedelta(seconds=patience)
        self._end: End = end
        self._make = make or group_on
        self._group: Any = None
        self._joining = Lock()
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self.lost = False

    def deliver(self, data: Tensor) -> None:
        """Send, without waiting for anybody but at the first time. Raises Unavailable."""
        if self._group is None:
            self._join(data.device)
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        work = self._exchange("send", data, RECEIVER)
        self._sent.append((work, data))  # must stay in memory until it is read

    def receive(self, data: Tensor) -> None:
        """Fill it in: on a CPU now, on a GPU before what is launched there next. Raises Unavailable."""
        if self._group is None:
            self._join(data.device)
        work = self._exchange("recv", data, SENDER)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._gone(error) from None

    def close(self) -> None:
        """At once; nothing waits for what is under way, on no device either."""
        self.lost = True
        group = self._group
        self._group = None
        if group is not None:  # an interpreter that ended meanwhile would take the process down with it
            Thread(target=_abort, args=(group, [*self._sent]), daemon=False).start()
        self._sent.clear()

    def _join(self, device: torch.device) -> None:
        """Greet each other: NCCL connects with the first bytes alone, and whoever sends them waits for the
        other end. That must not be the event loop, which may have yet to write the header that calls it.
        """
        use_device(str(device))
        word = torch.zeros(1, device=device)
        with self._joining:
            if self._group is not None or self.lost:
                return
            try:
                group = self._make(self.place, self._end, device, self._patience)
                greet = group.send if self._end == SENDER else group.recv
                greet([word], RECEIVER if self._end == SENDER else SENDER, 0).wait()
            except RuntimeError as error:
                raise self._gone(error) from None
            self._group = group
        if self.lost:  # meanwhile; nobody else will end it
            self.close()

    def _exchange(self, what: Literal["send", "recv"], data: Tensor, peer: End) -> Any:
        if self._group is None:
            raise Unavailable("the channel for rows is closed")
        try:
            return getattr(self._group, what)([data], peer, 0)
        except RuntimeError as error:
            raise self._gone(error) from None

    def _gone(self, error: RuntimeError) -> Unavailable:
        return Unavailable(f"the channel for rows broke: {str(error).splitlines()[0]}")


def group_on(place: Path, end: End, device: torch.device, patience: timedelta) -> Any:
    from torch import distributed

    store = distributed.FileStore(str(place), 2)
    store.set_timeout(patience)
    _check_devices(store, end, device)
    if device.type == "cuda":
        # Rows go before what is computed next: the other end waits for them.
        settings: Any = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        settings._timeout = patience  # noqa: SLF001
        return distributed.ProcessGroupNCCL(store, end, 2, settings)
    gloo: Any = distributed.ProcessGroupGloo
    settings = gloo._Options()  # noqa: SLF001
    settings._timeout = patience  # noqa: SLF001
    settings._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    return gloo(store, end, 2, settings)


def _check_devices(store: Any, end: End, device: torch.device) -> None:
    """Each end tells its own. Raises Unavailable where they cannot be joined: NCCL would not say why."""
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else CPU
    store.set(f"device {end}", mine)
    theirs = store.get(f"device {1 - end}").decode()
    if mine == theirs != CPU:
        raise Unavailable("two stages share a GPU, where rows go by --transport grpc")
    if CPU in (mine, theirs) and mine != theirs:
        raise Unavailable("one stage is on a GPU and the next on a CPU, where rows go by --transport grpc")


def _abort(group: Any, held: list[Any]) -> None:
    """NCCL's kernels wait on the device until somebody says so; gloo's connections end with the last holder.

    held: what they read until then.
    """
    group.abort()
    held.clear()


STAMP = 16  # bytes of a message's header: a multiple of 16, so that rows behind it are aligned


def stamp_of(number: int, device: torch.device) -> Tensor:
    """Never that of memory that is all zeros."""
    return torch.full((STAMP // 8,), number + 1, dtype=torch.int64, device=device).view(torch.uint8)


@torch.inference_mode()
def pack(stamp: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([stamp, *(rows.contiguous().view(-1).view(torch.uint8) for rows in tensors)])


class Parcel:
    """The rows of one frame, announced by their types and shapes."""

    def __init__(self, channel: Channel, number: int, announced: Sequence[Beside]) -> None:
        self._channel = channel
        self._number = number
        self._announced = announced
        self._data: Tensor | None = None
        self._came: Any = None  # a GPU's event

    def open(self, device: torch.device) -> list[Tensor]:
        """Takes what comes next by the channel, once. Raises Unavailable."""
        sizes = [prod(each.shape) * each.dtype.itemsize for each in self._announced]
        if self._data is None:
            self._data = torch.zeros(STAMP + sum(sizes), dtype=torch.uint8, device=device)
            self._channel.receive(self._data)
            self._came = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        parts = self._data[STAMP:].split(sizes)
        return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, self._announced)]

    @property
    def stamp(self) -> Tensor | None:
        """As it will have come; None before anybody opened it."""
        return None if self._data is None else self._data[:STAMP]

    def check(self) -> None:
        """Waits for the rows, by a stream of its own: not for what is made of them. Raises Unavailable."""
        wanted = stamp_of(self._number, torch.device("cpu"))
        if self._channel.lost or self.stamp is None or not torch.equal(self._read(self.stamp), wanted):
            raise Unavailable(f"the rows of frame {self._number} never came")

    def _read(self, stamp: Tensor) -> Tensor:
        if self._came is None:
            return stamp
        way = copy_stream(stamp.device)
        with torch.cuda.stream(way):
            way.wait_event(self._came)
            return stamp.cpu()


class Coming(PendingRows):
    def __init__(self, parcel: Parcel, place: int, announced: Beside) -> None:
        super().__init__(torch.Size(announced.shape))
        self._parcel = parcel
        self._place = place

    def to(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self._parcel.open(device)[self._place].to(dtype)

    def check(self) -> None:
        self._parcel.check()


class DirectHost:
    """The receiving ends of all channels to one member, and the parcels that it has opened."""

    def __init__(self, make: Make | None = None) -> None:
        self._make = make
        self._places = Places("channels")
        self._channels: dict[tuple[str, int], Channel] = {}
        self._parcels: dict[tuple[int, int], Parcel] = {}

    def expect(self, peer: Peer) -> Endpoint:
        """A place for one channel from this peer. Raises Overloaded."""
        self.part(peer)
        place = self._places.take()
        self._channels[peer.name, peer.epoch] = Channel(place, RECEIVER, make=self._make)
        return Endpoint(path=str(place))

    def take(self, peer: Peer, message: Any) -> Any:
        """A frame whose rows come beside it learns where from. Raises WireError: nobody expects any."""
        if not isinstance(message, Frame):
            return message
        announced = [rows for rows in (message.hidden, message.fused) if isinstance(rows, Beside)]
        if not announced:
            return message
        channel = self._channels.get((peer.name, peer.epoch))
        if channel is None:
            raise WireError(f"frame {message.number} has its rows beside it, where no channel is")
        parcel = Parcel(channel, message.number, announced)
        self._parcels[message.epoch, message.number] = parcel
        coming = iter([Coming(parcel, place, rows) for place, rows in enumerate(announced)])
        hidden, fused = (
            next(coming) if isinstance(rows, Beside) else rows for rows in (message.hidden, message.fused)
        )
        return replace(message, hidden=hidden, fused=fused)

    def taken(self, epoch: int, number: int) -> Parcel | None:
        """What brought this frame's rows here, if a channel did; asked once, when the frame has left."""
        return self._parcels.pop((epoch, number), None)

    def part(self, peer: Peer) -> None:
        """This peer's link is over, and what still lies here of its epoch will not be asked for."""
        if channel := self._channels.pop((peer.name, peer.epoch), None):
            channel.close()
            # Both ends' stores may still read the file: one that is gone, or another's, they read for ever.
            self._places.give_back(channel.place, remove=False)
            for key in [key for key in list(self._parcels) if key[0] <= peer.epoch]:
                self.taken(*key)  # as the thread that computes may, meanwhile

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._places.close()


class DirectDialer:
    """Dials by another dialer. Links to workers get a channel, whose ends meet when the first rows go."""

    def __init__(
        self, sender: str, dialer: Dialer, host: DirectHost, tls: Tls = PLAIN, make: Make | None = None
    ) -> None:
        """host: of this member, as it passes on what came to it. make: see Channel."""
        self._sender = sender
        self._dialer = dialer
        self._host = host
        self._tls = tls
        self._make = make

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> RingLink:
        """Raises Unavailable, too, where a worker is on another machine."""
        link = await self._dialer.dial(address, epoch, kind)
        if kind == "drafter":
            return link
        try:
            _, place = await negotiate(address, self._sender, epoch, b"", kind, tls=self._tls, rows=True)
            return DirectLink(link, Channel(_own(place, address), SENDER, make=self._make), self._host)
        except BaseException:
            await link.close()
            raise


class DirectLink:
    """The sending end: headers by the stream, rows by the channel."""

    def __init__(self, link: RingLink, channel: Channel, host: DirectHost) -> None:
        self._link = link
        self._channel = channel
        self._host = host

    async def send(self, message: Any) -> None:
        """Not on the event loop: the first rows wait for the other end."""
        await asyncio.to_thread(self.post, message)

    def post(self, message: Any) -> None:
        parcel = (
            self._host.taken(message.epoch, message.number) if isinstance(message, Frame | Result) else None
        )
        if not isinstance(message, Frame) or message.hidden is None:
            self._link.post(message)
            return
        hidden = message.hidden
        fused = message.fused
        announced = replace(
            message, hidden=Beside.of(hidden), fused=None if fused is None else Beside.of(fused)
        )
        self._link.post(announced)
        stamp = parcel.stamp if parcel else None
        stamp = stamp_of(message.number, hidden.device) if stamp is None else stamp
        self._channel.deliver(pack(stamp, [rows for rows in (hidden, fused) if rows is not None]))

    async def close(self) -> bool | None:
        delivered = await self._link.close()
        self._channel.close()
        return delivered


def _own(place: Endpoint, address: str) -> Path:
    """Only where no other user can have put anything. Raises Unavailable."""
    path = Path(place.path or "")
    if not path.parent.exists():
        raise Unavailable(f"{address} is on another machine, where rows go by --transport grpc")
    if place.path is None or not is_private(path):
        raise Unavailable(f"{address} named {place.path} for rows, which is not this user's alone")
    return path
