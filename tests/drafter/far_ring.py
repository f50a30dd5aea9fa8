"""A ring of far stages in virtual time that writes recorded answers with recorded drafts.

    python -m tests.drafter.far_ring RECORD HOST RTT ...   # tokens per second: no drafts, whole trees, parts

RECORD is a file of `draft_record.py`, HOST one of HOSTS, RTT the round trip between two
stages in ms. There are four stages with a host each; the drafter shares the host of the last one. Sequencer,
page tables, verifier, draft engine and policy are the product's own; a computation takes the seconds that
HOST's curves say, so that every run is the same. The first texts, with which the policy learns, do not count.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from specsot.checkpoint.config import read_config
from specsot.core.cost_curve import CostCurve
from specsot.core.frames import Frame, TreeSegment
from specsot.core.vocabulary import read_vocabulary
from specsot.members import Configuration, Curve, TreeShape
from specsot.service.membership import run_membership
from specsot.transport.links import Inbox
from specsot_drafter.core.control import make_budget
from specsot_drafter.core.selection import Candidates, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.drafter import Drafter
from specsot_drafter.engine import DraftEngine
from specsot_drafter.proposers import Proposer
from specsot_worker.core.pipeline import PipelineDepth
from specsot_worker.observer import WorkerObserver
from specsot_worker.worker import Worker, depth_of
from tests.cut_trees import WholeTrees
from tests.drafter.draft_record import DraftedText, DraftTree, read_record
from tests.faults import virtual
from tests.laws.ring import Ring, Setup, join
from tests.simulator import MockDrafter, MockWorker, Simulator, next_state, state_of

BASE = Path(__file__).parents[2] / "models" / "demo" / "base"  # its tokenizer, its number of layers
STAGES, FIRST_ID, BESIDE = 4, 300, 8000  # BESIDE: tokens of a text that no answer continues
SHAPE, WIDTH = TreeShape(12, 10, 97), 10
LEARNING = 4  # texts


@dataclass(frozen=True, slots=True)
class Host:
    """Computing times of one kind of machine, in seconds.

    step: One forward pass of the whole model, by the frame's rows.
    level: One level of a draft tree, by the rows that the head computes.
    frame: Overhead of a stage's host per frame, in addition to computing.
    proposal: Overhead of the drafter's host per proposal, in addition to its levels.
    """

    step: Curve
    level: Curve
    frame: float
    proposal: float


def _scaled(seconds: float, multiples: Curve) -> Curve:
    """Return a curve that is a multiple of one row's seconds.

    seconds: Seconds of one row.
    multiples: By rows, multiples of these seconds.
    """
    return tuple((rows, multiple * seconds) for rows, multiple in multiples)


# Time of a step with so many rows, as a multiple of that with one row (lab/results/cpu-rows.json). The value
# for 97 rows is extrapolated.
VNNI: Final[Curve] = (
    *((1, 1.0), (2, 1.01), (4, 1.2), (6, 1.14), (8, 1.16), (12, 1.64), (16, 1.87), (24, 2.4)),
    *((64, 5.35), (97, 7.8)),
)
# Seconds. Overhead of a frame in one stage: a quarter of the 1.6 ms that a step with drafts takes in addition
# to computing. Overhead of a proposal, in addition to its levels. Measured with SmolLM2 in int8 on two cores.
FRAME: Final = 0.4e-3
PROPOSAL: Final = 0.8e-3
# The machines whose costs can be simulated.
HOSTS: Final[Mapping[str, Host]] = {
    # SmolLM2 in int8, measured on two cores with VNNI.
    "smollm2-vnni": Host(_scaled(7.3e-3, VNNI), ((1, 0.45e-3), (4, 0.5e-3), (16, 0.9e-3)), FRAME, PROPOSAL),
    # SmolLM2 in int8, measured on two cores with AVX2 (lab/results/cpu-rows-avx2.json).
    "smollm2-avx2": Host(
        (
            *((1, 11.08e-3), (2, 12.23e-3), (4, 17.61e-3), (6, 23.57e-3), (8, 31.59e-3), (12, 45.12e-3)),
            *((16, 52.03e-3), (24, 77.26e-3), (32, 0.1046), (48, 0.1676), (64, 0.2297), (97, 0.3657)),
        ),
        ((1, 1.62e-3), (4, 2.29e-3), (10, 4.11e-3)),
        FRAME,
        PROPOSAL,
    ),
    # Qwen2.5-Coder-1.5B in int8: assumed to read its 1.6 GB at 32 GB/s, with the multiples of SmolLM2.
    "1.5b-vnni": Host(_scaled(50e-3, VNNI), ((1, 1.5e-3), (4, 1.6e-3), (16, 2.5e-3)), FRAME, PROPOSAL),
    # Qwen2.5-Coder-1.5B in int8, measured on two cores with AVX2 (lab/results/cpu-rows-avx2.json).
    "1.5b-avx2": Host(
        (
            *((1, 0.1118), (2, 0.1264), (4, 0.1286), (6, 0.2335), (8, 0.3255), (12, 0.4515), (16, 0.596)),
            *((24, 0.9308), (32, 1.1413), (48, 1.8029), (64, 2.519), (97, 3.8637)),
        ),
        ((1, 1.84e-3), (4, 2.01e-3), (10, 3.64e-3)),
        FRAME,
        PROPOSAL,
    ),
    # Qwen2.5-Coder-1.5B in bf16 on an H200, measured; the overheads of hosts are assumed to be half of the
    # above.
    "1.5b-h200": Host(
        ((1, 1.66e-3), (2, 1.99e-3), (16, 2.1e-3), (32, 2.29e-3), (64, 2.44e-3), (128, 2.57e-3)),
        ((1, 0.04e-3), (4, 0.05e-3), (16, 0.06e-3)),
        FRAME / 2,
        PROPOSAL / 2,
    ),
}


class RecordedTexts:
    """The base model, which writes the recorded answers, each after a prompt of its own."""

    alphabet = range(BESIDE, BESIDE + 100)

    def __init__(self, texts: Sequence[DraftedText]) -> None:
        self.texts = [text for text in texts if len(text.tokens) > 1]
        self.prompts = [[10 + number, 40, 41, 42] for number in range(len(self.texts))]
        self._ids: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        for number, text in enumerate(self.texts):
            state = state_of(self.prompts[number])
            for place, token in enumerate(self.answer(number)):
                self._next[state] = token
                state = next_state(state, token)
                self._places[state] = number, place
            for tree in text.trees:
                any(map(self.id_of, tree.tokens.tolist()))
        assert FIRST_ID + len(self._ids) < BESIDE, "more tokens than the tokenizer has"

    def id_of(self, token: int) -> int:
        """A token's id in the small vocabulary."""
        return self._ids.setdefault(token, FIRST_ID + len(self._ids))

    def answer(self, number: int) -> list[int]:
        return [self.id_of(token) for token in self.texts[number].tokens]

    def next(self, state: int) -> int:
        return self._next.get(state, BESIDE + state % 100)

    def tree_after(self, tokens: Sequence[int]) -> DraftTree | None:
        """What the head proposed after these tokens, prompt included."""
        number, place = self._places.get(state_of(tokens), (0, sys.maxsize))
        trees = self.texts[number].trees
        return trees[place] if place < len(trees) else None


