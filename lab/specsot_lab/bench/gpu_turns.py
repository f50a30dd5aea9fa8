"""A ring of one GPU in one process and thread, with a drafter or without: how long each of its laps takes.

All else is as in a fleet of
one: frames, graphs, verification by the model's own argmax, pages, the drafter's engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from specsot.core.frames import (
    Close,
    Drafts,
    Fork,
    Frame,
    Open,
    Opening,
    PromptChunk,
    Result,
    TreeSegment,
    rows_of,
)
from specsot.core.pages import PageTable
from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import Vocabulary
from specsot.grammar import Grammar, grammar_of
from specsot.members import Configuration, Curve, TreeShape
from specsot.model.decoder import Decoder
from specsot.params import Form, Sampling
from specsot_drafter.core.tree_budget import BudgetPolicy, make_budget
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.proposers.eagle import EagleProposer
from specsot_lab.bench.gpu_replay import Ranks, Replay, Shared
from specsot_worker.core.pipeline import DraftTimeout
from specsot_worker.core.sequencer import FrameBudget, Sequencer
from specsot_worker.feature_stream import FeatureStore
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier

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
        if any(isinstance(one, PromptChunk) for one in frame.segments):
            self.fed += seconds
            self.first += tokens

    @contextmanager
    def at(self, what: str) -> Generator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a run drafts. right: see `Replay`; rows: of all trees of a lap together, roots included.

    curve: of the stage, where a tuner is to decide how much of that pays.
    """

    head: DraftHead
    shape: TreeShape
    right: float | Ranks
    rows: int
    curve: Curve = ()
    level: Curve = ()


@dataclass(frozen=True, slots=True)
class Held:
    """What the first `many` texts of a run, or of the first part of a request, are held to."""

    vocabulary: Vocabulary
    plan: PlanRules | None = None
    form: Form | None = None
    many: int = 1

    def grammar(self, opening: Opening) -> Grammar | None:
        """Waits for what is compiled."""
        found = grammar_of(self.vocabulary, opening) if opening.plan or opening.form else None
        return found.result() if isinstance(found, Future) else found


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Asked:
    """How texts are written. page: rows of one."""

    page: int = PAGE
    sampling: Sampling = GREEDY
    held: Held | None = None


PLAINLY = Asked()


@dataclass(frozen=True, slots=True)
class Part:
    """Texts of these lengths, side by side. own: rows of each one's prompt behind what all share.

    held: those that a run holds to something are among them.
    """

    own: int
    lengths: Sequence[int]
    held: bool = False


