"""Measures what layer ranges on several GPUs of one host cost a single stream, and the gain with as many
streams as stages.

See `gpu_lanes`. Weights are made up, the same on every GPU, so that the tokens written over several GPUs must
be those written on one.

step:        Wall-clock milliseconds from result to result of one stream, with one frame in flight.

throughput:  Frames per second of all streams together, the same number of rows in each, compared with one GPU
    and one frame.
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
from typing import Any, Final

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
from specsot_lab.bench.clock import RowLog, mean_seconds
from specsot_lab.bench.gpu_lanes import (
    EPOCH,
    LaneRun,
    Lanes,
    LaneWorker,
    LoadedRange,
    connector_to,
    lanes_over,
)
from specsot_lab.bench.gpu_loop import free_loops
from specsot_lab.bench.gpu_steps import PAGE
from specsot_lab.bench.synthetic_models import SPREAD, MadeUp, bytes_of_a_token, config_of
from specsot_model.decoder import Decoder

# Seconds. How long a process may take to end after it was asked to. Untuned.
LEAVE_SECONDS: Final = 10.0

# Loads the layer range of that number. Must be importable by name, or be a partial of such a function,
# because other processes call it.
Load = Callable[[int], Decoder]


@dataclass(frozen=True, slots=True)
class ProcessRing:
    """A ring whose stages run in a process each.

    load: Loads the layer range of a stage.
    stages: The stages, in order.
    pages: Number of KV pages of each stage.
    transport: What connects the processes.
    folder: Directory of their sockets; "" until it is created.
    """

    load: Load
    stages: tuple[Stage, ...]
    pages: int
    transport: Transport
    folder: str = ""

    def configuration(self, number: int) -> Configuration:
        """Return the configuration that a worker receives.

        number: The number of the worker's stage, counted from 0.
        """
        return Configuration(EPOCH, self.stages[number].name, self.stages, self.pages, PAGE, slots=1)


class ResultTap(Inbox):
    """An inbox that also puts every result into a queue."""

    def __init__(self, received: asyncio.Queue[Any]) -> None:
        """Make an empty inbox.

        received: The queue of results.
        """
        super().__init__()
        self._received = received

    def put(self, sender: str, message: Any, names: frozenset[str] | None = None) -> None:
        """Deliver a message. A result is also put into the queue, so that the next frame is launched at once,
        as a sequencer would do.

        sender: Name of the member that sends the message, or "master".
        message: The decoded message.
        names: Names in the sender's certificate; None if members need no certificates.

        Any other message is only delivered to the inbox.
        """
        if isinstance(message, Result):
            self._received.put_nowait(message)
        super().put(sender, message, names)


@asynccontextmanager
async def process_lanes(ring: ProcessRing) -> AsyncGenerator[Lanes]:
    """Yield lanes over stages of which stage 0 runs in this process, and every other one in a process of its
    own. The processes are ended with the context.

    ring: The ring, without addresses and folder.

    The addresses of the stages and the folder are replaced: sockets are in a temporary directory that is
    removed with the context. Raises AssertionError if a process does not report "open" and then "ready", or
    if stage 0 does not; EOFError if a process ends before it has reported. When the context ends normally or
    by an error in its body, each process is asked to leave and killed after LEAVE_SECONDS.
    """
    set_runtime_defaults()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="specsot-"))
        stages = tuple(replace(stage, address=f"unix:{folder}/{stage.name}") for stage in ring.stages)
        ring = replace(ring, folder=folder, stages=stages)
        pipes = [_start_process(ring, number, stack) for number in range(1, len(stages))]
        # Results that return to stage 0, and everything that it sends to the master.
        received = asyncio.Queue[Any]()
        inbox = await stack.enter_async_context(_member(ring, 0, ResultTap(received), received))
        for pipe in pipes:
            await _expect_word(pipe, "open")
        for pipe in pipes:
            pipe.send("go")
        await LocalLink("master", inbox).send(ring.configuration(0))
        assert isinstance(ready := await received.get(), Ready), ready
        for pipe in pipes:
            await _expect_word(pipe, "ready")
        try:
            yield Lanes(LocalLink("lanes", inbox), received)
        finally:
            for pipe in pipes:
                pipe.send("leave")


def _start_process(ring: ProcessRing, number: int, stack: AsyncExitStack) -> Connection:
    """Start the process of a stage, and return the connection to it.

    ring: The ring, with addresses and folder.
    number: The number of the stage.
    stack: Ends the process when it is closed.

    Returns at once; the process sends "open" when it can be reached. The process is spawned rather than
    forked, and is a daemon.
    """
    spawning = multiprocessing.get_context("spawn")
    own_end, child_end = spawning.Pipe()
    process = spawning.Process(target=run_in_process, args=(ring, number, child_end), daemon=True)
    process.start()
    stack.callback(_end_process, process)
    return own_end


def _end_process(process: BaseProcess) -> None:
    """Wait at most LEAVE_SECONDS for a process that was asked to leave, then kill it.

    process: The process.
    """
    process.join(LEAVE_SECONDS)
    process.kill()


async def _expect_word(pipe: Connection, expected: str) -> None:
    """Wait for a message of a process.

    pipe: The connection to the process.
    expected: The expected message.

    Raises AssertionError for any other message.
    """
    word = await asyncio.to_thread(pipe.recv)
    assert word == expected, word


def run_in_process(ring: ProcessRing, number: int, pipe: Connection) -> None:
    """Run a stage in this process, until the first process asks it to leave.

    ring: The ring, with addresses and folder.
    number: The number of the stage.
    pipe: The connection to the first process.

    Returns None when the stage has left. What `_run_stage` raises ends the process.
    """
    set_runtime_defaults()
    uvloop.run(_run_stage(ring, number, pipe))


async def _run_stage(ring: ProcessRing, number: int, pipe: Connection) -> None:
    """Run a stage: register, wait for the configuration, and stay until the first process sends "leave".

    ring: The ring, with addresses and folder.
    number: The number of the stage.
    pipe: The connection to the first process, which gets "ready", or else the reason why the stage is not.

    Sends "open" when the stage listens; raises AssertionError if the answer is not "go". After "ready" or the
    reason, raises AssertionError for any message other than "leave".
    """
    received = asyncio.Queue[Any]()
    async with _member(ring, number, Inbox(), received) as inbox:
        pipe.send("open")
        await _expect_word(pipe, "go")
        await LocalLink("master", inbox).send(ring.configuration(number))
        ready = await received.get()
        pipe.send("ready" if isinstance(ready, Ready) else str(ready))
        await _expect_word(pipe, "leave")


@asynccontextmanager
async def _member(
    ring: ProcessRing, number: int, inbox: Inbox, received: asyncio.Queue[Any]
) -> AsyncGenerator[Inbox]:
    """Yield the inbox of a worker that runs within the context.

    ring: The ring, with addresses and folder.
    number: The number of the worker's stage.
    inbox: The worker's inbox.
    received: The queue that gets what the worker sends to the master.

    The worker listens at its stage's address. With the transport "direct", rows travel without gRPC where
    possible; any other transport uses gRPC alone. On a GPU, verification runs on a thread of its own. When
    the context ends, the worker leaves, its endpoint is closed without a grace period, and its threads are
    shut down. What loading the stage raises is raised here.
    """
    stage = ring.stages[number]
    rows = DirectHost()
    leaving = asyncio.Event()
    service = RingService(inbox, stage.name, rows=rows)
    endpoint = await open_server(stage.address, {SERVICE: service.attach})
    dialer: Dialer = GrpcDialer(stage.name, inbox)
    if ring.transport == "direct":
        dialer = DirectDialer(stage.name, dialer, rows)
    decoder = ring.load(number)
    compute_thread = ThreadPoolExecutor(1)
    verify_thread = ThreadPoolExecutor(1) if decoder.device.type == "cuda" else None
    worker = LaneWorker(LoadedRange(stage.name, decoder), dialer, compute_thread, verify_thread=verify_thread)
    membership = asyncio.create_task(run_membership(worker, inbox, connector_to(received), leaving))
    try:
        yield inbox
    finally:
        leaving.set()
        await membership
        rows.close()
        await endpoint.close(0)
        for executor in filter(None, (compute_thread, verify_thread)):
            executor.shutdown()


# The shape that is measured on 1, 2, 4, ... GPUs.
SMALL: Final = "Llama-3.1-8B"
# The shape that is measured on all GPUs together, if its weights fit.
LARGE: Final = "Llama-3.1-70B"
# Rows of a frame.
ROWS: Final = (1, 16, 64)
# Keys of a row that make up its name.
NAME_KEYS: Final = ("model", "what", "gpus", "rows", "in flight")
# Steps of a run with the small shape. Untuned.
STEPS: Final = 200
# Steps of a run with the large shape. Untuned.
STEPS_LARGE: Final = 50
# Round trips of a row between two GPUs. Untuned.
HOPS: Final = 200


class NameSeededWeights(MadeUp):
    """Made-up weights that are a function of the tensor's name, so that they are equal on all GPUs of one
    kind.
    """

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Return a tensor that is made up from its name: ones for norms, else normally distributed numbers.

        name: The tensor's name.
        shape: The tensor's shape.
        dtype: The type of its numbers.
        device: Where the tensor is made.

        A name that contains "norm" counts as a norm. The same name, shape, type and kind of device always
        give the same tensor.
        """
        if "norm" in name:
            return super().expect(name, shape, dtype, device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, SPREAD, generator=generator)


