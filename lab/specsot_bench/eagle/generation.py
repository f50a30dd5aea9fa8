"""Generates a batch in one thread with the services' engines, step by step; times it against the baseline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from specsot.core.device_verification import DeviceTrees, DeviceVerification
from specsot.core.frames import Drafts, End, Features, Frame, Open, Opening, Outcome, Result, TreeSegment
from specsot.core.overlap import OverlapState
from specsot.core.pages import PageTable
from specsot.core.tree import Tree
from specsot.errors import ModelError
from specsot.members import Configuration, TreeShape
from specsot_bench.core.eagle_inputs import EagleConfig
from specsot_bench.core.pairing import Comparison, Sample, turns
from specsot_bench.eagle.models import TargetAndDraft
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.engine import DraftEngine
from specsot_drafter.loader import make_engine
from specsot_kernels import TreeStatistics
from specsot_kernels.contract import summarize
from specsot_model.decoder import Decoder
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.loader import capture_tokens
from specsot_worker.penalties import without_tokens
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier

# Seconds. Duration of a step by the clock of a `StepLoop`, which is not a real one, so that runs repeat
# exactly. Untuned.
STEP_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that one sequence of the batch has just written.

    sequence: Number of the sequence in the batch.
    tokens: Token ids that were written in one step.
    end: Reason why the sequence ended, with its last tokens; None before that.
    """

    sequence: int
    tokens: tuple[int, ...]
    end: End | None = None


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """One sequence of the batch.

    tokens: Token ids that the sequence wrote, the end-of-sequence token included.
    end: STOP, LENGTH, or FAILED if the target's logits were not finite; None while the sequence is written.
    accept_lengths: Number of accepted drafts of each of its trees, as far as they were written.
    """

    tokens: tuple[int, ...]
    end: End | None
    accept_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EagleStats:
    """A whole generation.

    sequences: Statistics of each sequence of the batch.
    seed: The seed of all draws; the same seed gives the same tokens.
    steps: Forward passes of the target, those of the prompts included.
    seconds: Seconds spent in target and drafter.
    trees: Statistics of all trees.
    """

    sequences: tuple[SequenceStats, ...]
    seed: int
    steps: int
    seconds: float
    trees: TreeStatistics

    @property
    def new_tokens(self) -> int:
        """Return the number of tokens that were written."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def tokens_per_second(self) -> float:
        """Return the number of written tokens a second; 0 if no time was measured."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Return the number of accepted drafts divided by that of proposed drafts; 0 without drafts."""
        return self.trees.acceptance_rate

    @property
    def mean_accept_length(self) -> float:
        """Return the mean number of accepted drafts of a tree; each tree yields one more token, the bonus. 0
        without trees.
        """
        return self.trees.mean_accept_length


