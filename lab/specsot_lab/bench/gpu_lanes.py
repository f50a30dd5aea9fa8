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
        """Return the size of the vocabulary."""
        return self.decoder.config.vocab

    @property
    def loaded(self) -> int:
        """Return the number of loaded layers."""
        return self.decoder.config.layers

    @property
    def fetched(self) -> int:
        """Return 0: no layers were fetched."""
        return 0

    def fetch(self, layers: Range) -> None:
        """Do nothing, since the range is loaded."""

    def preload(self, layers: Range | None = None) -> bool:
        """Return False: nothing has to be loaded ahead."""
        return False

    def registration(self) -> Registration:
        """Return what the worker registers with."""
        config = self.decoder.config
        return Registration("worker", self.name, self.name, "", config.layers, config.max_positions, 0, 0)

    def make_stage(self, configuration: Configuration, layers: object) -> DecoderStage:
        """Return the stage of the range, on the decoder's device."""
        use_device(str(self.decoder.device))
        return DecoderStage(self.decoder, configuration.pages, configuration.page_rows)

    def make_verifier(self, stage: object, configuration: Configuration) -> Verifier:
        """Return a verifier without grammars and features."""
        return Verifier(self.decoder.logits, lambda _: None)


@dataclass(frozen=True, slots=True)
class LaneRun:
    """One run. seconds: between results, of all lanes together. tokens: token ids that the first
    lane wrote.
    """

    seconds: list[float]
    tokens: list[int]


@dataclass(slots=True)
class Lane:
    """A sequence that is always in flight, with a tree in every frame.

    sequence: its id. text: rows of its prompt. rows: nodes of each tree. committed: tokens that are certain.
        draft_round: number of its next tree. keep: accepted nodes of the tree before. tokens: that it wrote.
    """

    sequence: int
    text: int
    rows: int
    committed: int = 0
    draft_round: int = 0
    keep: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)

    def prompt(self) -> Iterator[tuple[Opening | None, PromptChunk]]:
        """Yield the prompt in chunks, the opening with the first; its tokens are made up from the sequence's
        id.
        """
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
        """Record the outcome of a frame."""
        self.committed += len(outcome.accepted)
        self.keep = outcome.accepted
        self.draft_round = self.draft_round + 1
        self.tokens += outcome.tokens

    def grow(self) -> TreeSegment:
        """Return the last token with a made-up tree below it, whose nodes are wrong nearly always."""
        tree = Tree((self.tokens[-1], *range(1, self.rows)), parents_of(self.rows))
        return TreeSegment(self.sequence, self.draft_round, self.committed, self.keep, tree)


class Lanes:
    """A complete ring; runs are measured one after the other. first: the link to stage 0. results: queue of
    what members send.
    """

    def __init__(self, first: Link, results: asyncio.Queue[Any]) -> None:
        self._first = first
        self._results = results
        self._sequences = count(1)
        self._numbers = count(1)
        self._flying: dict[int, Lane] = {}

    async def run(self, lanes: int, rows: int, text: int, steps: int) -> LaneRun:
        """Return the times of `steps` steps of each lane.

        lanes: sequences that are in flight at once. rows: nodes of each tree. text: rows of each sequence
            before.
        """
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
        """Let a lane's prompt pass the ring."""
        for opening, chunk in lane.prompt():
            await self._launch(lane, () if opening is None else (opening,), chunk)
            for outcome in (await self._result()).outcomes:
                lane.learn(outcome)

    async def _turn(self, again: bool) -> float:
        """Wait for the next result, launch its lane `again` if so asked, and return when the result came."""
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
        """Send a frame with these openings, segments and closings for a lane."""
        number = next(self._numbers)
        self._flying[number] = lane
        await self._first.send(Frame(EPOCH, number, openings, segments, closings))

    async def _result(self) -> Result:
        """Return the next result. Raises what broke the ring, or TimeoutError after PATIENCE."""
        async with asyncio.timeout(PATIENCE):
            message = await self._results.get()
        assert isinstance(message, Result), message
        return message


@dataclass(frozen=True, slots=True)
class _CollectingUplink:
    """Everything that any member says to the master, but for how far it is."""

    heard: asyncio.Queue[Any]

    async def send(self, message: Any) -> None:
        """Put a message of a member into the queue, unless it only reports progress."""
        if not isinstance(message, Progress):
            self.heard.put_nowait(message)

    async def close(self) -> None:
        """Do nothing."""
        ...


class LaneWorker(Worker):
    """Its first stage takes frames as they are made here; there is no sequencer."""

    def _may_send(self, configuration: Configuration, arrival: Arrival) -> bool:
        """Return whether a message is accepted: frames always, as they are made by the lanes, others as
        usual.
        """
        return isinstance(arrival.message, Frame) or super()._may_send(configuration, arrival)


@asynccontextmanager
async def lanes_over(decoders: Sequence[Decoder], pages: int) -> AsyncGenerator[Lanes]:
    """Yield lanes over workers of this process. decoders: ranges that follow each other, each on a device of
    its own. pages: KV pages of each.
    """
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
    """Return the function that registers a member by giving it an uplink into the queue."""

    async def connect(registration: Registration) -> Link:
        """Return the uplink. registration: not used."""
        return _CollectingUplink(heard)

    return connect