def measure(gpus: int, context_length: int, transport: Transport | None, output: Path | None) -> int:
    """Measure, print every row as it is measured, and write all of them; return the exit status 0.

    gpus: Number of GPUs.
    context_length: Number of tokens in the KV cache before what is measured.
    transport: What connects the processes, one for each GPU; None: all stages run in this process.
    output: The JSON file; None: rows are only printed.

    Raises InvalidRequest if there are fewer GPUs, and for transport "zmq".

    InvalidRequest names the field "gpus" or "transport"; a machine without CUDA counts as having 0 GPUs.
    """
    if transport == "zmq":
        raise InvalidRequest("bench gpu measures transports grpc and direct, not zmq", "transport")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if available < gpus:
        message = f"bench gpu --gpus {gpus} needs as many CUDA devices, only {available} are available"
        raise InvalidRequest(message, "gpus")
    work = _measure(gpus, context_length, transport, output)
    uvloop.run(work) if transport else asyncio.run(work)
    return 0


async def _measure(gpus: int, context_length: int, transport: Transport | None, output: Path | None) -> None:
    """Measure and log all rows, and print the table. The arguments are those of `measure`, which has checked
    them.

    gpus: Number of GPUs.
    context_length: Number of tokens in the KV cache before what is measured.
    transport: What connects the processes; None: all stages run in this process.
    output: The JSON file; None: rows are only printed.

    "transport" decides what the rows' settings call the connection; None is reported as "one process".
    """
    settings: dict[str, Any] = {"device": torch.cuda.get_device_name(), "gpus": gpus, "text": context_length}
    settings |= {"torch": torch.__version__, "weights": "made up", "dtype": "bf16"}
    settings |= {"between stages": transport or "one process"}
    log = RowLog("gpu-ranges", settings, output, *NAME_KEYS)
    async for row in _rows(gpus, context_length, transport):
        log.add(row)
    print(page_of(log.rows))


