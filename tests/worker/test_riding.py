"""What only rides along through a stage: drafts and taps of others, and the news that the drafter is lost."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specsot.core.deadline import Deadline
from specsot.core.frames import Close, Drafts, Frame, Result
from specsot.core.pages import PageTable
from specsot.errors import Unavailable
from specsot.members import Configuration, Head, MemberLeaving, Range, Ready, Registration, Stage, Tap
from specsot.service.membership import run_membership
from specsot.transport.links import Arrival, Exchange, Inbox, LocalDialer, Lost
from specsot_worker.ring_links import FutureEpochMessages, RingLinks, may_send
from specsot_worker.worker import Worker, _WorkerEpoch

STAGES = tuple(Stage(f"w{n}", f"w{n}:1", Range(2 * n, 2 * n + 2)) for n in range(3))


class Recorder:
    """A link that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.heard = lambda: None

    async def send(self, message: Any) -> None:
        self.post(message)

    def post(self, message: Any) -> None:
        self.sent.append(message)
        self.heard()

    async def close(self) -> None: ...


def last_stage() -> tuple[Worker, Recorder]:
    """The last of three, as it stands in an epoch; all it knows of stage 0 is a link."""
    first = Recorder()
    configuration = Configuration(1, "w2", STAGES, 9, 9, 9, drafter="d:1", comm_mode="ring")
    links = RingLinks(None, first, {"d:1": Recorder()}, Recorder())
    part: Any = Worker(SimpleNamespace(name="w2"), None, None)  # type: ignore[arg-type]
    part._active = _WorkerEpoch(configuration, None, links, set(), None, None, Deadline(()))  # type: ignore[arg-type]
    return part, first


async def test_drafts_and_taps_of_others_go_on_to_the_neighbour() -> None:
    part, first = last_stage()
    sent = [Drafts(1, (), paused_trees=3), Tap(1, 1, "w"), Tap(1, 2, "w")]
    for message in [*sent, Tap(1, 4, "mine"), Tap(1, 6, "mine"), Drafts(0)]:
        await part.handle(Arrival("d", message))
    assert first.sent == sent


async def test_stage_0_is_informed_once_that_the_drafter_is_lost() -> None:
    part, first = last_stage()
    for reason in ("its link broke", "the link to d broke"):
        await part.handle(Arrival("d", Lost("d", reason, 1)))
    assert first.sent == [Lost("d", "its link broke", 1)]


@pytest.mark.parametrize(
    ("you", "message", "senders"),
    [
        ("w0", Frame(1, 1), ""),
        ("w1", Frame(1, 1), "w0"),
        ("w0", Result(1, 1), "w2"),
        ("w0", Drafts(1), "w2 d"),
        ("w1", Tap(1, 1, "w"), "w0 d"),
        ("w0", Close(1), "master"),
        ("w1", Lost("w0", "broken", 1), "w0 w2"),
    ],
)
def test_every_message_is_accepted_only_from_its_proper_sender(
    you: str, message: object, senders: str
) -> None:
    configuration = Configuration(1, you, STAGES, 9, 9, 9, drafter="d:1")
    everybody = ("w0", "w1", "w2", "d", "master")
    assert [one for one in everybody if may_send(configuration, Arrival(one, message))] == senders.split()


async def test_a_lost_stage_ends_the_epoch() -> None:
    part, first = last_stage()
    with pytest.raises(Unavailable, match="lost w1: its link broke"):
        await part.handle(Arrival("w1", Lost("w1", "its link broke", 1)))
    assert first.sent == []


class OneLayerRange:
    """A stage and its provider, both in name only."""

    name, table, layers, loaded, vocabulary = "w0", PageTable(4, 16), Range(0, 2), 0, 100

    def make_stage(self, configuration: Configuration, layers: Range) -> OneLayerRange:
        return self

    def registration(self) -> Registration:
        return Registration("worker", "w0", "w0:1", "abc", 6, 64, 1 << 20, 64)

    def tap(self, layer: int, weight: object) -> None: ...

    def prompt_rows(self, rows: int) -> int:
        return rows

    def pause_compute_timer(self) -> None: ...

    def capture(self) -> None: ...


