"""What reaches the endpoint as bytes: too many, too slow, of another kind, or no HTTP at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specsot.transport.grpc_channel import PUBLIC_BYTES
from specsot_master.http import server
from specsot_master.http.json_bodies import LARGE_BYTES
from specsot_master.http.middleware import SMALL_BYTES, BodyLimits
from tests.http.house import Served
from tests.master.stage import turn

pytestmark = pytest.mark.timeout(60)

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
SCOPE: dict[str, Any] = {
    "type": "http", "method": "POST", "path": CHAT, "headers": [(b"content-type", b"application/json")]
}  # fmt: skip


async def test_a_body_that_says_it_is_too_large(house: Served) -> None:
    async with house.client() as client:
        answer = await client.post(CHAT, content=b" " * (PUBLIC_BYTES + 1), headers=JSON)
    assert answer.status_code == 413
    assert "larger than 8388608 bytes" in answer.json()["error"]["message"]


async def test_a_body_far_too_large_is_not_even_read(house: Served) -> None:
    size = str(5 * PUBLIC_BYTES).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    assert (await say(house, head + size + b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_does_not_say_so(house: Served) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(PUBLIC_BYTES // 65536 + 2):
            yield b" " * 65536

    async with house.client() as client:
        answer = await client.post(CHAT, content=pieces(), headers=JSON)
    assert answer.status_code == 413


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
async def test_another_kind_of_body(house: Served, kind: str) -> None:
    """Else a page from elsewhere could ask in a visitor's name, without asking leave."""
    async with house.client() as client:
        answer = await client.post(CHAT, content=b'{"messages":[]}', headers={"content-type": kind})
    assert answer.status_code == 415
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_without_a_body_the_path_decides(house: Served) -> None:
    async with house.client() as client:
        assert (await client.put("/metrics")).status_code == 405
        assert (await client.post(CHAT)).status_code == 400


async def test_a_page_from_elsewhere_is_not_granted_anything(house: Served) -> None:
    async with house.client() as client:
        asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        answer = await client.options(CHAT, headers=asked)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers


class Recorder:
    """An application behind the intake, and a client whose body never ends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.called = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.called = True

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def header(self, name: str) -> bytes:
        return dict(self.sent[0]["headers"])[name.encode()]


async def test_a_body_that_never_ends() -> None:
    app = Recorder()

    async def receive() -> Any:
        await asyncio.Event().wait()

    await asyncio.wait_for(BodyLimits(app, lambda _: 100, body_seconds=0.01)(SCOPE, receive, app.send), 100)
    assert app.sent[0]["status"] == 408
    assert not app.called


async def test_bodies_have_one_budget_and_give_it_back() -> None:
    """What has come of a body counts until its request is over; what was only announced does not."""
    going, app = asyncio.Event(), Recorder()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await going.wait()

    intake = BodyLimits(slow, lambda _: 100, budget_bytes=150)
    first = asyncio.create_task(intake(*call(b"x" * 100, app)))
    await asyncio.sleep(0)
    await intake(*call(b"x" * 51, app))
    assert (app.sent[0]["status"], app.header("retry-after"), app.header("connection")) == (
        429,
        b"1",
        b"close",
    )
    assert b"rate_limit_exceeded" in app.sent[1]["body"]
    app.sent.clear()
    second = asyncio.create_task(intake(*call(b"x" * 50, app)))
    await asyncio.sleep(0)
    going.set()
    await asyncio.gather(first, second)
    await asyncio.gather(*(intake(*call(b"x" * 75, app)) for _ in range(2)))
    assert app.sent == []


async def test_large_bodies_leave_room_for_small_ones() -> None:
    going, app = asyncio.Event(), Recorder()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await going.wait()

    large = LARGE_BYTES + 1
    intake = BodyLimits(slow, lambda _: large, budget_bytes=SMALL_BYTES + large)
    first = asyncio.create_task(intake(*call(b"x" * large, app)))
    await asyncio.sleep(0)
    await intake(*call(b"x" * large, app))
    assert app.sent[0]["status"] == 429
    app.sent.clear()
    second = asyncio.create_task(intake(*call(b"x" * LARGE_BYTES, app)))
    await asyncio.sleep(0)
    going.set()
    await asyncio.gather(first, second)
    assert app.sent == []


async def test_an_oversized_body_is_drained_and_holds_no_memory() -> None:
    """A client that is answered and cut off while it still sends sees a reset connection and no status."""
    app, pieces = Recorder(), [b"x" * 100] * 5
    scope, _, send = call(b"", app)
    intake = BodyLimits(app, lambda _: 1000, budget_bytes=250)

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    await intake(scope, receive, send)
    assert (app.sent[0]["status"], pieces, app.called) == (429, [], False)
    await intake(*call(b"x" * 250, app))
    assert app.called


def call(body: bytes, app: Recorder) -> tuple[Any, Any, Any]:
    """One with a body that comes as a whole."""

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return SCOPE | {"headers": [*SCOPE["headers"], (b"content-length", b"100")]}, receive, app.send


async def test_a_plain_completion_is_no_larger_than_what_its_model_can_hold(house: Served) -> None:
    async with house.client() as client:
        body = b'{"prompt": [' + b"1," * (1 << 20) + b"1" + b" " * (1 << 20) + b"]}"
        answer = await client.post("/v1/completions", content=body, headers=JSON)
        assert answer.status_code == 413
        assert f"larger than {(256 << 10) + (2048 << 10)} bytes" in answer.text
        assert (await client.post(CHAT, content=body, headers=JSON)).status_code == 400


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
async def test_a_compressed_body_is_refused_as_such(house: Served, coding: str) -> None:
    async with house.client() as client:
        answer = await client.post(CHAT, content=b"\x1f\x8b", headers={**JSON, "content-encoding": coding})
    assert answer.status_code == 415
    assert f"not be encoded as {coding}" in answer.json()["error"]["message"]


async def test_a_client_that_goes_while_its_body_comes() -> None:
    app = Recorder()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    await BodyLimits(app, lambda _: 100)(SCOPE, receive, app.send)
    assert not app.called
    assert app.sent == []


async def say(house: Served, said: bytes) -> bytes:
    """Everything that comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.endpoint.port)
    writer.write(said)
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 100)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x-long: " + b"y" * 3_000_000 + b"\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nzz",
    ],
    ids=["TLS", "HTTP/2", "long header", "negative length", "two lengths"],
)
async def test_what_is_no_http_of_ours(house: Served, said: bytes) -> None:
    status = (await say(house, said)).split(b"\r\n")[0].split()[1:2]
    assert status in ([], [b"400"], [b"415"], [b"431"], [b"505"])
    assert (await house.get("/version")).status_code == 200


