"""A ring of real parts without a master's text side: token ids in, token ids out.

Workers and drafter are the product's own; only the conductor is replaced by a list of orders.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from specsot.checkpoint.config import read_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.core.frames import Close, End, Fork, Lease, Logprob, Open, Opening, Result
from specsot.members import CommMode, Configuration, HopDtype, KvDtype, Layout, Quantization, TreeShape
from specsot.params import DrafterName, Sampling
from specsot.service.membership import RingMember, run_membership
from specsot.service.options import DraftModelOptions, ModelOptions
from specsot.transport.grpc_links import GrpcDialer, RingService
from specsot.transport.grpc_server import GrpcServer, open_server
from specsot.transport.links import Exchange, Inbox, LocalDialer, LocalLink
from specsot.transport.nccl_links import DirectDialer, DirectHost
from specsot.transport.zmq_links import Sockets, ZmqDialer, ZmqHost
from specsot_drafter import loader as drafting
from specsot_drafter.drafter import Drafter
from specsot_master.core.inputs import RingEvent, RingLost
from specsot_master.core.ring.ring_state import RingConfig, RingState
from specsot_master.fleet import Fleet
from specsot_worker import loader as working
from specsot_worker.core.pipeline import PipelineDepth
from specsot_worker.worker import Worker, depth_of

Links = Literal["local", "grpc", "unix", "curve", "ipc", "direct"]

GREEDY = Sampling()
SMALL = TreeShape(depth=3, top_k=3, nodes=8, fixed=True)


@dataclass(frozen=True)
class Setup:
    """One way to run the same work."""

    base: Path
    head: Path | None = None
    stages: int = 1
    layout: Layout = "packed"
    shape: TreeShape = SMALL
    page_rows: int = 16
    rows: int = 512
    max_pages: int = 512
    drafter: Callable[..., RingMember] | None = None
    drafters: int = 1
    links: Links = "local"
    comm_mode: CommMode = "p2p"
    hop_dtype: HopDtype = "auto"
    quantization: Quantization | None = None
    draft_quantization: Quantization | None = None
    kv_dtype: KvDtype = "auto"
    draft_timeout: float = 10.0  # trees come even on a busy machine
    watch: Callable[[str], Any] = lambda name: None
    reading: Executor | None = None
    max_in_flight: int | None = None
    method: DrafterName | None = None  # how `head` drafts; None: as an EAGLE head
    make_depth: Callable[[Configuration], PipelineDepth] = depth_of


@dataclass
class Text:
    """What one sequence has written so far, and why it ended."""

    tokens: list[int] = field(default_factory=list)
    chances: list[Logprob] = field(default_factory=list)
    prompt: list[Logprob] = field(default_factory=list)
    draft_rounds: list[int] = field(default_factory=list)
    end: End | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Ring:
    """Give it prompts; it opens sequences, renews leases, and collects what comes back."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.texts: dict[int, Text] = {}
        self.broken: list[str] = []
        self.drafts = 0  # trees judged that had more than a root
        self.changed = asyncio.Event()
        self.leaving: dict[str, asyncio.Event] = {}
        self.parts: dict[str, RingMember] = {}
        self.start: Callable[..., Any]  # (name, maker): one more member joins
        wishes = RingConfig(
            fingerprint=fingerprint(setup.base),
            model_layers=read_config(setup.base).layers,
            tail_layers=read_config(setup.base).tail,
            workers=setup.stages,
            drafter="none" if setup.head is None and setup.drafter is None else "eagle",
            page_rows=setup.page_rows,
            rows=setup.rows,
            max_pages=setup.max_pages,
            layout=setup.layout,
            shape=setup.shape,
            draft_timeout=setup.draft_timeout,
            comm_mode=setup.comm_mode,
            hop_dtype=setup.hop_dtype,
            max_in_flight=setup.max_in_flight,
        )
        self.fleet = Fleet(wishes, self.changed.set)
        self.fleet.user = self
        self._ids = iter(range(1, 10**9))

    def handle(self, event: RingEvent) -> None:
        match event:
            case Result():
                self._read(event)
            case RingLost(reason):
                self.broken.append(reason)
                for text in self.texts.values():
                    text.over.set()
            case _:
                pass
        self.changed.set()

    def _read(self, result: Result) -> None:
        self.drafts += result.drafts
        for outcome in result.outcomes:
            if text := self.texts.get(outcome.sequence):
                text.tokens += outcome.tokens
                text.chances += outcome.chances
                text.prompt += outcome.prompt_chances
                text.draft_rounds.append(len(outcome.tokens))
                text.end = outcome.end or text.end
                if outcome.end:
                    text.over.set()

    @property
    def at_work(self) -> int:
        return sum(not text.over.is_set() for text in self.texts.values())

    def fitting(self, ring: RingState) -> int:
        return self.at_work

    def final_rows(self) -> dict[int, int]:
        return {}

    async def has_drafters(self, number: int) -> None:
        """Wait until so many take part."""
        while not self.fleet.ready or len(self.fleet.ring.drafters) != number:
            self.changed.clear()
            await self.changed.wait()

    async def complete(self, drafts: bool) -> None:
        while not self.fleet.ready or (drafts and self.fleet.ring.drafter is None):
            assert not self.fleet.complaint, self.fleet.complaint
            self.changed.clear()
            await self.changed.wait()

    async def open(self, prompt: list[int], fork: Fork | None = None, **more) -> int:
        """Open one sequence and return its id. `more` goes into its Opening."""
        sequence = next(self._ids)
        length = len(prompt) + (fork.length if fork else 0)
        opening = Opening(sequence, length, fork=fork, **more)
        self.texts[sequence] = Text()
        await self.fleet.order(Open(opening, tuple(prompt), lease=length + 16))
        await self.fleet.order(Lease(sequence, length + 10_000))
        return sequence

    async def prefix(self, tokens: list[int]) -> int:
        return await self.open(tokens, decodes=False)

    async def close(self, sequence: int) -> None:
        await self.fleet.order(Close(sequence))

    async def written(self, sequence: int) -> list[int]:
        await self.texts[sequence].over.wait()
        return self.texts[sequence].tokens

    async def heard(self, sequence: int, tokens: int) -> None:
        """Wait until a sequence has written so many tokens."""
        while len(self.texts[sequence].tokens) < tokens:
            self.changed.clear()
            await self.changed.wait()

    async def let_others_run(self) -> None:
        """Give every task of this process a turn."""
        await asyncio.sleep(0)

    async def write_all(
        self, prompts: list[list[int]], limit: int, sampling: Sampling = GREEDY, shared: int = 0, **more
    ) -> list[list[int]]:
        """Write every prompt at once; the first `shared` tokens of each are one forked prefix."""
        fork = None
        if shared:
            fork = Fork(await self.prefix(prompts[0][:shared]), shared)
        ids = [
            await self.open(prompt[shared:], fork, limit=limit, sampling=sampling, seed=7, ordinal=n, **more)
            for n, prompt in enumerate(prompts)
        ]
        texts = [await self.written(one) for one in ids]
        if fork:
            await self.close(fork.sequence)
        return texts


