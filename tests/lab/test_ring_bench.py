"""`specsot bench ring`: a proxy that delays and keeps the order, and a run of a few tokens."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import uvloop

from specsot.core.pages import PageTable
from specsot.errors import SpecsotError, Unavailable
from specsot.members import Range, Stage
from specsot_lab.bench.delay_proxy import DelayProxy
from specsot_lab.bench.ring import (
    METHODS,
    RingMeasurement,
    RingTask,
    TextsDiffer,
    check,
    go,
    measure,
    same,
    set_up,
    table_of,
    wanted,
)
from specsot_lab.bench.ring_fleet import LapProbe, RingFleet, Written, ring_of


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
    assert proxy.carried == 2 * len(sent)
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


async def test_where_nobody_listens_the_connection_ends():
    proxy = DelayProxy(1)
    await proxy.open()
    reader, _ = await connected(proxy)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    await proxy.close()


def written(*texts: tuple[int, ...]) -> Written:
    return Written(texts, 1, 1.0, (1,), (), (0.0,), 0)


def test_different_texts_are_found_out():
    same([written((1, 2, 3)), written((1, 2), (7,))], "ring")
    with pytest.raises(TextsDiffer, match="branch 0"):
        same([written((1, 2, 3)), written((1, 9))], "ring")
    task = RingTask((), ((),), 1, 1, lambda branch, tokens: (5, 6, 7)[:tokens])
    check(task, "plain", written((5, 6)))
    with pytest.raises(TextsDiffer, match="plain decoding"):
        check(task, "both", written((5, 9)))


def test_what_is_wanted_comes_from_the_command_line():
    assert wanted(False) == RingMeasurement()
    assert wanted(True, [5.0], [4], 2, "demo", 7) == RingMeasurement((5.0,), (4,), 2, 7, 6, ("demo",))


@pytest.mark.torch
async def test_two_stages_a_millisecond_apart_write_the_same_by_every_way():
    site, task = set_up("mock", 2, RingMeasurement(tokens=3, branches=2))
    async with ring_of(site, 0.0005) as ring:
        distance = await go(ring, "mock", 2, 0.001, task, 1, lambda: None)
    rows = [distance.row(way) for way in METHODS]
    assert [row["branches"] for row in rows] == [1, 1, 2, 2]
    assert rows[0]["speedup"] == 1.0
    assert all(isinstance(row["wire_bytes_per_token"], int) and row["wire_bytes_per_token"] for row in rows)
    assert all(row["frames_per_lap"] and row["hop_ms"] and len(row["queue_ms"]) == 2 for row in rows)
    assert len(table_of(rows).splitlines()) == 2 + 4


@pytest.mark.torch
async def test_a_ring_that_breaks_ends_the_run_with_a_word():
    site, task = set_up("mock", 2, RingMeasurement(tokens=1000, branches=1))
    async with ring_of(site) as ring:
        writing = asyncio.create_task(ring.write(task.job("plain")))
        while not ring.stages[0].laps:
            await ring.hear()
        await ring.proxies[1].close()
        with pytest.raises(Unavailable, match=r"the ring broke: .*lost"):
            await writing


def test_stages_are_heard_in_the_rings_order_whoever_joined_first():
    ring = RingFleet(set_up("mock", 2, RingMeasurement())[0], 0.0)
    ring.probes += [LapProbe(ring.wake), LapProbe(ring.wake)]
    stages = tuple(Stage(name, name, Range(n, n + 1)) for n, name in enumerate(("late", "early")))
    for probe, name in zip(ring.probes, ("early", "late")):
        probe.formed(SimpleNamespace(you=name, stages=stages, epoch=1), PageTable(1, 16))
    assert ring.stages == ring.probes[::-1]


@pytest.mark.torch
def test_what_was_measured_before_something_breaks_is_kept(tmp_path):
    """Nine stages are too many for the model's eight layers."""
    what = RingMeasurement((0.0,), (2, 9), rounds=1, tokens=1, branches=1, rings=("mock",))
    with pytest.raises(SpecsotError, match="layers"):
        measure(what, tmp_path / "ring.json")
    rows = json.loads((tmp_path / "ring.json").read_text())["rows"]
    assert [(row["stages"], row["way"]) for row in rows] == [(2, way) for way in METHODS]
    assert "| mock" in (tmp_path / "ring.md").read_text()
