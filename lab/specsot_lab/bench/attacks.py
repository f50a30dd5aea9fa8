"""What a hostile client does to a master's doors, one kind of attack at a time, from a process of its own.

`python -m specsot_lab.bench.attacks KIND GRPC HTTP COUNT` attacks until it is ended or COUNT attempts were
made, then prints what came back as one JSON object. The kind `probe` is no attack: a quick call every
PAUSE seconds, whose waits tell how long the master's event loop stood still.

It only attacks addresses of this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from specsot.errors import InvalidRequest
from specsot.v1 import master_pb2, master_pb2_grpc
from specsot_app.bench.stopwatch import Stopwatch
from specsot_lab.bench.clients import spread

PAUSE = 0.02  # seconds between two calls of the probe
PATIENCE = 60.0  # seconds an attacker waits for one answer
LARGE = 8 << 20  # bytes: the largest body that the doors take
SLOW = 1.0  # seconds between two bytes of a slow client
HOST = "127.0.0.1"


@dataclass(slots=True)
class Target:
    """A master's doors, host:port each, and what came of the attempts so far."""

    grpc: str
    http: str
    came: Counter[str] = field(default_factory=Counter[str])
    waits: list[float] = field(default_factory=list[float])


Attempt = Callable[[Target, int], Awaitable[str]]  # returns what came of it


@asynccontextmanager
async def connection(target: Target) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = target.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(path: str, length: int, kind: str = "application/json") -> bytes:
    lines = (f"POST {path} HTTP/1.1", f"Host: {HOST}", f"Content-Type: {kind}", f"Content-Length: {length}")
    return "\r\n".join((*lines, "", "")).encode()


async def post(target: Target, path: str, body: bytes) -> str:
    """The status of one request on a connection of its own."""
    async with connection(target) as (reader, writer):
        with suppress(ConnectionError):  # a door may answer, and close, before it has read everything
            writer.write(head(path, len(body)) + body)
            await writer.drain()
        status = await asyncio.wait_for(reader.readline(), PATIENCE)
        return f"http {status.split()[1].decode()}" if status else "closed"


