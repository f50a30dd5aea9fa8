"""Clients that go away, stall or come too late; a master that shuts down under them.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from starlette.requests import Request

from specsot.core.frames import Close
from specsot.core.info import RequestsInfo
from specsot.errors import Overloaded
from specsot_master.core.inputs import MasterLeaving
from specsot_master.http.calls import PING, EventStyle, ServerSentEvents, begin_stream
from tests.http.house import Served, served
from tests.master.letters import SAYS
from tests.master.stage import turn

pytestmark = pytest.mark.timeout(60)

CHAT = "/v1/chat/completions"
COUNT: Any = [{"role": "user", "content": "Count."}]
LONG = {"messages": COUNT, "max_tokens": 400, "specsot": {"mode": "direct"}}
PLANNED = {"messages": [{"role": "user", "content": "Letters?"}], "specsot": {"mode": "sot"}}


def closed(house: Served) -> int:
    return sum(isinstance(order, Close) for order in house.stage.ring.orders)


def standing(house: Served) -> RequestsInfo:
    return house.stage.engine.requests()


async def begun(house: Served) -> None:
    """Something has been written."""
    while not any(player.written for player in house.stage.ring.live.values()):
        await turn()


async def leave(house: Served, asking: asyncio.Task[Any]) -> None:
    """The client goes once something has been written, and no step is played meanwhile."""
    await begun(house)
    house.going.clear()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await house.quiet()


async def test_openais_client_drops_its_stream(house: Served) -> None:
    """The sequence is closed in the ring, not written to its end."""
    stream = await house.openai().chat.completions.create(
        model="demo", messages=COUNT, max_tokens=400, stream=True, extra_body={"specsot": {"mode": "direct"}}
    )
    told = [await anext(stream) for _ in range(3)]
    house.going.clear()
    await stream.close()
    await house.quiet()
    assert told[-1].choices[0].finish_reason is None
    assert closed(house) == 1
    house.going.set()


@pytest.mark.parametrize("body", [LONG, PLANNED, {**LONG, "n": 4}], ids=["direct", "planned", "several"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_goes_away(house: Served, body: dict[str, Any], stream: bool) -> None:
    asking = asyncio.create_task(house.post(CHAT, {**body, "stream": stream}))
    await leave(house, asking)
    assert closed(house) >= body.get("n", 1)
    house.going.set()


async def test_a_client_goes_away_while_it_waits_for_its_turn() -> None:
    from dataclasses import replace

    from tests.http.house import CONFIG

    async with served(config=replace(CONFIG, live=1)) as house:
        house.going.clear()
        first, second = (asyncio.create_task(house.post(CHAT, LONG)) for _ in range(2))
        while (standing(house).waiting, standing(house).running) != (1, 1):
            await turn()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        while standing(house).waiting:
            await turn()
        house.going.set()
        assert (await first).status_code == 200
        await house.quiet()
        house.stage.assert_clean()


async def test_a_seed_client_goes_away(house: Served) -> None:
    body = {"prompt": "Count.", "enable_parallel": False}
    asking = asyncio.create_task(house.post("/generate", body))
    await leave(house, asking)
    assert closed(house) == 1
    house.going.set()


async def test_random_ends_leave_no_state(house: Served) -> None:
    """Invariant 5, at this endpoint."""
    import random

    rng = random.Random(5)

    async def end_somehow() -> None:
        body = rng.choice([LONG, PLANNED, {**LONG, "n": 3}])
        asking = asyncio.create_task(house.post(CHAT, {**body, "stream": rng.random() < 0.5}))
        for _ in range(rng.randrange(200)):
            await turn()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    for _ in range(10):
        await asyncio.gather(*(end_somehow() for _ in range(10)))
    await house.quiet()
    assert (standing(house).waiting, standing(house).running, house.metrics.branches) == (0, 0, 0)


async def test_a_client_that_stops_reading_is_dropped() -> None:
    """Invariant 7: the stream is closed, and with it the request."""
    gone = asyncio.Event()

    async def endless() -> AsyncGenerator[dict[str, Any], None]:
        try:
            while True:
                yield {"x": "y" * 1000}
        finally:
            gone.set()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    response = ServerSentEvents(there({}), endless(), {}, stall_seconds=0.01)
    await asyncio.wait_for(response({"type": "http"}, receive, send), 100)
    chunks = endless()
    await anext(chunks)
    response = ServerSentEvents(there({}), chunks, {}, stall_seconds=0.01)
    await asyncio.wait_for(response({"type": "http"}, receive, send), 100)
    assert gone.is_set()


def there(chunk: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
    """A first chunk that has come."""
    future = asyncio.get_running_loop().create_future()
    future.set_result(chunk)
    return future


@dataclass
class SilentStream:
    """One stream whose chunks wait until three pings have been sent; its client leaves when `left` is set.

    place: how many chunks come before the silence.
    """

    place: int
    error: Exception | None = None
    ping: bytes = PING
    sent: list[bytes] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        try:
            for number in range(2):
                if number == self.place:
                    await self.enough.wait()
                    if self.error:
                        raise self.error
                yield {"number": number}
        finally:
            self.closed = True

    async def send(self, message: Any) -> None:
        self.sent.append(message.get("body", b""))
        if self.sent.count(self.ping) == 3:
            self.enough.set()

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def run(self) -> None:
        scope = {"type": "http"}
        style = EventStyle(ping=self.ping)
        begun = await begin_stream(Request(scope, self.receive), self.chunks(), {}, style, ping_every=0.01)
        await asyncio.wait_for(begun(scope, self.receive, self.send), 60)


@pytest.mark.parametrize("place", [0, 1], ids=["before the first chunk", "after it"])
@pytest.mark.parametrize("ping", [PING, b"event: ping\ndata: {}\n\n"])
async def test_long_silences_are_broken_by_pings(place: int, ping: bytes) -> None:
    stream = SilentStream(place, ping=ping)
    await stream.run()
    chunks = [b'data: {"number":0}\n\n', b'data: {"number":1}\n\n']
    assert stream.sent == [b"", *chunks[:place], *[ping] * 3, *chunks[place:], b"data: [DONE]\n\n"]


@pytest.mark.parametrize("place", [0, 1], ids=["before the first chunk", "after it"])
async def test_what_goes_wrong_after_a_ping_is_an_event(place: int) -> None:
    stream = SilentStream(place, error=Overloaded("the queue is full"))
    await stream.run()
    assert b"the queue is full" in stream.sent[-2]
    assert stream.closed


async def test_what_goes_wrong_before_a_ping_is_raised() -> None:
    stream = SilentStream(0, error=Overloaded("the queue is full"))
    stream.enough.set()
    with pytest.raises(Overloaded):
        await stream.run()
    assert stream.closed
    assert not stream.sent


async def test_a_client_may_leave_a_stream_that_only_pings() -> None:
    stream = SilentStream(0, ping=b"never")
    running = asyncio.create_task(stream.run())
    while b"never" not in stream.sent:
        await turn()
    stream.ping = b"not counted"
    stream.left.set()
    await running
    assert stream.closed


@pytest.mark.parametrize(
    ("path", "body", "ping"),
    [
        (CHAT, LONG, ": ping"),
        ("/v1/completions", {"prompt": "Count.", "max_tokens": 9}, ": ping"),
        ("/v1/responses", {"input": "Count.", "max_output_tokens": 9}, ": ping"),
        ("/v1/messages", {"messages": COUNT, "max_tokens": 9}, "event: ping"),
    ],
)
async def test_every_stream_pings_while_nothing_is_written(
    path: str, body: dict[str, Any], ping: str
) -> None:
    """The steps go on only when three pings have come."""
    async with served(SAYS, ping_every=0.02) as house, house.client() as client:
        house.going.clear()
        lines = list[str]()
        async with client.stream("POST", path, json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if lines.count(ping) == 3:
                    house.going.set()
        pinged = [n for n, line in enumerate(lines) if line == ping]
        following = {lines[n + 1] for n in pinged}
        assert following == {'data: {"type":"ping"}' if "event" in ping else ""}
        said = [line for line in lines if line.startswith("data: {") and "ping" not in line]
        assert len(said) > 2
        assert all(json.loads(line.removeprefix("data: ")) for line in said)


async def read_events(house: Served, body: dict[str, Any]) -> list[Any]:
    """Every event of a stream, as JSON or "[DONE]"."""
    async with house.client() as client, client.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_master_that_shuts_down_lets_answers_finish(house: Served) -> None:
    house.going.clear()
    reading = asyncio.create_task(read_events(house, {**LONG, "stream": True}))
    await house.asked()
    draining = asyncio.create_task(house.desk.drain(30))
    await turn()
    answer = await house.post(CHAT, LONG)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the master is shutting down")
    assert (await house.get("/health")).json()["status"] == "leaving"
    house.going.set()
    told = await reading
    assert told[-1] == "[DONE]"
    assert told[-2]["choices"][0]["finish_reason"] == "stop"
    assert await draining


async def test_answers_that_do_not_finish_in_time_end_with_an_error() -> None:
    async with served() as house:
        house.going.clear()
        reading = asyncio.create_task(read_events(house, {**LONG, "stream": True}))
        whole = asyncio.create_task(house.post(CHAT, LONG))
        while standing(house).running < 2:
            await turn()
        assert not await house.desk.drain(0)
        house.stage.engine.handle(MasterLeaving("the master is shutting down"))
        assert await house.desk.drain(60)
        told = await reading
        assert (told[-1], told[-2]["error"]["code"]) == ("[DONE]", "unavailable")
        assert (await whole).status_code == 503
        await asyncio.wait_for(house.endpoint.close(1), 100)
        with pytest.raises(openai.APIConnectionError):
            await house.openai().models.list()


async def test_the_endpoint_closes_though_a_client_does_not_go() -> None:
    async with served() as house:
        house.going.clear()
        reading = asyncio.create_task(read_events(house, {**LONG, "stream": True}))
        await house.asked()
        await asyncio.wait_for(house.endpoint.close(0.2), 100)
        await asyncio.gather(reading, return_exceptions=True)
        house.going.set()
        await house.quiet()
        house.stage.assert_clean()


async def test_the_end_of_one_client_ends_no_other() -> None:
    async with served(SAYS) as house:
        tasks = [asyncio.create_task(house.post(CHAT, LONG)) for _ in range(6)]
        await begun(house)
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        kept = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert {answer.json()["choices"][0]["message"]["content"] for answer in kept} == {SAYS["Count"]}
        assert len(kept) == 3
        await house.quiet()
        house.stage.assert_clean()
