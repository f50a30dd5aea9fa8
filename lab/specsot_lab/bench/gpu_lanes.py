"""Runs layer ranges as workers of one process, with a fixed number of frames in flight and a fixed number of
rows in each.

Everything between a frame at stage 0 and its result is what an embedded fleet runs: memberships, links,
devices, graphs. There is no sequencer, no drafter and no master.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from specsot.core.frames import Frame, Opening, Outcome, PromptChunk, Result, TreeSegment
from specsot.core.tree import Tree
from specsot.members import Broken, Configuration, Progress, Range, Ready, Registration
from specsot.members import Stage as Place
from specsot.service.compute import ComputeThread
from specsot.service.membership import Connect, run_membership
from specsot.transport.links import Arrival, Exchange, Link, LocalDialer, LocalLink
from specsot.transport.pending_rows import let_rows_transfer, use_device
from specsot_bench.results import now
from specsot_lab.bench.gpu_steps import PAGE, random_parents
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier
from specsot_worker.worker import Worker

# The epoch of the only formation of the ring.
EPOCH: Final = 1
# Rows of a prompt in one frame.
CHUNK: Final = 256
# Tokens that a sequence may write: so many that none ends by its limit.
PLENTY: Final = 1 << 20
# Steps of each lane that are not counted. Untuned.
WARM_STEPS: Final = 10
# Seconds. How long a frame may take, because kernels are compiled with the first frame of each size. Untuned.
PATIENCE: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoadedRange:
    """A provider of stages, as `StageProvider` describes, whose layers are loaded already.

    name: The worker's name.
    decoder: The layers, on their device.
    """

    name: str
    decoder: Decoder

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""
        return self.decoder.config.vocab

    @property
    def loaded(self) -> int:
        """Return the number of layers of the whole model, whatever the range, so that all layers count as
        loaded.
        """
        return self.decoder.config.layers

    @property
    def fetched(self) -> int:
        """Return 0: no bytes of the model's files were fetched."""
        return 0

    def fetch(self, layers: Range) -> None:
        """Do nothing, since the layers are loaded.

        layers: The layer range to fetch.
        """

    def preload(self, layers: Range | None = None) -> bool:
        """Return False: there is nothing more to load.

        layers: The layer range to load; None: what a later epoch may need.
        """
        return False

    def registration(self) -> Registration:
        """Return what the worker registers with. Its fingerprint is empty, and it reports no memory."""
        config = self.decoder.config
        return Registration("worker", self.name, self.name, "", config.layers, config.max_positions, 0, 0)

    def make_stage(self, configuration: Configuration, layers: object) -> DecoderStage:
        """Return the stage of the loaded layers, on their device.

        configuration: The ring's configuration, from which the number of pages and their size are read.
        layers: The stage's layer range; not used.
        """
        use_device(str(self.decoder.device))
        return DecoderStage(self.decoder, configuration.pages, configuration.page_rows)

    def make_verifier(self, stage: object, configuration: Configuration) -> Verifier:
        """Return a verifier without grammars and without features.

        stage: The last stage; not used.
        configuration: The ring's configuration; not used.
        """
        return Verifier(self.decoder.logits, lambda _: None)


@dataclass(frozen=True, slots=True)
class LaneRun:
    """The measurements of one run.

    seconds: Seconds between successive results, of all lanes together.
    tokens: Token ids that the first lane wrote.
    """

    seconds: list[float]
    tokens: list[int]