async def test_another_http_is_answered_once(house: Served) -> None:
    told = await say(house, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 505")
    assert told.count(b"HTTP/1.1 ") == 2, "the status line, and the words that say what is spoken here"


async def test_a_connection_that_never_asks(house: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.05)
    assert await say(house, b"GET / HT") == b""
    assert (await house.get("/version")).status_code == 200


async def test_responses_do_not_name_the_server(house: Served) -> None:
    assert "server" not in (await house.get("/version")).headers


async def test_every_head_has_its_time(house: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the first of a connection: a good request, then a stalled one, keeps nothing open."""
    good = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.05)
    assert (await say(house, good + b"GET / HT")).startswith(b"HTTP/1.1 200")
    owing = b"GET /version HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nx"
    assert (await say(house, owing)).startswith(b"HTTP/1.1 200")


async def test_only_what_a_client_owes_is_timed(house: Served) -> None:
    """The beginning, every head that has begun; not the answer, nor the pause before the next head."""
    house.going.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", house.endpoint.port)
    connections: set[Any] = house.endpoint._server.server_state.connections
    while not connections:
        await turn()
    (connection,) = connections
    assert connection._owing is not None
    body = b'{"messages": [{"role": "user", "content": "What is it?"}]}'
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % (CHAT.encode(), len(body)) + body)
    await house.asked()
    assert connection._owing is None
    house.going.set()
    assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
    assert connection._owing is None
    writer.write(b"GET /ver")
    while connection._owing is None:
        await turn()
    timer = connection._owing
    writer.write(b"sion HTTP/1.1\r\nhost")
    while b"host" not in connection.conn.trailing_data[0]:
        await turn()
    assert connection._owing is timer, "one for the whole head, however slowly it comes"
    writer.write(b": x\r\nconnection: close\r\n\r\n")
    assert b"HTTP/1.1 200" in await reader.read()
    assert timer.cancelled()
    writer.close()


LONG = b"x-long: " + b"y" * 33_000
TOO_LONG, NO_HTTP = "larger than 32768 bytes", "no HTTP/1.1 request"
BOTH = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + LONG + b"\r\n\r\n", 431, TOO_LONG),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + LONG, 431, TOO_LONG),
        (b"GET /?" + b"y" * 33_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431, TOO_LONG),
        (b"nonsense\r\n\r\n", 400, NO_HTTP),
        (b"GET / HTTP/1.1\r\n\r\n", 400, NO_HTTP),
        (BOTH + b"content-type: application/json\r\n\r\n0\r\n\r\n", 400, "cannot be used together"),
        (BOTH.replace(b"POST", b"GET") + b"\r\n0\r\n\r\n", 400, "cannot be used together"),
        (b"GET / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 501, "chunked is supported"),
    ],
)
async def test_what_http_itself_refuses_has_our_shape_and_ends_the_connection(
    house: Served, said: bytes, status: int, words: str
) -> None:
    answer = await say(house, said + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * said.endswith(b"\n"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/health", "/version", "/", "/v1/models", "/ring", "/metrics", "/info"])
async def test_head_is_answered_wherever_get_is(house: Served, path: str) -> None:
    async with house.client() as client:
        full, head = await client.get(path), await client.head(path)
    assert head.status_code == full.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == full.headers["content-type"]


async def test_no_browser_guesses_what_an_answer_is(house: Served) -> None:
    async with house.client() as client:
        answers = [await client.get("/health"), await client.get("/"), await client.post(CHAT)]
    assert [one.headers.get_list("x-content-type-options") for one in answers] == [["nosniff"]] * 3