# The only epoch of this loop.
EPOCH = 1
# Tokens of a KV page.
PAGE_ROWS = 256
# Rows. Minimum size of a frame, like --rows: prompts are processed in chunks of so many tokens. Untuned.
ROWS = 512


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass of the target.

    frame: The frame that was computed.
    result: The result of its verification.
    """

    frame: Frame
    result: Result


# Returns the context of a phase of a step, by the phase's name.
Phases = Callable[[str], AbstractContextManager[object]]


def untimed(phase: str) -> AbstractContextManager[object]:
    """Return a context for a phase of a step that is not timed.

    phase: Name of the phase, which is not used.
    """
    return nullcontext()


class StepLoop:
    """Sequencer, stage, verifier and drafter of one ring, called one after another in this thread.

    trees: Trees that the drafter proposed last, by number of the sequence.
    engine: The drafter; None if nothing is drafted.
    at: Returns the context of a phase of the present turn, by the phase's name; see `turn`.
    """

    def __init__(
        self, stage: DecoderStage, verifier: Verifier, sequencer: Sequencer, engine: DraftEngine | None = None
    ) -> None:
        """Connect the parts of one ring.

        With an engine, the verifier uses this loop as its colocated drafter; without, it has none. No message
        ever waits.

        stage: Runs frames through all layers.
        verifier: Computes target tokens and accepts drafts.
        sequencer: Composes frames, and has opened sequences.
        engine: Drafts on this thread; None: nothing is drafted.
        """
        self.sequencer = sequencer
        self.trees = dict[int, Tree]()
        self._stage = stage
        self._verifier = verifier
        self.engine = engine
        self.at: Phases = untimed
        verifier.colocated.drafter = self if engine else None
        # Time in seconds, by which prompts and trees take turns.
        self._now = 0.0
        verifier.quiet = lambda: sequencer.next_is_predictable(message_waits=False)
        verifier.passes = sequencer.passes_ahead

    def turn(self, enter_phase: Phases = untimed) -> Step:
        """Compute everything that is ready in one forward pass, then draft below what was written; return the
        frame and its result.

        `trees` then holds the trees that were proposed in this turn; it is empty if none were.

        enter_phase: Returns the context of a phase by its name. It is entered around compose, layers and
            lm_head; and within lm_head around learn, draft and arrange.
        Raises ModelError if nothing can be computed, that is, no sequence is left.
        """
        self.at = enter_phase
        self.trees = {}
        with enter_phase("compose"):
            self._now += STEP_SECONDS
            frame = self.sequencer.compose(self._now, self._verifier.launched_passes)
        if frame is None:
            raise ModelError("no sequence is left to compute")
        with enter_phase("layers"):
            output = self._stage.run(frame)
        with enter_phase("lm_head"):
            verified = self._verifier.verify(output)
        with enter_phase("compose"):
            self.sequencer.apply_result(verified.result, self._now)
            for drafts in verified.drafts or ():
                self.sequencer.add_drafts(drafts)
        return Step(frame, verified.result)

    def start_drafts(self, verification: DeviceVerification | None = None) -> LoopHandle:
        """Start the drafts that follow one frame, and return their handle; see
        `ColocatedDrafter.start_drafts`.

        verification: The verification result on the GPU, which the host has not read yet. None: trees do not
            grow before `LoopHandle.result`.
        """
        return LoopHandle(self, verification)


class LoopHandle:
    """The drafts of one step of a `StepLoop`; see `DraftHandle`."""

    def __init__(self, loop: StepLoop, verification: DeviceVerification | None) -> None:
        """Start to grow trees from the verification result on the GPU, if there is one.

        loop: The loop, which has a drafter.
        verification: The verification result on the GPU; None: trees do not grow before `result`.
        """
        assert loop.engine is not None
        self._loop = loop
        self._engine = loop.engine
        self._growth: AsyncGrowth | None = None
        if verification:
            with loop.at("draft"):
                self._growth = self._engine.start_growth(verification)

    @property
    def state(self) -> OverlapState:
        """LAUNCHED while trees grow that follow from the verification on the GPU; IDLE if none do; DISCARDED
        if the host has found another verification result.
        """
        return self._growth.state if self._growth else OverlapState.IDLE

    def select(self, segments: Sequence[TreeSegment]) -> DeviceTrees | None:
        """Return the trees that grow, so that the next step can be launched with them before the host has
        read them. Return None if it is unknown which trees `result` will return.

        segments: Next segments of all sequences that continue, with trees that are only roots.
        """
        with self._loop.at("arrange"):
            return self._engine.select(segments)

    def result(self, features: Sequence[Features], meanwhile: Callable[[], None]) -> tuple[Drafts, ...]:
        """Let the drafter observe features, propose trees, and return the messages for stage 0: one message,
        or none if there is nothing to report.

        Nothing to report means no tree, no paused sequence, and a drafter whose drafting is paused.

        features: Messages with the host's verification result, in order.
        meanwhile: Called once while the GPU may be computing.
        """
        engine = self._engine
        enter_phase = self._loop.at
        with enter_phase("learn"):
            for batch in features:
                engine.observe(batch)
        with enter_phase("draft"):
            engine.begin()
        with enter_phase("arrange"):
            meanwhile()
        with enter_phase("draft"):
            drafts = engine.finish()
        self._loop.trees = {draft.sequence: draft.tree for draft in drafts}
        has_news = drafts or engine.paused_trees or engine.awake
        return (Drafts(EPOCH, drafts, engine.paused_trees),) if has_news else ()

    def discard(self, sequence: int) -> None:
        """Declare that the host has found other target tokens for a sequence than the GPU, so that all trees
        are grown again. Nothing happens if no trees grow.

        sequence: Number of the sequence.
        """
        if self._growth:
            self._growth.discard(sequence)


# Makes a stage of a decoder, a number of pages, and the rows of a page.
StageMaker = Callable[[Decoder, int, int], DecoderStage]


def open_loop(
    models: TargetAndDraft,
    shape: TreeShape,
    openings: Sequence[Open],
    min_rows: int = ROWS,
    make_stage: StageMaker = DecoderStage,
) -> StepLoop:
    """Return the loop of a batch of sequences, all opened at once; each may be decoded up to its lease.

    Without a draft model, nothing is drafted, and the loop has no engine.

    models: Target and draft.
    shape: Shape of the trees.
    openings: Orders that open the sequences, one for each.
    min_rows: Minimum number of rows of a frame; the trees of all sequences always fit into one frame.
    make_stage: Makes the stage from the decoder, the number of pages and the rows of a page; benchmarks pass
        another.
    """
    slots = shape.slots if models.draft else 1
    pages = sum(-(-(opening.lease + slots) // PAGE_ROWS) for opening in openings)
    min_rows = max(min_rows, len(openings) * shape.nodes)
    stage = make_stage(models.target, pages, PAGE_ROWS)
    engine = None
    if models.draft is not None:
        for layer, weight in models.draft.tap_slices().items():
            stage.tap(layer, weight)
        configuration = Configuration(EPOCH, "drafter", (), pages, PAGE_ROWS, slots, min_rows, shape=shape)
        engine = make_engine(models.draft, configuration)
    stage.capture()
    logits = without_tokens(models.target.logits, models.unnamed)
    tokens = capture_tokens(models.target, logits) if models.target.capturable else None
    verifier = Verifier(logits, _no_grammar, _ring_for(models), stage, captured_tokens=tokens)
    table = PageTable(pages, PAGE_ROWS)
    budget = FrameBudget(min_rows, 1, slots, stage.prompt_rows(min_rows))
    sequencer = Sequencer(EPOCH, budget, table, DraftTimeout(0.0, models.draft is not None))
    for opening in openings:
        sequencer.apply_order(opening)
    return StepLoop(stage, verifier, sequencer, engine)


def _ring_for(models: TargetAndDraft) -> FeatureRing | None:
    """Return a ring for the features that the drafter reads, or None without a drafter.

    models: The target, and the draft model if there is one.
    """
    target = models.target
    draft = models.draft
    return FeatureRing(draft.width, target.dtype, target.device) if draft else None


def _no_grammar(_: object) -> None:
    """Return no constraint. The argument is the opening's, which is not used."""


