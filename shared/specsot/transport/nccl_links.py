"""Links over gRPC whose hidden states travel by a separate channel: NCCL on GPUs, gloo on CPUs.

A channel belongs to one link and ends with the link. Both members run on one host and as one user, because
they meet in a folder that is private to the user. The tensors of a frame travel as one block of bytes: a
stamp of 16 bytes, which contains the frame's number, then `hidden`, then `fused`. For hidden [2, 8] and fused
[2, 4] in float16 the block has 16 + 32 + 16 bytes.
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
from specsot.transport.link_ends import Peer
from specsot.transport.links import Dialer, RingLink
from specsot.transport.pending_rows import PendingRows, copy_stream, use_device
from specsot.transport.security import PLAIN, Tls
from specsot.transport.wire.tensors import SeparateTensor
from specsot.transport.wires import Places, is_private
from specsot.v1 import ring_pb2

# The number of an end of a channel in its process group: 0 sends, 1 receives.
End = Literal[0, 1]
# Creates a process group, see `group_on`.
Make = Callable[[Path, End, torch.device, timedelta], Any]

# Stands for any processor when two ends compare their devices.
CPU = "cpu"
# The number of the end that sends.
SENDER: End = 0
# The number of the end that receives.
RECEIVER: End = 1
# Seconds. How long a channel waits for its other end and for bytes before it counts as lost. Untuned.
TIMEOUT_SECONDS = 30.0


class Channel:
    """One end of a channel, which carries the hidden states of one link over NCCL or gloo.

    The two ends connect when they are first used, because the device of the tensors is not known earlier.

    lost: True once the channel is closed.
    """

    def __init__(
        self, place: Path, end: End, timeout_seconds: float = TIMEOUT_SECONDS, make: Make | None = None
    ) -> None:
        """Create one end of a channel.

        place: path of the file through which the two ends meet, the same for both ends.
        end: which end this is, SENDER or RECEIVER.
        timeout_seconds: seconds to wait for the other end and for bytes.
        make: creates the process group that sends and receives, from (place, end, device, timeout). None:
            `group_on`.

        Nothing is connected before the first transfer.
        """
        self.place = place
        self._timeout = timedelta(seconds=timeout_seconds)
        self._end: End = end
        self._make = make or group_on
        self._group: Any = None
        self._joining = Lock()
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self.lost = False

    def deliver(self, data: Tensor) -> None:
        """Send the bytes without waiting, except at the first call, which waits for the other end.

        data: uint8 tensor of any length. It stays in memory until it has been sent.

        Raises Unavailable if the channel broke.

        Raises Unavailable also if the channel is closed, or the other end does not connect in time.
        """
        if self._group is None:
            self._join(data.device)
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        work = self._exchange("send", data, RECEIVER)
        # The tensor must stay in memory until it has been sent.
        self._sent.append((work, data))

    def receive(self, data: Tensor) -> None:
        """Fill a tensor with the next bytes of the channel.

        On a CPU, the bytes have arrived when this returns. On a GPU, work that is launched afterwards waits
        for them.

        data: uint8 tensor, as long as the block that the other end delivers.

        Raises Unavailable if the channel broke.

        Raises Unavailable also if the channel is closed, if the other end does not connect in time, and, on a
        CPU, if the bytes do not arrive in time.
        """
        if self._group is None:
            self._join(data.device)
        work = self._exchange("recv", data, SENDER)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(error) from None

    def close(self) -> None:
        """Close the channel at once, without waiting for transfers that are under way.

        Sets `lost`; later transfers raise Unavailable. May be called more than once, and while another thread
        connects. Transfers are aborted by a thread of their own.
        """
        self.lost = True
        group = self._group
        self._group = None
        # The thread is no daemon: if the interpreter ended while it runs, the process would crash.
        if group is not None:
            Thread(target=_abort, args=(group, [*self._sent]), daemon=False).start()
        self._sent.clear()

    def _join(self, device: torch.device) -> None:
        """Connect to the other end by sending one number. Do nothing if the ends are connected or the channel
        is closed.

        NCCL connects only when the first bytes are sent, and the sender waits for the other end meanwhile.
        This must not happen on the event loop, because that may still have to write the header that makes the
        other end connect.

        device: the device of the tensors, which decides between NCCL and gloo.

        Raises Unavailable if the other end does not connect in time, or if the two devices cannot be
        connected.

        May be called by several threads; only one connects. If the channel is closed meanwhile, the new
        connection is closed too.
        """
        use_device(str(device))
        greeting = torch.zeros(1, device=device)
        with self._joining:
            if self._group is not None or self.lost:
                return
            try:
                group = self._make(self.place, self._end, device, self._timeout)
                greet = group.send if self._end == SENDER else group.recv
                greet([greeting], RECEIVER if self._end == SENDER else SENDER, 0).wait()
            except RuntimeError as error:
                raise self._broken(error) from None
            self._group = group
        # If the channel was closed meanwhile, `close` did not see the group yet.
        if self.lost:
            self.close()

    def _exchange(self, operation: Literal["send", "recv"], data: Tensor, peer: End) -> Any:
        """Start a transfer and return it, as the process group's work object. Raise Unavailable if the
        channel is closed or broke.

        operation: the method of the process group.
        data: the tensor to send or to fill.
        peer: the number of the other end.
        """
        if self._group is None:
            raise Unavailable("the channel for rows is closed")
        try:
            return getattr(self._group, operation)([data], peer, 0)
        except RuntimeError as error:
            raise self._broken(error) from None

    def _broken(self, error: RuntimeError) -> Unavailable:
        """Return the error to raise for a failed transfer.

        error: the error of the process group.
        """
        return Unavailable(f"the channel for rows broke: {str(error).splitlines()[0]}")


def group_on(place: Path, end: End, device: torch.device, timeout: timedelta) -> Any:
    """Create and return the process group of two ends: NCCL on a GPU, gloo over 127.0.0.1 on a CPU.

    place: path of the file through which the two ends meet.
    end: which end this is.
    device: the device of the tensors.
    timeout: how long the other end and each transfer may take.

    Raises Unavailable if the devices of the two ends cannot be connected.

    Each end waits until the other one has called this too. Raises RuntimeError if the other end does not
    appear in time.
    """
    from torch import distributed

    store = distributed.FileStore(str(place), 2)
    store.set_timeout(timeout)
    _check_devices(store, end, device)
    if device.type == "cuda":
        # The other end waits for the tensors, so that they have priority over what is computed next.
        settings: Any = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        settings._timeout = timeout  # noqa: SLF001
        return distributed.ProcessGroupNCCL(store, end, 2, settings)
    gloo: Any = distributed.ProcessGroupGloo
    settings = gloo._Options()  # noqa: SLF001
    settings._timeout = timeout  # noqa: SLF001
    settings._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    return gloo(store, end, 2, settings)


def _check_devices(store: Any, end: End, device: torch.device) -> None:
    """Exchange the devices of the two ends through the store, and return None if the two can be connected.

    store: the store that both ends share.
    end: which end this is.
    device: the device of this end.

    Raises Unavailable if both ends are on one GPU, or one on a GPU and the other on a CPU. NCCL would fail
    without naming the reason.

    Returns None for two different GPUs of NVIDIA and for two CPUs. Raises RuntimeError if the other end does
    not appear in time.
    """
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else CPU
    store.set(f"device {end}", mine)
    theirs = store.get(f"device {1 - end}").decode()
    if mine == theirs != CPU:
        raise Unavailable("two stages share a GPU; use --transport grpc there")
    if CPU in (mine, theirs) and mine != theirs:
        raise Unavailable("one stage is on a GPU and the next on a CPU; use --transport grpc there")


def _abort(group: Any, held: list[Any]) -> None:
    """Abort a process group. NCCL's kernels would otherwise wait on the device without end.

    group: the process group.
    held: the tensors that are being sent, which must stay in memory until the group is aborted.
    """
    group.abort()
    held.clear()


# Bytes. The stamp that precedes the tensors: a multiple of 16, so that the tensors after it are aligned.
STAMP = 16


def stamp_of(number: int, device: torch.device) -> Tensor:
    """Return the stamp of a frame: its number + 1, twice, as 16 uint8, so that memory of zeros is never a
    valid stamp.

    number: number of the frame.
    device: where the stamp is created.
    """
    return torch.full((STAMP // 8,), number + 1, dtype=torch.int64, device=device).view(torch.uint8)


@torch.inference_mode()
def pack(stamp: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return the stamp and the bytes of the tensors as one uint8 tensor.

    stamp: uint8 [16], see `stamp_of`.
    tensors: tensors on the same device, of any types and shapes.
    """
    return torch.cat([stamp, *(rows.contiguous().view(-1).view(torch.uint8) for rows in tensors)])


