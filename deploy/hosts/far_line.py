"""Two hosts far from each other: network namespaces joined by a line that delays every packet.

Where the kernel has no netem, a pair of TUN devices and a timer do the same, for any protocol.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial

from hosts import FAR_HOSTS, ip, remove

ATTACH, TUN_FLAGS = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
MTU = 1500


@contextmanager
def far_hosts() -> Generator[tuple[int, int]]:
    """Yield the file descriptors of both ends of the line between FAR_HOSTS, whose namespaces exist within
    the context.
    """
    spaces = [f"specsot-{host}" for host in FAR_HOSTS]
    ends: list[int] = []
    try:
        for address, space in zip(FAR_HOSTS.values(), spaces):
            remove(space)  # what a run left that was killed
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            ends.append(_plug_in(space, address))
        yield ends[0], ends[1]
    finally:
        for end in ends:
            os.close(end)
        for space in spaces:
            remove(space)


def _plug_in(space: str, address: str) -> int:
    """Return the file descriptor of a new device, which stays ours when the device moves to the namespace,
    where it has the namespace's name.

    space: The namespace.
    address: Address of the device there.
    """
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, ATTACH, struct.pack("16sH", space.encode(), TUN_FLAGS))
    ip("link", "set", space, "netns", space)
    ip("-n", space, "address", "add", f"{address}/24", "dev", space)
    ip("-n", space, "link", "set", space, "mtu", str(MTU), "up")
    return end


@contextmanager
def delayed(ends: tuple[int, int], seconds: float) -> Generator[None]:
    """Within the context, carry packets between the ends with a delay each way, while the event loop runs.
    Its timers must be exact.

    ends: File descriptors.
    seconds: Seconds of one way.
    """
    loop = asyncio.get_running_loop()

    def carry(here: int, there: int) -> None:
        """Read a packet from one end, and deliver it to the other after the delay."""
        try:
            packet = os.read(here, MTU)
        except OSError:  # its namespace is gone: another script of this folder has begun
            loop.remove_reader(here)
            return
        loop.call_later(seconds, _deliver, there, packet)

    for here, there in (ends, ends[::-1]):
        loop.add_reader(here, partial(carry, here, there))
    try:
        yield
    finally:
        for end in ends:
            loop.remove_reader(end)


def _deliver(end: int, packet: bytes) -> None:
    """Write a packet to an end; it is lost if the device is full or gone."""
    with suppress(OSError):  # the device is gone, or full: a line may lose packets
        os.write(end, packet)
