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

# Seconds. Texts closer together came with one step. Untuned.
MOMENT = 0.001  # seconds: texts closer together came with one step

Spread = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What one client received of one request.

    begun, ended: when the request was sent, and when its last event came, in seconds of one clock. texts:
        when text came. tokens: those of the answer, headings left out. error: what the request ended with
        instead of an answer; None: it was answered.
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
        """Return the seconds from step to step that brought text; texts closer together than MOMENT came with
        one step.
        """
        gaps = (later - sooner for sooner, later in itertools.pairwise(self.texts))
        return [gap for gap in gaps if gap > MOMENT]

    @property
    def per_token(self) -> float:
        """Return the mean seconds of a token after the first."""
        return (self.texts[-1] - self.texts[0]) / max(self.tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """Requests of so many clients at once.

    clients: their number. seconds: that all requests took together. heard: the times of each request.
    """

    clients: int
    seconds: float
    heard: tuple[RequestTimes, ...]

    @property
    def answered(self) -> list[RequestTimes]:
        """Return the requests that were answered, which alone count for rates and waits."""
        return [request for request in self.heard if request.error is None and request.texts]

    @property
    def errors(self) -> dict[str, int]:
        """Return how many requests ended without an answer, by reason; an answer without a text is none."""
        found = Counter(
            request.error or "no text" for request in self.heard if request.error or not request.texts
        )
        return dict(sorted(found.items()))

    def row(self) -> dict[str, Any]:
        """Return the level as a row of figures: requests per second, and waits in seconds."""
        answered = self.answered
        return {
            "name": f"clients {self.clients}",
            "clients": self.clients,
            "requests": len(self.heard),
            "answered": len(answered),
            "errors": self.errors,
            "seconds": round(self.seconds, 3),
            "requests_per_second": round(len(answered) / self.seconds, 3),
            "tokens_per_second": round(sum(request.tokens for request in answered) / self.seconds, 1),
            "first_text_seconds": spread(request.first for request in answered),
            "between_texts_seconds": spread(itertools.chain(*(request.between for request in answered))),
            "per_token_seconds": spread(request.per_token for request in answered if request.tokens > 1),
        }


def spread(values: Iterable[float]) -> Spread:
    """Return median and 99th percentile, each one of the values; None for both if there are no values."""
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
    """Return the level of so many clients: whichever client is free asks the question of the next number,
    until there is none.

    address: of the master. clients: their number. numbers: of the requests. ask: makes a request from its
        number. trust: TLS and token.
    """
    async with connected(address, clients, trust) as masters:
        watch = Stopwatch()
        heard = await asyncio.gather(*(ask_on(master, numbers, ask) for master in masters))
        seconds = watch.seconds
    return LoadLevel(
        clients, seconds, tuple(request for client_requests in heard for request in client_requests)
    )


@asynccontextmanager
async def connected(address: str, clients: int, trust: ClientOptions) -> AsyncGenerator[list[MasterClient]]:
    """Yield so many clients of a master, which are closed at the end of the context. Raises Unavailable."""
    async with AsyncExitStack() as stack:
        masters: list[MasterClient] = []
        for _ in range(clients):
            masters.append(await trust.connect(address))
            stack.push_async_callback(masters[-1].close)
        yield masters


async def ask_on(master: MasterClient, numbers: Iterator[int], ask: Asks) -> list[RequestTimes]:
    """Return the times of the requests that one client makes, one after another, until the
    numbers run out.
    """
    return [await ask_one(master, ask(number)) for number in numbers]


async def ask_one(master: MasterClient, ask: Ask) -> RequestTimes:
    """Return the times of one request, listened to until it ends, whether or not it is answered. Nothing is
    retried.
    """
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
    """Return whether an event brought text to the user."""
    return isinstance(event, SkeletonText | BranchText | MergedText) and bool(event.text)