class RecordedDrafts(Proposer):
    """Grows what the head proposed, level by level."""

    widths = (WIDTH,) * (SHAPE.depth - 1)
    free_pages = 1 << 20

    def __init__(self, texts: RecordedTexts, spend: Callable[[int], None]) -> None:
        self._texts, self._spend, self._open = texts, spend, set[int]()

    def open(self, sequence: DraftSequence) -> None:
        self._open.add(sequence.id)

    def follows(self, sequence: int) -> bool:
        return sequence in self._open

    def close(self, sequence: int) -> None:
        self._open.discard(sequence)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates:
        (sequence,) = sequences
        tree = self._texts.tree_after(sequence.tokens)
        numbers, fed = {0: 0}, {0}  # of recorded nodes, counted from 1: candidates; whose children grow
        grown = list[tuple[int, float, int, int]]()
        for depth in range(1, levels + 1):
            self._spend(len(fed))
            level = self._level(tree, depth, fed)
            if tree is None or not level:
                break
            for node in level:
                parent = numbers[int(tree.parents[node])]
                grown.append((self._texts.id_of(int(tree.tokens[node])), tree.scores[node], parent, depth))
                numbers[node + 1] = len(grown)
            most = WIDTH
            if keep_growing and depth < levels:
                most = keep_growing(tree.scores[None, level[:WIDTH]], depth)
            if not most:
                break
            fed = {node + 1 for node in level[:most]}
        tokens, scores, parents, depths = zip(*grown or [(BESIDE, -20.0, 0, 1)])
        return Candidates(*(np.array([each]) for each in (tokens, scores, parents)), np.array(depths))

    @staticmethod
    def _level(tree: DraftTree | None, depth: int, fed: set[int]) -> list[int]:
        """The nodes below those that were fed, likeliest first."""
        if tree is None:
            return []
        return [node for node in np.flatnonzero(tree.depths == depth) if int(tree.parents[node]) in fed]


