"""Law 1 where a faster worker joins amid an answer: rows and features are handed over, and the text is the
same, whatever else happens meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.core.frames import Drafts, Features, Frame, PromptChunk
from specsot.events import BranchText, Event, Finished
from specsot.members import Quantization, Registration, TreeShape
from specsot.params import Ask, Form, Limits, Sampling
from specsot.service.membership import RingMember, run_membership
from specsot.service.options import DraftModelOptions, ModelOptions
from specsot.transport.links import Arrival, Exchange, LocalDialer, LocalLink
from specsot_drafter.drafter import Drafter
from specsot_drafter.loader import DraftLoader
from specsot_drafter.observer import DrafterObserver
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.master import Master, assemble
from specsot_model.kept_speeds import MeasuredSpeeds
from specsot_worker import feature_stream
from specsot_worker.core import pipeline
from specsot_worker.loader import StageLoader
from specsot_worker.observer import WorkerObserver
from specsot_worker.worker import Worker
from tests.conftest import some

WORDS = "One reason is that tides follow the moon, and another that rivers carry salt into the sea. " * 8
BEGIN = 12  # tokens
AGAIN = 64  # rows that may be read again at most: what was written while others were handed over
SHAPE = TreeShape(depth=3, top_k=3, nodes=8, fixed=True)


class Gate(WorkerObserver):
    """Lets so many frames pass, until it is opened; counts rows of prompts, by epoch."""

    def __init__(self, frames: int) -> None:
        self.left, self.open, self.reached = frames, threading.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.read: dict[int, int] = {}

    def prepare_frame(self) -> None:
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

    def _measure(self) -> MeasuredSpeeds:
        return MeasuredSpeeds(self.told["curve"])


class Told(DrafterObserver):
    """What a drafter was told, and how many trees it drafted, by epoch."""

    def __init__(self) -> None:
        self.features = dict[int, list[Features]]()
        self.trees = dict[int, int]()

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        trees = sum(len(one.tree) > 1 for one in drafts.drafts)
        self.trees[drafts.epoch] = self.trees.get(drafts.epoch, 0) + trees

    def rows(self, epoch: int) -> dict[int, torch.Tensor]:
        """Features by position, of a text that is alone."""
        found = dict[int, torch.Tensor]()
        for told in self.features[epoch]:
            positions = [one.start + n for one in told.feature_batches for n in range(len(one.tokens))]
            found |= dict(zip(positions, told.rows if positions else ()))
        return found


class ListeningDrafter(Drafter):
    def __init__(self, told: Told, *arguments: Any) -> None:
        super().__init__(*arguments, told)
        self._told = told

    async def handle(self, arrival: Arrival) -> None:
        if isinstance(one := arrival.message, Features):
            self._told.features.setdefault(one.epoch, []).append(one)
        await super().handle(arrival)


class House:
    """A master and its workers. gates: what the workers let pass. drafts: with a head, whose trees are waited
    for as good as for ever. rows: tokens of a frame at most. copies: whether stages keep copies of each
    other's KV.
    """

    def __init__(
        self,
        base: Path,
        bits: Quantization | None,
        drafts: bool,
        workers: int = 1,
        max_stages: int = 2,
        rows: int = 512,
        copies: bool = False,
    ) -> None:
        self.base, self.bits, self.exchange = base, bits, Exchange()
        options = RingOptions(
            workers=workers,
            max_stages=max_stages,
            drafter="eagle" if drafts else "none",
            page_rows=64,
            rows=rows,
            take_over_after=0,
            shape=SHAPE,
            draft_timeout=600.0,
            copy_kv="on" if copies else "off",
        )
        self.master: Master = assemble(base, options)
        self.fleet: Any = self.master.members
        self.gates: dict[str, Gate] = {}
        self.workers: dict[str, Worker] = {}
        self.told = Told()
        self.news = asyncio.Event()  # somebody told the master something
        self._ends: list[tuple[asyncio.Event, asyncio.Task[None], ThreadPoolExecutor]] = []

    def add(self, name: str, layer: float, frames: int = 1 << 30, **told: Any) -> asyncio.Event:
        """layer: seconds it says that one takes. Returns what makes it leave."""
        gate = self.gates[name] = Gate(frames)
        options = ModelOptions(self.base, dtype="fp32", kv_memory=1 << 26, quantization=self.bits)
        loader = Loader(options, name, prepare_frame=gate.prepare_frame)
        loader.told = {"curve": tuple((rows, layer) for rows in (1, 8, 512)), **told}
        thread = ThreadPoolExecutor(1)
        self.workers[name] = Worker(loader, LocalDialer(name, self.exchange), thread, observer=gate)
        return self._join(name, self.workers[name], thread)

    def add_drafter(self) -> None:
        options = DraftModelOptions(
            self.base, dtype="fp32", kv_memory=1 << 26, draft_model=self.base.parent / "eagle3"
        )
        thread, dialer = ThreadPoolExecutor(1), LocalDialer("drafter", self.exchange)
        self._join(
            "drafter", ListeningDrafter(self.told, DraftLoader(options, "drafter"), dialer, thread), thread
        )

    def _join(self, name: str, member: RingMember, thread: ThreadPoolExecutor) -> asyncio.Event:
        inbox, leaving = self.exchange.listen(name), asyncio.Event()

        async def connect(registration: Registration) -> Any:
            await self.fleet.join(registration, LocalLink("master", inbox))
            self.news.set()
            return Uplink(self, name)

        self._ends.append(
            (leaving, asyncio.create_task(run_membership(member, inbox, connect, leaving)), thread)
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
            await self.hear()

    async def hear(self) -> None:
        """Somebody told the master something."""
        self.news.clear()
        await self.news.wait()

    def read_again(self) -> int:
        """Rows of prompts in the newest epoch that read any."""
        read = {epoch: rows for gate in self.gates.values() for epoch, rows in gate.read.items()}
        return read[max(read)]


class Uplink:
    def __init__(self, house: House, name: str) -> None:
        self.house, self.name = house, name

    async def send(self, message: object) -> None:
        asyncio.get_running_loop().call_soon(self.house.fleet.on_message, self.name, message)
        asyncio.get_running_loop().call_soon(self.house.news.set)

    async def close(self) -> None:
        asyncio.get_running_loop().call_soon(self.house.fleet.on_disconnect, self.name, "left")


@asynccontextmanager
async def house_of(base: Path, bits: Quantization | None = None, frames: int = 30, drafts: bool = False):
    """A slow worker alone, which stops before its frame `frames`."""
    house = House(base, bits, drafts)
    if drafts:
        house.add_drafter()
    house.add("slow", 1.0, frames)
    try:
        await house.master.complete(with_drafter=drafts)
        yield house
    finally:
        await house.close()


def ask_of(mode: Any, seed: int, sampling: Sampling | None = None, tokens: int = 32, **more: Any) -> Ask:
    return Ask(
        prompt=f"{seed}. {WORDS}",
        mode=mode,
        sampling=sampling or Sampling(),
        seed=seed,
        limits=Limits(max_new_tokens=tokens),
        ignore_eos=mode == "direct",
        **more,
    )


async def text_of(house: House, ask: Ask) -> str:
    """The slow one stops soon behind the first text of a branch."""
    events = list[Event]()
    async for one in house.master.requests.generate(ask):
        gate = house.gates["slow"]
        if isinstance(one.event, BranchText) and gate.left > 8:
            gate.left = 8
        events.append(one.event)
    assert isinstance(events[-1], Finished)
    return events[-1].text


ALONE: dict[tuple[Ask, Quantization | None], str] = {}


async def check_alone(house: House, asks: list[Ask], joined: list[str]) -> None:
    """They are what is written without a hand-over: whole where it is the first time, then how it begins."""
    for ask, text in zip(asks, joined, strict=True):
        if (ask, house.bits) not in ALONE:
            ALONE[ask, house.bits] = await text_of(house, ask)
        else:
            begin = await text_of(house, replace(ask, limits=Limits(max_new_tokens=BEGIN)))
            assert begin
            assert text.startswith(begin)
        assert text == ALONE[ask, house.bits]


WARM = Sampling(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3)
LETTERS = Form("regex", ("[a-z ]{300,400}",))


@pytest.mark.parametrize(
    ("asks", "bits", "frames", "drafts"),
    [
        pytest.param([ask_of("direct", 0)], "int8", 20, False, id="a whole range moves, int8"),
        pytest.param(
            [ask_of("direct", 0, WARM), ask_of("direct", 1, WARM)],
            None,
            30,
            False,
            id="half of it moves, penalties",
            marks=pytest.mark.full,
        ),
        pytest.param(
            [ask_of("sot", 0, tokens=96), ask_of("direct", 1)],
            None,
            1 << 30,
            True,
            id="branches, half moves, a head",
        ),
        pytest.param([ask_of("direct", 0, form=LETTERS)], None, 12, True, id="a grammar, a head"),
    ],
)
async def test_a_worker_that_joins_gets_the_kv_and_the_sequence_is_the_same(
    demo_model: Path, asks: list[Ask], bits: Quantization | None, frames: int, drafts: bool
) -> None:
    """Two requests are written faster by two equal workers; one by one that is clearly faster."""
    async with house_of(demo_model / "base", bits, frames, drafts) as house:
        answers = [asyncio.create_task(text_of(house, ask)) for ask in asks]
        await house.gates["slow"].reached.wait()
        house.add("quick", 1.0 if len(asks) == 2 else 0.001)
        await house.handing()
        assert house.fleet._handover._lacking
        house.gates["slow"].open.set()
        joined = [await answer for answer in answers]
        stages = [stage.name for stage in house.fleet.ring.stages]
        again = house.read_again()
        await check_alone(house, asks, joined)
    assert stages == (["slow", "quick"] if len(asks) == 2 else ["quick"])
    assert again <= (AGAIN + SHAPE.slots * drafts) * len(asks)


async def test_a_head_receives_all_migrated_features_and_no_sequence_waits_for_them(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit those that were computed before, but for the prompt's last; over several steps."""
    for module in (feature_stream, pipeline):
        monkeypatch.setattr(module, "MAX_ROWS_PER_STEP", 64)
    async with house_of(demo_model / "base", frames=12, drafts=True) as house:
        answer = asyncio.create_task(text_of(house, ask_of("direct", 0)))
        await house.gates["slow"].reached.wait()
        house.add("quick", 0.001)
        await house.handing()
        house.gates["slow"].open.set()
        joined = await answer
        (migrated,) = house.fleet._handover.migrated_rows(house.fleet.epoch).values()
        before, after = (house.told.rows(epoch) for epoch in sorted(house.told.features)[-2:])
        trees = house.told.trees[house.fleet.epoch]
        await check_alone(house, [ask_of("direct", 0)], [joined])
    assert migrated > 2 * AGAIN
    assert sum(not torch.equal(before[row], after[row]) for row in range(migrated)) <= 1
    assert all(torch.allclose(before[row], after[row], atol=1e-4) for row in range(migrated))
    assert trees


