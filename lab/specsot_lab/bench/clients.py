"""Clients that ask a master all the time, each over a connection of its own, until all has been asked."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from specsot.errors import SpecsotError
from specsot.events import BranchText, Event, Finished, MergedText, Reason, SkeletonText
from specsot.params import Ask
from specsot.transport.grpc_client import MasterClient
from specsot_app.fleet.options import ClientOptions
from specsot_bench.results import Stopwatch, now

MOMENT = 0.001  # seconds: texts closer together came with one step

Spread = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What one client heard of one request. texts: when text came. tokens: those of the answer.

    error: what the request ended with instead of an answer.
    """

    begun: float
    ended: float
    texts: tuple[float, ...] = ()
    tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds from the call to the first text."""
        return self.texts[0] - self.begun

    @property
    def between(self) -> list[float]:
        """Seconds from step to step that brought text."""
        gaps = (later - sooner for sooner, later in itertools.pairwise(self.texts))
        return [gap for gap in gaps if gap > MOMENT]

    @property
    def per_token(self) -> float:
        """Mean seconds of a token behind the first."""
        return (self.texts[-1] - self.texts[0]) / max(self.tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """Requests of so many clients at once, and the seconds all of them took together."""

    clients: int
    seconds: float
    heard: tuple[RequestTimes, ...]

    @property
    def answered(self) -> list[RequestTimes]:
        """Only these count for rates and waits."""
        return [one for one in self.heard if one.error is None and one.texts]

    @property
    def errors(self) -> dict[str, int]:
        """How many requests ended without an answer, by why; an answer without a text is none."""
        found = Counter(one.error or "no text" for one in self.heard if one.error or not one.texts)
        return dict(sorted(found.items()))

    def row(self) -> dict[str, Any]:
        answered = self.answered
        return {
            "name": f"clients {self.clients}",
            "clients": self.clients,
            "requests": len(self.heard),
            "answered": len(answered),
            "errors": self.errors,
            "seconds": round(self.seconds, 3),
            "requests_per_second": round(len(answered) / self.seconds, 3),
            "tokens_per_second": round(sum(one.tokens for one in answered) / self.seconds, 1),
            "first_text_seconds": spread(one.first for one in answered),
            "between_texts_seconds": spread(itertools.chain(*(one.between for one in answered))),
            "per_token_seconds": spread(one.per_token for one in answered if one.tokens > 1),
        }


def spread(values: Iterable[float]) -> Spread:
    """Median and 99th percentile, each one of the values; None where there are none."""
    listed: Sequence[float] = list(values)
    if not listed:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(listed, (50, 99), method="inverted_cdf")
    return {"p50": round(float(p50), 6), "p99": round(float(p99), 6)}


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
    begun = now()
    texts = list[float]()
    last = None
    error: str | None = None
    try:
        async for numbered in master.generate(ask):
            last = numbered.event
            if has_text_event(last):
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


def has_text_event(event: Event) -> bool:
    return isinstance(event, SkeletonText | BranchText | MergedText) and bool(event.text)
