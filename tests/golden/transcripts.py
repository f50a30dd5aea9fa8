"""What the master orders of the ring and tells its clients, input by input, on a ring that plays scripts.

Orders and events stand there as they would travel: by the names of the protos. Figures of time are left out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from google.protobuf.json_format import MessageToDict

from specsot.core.frames import Close, End, Open, Outcome, Result
from specsot.errors import SpecsotError
from specsot.events import Numbered
from specsot.params import Ask, Limits, Message
from specsot_master.core.inputs import RingLost, RingReady
from specsot_master.engine import EngineConfig
from tests.golden.surface import event_message, generate, open_kept, order_message, resume
from tests.master.fake_ring import STATE
from tests.master.letters import COUNT, DIRECT, PLAN, SAYS, SMALL, SOT, TIGHT
from tests.master.stage import Stage

TIMES = ("seconds", "seconds_to_first_token", "tokens_per_second", "phases")
SYSTEM = Message("system", "You are a careful teacher. " * 12)
KEPT = replace(SOT, resumable=True)
KEEPING = EngineConfig(model="demo", keep_for=30.0, keep=2)
JOURNAL = Path(__file__).parent / "runs" / "journal"
TOLD = JOURNAL / "told.txt"  # how many events its client had


@dataclass
class Transcript:
    """One run, written down as it goes."""

    stage: Stage
    lines: list[str] = field(default_factory=list)
    _clients: dict[str, list[str]] = field(default_factory=dict)
    _ordered: int = 0

    def ask(self, name: str, ask: Ask, **more: Any) -> asyncio.Task[None]:
        """A client that reads everything."""
        return self.follow(name, generate(self.stage.requests, ask, f"id-{name}", **more))

    def follow(
        self, name: str, events: AsyncGenerator[Numbered], most: int | None = None
    ) -> asyncio.Task[None]:
        """most: events, after which it hangs up."""
        self.lines.append(f"> {name} asks")
        return asyncio.create_task(self._read(name, events, most))

    async def _read(self, name: str, events: AsyncGenerator[Numbered], most: int | None) -> None:
        told = self._clients.setdefault(name, [])
        try:
            async with aclosing(events):
                count = 0
                while count != most and (event := await anext(events, None)) is not None:
                    told.append(shown(event_message(event)))
                    count += 1
        except SpecsotError as error:
            told.append(f"{type(error).__name__}: {error}")

    async def step(self, count: int = 1) -> None:
        """So many, or as many as there are: one at least."""
        for number in range(count):
            await self.settle()
            result = self.stage.ring.step()
            if result is None:
                assert number, "nothing moves"
                break
            wrote = " ".join(f"{one.sequence}:{len(one.tokens)}" for one in result.outcomes)
            self.lines.append(f"> step {result.number} {wrote}")
            self.stage.engine.handle(result)
        await self.settle()

    async def play(self, *tasks: asyncio.Task[None]) -> None:
        while not all(task.done() for task in tasks):
            await self.settle()
            if not all(task.done() for task in tasks):
                await self.step()
        await self.settle()

    async def settle(self) -> None:
        """Let everybody act, and write down what was ordered and told."""
        for _ in range(4):
            await self.stage.settle()
        orders = self.stage.ring.orders
        self.lines += [f"  order {shown(order_message(order))}" for order in orders[self._ordered :]]
        self._ordered = len(orders)
        for name, told in sorted(self._clients.items()):
            self.lines += [f"  {name} {event}" for event in told]
            told.clear()

    async def say(self, what: str, act: Callable[[], object]) -> None:
        self.lines.append(f"> {what}")
        act()
        await self.settle()

    async def break_and_form(self, epoch: int, **changes: Any) -> None:
        """Another ring comes after this one."""
        self.stage.ring.break_off()
        await self.say("the ring breaks", lambda: self.stage.engine.handle(RingLost("worker-2 is gone")))
        state = replace(STATE, epoch=epoch, **changes)
        self.stage.ring.form(state)
        self.stage.state = state
        await self.say(f"epoch {epoch} begins", lambda: self.stage.engine.handle(RingReady()))


def shown(message: Any) -> str:
    """By the names of the protos; many numbers as their count and checksum."""
    return json.dumps(short(MessageToDict(message, preserving_proto_field_name=True)), ensure_ascii=False)


def short(value: Any) -> Any:
    match value:
        case dict():
            return {name: short(one) for name, one in value.items() if name not in TIMES}
        case list() if len(value) > 12 and all(isinstance(one, int) for one in value):
            return f"{len(value)} {crc32(json.dumps(value).encode()):08x}"
        case list():
            return [short(one) for one in value]
        case _:
            return value


Run = Callable[[], Awaitable[Transcript]]


def simply(ask: Ask, says: Mapping[str, str] = SAYS, seed: int = 0, **more: Any) -> Run:
    """One client, alone."""

    async def run() -> Transcript:
        one = Transcript(Stage(says, seed, **more))
        await one.play(one.ask("a", ask))
        return one

    return run


async def two_at_once() -> Transcript:
    one = Transcript(Stage(SAYS, seed=4))
    await one.play(one.ask("a", SOT), one.ask("b", DIRECT), one.ask("c", COUNT))
    return one


async def in_turn_through_one_place() -> Transcript:
    one = Transcript(Stage(SAYS, seed=2, config=EngineConfig(model="demo", live=1, queue=2)))
    tasks = [one.ask(name, replace(DIRECT, priority=n), client=name) for n, name in enumerate("ab")]
    await one.settle()
    await one.play(*tasks, one.ask("c", replace(DIRECT, priority=9)), one.ask("d", DIRECT))
    return one


async def cancelled_among_branches() -> Transcript:
    one = Transcript(Stage(SAYS, seed=1))
    client = one.ask("a", SOT)
    await one.step(14)
    await one.say("a is cancelled", lambda: one.stage.engine.cancel("id-a"))
    await one.play(client)
    return one


async def left_early() -> Transcript:
    one = Transcript(Stage(SAYS, seed=2))
    await one.play(one.follow("a", generate(one.stage.requests, SOT, "id-a"), most=9))
    await one.settle()
    return one


async def repaired_in_the_plan() -> Transcript:
    one = Transcript(Stage(SAYS, seed=3))
    client = one.ask("a", SOT)
    await one.step(5)
    await one.break_and_form(2)
    await one.play(client)
    return one


async def repaired_among_branches() -> Transcript:
    one = Transcript(Stage(SAYS, seed=5))
    clients = one.ask("a", SOT), one.ask("b", COUNT)
    while sum(player.opening.decodes for player in one.stage.ring.live.values()) < 3:
        await one.step()
    await one.break_and_form(2, pages=40, page_rows=32, has_drafter=False)
    await one.step(6)
    await one.break_and_form(3)
    await one.play(*clients)
    return one


async def rings_break_until_it_is_given_up() -> Transcript:
    one = Transcript(Stage(SAYS))
    client = one.ask("a", DIRECT)
    await one.step()
    for epoch in range(2, 6):
        await one.break_and_form(epoch)
    await one.play(client)
    return one


async def no_ring_comes_back() -> Transcript:
    one = Transcript(Stage(SAYS))
    client = one.ask("a", SOT)
    await one.step(6)
    one.stage.ring.break_off()
    await one.say("the ring breaks", lambda: one.stage.engine.handle(RingLost("worker-2 is gone")))
    await one.say("31 s pass", lambda: one.stage.time.advance(31))
    await client
    await one.settle()
    return one


async def a_branch_fails() -> Transcript:
    one = Transcript(Stage(SAYS))
    client = one.ask("a", SOT)
    opened: list[Any] = []
    while len(opened) < 4:
        await one.step()
        opened = [order.opening for order in one.stage.ring.orders if isinstance(order, Open)]
    (alpha,) = [opening for opening in opened if opening.ordinal == 1]
    await one.stage.ring.order(Close(alpha.sequence))
    failed = Result(1, 999, (Outcome(alpha.sequence, 0, (), (), End.FAILED),))
    await one.say("the first branch fails", lambda: one.stage.engine.handle(failed))
    await one.play(client)
    return one


async def few_pages() -> Transcript:
    """Who comes later waits, or gives back what it has."""
    one = Transcript(Stage(SAYS, seed=6, state=TIGHT))
    small = Ask(prompt="Letters?", mode="sot", seed=5, limits=SMALL)
    asks = [small, DIRECT, COUNT, small]
    await one.play(*(one.ask(name, ask, client=name) for name, ask in zip("abcd", asks)))
    return one


async def a_beginning_is_kept() -> Transcript:
    one = Transcript(Stage(SAYS, seed=7))
    for name, text in (("a", "What is it?"), ("b", "What is that?")):
        turns = (SYSTEM, Message("user", text))
        await one.play(one.ask(name, Ask(messages=turns, mode="direct", seed=5)))
    return one


async def nobody_reads() -> Transcript:
    config = EngineConfig(model="demo", lease=32, unread=10, unread_for=100.0)
    one = Transcript(Stage(SAYS, config=config, burst=2))
    events = generate(one.stage.requests, COUNT, "id-a")
    first = asyncio.ensure_future(anext(events))
    await one.step(40)
    assert first.done()
    await one.say("201 s pass", lambda: one.stage.time.advance(201))
    await one.play(one.follow("a", events))
    return one


async def read_on_elsewhere() -> Transcript:
    one = Transcript(Stage(SAYS, seed=3, config=KEEPING))
    await one.play(one.follow("a", generate(one.stage.requests, KEPT, "id-a"), most=7))
    await one.step(10)
    await one.play(one.follow("b", resume(one.stage.requests, "id-a", 7)))
    return one


async def a_journal_is_gone_on_from() -> Transcript:
    """Written by the master of 23 November 2026, in the middle of the branches."""
    one = Transcript(Stage(SAYS, seed=3, config=KEEPING))
    await one.stage.engine.revive(await open_kept(JOURNAL, "m"))
    told = int(TOLD.read_text(encoding="utf-8"))
    await one.play(one.follow("a", resume(one.stage.requests, "mine", told, owner="alice")))
    await one.play(one.follow("b", resume(one.stage.requests, "mine", 0, owner="alice")))
    return one


async def a_list_is_repaired() -> Transcript:
    one = Transcript(Stage(LISTS, seed=4, threshold=0.0, burst=1))
    client = one.ask("a", replace(LISTED, polish=True))
    for epoch, steps in enumerate((4, 6, 6), 2):
        await one.step(steps)
        await one.break_and_form(epoch)
    await one.play(client)
    return one


LISTED = Ask("Letters of ours", mode="sot", seed=5, constraint=False, limits=Limits(max_new_tokens=600))
LISTS = {
    "numbered list": " Alpha\n2. **Beta**: the second\n3. alpha",
    "## 1. Alpha": "A is the first. A is the first of all letters. A is the first of all letters.",
    "## 2. Beta": "B follows.",
    "from these notes": "A, then B.",
    "Letters": "Just so.",
}
QUESTION = replace(LISTED, prompt="What are the main letters?", mode="auto")
# Its item is no one-liner, so that the answer is not short.
ITEM = "Alpha is the first of them, and it stands for an open vowel in most of the words that begin with it."
BEGUN = f"Letters are signs. Here are some:\n\n1. {ITEM}"
LONE = "[PLAN]\n1.<40><None>[-]Alpha\n[END]"
EMPTY = "[PLAN]\nnothing of the kind\n[END]"
RUNS: Mapping[str, Run] = {
    "direct": simply(DIRECT),
    "a plan with dependencies": simply(SOT),
    "a plan, slowly": simply(SOT, seed=8, burst=1),
    "leases": simply(COUNT),
    "the model plans": simply(replace(SOT, mode="auto"), {"Tell me": PLAN} | dict(SAYS)),
    "answered at once": simply(replace(DIRECT, mode="auto")),
    "a plan of one": simply(SOT, {**SAYS, "Write the plan.": LONE, "Tell me": "Directly then."}),
    "no plan": simply(SOT, {"Write the plan.": EMPTY}),
    "a list": simply(LISTED, LISTS, threshold=0.0),
    "a list, polished": simply(replace(LISTED, polish=True), LISTS, threshold=0.0),
    "a list, begun with the answer": simply(QUESTION, {**LISTS, "letters": BEGUN}, threshold=0.0),
    "a list of one, begun with the answer": simply(
        QUESTION, {**LISTS, "numbered list": " Only this one", "letters": BEGUN}, threshold=0.0
    ),
    "a list of one": simply(LISTED, {**LISTS, "numbered list": " Only this one"}, threshold=0.0),
    "a list, repaired": a_list_is_repaired,
    "one branch at a time": simply(replace(SOT, limits=Limits(max_parallel=1))),
    "little room": simply(replace(SOT, limits=Limits(max_new_tokens=140, max_branch_tokens=6))),
    "a stop string": simply(replace(SOT, stop=("first", "在这"))),
    "logprobs": simply(replace(DIRECT, logprobs=2)),
    "too long": simply(replace(DIRECT, limits=Limits(max_new_tokens=4000))),
    "three at once": two_at_once,
    "one place": in_turn_through_one_place,
    "cancelled": cancelled_among_branches,
    "left early": left_early,
    "repaired in the plan": repaired_in_the_plan,
    "repaired among branches": repaired_among_branches,
    "given up": rings_break_until_it_is_given_up,
    "no ring": no_ring_comes_back,
    "a branch fails": a_branch_fails,
    "few pages": few_pages,
    "a kept beginning": a_beginning_is_kept,
    "nobody reads": nobody_reads,
    "read on": read_on_elsewhere,
    "a journal": a_journal_is_gone_on_from,
}


async def replay(name: str) -> str:
    """The transcript of one run."""
    return "\n".join((await RUNS[name]()).lines) + "\n"
