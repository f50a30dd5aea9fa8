"""Measures how long the steps of one stage take that runs in this thread with its graphs, with or without a
drafter.

Everything else is as in a fleet of one: frames, graphs, verification by the model's own argmax, pages, the
drafter's engine.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Final

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

# Rows of a KV page, unless `WritingOptions` says otherwise.
PAGE: Final = 64
# Tokens that a sequence may write: so many that none ends by its limit.
PLENTY: Final = 1 << 20
# Steps before a run that are not counted, so that kernels are compiled. Untuned.
WARM: Final = 6


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a run drafts.

    head: The head, which runs for its cost.
    shape: The tree.
    chances: Probability that a level is right, or that each rank of a node's children is, see `Replay`.
    max_rows: Maximum number of rows of all trees of a step together, roots included.
    step_curve: Seconds by rows of a step, from which a tuner decides how much to draft; () if the shape is
        fixed.
    level_curve: Seconds by rows of growing one level, likewise.
    """

    head: DraftHead
    shape: TreeShape
    chances: float | Ranks
    max_rows: int
    step_curve: Curve = ()
    level_curve: Curve = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """What constrains the first sequences of a run, or of the first part of a request.

    vocabulary: The bytes of every token.
    plan: The rules of a plan that the sequences must follow; None: no plan.
    form: The form that the sequences must have; None: no form.
    num_sequences: How many sequences are constrained.
    """

    vocabulary: Vocabulary
    plan: PlanRules | None = None
    form: Form | None = None
    num_sequences: int = 1

    def grammar(self, opening: Opening) -> Grammar | None:
        """Return the grammar that an opening asks for; None if it asks for none. Wait for the grammar if it
        is still being compiled.

        opening: The opening of a sequence.
        """
        grammar = grammar_of(self.vocabulary, opening) if opening.plan or opening.form else None
        return grammar.result() if isinstance(grammar, Future) else grammar


# Sampling at temperature 0.
GREEDY: Final = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class WritingOptions:
    """How sequences are written.

    page_rows: Rows of a KV page.
    sampling: How tokens are sampled.
    constraint: What constrains the first sequences; None: nothing.
    """

    page_rows: int = PAGE
    sampling: Sampling = GREEDY
    constraint: Constraint | None = None


# Greedy decoding without a grammar, in pages of PAGE rows.
UNCONSTRAINED: Final = WritingOptions()


@dataclass(frozen=True, slots=True)
class RequestPart:
    """Sequences of one request that are written at the same time.

    prompt_length: Prompt tokens of each sequence after the shared ones.
    lengths: Number of tokens that each sequence writes.
    constrained: True if the loop's constraint applies to the first of these sequences.
    """

    prompt_length: int
    lengths: Sequence[int]
    constrained: bool = False