class ReceivedTensors:
    """The tensors of one frame that a channel delivers. The frame's header announced their types and shapes.

    stamp: the received stamp, or None before the tensors were received.
    """

    def __init__(self, channel: Channel, number: int, announced: Sequence[SeparateTensor]) -> None:
        """Describe the tensors of a frame, which are received when they are opened.

        channel: the channel by which the tensors arrive.
        number: number of the frame, which the stamp before the tensors must equal.
        announced: types and shapes of the tensors, in the order in which they travel.
        """
        self._channel = channel
        self._number = number
        self._announced = announced
        self._data: Tensor | None = None
        # On a GPU, the event after which the data has arrived.
        self._arrived: Any = None

    def open(self, device: torch.device) -> list[Tensor]:
        """Return the tensors on `device`. The first call receives the next bytes of the channel.

        device: the device of the receiving stage.

        Raises Unavailable if the channel broke.

        Later calls return the same memory and ignore `device`. On a GPU, the data may still be arriving when
        this returns; work that is launched on the current stream waits for it. The stamp is not checked here.
        """
        sizes = [prod(each.shape) * each.dtype.itemsize for each in self._announced]
        if self._data is None:
            self._data = torch.zeros(STAMP + sum(sizes), dtype=torch.uint8, device=device)
            self._channel.receive(self._data)
            self._arrived = (
                torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            )
        parts = self._data[STAMP:].split(sizes)
        return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, self._announced)]

    @property
    def stamp(self) -> Tensor | None:
        """The received stamp, on the device. None before `open` was called."""
        return None if self._data is None else self._data[:STAMP]

    def check(self) -> None:
        """Wait for the tensors and compare the stamp with the frame's number.

        Uses a stream of its own, so as not to wait for computations on the tensors. Raises Unavailable if the
        channel broke or the bytes belong to another frame.

        Raises Unavailable also before `open` was called.
        """
        expected = stamp_of(self._number, torch.device("cpu"))
        if self._channel.lost or self.stamp is None or not torch.equal(self._read(self.stamp), expected):
            raise Unavailable(f"the rows of frame {self._number} did not arrive")

    def _read(self, stamp: Tensor) -> Tensor:
        """Return the stamp on the CPU, once the tensors have arrived.

        stamp: uint8 [16] on the device.

        On a CPU, the stamp is returned as it is. On a GPU, it is copied on a stream of its own, so that the
        copy does not wait for work that was launched later.
        """
        if self._arrived is None:
            return stamp
        stream = copy_stream(stamp.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._arrived)
            return stamp.cpu()


