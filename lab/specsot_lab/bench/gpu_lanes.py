"""Layer ranges as workers of one process, fed by hand: so many frames in flight, so many rows in each.

Everything between a frame at stage 0 and its result is what an
embedded fleet runs: members' lives, links, devices, graphs. Sequencer, drafter and master stand still.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from specsot.core.frames import Frame, Opening, Outcome, PromptChunk, Result, TreeSegment
from specsot.core.tree import Tree
from specsot.members import Broken, Configuration, Progress, Range, Ready, Registration
from specsot.members import Stage as Place
from specsot.service.compute import ComputeThread
from specsot.service.membership import Connect, run_membership
from specsot.transport.links import Arrival, Exchange, Link, LocalDialer, LocalLink
from specsot.transport.pending_rows import let_rows_transfer, use_device
from specsot_bench.results import now
from specsot_lab.bench.gpu_steps import PAGE, parents_of
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier
from specsot_worker.worker import Worker

EPOCH = 1
CHUNK = 256
PLENTY = 1 << 20  # tokens a sequence may write: none ends by its limit
WARM = 10  # steps of each lane that are not told
PATIENCE = 60.0  # seconds for a frame; kernels are compiled with the first of its size


@dataclass(frozen=True, slots=True)
class LoadedRange:
    """See `StageProvider`: a range that is loaded already."""

    name: str
    decoder: Decoder

    @property
    def vocabulary(self) -> int:
        return self.decoder.config.vocab

    @property
    def loaded(self) -> int:
        return self.decoder.config.layers

    @property
    def fetched(self) -> int:
        return 0

    def fetch(self, layers: Range) -> None:
        """There is nothing to fetch."""

    def preload(self, layers: Range | None = None) -> bool:
        return False

    def registration(self) -> Registration:
        config = self.decoder.config
        return Registration("worker", self.name, self.name, "", config.layers, config.max_positions, 0, 0)

    def make_stage(self, configuration: Configuration, layers: object) -> DecoderStage:
        use_device(str(self.decoder.device))
        return DecoderStage(self.decoder, configuration.pages, configuration.page_rows)

    def make_verifier(self, stage: object, configuration: Configuration) -> Verifier:
        return Verifier(self.decoder.logits, lambda _: None)


@dataclass(frozen=True, slots=True)
class LaneRun:
    """A run. seconds: between results, of all lanes together; tokens: what the first lane wrote."""

    seconds: list[float]
    tokens: list[int]


@dataclass(slots=True)
class Lane:
    """A sequence that is always in flight, with a tree of so many nodes in every frame."""

    sequence: int
    text: int
    rows: int
    committed: int = 0
    draft_round: int = 0
    keep: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)

    def prompt(self) -> Iterator[tuple[Opening | None, PromptChunk]]:
        """Made-up tokens, the same for the same sequence."""
        dice = random.Random(self.sequence)
        tokens = tuple(dice.randrange(1000) for _ in range(self.text))
        opening = Opening(self.sequence, self.text, limit=PLENTY, drafted=False)
        for start in range(0, self.text, CHUNK):
            part = tokens[start : start + CHUNK]
            yield (
                (None if start else opening),
                PromptChunk(self.sequence, start, part, start + CHUNK >= self.text),
            )
        self.committed = self.text

    def learn(self, outcome: Outcome) -> None:
        self.committed += len(outcome.accepted)
        self.keep = outcome.accepted
        self.draft_round = self.draft_round + 1
        self.tokens += outcome.tokens

    def grow(self) -> TreeSegment:
        """The last token with a made-up tree over it, whose nodes are wrong nearly always."""
        tree = Tree((self.tokens[-1], *range(1, self.rows)), parents_of(self.rows))
        return TreeSegment(self.sequence, self.draft_round, self.committed, self.keep, tree)


class Lanes:
    """A ring that is complete; runs are measured one after the other."""

    def __init__(self, first: Link, results: asyncio.Queue[Any]) -> None:
        self._first = first
        self._results = results
        self._sequences = count(1)
        self._numbers = count(1)
        self._flying: dict[int, Lane] = {}

    async def run(self, lanes: int, rows: int, text: int, steps: int) -> LaneRun:
        """So many steps of each lane, behind `text` rows of its own."""
        every = [Lane(next(self._sequences), text, rows) for _ in range(lanes)]
        for lane in every:
            await self._feed(lane)
        for lane in every:
            await self._launch(lane, (), lane.grow())
        times = [await self._turn(True) for _ in range(lanes * (WARM + steps))]
        for _ in every:
            await self._turn(False)
        first = every[0].sequence
        await self._launch(every[0], (), closings=tuple(range(first, first + lanes)))
        await self._result()
        return LaneRun(
            [b - a for a, b in zip(times[lanes * WARM :], times[lanes * WARM + 1 :])], every[0].tokens
        )

    async def _feed(self, lane: Lane) -> None:
        for opening, chunk in lane.prompt():
            await self._launch(lane, () if opening is None else (opening,), chunk)
            for outcome in (await self._result()).outcomes:
                lane.learn(outcome)

    async def _turn(self, again: bool) -> float:
        """Until the next result, whose lane goes on. Returns when it came."""
        result = await self._result()
        came = now()
        lane = self._flying.pop(result.number)
        lane.learn(result.outcomes[0])
        if again:
            await self._launch(lane, (), lane.grow())
        return came

    async def _launch(
        self,
        lane: Lane,
        openings: tuple[Opening, ...],
        *segments: PromptChunk | TreeSegment,
        closings: tuple[int, ...] = (),
    ) -> None:
        number = next(self._numbers)
        self._flying[number] = lane
        await self._first.send(Frame(EPOCH, number, openings, segments, closings))

    async def _result(self) -> Result:
        """Raises what broke the ring; TimeoutError where nobody tells."""
        async with asyncio.timeout(PATIENCE):
            message = await self._results.get()
        assert isinstance(message, Result), message
        return message


@dataclass(frozen=True, slots=True)
class _CollectingUplink:
    """Everything that any member says to the master, but for how far it is."""

    heard: asyncio.Queue[Any]

    async def send(self, message: Any) -> None:
        if not isinstance(message, Progress):
            self.heard.put_nowait(message)

    async def close(self) -> None: ...


class LaneWorker(Worker):
    """Its first stage takes frames as they are made here; there is no sequencer."""

    def _may_send(self, configuration: Configuration, arrival: Arrival) -> bool:
        return isinstance(arrival.message, Frame) or super()._may_send(configuration, arrival)


@asynccontextmanager
async def lanes_over(decoders: Sequence[Decoder], pages: int) -> AsyncGenerator[Lanes]:
    """decoders: ranges that follow each other, each on a device of its own."""
    exchange = Exchange()
    leaving = asyncio.Event()
    heard = asyncio.Queue[Any]()
    names = [f"worker-{number}" for number in range(len(decoders))]
    stages = tuple(Place(name, name, decoder.layers) for name, decoder in zip(names, decoders))
    inboxes = [exchange.listen(name) for name in names]
    threads = [ComputeThread(name) for name in names]
    lives: list[asyncio.Task[None]] = []
    for name, decoder, thread, inbox in zip(names, decoders, threads, inboxes):
        part = LaneWorker(
            LoadedRange(name, decoder), LocalDialer(name, exchange, prepare=let_rows_transfer), thread
        )
        lives.append(asyncio.create_task(run_membership(part, inbox, joining(heard), leaving)))
        configuration = Configuration(EPOCH, name, stages, pages, PAGE, slots=1)
        await LocalLink("master", inbox).send(configuration)
    try:
        for _ in names:
            ready = await heard.get()
            assert isinstance(ready, Ready), ready.reason if isinstance(ready, Broken) else ready
        yield Lanes(LocalLink("lanes", inboxes[0]), heard)
    finally:
        leaving.set()
        await asyncio.gather(*lives)
        for thread in threads:
            thread.shutdown()


def joining(heard: asyncio.Queue[Any]) -> Connect:
    async def connect(registration: Registration) -> Link:
        return _CollectingUplink(heard)

    return connect