# Token ids of several prompts.
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """What is wanted of each sequence of a batch.

    limit: Maximum number of tokens that a sequence writes.
    seed: Seed of all draws; a sequence's ordinal is its number in the batch.
    stop_ids: Token ids that end a sequence; empty: none.
    """

    limit: int
    seed: int
    stop_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _WrittenSequence:
    """What a sequence has written so far.

    tokens: Token ids, in order.
    accepted: Number of accepted drafts of each tree.
    end: Why the sequence ended; None while it is written.
    """

    tokens: list[int] = field(default_factory=list[int])
    accepted: list[int] = field(default_factory=list[int])
    end: End | None = None

    def append(self, outcome: Outcome) -> None:
        """Add the outcome of a step: its tokens, its end, and how many drafts were accepted.

        An outcome without accepted nodes belongs to no tree, and adds no number of accepted drafts. The root
        is not counted.

        outcome: Outcome of this sequence in one step.
        """
        self.tokens += outcome.tokens
        self.end = outcome.end
        if outcome.accepted:
            self.accepted.append(len(outcome.accepted) - 1)


class Generation:
    """A generation. Run it once, with `pieces`.

    models: Target and draft.
    config: Configuration of trees and sampling.
    prompts: Token ids of each prompt.
    limits: Length, seed and end tokens.
    clock: Returns seconds.
    make_stage: Makes the stage from the decoder, the number of pages and the rows of a page.
    """

    def __init__(
        self,
        models: TargetAndDraft,
        config: EagleConfig,
        prompts: Prompts,
        limits: GenerationLimits,
        clock: Callable[[], float] = time.perf_counter,
        make_stage: StageMaker = DecoderStage,
    ) -> None:
        openings = openings_of(prompts, config, limits, models.draft is not None)
        self._ring = open_loop(models, config.shape, openings, make_stage=make_stage)
        self._sequences = [_WrittenSequence() for _ in prompts]
        self._num_steps = config.num_steps
        self._seed = limits.seed
        self._clock = clock
        self._proposed = self._steps = 0
        self._seconds = 0.0

    def pieces(self) -> Iterator[Piece]:
        """Yield the tokens that each sequence writes, step by step, until every sequence has ended. Call it
        once.

        One step may yield several pieces, one for each sequence that the result names, also such that wrote
        no token.
        """
        while any(sequence.end is None for sequence in self._sequences):
            began = self._clock()
            step = self._ring.turn()
            self._seconds += self._clock() - began
            yield from self._apply(step)

    @property
    def tokens(self) -> list[list[int]]:
        """Return the token ids that each sequence has written so far."""
        return [sequence.tokens for sequence in self._sequences]

    @property
    def stats(self) -> EagleStats:
        """Return the statistics of all steps so far."""
        lengths = [accepted for sequence in self._sequences for accepted in sequence.accepted]
        return EagleStats(
            tuple(
                SequenceStats(tuple(sequence.tokens), sequence.end, tuple(sequence.accepted))
                for sequence in self._sequences
            ),
            self._seed,
            self._steps,
            self._seconds,
            summarize(lengths, self._proposed, self._num_steps),
        )

    def _apply(self, step: Step) -> Iterator[Piece]:
        """Record a step, and yield its pieces, one for each sequence that wrote.

        Drafted nodes are counted without the roots. All sequences are updated before the first piece is
        yielded.

        step: The computed frame and its result.
        """
        self._steps += 1
        self._proposed += sum(
            len(segment.tree) - 1 for segment in step.frame.segments if isinstance(segment, TreeSegment)
        )
        for outcome in step.result.outcomes:
            self._sequences[outcome.sequence].append(outcome)
        for outcome in step.result.outcomes:
            yield Piece(outcome.sequence, outcome.tokens, outcome.end)


