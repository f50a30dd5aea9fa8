"""Invariant 8, bad input: whatever bytes and values come, a clear status goes back; the others go on.

The calls are real ones. Seeds are fixed, so what is found stays found.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import grpc
import pytest

from specsot.v1 import fleet_pb2, master_pb2
from tests.conftest import some
from tests.endpoints.front import Front, front, question, stub, told
from tests.master.letters import COUNT, SAYS, finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CLEAR = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,  # a plan without a line
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
PYTHON = re.compile(r"Traceback|object at 0x|<class|Error\(|Exception|\.py\b|google\.protobuf")
SAYS_ANYTHING = {"": "It is so."}
METHODS = ("Generate", "Cancel", "GetInfo")


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends; what it tells meanwhile is thrown away."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code(), await call.details() or ""


def check(found: tuple[grpc.StatusCode, str], sent: object) -> grpc.StatusCode:
    code, details = found
    assert code in CLEAR, (code, details, sent)
    assert not PYTHON.search(details), (details, sent)
    assert len(details) <= 512
    return code


@pytest.mark.parametrize("seed", some(range(4), 0, 1))
async def test_invariant_8_bytes(seed: int) -> None:
    """Good requests with bytes changed, left out and put in; and bytes that never were one."""
    chance = random.Random(seed)
    good = [question(), request_of(chance), master_pb2.CancelRequest(request_id="x")]
    async with front(SAYS_ANYTHING) as one, one.channel() as channel:
        codes = set[grpc.StatusCode]()
        for _ in range(120):
            data = spoiled(chance, chance.choice(good).SerializeToString())
            call = channel.unary_stream(f"/specsot.v1.Master/{chance.choice(METHODS)}")(data, timeout=100)
            codes.add(check(await status_of(call), data))
        assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= codes
        await still_good(one)


def spoiled(chance: random.Random, data: bytes) -> bytes:
    for _ in range(chance.randint(1, 6)):
        at = chance.randint(0, len(data))
        match chance.randint(0, 3):
            case 0:
                data = data[:at] + chance.randbytes(1) + data[at + 1 :]
            case 1:
                data = data[:at] + data[at + chance.randint(1, 5) :]
            case 2:
                data = data[:at] + chance.randbytes(chance.randint(1, 9)) + data[at:]
            case _:
                data = chance.randbytes(chance.randint(0, 40))
    return data


@pytest.mark.parametrize("seed", some(range(4), 0))
async def test_invariant_8_values(seed: int) -> None:
    """Requests that parse, with any values in any of their fields."""
    chance = random.Random(seed)
    async with front(SAYS_ANYTHING) as one, one.channel() as channel:
        codes = set[grpc.StatusCode]()
        for _ in range(120):
            request = request_of(chance)
            codes.add(check(await status_of(stub(channel).Generate(request, timeout=100)), request))
        assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= codes
        await still_good(one)


def request_of(chance: random.Random) -> master_pb2.GenerateRequest:
    """Mostly sensible, for otherwise only the first check would ever be tried."""
    request = master_pb2.GenerateRequest(prompt="What is it?")
    for field in chance.sample(tuple(master_pb2.GenerateRequest.DESCRIPTOR.fields), chance.randint(0, 4)):
        fill(request, field, chance)
    return request


def fill(message: Any, field: Any, chance: random.Random) -> None:
    """Any value of a field's type, often at the edge of it."""
    if field.message_type and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[chance.choice([0, 1, 2**32 - 1])] = chance.choice(NUMBERS)
    elif field.message_type:
        found = getattr(message, field.name)
        part = found.add() if field.is_repeated else found
        part.SetInParent()
        for inner in chance.sample(tuple(field.message_type.fields), min(2, len(field.message_type.fields))):
            fill(part, inner, chance)
    else:
        value = value_of(field, chance)
        if field.is_repeated:
            getattr(message, field.name).extend([value] * chance.choice([1, 2, 70, 300]))
        else:
            setattr(message, field.name, value)


NUMBERS = (0.0, -1.0, 1e308, float("inf"), float("nan"), 0.5)
TEXTS = ("", " ", "x", "x" * 300, "\0", "🎉" * 200, "[END]", "a\nb", "%s{}", "../..", "y" * 100_000)


def value_of(field: Any, chance: random.Random) -> Any:
    kinds = {
        field.TYPE_STRING: TEXTS,
        field.TYPE_BYTES: (b"", b"\xff" * 9),
        field.TYPE_BOOL: (True, False),
        field.TYPE_DOUBLE: NUMBERS,
        field.TYPE_FLOAT: NUMBERS,
        field.TYPE_INT32: (0, 1, -1, 7, 2**31 - 1, -(2**31)),
        field.TYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
        field.TYPE_UINT32: (0, 1, 5, 2**32 - 1),
        field.TYPE_UINT64: (0, 1, 5, 2**64 - 1),
        field.TYPE_ENUM: (0, 1, 2, 99),
    }
    return chance.choice(kinds[field.type])


async def still_good(one: Front) -> None:
    """Somebody else is answered, and nothing of the others is left."""
    client = await one.client()
    assert finished(await told(client, COUNT)).text == SAYS_ANYTHING[""]
    await client.close()
    await one.quiet()
    one.stage.time.advance(1000)
    await one.quiet()
    one.stage.assert_clean()


async def test_invariant_8_a_member_that_talks_nonsense() -> None:
    """On the fleet's stream: bytes that do not parse, a second word without a first, another protocol."""
    nonsense = [
        b"\x0a\xff",
        b"",
        fleet_pb2.JoinRequest(beat=fleet_pb2.Beat()).SerializeToString(),
        fleet_pb2.JoinRequest(register=fleet_pb2.Registration(name="x")).SerializeToString(),
    ]
    async with front() as one, one.channel() as channel:
        running = asyncio.create_task(told(client := await one.client(), COUNT))
        for data in nonsense:
            call = channel.stream_stream("/specsot.v1.Fleet/Join")(iter([data]), timeout=100)
            assert check(await status_of(call), data) is not grpc.StatusCode.OK
        assert finished(await running).text == SAYS["Count"]
        await client.close()
