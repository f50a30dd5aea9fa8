"""A ring of one GPU in one process and thread, with a drafter or without: how long each of its laps takes.

Refuses to know what is measured with it, and how its drafter comes to be right. All else is as in a fleet of
one: frames, graphs, verification by the model's own argmax, pages, the drafter's engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from specsot.frames import Chunk, Close, Drafts, Fork, Frame, Growth, Open, Opening, Result, rows_of
from specsot.members import Configuration, Curve, TreeShape
from specsot.model.decoder import Decoder
from specsot.pages import PageTable
from specsot.params import Sampling
from specsot_app.bench.gpu_replay import Replay, Shared
from specsot_drafter.drafters.eagle import EagleDrafter
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.rules import Rule, rule_of
from specsot_worker.features import FeatureStore
from specsot_worker.patience import Patience
from specsot_worker.sequencer import Budget, Sequencer
from specsot_worker.stage import Stage
from specsot_worker.verdict import LastStage

EPOCH, PAGE = 1, 64
PLENTY = 1 << 20  # tokens a sequence may write: none ends by its limit
WARM = 6  # laps that are not told


@dataclass(slots=True)
class Clock:
    """Wall seconds of a run, by who spent them; rows and seconds of each lap; tokens that were written.

    fed, first: seconds of laps with prompts in them, and the tokens that these wrote.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    fed: float = 0.0
    first: int = 0
    rows: list[int] = field(default_factory=list)
    each: list[float] = field(default_factory=list)

    @property
    def laps(self) -> int:
        return len(self.rows)

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())

    @property
    def spread(self) -> tuple[float, float]:
        """Seconds between which nine of ten laps lie."""
        twentieths = statistics.quantiles(self.each, n=20)
        return twentieths[0], twentieths[-1]

    def note(self, frame: Frame, result: Result, seconds: float) -> None:
        """A lap is over."""
        tokens = sum(len(one.tokens) for one in result.outcomes)
        self.rows.append(result.rows)
        self.each.append(seconds)
        self.tokens += tokens
        if any(isinstance(one, Chunk) for one in frame.segments):
            self.fed += seconds
            self.first += tokens

    @contextmanager
    def at(self, what: str) -> Generator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a run drafts. chance: of a level; rows: of all trees of a lap together, roots included.

    curve: of the stage, where a tuner is to decide how much of that pays.
    """

    head: DraftHead
    shape: TreeShape
    chance: float
    rows: int
    curve: Curve = ()
    level: Curve = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Texts of these lengths, side by side. own: rows of each one's prompt behind what all share."""

    own: int
    lengths: Sequence[int]


class Ring:
    """One stage with its graphs, and a drafter or none; runs are measured one after the other."""

    def __init__(self, decoder: Decoder, pages: int, rows: int, drafting: Drafting | None) -> None:
        """rows: of a frame at most."""
        self._decoder, self._pages, self._rows, self._drafting = decoder, pages, rows, drafting
        self.stage, self._drafter = Stage(decoder, pages, PAGE), None
        if drafting:
            for layer, weight in drafting.head.tap_slices().items():
                self.stage.tap(layer, weight)
            inner = EagleDrafter(drafting.head, drafting.shape, pages, PAGE)
            self._drafter = Replay(inner, drafting.chance, decoder.config.vocab, drafting.shape.top_k)
        self.stage.prepare()
        self._ids = count(1)

    def run(self, text: int, sequences: int, laps: int, forked: bool = False) -> Clock:
        """So many sequences write for so many laps, each behind `text` rows of its own, or all behind the
        same ones where `forked`; then they are closed. WARM laps before are not told.
        """
        turning = self._turning()
        orders = list(_orders(self._ids, text, sequences, forked, self._drafting is not None))
        for order in orders:
            turning.sequencer.obey(order)
        warm, clock = Clock(), Clock()
        while clock.laps < laps:
            fed = turning.turn(clock if warm.laps == WARM else warm)
            if sum(isinstance(each, Growth) for each in fed.segments) < sequences:
                warm = Clock()  # prompts are still fed
        turning.close(orders)
        return clock

    def write(self, text: int, parts: Sequence[Part]) -> Clock:
        """A request behind `text` rows, part for part; the next begins when the last text of one has ended.

        What is told begins when the shared rows are in.
        """
        turning, source, drafted = self._turning(), next(self._ids), self._drafting is not None
        prefix = _prefix(source, text, drafted)
        turning.sequencer.obey(prefix)
        fed = 0
        while fed < text:
            fed += sum(map(rows_of, turning.turn(Clock()).segments))
        clock = Clock()
        for part in parts:
            for number, limit in enumerate(part.lengths):
                fork = Fork(source, text)
                turning.sequencer.obey(_order(next(self._ids), part.own, number, fork, drafted, limit))
            turning.finish(len(part.lengths), clock)
        turning.close((prefix,))
        return clock

    def _turning(self) -> Turning:
        """A new start over the same pages and graphs."""
        drafting, decoder = self._drafting, self._decoder
        table = PageTable(self._pages, PAGE)
        if drafting is None or self._drafter is None:
            sequencer = Sequencer(EPOCH, Budget(self._rows, 1, 1), table, Patience(0.0, False))
            return Turning(self.stage, LastStage(decoder.logits, lambda _: None), sequencer, None)
        shape, rows, curve = drafting.shape, drafting.rows, drafting.curve
        configuration = Configuration(
            EPOCH, "drafter", (), self._pages, PAGE, shape.slots, rows, shape=shape, curve=curve
        )
        rule: Rule = Shared(shape)
        if not shape.fixed:
            rule = rule_of("measured", shape, curve, drafting.level, self._drafter.widths)
        engine = DraftEngine({"eagle": (self._drafter, rule)}, configuration)
        sequencer = Sequencer(EPOCH, Budget(self._rows, 1, shape.slots), table, Patience(0.0, True))
        store = FeatureStore(self._pages, PAGE, drafting.head.width, decoder.dtype, decoder.device)
        return Turning(self.stage, LastStage(decoder.logits, lambda _: None, store), sequencer, engine)


