"""Clients that send requests to a master without a pause, each over a connection of its own, until all
requests have been sent.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from specsot.errors import SpecsotError
from specsot.events import BranchText, Event, Finished, MergedText, Reason, SkeletonText
from specsot.params import Ask
from specsot.transport.grpc_client import MasterClient
from specsot_app.fleet.options import ClientOptions
from specsot_bench.results import Stopwatch, now

# Seconds. Texts that arrive closer together came with one step. Untuned.
MOMENT: Final = 0.001

# The median and the 99th percentile, by "p50" and "p99"; None without values.
Percentiles = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What one client received of one request. Times are seconds of one clock.

    sent_at: When the request was sent.
    ended_at: When its last event arrived.
    text_times: When each text arrived; () if none did.
    tokens: Number of tokens of the answer, headings left out; 0 if the request did not end regularly.
    error: Why the request ended without an answer; None if it was answered.
    """

    sent_at: float
    ended_at: float
    text_times: tuple[float, ...] = ()
    tokens: int = 0
    error: str | None = None

    @property
    def first_text_seconds(self) -> float:
        """Return the seconds from sending the request to its first text. There must be one."""
        return self.text_times[0] - self.sent_at

    @property
    def step_gaps(self) -> list[float]:
        """Return the seconds between successive steps that brought text; [] if all text came with one step.
        Texts closer together than MOMENT came with one step.
        """
        gaps = (later - sooner for sooner, later in itertools.pairwise(self.text_times))
        return [gap for gap in gaps if gap > MOMENT]

    @property
    def seconds_per_token(self) -> float:
        """Return the mean seconds of a token after the first. With fewer than two tokens, return the seconds
        from the first text to the last.
        """
        return (self.text_times[-1] - self.text_times[0]) / max(self.tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """The requests of a number of simultaneous clients.

    clients: Number of clients.
    seconds: Seconds that all requests took together.
    requests: The times of each request.
    """

    clients: int
    seconds: float
    requests: tuple[RequestTimes, ...]

    @property
    def answered(self) -> list[RequestTimes]:
        """Return the requests that were answered, the only ones that count for rates and waits."""
        return [request for request in self.requests if request.error is None and request.text_times]

    @property
    def errors(self) -> dict[str, int]:
        """Return the number of requests that ended without an answer, by reason; {} if all were answered. A
        request that ended regularly but brought no text is counted as "no text".
        """
        reasons = Counter(
            request.error or "no text" for request in self.requests if request.error or not request.text_times
        )
        return dict(sorted(reasons.items()))

    def row(self) -> dict[str, Any]:
        """Return the level as a row of figures: requests and tokens per second, and waits in seconds. The
        entry "errors" counts failed requests by reason.

        Waits are the median and the 99th percentile ("p50", "p99"), and None without values; only requests
        that were answered count. "requests" is the number that was sent, "answered" that of the answered
        ones. Requests that brought fewer than two tokens have no time per token. Raises ZeroDivisionError if
        the level took no time.
        """
        answered = self.answered
        return {
            "name": f"clients {self.clients}",
            "clients": self.clients,
            "requests": len(self.requests),
            "answered": len(answered),
            "errors": self.errors,
            "seconds": round(self.seconds, 3),
            "requests_per_second": round(len(answered) / self.seconds, 3),
            "tokens_per_second": round(sum(request.tokens for request in answered) / self.seconds, 1),
            "first_text_seconds": percentiles(request.first_text_seconds for request in answered),
            "between_texts_seconds": percentiles(
                itertools.chain(*(request.step_gaps for request in answered))
            ),
            "per_token_seconds": percentiles(
                request.seconds_per_token for request in answered if request.tokens > 1
            ),
        }


def percentiles(values: Iterable[float]) -> Percentiles:
    """Return median and 99th percentile, each of them one of the values, in microsecond precision. Both are
    None if there are no values.

    values: The measured values, in any order.

    The keys are "p50" and "p99". A percentile is never interpolated.
    """
    listed: Sequence[float] = list(values)
    if not listed:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(listed, (50, 99), method="inverted_cdf")
    return {"p50": round(float(p50), 6), "p99": round(float(p99), 6)}


# Makes a request from its number.
Asks = Callable[[int], Ask]

# The options of a client that shows neither a token nor a certificate.
OPEN: Final = ClientOptions()


async def ask_at_once(
    address: str, clients: int, numbers: Iterator[int], ask: Asks, trust: ClientOptions = OPEN
) -> LoadLevel:
    """Return the times of the requests of a number of simultaneous clients. A client that is free sends the
    request of the next number, until no number is left.

    address: The master's address.
    clients: Number of clients, each with a connection of its own.
    numbers: Numbers of the requests, shared by all clients.
    ask: Makes a request from its number.
    trust: TLS files and token with which the clients connect.

    `seconds` of the result starts when all clients are connected and ends with the last request. A request
    that fails has an error in its times. Raises Unavailable if a client cannot connect. Without numbers the
    result has no requests.
    """
    async with connected(address, clients, trust) as masters:
        watch = Stopwatch()
        times = await asyncio.gather(*(ask_on(master, numbers, ask) for master in masters))
        seconds = watch.seconds
    return LoadLevel(
        clients, seconds, tuple(request for client_requests in times for request in client_requests)
    )


@asynccontextmanager
async def connected(address: str, clients: int, trust: ClientOptions) -> AsyncGenerator[list[MasterClient]]:
    """Yield connected clients of a master, which are closed at the end of the context.

    address: The master's address.
    clients: Number of clients.
    trust: TLS files and token with which the clients connect.

    Raises Unavailable if the master does not answer.

    The clients connect one after the other. If a client cannot connect, the clients before it are closed.
    With 0 clients the list is empty.
    """
    async with AsyncExitStack() as stack:
        masters: list[MasterClient] = []
        for _ in range(clients):
            masters.append(await trust.connect(address))
            stack.push_async_callback(masters[-1].close)
        yield masters


async def ask_on(master: MasterClient, numbers: Iterator[int], ask: Asks) -> list[RequestTimes]:
    """Return the times of the requests that one client sends, one after another, until the numbers run out;
    [] if none was left for it.

    master: The client's connection.
    numbers: Numbers of the requests, shared with other clients.
    ask: Makes a request from its number.
    """
    return [await ask_one(master, ask(number)) for number in numbers]


async def ask_one(master: MasterClient, ask: Ask) -> RequestTimes:
    """Return the times of one request, which is read until it ends. An error is recorded and not raised;
    nothing is retried.

    master: The client's connection.
    ask: The request.

    The error is the class of the exception, such as "Overloaded"; "no end" if the events ended without the
    last one; or the reason for which the answer ended, if that is neither a stop nor the limit of tokens.
    Events without text do not count as text.
    """
    sent_at = now()
    text_times = list[float]()
    last_event = None
    error: str | None = None
    try:
        async for numbered in master.generate(ask):
            last_event = numbered.event
            if has_text_event(last_event):
                text_times.append(now())
    except SpecsotError as failure:
        error = type(failure).__name__
    ended_at = now()
    if not isinstance(last_event, Finished):
        return RequestTimes(sent_at, ended_at, tuple(text_times), error=error or "no end")
    if last_event.reason not in (Reason.STOP, Reason.LENGTH):
        error = last_event.reason.value
    written = last_event.statistics.completion_tokens - last_event.statistics.heading_tokens
    return RequestTimes(sent_at, ended_at, tuple(text_times), written, error)


def has_text_event(event: Event) -> bool:
    """Return whether an event brought text to the user. An event of a text kind whose text is empty did not.

    event: An event of a request.
    """
    return isinstance(event, SkeletonText | BranchText | MergedText) and bool(event.text)
