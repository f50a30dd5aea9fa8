"""A conductor on a fake ring: scripts by prompt, and a loop that lets clients and steps take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from specsot.core.frames import Opening
from specsot.core.info import Info
from specsot.events import Event, Numbered
from specsot.params import Ask, Message, PlanStyle
from specsot_master.engine import Caller, Engine, EngineConfig, RequestJournal, RingState
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from specsot_master.master import RequestCounter
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from tests.master.fake_ring import STATE, FakeRing

BASE = Path(__file__).resolve().parents[2] / "models" / "demo" / "base"
TEXT = Text(BASE)  # keeps nothing of what it is asked
END_OF_TEXT = 2  # <|im_end|>, the demo model's end token

E = TypeVar("E")


class Counted(Text):
    """Counts the characters that this thread, the loop's, renders and tokenises."""

    def __init__(self, text: Text = TEXT) -> None:
        self.__dict__.update(text.__dict__)
        self.work, self._thread = 0, threading.get_ident()

    def encode(self, text: str) -> tuple[int, ...]:
        self._count(len(text))
        return super().encode(text)

    def render(self, messages: Sequence[Message], for_answer: bool = True) -> str:
        self._count(sum(len(message.content) for message in messages))
        return super().render(messages, for_answer)

    def _count(self, characters: int) -> None:
        if threading.get_ident() == self._thread:
            self.work += characters