class GpuLoop:
    """Runs sequences, one run after the other. Every run is a new loop over the same pages and graphs."""

    def __init__(
        self,
        decoder: Decoder,
        pages: int,
        max_rows: int,
        drafting: Drafting | None,
        writing: WritingOptions = UNCONSTRAINED,
    ) -> None:
        """Allocate the pages and capture the graphs.

        decoder: The whole base model.
        pages: Number of pages of PAGE rows. If pages are larger, there are fewer of them, in the same memory.
        max_rows: Maximum number of rows of a frame.
        drafting: How to draft; None: without drafts.
        writing: How sequences are written; may be changed between runs.

        Memory of earlier loops that are no longer used is freed first.
        """
        free_loops()
        pages = pages * PAGE // writing.page_rows
        self._decoder = decoder
        self._pages = pages
        self._max_rows = max_rows
        self._drafting = drafting
        self.writing = writing
        self.stage = DecoderStage(decoder, pages, writing.page_rows)
        self._drafter: Replay | None = None
        if drafting:
            for layer, weight in drafting.head.tap_slices().items():
                self.stage.tap(layer, weight)
            shape = drafting.shape
            inner = EagleProposer(drafting.head, shape, pages, writing.page_rows)
            self._drafter = Replay(
                inner, drafting.chances, decoder.config.vocab, shape.top_k, shape.nodes - 1
            )
        self.stage.capture()
        self._ids = count(1)

    def run(
        self, context_length: int, sequences: int, steps: int, forked: bool = False, paused: bool = False
    ) -> StepClock:
        """Return the clock of a run, after which all sequences are closed. It starts when all prompts have
        been computed and WARM more steps have passed.

        context_length: Prompt tokens of each sequence.
        sequences: Number of sequences, at least 1.
        steps: Number of steps that are timed.
        forked: True if the sequences fork one prefix of `context_length` tokens, and add one token each.
        paused: True if drafting is paused once all sequences decode, so that no timed step has drafts.

        A step counts only if all sequences have a tree in it. Fails if the pages do not suffice.
        """
        loop = self._loop()
        orders = list(self._opening_orders(context_length, sequences, forked))
        for order in orders:
            loop.sequencer.apply_order(order)
        warm = StepClock()
        clock = StepClock()
        while clock.steps < steps:
            if paused and warm.steps == 1:
                loop.sequencer.add_drafts(Drafts(EPOCH, (), PLENTY))
            frame = (clock if warm.steps == WARM else warm).time_step(loop).frame
            if sum(isinstance(segment, TreeSegment) for segment in frame.segments) < sequences:
                # Prompts are still being computed.
                warm = StepClock()
        _close_sequences(loop, orders)
        return clock

    def write(self, shared_length: int, parts: Sequence[RequestPart]) -> StepClock:
        """Return the clock of a whole request. It starts when the shared tokens have been computed. A part
        starts when the last sequence of the part before has ended.

        shared_length: Tokens of the prefix that all sequences fork.
        parts: The parts of the request, in order.

        Steps that compute the prompts of a part are timed, too. The sequences of a part have ended when the
        next part begins; the prefix is closed at the end.
        """
        loop, prefix = self._loop(), self._prefix_order(shared_length)
        loop.sequencer.apply_order(prefix)
        num_computed = 0
        while num_computed < shared_length:
            num_computed += sum(map(rows_of, loop.turn().frame.segments))
        clock, fork = StepClock(), Fork(prefix.opening.sequence, shared_length)
        for part in parts:
            for number, limit in enumerate(part.lengths):
                constraint = self._constraint_of(number) if part.constrained else None
                loop.sequencer.apply_order(
                    self._opening_order(part.prompt_length, number, fork, limit, constraint)
                )
            num_unfinished = len(part.lengths)
            while num_unfinished > 0:
                num_unfinished -= sum(
                    outcome.end is not None for outcome in clock.time_step(loop).result.outcomes
                )
        _close_sequences(loop, (prefix,))
        return clock

    def _opening_orders(self, context_length: int, sequences: int, forked: bool) -> Iterator[Open]:
        """Yield the orders that open the sequences. With `forked`, the first order opens a prefix, which
        never decodes.

        context_length: Tokens of each prompt, or of the prefix.
        sequences: Number of sequences.
        forked: True if the sequences fork a prefix, and add one token each.

        Each forked sequence has a prompt of one token of its own.
        """
        fork = None
        if forked:
            yield (prefix := self._prefix_order(context_length))
            fork = Fork(prefix.opening.sequence, context_length)
        for number in range(sequences):
            yield self._opening_order(
                1 if fork else context_length, number, fork, PLENTY, self._constraint_of(number)
            )

    def _constraint_of(self, number: int) -> Constraint | None:
        """Return what constrains a sequence; None if nothing does.

        number: The sequence's number, counted from 0.
        """
        constraint = self.writing.constraint
        return constraint if constraint and number < constraint.num_sequences else None

    def _prefix_order(self, length: int) -> Open:
        """Return the order that opens a prefix.

        length: Number of its tokens.

        The prefix has the token ids 0 .. length - 1 and never decodes. Every call uses up a new sequence id.
        """
        drafted = self._drafting is not None
        opening = Opening(next(self._ids), length, decodes=False, drafted=drafted)
        return Open(opening, tuple(range(length)), PLENTY)

    def _opening_order(
        self, prompt_length: int, number: int, fork: Fork | None, limit: int, constraint: Constraint | None
    ) -> Open:
        """Return the order that opens one sequence.

        prompt_length: Prompt tokens after those of the prefix.
        number: The sequence's number, counted from 0, which makes its tokens and its seed differ from those
            of others.
        fork: The prefix that the sequence forks, or None.
        limit: Number of tokens that it writes.
        constraint: What constrains the sequence; None: nothing.

        Every call uses up a new sequence id. The prompt's token ids are 1 + 100 * number and those that
        follow.
        """
        start = 1 + 100 * number
        prompt = prompt_length + (fork.length if fork else 0)
        opening = Opening(
            next(self._ids),
            prompt,
            fork,
            drafted=self._drafting is not None,
            sampling=self.writing.sampling,
            seed=number,
            limit=limit,
            plan=constraint.plan if constraint else None,
            form=constraint.form if constraint else None,
        )
        return Open(opening, tuple(range(start, start + prompt_length)), PLENTY)

    def _loop(self) -> StepLoop:
        """Return a new loop over the stage's pages and graphs, without sequences.

        A run without drafts has no engine and no feature store. The draft timeout is 0 seconds.
        """
        drafting = self._drafting
        decoder = self._decoder
        page_rows = self.writing.page_rows
        constraint = self.writing.constraint
        slots = drafting.shape.slots if drafting else 1
        budget = FrameBudget(self._max_rows, 1, slots, self.stage.prompt_rows(self._max_rows))
        timeout = DraftTimeout(0.0, drafting is not None)
        sequencer = Sequencer(EPOCH, budget, PageTable(self._pages, page_rows), timeout)
        engine = None
        ring = None
        if drafting is not None:
            engine = self._engine(drafting)
            ring = FeatureRing(drafting.head.width, decoder.dtype, decoder.device)
        verifier = Verifier(
            decoder.logits, constraint.grammar if constraint else _unconstrained, ring, self.stage
        )
        return StepLoop(self.stage, verifier, sequencer, engine)

    def _engine(self, drafting: Drafting) -> DraftEngine:
        """Return the engine that drafts.

        drafting: How to draft. If its shape is not fixed, a tuner decides how much.

        A fixed shape has a fixed number of nodes, otherwise the number is chosen by the measured curves. The
        grammar's vocabulary is passed on if sequences are constrained.
        """
        shape = drafting.shape
        step_curve = drafting.step_curve
        constraint = self.writing.constraint
        assert self._drafter is not None
        rule: BudgetPolicy = FixedBudget(shape)
        if not shape.fixed:
            proposer = self._drafter
            rule = make_budget(
                "measured", shape, step_curve, drafting.level_curve, proposer.widths, proposer.at_once
            )
        slots = shape.slots
        max_rows = drafting.max_rows
        page_rows = self.writing.page_rows
        configuration = Configuration(
            EPOCH, "drafter", (), self._pages, page_rows, slots, max_rows, shape=shape, curve=step_curve
        )
        return DraftEngine(
            {"eagle": (self._drafter, rule)}, configuration, constraint.vocabulary if constraint else None
        )


def _close_sequences(loop: StepLoop, orders: Sequence[Open]) -> None:
    """Close the sequences of these orders, and run one step, by which all stages close them.

    loop: The loop that has the sequences.
    orders: The orders that opened the sequences; forks are closed before their prefix.

    The step's result is dropped.
    """
    for order in reversed(orders):
        loop.sequencer.apply_order(Close(order.opening.sequence))
    loop.turn()


def _unconstrained(opening: Opening) -> None:
    """Return no grammar.

    opening: The opening of a sequence; not used.
    """


def free_loops() -> None:
    """Free the memory of loops that are no longer used. They refer to themselves, so that only the garbage
    collector frees their pages.
    """
    gc.collect()
    torch.cuda.empty_cache()
