"""Clients that go away, stall or come too late; a master that shuts down under them.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from specsot.core.frames import Close
from specsot.core.info import RequestsInfo
from specsot_master.core.inputs import MasterLeaving
from specsot_master.http.calls import ServerSentEvents
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
    """The client goes once something has been written, and no lap is played meanwhile."""
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


async def test_random_ends_leave_nothing_behind(house: Served) -> None:
    """Invariant 5, at this door."""
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

    response = ServerSentEvents({}, endless(), {}, stall=0.01)
    await asyncio.wait_for(response({"type": "http"}, receive, send), 100)
    chunks = endless()
    await anext(chunks)
    await asyncio.wait_for(ServerSentEvents({}, chunks, {}, stall=0.01)({"type": "http"}, receive, send), 100)
    assert gone.is_set()


async def test_long_silences_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    from specsot_master.http import calls

    monkeypatch.setattr(calls, "KEEPALIVE_SECONDS", 0.01)
    sent, enough = list[bytes](), asyncio.Event()

    async def silent() -> AsyncGenerator[dict[str, Any], None]:
        yield {}
        await enough.wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent.count(b": still here\n\n") == 3:
            enough.set()

    async def receive() -> Any:
        await asyncio.Event().wait()

    chunks = silent()
    await ServerSentEvents(await anext(chunks), chunks, {}, stall=5)({"type": "http"}, receive, send)
    assert sent[-1] == b"data: [DONE]\n\n"


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
        await asyncio.wait_for(house.door.close(1), 100)
        with pytest.raises(openai.APIConnectionError):
            await house.openai().models.list()


async def test_the_door_closes_though_a_client_does_not_go() -> None:
    async with served() as house:
        house.going.clear()
        reading = asyncio.create_task(read_events(house, {**LONG, "stream": True}))
        await house.asked()
        await asyncio.wait_for(house.door.close(0.2), 100)
        await asyncio.gather(reading, return_exceptions=True)
        house.going.set()
        await house.quiet()
        house.stage.assert_clean()


async def test_one_clients_end_is_nobody_elses() -> None:
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