@dataclass(slots=True)
class Lane:
    """A sequence that is always in flight, with one tree in every frame.

    sequence: The sequence's id.
    context_length: Number of tokens of its prompt.
    rows: Nodes of each tree, root included.
    committed: Number of tokens that are verified.
    draft_round: Number of its next tree.
    keep: Accepted nodes of the tree before.
    tokens: Token ids that the lane wrote.
    """

    sequence: int
    context_length: int
    rows: int
    committed: int = 0
    draft_round: int = 0
    keep: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)

    def prompt(self) -> Iterator[tuple[Opening | None, PromptChunk]]:
        """Yield the prompt chunk by chunk: the opening, which is None for all chunks but the first, and the
        chunk. The tokens are random, with the sequence's id as the seed. After the last chunk the whole
        prompt counts as committed.

        Token ids are below 1000, and a chunk has at most CHUNK tokens. The lane's `committed` changes only
        when the iteration ends. A prompt without tokens yields nothing.
        """
        rng = random.Random(self.sequence)
        tokens = tuple(rng.randrange(1000) for _ in range(self.context_length))
        opening = Opening(self.sequence, self.context_length, limit=PLENTY, drafted=False)
        for start in range(0, self.context_length, CHUNK):
            chunk = tokens[start : start + CHUNK]
            yield (
                (None if start else opening),
                PromptChunk(self.sequence, start, chunk, start + CHUNK >= self.context_length),
            )
        self.committed = self.context_length

    def record_outcome(self, outcome: Outcome) -> None:
        """Record what the lane's frame has written.

        outcome: The outcome of the frame for this sequence.

        The accepted nodes become those that the next tree keeps, and the draft round advances by one. For a
        prompt's chunks, `prompt` sets the committed tokens afterwards.
        """
        self.committed += len(outcome.accepted)
        self.keep = outcome.accepted
        self.draft_round = self.draft_round + 1
        self.tokens += outcome.tokens

    def make_tree(self) -> TreeSegment:
        """Return the last token with a random tree below it. Its nodes nearly always differ from the target
        tokens. At least one token must have been written.
        """
        tree = Tree((self.tokens[-1], *range(1, self.rows)), random_parents(self.rows))
        return TreeSegment(self.sequence, self.draft_round, self.committed, self.keep, tree)


class Lanes:
    """A complete ring. Runs are measured one after the other.

    first_stage: The link to stage 0.
    results: The queue of what members send.
    """

    def __init__(self, first_stage: Link, results: asyncio.Queue[Any]) -> None:
        """Make lanes without sequences. Sequence ids and frame numbers count from 1.

        first_stage: The link to stage 0, by which frames are sent.
        results: The queue of what members send, from which results are read.
        """
        self._first_stage = first_stage
        self._results = results
        self._sequences = count(1)
        self._numbers = count(1)
        self._in_flight: dict[int, Lane] = {}

    async def run(self, lanes: int, rows: int, context_length: int, steps: int) -> LaneRun:
        """Return the measurements of a run. WARM_STEPS steps of each lane before it are not counted.

        lanes: Number of sequences, and so of frames, that are in flight at once.
        rows: Nodes of each tree, root included.
        context_length: Prompt tokens of each sequence.
        steps: Number of steps of each lane that are measured.

        The result has lanes * steps - 1 intervals. All sequences are closed at the end. Raises AssertionError
        if a member sends anything but a result, and TimeoutError if a frame takes more than PATIENCE seconds.
        """
        all_lanes = [Lane(next(self._sequences), context_length, rows) for _ in range(lanes)]
        for lane in all_lanes:
            await self._run_prompt(lane)
        for lane in all_lanes:
            await self._launch(lane, (), lane.make_tree())
        times = [await self._receive_and_launch(True) for _ in range(lanes * (WARM_STEPS + steps))]
        for _ in all_lanes:
            await self._receive_and_launch(False)
        first_sequence = all_lanes[0].sequence
        await self._launch(all_lanes[0], (), closings=tuple(range(first_sequence, first_sequence + lanes)))
        await self._result()
        return LaneRun(
            [b - a for a, b in zip(times[lanes * WARM_STEPS :], times[lanes * WARM_STEPS + 1 :])],
            all_lanes[0].tokens,
        )

    async def _run_prompt(self, lane: Lane) -> None:
        """Compute a lane's prompt, frame by frame.

        lane: The lane, which has written its first token afterwards.

        The next frame is sent only after the result of the one before.
        """
        for opening, chunk in lane.prompt():
            await self._launch(lane, () if opening is None else (opening,), chunk)
            for outcome in (await self._result()).outcomes:
                lane.record_outcome(outcome)

    async def _receive_and_launch(self, launch_next: bool) -> float:
        """Wait for the next result, and return the time at which it arrived, in seconds.

        launch_next: True if the next frame of the result's lane is launched.

        The result's outcome is recorded in its lane. Raises what `_result` raises.
        """
        result = await self._result()
        arrival_time = now()
        lane = self._in_flight.pop(result.number)
        lane.record_outcome(result.outcomes[0])
        if launch_next:
            await self._launch(lane, (), lane.make_tree())
        return arrival_time

    async def _launch(
        self,
        lane: Lane,
        openings: tuple[Opening, ...],
        *segments: PromptChunk | TreeSegment,
        closings: tuple[int, ...] = (),
    ) -> None:
        """Send a frame for a lane.

        lane: The lane that the frame's result belongs to.
        openings: Sequences that the frame opens.
        segments: Prompt chunks or trees.
        closings: Ids of sequences that the frame closes.

        Frames are numbered from 1; the lane counts as in flight until its result has been received.
        """
        number = next(self._numbers)
        self._in_flight[number] = lane
        await self._first_stage.send(Frame(EPOCH, number, openings, segments, closings))

    async def _result(self) -> Result:
        """Return the next result.

        Raises AssertionError with any other message, such as a report that the ring is broken, and
        TimeoutError after PATIENCE seconds.

        The wait is limited for each call anew.
        """
        async with asyncio.timeout(PATIENCE):
            message = await self._results.get()
        assert isinstance(message, Result), message
        return message