# The columns of the table; "-" where a row has no such figure.
COLUMNS: Final = tuple(
    Column(
        heading,
        lambda row, heading=heading: str(row.get(heading, "-")),
        text=heading in ("model", "what"),
    )
    for heading in (
        *("model", "what", "gpus", "rows", "in flight", "ms", "frames/s", "x one GPU", "of GPUs"),
        "same tokens",
    )
)


def page_of(rows: Sequence[Row]) -> str:
    """Return the table in Markdown. Rows without a number of rows are left out; if none is left, the table
    has only its heading.

    rows: The measured rows.
    """
    return markdown(COLUMNS, [row for row in rows if "rows" in row])


async def _rows(gpus: int, context_length: int, transport: Transport | None) -> AsyncIterator[Row]:
    """Yield the rows: a hop, then rings of 1, 2, 4, ... GPUs, then a large model, or a row which says that it
    does not fit.

    gpus: Number of GPUs.
    context_length: Number of tokens in the KV cache before what is measured.
    transport: What connects the processes; None: all stages run in this process.

    The rings are those of 1, 2, 4 and 8 GPUs that are smaller than `gpus`, and of `gpus` itself. The large
    model runs on all GPUs, with frames of 1 and 64 rows, and without a comparison with one GPU.
    """
    yield measure_hop()
    gpu_counts = [num_gpus for num_gpus in (1, 2, 4, 8) if num_gpus < gpus] + [gpus]
    single_gpu: dict[int, LaneRun] = {}
    for num_gpus in gpu_counts:
        model = RangedModel(SMALL, config_of(SMALL), num_gpus, transport=transport)
        async for row in measure_ring(model, context_length, single_gpu):
            yield row
    large = config_of(LARGE)
    if (weight_bytes := 2 * large.hidden * large.vocab + bytes_of_a_token(large, 2)) < _free_memory(gpus):
        model = RangedModel(LARGE, large, gpus, transport=transport)
        async for row in measure_ring(model, context_length, {}, (1, 64), STEPS_LARGE):
            yield row
    else:
        yield {"model": LARGE, "what": f"left out: {weight_bytes / 2**30:.0f} GiB of weights do not fit"}


