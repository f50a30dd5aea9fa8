"""How long a message takes from member to member and back: `python -m specsot_lab.bench.hops`.

Transports take turns, so that whatever else this machine does falls on all of them.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import torch

from specsot.core.frames import Frame
from specsot.transport.grpc_links import SERVICE, GrpcDialer, RingService
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Dialer, Inbox, Link
from specsot.transport.wire.carry import encode_carry
from specsot.transport.zmq_links import Sockets, ZmqDialer, ZmqHost
from specsot_app.bench.core.pairing import order
from specsot_app.bench.stopwatch import Stopwatch
from specsot_lab.bench.clock import each_of

SIZES = (1 << 10, 1 << 16, 1 << 20)
ROUNDS, TURN, WARM = 20, 10, 10
TRANSPORTS = ("grpc unix", "grpc tcp", "zmq ipc", "zmq curve")


class HopEnd:
    """One member: what comes in, and its link to the other."""

    def __init__(self, inbox: Inbox, link: Link) -> None:
        self.inbox, self.link = inbox, link


@asynccontextmanager
async def pair(transport: str) -> AsyncGenerator[tuple[HopEnd, HopEnd]]:
    """Two members of this process, each with a link to the other."""
    with tempfile.TemporaryDirectory() as folder:
        doors, inboxes, dialers, addresses = [], [], [], []
        for name in ("one", "two"):
            listen = f"unix:{folder}/{name}" if transport.split()[1] in ("unix", "ipc") else "127.0.0.1:0"
            inbox, sockets = Inbox(), Sockets()
            host = ZmqHost(listen, inbox, sockets)
            door = await open_server(listen, {SERVICE: RingService(inbox, name, host).attach})
            dialer: Dialer = ZmqDialer(name, sockets) if transport.startswith("zmq") else GrpcDialer(name)
            doors.append((door, host, sockets))
            inboxes.append(inbox)
            dialers.append(dialer)
            addresses.append(listen if listen.startswith("unix") else f"127.0.0.1:{door.port}")
        links = [await dialers[n].dial(addresses[1 - n], 1) for n in range(2)]
        yield HopEnd(inboxes[0], links[0]), HopEnd(inboxes[1], links[1])
        await asyncio.gather(*(link.close() for link in links))
        for door, host, sockets in doors:
            await host.close()
            sockets.close()
            await door.close(0)


async def trip(one: HopEnd, two: HopEnd, message: Frame) -> float:
    """Seconds there and back."""
    watch = Stopwatch()
    await one.link.send(message)
    await two.link.send((await two.inbox.get()).message)
    await one.inbox.get()
    return watch.seconds


async def measure(message: Frame) -> dict[str, float]:
    """The median of a round trip, by transport."""
    pairs = {transport: pair(transport) for transport in TRANSPORTS}
    ends = {transport: await one.__aenter__() for transport, one in pairs.items()}
    times: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
    for number in range(ROUNDS + WARM // TURN):
        for transport in order(TRANSPORTS, number):
            one, two = ends[transport]
            taken = [await trip(one, two, message) for _ in range(TURN)]
            times[transport] += taken if number else []
    for one in pairs.values():
        await one.__aexit__(None, None, None)
    return {transport: statistics.median(taken) for transport, taken in times.items()}


def encoding(message: Frame) -> float:
    """Seconds the event loop spends on writing a message down, at the median."""

    def encode() -> None:
        for request in encode_carry(message):
            request.SerializeToString()

    return statistics.median(each_of(encode, ROUNDS))


async def threads() -> float:
    """Seconds that handing work to a thread and back takes, at the median."""
    taken: list[float] = []
    for _ in range(ROUNDS * TURN):
        watch = Stopwatch()
        await asyncio.to_thread(int)
        taken.append(watch.seconds)
    return statistics.median(taken)


async def main() -> None:
    sys.stdout.write(
        f"{'bytes':>8}  {'  '.join(f'{name:>10}' for name in TRANSPORTS)}   (as multiples of grpc tcp)\n"
    )
    for size in SIZES:
        message = Frame(1, 0, hidden=torch.zeros(size // 1024, 256))
        medians = await measure(message)
        shares = "  ".join(f"{medians[transport] / medians['grpc tcp']:10.2f}" for transport in TRANSPORTS)
        sys.stdout.write(f"{size:8}  {shares}   grpc tcp {medians['grpc tcp'] * 1e3:.2f} ms")
        sys.stdout.write(f", encoding {encoding(message) * 1e3:.2f} ms\n")
    sys.stdout.write(f"a thread and back: {await threads() * 1e3:.2f} ms\n")


if __name__ == "__main__":
    from specsot.service.runtime_env import set_runtime_defaults

    set_runtime_defaults()
    asyncio.run(main())
