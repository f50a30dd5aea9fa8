"""One stage with its graphs in this thread, and a drafter or none: how long each of its steps takes.

All else is as in a fleet of one: frames, graphs, verification by the model's own argmax, pages, the drafter's
engine.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import torch

from specsot.core.frames import Close, Drafts, Fork, Open, Opening, TreeSegment, rows_of
from specsot.core.pages import PageTable
from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import Vocabulary
from specsot.grammar import Grammar, grammar_of
from specsot.members import Configuration, Curve, TreeShape
from specsot.params import Form, Sampling
from specsot_bench.eagle.generation import EPOCH, StepLoop
from specsot_drafter.core.budget import BudgetPolicy, FixedBudget
from specsot_drafter.core.control import make_budget
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.proposers.eagle import EagleProposer
from specsot_lab.bench.clock import StepClock
from specsot_lab.bench.gpu_replay import Ranks, Replay
from specsot_model.decoder import Decoder
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier

PAGE = 64
PLENTY = 1 << 20  # tokens a sequence may write: none ends by its limit
WARM = 6  # steps that are not told


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a run drafts. right: see `Replay`; rows: of all trees of a step together, roots included.

    curve: of the stage, where a tuner is to decide how much of that pays.
    """

    head: DraftHead
    shape: TreeShape
    right: float | Ranks
    rows: int
    curve: Curve = ()
    level: Curve = ()


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """What the first `many` texts of a run, or of the first part of a request, are held to."""

    vocabulary: Vocabulary
    plan: PlanRules | None = None
    form: Form | None = None
    many: int = 1

    def grammar(self, opening: Opening) -> Grammar | None:
        """Return the grammar that an opening asks for; None if it asks for none."""
        found = grammar_of(self.vocabulary, opening) if opening.plan or opening.form else None
        return found.result() if isinstance(found, Future) else found


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class WritingOptions:
    """How texts are written. page: rows of one."""

    page: int = PAGE
    sampling: Sampling = GREEDY
    held: HeldSequence | None = None


PLAINLY = WritingOptions()


@dataclass(frozen=True, slots=True)
class RequestPart:
    """Texts of these lengths, side by side. own: rows of each one's prompt behind what all share.

    held: those that a run holds to something are among them.
    """

    own: int
    lengths: Sequence[int]
    held: bool = False