BLOWS = "cancel", "late cancel", "end", "fork", "second order", "giver", "taker"


@pytest.mark.parametrize("blow", some(BLOWS, 1, 3, 4))
async def test_no_failure_during_kv_migration_changes_a_sequence_or_leaks_kv(
    demo_model: Path, blow: str
) -> None:
    asks = [ask_of("direct", 0), ask_of("direct", 1, tokens=16 if blow == "end" else 32)]
    async with house_of(demo_model / "base", frames=12, drafts=True) as house:
        answers = [asyncio.create_task(text_of(house, ask)) for ask in asks]
        await house.gates["slow"].reached.wait()
        house.add("quick", 0.001)
        await house.handing()
        assert house.fleet._handover._lacking
        match blow:
            case "cancel":
                answers.pop().cancel()
                asks.pop()
            case "late cancel":
                house.gates["slow"].open.set()
                while not house.fleet._handover.migrated_rows(house.fleet.epoch):
                    await house.hear()
                assert not house.fleet.ready
                answers.pop().cancel()
                asks.pop()
            case "fork":
                asks.append(replace(asks[0], seed=2))
                answers.append(asyncio.create_task(text_of(house, asks[-1])))
            case "second order":
                house.add("third", 0.001)
                while not house.fleet.knows("third"):
                    await house.hear()
                answers.append(asyncio.create_task(house.fleet.rebalance()))
            case "giver":
                house.fleet.on_disconnect("slow", "killed")
            case "taker":
                house.fleet.on_disconnect("quick", "killed")
            case _:
                pass
        house.gates["slow"].open.set()
        joined = [await answer for answer in answers][: len(asks)]
        await check_alone(house, asks, joined)
        stages = [stage.name for stage in house.fleet.ring.stages]
    left = {name: house.workers[name]._handover.ready._rows for name in stages}
    assert stages == {"second order": ["quick", "third"], "taker": ["slow"]}.get(blow, ["quick"])
    assert not any(left.values())