@dataclass(frozen=True, slots=True)
class RangedModel:
    """A shape that is cut into layer ranges, each of which reads about as many bytes per step.

    name: The shape's name.
    config: The shape.
    ranges: Number of ranges.
    device: "cuda", where range n is on GPU n, or "cpu".
    dtype: Type of the weights.
    transport: What connects the processes of the ranges; None: all run in this process.
    """

    name: str
    config: ModelConfig
    ranges: int
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    transport: Transport | None = None

    def layers(self, number: int) -> Range:
        """Return a layer range.

        number: The number of the range, counted from 0.
        """
        return Range(self._edge(number), self._edge(number + 1))

    def _edge(self, number: int) -> int:
        """Return the layer at which a range begins. Each range has at least one layer. The lm_head counts as
        layers of its size, and belongs to the last range.

        number: The number of the range, counted from 0; `ranges` for the end of the last one.

        With 32 layers, 2 ranges and an lm_head as large as 4 layers, range 1 begins at layer round(36 / 2) =
        18.

        The first range begins at layer 0. The number `ranges` gives the number of layers of the model.
        """
        layers = self.config.layers
        ranges_left = self.ranges - number
        head_size = self.config.hidden * (self.config.vocab + 1)
        layer_size = (bytes_of_a_token(self.config, 1) - head_size) / layers
        return min(round((layers + head_size / layer_size) * number / self.ranges), layers - ranges_left)

    def load(self, number: int) -> Decoder:
        """Return a layer range on its device.

        number: The number of the range, counted from 0.
        """
        device = torch.device(self.device, number) if self.device == "cuda" else torch.device(self.device)
        return Decoder(self.config, NameSeededWeights(), self.layers(number), self.dtype, device)

    def lanes(self, pages: int) -> AbstractAsyncContextManager[Lanes]:
        """Return the context of lanes over all ranges.

        pages: Number of KV pages of each range.

        Without a transport, all ranges are loaded by this call and run in this process. With one, each range
        but the first is loaded in a process of its own when the context is entered.
        """
        numbers = range(self.ranges)
        if self.transport is None:
            return lanes_over([self.load(number) for number in numbers], pages)
        stages = tuple(Stage(f"worker-{number}", "", self.layers(number)) for number in numbers)
        return process_lanes(ProcessRing(self.load, stages, pages, self.transport))


