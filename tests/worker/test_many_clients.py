"""What many clients feel, by a clock: they ask again once they are answered; steps take what is said here."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

import pytest

from specsot.core.frames import End, Frame, Open, Opening, Outcome, PromptChunk, Result, TreeSegment, rows_of
from specsot.core.pages import PageTable
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget, PipelineDepth
from specsot_worker.core.sequencer import Sequencer

# Seconds of a step: its own, per row of a text and of a prompt. Some of SmolLM2-135M's in 8 bits on two
# cores.
STEP, TEXT_ROW, PROMPT_ROW = 0.008, 0.00055, 0.00045
WAVER = 0.1  # of a step's seconds, as the standard deviation of their logarithm
MASTER = 0.003  # seconds until an order of the master is there


@dataclass
class Client:
    """asks: rows of the prompt and tokens of the answer, of one request after the other. at: of the first."""

    asks: Iterator[tuple[int, int]]
    at: float = 0.0
    asked: float = 0.0
    texts: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Clock:
    """Stages that compute side by side, each a frame at a time; clients ask again once they are answered."""

    def __init__(self, clients: list[Client], stages: int = 1) -> None:
        curve = tuple((rows, STEP + PROMPT_ROW * rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128))
        depth = PipelineDepth(stages, curve, stages > 1)
        budget = FrameBudget(512, stages + 1 if stages > 1 else 1)
        self.sequencer = Sequencer(1, budget, PageTable(4096, 256), DraftTimeout(1.0, False), depth)
        self.rng, self.now, self.free = random.Random(1), 0.0, [0.0] * stages
        self.numbers, self.asking, self.limits = itertools.count(), dict[int, Client](), dict[int, int]()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.writing: list[int] = []
        for client in clients:
            self.ask(client, client.at)
        while self.events:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
            while frame := self.sequencer.compose(self.now):
                self.fly(frame)

    def at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), happen))

    def ask(self, client: Client, when: float) -> None:
        if (ask := next(client.asks, None)) is None:
            return
        sequence, (prompt, limit) = next(self.numbers), ask
        self.asking[sequence], self.limits[sequence] = client, limit
        client.asked, client.texts = when, []
        order = Open(Opening(sequence, prompt, limit=limit, drafted=False), (5,) * prompt, 1 << 30)
        self.at(when + MASTER, lambda: self.sequencer.apply_order(order))

    def fly(self, frame: Frame) -> None:
        trees = sum(rows_of(one) for one in frame.segments if isinstance(one, TreeSegment))
        prompts = sum(rows_of(one) for one in frame.segments if isinstance(one, PromptChunk))
        self.writing.append(trees)
        spent, arrives = list[float](), self.now
        for stage, free in enumerate(self.free):
            step = (STEP + TEXT_ROW * trees + PROMPT_ROW * prompts) * self.rng.lognormvariate(0, WAVER)
            spent.append(step / len(self.free))
            arrives = self.free[stage] = max(arrives, free) + spent[-1]
        self.at(arrives, lambda: self.land(frame, tuple(spent), trees + prompts))

    def land(self, frame: Frame, spent: tuple[float, ...], rows: int) -> None:
        judged = [one for one in frame.segments if isinstance(one, TreeSegment) or one.final]
        outcomes = tuple(self.hear(one) for one in judged)
        self.sequencer.apply_result(Result(1, frame.number, outcomes, spent, rows), self.now)

    def hear(self, segment: TreeSegment | PromptChunk) -> Outcome:
        client, tree = self.asking[segment.sequence], isinstance(segment, TreeSegment)
        if client.texts:
            client.gaps.append(self.now - client.texts[-1])
        else:
            client.firsts.append(self.now - client.asked)
        client.texts.append(self.now)
        over = len(client.texts) == self.limits[segment.sequence]
        if over:
            self.ask(client, self.now)
        draft_round, accepted = (segment.draft_round, (0,)) if tree else (0, ())
        return Outcome(segment.sequence, draft_round, accepted, (7,), End.LENGTH if over else None)


def clients_of(count: int, prompt: tuple[int, int], answer: int, requests: int = 4) -> list[Client]:
    """Their prompts have so many rows, from .. to."""
    rng = random.Random(2)
    return [Client(iter([(rng.randint(*prompt), answer) for _ in range(requests)])) for _ in range(count)]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def gaps_of(clients: list[Client]) -> list[float]:
    return [gap for one in clients for gap in one.gaps]


@pytest.mark.parametrize("prompt", [(47, 47), (30, 100)])
def test_few_who_write_let_the_others_in(prompt):
    """By what those who write take alone, 32 and 23 of 64 wrote, and texts began after 1 and 2 s."""
    clock = Clock(clients := clients_of(64, prompt, 32))
    assert sum(clock.writing) / len(clock.writing) > 45
    assert median(first for one in clients for first in one.firsts) < 0.6


@pytest.mark.parametrize(
    ("clients", "stages"),
    [
        (clients_of(64, (22, 22), 32), 1),
        (clients_of(64, (30, 100), 32), 1),
        (clients_of(64, (30, 100), 200, 2), 1),
        (clients_of(64, (30, 100), 32), 2),
        (clients_of(64, (30, 100), 32), 4),
    ],
)
def test_a_decoding_sequence_waits_at_most_three_times_the_usual(clients, stages):
    Clock(clients, stages)
    gaps = gaps_of(clients)
    assert quantile(gaps, 0.99) <= 3 * median(gaps)


@pytest.mark.parametrize(("writers", "stages"), [(1, 1), (4, 1), (16, 1), (16, 2)])
def test_long_prompts_alongside_a_few_decoding_sequences(writers, stages):
    """They come through, and who writes goes on beside them."""
    few = clients_of(writers, (60, 60), 200)
    long = [Client(iter([(rows, 32)] * 3), at=0.5) for rows in (1000, 2000)]
    Clock([*few, *long], stages)
    gaps = gaps_of(few)
    assert quantile(gaps, 0.99) <= 3 * median(gaps)
    assert max(first for one in long for first in one.firsts) < 4.0
