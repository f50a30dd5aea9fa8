"""Clients that ask a master all the time, each over a connection of its own, until all has been asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

from specsot.errors import SpecsotError
from specsot.events import BranchText, Event, Finished, MergedText, Reason, SkeletonText
from specsot.params import Ask
from specsot.transport.grpc_client import MasterClient
from specsot_app.bench.stopwatch import Stopwatch, now
from specsot_app.fleet.options import ClientOptions
from specsot_lab.bench.latencies import LoadLevel, RequestTimes

Asks = Callable[[int], Ask]

OPEN = ClientOptions()  # a master that wants to be shown nothing


async def ask_at_once(
    address: str, clients: int, numbers: Iterator[int], ask: Asks, trust: ClientOptions = OPEN
) -> LoadLevel:
    """Whichever client is free asks the question of the next number, until there is none."""
    async with connected(address, clients, trust) as masters:
        watch = Stopwatch()
        heard = await asyncio.gather(*(ask_on(master, numbers, ask) for master in masters))
        seconds = watch.seconds
    return LoadLevel(clients, seconds, tuple(one for some in heard for one in some))


@asynccontextmanager
async def connected(address: str, clients: int, trust: ClientOptions) -> AsyncGenerator[list[MasterClient]]:
    """Raises Unavailable."""
    async with AsyncExitStack() as stack:
        masters: list[MasterClient] = []
        for _ in range(clients):
            masters.append(await trust.connect(address))
            stack.push_async_callback(masters[-1].close)
        yield masters


async def ask_on(master: MasterClient, numbers: Iterator[int], ask: Asks) -> list[RequestTimes]:
    return [await ask_one(master, ask(number)) for number in numbers]


async def ask_one(master: MasterClient, ask: Ask) -> RequestTimes:
    """One request, listened to until it ends, however it does. Nothing is tried again."""
    begun, texts, last = now(), list[float](), None
    error: str | None = None
    try:
        async for numbered in master.generate(ask):
            last = numbered.event
            if brings_text(last):
                texts.append(now())
    except SpecsotError as failure:
        error = type(failure).__name__
    ended = now()
    if not isinstance(last, Finished):
        return RequestTimes(begun, ended, tuple(texts), error=error or "no end")
    if last.reason not in (Reason.STOP, Reason.LENGTH):
        error = last.reason.value
    written = last.statistics.completion_tokens - last.statistics.heading_tokens
    return RequestTimes(begun, ended, tuple(texts), written, error)


def brings_text(event: Event) -> bool:
    """Something that a reader sees grow."""
    return isinstance(event, SkeletonText | BranchText | MergedText) and bool(event.text)