@asynccontextmanager
async def ring_of(setup: Setup):
    """A complete ring of members in this process, over the links that the setup names."""
    ring, place = Ring(setup), PLACES[setup.links]()
    threads = [ThreadPoolExecutor(1)]
    tasks = []

    async def start(name: str, make: Callable[..., RingMember]) -> None:
        inbox, address, dialer = await place.settle(name)
        if setup.links == "direct":  # the thread that sends rows waits for the other end's, once
            threads.append(ThreadPoolExecutor(1))
        leaving = ring.leaving[name] = asyncio.Event()
        part = make(name, address, dialer, threads[-1])
        ring.parts[name] = part
        tasks.append(asyncio.create_task(run_membership(part, inbox, join(ring.fleet, inbox), leaving)))

    ring.start = start
    for name, make in parts_of(setup):
        await start(name, make)
    try:
        completing = asyncio.create_task(ring.complete(setup.head is not None or setup.drafter is not None))
        await asyncio.wait([completing, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in [completing, *tasks]:
            if task.done():
                task.result()
        ring.broken.clear()  # a member that came while the ring was forming began it anew
        yield ring
    finally:
        for leaving in ring.leaving.values():
            leaving.set()
        await asyncio.gather(*tasks)
        await place.close()
        for thread in threads:
            thread.shutdown()


async def write(
    setup: Setup, prompts: list[list[int]], limit: int, sampling: Sampling = GREEDY, **more
) -> tuple[list[list[int]], float]:
    """What a ring of its own writes behind every prompt, and its tokens a step."""
    async with ring_of(setup) as ring:
        texts = await ring.write_all(prompts, limit, sampling, **more)
        assert not ring.broken
        draft_rounds = [draft_round for text in ring.texts.values() for draft_round in text.draft_rounds]
    return texts, sum(draft_rounds) / len(draft_rounds)


def join(fleet: Fleet, inbox: Inbox):
    """A member's way into the fleet of this process."""

    async def connect(registration):
        await fleet.join(registration, LocalLink("master", inbox))
        return Uplink(fleet, registration.name)

    return connect


def parts_of(setup: Setup):
    """(name, maker) of every member a setup describes."""
    for n in range(setup.stages):
        yield f"worker-{n}", partial(make_worker, setup)
    if setup.drafter:
        for n in range(setup.drafters):
            yield f"drafter-{n}" if n else "drafter", setup.drafter
    elif setup.head:
        yield "drafter", partial(make_drafter, setup)


def make_worker(setup: Setup, name, address, dialer, compute) -> RingMember:
    options = ModelOptions(
        setup.base,
        dtype="fp32",
        kv_memory=1 << 26,
        quantization=setup.quantization,
        kv_cache_dtype=setup.kv_dtype,
    )
    source = working.StageLoader(options, name, address)
    return Worker(
        source,
        dialer,
        compute,
        observer=setup.watch(name),
        verify_thread=setup.reading,
        make_depth=setup.make_depth,
    )


def make_drafter(setup: Setup, name, address, dialer, compute) -> RingMember:
    options = DraftModelOptions(
        setup.base,
        dtype="fp32",
        kv_memory=1 << 26,
        draft_model=setup.head,
        drafter=setup.method,
        draft_quantization=setup.draft_quantization,
    )
    return Drafter(drafting.DraftLoader(options, name, address), dialer, compute, setup.watch(name))


class LocalPlace:
    """Members meet in an Exchange; a member's address is its name."""

    def __init__(self) -> None:
        self._exchange = Exchange()

    async def settle(self, name: str):
        return self._exchange.listen(name), name, LocalDialer(name, self._exchange)

    async def close(self) -> None: ...


class GrpcPlace:
    """Every member has a gRPC server of its own on the loopback. nearby: links are unix sockets."""

    def __init__(self, nearby: bool = False) -> None:
        self._nearby, self._open = nearby, AsyncExitStack()

    async def settle(self, name: str):
        inbox = Inbox()
        service = RingService(inbox, name, nearby=self._nearby)
        endpoint = await self.serve(service)
        self._open.push_async_callback(service.close)
        return inbox, f"127.0.0.1:{endpoint.port}", GrpcDialer(name, inbox)

    async def serve(self, service: RingService, listen: str = "127.0.0.1:0") -> GrpcServer:
        endpoint = await open_server(listen, {"specsot.v1.Ring": service.attach})
        self._open.push_async_callback(endpoint.close, 0)
        return endpoint

    async def close(self) -> None:
        await self._open.aclose()


class DirectPlace(GrpcPlace):
    """The same, with rows beside the streams."""

    async def settle(self, name: str):
        inbox, rows = Inbox(), DirectHost()
        endpoint = await self.serve(RingService(inbox, name, rows=rows))
        self._open.callback(rows.close)
        return inbox, f"127.0.0.1:{endpoint.port}", DirectDialer(name, GrpcDialer(name, inbox), rows)


class ZmqPlace(GrpcPlace):
    """The same, with links over ZMQ: by TCP with CURVE, or between unix sockets."""

    def __init__(self, ipc: bool = False) -> None:
        super().__init__()
        self._folder = self._open.enter_context(tempfile.TemporaryDirectory()) if ipc else None

    async def settle(self, name: str):
        inbox, sockets = Inbox(), Sockets()
        listen = f"unix:{self._folder}/{name}" if self._folder else "127.0.0.1:0"
        host = ZmqHost(listen, inbox, sockets)
        endpoint = await self.serve(RingService(inbox, name, host), listen)
        self._open.callback(sockets.close)
        self._open.push_async_callback(host.close)
        address = listen if self._folder else f"127.0.0.1:{endpoint.port}"
        return inbox, address, ZmqDialer(name, sockets, inbox)


PLACES = {
    "local": LocalPlace,
    "grpc": GrpcPlace,
    "unix": partial(GrpcPlace, nearby=True),
    "direct": DirectPlace,
    "curve": ZmqPlace,
    "ipc": partial(ZmqPlace, ipc=True),
}


class Uplink:
    """A member's way to the fleet within one process."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet, self._name = fleet, name

    async def send(self, message: object) -> None:
        self._fleet.on_message(self._name, message)

    async def close(self) -> None:
        self._fleet.on_disconnect(self._name, "left")
