"""The last stage's verifier: logits where needed, target tokens, acceptance, results and features."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch

from specsot.core.frames import (
    Drafts,
    End,
    Features,
    Frame,
    Opening,
    Outcome,
    PromptChunk,
    Result,
    Segment,
    TreeSegment,
    rows_of,
)
from specsot.core.tree import single
from specsot.grammar import Grammar, IsolatedGrammar, SpellingHabits
from specsot.members import RowsOf
from specsot_model.kv import indices
from specsot_worker.core.accept import DecodeState, TokenCounts, accept_prompt, accept_tree, grammar_masks
from specsot_worker.core.pipeline import are_in_order
from specsot_worker.feature_store import FeatureStore
from specsot_worker.feature_stream import FeatureStream
from specsot_worker.handed_rows import HandedRows
from specsot_worker.logprobs import add_logprobs
from specsot_worker.near_drafts import NearDrafts, RunsAhead
from specsot_worker.pending_grammars import PendingGrammars
from specsot_worker.prompt_scores import PromptScores
from specsot_worker.sampling import TargetQuery, Targets, find_targets

log = structlog.get_logger()

Logits = Callable[[torch.Tensor], torch.Tensor]
FindGrammar = Callable[[Opening], Grammar | Future[Grammar] | None]


@dataclass(frozen=True, slots=True)
class VerifiedFrame:
    """A frame's result for master and stage 0, and by drafter what it is told now, in order; or all that the
    only drafter said, where it was told at once: else None.
    """

    result: Result
    features: Mapping[str, tuple[Features, ...]]
    drafts: tuple[Drafts, ...] | None = None


class Verifier:
    """Judges frames that have passed every layer; remembers every sequence's tokens."""

    def __init__(
        self,
        logits: Logits,
        find_grammar: FindGrammar,
        store: FeatureStore | None = None,
        stage: RunsAhead | None = None,
    ) -> None:
        """store: where features are kept for the drafter, if it wants any. stage: begins frames early."""
        self._logits = logits
        self._find_grammar = find_grammar
        self._decoding: dict[int, DecodeState] = {}
        self._tokens: dict[int, list[int]] = {}
        self._habits = SpellingHabits()
        self._features = FeatureStream(self._tokens, store)
        self._pending = PendingGrammars()
        self._scores = PromptScores(logits)
        self._stage = stage
        self.near = NearDrafts(stage, self._place, lambda: self.quiet())
        self.quiet = lambda: True  # nothing has come that would change the next frame
        self.went_on = False  # the next frame has been begun

    @property
    def has_pending(self) -> bool:
        """For what holds a sequence: something is not judged yet."""
        return len(self._pending) > 0

    @property
    def pending_ready(self) -> bool:
        """Some of that can be judged now."""
        return bool(self._pending.ready)

    @torch.inference_mode()
    def verify(self, frame: Frame) -> VerifiedFrame:
        """Outcomes of the decoding segments, and the true features of what was committed; but for those of
        sequences that must wait.
        """
        began = time.perf_counter()
        for opening in frame.openings:
            self._open(opening)
        verifiable = self._pending.hold_back(frame)
        self._features.catch_up()  # a GPU is still at this frame
        outcomes = self._outcomes(verifiable)
        ahead = None if self._pending or self.went_on else self.near.follow(frame, outcomes)
        now = time.perf_counter()
        spent = _add_verify_time(frame, now - began)
        result = _result(spent, tuple(outcomes.values()))
        features = self._features.advance(spent if verifiable is frame else verifiable, outcomes, now)
        drafts, begun = self.near.draft(_for_sole_drafter(features), ahead)
        self.went_on |= begun
        self._forget(frame, outcomes)
        return VerifiedFrame(result, features if drafts is None else {}, drafts)

    def set_drafters(self, drafters: Collection[str]) -> None:
        """These drafters are present from now on; those that were not before know nothing."""
        self._features.set_drafters(drafters)

    def take_features_from(self, handed: HandedRows) -> None:
        """Of sequences that were in the epoch before."""
        self._features.handed = handed

    @torch.inference_mode()
    def feature_rows(self, asked: Sequence[RowsOf]) -> list[torch.Tensor | None]:
        """Copies on the host, for whoever will be the last stage; None where there are none."""
        return self._features.copies(asked)

    @torch.inference_mode()
    def verify_pending(self) -> VerifiedFrame:
        """The same of segments that need not wait any more. Its result is no lap's: number 0."""
        grammars, frame = self._pending.take_ready()
        for sequence, found in grammars.items():
            self._decoding[sequence].set_grammar(IsolatedGrammar(found.result))
        outcomes = self._outcomes(frame)
        features = self._features.advance(frame, outcomes, time.perf_counter())
        drafts, _ = self.near.draft(_for_sole_drafter(features))
        self._forget(frame, outcomes)
        result = Result(frame.epoch, frame.number, tuple(outcomes.values()))
        return VerifiedFrame(result, features if drafts is None else {}, drafts)

    def _open(self, opening: Opening) -> None:
        fork = opening.fork
        tokens = self._tokens[fork.sequence][: fork.length] if fork else []
        kept = opening.kept.tokens if opening.kept else ()
        self._tokens[opening.sequence] = [*tokens, *kept]
        self._scores.open(opening)
        if opening.decodes:
            found = self._start_grammar(opening)
            grammar = None
            if found and found.done():
                grammar = IsolatedGrammar(found.result)
            elif found:
                self._pending.add(opening.sequence, found)
            history = TokenCounts(tokens) if opening.sampling.penalises else None
            self._decoding[opening.sequence] = state = DecodeState(opening, grammar, self._habits, history)
            state.read_prompt(len(tokens), kept)

    def _start_grammar(self, opening: Opening) -> Future[Grammar] | None:
        """What holds a sequence. That there is none, though one is asked for, is its own affair, too."""
        compiling: Future[Grammar] = Future()
        try:
            found = self._find_grammar(opening)
        except Exception as error:
            compiling.set_exception(error)
            return compiling
        if found is None or isinstance(found, Future):
            return found
        compiling.set_result(found)
        return compiling

    def _append_prompt(self, frame: Frame) -> None:
        for segment in frame.segments:
            if isinstance(segment, PromptChunk):
                self._tokens[segment.sequence] += segment.tokens
                if state := self._decoding.get(segment.sequence):
                    state.read_prompt(segment.start, segment.tokens)

    def _outcomes(self, frame: Frame) -> dict[int, Outcome]:
        """What each decoding segment led to, by sequence."""
        self.went_on = False
        self._append_prompt(frame)
        self._scores.read(frame)
        # whose logits matter
        rows = list[int]()
        queries = list[tuple[Segment, TargetQuery]]()
        first = 0
        for segment in frame.segments:
            stop = first + rows_of(segment)
            if state := self._decode_state(segment):
                queries.append((segment, _target_query(segment, state, len(rows))))
                rows += range(stop - 1 if isinstance(segment, PromptChunk) else first, stop)
            first = stop
        if not rows:
            return {}
        hidden = frame.hidden
        assert hidden is not None
        logits = self._logits(hidden if len(rows) == first else hidden[indices(rows, hidden.device)])
        questions = [question for _, question in queries]
        steady = self._stage is not None and self._steady(frame, questions)
        meanwhile = None if self._pending else partial(self.near.begin, frame)
        found = find_targets(logits, questions, meanwhile=meanwhile, astray=self.near.went_astray)
        self.went_on = steady and self.quiet() and self._begin_next(questions, found)
        rests = frame.resting or frame.waking
        outcomes = [self._outcome(one, targets, rests) for (one, _), targets in zip(queries, found)]
        return {one.sequence: one for one in add_logprobs(outcomes, questions, logits)}

    def _steady(self, frame: Frame, queries: list[TargetQuery]) -> bool:
        """Whether all of a lap go on by one token, and nothing else, unless those end them; in this order."""
        alone = frame.number and len(queries) == len(frame.segments) and not self._pending
        going = (one.state.goes_on(frame.resting or frame.waking) and len(one.tree) == 1 for one in queries)
        return bool(alone) and all(going) and are_in_order([one.state.opening for one in queries])

    def _begin_next(self, queries: list[TargetQuery], found: list[Targets]) -> bool:
        """What all wait for goes first: the next frame. Results are made while a device is at it."""
        tokens = [token for (token,) in found if token is not None]
        free = [one.state for one, token in zip(queries, tokens) if token not in one.state.opening.stop_ids]
        goes = len(tokens) == len(found) and any(state.remaining > 1 for state in free)
        return goes and self._stage is not None and self._stage.go_on(tokens)

    def _place(self, segment: Segment) -> tuple[int, int] | None:
        state = self._decoding.get(segment.sequence)
        return state.place if state else None

    def _decode_state(self, segment: Segment) -> DecodeState | None:
        if isinstance(segment, PromptChunk) and not segment.final:
            return None
        return self._decoding.get(segment.sequence)

    def _outcome(self, segment: Segment, targets: Targets, resting: bool) -> Outcome:
        state = self._decoding[segment.sequence]
        if isinstance(segment, PromptChunk):
            told = self._scores.take(segment.sequence)
            outcome = replace(accept_prompt(state, targets[0]), prompt_chances=told)
        else:
            rested = resting and state.opening.drafted
            outcome = accept_tree(state, segment.step, segment.tree, targets, rested)
        if state.failure:
            outcome = Outcome(outcome.sequence, outcome.step, outcome.accepted[:1], (), End.FAILED)
            log.error("a sequence failed", sequence=segment.sequence, reason=state.failure)
        self._tokens[segment.sequence] += outcome.tokens
        return outcome

    def _forget(self, frame: Frame, outcomes: dict[int, Outcome]) -> None:
        ended = [sequence for sequence, outcome in outcomes.items() if outcome.end]
        for sequence in (*frame.closings, *ended):
            self._decoding.pop(sequence, None)
        for sequence in frame.closings:
            self._tokens.pop(sequence, None)
            self._pending.forget(sequence)
            self._scores.forget(sequence)