class Ring:
    """One stage with its graphs, and a drafter or none; runs are measured one after the other."""

    def __init__(
        self, decoder: Decoder, pages: int, rows: int, drafting: Drafting | None, asked: Asked = PLAINLY
    ) -> None:
        """rows: of a frame at most. pages: of PAGE rows; as much memory, where pages are larger."""
        pages = pages * PAGE // asked.page
        self._decoder, self._pages, self._rows, self._drafting = decoder, pages, rows, drafting
        self.asked = asked
        self.stage, self._drafter = DecoderStage(decoder, pages, asked.page), None
        if drafting:
            for layer, weight in drafting.head.tap_slices().items():
                self.stage.tap(layer, weight)
            shape = drafting.shape
            inner = EagleProposer(drafting.head, shape, pages, asked.page)
            self._drafter = Replay(inner, drafting.right, decoder.config.vocab, shape.top_k, shape.nodes - 1)
        self.stage.capture()
        self._ids = count(1)

    def run(self, text: int, sequences: int, laps: int, forked: bool = False) -> Clock:
        """So many sequences write for so many laps, each behind `text` rows of its own, or all behind the
        same ones where `forked`; then they are closed. WARM laps before are not told.
        """
        turning = self._turning()
        orders = list(self._orders(text, sequences, forked))
        for order in orders:
            turning.sequencer.apply_order(order)
        warm, clock = Clock(), Clock()
        while clock.laps < laps:
            fed = turning.turn(clock if warm.laps == WARM else warm)
            if sum(isinstance(each, TreeSegment) for each in fed.segments) < sequences:
                warm = Clock()  # prompts are still fed
        turning.close(orders)
        return clock

    def write(self, text: int, parts: Sequence[Part]) -> Clock:
        """A request behind `text` rows, part for part; the next begins when the last text of one has ended.

        What is told begins when the shared rows are in.
        """
        turning, source, drafted = self._turning(), next(self._ids), self._drafting is not None
        prefix = _prefix(source, text, drafted)
        turning.sequencer.apply_order(prefix)
        fed = 0
        while fed < text:
            fed += sum(map(rows_of, turning.turn(Clock()).segments))
        clock = Clock()
        for part in parts:
            for number, limit in enumerate(part.lengths):
                fork = Fork(source, text)
                held = self._held(number) if part.held else None
                turning.sequencer.apply_order(self._order(part.own, number, fork, limit, held))
            turning.finish(len(part.lengths), clock)
        turning.close((prefix,))
        return clock

    def _orders(self, text: int, sequences: int, forked: bool) -> Iterator[Open]:
        """A prompt for each; or one that never writes, and forks of it, which begin with a token of their
        own.
        """
        fork = None
        if forked:
            fork = Fork(next(self._ids), text)
            yield _prefix(fork.sequence, text, self._drafting is not None)
        for number in range(sequences):
            yield self._order(1 if fork else text, number, fork, PLENTY, self._held(number))

    def _held(self, number: int) -> Held | None:
        """What the text of that number is held to."""
        held = self.asked.held
        return held if held and number < held.many else None

    def _order(self, own: int, number: int, fork: Fork | None, limit: int, held: Held | None) -> Open:
        """A text of its own, by its number, behind `own` rows and those it forks."""
        start, prompt = 1 + 100 * number, own + (fork.length if fork else 0)
        opening = Opening(
            next(self._ids),
            prompt,
            fork,
            drafted=self._drafting is not None,
            sampling=self.asked.sampling,
            seed=number,
            limit=limit,
            plan=held.plan if held else None,
            form=held.form if held else None,
        )
        return Open(opening, tuple(range(start, start + own)), PLENTY)

    def _turning(self) -> Turning:
        """A new start over the same pages and graphs."""
        drafting, decoder, page, held = self._drafting, self._decoder, self.asked.page, self.asked.held
        table, grammars = PageTable(self._pages, page), held.grammar if held else _free
        if drafting is None or self._drafter is None:
            sequencer = Sequencer(EPOCH, FrameBudget(self._rows, 1, 1), table, DraftTimeout(0.0, False))
            return Turning(self.stage, Verifier(decoder.logits, grammars), sequencer, None)
        shape, rows, curve = drafting.shape, drafting.rows, drafting.curve
        configuration = Configuration(
            EPOCH, "drafter", (), self._pages, page, shape.slots, rows, shape=shape, curve=curve
        )
        rule: BudgetPolicy = Shared(shape)
        if not shape.fixed:
            rule = make_budget("measured", shape, curve, drafting.level, self._drafter.widths)
        engine = DraftEngine(
            {"eagle": (self._drafter, rule)}, configuration, held.vocabulary if held else None
        )
        sequencer = Sequencer(EPOCH, FrameBudget(self._rows, 1, shape.slots), table, DraftTimeout(0.0, True))
        store = FeatureStore(self._pages, page, drafting.head.width, decoder.dtype, decoder.device)
        return Turning(self.stage, Verifier(decoder.logits, grammars, store), sequencer, engine)


@dataclass(slots=True)
class Turning:
    """Everything that lives for one run. ended: how many sequences have."""

    stage: DecoderStage
    judge: Verifier
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
            verdict = self.judge.verify(self.stage.run(frame))
        with clock.at("compose"):
            self.sequencer.apply_result(verdict.result, 0.0)
        if self.engine is not None:
            with clock.at("learn"):
                for features in verdict.features:
                    self.engine.observe(features)
            with clock.at("draft"):
                drafts = Drafts(EPOCH, self.engine.draft(), self.engine.rest)
            with clock.at("compose"):
                self.sequencer.add_drafts(drafts)
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
            self.sequencer.apply_order(Close(order.opening.sequence))
        self.turn(Clock())


def _free(opening: Opening) -> None:
    """Nobody is held to anything."""


def _prefix(sequence: int, text: int, drafted: bool) -> Open:
    """Rows that never write."""
    return Open(Opening(sequence, text, decodes=False, drafted=drafted), tuple(range(text)), PLENTY)