class GpuLoop:
    """Runs are measured one after the other, each a new loop over the same pages and graphs."""

    def __init__(
        self,
        decoder: Decoder,
        pages: int,
        rows: int,
        drafting: Drafting | None,
        asked: WritingOptions = PLAINLY,
    ) -> None:
        """Prepare runs over the same pages and graphs.

        decoder: the whole base. pages: of PAGE rows each; the same memory if pages are larger. rows: maximum
            of a frame. drafting: how to draft; None: without drafts. asked: how texts are written.
        """
        free_loops()
        pages = pages * PAGE // asked.page
        self._decoder = decoder
        self._pages = pages
        self._rows = rows
        self._drafting = drafting
        self.asked = asked
        self.stage = DecoderStage(decoder, pages, asked.page)
        self._drafter: Replay | None = None
        if drafting:
            for layer, weight in drafting.head.tap_slices().items():
                self.stage.tap(layer, weight)
            shape = drafting.shape
            inner = EagleProposer(drafting.head, shape, pages, asked.page)
            self._drafter = Replay(inner, drafting.right, decoder.config.vocab, shape.top_k, shape.nodes - 1)
        self.stage.capture()
        self._ids = count(1)

    def run(
        self, text: int, sequences: int, steps: int, forked: bool = False, paused: bool = False
    ) -> StepClock:
        """Return the clock of so many steps of so many sequences, which are then closed; WARM steps before do
        not count.

        text: rows before each sequence.
        forked: all share the same rows.
        paused: drafting is paused once all sequences decode, and no step that counts has drafts.
        """
        loop = self._loop()
        orders = list(self._orders(text, sequences, forked))
        for order in orders:
            loop.sequencer.apply_order(order)
        warm = StepClock()
        clock = StepClock()
        while clock.steps < steps:
            if paused and warm.steps == 1:
                loop.sequencer.add_drafts(Drafts(EPOCH, (), PLENTY))
            fed = (clock if warm.steps == WARM else warm).turn(loop).frame
            if sum(isinstance(each, TreeSegment) for each in fed.segments) < sequences:
                warm = StepClock()  # prompts are still fed
        _close(loop, orders)
        return clock

    def write(self, text: int, parts: Sequence[RequestPart]) -> StepClock:
        """Return the clock of a request, part by part; a part begins when the last sequence of the part
        before has ended.

        The clock begins when the shared rows are computed. text: shared rows.
        """
        loop, prefix = self._loop(), self._prefix(text)
        loop.sequencer.apply_order(prefix)
        fed = 0
        while fed < text:
            fed += sum(map(rows_of, loop.turn().frame.segments))
        clock, fork = StepClock(), Fork(prefix.opening.sequence, text)
        for part in parts:
            for number, limit in enumerate(part.lengths):
                held = self._held(number) if part.held else None
                loop.sequencer.apply_order(self._order(part.own, number, fork, limit, held))
            left = len(part.lengths)
            while left > 0:
                left -= sum(one.end is not None for one in clock.turn(loop).result.outcomes)
        _close(loop, (prefix,))
        return clock

    def _orders(self, text: int, sequences: int, forked: bool) -> Iterator[Open]:
        """Yield the orders that open the sequences: a prompt for each; or, `forked`, a prefix that never
        decodes and forks of it, which begin with a token of their own.
        """
        fork = None
        if forked:
            yield (prefix := self._prefix(text))
            fork = Fork(prefix.opening.sequence, text)
        for number in range(sequences):
            yield self._order(1 if fork else text, number, fork, PLENTY, self._held(number))

    def _held(self, number: int) -> HeldSequence | None:
        """Return what constrains the sequence of this number; None: nothing."""
        held = self.asked.held
        return held if held and number < held.many else None

    def _prefix(self, text: int) -> Open:
        """Return the order that opens a prefix of so many rows."""
        drafted = self._drafting is not None
        opening = Opening(next(self._ids), text, decodes=False, drafted=drafted)
        return Open(opening, tuple(range(text)), PLENTY)

    def _order(self, own: int, number: int, fork: Fork | None, limit: int, held: HeldSequence | None) -> Open:
        """Return the order that opens one sequence. own: rows of its own. number: makes its tokens differ.
        fork: the prefix, or None. limit: tokens that it writes. held: what constrains it.
        """
        start = 1 + 100 * number
        prompt = own + (fork.length if fork else 0)
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

    def _loop(self) -> StepLoop:
        """Return a new loop over the stage's pages and graphs."""
        drafting = self._drafting
        decoder = self._decoder
        page = self.asked.page
        held = self.asked.held
        slots = drafting.shape.slots if drafting else 1
        budget = FrameBudget(self._rows, 1, slots, self.stage.prompt_rows(self._rows))
        timeout = DraftTimeout(0.0, drafting is not None)
        sequencer = Sequencer(EPOCH, budget, PageTable(self._pages, page), timeout)
        engine = None
        ring = None
        if drafting is not None:
            engine = self._engine(drafting)
            ring = FeatureRing(drafting.head.width, decoder.dtype, decoder.device)
        verifier = Verifier(decoder.logits, held.grammar if held else _free, ring, self.stage)
        return StepLoop(self.stage, verifier, sequencer, engine)

    def _engine(self, drafting: Drafting) -> DraftEngine:
        """Return the engine that drafts as asked."""
        shape = drafting.shape
        curve = drafting.curve
        held = self.asked.held
        assert self._drafter is not None
        rule: BudgetPolicy = FixedBudget(shape)
        if not shape.fixed:
            own = self._drafter
            rule = make_budget("measured", shape, curve, drafting.level, own.widths, own.at_once)
        slots = shape.slots
        rows = drafting.rows
        page = self.asked.page
        told = Configuration(EPOCH, "drafter", (), self._pages, page, slots, rows, shape=shape, curve=curve)
        return DraftEngine({"eagle": (self._drafter, rule)}, told, held.vocabulary if held else None)


def _close(loop: StepLoop, orders: Sequence[Open]) -> None:
    """Close the sequences of these orders, and run one step that carries this out."""
    for order in reversed(orders):
        loop.sequencer.apply_order(Close(order.opening.sequence))
    loop.turn()


def _free(opening: Opening) -> None:
    """Return no constraint. opening: not used."""


def free_loops() -> None:
    """Free the memory of loops that are no longer used: they refer to themselves, so that only the garbage
    collector frees their pages.
    """
    gc.collect()
    torch.cuda.empty_cache()
