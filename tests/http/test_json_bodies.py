"""JSON of request bodies: what is read, and how many turns of the loop are left to others meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import given
from hypothesis import strategies as st

from specsot.service.runtime_env import spare_collector
from specsot_master.http.json_bodies import LARGE_BYTES, JsonRoute, read_json, take_turns

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
STRANGE = (
    b"", b"{", b"[1,]", b"01", b"1.", b"nonsense", b" {} ", b"\xff", b'"\xff"', b'{"\xff":1}', b'"\x01"',
    b"NaN", b"[Infinity,-Infinity]", b"1e999", b"-0", b"-0.0", b"123456789012345678901234567890", b"9" * 5000,
    b"-9223372036854775809", b'{"a":1,"a":2}', b'"\\ud800"', b'"\\udc00"', b'"\\ud83d\\ude00"',
    b'"\xed\xa0\x80"', b"\xef\xbb\xbf{}", "{}".encode("utf-16"),
    b'{"a":' * 100_000, b"[" * 100_000, b"[" * 900 + b"]" * 900,
)  # fmt: skip


def outcome(read: Any, body: bytes) -> str:
    """A value in words that tell 1 from 1.0 and NaN from nothing, or the error that is raised."""
    try:
        return repr(read(body))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    except RecursionError:
        return "nested too deeply"


@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body[:24]))
def test_a_strange_body_is_read_or_refused_as_python_s_json_does(body: bytes) -> None:
    assert outcome(read_json, body) == outcome(json.loads, body)


@given(VALUES, st.booleans())
def test_every_value_is_read_as_python_s_json_reads_it(value: Any, ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    assert outcome(read_json, body) == outcome(json.loads, body)


def application(heard: list[tuple[int, int]], turns: list[int]) -> FastAPI:
    """An application that notes the size of each body, and in which turn of the loop it was read."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/")
    async def hear(body: list[str]) -> None:
        heard.append((len(body[0]), turns[0]))

    app = FastAPI()
    take_turns(app)
    app.include_router(router)
    assert hear
    return app


async def post(app: FastAPI, size: int) -> None:
    body = json.dumps(["x" * size]).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop()

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200

    scope = {
        "type": "http", "method": "POST", "path": "/", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await app(scope, receive, send)


async def heard_of(*sizes: int) -> list[tuple[int, int]]:
    """The bodies of requests that come at once, in the order in which they are read."""
    heard: list[tuple[int, int]] = []
    turns = [0]

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    app = application(heard, turns)
    await asyncio.gather(*(post(app, size) for size in sizes))
    counting.cancel()
    return heard


async def test_between_two_large_bodies_the_loop_is_for_others() -> None:
    heard = await heard_of(*[8 << 20] * 8)
    turns = [turn for _, turn in heard]
    assert len(turns) == 8
    assert all(after > before for before, after in pairwise(turns))
    assert turns[-1] - turns[0] > 2 * len(turns)


async def test_small_bodies_do_not_wait_and_medium_ones_do_not_wait_for_the_largest() -> None:
    largest, middling, small = 8 << 20, 2 * LARGE_BYTES, LARGE_BYTES // 2
    sizes = [size for size, _ in await heard_of(*[largest] * 4, middling, small)]
    assert sizes[0] == small
    assert sizes.index(middling) < 3


async def test_a_request_that_is_cancelled_while_it_waits_blocks_no_other() -> None:
    heard: list[tuple[int, int]] = []
    app = application(heard, [0])
    posts = [asyncio.create_task(post(app, LARGE_BYTES)) for _ in range(4)]
    await asyncio.sleep(0)
    posts[1].cancel()
    await asyncio.wait(posts)
    assert len(heard) == 3


@contextmanager
def usual_collector() -> Generator[None]:
    usual = gc.get_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def test_a_master_s_collector_does_not_look_through_a_body_again_and_again() -> None:
    """Each time costs a part of what has been read so far, while every stream stands still."""
    body = b"[" + b"[]," * 500_000 + b"[]]"
    looked: list[str] = []
    with usual_collector():
        spare_collector()
        gc.callbacks.append(lambda phase, _: looked.append(phase))
        try:
            assert len(read_json(body)) == 500_001
        finally:
            gc.callbacks.pop()
        assert gc.isenabled()
    assert looked.count("start") <= math.ceil(500_001 / 50_000)