def openings_of(
    prompts: Prompts, config: EagleConfig, limits: GenerationLimits, with_drafter: bool
) -> list[Open]:
    """Return the orders that open every sequence at once, with a lease to its end.

    prompts: Token ids of each prompt.
    config: Configuration of the sampling.
    limits: Length, seed and end tokens.
    with_drafter: True if trees may be drafted for the sequences.
    """
    return [
        Open(
            Opening(
                sequence,
                len(prompt),
                drafted=with_drafter,
                sampling=config.sampling,
                seed=limits.seed,
                ordinal=sequence,
                stop_ids=limits.stop_ids,
                limit=limits.limit,
            ),
            prompt,
            len(prompt) + limits.limit,
        )
        for sequence, prompt in enumerate(prompts)
    ]


# Runs a batch of prompts and returns its statistics.
Run = Callable[[Prompts], EagleStats]


@dataclass(frozen=True, slots=True)
class EagleBenchmark:
    """How much faster speculation is than decoding without drafts; below 1 it costs more than it gains.

    comparison: Tokens per second of both, one pair for each batch.
    trees: Statistics of the drafted trees.
    identical: Number of sequences that both wrote alike, token for token; in fp32 this is all of them.
    sequences: Number of sequences.
    """

    comparison: Comparison
    trees: TreeStatistics
    identical: int
    sequences: int

    @property
    def ratio(self) -> float:
        """Return the median, over the batches, of the speed with drafts divided by the speed without."""
        return self.comparison.ratio

    def __str__(self) -> str:
        """Return the comparison as four lines.

        The lines are the speed ratio with its quartiles, tokens per second of both, accepted drafts per tree
        and by depth, and the number of identical sequences.
        """
        low, high = self.comparison.spread
        fast, plain = self.comparison.rates
        depths = " ".join(f"{rate:.2f}" for rate in self.trees.depth_rates)
        return "\n".join(
            (
                f"speculation / plain  {self.ratio:.2f}x (quartiles {low:.2f} .. {high:.2f})",
                f"tokens per second    {fast:.1f} / {plain:.1f}",
                f"accepted per tree    {self.trees.mean_accept_length:.2f}, by depth {depths}",
                f"identical            {self.identical} of {self.sequences} sequences",
            )
        )


def measure(
    batches: Sequence[Prompts], speculate: Run, decode: Run, num_steps: int, num_warm_up: int = 1
) -> EagleBenchmark:
    """Return the comparison of all batches with and without drafts, run in the order AB BA AB ....

    Raises IndexError if there are no batches to warm up with.

    batches: Batches of prompts, at least one.
    speculate: Runs a batch with drafts.
    decode: Runs a batch without drafts.
    num_steps: Number of depths whose acceptance is reported.
    num_warm_up: Number of runs of each that come first and do not count.
    """
    for _ in range(num_warm_up):
        speculate(batches[0])
        decode(batches[0])
    runs_of_side: dict[Run, list[EagleStats]] = {speculate: [], decode: []}
    for pair, run in turns((speculate, decode), len(batches)):
        runs_of_side[run].append(run(batches[pair]))
    speculative = runs_of_side[speculate]
    baseline = runs_of_side[decode]
    token_pairs = [
        (a.tokens, b.tokens) for x, y in zip(speculative, baseline) for a, b in zip(x.sequences, y.sequences)
    ]
    comparison = Comparison("speculation", _samples(speculative), _samples(baseline))
    return EagleBenchmark(
        comparison, _trees(speculative, num_steps), sum(a == b for a, b in token_pairs), len(token_pairs)
    )


def _samples(runs: Sequence[EagleStats]) -> tuple[Sample, ...]:
    """Return tokens and seconds of each run.

    runs: Statistics of the runs.
    """
    return tuple(Sample(run.new_tokens, run.seconds) for run in runs)


def _trees(runs: Sequence[EagleStats], num_steps: int) -> TreeStatistics:
    """Return the statistics of all trees of some runs together.

    runs: Statistics of the runs.
    num_steps: Number of depths whose acceptance is reported.
    """
    lengths = [length for run in runs for sequence in run.sequences for length in sequence.accept_lengths]
    return summarize(lengths, sum(run.trees.total_proposed for run in runs), num_steps)