class ArrivingRows(PendingRows):
    """One tensor of a frame that a channel delivers, see `ReceivedTensors`."""

    def __init__(self, received: ReceivedTensors, index: int, announced: SeparateTensor) -> None:
        """Describe one tensor, which is received when it is needed.

        received: the tensors of the frame.
        index: which of these tensors this one is.
        announced: its type and shape.
        """
        super().__init__(torch.Size(announced.shape))
        self._received_tensors = received
        self._index = index

    def to(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the tensor on `device`, in `dtype`. Raises Unavailable if the channel broke.

        device: the device of the receiving stage.
        dtype: the type to which the tensor is converted.
        """
        return self._received_tensors.open(device)[self._index].to(dtype)

    def check(self) -> None:
        """Raise Unavailable if the tensors did not arrive or belong to another frame."""
        self._received_tensors.check()


class DirectHost:
    """The receiving ends of all channels to one member, and the tensors of the frames that it computes."""

    def __init__(self, make: Make | None = None) -> None:
        """Create a host without channels.

        make: creates process groups, see `Channel`. None: `group_on`.
        """
        self._make = make
        self._places = Places("channels")
        self._channels: dict[tuple[str, int], Channel] = {}
        self._received_tensors_by_frame: dict[tuple[int, int], ReceivedTensors] = {}

    def expect(self, peer: Peer) -> ring_pb2.MeetResponse:
        """Open and return an endpoint for one channel from this peer, instead of an earlier one of the same
        epoch.

        peer: the peer that will send tensors.

        Raises Overloaded if there are too many channels.

        The returned endpoint is a path of this machine, which the peer must open within the channel's time
        limit.
        """
        self.close_channel(peer)
        place = self._places.allocate()
        self._channels[peer.name, peer.epoch] = Channel(place, RECEIVER, make=self._make)
        return ring_pb2.MeetResponse(path=str(place))

    def attach_rows(self, peer: Peer, message: Any) -> Any:
        """Return a frame whose tensors travel by the peer's channel with handles for them.

        Other messages, and frames whose tensors are in the message or that have none, are returned unchanged.
        Raises WireError if the peer has no channel.

        peer: the peer that sent the message.
        message: the decoded message.

        The handles are also kept under the frame's epoch and number, for `pop_received`.
        """
        if not isinstance(message, Frame):
            return message
        announced = [rows for rows in (message.hidden, message.fused) if isinstance(rows, SeparateTensor)]
        if not announced:
            return message
        channel = self._channels.get((peer.name, peer.epoch))
        if channel is None:
            raise WireError(
                f"frame {message.number} has its rows in a separate channel, but there is no such channel"
            )
        received = ReceivedTensors(channel, message.number, announced)
        self._received_tensors_by_frame[message.epoch, message.number] = received
        arriving = iter([ArrivingRows(received, index, rows) for index, rows in enumerate(announced)])
        hidden, fused = (
            next(arriving) if isinstance(rows, SeparateTensor) else rows
            for rows in (message.hidden, message.fused)
        )
        return replace(message, hidden=hidden, fused=fused)

    def pop_received(self, epoch: int, number: int) -> ReceivedTensors | None:
        """Remove and return the tensors with which a frame arrived, or None if no channel delivered any.

        Called once, when the frame is sent on.

        epoch: epoch of the frame.
        number: number of the frame.
        """
        return self._received_tensors_by_frame.pop((epoch, number), None)

    def close_channel(self, peer: Peer) -> None:
        """Close the channel of a peer whose link has ended, and drop the tensors of its epoch and of earlier
        ones. Does nothing if the peer has no channel.

        peer: the peer of the ended link.

        The file through which the ends met is not deleted.
        """
        if channel := self._channels.pop((peer.name, peer.epoch), None):
            channel.close()
            # The stores of both ends may still read the file. If the file were deleted or reused, they would
            # read without end.
            self._places.free(channel.place, remove=False)
            for key in [key for key in list(self._received_tensors_by_frame) if key[0] <= peer.epoch]:
                # `pop_received` tolerates that the compute thread removes the same key meanwhile.
                self.pop_received(*key)

    def close(self) -> None:
        """Close all channels and delete their files."""
        for channel in self._channels.values():
            channel.close()
        self._places.close()


class DirectDialer:
    """Opens links with another dialer, and adds a channel for tensors to each link to a worker."""

    def __init__(
        self, sender: str, dialer: Dialer, host: DirectHost, tls: Tls = PLAIN, make: Make | None = None
    ) -> None:
        """Create a dialer, which opens nothing yet.

        sender: name of the dialing member.
        dialer: opens the links that carry headers and all messages without hidden states.
        host: the receiving ends of the dialing member. The stamps that they received are passed on with the
            member's own frames.
        tls: the TLS files of the dialing member.
        make: creates process groups, see `Channel`. None: `group_on`.
        """
        self._sender = sender
        self._dialer = dialer
        self._host = host
        self._tls = tls
        self._make = make

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> RingLink:
        """Return a new link; if it leads to a worker, it has a channel for the hidden states of frames.

        address: the member's address, host:port or unix:path.
        epoch: number of the epoch to which the link belongs.
        kind: what the member must be, "worker" or "drafter". A drafter gets no channel.

        Raises Unavailable if the peer cannot be reached, and if a worker is on another machine.

        Raises what the inner dialer raises, Refused if a worker offers no channel, and Unavailable if the
        path of the channel is not private to this user. The link is closed before an error is raised.
        """
        link = await self._dialer.dial(address, epoch, kind)
        if kind == "drafter":
            return link
        try:
            place = await negotiate(address, self._sender, epoch, b"", kind, tls=self._tls, rows=True)
            return DirectLink(
                link, Channel(_checked_path(place, address), SENDER, make=self._make), self._host
            )
        except BaseException:
            await link.close()
            raise


class DirectLink:
    """The sending end of a link with a channel: headers travel by the link, hidden states by the channel."""

    def __init__(self, link: RingLink, channel: Channel, host: DirectHost) -> None:
        """Combine an open link and a channel, both to the same member.

        link: carries headers and all other messages.
        channel: carries the hidden states.
        host: the receiving ends of this member, which know the stamps that arrived.
        """
        self._link = link
        self._channel = channel
        self._host = host

    async def send(self, message: Any) -> None:
        """Send one message. Runs in a thread, because sending the first tensors waits for the other end.

        message: a value that the ring carries.
        """
        await asyncio.to_thread(self.post, message)

    def post(self, message: Any) -> None:
        """Send one message from any thread. Raises Unavailable if the link or the channel is lost.

        A frame's header goes first, with descriptions of its tensors, which then follow by the channel. If
        the frame arrived by a channel too, its stamp is passed on instead of a new one: if the tensors never
        arrived, the next stage notices that too.

        message: a value that the ring carries. A frame's tensors are on the device of the sending stage.

        Messages other than frames, and frames without hidden states, are sent by the link alone. Posting a
        Frame or a Result removes the tensors with which the frame of the same number arrived from the host.
        The first tensors wait for the other end to connect.
        """
        received = (
            self._host.pop_received(message.epoch, message.number)
            if isinstance(message, Frame | Result)
            else None
        )
        if not isinstance(message, Frame) or message.hidden is None:
            self._link.post(message)
            return
        hidden = message.hidden
        fused = message.fused
        announced = replace(
            message,
            hidden=SeparateTensor.of(hidden),
            fused=None if fused is None else SeparateTensor.of(fused),
        )
        self._link.post(announced)
        stamp = received.stamp if received else None
        stamp = stamp_of(message.number, hidden.device) if stamp is None else stamp
        self._channel.deliver(pack(stamp, [rows for rows in (hidden, fused) if rows is not None]))

    async def close(self) -> bool | None:
        """End the link, then the channel.

        Returns what `close` of the link returns: whether all messages have arrived, or None if that is
        unknown.
        """
        delivered = await self._link.close()
        self._channel.close()
        return delivered


def _checked_path(endpoint: ring_pb2.MeetResponse, address: str) -> Path:
    """Return the path of an endpoint. Raises Unavailable if the path is on another machine or not private.

    endpoint: the endpoint that the peer named for its channel.
    address: the peer's address, for error messages.

    The other machine is recognized by the fact that the path's folder does not exist here. An endpoint that
    is a port raises Unavailable too.
    """
    path = Path(endpoint.path)
    if not path.parent.exists():
        raise Unavailable(f"{address} is on another machine; use --transport grpc there")
    if not is_private(path):
        raise Unavailable(f"{address} named {endpoint.path} for rows, which is not private to this user")
    return path
