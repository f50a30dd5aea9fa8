"""`specsot bench ring`: a proxy that delays and keeps the order, and a run of a few tokens."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import uvloop

from specsot.core.frames import Frame, Result
from specsot.errors import InvalidRequest, SpecsotError, Unavailable
from specsot.members import Range, Stage, Tap
from specsot.transport import grpc_links
from specsot.transport.grpc_channel import RING_BYTES, Keepalive, Terms, reach
from specsot.transport.grpc_links import SERVICE, GrpcDialer, RingService
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Inbox, Lost
from specsot_lab.bench.delay_proxy import DelayProxy
from specsot_lab.bench.ring import (
    METHODS,
    RingMeasurement,
    RingPlace,
    TextsDiffer,
    check_equal_texts,
    check_expected,
    measure,
    measure_ways,
    measurement_of,
    rows_of,
    table_of,
    with_own_hosts,
)
from specsot_lab.bench.ring_answers import ask_all, table_of_answers
from specsot_lab.bench.ring_fleet import Line, RingFleet, StepProbe, StepTimes, Written, answers_of, ring_of
from specsot_lab.bench.ring_sites import RingTask, plan_questions, set_up, small_weights


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


async def test_without_a_listener_the_connection_ends():
    proxy = DelayProxy(1)
    await proxy.open()
    reader, _ = await connected(proxy)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    await proxy.close()


def written(*texts: tuple[int, ...]) -> Written:
    return Written(texts, 1, 1.0, (1,), (), (0.0,), 0)


def test_on_separate_hosts_no_frame_waits_and_no_stages_share_compute():
    """Two frames beside each other take twice as long at either stage, and wait for 0.2 s each."""
    alone = StepTimes(1, 1.0, (0.1, 0.3))
    met = StepTimes(1, 1.6, (0.2, 0.6), alone=False)
    other = StepTimes(7, 1.0, (0.5, 0.5), alone=False)  # nobody knows what it takes alone
    run = Written(((1,),), 4, 2.1, (3,), (alone, met, met, other), (0.0, 0.4), 9)
    hosted = with_own_hosts(run)
    assert [step.seconds for step in hosted.steps] == [(0.1, 0.3), (0.1, 0.3), (0.1, 0.3), (0.5, 0.5)]
    assert hosted.queued == (0.0, 0.0)
    assert sum(step.elapsed for step in hosted.steps) == pytest.approx(5.2 - 0.8 - 0.4)
    assert hosted.seconds == pytest.approx(2.1 * 4.0 / 5.2)
    still = replace(run, steps=(alone,), queued=(0.0, 0.0))
    assert with_own_hosts(still) == still
    assert with_own_hosts(written((1,))) == written((1,)), "no step, nothing to compute from"


def test_a_probe_knows_which_frames_overlapped_with_others():
    probe = StepProbe(lambda: None)
    for number in (1, 2):
        probe.launched(Frame(1, number), 0.0)
    for number, now in ((1, 1.0), (2, 2.0)):
        probe.returned(Result(1, number), now)
    probe.launched(Frame(1, 3), 2.0)
    probe.returned(Result(1, 3), 3.0)
    assert [step.alone for step in probe.steps] == [False, False, True]


def test_different_sequences_are_detected():
    check_equal_texts([written((1, 2, 3)), written((1, 2), (7,))], "ring")
    with pytest.raises(TextsDiffer, match="branch 0"):
        check_equal_texts([written((1, 2, 3)), written((1, 9))], "ring")
    task = RingTask((), ((),), 1, 1, lambda branch, tokens: (5, 6, 7)[:tokens])
    check_expected(task, "plain", written((5, 6)))
    with pytest.raises(TextsDiffer, match="plain decoding"):
        check_expected(task, "both", written((5, 9)))


def test_what_is_wanted_comes_from_the_command_line():
    assert measurement_of(False) == RingMeasurement()
    asked = measurement_of(True, [5.0], [4], 2, "model", [7], [10.0, 100.0])
    assert asked == RingMeasurement((5.0,), (4,), 2, (7,), 6, ("model",), (10.0, 100.0))
    assert [(place.rtt, place.mbit) for place in asked.plan()] == [(5.0, 10.0), (5.0, 100.0)]
    assert asked.plan()[0].line == Line(0.0025, 1.25e6)
    longer = RingMeasurement((0.0, 50.0), (2,), tokens=(5, 8), rings=("model",))
    assert [place.tokens for place in longer.plan()] == [15, 24, 5, 8], "more where steps are short"


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
async def test_two_stages_a_millisecond_apart_write_the_same_by_every_way():
    site, task = set_up("mock", 2, 2, 3, small_weights())
    place = RingPlace("mock", 2, 1.0, 10_000.0)
    async with ring_of(site, place.line) as ring:
        distance = await measure_ways(ring, place, task, 1, lambda: None)
    both = rows_of(distance)
    rows, own = both[::2], both[1::2]
    assert [row["way"] for row in own] == [f"{way}, own hosts" for way in METHODS]
    assert own[0]["speedup"] == 1.0
    assert all(own["tokens_per_second"] >= row["tokens_per_second"] for own, row in zip(own, rows))
    assert [row["branches"] for row in rows] == [1, 1, 2, 2]
    assert rows[0]["speedup"] == 1.0
    assert all(isinstance(row["wire_bytes_per_token"], int) and row["wire_bytes_per_token"] for row in rows)
    assert all(row["frames_per_step"] and row["hop_ms"] and len(row["queue_ms"]) == 2 for row in rows)
    assert len(table_of(both).splitlines()) == 2 + 8
    assert " 10000 |" in table_of(both)


@pytest.mark.full
@pytest.mark.torch
async def test_whole_answers_are_written_the_same_with_drafts_and_without():
    """Two questions are asked. The mock writes a plan's first choices: what counts is that both ways are
    compared.
    """
    site, _ = set_up("mock", 2, 2, 3, small_weights())
    async with answers_of(site, Line()) as answer:
        runs = await ask_all(
            answer,
            {"stages": 2, "rtt_ms": 0.0, "mbit": None},
            plan_questions(small_weights().base),
            64,
            1,
            lambda: None,
        )
    rows = runs.rows()
    assert {len(answers) for answers in runs.runs.values()} == {2}
    assert [row["way"] for row in rows] == list(METHODS)
    assert rows[0]["of_plain"] == 1.0
    assert all(row["tokens"] and row["seconds"] for row in rows)
    assert len(table_of_answers(rows).splitlines()) == 2 + 4


def test_whole_answers_alone_need_a_number_of_tokens():
    what = measurement_of(False, only="answers")
    assert what.rings == ("answers",)
    with pytest.raises(InvalidRequest, match="answer-tokens"):
        measure(what, None)


@pytest.mark.torch
async def test_a_ring_that_breaks_ends_the_run_with_a_word():
    site, task = set_up("mock", 2, 1, 1000, small_weights())
    async with ring_of(site, Line()) as ring:
        writing = asyncio.create_task(ring.write(task.job("plain")))
        while not ring.stages[0].steps:
            await ring.wait_for_news()
        await ring.hosts.proxies[1].close()
        with pytest.raises(Unavailable, match=r"the ring broke: .*lost"):
            await writing


def test_stages_are_read_in_ring_order_whatever_order_they_joined_in():
    ring = RingFleet(set_up("mock", 2, 1, 1, small_weights())[0], Line())
    ring.hosts.probes += [StepProbe(ring.wake), StepProbe(ring.wake)]
    stages = tuple(Stage(name, name, Range(n, n + 1)) for n, name in enumerate(("late", "early")))
    for probe, name in zip(ring.hosts.probes, ("early", "late")):
        probe.formed(SimpleNamespace(you=name, stages=stages, epoch=1), SimpleNamespace())
    assert ring.stages == ring.hosts.probes[::-1]


@pytest.mark.torch
def test_what_was_measured_before_something_breaks_is_kept(tmp_path):
    """Nine stages are too many for the model's eight layers."""
    what = RingMeasurement((0.0,), (2, 9), rounds=1, tokens=(1,), branches=1, rings=("mock",))
    with pytest.raises(SpecsotError, match="layers"):
        measure(what, tmp_path / "ring.json")
    rows = json.loads((tmp_path / "ring.json").read_text())["rows"]
    ways = [way for each in METHODS for way in (each, f"{each}, own hosts")]
    assert [(row["stages"], row["way"]) for row in rows] == [(2, way) for way in ways]
    assert "| mock" in (tmp_path / "ring.md").read_text()