@dataclass
class Computer(Executor):
    """One host: jobs take virtual seconds, one after the other. free: when it has done all of them."""

    loop: virtual.VirtualLoop
    free: float = 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            if self.free > self.loop.time():
                self.loop.call_at(self.free, work)
                return
            self.loop.working = 0.0
            value, error = None, None
            try:
                value = fn(*args, **kwargs)
            except Exception as raised:
                error = raised
            self.free = self.loop.time() + self.loop.working
            self.loop.working = 0.0
            self.loop.call_at(self.free, partial(finish, value, error))

        def finish(value: Any, error: Exception | None) -> None:
            if error:
                future.set_exception(error)
            else:
                future.set_result(value)

        self.loop.call_soon(work)
        return future


@dataclass
class FarLink:
    """Messages arrive in order, `delay` seconds after they were sent."""

    loop: virtual.VirtualLoop
    sender: str
    inbox: Inbox
    delay: float
    _last: float = 0.0

    def post(self, message: Any) -> None:
        self._last = max(self._last, self.loop.time() + self.loop.working + self.delay)
        self.loop.call_at(self._last, self.inbox.put, self.sender, message)

    async def send(self, message: Any) -> None:
        self.post(message)

    async def close(self) -> None: ...


@dataclass
class FarDialer:
    """hop: seconds between two hosts."""

    loop: virtual.VirtualLoop
    name: str
    inboxes: dict[str, Inbox]
    hop: float

    async def dial(self, address: str, epoch: int, kind: str = "worker") -> Any:
        near = {self.name, address} == {"drafter", f"worker-{STAGES - 1}"}
        return FarLink(self.loop, self.name, self.inboxes[address], 0.0 if near else self.hop)


@dataclass
class Trees(WorkerObserver):
    """Nodes and parts of each tree that stage 0 sends."""

    sent: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def launched(self, frame: Frame, now: float) -> Frame:
        trees = [len(one.tree) for one in frame.segments if isinstance(one, TreeSegment)]
        self.sent += [(nodes, 1 + frame.last_part) for nodes in trees]
        return frame