class Ticks:
    """A clock that moves one second whenever it is read; alarms ring when the test passes time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._alarms: list[Ring] = []

    @property
    def alarms(self) -> int:
        """How many are set."""
        return len(self._alarms)

    def now(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def later(self, seconds: float, act: Callable[[], object], /) -> Ring:
        ring = Ring(self.seconds + seconds, act, self._alarms)
        self._alarms.append(ring)
        return ring

    later_while_running = later

    def advance(self, seconds: float) -> None:
        """Time passes, and rings what is due, in order."""
        end = self.seconds + seconds
        while due := [alarm for alarm in self._alarms if alarm.due <= end]:
            first = min(due, key=lambda alarm: alarm.due)
            self.seconds = max(self.seconds, first.due)
            first.cancel()
            first.act()
        self.seconds = max(self.seconds, end)


@dataclass
class Ring:
    """An alarm that was set, among the others."""

    due: float
    act: Callable[[], object]
    among: list[Ring]

    def cancel(self) -> None:
        if self in self.among:
            self.among.remove(self)


@dataclass
class Stage:
    """`says`: from a piece of the prompt to what the model writes; the first piece that is found counts."""

    says: Mapping[str, str]
    seed: int = 0
    state: RingState = STATE
    config: EngineConfig = field(default_factory=lambda: EngineConfig(model="demo"))
    burst: int = 4
    text: Text = TEXT
    forms: GrammarSandbox | None = None
    notes: RequestJournal | None = None
    threshold: float | None = None  # of the router's score; then plans are lists
    style: PlanStyle | None = None

    def __post_init__(self) -> None:
        self.ring = FakeRing(self._script, self._ended, self.seed, self.state, self.burst)
        prompts = Prompts(BASE, self.text, self.style or ("auto" if self.threshold is None else "list"))
        prompts.threshold = self.threshold
        self.prompts = prompts
        self.time = Ticks()
        self.engine = Engine(self.ring, self.text, prompts, self.config, self.time, self.forms, self.notes)
        self.requests = RequestCounter(self.engine, Info)
        self.prompts_seen: list[tuple[Opening, str]] = []

    def _script(self, opening: Opening, prompt: tuple[int, ...]) -> tuple[int, ...]:
        asked = self.text.decode(prompt)
        self.requests = RequestCounter(self.engine, Info)
        self.prompts_seen.append((opening, asked))
        turn = asked.rpartition("\nuser\n")[2]
        said = next((answer for piece, answer in self.says.items() if piece in turn), None)
        assert said is not None, f"no script for {turn!r}"
        return (*self.text.encode(said), END_OF_TEXT)

    def _ended(self, written: list[int]) -> bool:
        return self.text.decode(written[-8:]).endswith("[END]")

    async def settle(self) -> None:
        """Let tasks run until they wait for the ring."""
        for _ in range(3):
            await asyncio.sleep(0)
            await flushed(self.engine)

    async def step(self) -> bool:
        """One step, heard and obeyed; False when nothing was ready."""
        await self.settle()
        result = self.ring.step()
        if result is not None:
            self.engine.handle(result)
        await self.settle()
        return result is not None

    async def play(self, *tasks: asyncio.Task[E]) -> list[E]:
        """Steps until these clients are done. A ring at rest while somebody waits is a deadlock."""
        while not all(task.done() for task in tasks):
            assert await self.step() or all(task.done() for task in tasks), "nothing moves"
        return [task.result() for task in tasks]

    async def play_whenever(self, *tasks: asyncio.Task[E]) -> list[E]:
        """The same, while something outside of the ring is under way: at rest it waits for orders."""
        while not all(task.done() for task in tasks):
            self.ring.news.clear()
            if not await self.step():
                ordered = asyncio.create_task(self.ring.news.wait())
                await asyncio.wait([ordered, *tasks], return_when=asyncio.FIRST_COMPLETED)
                ordered.cancel()
        return [task.result() for task in tasks]

    def listen(
        self, ask: Ask, request_id: str | None = None, client: str = "", timeout: float | None = None
    ) -> asyncio.Task[list[Event]]:
        """A client that reads everything."""
        return asyncio.create_task(_collect(self.requests.generate(ask, Caller(request_id, client, timeout))))

    async def answer(self, ask: Ask) -> list[Event]:
        """All events of one request, alone in the ring."""
        (events,) = await self.play(self.listen(ask))
        return events

    def assert_clean(self) -> None:
        """Nothing is left of anybody, on either side, but beginnings that nobody needs."""
        assert self.engine.idle
        assert not self.time.alarms
        assert set(self.ring.live) == set(self.engine.kept)
        assert self.engine.free_pages == self.state.pages
        kept = self.state.pages - self.engine.prefix_pages
        assert self.ring.free_pages == kept or (self.state.has_drafter and self.ring.free_pages > kept)


async def flushed(engine: Engine) -> None:
    """All orders so far are sent or dropped."""
    while (sending := engine._outbox._task) is not None:
        await asyncio.wait([sending])


async def _collect(events: AsyncIterator[Numbered]) -> list[Event]:
    collected: list[Event] = []
    async for numbered in events:
        assert numbered.number == len(collected)
        collected.append(numbered.event)
    return collected


def of(kind: type[E], events: list[Event]) -> list[E]:
    """Events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def repeat(word: str, count: int) -> str:
    return " ".join([word] * count)


class Gate:
    """What stops here, in a thread, goes on once it is let go."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self._go, self._begun = threading.Event(), threading.Semaphore(0)

    def stop(self) -> None:
        self._begun.release()
        assert self._go.wait(100)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.acquire, timeout=100)

    def release(self) -> None:
        self._go.set()


class PlayedStage:
    """A stage whose steps a task plays. going: while it is set."""

    stage: Stage
    going: asyncio.Event

    async def quiet(self) -> None:
        """Nobody waits, nothing runs, and every order is with the ring."""
        while not self.stage.engine.idle:
            await turn()
        await self.stage.settle()

    async def play(self) -> None:
        """Steps, as long as there are any; then wait for orders."""
        while True:
            await self.going.wait()
            await turn()
            self.stage.ring.news.clear()  # before the step: what is ordered during it is news
            if not await self.stage.step():
                await self.stage.ring.news.wait()


async def turn() -> None:
    """Give the network and everybody else a turn."""
    await asyncio.sleep(0)