@dataclass(slots=True)
class Turning:
    """Everything that lives for one run. ended: how many sequences have."""

    stage: Stage
    judge: LastStage
    sequencer: Sequencer
    engine: DraftEngine | None
    ended: int = 0

    def turn(self, clock: Clock) -> Frame:
        """One lap; returns what was fed."""
        begun = time.perf_counter()
        with clock.at("compose"):
            frame = self.sequencer.compose(0.0)
        assert frame is not None
        with clock.at("verify"):
            verdict = self.judge.judge(self.stage.run(frame))
        with clock.at("compose"):
            self.sequencer.learn(verdict.result, 0.0)
        if self.engine is not None:
            with clock.at("learn"):
                for features in verdict.features:
                    self.engine.learn(features)
            with clock.at("draft"):
                drafts = Drafts(EPOCH, self.engine.draft(), self.engine.rest)
            with clock.at("compose"):
                self.sequencer.offer(drafts)
        clock.note(frame, verdict.result, time.perf_counter() - begun)
        self.ended += sum(one.end is not None for one in verdict.result.outcomes)
        return frame

    def finish(self, sequences: int, clock: Clock) -> None:
        """Laps until so many sequences have ended."""
        until = self.ended + sequences
        while self.ended < until:
            self.turn(clock)

    def close(self, orders: Sequence[Open]) -> None:
        """End these, forks first."""
        for order in reversed(orders):
            self.sequencer.obey(Close(order.opening.sequence))
        self.turn(Clock())


def _orders(ids: Iterator[int], text: int, sequences: int, forked: bool, drafted: bool) -> Iterator[Open]:
    """A prompt for each; or one that never writes, and forks of it, which begin with a token of their own."""
    fork = None
    if forked:
        fork = Fork(next(ids), text)
        yield _prefix(fork.sequence, text, drafted)
    for number in range(sequences):
        yield _order(next(ids), 1 if fork else text, number, fork, drafted)


def _prefix(sequence: int, text: int, drafted: bool) -> Open:
    """Rows that never write."""
    return Open(Opening(sequence, text, decodes=False, drafted=drafted), tuple(range(text)), PLENTY)


def _order(
    sequence: int, own: int, number: int, fork: Fork | None, drafted: bool, limit: int = PLENTY
) -> Open:
    """A text of its own, by its number, behind `own` rows and those it forks."""
    start, prompt = 1 + 100 * number, own + (fork.length if fork else 0)
    sampling = Sampling(temperature=0.0)
    opening = Opening(sequence, prompt, fork, drafted=drafted, sampling=sampling, limit=limit)
    return Open(opening, tuple(range(start, start + own)), PLENTY)