def _for_sole_drafter(features: Mapping[str, tuple[Features, ...]]) -> tuple[Features, ...]:
    """What the only drafter is told. A drafter in the verifier's own thread is always the only one."""
    return next(iter(features.values()), ())


def _target_query(segment: Segment, state: DecodeState, row: int) -> TargetQuery:
    """A prompt's last token is a tree of one node."""
    masks = grammar_masks(segment, state) if state.grammar else ()
    if isinstance(segment, PromptChunk):
        tree = single(segment.tokens[-1])
        position = segment.start + len(segment.tokens)
    else:
        tree = segment.tree
        position = segment.committed + 1
    return TargetQuery(state, row, tree, position, masks)


def _add_verify_time(frame: Frame, seconds: float) -> Frame:
    """Judging is part of the last stage's work."""
    *before, last = frame.seconds or (0.0,)
    return replace(frame, seconds=(*before, last + seconds))


def _result(frame: Frame, outcomes: tuple[Outcome, ...]) -> Result:
    rows = sum(map(rows_of, frame.segments))
    drafted = [len(segment.tree) - 1 for segment in frame.segments if isinstance(segment, TreeSegment)]
    drafts = sum(nodes > 0 for nodes in drafted)
    return Result(frame.epoch, frame.number, outcomes, frame.seconds, rows, drafts, sum(drafted))
