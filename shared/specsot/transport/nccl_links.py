"""Links over gRPC whose frames leave their rows to a channel beside them.

A channel belongs to one link and ends with it; both members are on one host and of one user, as they meet
in a folder that nobody else may enter.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from specsot.core.frames import Frame, Result
from specsot.errors import Overloaded, Unavailable, WireError
from specsot.members import Kind
from specsot.transport.grpc_links import Endpoint, Peer, negotiate
from specsot.transport.links import Dialer, Link
from specsot.transport.nccl_channel import RECEIVER, SENDER, Channel, Coming, Make, Parcel, pack, stamp_of
from specsot.transport.security import PLAIN, Tls
from specsot.transport.wire.tensors import Beside

MOST_CHANNELS = 256  # to one member at once


class DirectHost:
    """The receiving ends of all channels to one member, and the parcels that it has opened."""

    def __init__(self, make: Make | None = None) -> None:
        """make: see Channel."""
        self._make = make
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._channels: dict[tuple[str, int], Channel] = {}
        self._parcels: dict[tuple[int, int], Parcel] = {}

    def expect(self, peer: Peer) -> Endpoint:
        """A place for one channel from this peer. Raises Overloaded."""
        self.part(peer)
        if len(self._channels) >= MOST_CHANNELS:
            raise Overloaded(f"{len(self._channels)} channels come in already, {MOST_CHANNELS} are allowed")
        place = self._room() / f"rows-{next(self._numbers)}"
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
            self._parcels = {key: parcel for key, parcel in self._parcels.items() if key[0] > peer.epoch}

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _room(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="specsot-rows-"))
        return self._folder


class DirectDialer:
    """Dials by another dialer. Links to workers get a channel, whose ends meet when the first rows go."""

    def __init__(
        self, sender: str, dialer: Dialer, host: DirectHost, tls: Tls = PLAIN, make: Make | None = None
    ) -> None:
        """host: of this member, as it passes on what came to it. make: see Channel."""
        self._sender, self._dialer, self._host, self._tls = sender, dialer, host, tls
        self._make = make

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> Link:
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

    def __init__(self, link: Link, channel: Channel, host: DirectHost) -> None:
        self._link, self._channel, self._host = link, channel, host

    async def send(self, message: Any) -> None:
        parcel = (
            self._host.taken(message.epoch, message.number) if isinstance(message, Frame | Result) else None
        )
        if not isinstance(message, Frame) or message.hidden is None:
            await self._link.send(message)
            return
        hidden, fused = message.hidden, message.fused
        announced = replace(
            message, hidden=Beside.of(hidden), fused=None if fused is None else Beside.of(fused)
        )
        await self._link.send(announced)
        await asyncio.sleep(0)  # it is written now: the next stage has much to do before the rows come
        stamp = parcel.stamp if parcel else None
        stamp = stamp_of(message.number, hidden.device) if stamp is None else stamp
        await self._channel.deliver(pack(stamp, [rows for rows in (hidden, fused) if rows is not None]))

    async def close(self) -> None:
        await self._link.close()
        self._channel.close()


def _own(place: Endpoint, address: str) -> Path:
    """Only where no other user can have put anything. Raises Unavailable."""
    path = Path(place.path or "")
    try:
        folder = path.parent.stat()
    except OSError:
        raise Unavailable(f"{address} is on another machine, where rows go by --transport grpc") from None
    if place.path is None or folder.st_uid != os.getuid() or folder.st_mode & 0o077:
        raise Unavailable(f"{address} named {place.path} for rows, which is not this user's alone")
    return path
