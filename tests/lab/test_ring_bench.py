"""`specsot bench ring`: a proxy that delays and keeps the order, and a run of a few tokens."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from specsot.members import Tap
from specsot.params import Ask
from specsot.transport import grpc_links
from specsot.transport.grpc_channel import RING_BYTES, Keepalive, Terms, reach
from specsot.transport.grpc_links import SERVICE, GrpcDialer, RingService
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Inbox, Lost
from specsot_app.cli import main
from specsot_lab.bench.delay_proxy import DelayProxy
from specsot_lab.bench.ring import WAYS, AnswersDiffer, ask_all


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


@pytest.fixture
async def proxy():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = DelayProxy(server.sockets[0].getsockname()[1])
    await proxy.open()
    yield proxy
    await proxy.close()
    server.close()


async def connected(proxy: DelayProxy):
    host, port = proxy.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_everything_comes_back_later_in_order_and_all_at_once(proxy):
    proxy.delay = 0.05
    reader, writer = await connected(proxy)
    loop = asyncio.get_running_loop()
    began, sent = loop.time(), bytes(range(256)) * 2000
    for start in range(0, len(sent), 1000):
        writer.write(sent[start : start + 1000])
    assert await reader.readexactly(len(sent)) == sent
    assert loop.time() - began >= 0.1
    proxy.delay = 0.0
    writer.write(b"again")
    assert await reader.readexactly(5) == b"again"


def test_what_is_delayed_by_less_than_a_loop_can_tell_arrives_all_the_same():
    """uvloop's timers are whole milliseconds, and may be early."""

    async def talk() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        proxy = DelayProxy(server.sockets[0].getsockname()[1], delay=0.0004)
        await proxy.open()
        reader, writer = await connected(proxy)
        for _ in range(20):
            writer.write(b"once")
            assert await asyncio.wait_for(reader.readexactly(4), 60) == b"once"
        await proxy.close()
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk())


async def test_without_a_listener_the_connection_ends():
    proxy = DelayProxy(1)
    await proxy.open()
    reader, _ = await connected(proxy)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    await proxy.close()


async def test_a_narrow_line_carries_no_more_bytes_a_second(proxy):
    """Both ways of all its connections: 200 kB there, and back while the rest still comes."""
    narrow = DelayProxy(proxy._target, rate=1e6)
    await narrow.open()
    reader, writer = await connected(narrow)
    loop = asyncio.get_running_loop()
    began = loop.time()
    writer.write(bytes(200_000))
    await reader.readexactly(200_000)
    assert loop.time() - began >= 0.2
    await narrow.close()


@pytest.mark.torch
@pytest.mark.parametrize("answer", [0.5, 60.0])
async def test_what_is_large_gets_through_a_narrow_line_unless_pings_are_to_be_answered_at_once(
    answer, monkeypatch
):
    """They wait behind it."""
    import torch

    keepalive = Keepalive(every=0.2, answer=answer)
    monkeypatch.setattr(grpc_links, "reach", partial(reach, keepalive=keepalive))
    inbox = Inbox()
    service = RingService(inbox, "there")
    endpoint = await open_server("127.0.0.1:0", {SERVICE: service.attach}, Terms(RING_BYTES, keepalive))
    line = DelayProxy(endpoint.port, rate=2e6)
    await line.open()
    link = await GrpcDialer("here", inbox).dial(line.address, 1)
    tap = Tap(1, 0, torch.ones(500, 1000))
    await link.send(tap)
    came = (await inbox.get()).message
    assert isinstance(came, Lost if answer < 1 else Tap), came
    await link.close()
    await line.close()
    await endpoint.close(0)


@pytest.mark.torch
async def test_a_text_that_drafts_change_is_an_error():
    async def answer(ask: Ask) -> Any:
        return SimpleNamespace(text=ask.drafter, statistics=None)

    with pytest.raises(AnswersDiffer, match="the answer to 'Why' differs"):
        await ask_all(answer, ["Why"], 96, 1, lambda: None)


@pytest.mark.torch
def test_whole_answers_of_every_way_are_kept_if_a_later_ring_breaks(tmp_path):
    """Nine stages are too many for the model's eight layers."""
    asked = ["bench", "ring", "--rtt", "1", "--mbit", "10000", "--stages", "2", "--stages", "9"]
    assert main([*asked, "--answer-tokens", "64", "--output", str(tmp_path / "ring.json")]) != 0
    told = json.loads((tmp_path / "ring.json").read_text())
    assert told["settings"]["answer_tokens"] == 64
    rows = told["rows"]
    assert [(row["stages"], row["mbit"], row["way"]) for row in rows] == [(2, 10000, way) for way in WAYS]
    assert [row["of_plain"] for row in rows[:1]] == [1.0]
    assert [row["plan_seconds"] is None for row in rows] == [True, True, False, False]
    assert all(row["tokens"] and row["seconds"] for row in rows)
    table = (tmp_path / "ring.md").read_text()
    assert len(table.splitlines()) == 2 + 4
    assert "| plain" in table
