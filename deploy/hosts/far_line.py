"""Simulates two distant hosts: network namespaces joined by a line that delays every packet.

The delay is made by a pair of TUN devices and a timer, for any protocol, since not every kernel has netem.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial

from hosts import FAR_HOSTS, ip, remove_namespace

# TUNSETIFF of <linux/if_tun.h>.
ATTACH = 0x400454CA
# IFF_TUN | IFF_NO_PI of <linux/if_tun.h>.
TUN_FLAGS = 0x1001
# Bytes of the largest packet.
MTU = 1500


@contextmanager
def far_hosts() -> Generator[tuple[int, int]]:
    """Yield the file descriptors of both ends of the line between FAR_HOSTS, whose namespaces exist within
    the context.

    Leftovers of a killed run are removed first. At the end both ends are closed and the namespaces are
    removed, also after an exception.
    """
    spaces = [f"specsot-{host}" for host in FAR_HOSTS]
    ends: list[int] = []
    try:
        for address, space in zip(FAR_HOSTS.values(), spaces):
            remove_namespace(space)  # A killed run may have left it.
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            ends.append(_plug_in(space, address))
        yield ends[0], ends[1]
    finally:
        for end in ends:
            os.close(end)
        for space in spaces:
            remove_namespace(space)


def _plug_in(space: str, address: str) -> int:
    """Return the file descriptor of a new device, which stays ours when the device moves to the namespace,
    where it has the namespace's name.

    Raises OSError if the device cannot be made, CalledProcessError if a command of iproute2 fails.

    space: Name of the namespace.
    address: Address of the device in the namespace.
    """
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, ATTACH, struct.pack("16sH", space.encode(), TUN_FLAGS))
    ip("link", "set", space, "netns", space)
    ip("-n", space, "address", "add", f"{address}/24", "dev", space)
    ip("-n", space, "link", "set", space, "mtu", str(MTU), "up")
    return end


@contextmanager
def delayed(ends: tuple[int, int], seconds: float) -> Generator[None]:
    """Within the context, which yields None, carry packets between the ends with a delay each way, while the
    event loop runs. The loop's timers must be exact.

    Packets that are still on their way at the end of the context are delivered if the event loop continues.

    ends: File descriptors of both ends of the line.
    seconds: Delay of one direction, in seconds.
    """
    loop = asyncio.get_running_loop()

    def carry(source: int, target: int) -> None:
        """Read a packet from one end, and deliver it to the other end after the delay. If the first end is
        gone, stop reading from it.

        source: File descriptor of the end to read from.
        target: File descriptor of the other end.
        """
        try:
            packet = os.read(source, MTU)
        # The namespace is gone, since another script of this folder has started.
        except OSError:
            loop.remove_reader(source)
            return
        loop.call_later(seconds, _deliver, target, packet)

    for source, target in (ends, ends[::-1]):
        loop.add_reader(source, partial(carry, source, target))
    try:
        yield
    finally:
        for end in ends:
            loop.remove_reader(end)


def _deliver(end: int, packet: bytes) -> None:
    """Write a packet to an end; the packet is lost if the device is full or gone.

    end: File descriptor of the end.
    packet: The IP packet.
    """
    # A line may lose packets.
    with suppress(OSError):
        os.write(end, packet)
