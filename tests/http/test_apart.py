"""API processes answer as the master's own process does; the end of either side is the other's to handle."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest
import pytest_asyncio

from specsot.errors import Unavailable
from specsot.params import Ask, Limits
from specsot_master.core.request import RequestState
from specsot_master.core.ring.ring_state import Caller, EngineConfig
from specsot_master.http.processes.messages import (
    END,
    TEXT,
    Entries,
    OpenRequest,
    PauseStream,
)
from specsot_master.http.processes.remote_requests import MAX_WAITING_EVENTS, RemoteRequests
from specsot_master.http.processes.request_host import RequestHost
from specsot_master.master import ServingState
from tests.http.apart import Apart, served_apart
from tests.http.house import CONFIG, INFO, Served, served
from tests.master.stage import turn

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

CHAT = "/v1/chat/completions"
COUNT: Any = [{"role": "user", "content": "Count."}]
LONG: Any = {"messages": COUNT, "max_tokens": 400, "specsot": {"mode": "direct"}}
PLANNED: Any = {"messages": [{"role": "user", "content": "Letters?"}], "specsot": {"mode": "sot"}, "seed": 1}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[Served]:
    async with served() as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart() -> AsyncIterator[Apart]:
    async with served_apart() as one:
        yield one


def lasting(text: str) -> str:
    """Without ids, times and rates, which differ from call to call."""
    text = re.sub(r"[0-9a-f]{24}", "ID", text)
    text = re.sub(r'"(created|created_at|completed_at)": ?[0-9.]+', r'"\1": 0', text)
    text = re.sub(r'"(seconds[a-z_]*|tokens_per_second)": ?[-+e0-9.]+', r'"\1": 0', text)
    return re.sub(r'"phases": ?{[^}]*}', '"phases": {}', text)


def joined(text: str) -> list[str]:
    """The events of a stream, whose pieces of text may be joined differently."""
    content = "".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', text))
    kinds = [re.sub(r'"content":"(?:[^"\\]|\\.)*"', "TEXT", line) for line in text.splitlines() if line]
    return [content, *dict.fromkeys(kinds)]


CALLS: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, {"messages": COUNT, "max_tokens": 20, "seed": 3}),
    "sampled": (CHAT, {"messages": COUNT, "max_tokens": 20, "seed": 3, "temperature": 1}),
    "logprobs": (CHAT, {"messages": COUNT, "max_tokens": 3, "seed": 3, "logprobs": True, "top_logprobs": 2}),
    "several": (CHAT, {"messages": COUNT, "max_tokens": 5, "seed": 3, "n": 3}),
    "planned": (CHAT, PLANNED),
    "tools": (CHAT, {"messages": COUNT, "max_tokens": 8, "seed": 3, "tools": TOOLS}),
    "schema": (CHAT, {"messages": COUNT, "seed": 3, "response_format": {"type": "json_object"}}),
    "stop": (CHAT, {"messages": COUNT, "max_tokens": 50, "seed": 3, "stop": [" "]}),
    "completion": ("/v1/completions", {"prompt": ["One", [40, 41]], "seed": 3, "echo": True, "logprobs": 1}),
    "messages": ("/v1/messages", {"messages": COUNT, "max_tokens": 9}),
    "responses": ("/v1/responses", {"input": "Count.", "max_output_tokens": 9}),
    "generate": ("/generate", {"prompt": "Count.", "enable_parallel": False, "max_new_tokens": 9}),
    "unknown model": (CHAT, {"messages": COUNT, "model": "other"}),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "word " * 40_000}]}),
    "too many tokens": (CHAT, {"messages": COUNT, "max_tokens": 4_000}),
    "empty": (CHAT, {"messages": []}),
    "wrong drafter": (CHAT, {"messages": COUNT, "specsot": {"drafter": "model"}}),
    "no json": (CHAT, None),
    "huge limit": (CHAT, {"messages": COUNT, "max_tokens": 10**30}),
    "huge branches": (CHAT, {"messages": COUNT, "specsot": {"mode": "sot", "max_branch_tokens": 10**25}}),
    "huge seed": (CHAT, {"messages": COUNT, "seed": 10**40, "max_tokens": 3}),
    "huge bias": (CHAT, {"messages": COUNT, "logit_bias": {"99999999999": 1}, "max_tokens": 3}),
    "half a character": (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}),
    "a model of half a character": (CHAT, {"messages": COUNT, "model": "\ud800"}),
    "a role of half a character": (CHAT, {"messages": [{"role": "\ud800", "content": "x"}]}),
    "a stop of half a character": (CHAT, {"messages": COUNT, "stop": "\ud800"}),
    "a choice of half a character": (CHAT, {"messages": COUNT, "guided_choice": ["\ud800"]}),
    "a user of half a character": (CHAT, {"messages": COUNT, "user": "\ud800", "max_tokens": 3}),
    "count": ("/v1/messages/count_tokens", {"messages": COUNT}),
    "tokenize": ("/tokenize", {"messages": COUNT}),
}


@pytest.mark.parametrize("call", CALLS)
async def test_both_answer_the_same(house: Served, apart: Apart, call: str) -> None:
    path, body = CALLS[call]
    # Escaped to ASCII, since halves of characters cannot be sent otherwise.
    sent = {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
    async with house.client() as first, apart.client() as second:
        one, other = await first.post(path, **sent), await second.post(path, **sent)
    assert (other.status_code, other.headers.keys()) == (one.status_code, one.headers.keys())
    assert lasting(other.text) == lasting(one.text)


@pytest.mark.parametrize("call", ["chat", "logprobs", "planned", "messages", "responses", "unknown model"])
async def test_both_stream_the_same(house: Served, apart: Apart, call: str) -> None:
    path, body = CALLS[call]
    asked = {**body, "stream": True}
    one, other = await house.post(path, asked), await apart.post(path, asked)
    assert other.status_code == one.status_code
    assert joined(lasting(other.text)) == joined(lasting(one.text))


@pytest.mark.parametrize("path", ["/health", "/ring", "/v1/models", "/version", "/info", "/"])
async def test_both_report_the_same_state(house: Served, apart: Apart, path: str) -> None:
    one, other = await house.get(path), await apart.get(path)
    assert other.status_code == one.status_code
    without_requests = [re.sub(r'"requests":.*', "", re.sub(r"[0-9.]+,?", "", a.text)) for a in (one, other)]
    assert without_requests[1] == without_requests[0]


async def test_metrics_count_the_requests_of_all_processes(apart: Apart) -> None:
    asked = [apart.post(CHAT, {"messages": COUNT, "max_tokens": 2}) for _ in range(4)]
    before = (await apart.get("/metrics")).text
    await asyncio.gather(*asked)
    counts = [
        int(float(re.findall(r"e2e_request_latency_seconds_count\S* ([0-9.]+)", text)[0]))
        for text in (before, (await apart.get("/metrics")).text)
    ]
    assert counts[1] == counts[0] + 4


async def test_a_client_that_goes_away_ends_its_request(apart: Apart) -> None:
    asking = asyncio.create_task(apart.post(CHAT, LONG | {"stream": True}))
    await apart.asked()
    apart.going.clear()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await apart.quiet()
    apart.going.set()
    apart.stage.assert_clean()


async def test_a_full_queue_is_reported_with_its_retry_time() -> None:
    async with served_apart(config=EngineConfig(**vars_of(CONFIG) | {"live": 1, "queue": 1})) as house:
        house.going.clear()
        waiting = [asyncio.create_task(house.post(CHAT, LONG)) for _ in range(2)]
        while house.stage.engine.requests().waiting < 1:
            await turn()
        refused = await house.post(CHAT, LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        house.going.set()
        assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}


def vars_of(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__slots__}


async def test_a_process_that_ends_loses_its_requests_alone() -> None:
    """Its requests are cancelled, the requests of others continue, and another process takes its place."""
    async with served_apart() as house:
        house.going.clear()
        asking = [asyncio.create_task(house.post(CHAT, LONG)) for _ in range(2)]
        while house.stage.engine.requests().running < 2:
            await turn()
        house.processes[0].kill()
        while house.stage.engine.requests().running > 1:
            await turn()
        house.going.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        kinds = sorted(type(one).__name__ for one in answers)
        assert kinds == ["RemoteProtocolError", "Response"] or kinds == ["ReadError", "Response"]
        while len(house.processes) < 3:
            await turn()
        assert (await house.post(CHAT, {"messages": COUNT, "max_tokens": 2})).status_code == 200
        await house.quiet()
        house.stage.assert_clean()


async def test_connections_are_shared_evenly() -> None:
    async with served_apart(count=3) as house:
        clients = [house.client() for _ in range(6)]
        for client in clients:
            assert (await client.get("/version")).status_code == 200
        server: Any = house.endpoint
        assert [one.num_connections for one in server._processes] == [2, 2, 2]
        for client in clients:
            await client.aclose()
        while any(one.num_connections for one in server._processes):
            await turn()


async def test_without_its_engine_a_process_answers_503() -> None:
    sent: list[object] = []
    requests = RemoteRequests(Recorder(sent), NoPrompts(), 2048)  # type: ignore[arg-type]
    reading = asyncio.create_task(anext(requests.generate(Ask("Hi", mode="direct"))))
    asking = asyncio.create_task(requests.state())
    await turn()
    requests.on_lost()
    for ended in (reading, asking):
        with pytest.raises(Unavailable, match="has ended"):
            await ended
    with pytest.raises(Unavailable, match="has ended"):
        await anext(requests.generate(Ask("Hi", mode="direct")))


async def test_a_stream_pauses_while_its_client_does_not_read() -> None:
    sent: list[object] = []
    requests = RemoteRequests(Recorder(sent), NoPrompts(), 2048)  # type: ignore[arg-type]
    events = requests.generate(Ask("Hi", mode="direct"))
    first = asyncio.create_task(anext(events))
    await turn()
    entries = [(0, number, TEXT, (number, "x", 1)) for number in range(MAX_WAITING_EVENTS + 1)]
    requests.handle(Entries(entries))
    assert [one for one in sent if isinstance(one, PauseStream)] == [PauseStream(0, True)]
    read = [await first] + [await anext(events) for _ in range(MAX_WAITING_EVENTS)]
    assert [one.number for one in read] == [*range(MAX_WAITING_EVENTS + 1)]
    assert [one for one in sent if isinstance(one, PauseStream)][1:] == [PauseStream(0, False)]
    await events.aclose()


async def test_what_a_busy_process_does_not_read_waits_in_the_engine() -> None:
    """Once it reads again, the pieces of text that have waited come as one."""
    async with served() as house:
        sent: list[Any] = []
        host = RequestHost(house.desk, lambda: ServingState(INFO, True), house.metrics.written)
        host.link = Recorder(sent, blocked=True)  # type: ignore[assignment]
        ask = Ask("Count.", mode="direct", limits=Limits(9))
        host.handle(OpenRequest(7, ask, Caller(), True, None, {}))
        await house.asked()
        await house.quiet()
        assert sent == []
        host.link.blocked = False
        host.on_unblocked()
        while not sent:
            await turn()
        [message] = sent
        kinds = [kind for _, _, kind, _ in message.entries]
        assert {stream for stream, *_ in message.entries} == {7}
        assert kinds.count(TEXT) == 1
        assert kinds[-1] == END


async def test_an_ended_request_leaves_nothing_to_the_garbage_collector(
    request: pytest.FixtureRequest,
) -> None:
    """A search through the cycles of some hundred requests would stop all streams for 50 ms."""
    # Requests of earlier tests in this process may wait for the collector.
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    async with served() as house:
        sent: list[Any] = []
        host = RequestHost(house.desk, lambda: ServingState(INFO, True), house.metrics.written)
        host.link = Recorder(sent)  # type: ignore[assignment]
        host.handle(OpenRequest(7, Ask("Count.", mode="direct", limits=Limits(9)), Caller(), True, None, {}))
        while not any(kind == END for message in sent for _, _, kind, _ in message.entries):
            await turn()
        assert await house.desk.drain(1.0)
        await turn()
        assert [one for one in gc.get_objects() if type(one) is RequestState] == []


class Recorder:
    """A link that keeps what is sent."""

    def __init__(self, sent: list[Any], blocked: bool = False) -> None:
        self.send = sent.append
        self.blocked = blocked


class NoPrompts:
    """Prompts that encode nothing."""

    tags = None

    def chat(self, messages: Any) -> tuple[int, ...]:
        return ()


async def test_a_stream_of_a_hundred_clients_is_complete(apart: Apart) -> None:
    """Every client gets its whole answer, over both processes."""

    async def ask(client: httpx.AsyncClient) -> str:
        answer = await client.post(CHAT, json=LONG | {"max_tokens": 30, "stream": True, "seed": 3})
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)

    async with apart.client(limits=httpx.Limits(max_connections=100)) as client:
        texts = await asyncio.gather(*(ask(client) for _ in range(100)))
    assert len(set(texts)) == 1
    assert texts[0]


class Ended:
    """A process that has ended as it was started."""

    async def wait(self) -> int:
        return 1

    def kill(self) -> None:
        raise ProcessLookupError


async def test_processes_that_cannot_start_are_an_error() -> None:
    async def spawn(link: Any, handover: Any) -> Ended:
        return Ended()

    with pytest.raises(Unavailable, match="could not be started: one of them has ended"):
        async with served_apart(spawn=spawn):
            pass