@dataclass(frozen=True, slots=True)
class _QueueUplink:
    """A link to the master that puts everything a member sends into a queue, except reports of progress.

    queue: The queue.
    """

    queue: asyncio.Queue[Any]

    async def send(self, message: Any) -> None:
        """Put a message into the queue, unless it only reports progress.

        message: What the member sends.
        """
        if not isinstance(message, Progress):
            self.queue.put_nowait(message)

    async def close(self) -> None:
        """Do nothing, since there is no connection."""
        ...


class LaneWorker(Worker):
    """A worker whose first stage accepts frames from the lanes, because there is no sequencer."""

    def _may_send(self, configuration: Configuration, arrival: Arrival) -> bool:
        """Return whether a message is accepted: any frame, and of other messages those that any worker
        accepts.

        configuration: The current configuration of the ring.
        arrival: The message and its sender.
        """
        return isinstance(arrival.message, Frame) or super()._may_send(configuration, arrival)


@asynccontextmanager
async def lanes_over(decoders: Sequence[Decoder], pages: int) -> AsyncGenerator[Lanes]:
    """Yield lanes over workers of this process. The workers stop at the end of the context.

    decoders: Successive layer ranges, each on a device of its own.
    pages: Number of KV pages of each worker.

    Raises AssertionError, with the reason if a worker has one, if a worker is not ready.
    """
    exchange = Exchange()
    leaving = asyncio.Event()
    received = asyncio.Queue[Any]()
    names = [f"worker-{number}" for number in range(len(decoders))]
    stages = tuple(Place(name, name, decoder.layers) for name, decoder in zip(names, decoders))
    inboxes = [exchange.listen(name) for name in names]
    threads = [ComputeThread(name) for name in names]
    memberships: list[asyncio.Task[None]] = []
    for name, decoder, thread, inbox in zip(names, decoders, threads, inboxes):
        worker = LaneWorker(
            LoadedRange(name, decoder), LocalDialer(name, exchange, prepare=let_rows_transfer), thread
        )
        memberships.append(
            asyncio.create_task(run_membership(worker, inbox, connector_to(received), leaving))
        )
        configuration = Configuration(EPOCH, name, stages, pages, PAGE, slots=1)
        await LocalLink("master", inbox).send(configuration)
    try:
        for _ in names:
            ready = await received.get()
            assert isinstance(ready, Ready), ready.reason if isinstance(ready, Broken) else ready
        yield Lanes(LocalLink("lanes", inboxes[0]), received)
    finally:
        leaving.set()
        await asyncio.gather(*memberships)
        for thread in threads:
            thread.shutdown()


def connector_to(received: asyncio.Queue[Any]) -> Connect:
    """Return the function by which a member registers: it gives the member an uplink into the queue.

    received: The queue.

    All members that use the function share the queue. Reports of progress are dropped.
    """

    async def connect(registration: Registration) -> Link:
        """Return the uplink.

        registration: What the member registers with; not used.
        """
        return _QueueUplink(received)

    return connect
