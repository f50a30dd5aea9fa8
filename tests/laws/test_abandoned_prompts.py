"""Prompts that clients abandon while they are prefilled: what is computed stays, and answers are the same.

The whole system in one process, on the demo model in fp32.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from specsot.core.frames import Frame, PromptChunk, Result
from specsot.events import Finished
from specsot.members import TreeShape
from specsot.params import Ask, Limits, Message
from specsot.service.membership import RingMember
from specsot.service.options import DraftModelOptions
from specsot.transport.links import Dialer
from specsot_app.fleet.embedded import EmbeddedFleet, EmbeddedOptions, MemberMaker
from specsot_drafter.drafter import Drafter
from specsot_drafter.loader import DraftLoader
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.http.app import build_app
from specsot_master.http.calls import HttpContext
from specsot_master.http.server import HttpServer
from specsot_worker.loader import StageLoader
from specsot_worker.observer import WorkerObserver
from specsot_worker.worker import Worker
from tests.conftest import some

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

RULES = "Answer as a patient teacher would, in plain words, and mention rule {}. "
LONG = Ask(
    messages=(Message("system", "".join(map(RULES.format, range(22)))), Message("user", "Explain tides.")),
    mode="direct",
    limits=Limits(max_new_tokens=8),
    ignore_eos=True,
)
OTHER_END = replace(LONG, messages=(LONG.messages[0], Message("user", "Explain rivers, please.")))
SHORT = Ask(prompt="Why?", mode="direct", limits=Limits(max_new_tokens=4))


class Watch(WorkerObserver):
    """Records the prompt chunks that stage 0 launches, and how much of prefixes has been computed."""

    def __init__(self) -> None:
        self.chunks = list[PromptChunk]()
        self.num_computed = 0
        self.changed = asyncio.Event()

    def launched(self, frame: Frame, now: float) -> Frame:
        self.chunks += [one for one in frame.segments if isinstance(one, PromptChunk)]
        return frame

    def returned(self, result: Result, now: float) -> None:
        self.num_computed = max(self.num_computed, *(one.num_computed for one in result.prefixes), 0)
        self.changed.set()

    async def has_computed(self, num_tokens: int) -> None:
        """Wait until so many tokens of a prefix have been computed."""
        while self.num_computed < num_tokens:
            self.changed.clear()
            await self.changed.wait()

    def fed(self, min_position: int = 0) -> list[int]:
        """The positions that long prompts were fed at, in order, without short chunks at their beginnings."""
        return [
            position
            for chunk in self.chunks
            for position in range(chunk.start, chunk.start + len(chunk.tokens))
            if position >= min_position
        ]


@asynccontextmanager
async def fleet(demo: Path, watch: Watch, drafts: bool, stages: int, page_rows: int):
    """A fleet whose frames have 24 tokens, so that a long prompt needs many."""
    weights = DraftModelOptions(
        demo / "base", dtype="fp32", draft_model=demo / "eagle3" if drafts else None, kv_memory=1 << 26
    )
    shape = TreeShape(4, 3, 12, fixed=True)
    ring = RingOptions(page_rows=page_rows, rows=24, shape=shape, draft_timeout=30.0)
    options = EmbeddedOptions(weights, ring, stages=stages)

    def worker(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        observer = watch if name == "worker-0" else None
        return Worker(StageLoader(options.member_options(name), name), dialer, compute, observer=observer)

    def drafter(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        return Drafter(DraftLoader(options.member_options(name), name), dialer, compute)

    makers: dict[str, MemberMaker] = {f"worker-{n}": worker for n in range(stages)}
    opened = await EmbeddedFleet.start(options, makers | ({"drafter": drafter} if drafts else {}))
    try:
        yield opened
    finally:
        await opened.close()


async def answer(opened: EmbeddedFleet, ask: Ask) -> Finished:
    events = [numbered.event async for numbered in opened.generate(ask)]
    assert isinstance(events[-1], Finished)
    return events[-1]


async def abandon(opened: EmbeddedFleet, watch: Watch, ask: Ask, num_tokens: int) -> None:
    """Ask, and leave as soon as so many tokens of the prompt have been computed."""
    await leave(asyncio.create_task(answer(opened, ask)), watch, num_tokens)


async def leave(asking: asyncio.Task[Any], watch: Watch, num_tokens: int) -> None:
    """Cancel a client as soon as so many tokens of its prompt have been computed.

    A client that is answered before that, a refusal for example, fails the test instead of having it wait.
    """
    computing = asyncio.create_task(watch.has_computed(num_tokens))
    await asyncio.wait([asking, computing], return_when=asyncio.FIRST_COMPLETED)
    computing.cancel()
    assert not asking.done(), f"answered before it left: {asking.result()}"
    asking.cancel()
    await asyncio.wait([asking])


FRESH: dict[tuple[bool, int, int], dict[Ask, Finished]] = {}


async def fresh_answers(
    demo: Path, drafts: bool = True, stages: int = 2, page_rows: int = 16
) -> dict[Ask, Finished]:
    """What a new fleet answers to the long prompts, of which the first is computed as a whole: once for each
    kind of fleet.
    """
    kind = drafts, stages, page_rows
    if kind not in FRESH:
        async with fleet(demo, Watch(), *kind) as opened:
            FRESH[kind] = {ask: await answer(opened, ask) for ask in (LONG, OTHER_END)}
    return FRESH[kind]


@pytest.mark.parametrize(
    ("drafts", "stages", "page_rows"), some([(True, 2, 16), (False, 1, 256), (False, 3, 16)], 0)
)
async def test_a_prompt_that_is_abandoned_again_and_again_is_computed_once(
    demo_model: Path, drafts: bool, stages: int, page_rows: int
) -> None:
    fresh = (await fresh_answers(demo_model, drafts, stages, page_rows))[LONG]
    watch = Watch()
    async with fleet(demo_model, watch, drafts, stages, page_rows) as opened:
        for num_tokens in (24, 90, 200):
            await abandon(opened, watch, LONG, num_tokens)
            begun = len(watch.chunks)
            await answer(opened, SHORT)
            later = [one for one in watch.chunks[begun:] if one.start >= num_tokens]
            assert not later, "no token is computed for a client that is gone"
        computed = watch.num_computed
        again = await answer(opened, LONG)
        info = await opened.info()
    num_prompt_tokens = again.statistics.prompt_tokens
    assert 200 <= computed <= again.statistics.cached_tokens < num_prompt_tokens - 100
    assert (again.tokens, again.text) == (fresh.tokens, fresh.text)
    assert watch.fed(64) == list(range(64, num_prompt_tokens)), "each token once"
    assert again.statistics.mean_accepted == pytest.approx(fresh.statistics.mean_accepted, rel=0.15)
    assert info.pages is not None
    assert info.pages.free == info.pages.total


async def test_another_prompt_forks_what_is_computed_of_an_abandoned_one(
    demo_model: Path,
) -> None:
    """It needs more of their common beginning than is computed, and nothing of the rest."""
    fresh = await fresh_answers(demo_model)
    watch = Watch()
    async with fleet(demo_model, watch, True, 2, 16) as opened:
        await abandon(opened, watch, LONG, 100)
        answers = [await answer(opened, OTHER_END)]
        assert watch.fed(64) == list(range(64, answers[0].statistics.prompt_tokens)), "each token once"
        answers.append(await answer(opened, LONG))
    assert [one.tokens for one in answers] == [fresh[ask].tokens for ask in (OTHER_END, LONG)]
    assert 100 <= answers[0].statistics.cached_tokens < 250
    assert answers[1].statistics.cached_tokens > 350


async def test_a_fork_that_waits_for_an_abandoned_prompt_gets_as_much_as_it_needs(demo_model: Path) -> None:
    """And a client that comes back in the same moment as it leaves continues, too."""
    fresh = await fresh_answers(demo_model)
    watch = Watch()
    async with fleet(demo_model, watch, True, 2, 16) as opened:
        first = asyncio.create_task(answer(opened, LONG))
        await watch.has_computed(48)
        waiting = asyncio.create_task(answer(opened, OTHER_END))
        await watch.has_computed(96)
        first.cancel()
        again = asyncio.create_task(answer(opened, LONG))
        answers = [await waiting, await again]
    assert [one.tokens for one in answers] == [fresh[ask].tokens for ask in (OTHER_END, LONG)]


async def never() -> Any:
    """Stand for the state and the metrics, which no call of these tests asks for."""
    raise AssertionError("no call asks for the state or the metrics")


@asynccontextmanager
async def served(opened: EmbeddedFleet) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the HTTP endpoint of a fleet."""
    master = opened._master
    context = HttpContext(
        master.requests, master.info().models[0], master.text, state=never, figures=never, began=0
    )
    server = HttpServer(build_app(context), address="127.0.0.1:0")
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}", timeout=120, trust_env=False
        ) as client:
            yield client
    finally:
        await server.close(0)


@pytest.mark.parametrize("stream", some([True, False], 0))
async def test_a_client_that_drops_its_connection_and_asks_again_finds_what_was_computed(
    demo_model: Path, stream: bool
) -> None:
    messages = [{"role": one.role, "content": one.content} for one in LONG.messages]
    body = {"messages": messages, "max_tokens": 8, "ignore_eos": True}
    watch = Watch()
    async with fleet(demo_model, watch, True, 1, 16) as opened, served(opened) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body | {"stream": stream}))
        await leave(asking, watch, 100)
        # Each look is an HTTP call, during which the server notices that the client is gone.
        while opened._master.info().requests.running:
            await client.get("/v1/models")
        computed = watch.num_computed
        again = (await client.post("/v1/chat/completions", json=body)).json()
    usage, (choice,) = again["usage"], again["choices"]
    assert 100 <= computed <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] - 100
    assert choice["message"]["content"] == (await fresh_answers(demo_model))[LONG].text