async def send_ids(target: Target, number: int) -> str:
    """As many token ids as a body holds, each prompt several times over."""
    prompt = [number % 100] * (LARGE // 16 // 2 - 64)
    body = json.dumps({"prompt": [prompt] * 16, "n": 8, "max_tokens": 1}, separators=(",", ":"))
    return await post(target, "/v1/completions", body.encode()[:LARGE])


async def send_text(target: Target, number: int) -> str:
    """A message as long as a body holds."""
    said = f"{number} " + "never mind " * ((LARGE - 512) // 11)
    return await post(target, "/v1/chat/completions", json.dumps({"messages": [message(said)]}).encode())


async def send_form(target: Target, number: int) -> str:
    """Forms that are new each time, and as dear as the limits allow."""
    dice = random.Random(number)
    words = [f"{dice.getrandbits(200):050x}" for _ in range(1024)]
    forms: tuple[dict[str, Any], ...] = (
        {"guided_choice": words},
        {"guided_regex": f"({'|'.join(words[:8])}){{1,50}}[a-z]{{1,{dice.randrange(100, 200)}}}"},
        {"guided_json": nested(dice, 40)},
    )
    asked = {"messages": [message("Say something.")], "max_tokens": 4, **forms[number % len(forms)]}
    return await post(target, "/v1/chat/completions", json.dumps(asked).encode())


def nested(dice: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "pattern": f"[a-z]{{1,{dice.randrange(10, 90)}}}"}
    for level in range(depth):
        schema = {"type": "object", "properties": {f"a{level}": schema, f"b{level}": {"type": "integer"}}}
    return schema


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def send_slow_head(target: Target, number: int) -> str:
    """One good request, then a head that comes byte by byte."""
    async with connection(target) as (reader, writer):
        writer.write(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        return await drip(writer, b"GET /health HTTP/1.1\r\nX-Slow: " + b"a" * 600)


async def send_slow_body(target: Target, number: int) -> str:
    """A body that was promised and comes byte by byte."""
    async with connection(target) as (_, writer):
        writer.write(head("/v1/chat/completions", LARGE))
        return await drip(writer, b" " * 600)


async def drip(writer: asyncio.StreamWriter, data: bytes) -> str:
    try:
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(SLOW)
    except ConnectionError:
        return "closed"
    return "still open"


async def leave_unread(target: Target, number: int) -> str:
    """A long streamed answer of which nothing is read."""
    asked = {"messages": [message(f"Tell me of {number}.")], "stream": True, "max_tokens": 512}
    body = json.dumps(asked | {"ignore_eos": True}).encode()
    async with connection(target) as (_, writer):
        writer.write(head("/v1/chat/completions", len(body)) + body)
        await asyncio.sleep(10 * SLOW)
        return "left"


async def send_garbage(target: Target, number: int) -> str:
    """Bytes that are neither HTTP nor gRPC, to one door or the other."""
    dice, door = random.Random(number), (target.http, target.grpc)[number % 2]
    async with connection(Target("", door)) as (reader, writer):
        with suppress(ConnectionError):
            writer.write(dice.randbytes(dice.choice((10, 1000, 100_000))))
            writer.write_eof()
            await asyncio.wait_for(reader.read(100), PATIENCE)
        return "closed"


class Calls:
    """Calls over one gRPC channel."""

    def __init__(self) -> None:
        self._channel: grpc.aio.Channel | None = None

    def stub(self, target: Target) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(target.grpc)
        return master_pb2_grpc.MasterStub(self._channel)

    async def cancel_at_once(self, target: Target, number: int) -> str:
        """A request that is given up at its first event."""
        limits = master_pb2.Limits(max_new_tokens=64)
        call = self.stub(target).Generate(
            master_pb2.GenerateRequest(prompt=f"Count to {number}.", limits=limits), timeout=PATIENCE
        )
        return await read_one(call)

    async def send_ids(self, target: Target, number: int) -> str:
        """As many token ids as one message holds."""
        asked = master_pb2.GenerateRequest(tokens=[number % 100] * (1 << 20), mode=master_pb2.MODE_DIRECT)
        return await read_one(self.stub(target).Generate(asked, timeout=PATIENCE))

    async def ask_of_others(self, target: Target, number: int) -> str:
        """Cancel and resume what one did not ask."""
        stub, name = self.stub(target), f"req-{number}"
        with suppress(grpc.aio.AioRpcError):
            await stub.Cancel(master_pb2.CancelRequest(request_id=name), timeout=PATIENCE)
        return await read_one(stub.Generate(master_pb2.GenerateRequest(request_id=name), timeout=PATIENCE))

    async def probe(self, target: Target, number: int) -> str:
        """How long the quickest of calls takes."""
        await asyncio.sleep(PAUSE)
        watch = Stopwatch()
        await self.stub(target).GetInfo(master_pb2.GetInfoRequest(), timeout=PATIENCE)
        if number:  # the first one also makes the connection
            target.waits.append(watch.seconds)
        return "answered"


async def read_one(call: Any) -> str:
    """The first event of a stream, then leave it."""
    try:
        event = await call.read()
        return "answered" if isinstance(event, master_pb2.GenerateEvent) else "ended"
    except grpc.aio.AioRpcError as error:
        return error.code().name.lower()
    finally:
        call.cancel()


def attacks() -> dict[str, tuple[Attempt, int]]:
    """By kind; and how many attempts go side by side."""
    calls = Calls()
    return {
        "ids": (send_ids, 2),
        "text": (send_text, 2),
        "forms": (send_form, 4),
        "slow-heads": (send_slow_head, 200),
        "slow-bodies": (send_slow_body, 100),
        "unread": (leave_unread, 8),
        "garbage": (send_garbage, 8),
        "cancels": (calls.cancel_at_once, 8),
        "grpc-ids": (calls.send_ids, 2),
        "others": (calls.ask_of_others, 4),
        "probe": (calls.probe, 1),
    }


KINDS = tuple(name for name in attacks() if name != "probe")


async def attack(kind: str, target: Target, count: int) -> None:
    """Make attempts until there were `count`."""
    (attempt, at_once), numbers = attacks()[kind], itertools.count()

    async def go_on() -> None:
        while (number := next(numbers)) < count:
            try:
                target.came[await attempt(target, number)] += 1
            except (OSError, TimeoutError, grpc.aio.AioRpcError) as error:
                target.came[type(error).__name__] += 1
                await asyncio.sleep(PAUSE)

    await asyncio.gather(*(go_on() for _ in range(min(at_once, count))))


async def attack_until_told(kind: str, target: Target, count: int) -> None:
    """Then tell what came of it, and end the process as it is: attempts under way are left."""
    leaving, attacking = asyncio.Event(), asyncio.ensure_future(attack(kind, target, count))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    attacking.add_done_callback(lambda _: leaving.set())
    await leaving.wait()
    told = {"attempts": sum(target.came.values()), "came": target.came, "waits": spread(target.waits)}
    print(json.dumps(told | {"longest": max(target.waits, default=None)}), flush=True)
    os._exit(0)


def main() -> None:
    kind, at_grpc, at_http, count = sys.argv[1:5]
    if not all(at.startswith("127.") for at in (at_grpc, at_http)):
        raise InvalidRequest("an attack is only made on this machine's own loopback", field="hostile")
    asyncio.run(attack_until_told(kind, Target(at_grpc, at_http), int(count)))


if __name__ == "__main__":
    main()