@pytest.mark.parametrize("first", [0, 1])
async def test_a_tap_that_overtakes_its_configuration_is_kept(first: int) -> None:
    """Nobody sends it again; one of an epoch that never came, or is over, is not taken for it."""
    exchange, leaving, master = Exchange(), asyncio.Event(), Recorder()
    for name in ("w0:1", "w1:1"):
        exchange.listen(name)
    provider: Any = OneLayerRange()
    part, inbox = Worker(provider, LocalDialer("w0", exchange), ThreadPoolExecutor(1)), Inbox()
    configuration = Configuration(3, "w0", STAGES, 4, 16, 8, drafter="d:1", head=Head((1,), 16))

    async def connect(registration: Registration) -> Recorder:
        inbox.put("d", Tap(2, 1, torch.ones(2)))
        arrivals = [("d", Tap(3, 1, torch.ones(2))), ("master", configuration)]
        for sender, message in (arrivals[first], arrivals[1 - first]):
            inbox.put(sender, message)
        inbox.put("d", "the last word")
        return master

    master.heard = lambda: leaving.set() if Ready(3) in master.sent else None
    await asyncio.wait_for(run_membership(part, inbox, connect, leaving), 100)
    assert master.sent[-2:] == [Ready(3), MemberLeaving()]


def test_what_comes_too_early_is_bounded_by_count_and_bytes() -> None:
    few, small = FutureEpochMessages(max_arrivals=2), FutureEpochMessages(max_bytes=100)
    for epoch in (1, 2, 2):
        few.hold(epoch, Arrival("d", Drafts(epoch)))
    assert [one.message for one in few.release(2)] == [Drafts(2)]
    few.hold(1, Arrival("d", Drafts(1)))
    assert few.release(1) == [], "it is over"
    taps = [Arrival("d", Tap(epoch, 0, torch.ones(20))) for epoch in (1, 2)]
    for tap in taps:
        small.hold(tap.message.epoch, tap)
    assert [small.release(epoch) for epoch in (1, 2)] == [taps[:1], []]
    small.hold(3, taps[1])
    assert small.release(3) == taps[1:], "there is room again"


@pytest.mark.parametrize(("mode", "to"), [("p2p", "w0"), ("ring", "w2")])
def test_whom_the_drafter_speaks_to(mode: Any, to: str) -> None:
    assert Configuration(1, "d", STAGES, 9, 9, 9, comm_mode=mode).drafted_for.name == to


async def test_slices_of_an_earlier_epoch_are_taken_where_no_taps_are_announced() -> None:
    given = list[tuple[int, object]]()

    def tap(layer: int, weight: object) -> None:
        given.append((layer, weight))

    stage: Any = SimpleNamespace(tap=tap, capture=lambda: None)
    with ThreadPoolExecutor(1) as compute:
        part: Any = Worker(SimpleNamespace(name="w1"), LocalDialer("w1", Exchange()), compute)  # type: ignore[arg-type]
        links = RingLinks(None, None, {}, Recorder())

        async def begin(*taps: int) -> set[int]:
            told = Configuration(1, "w1", STAGES, 9, 9, 9, drafter="d:1", head=Head(taps, 16))
            part._active = _WorkerEpoch(
                told, stage, links, set(told.taps_of(STAGES[1])), None, None, Deadline(())
            )
            await part._reuse_taps(part._active)
            return part._active.missing_taps

        assert await begin(1, 2, 3, 6) == {2, 3}
        for layer in (2, 3):
            await part.handle(Arrival("d", Tap(1, layer, f"slice {layer}")))
        first, given[:] = tuple(given), []
        assert await begin() == set()
        assert tuple(given) == first == ((2, "slice 2"), (3, "slice 3"))
        assert await begin(3) == {3}, "of another head"
        given.clear()
        await begin()
        assert not given