async def measure_ring(
    model: RangedModel,
    context_length: int,
    single_gpu: dict[int, LaneRun],
    sizes: Sequence[int] = ROWS,
    steps: int = STEPS,
) -> AsyncIterator[Row]:
    """Yield the rows of one number of GPUs: the time until the ring is ready, one stream, and with several
    GPUs also several streams.

    model: The shape and its ranges.
    context_length: Number of tokens in the KV cache before what is measured.
    single_gpu: The runs of one stream on one GPU, by rows, to compare with; a ring of one range enters them.
        Without an entry, the comparison is left out.
    sizes: Rows of a frame, one run each.
    steps: Steps of each run.

    Several streams are measured with as many frames in flight as GPUs, and with one more, for each of
    `sizes`. A ring of one GPU gives no throughput rows. The first row, "ready", has the seconds from loading
    to readiness.
    """
    watch = Stopwatch()
    num_gpus = model.ranges
    pages = (num_gpus + 1) * (-(-(context_length + steps * 2 + max(sizes)) // PAGE) + 4)
    async with model.lanes(pages) as lanes:
        names: Row = {"model": model.name, "gpus": num_gpus}
        yield {**names, "what": "ready", "s": round(watch.seconds, 1)}
        alone: dict[int, LaneRun] = {}
        for rows in sizes:
            alone[rows] = await lanes.run(1, rows, context_length, steps)
            if num_gpus == 1:
                single_gpu[rows] = alone[rows]
            yield {
                **names,
                "what": "step of one stream",
                "rows": rows,
                **_stream_figures(alone[rows], single_gpu.get(rows)),
            }
        for rows in sizes if num_gpus > 1 else ():
            for in_flight in (num_gpus, num_gpus + 1):
                row: Row = {**names, "what": "throughput", "rows": rows, "in flight": in_flight}
                run = await lanes.run(in_flight, rows, context_length, steps)
                yield {**row, **_throughput_figures(run, alone[rows], single_gpu.get(rows), num_gpus)}


def _stream_figures(stream: LaneRun, single_gpu: LaneRun | None) -> Row:
    """Return the figures of one stream, with a comparison unless it is the run on one GPU itself.

    stream: Its run.
    single_gpu: The same run on one GPU; None if it was not measured.

    The figures are the median milliseconds of a step and the tokens per second that follow from it; the
    comparison adds the ratio of the medians ("x one GPU", above 1 if slower) and how many tokens at equal
    positions are equal. Without `single_gpu` the comparison is left out.
    """
    step = statistics.median(stream.seconds)
    row: dict[str, Any] = {"ms": round(step * 1e3, 3), "tokens/s": round(1 / step, 1)}
    if single_gpu is None or single_gpu is stream:
        return row
    same = sum(a == b for a, b in zip(stream.tokens, single_gpu.tokens))
    return row | {
        "x one GPU": round(step / statistics.median(single_gpu.seconds), 3),
        "same tokens": f"{same} of {len(single_gpu.tokens)}",
    }


def _throughput_figures(run: LaneRun, alone: LaneRun, single_gpu: LaneRun | None, num_gpus: int) -> Row:
    """Return the figures of several streams.

    run: Their run.
    alone: The run of one stream on the same ring.
    single_gpu: The run of one stream on one GPU; None if it was not measured, then the comparison is left
        out.
    num_gpus: Number of GPUs of the ring.

    The figures are frames per second, and how many times that is the rate of one stream on the same ring. The
    comparison adds how many times it is the rate of one GPU, and that number divided by `num_gpus`.
    """
    rate = 1 / statistics.fmean(run.seconds)
    speedup = rate * statistics.fmean(alone.seconds)
    row: dict[str, Any] = {"frames/s": round(rate, 1), "x one stream": round(speedup, 3)}
    if single_gpu is None:
        return row
    gain = rate * statistics.fmean(single_gpu.seconds)
    return row | {"x one GPU": round(gain, 3), "of GPUs": round(gain / num_gpus, 3)}


def measure_hop() -> Row:
    """Return the time in which one row of hidden size 4096 is copied from a GPU to the next, within this
    process. At least two GPUs are needed.

    The row has "us", microseconds one way, the mean of HOPS round trips after one that is not measured, and
    "peers", True if GPU 0 can access the memory of GPU 1 directly. With fewer than two GPUs CUDA raises an
    error.
    """
    source, target = (
        torch.zeros(1, 4096, dtype=torch.bfloat16, device=f"cuda:{number}") for number in (0, 1)
    )
    peers = torch.cuda.can_device_access_peer(0, 1)

    def round_trip() -> None:
        """Copy the row to the other GPU and back."""
        target.copy_(source)
        source.copy_(target)

    round_trip()
    seconds = mean_seconds(round_trip, HOPS) / 2
    return {"what": "a row from GPU to GPU", "us": round(seconds * 1e6, 1), "peers": peers}


def _free_memory(gpus: int) -> int:
    """Return nine tenths of the bytes that are free on all GPUs together. The rest is left for pages and
    graphs.

    gpus: Number of GPUs.
    """
    free_loops()
    return round(0.9 * sum(torch.cuda.mem_get_info(device)[0] for device in range(gpus)))
