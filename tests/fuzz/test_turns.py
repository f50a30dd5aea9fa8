"""Bodies made to cost much: what one turn of the loop does for them is counted in calls, not in time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests.http.house import Served, served

pytestmark = pytest.mark.timeout(120)

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MOST = 20_000  # calls in one turn; a usual question takes some 2,000
HI = [{"role": "user", "content": "What is it?"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ids": (PLAIN, {"prompt": [7] * 400_000, "n": 128}),
    "a wrong id": (PLAIN, {"prompt": [[7] * 2000 + [-1]] * 64}),
    "long text": (PLAIN, {"prompt": "x " * 500_000}),
    "stops": (CHAT, {"messages": HI, "stop": ["x"] * 400_000}),
    "names": (CHAT, {"messages": HI, "specsot": {"tools": ["x"] * 400_000}}),
    "choices": (CHAT, {"messages": HI, "guided_choice": ["x"] * 400_000}),
    "messages": (CHAT, {"messages": HI * 50_000}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}] * 100_000}]}),
    "biases": (CHAT, {"messages": HI, "logit_bias": {str(key): 1 for key in range(100_000)}}),
    "unknown fields": (CHAT, {"messages": [], **{f"x{key}": 1 for key in range(100_000)}}),
}


@contextmanager
def turns_counted() -> Generator[list[int]]:
    """Calls of Python and C in each turn meanwhile."""
    turns, run = [0], asyncio.Handle._run

    def turn(handle: asyncio.Handle) -> None:
        turns.append(0)
        run(handle)

    def count(frame: FrameType, event: str, argument: Any) -> None:
        turns[-1] += event in ("call", "c_call")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", turn)
        sys.setprofile(count)
        try:
            yield turns
        finally:
            sys.setprofile(None)


async def raw(house: Served, path: str, body: bytes) -> bytes:
    """By hand: a client's own work is not counted as the server's."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.endpoint.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    told = await reader.read()
    writer.close()
    return told


@pytest.mark.parametrize("name", BODIES)
async def test_no_body_makes_a_turn_long(name: str) -> None:
    path, body = BODIES[name]
    said = json.dumps(body, separators=(",", ":")).encode()
    async with served() as house:
        await raw(house, path, b"{}")  # what is made once is made
        with turns_counted() as turns:
            answer = await raw(house, path, said)
        assert answer.startswith(b"HTTP/1.1 4"), answer[:300]
        assert max(turns) < MOST
        await house.quiet()
