"""What layer ranges on several GPUs of one host cost a single stream, and bring as many streams as stages.

See `gpu_lanes`. Weights are made up, the same on every GPU, so that the tokens
written over several must be those written on one.

step:        wall milliseconds from result to result of one stream, one frame in flight.
throughput: frames a second of all streams together, the same rows in each, against one GPU with one frame.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import uvloop
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.core.frames import Result
from specsot.errors import InvalidRequest
from specsot.members import Configuration, Range, Ready, Stage, Transport
from specsot.service.membership import run_membership
from specsot.service.runtime_env import set_runtime_defaults
from specsot.transport.grpc_links import SERVICE, GrpcDialer, RingService
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Dialer, Inbox, LocalLink
from specsot.transport.nccl_links import DirectDialer, DirectHost
from specsot_bench.core.tables import Column, markdown
from specsot_bench.results import Row, Stopwatch
from specsot_lab.bench.clock import RowLog, seconds_of
from specsot_lab.bench.gpu_lanes import EPOCH, LaneRun, Lanes, LaneWorker, LoadedRange, joining, lanes_over
from specsot_lab.bench.gpu_loop import free_loops
from specsot_lab.bench.gpu_steps import PAGE
from specsot_lab.bench.synthetic_models import SPREAD, MadeUp, bytes_of_a_token, config_of
from specsot_model.decoder import Decoder

# Seconds in which a process may leave. Untuned.
PATIENCE = 10.0  # seconds in which a process may leave

Load = Callable[[int], Decoder]  # the range of that number; must be importable by name, or a partial of such


@dataclass(frozen=True, slots=True)
class Spread:
    """Ranges, one a process. folder: for their sockets."""

    load: Load
    stages: tuple[Stage, ...]
    pages: int
    transport: Transport
    folder: str = ""

    def configuration(self, number: int) -> Configuration:
        """Return the configuration of the worker of this stage."""
        return Configuration(EPOCH, self.stages[number].name, self.stages, self.pages, PAGE, slots=1)


class Overheard(Inbox):
    """An inbox that also puts every result into a queue."""

    def __init__(self, heard: asyncio.Queue[Any]) -> None:
        super().__init__()
        self._heard = heard

    def put(self, sender: str, message: Any, names: frozenset[str] | None = None) -> None:
        """Deliver a message; a result is put into the queue, so that the next frame is made at once, as a
        sequencer would.
        """
        if isinstance(message, Result):  # the next frame is made at once, as a sequencer would
            self._heard.put_nowait(message)
        super().put(sender, message, names)


@asynccontextmanager
async def lanes_apart(spread: Spread) -> AsyncGenerator[Lanes]:
    """Yield lanes over stages of which stage 0 runs here, and every other one in a process of its own."""
    set_runtime_defaults()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="specsot-"))
        stages = tuple(replace(stage, address=f"unix:{folder}/{stage.name}") for stage in spread.stages)
        spread = replace(spread, folder=folder, stages=stages)
        ways = [_start(spread, number, stack) for number in range(1, len(stages))]
        heard = asyncio.Queue[Any]()  # results that come back to stage 0, and all that it tells the master
        inbox = await stack.enter_async_context(_member(spread, 0, Overheard(heard), heard))
        for way in ways:
            await _receive_word(way, "open")
        for way in ways:
            way.send("go")
        await LocalLink("master", inbox).send(spread.configuration(0))
        assert isinstance(ready := await heard.get(), Ready), ready
        for way in ways:
            await _receive_word(way, "ready")
        try:
            yield Lanes(LocalLink("lanes", inbox), heard)
        finally:
            for way in ways:
                way.send("leave")


def _start(spread: Spread, number: int, stack: AsyncExitStack) -> Connection:
    """Start the process of a stage, and return the connection to it. stack: ends the process."""
    fresh = multiprocessing.get_context("spawn")
    here, there = fresh.Pipe()
    process = fresh.Process(target=live_apart, args=(spread, number, there), daemon=True)
    process.start()
    stack.callback(_end, process)
    return here


def _end(process: BaseProcess) -> None:
    """Wait PATIENCE seconds for a process that was asked to leave, then kill it."""
    process.join(PATIENCE)
    process.kill()


async def _receive_word(way: Connection, what: str) -> None:
    """Wait for a message of a process. Raises AssertionError unless it is the expected one.

    way: the connection to the process.
    what: the expected message.
    """
    said = await asyncio.to_thread(way.recv)
    assert said == what, said


def live_apart(spread: Spread, number: int, way: Connection) -> None:
    """Run the stage of this number in a process of its own. way: the connection to the first process."""
    set_runtime_defaults()
    uvloop.run(_live(spread, number, way))


async def _live(spread: Spread, number: int, way: Connection) -> None:
    """Run the stage: register, wait for the configuration, and stay until told to leave."""
    heard = asyncio.Queue[Any]()
    async with _member(spread, number, Inbox(), heard) as inbox:
        way.send("open")
        await _receive_word(way, "go")
        await LocalLink("master", inbox).send(spread.configuration(number))
        ready = await heard.get()
        way.send("ready" if isinstance(ready, Ready) else str(ready))
        await _receive_word(way, "leave")


@asynccontextmanager
async def _member(
    spread: Spread, number: int, inbox: Inbox, heard: asyncio.Queue[Any]
) -> AsyncGenerator[Inbox]:
    """Yield the inbox of a worker that runs within the context. heard: gets what the worker sends to the
    master.
    """
    place = spread.stages[number]
    rows = DirectHost()
    leaving = asyncio.Event()
    service = RingService(inbox, place.name, rows=rows)
    endpoint = await open_server(place.address, {SERVICE: service.attach})
    dialer: Dialer = GrpcDialer(place.name, inbox)
    if spread.transport == "direct":
        dialer = DirectDialer(place.name, dialer, rows)
    decoder = spread.load(number)
    thread = ThreadPoolExecutor(1)
    reading = ThreadPoolExecutor(1) if decoder.device.type == "cuda" else None
    part = LaneWorker(LoadedRange(place.name, decoder), dialer, thread, verify_thread=reading)
    life = asyncio.create_task(run_membership(part, inbox, joining(heard), leaving))
    try:
        yield inbox
    finally:
        leaving.set()
        await life
        rows.close()
        await endpoint.close(0)
        for each in filter(None, (thread, reading)):
            each.shutdown()


SMALL = "Llama-3.1-8B"
LARGE = "Llama-3.1-70B"
ROWS = (1, 16, 64)
NAMES = ("model", "what", "gpus", "rows", "in flight")  # what a row is called after
STEPS = 200
STEPS_LARGE = 50
HOPS = 200


class Named(MadeUp):
    """Made up from the tensor's name: equal on GPUs of one kind."""

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Return a tensor that is made up from its name: norms are ones, others normally distributed."""
        if "norm" in name:
            return super().expect(name, shape, dtype, device)
        dice = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, SPREAD, generator=dice)


def measure(gpus: int, text: int, transport: Transport | None, output: Path | None) -> int:
    """Measure, print every row as it comes, and write all of them; return the exit status 0.

    gpus: number of GPUs. text: rows in the cache before. transport: between processes, one a GPU; None: all
        in this one. output: the JSON file, or None.
    Raises InvalidRequest for too few GPUs.
    """
    if transport == "zmq":
        raise InvalidRequest("bench gpu measures transports grpc and direct, not zmq", "transport")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < gpus:
        raise InvalidRequest(f"bench gpu --gpus {gpus} needs as many CUDA devices, {there} are here", "gpus")
    work = _measure(gpus, text, transport, output)
    uvloop.run(work) if transport else asyncio.run(work)
    return 0


async def _measure(gpus: int, text: int, transport: Transport | None, output: Path | None) -> None:
    """Measure all rows, log them, and print the table."""
    settings: dict[str, Any] = {"device": torch.cuda.get_device_name(), "gpus": gpus, "text": text}
    settings |= {"torch": torch.__version__, "weights": "made up", "dtype": "bf16"}
    settings |= {"between stages": transport or "one process"}
    log = RowLog("gpu-ranges", settings, output, *NAMES)
    async for row in _rows(gpus, text, transport):
        log.add(row)
    print(page_of(log.rows))


COLUMNS = tuple(
    Column(
        heading, lambda row, heading=heading: str(row.get(heading, "-")), text=heading in ("model", "what")
    )
    for heading in (
        *("model", "what", "gpus", "rows", "in flight", "ms", "frames/s", "x one GPU", "of GPUs"),
        "same tokens",
    )
)


def page_of(rows: Sequence[Row]) -> str:
    """Return the table in Markdown; rows without a number of rows are left out."""
    return markdown(COLUMNS, [row for row in rows if "rows" in row])


async def _rows(gpus: int, text: int, transport: Transport | None) -> AsyncIterator[Row]:
    """Yield the rows: a hop, then rings of 1, 2, 4, ... GPUs, then a large model if it fits."""
    yield measure_hop()
    counts = [count for count in (1, 2, 4, 8) if count < gpus] + [gpus]
    one: dict[int, LaneRun] = {}
    for count in counts:
        model = RangedModel(SMALL, config_of(SMALL), count, transport=transport)
        async for row in measure_ring(model, text, one):
            yield row
    large = config_of(LARGE)
    if (need := 2 * large.hidden * large.vocab + bytes_of_a_token(large, 2)) < _memory(gpus):
        model = RangedModel(LARGE, large, gpus, transport=transport)
        async for row in measure_ring(model, text, {}, (1, 64), STEPS_LARGE):
            yield row
    else:
        yield {"model": LARGE, "what": f"left out: {need / 2**30:.0f} GiB of weights do not fit"}


@dataclass(frozen=True, slots=True)
class RangedModel:
    """A shape, cut into ranges that read about as many bytes. transport: between their processes; None: all
    in one.
    """

    name: str
    config: ModelConfig
    ranges: int
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    transport: Transport | None = None

    def layers(self, number: int) -> Range:
        """Return the layer range of this number."""
        return Range(self._edge(number), self._edge(number + 1))

    def _edge(self, number: int) -> int:
        """Return the layer where a range begins. The lm_head counts as layers of its size, and belongs to the
        last range.
        """
        layers = self.config.layers
        left = self.ranges - number
        head = self.config.hidden * (self.config.vocab + 1)
        layer = (bytes_of_a_token(self.config, 1) - head) / layers
        return min(round((layers + head / layer) * number / self.ranges), layers - left)

    def load(self, number: int) -> Decoder:
        """Return the range of this number on its GPU."""
        device = torch.device(self.device, number) if self.device == "cuda" else torch.device(self.device)
        return Decoder(self.config, Named(), self.layers(number), self.dtype, device)

    def lanes(self, pages: int) -> AbstractAsyncContextManager[Lanes]:
        """Return the context of lanes over all ranges. pages: KV pages of each."""
        numbers = range(self.ranges)
        if self.transport is None:
            return lanes_over([self.load(number) for number in numbers], pages)
        stages = tuple(Stage(f"worker-{number}", "", self.layers(number)) for number in numbers)
        return lanes_apart(Spread(self.load, stages, pages, self.transport))


async def measure_ring(
    model: RangedModel, text: int, one: dict[int, LaneRun], sizes: Sequence[int] = ROWS, steps: int = STEPS
) -> AsyncIterator[Row]:
    """Yield the rows of one number of GPUs.

    model: the shape and its ranges. text: rows in the cache before. one: what one GPU took, by rows; filled
        in by a ring of one. sizes: rows of a frame. steps: of each run.
    """
    watch = Stopwatch()
    many = model.ranges
    pages = (many + 1) * (-(-(text + steps * 2 + max(sizes)) // PAGE) + 4)
    async with model.lanes(pages) as lanes:
        head: Row = {"model": model.name, "gpus": many}
        yield {**head, "what": "ready", "s": round(watch.seconds, 1)}
        alone: dict[int, LaneRun] = {}
        for rows in sizes:
            alone[rows] = await lanes.run(1, rows, text, steps)
            if many == 1:
                one[rows] = alone[rows]
            yield {**head, "what": "step of one stream", "rows": rows, **_step(alone[rows], one.get(rows))}
        for rows in sizes if many > 1 else ():
            for flight in (many, many + 1):
                row: Row = {**head, "what": "throughput", "rows": rows, "in flight": flight}
                told = await lanes.run(flight, rows, text, steps)
                yield {**row, **_throughput(told, alone[rows], one.get(rows), many)}


def _step(alone: LaneRun, one: LaneRun | None) -> Row:
    """Return the figures of one stream. alone: its run. one: the run on one GPU, or None."""
    step = statistics.median(alone.seconds)
    row: dict[str, Any] = {"ms": round(step * 1e3, 3), "tokens/s": round(1 / step, 1)}
    if one is None or one is alone:
        return row
    same = sum(a == b for a, b in zip(alone.tokens, one.tokens))
    return row | {
        "x one GPU": round(step / statistics.median(one.seconds), 3),
        "same tokens": f"{same} of {len(one.tokens)}",
    }


def _throughput(told: LaneRun, alone: LaneRun, one: LaneRun | None, many: int) -> Row:
    """Return the figures of several streams. told: their run. alone: the run of one stream. one: the run on
    one GPU, or None. many: number of GPUs.
    """
    rate = 1 / statistics.fmean(told.seconds)
    beside = rate * statistics.fmean(alone.seconds)
    row: dict[str, Any] = {"frames/s": round(rate, 1), "x one stream": round(beside, 3)}
    if one is None:
        return row
    gain = rate * statistics.fmean(one.seconds)
    return row | {"x one GPU": round(gain, 3), "of GPUs": round(gain / many, 3)}


def measure_hop() -> Row:
    """Return the time of one row of hidden size 4096 from a GPU to the next, within a process."""
    here, there = (torch.zeros(1, 4096, dtype=torch.bfloat16, device=f"cuda:{number}") for number in (0, 1))
    peers = torch.cuda.can_device_access_peer(0, 1)

    def round_trip() -> None:
        """Copy the row to the other GPU and back."""
        there.copy_(here)
        here.copy_(there)

    round_trip()
    seconds = seconds_of(round_trip, HOPS) / 2
    return {"what": "a row from GPU to GPU", "us": round(seconds * 1e6, 1), "peers": peers}


def _memory(gpus: int) -> int:
    """Return the bytes that are free on all GPUs together, less a tenth for pages and graphs."""
    free_loops()
    return round(0.9 * sum(torch.cuda.mem_get_info(device)[0] for device in range(gpus)))