async def write_all(
    texts: RecordedTexts, host: Host, rtt: float, drafts: bool, parts: bool
) -> tuple[float, list[tuple[int, int]]]:
    """Tokens per second of all texts but the first, and the trees that were sent."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, virtual.VirtualLoop)

    def spend(seconds: float) -> None:
        loop.working += seconds

    layers = read_config(BASE).layers
    layer = tuple((rows, seconds / layers) for rows, seconds in host.step)
    language_model: Any = texts
    mock = Simulator(BASE, language_model, layer=layer, growth=host.level, sleep=spend, shape=SHAPE)
    level = CostCurve(host.level)

    class Source(MockDrafter):
        def make_engine(self, configuration: Configuration) -> DraftEngine:
            proposer = RecordedDrafts(texts, lambda rows: spend(level.at(rows)))
            stages = configuration.overlapping_stages if parts else 1
            costs = configuration.curve, host.level, proposer.widths
            rule = make_budget("measured", configuration.shape, *costs, overlapping_stages=stages)
            vocabulary = read_vocabulary(BASE, read_config(BASE).vocab)
            clock = lambda: loop.time() + loop.working  # noqa: E731
            return DraftEngine({"eagle": (proposer, rule)}, configuration, vocabulary, clock=clock)

    def make_drafter(name: str, address: str, dialer: Any, compute: Executor) -> Drafter:
        return Drafter(Source(mock, name, address), dialer, compute)

    def make_depth(configuration: Configuration) -> PipelineDepth:
        return depth_of(configuration) if parts else WholeTrees(STAGES, configuration.curve)

    names = [*(f"worker-{stage}" for stage in range(STAGES)), *["drafter"] * drafts]
    inboxes = {name: Inbox() for name in names}
    hosts = [Computer(loop) for _ in range(STAGES)]
    setup = Setup(BASE, None, STAGES, shape=SHAPE, drafter=make_drafter if drafts else None)
    ring, trees, leaving, tasks = Ring(setup), Trees(), asyncio.Event(), list[asyncio.Task[None]]()
    for name, compute in zip(names, [*hosts, hosts[-1]]):
        dialer: Any = FarDialer(loop, name, inboxes, rtt / 2000)
        look = trees if name == names[0] else None
        member = (
            make_drafter(name, name, dialer, compute)
            if name == "drafter"
            else Worker(MockWorker(mock, name, name), dialer, compute, loop.time, look, make_depth=make_depth)
        )
        enter = join(ring.fleet, inboxes[name])
        tasks.append(asyncio.create_task(run_membership(member, inboxes[name], enter, leaving)))
    await ring.complete(drafts)
    tokens, seconds = 0, 0.0
    for number, prompt in enumerate(texts.prompts):
        answer = texts.answer(number)
        sequence = await ring.open(prompt, limit=len(answer) - 1, seed=7)
        await ring.heard(sequence, 1)
        began, first = loop.time(), len(ring.texts[sequence].tokens)
        if number == LEARNING:
            trees.sent.clear()
        assert await ring.written(sequence) == answer[:-1], "law 1"
        if number >= LEARNING:
            tokens += len(answer) - 1 - first
            seconds += loop.time() - began
    assert not ring.broken
    leaving.set()
    await asyncio.gather(*tasks)
    return tokens / seconds, trees.sent


def main() -> None:
    record, name, *rtts = sys.argv[1:]
    texts = RecordedTexts(read_record(Path(record)))
    for rtt in map(float, rtts):
        plain, _ = virtual.run(write_all(texts, HOSTS[name], rtt, False, False))
        whole, _ = virtual.run(write_all(texts, HOSTS[name], rtt, True, False))
        parts, sent = virtual.run(write_all(texts, HOSTS[name], rtt, True, True))
        counts = dict(sorted(Counter(number for _, number in sent).items()))
        nodes = sum(nodes for nodes, _ in sent) / len(sent)
        times = f"{whole / plain:.2f} whole, {parts / plain:.2f} in parts, {parts / whole:.3f} of these two"
        print(f"{name}, {rtt:g} ms: {plain:.2f} tokens/s without drafts; x {times};", end=" ")
        print(f"{nodes:.1f} nodes a tree; trees by parts {counts}", flush=True)


if __name__ == "__main__":
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    main()
