"""Who computes on a GPU does not await verdicts: the next frame is launched before the last one is read."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from specsot.core.frames import Frame, Result
from specsot.core.pages import PageTable
from specsot.errors import Unavailable
from specsot.members import Configuration, Range, Stage
from specsot.transport.links import Arrival
from specsot_worker.verifier import VerifiedFrame
from specsot_worker.worker import Worker

STAGES = tuple(Stage(f"w{n}", f"w{n}:1", Range(n, n + 1)) for n in range(2))


class Last:
    """Provider, range, judge and links in one: notes what happens; a verdict takes until it may be said."""

    name, table = "w1", PageTable(4, 4)

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.may_be_said = Event()
        self.broken = 0
        self.said: asyncio.Queue[int] = asyncio.Queue()
        self.loop, self.open = asyncio.get_running_loop(), False

    def make_stage(self, configuration: Configuration, layers: Range) -> Any:
        return SimpleNamespace(table=self.table, run=self.run, capture=lambda: None)

    def run(self, frame: Frame) -> Frame:
        self.launched.append(frame.number)
        return replace(frame, seconds=(0.1, 0.1))

    def make_verifier(self, stage: Any, configuration: Configuration) -> Any:
        def take(ready: Any) -> None: ...

        colocated = SimpleNamespace(drafter=None)
        return SimpleNamespace(
            verify=self.say,
            pending_ready=False,
            has_pending=False,
            take_features_from=take,
            set_drafters=take,
            colocated=colocated,
        )

    def say(self, frame: Frame) -> VerifiedFrame:
        assert self.may_be_said.wait(100)
        if frame.number == self.broken:
            raise Unavailable("its rows never came")
        return VerifiedFrame(Result(1, frame.number, (), frame.seconds), {})

    async def dial(self, *where: Any) -> Any:
        self.open = True
        return self

    async def send(self, message: Any) -> None:
        self.post(message)

    def post(self, message: Any) -> None:
        if not self.open:
            raise Unavailable("the link is closed")
        if isinstance(message, Result):
            self.loop.call_soon_threadsafe(self.said.put_nowait, message.number)

    async def close(self) -> None:
        self.open = False


@pytest.fixture
async def ring():
    """The last stage and its part, in an epoch, with three frames at its endpoint."""
    last = Last()
    with ThreadPoolExecutor(1) as compute, ThreadPoolExecutor(1) as reading:
        part = Worker(last, last, compute, verify_thread=reading)  # type: ignore[arg-type]
        master = SimpleNamespace(send=_hear)
        await part.configure(Configuration(1, "w1", STAGES, 4, 4, 1), master)  # type: ignore[arg-type]
        for number in (1, 2, 3):
            await part.handle(Arrival("w0", Frame(1, number)))
        yield last, part
        last.may_be_said.set()
        await part.disband()


async def _hear(message: Any) -> None: ...


async def _settle_for_ever(part: Worker) -> None:
    while True:
        await part.run_due()
        await asyncio.sleep(0)


async def test_frames_are_launched_before_the_first_is_verified_and_are_reported_in_order(ring: Any) -> None:
    last, part = ring
    assert last.launched == [1, 2, 3]
    assert last.said.empty()
    assert 0 < await part.run_due() < 0.1, "it looks again whether that went well"
    last.may_be_said.set()
    assert [await last.said.get() for _ in range(3)] == [1, 2, 3]
    async with asyncio.timeout(60):
        while await part.run_due() is not None:  # noqa: ASYNC110 - a thread told it before it is free
            await asyncio.sleep(0)


async def test_a_failed_frame_ends_the_epoch_and_later_frames_are_not_reported(ring: Any) -> None:
    last, part = ring
    last.broken = 2
    last.may_be_said.set()
    assert await last.said.get() == 1
    with pytest.raises(Unavailable, match="never came"):
        await _settle_for_ever(part)
    await part.disband()
    assert last.said.empty()


async def test_a_new_epoch_begins_when_nothing_of_the_last_one_is_read_any_more(ring: Any) -> None:
    last, part = ring
    await part.disband()
    again = asyncio.create_task(part.configure(Configuration(2, "w1", STAGES, 4, 4, 1), last))
    await asyncio.sleep(0)
    assert not again.done()
    last.may_be_said.set()
    await again
    assert last.said.empty(), "nobody wants to know any more"
