"""Law 1 where a faster worker joins amid an answer: rows are handed over, and the text is the same."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from specsot.core.frames import Frame, PromptChunk
from specsot.events import BranchText, Event, Finished
from specsot.members import Quantization, Registration
from specsot.params import Ask, Limits, Sampling
from specsot.service.membership import run_membership
from specsot.service.options import ModelOptions
from specsot.transport.links import Exchange, LocalLink
from specsot_master.core.ring import RingOptions
from specsot_master.master import Master, assemble
from specsot_worker.loader import StageLoader
from specsot_worker.observer import WorkerObserver
from specsot_worker.worker import Worker

pytestmark = pytest.mark.torch

WORDS = "One reason is that tides follow the moon, and another that rivers carry salt into the sea. " * 12
AGAIN = 64  # rows that may be read again at most: what was written while others were handed over


class Gate(WorkerObserver):
    """Lets so many frames pass, until it is opened; counts rows of prompts, by epoch."""

    def __init__(self, frames: int) -> None:
        self.left, self.open, self.reached = frames, threading.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.read: dict[int, int] = {}

    def before_frame(self) -> None:
        self.left -= 1
        if self.left < 0 and not self.open.is_set():
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self.open.wait(60)

    def computed(self, frame: Frame, seconds: float) -> None:
        rows = sum(len(one.tokens) for one in frame.segments if isinstance(one, PromptChunk))
        self.read[frame.epoch] = self.read.get(frame.epoch, 0) + rows


class Loader(StageLoader):
    """On a host of its own, as fast as it says."""

    told: dict[str, Any]

    def registration(self) -> Registration:
        return replace(super().registration(), host=self.name, **self.told)


class House:
    """A master and its workers. gates: what the workers let pass."""

    def __init__(self, base: Path, bits: Quantization | None) -> None:
        self.base, self.bits, self.exchange = base, bits, Exchange()
        options = RingOptions(workers=1, max_stages=2, drafter="none", page_rows=16, take_over_after=0)
        self.master: Master = assemble(base, options)
        self.fleet: Any = self.master.members
        self.gates: dict[str, Gate] = {}
        self.news = asyncio.Event()  # somebody told the master something
        self._ends: list[tuple[asyncio.Event, asyncio.Task[None], ThreadPoolExecutor]] = []

    def add(self, name: str, layer: float, frames: int = 1 << 30, **told: Any) -> asyncio.Event:
        """layer: seconds it says that one takes. Returns what makes it leave."""
        gate = self.gates[name] = Gate(frames)
        options = ModelOptions(self.base, dtype="fp32", kv_memory=1 << 26, quantization=self.bits)
        loader = Loader(options, name, before_frame=gate.before_frame)
        loader.told = {"curve": tuple((rows, layer) for rows in (1, 8, 512)), **told}
        inbox, thread, leaving = self.exchange.listen(name), ThreadPoolExecutor(1), asyncio.Event()
        worker = Worker(loader, self.exchange.dialer(name), thread, observer=gate)

        async def connect(registration: Registration) -> Any:
            await self.fleet.join(registration, LocalLink("master", inbox))
            return Uplink(self, name)

        self._ends.append(
            (leaving, asyncio.create_task(run_membership(worker, inbox, connect, leaving)), thread)
        )
        return leaving

    async def close(self) -> None:
        for gate in self.gates.values():
            gate.open.set()
        for leaving, task, thread in self._ends:
            leaving.set()
            await task
            thread.shutdown()

    async def handing(self) -> None:
        """Until rows are on their way, or the next epoch has begun."""
        epoch = self.fleet.epoch
        while not self.fleet._handover._lacking and self.fleet.epoch == epoch:
            self.news.clear()
            await self.news.wait()


class Uplink:
    def __init__(self, house: House, name: str) -> None:
        self.house, self.name = house, name

    async def send(self, message: object) -> None:
        asyncio.get_running_loop().call_soon(self.house.fleet.on_message, self.name, message)
        asyncio.get_running_loop().call_soon(self.house.news.set)

    async def close(self) -> None:
        asyncio.get_running_loop().call_soon(self.house.fleet.on_disconnect, self.name, "left")


@asynccontextmanager
async def house_of(base: Path, bits: Quantization | None = None, frames: int = 40):
    """A slow worker alone, which stops before its frame `frames`."""
    house = House(base, bits)
    house.add("slow", 1.0, frames)
    try:
        await house.master.complete(with_drafter=False)
        yield house
    finally:
        await house.close()


def ask_of(mode: Any, sampling: Sampling, seed: int) -> Ask:
    limits = Limits(max_new_tokens=96)
    return Ask(
        prompt=f"{seed}. {WORDS}",
        mode=mode,
        sampling=sampling,
        seed=seed,
        limits=limits,
        ignore_eos=mode == "direct",
    )


async def text_of(house: House, ask: Ask) -> list[Event]:
    """The slow one stops soon behind the first text of a branch."""
    events = list[Event]()
    async for one in house.master.requests.generate(ask):
        gate = house.gates["slow"]
        if isinstance(one.event, BranchText) and gate.left > 8:
            gate.left = 8
        events.append(one.event)
    return events


def last(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


WARM = Sampling(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3)


@pytest.mark.parametrize(
    ("modes", "sampling", "bits", "frames"),
    [
        pytest.param(("direct",), Sampling(), "int8", 30, id="a whole range moves, int8"),
        pytest.param(
            ("direct", "direct"), WARM, None, 30, id="half of it moves, penalties", marks=pytest.mark.full
        ),
        pytest.param(("sot", "direct"), Sampling(), None, 1 << 30, id="branches"),
    ],
)
async def test_a_worker_that_joins_gets_the_rows_and_the_text_is_the_same(
    demo_model: Path, modes: tuple[str, ...], sampling: Sampling, bits: Quantization | None, frames: int
) -> None:
    """Two requests are written faster by two equal workers; one by one that is clearly faster."""
    asks = [ask_of(mode, sampling, seed) for seed, mode in enumerate(modes)]
    async with house_of(demo_model / "base", bits, frames) as house:
        answers = [asyncio.create_task(text_of(house, ask)) for ask in asks]
        await house.gates["slow"].reached.wait()
        house.add("quick", 1.0 if len(asks) == 2 else 0.001)
        await house.handing()
        assert house.fleet._handover._lacking
        house.gates["slow"].open.set()
        joined = [last(await answer).text for answer in answers]
        stages = [stage.name for stage in house.fleet.ring.stages]
        again = {epoch: rows for gate in house.gates.values() for epoch, rows in gate.read.items()}
        alone = [last(await text_of(house, ask)).text for ask in asks]
    assert stages == (["slow", "quick"] if len(asks) == 2 else ["quick"])
    first, *_, newest = sorted(again)
    assert again[first] > 4 * AGAIN
    assert again[newest] <= AGAIN
    assert joined == alone
