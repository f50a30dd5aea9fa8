"""The end of the ring: logits where they are wanted, targets, acceptance, results and features.

Refuses to know text, requests and transports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import structlog
import torch

from specsot.constraint import Grammar, Habits, Isolated
from specsot.frames import Chunk, End, Features, Frame, Growth, Opening, Outcome, Result, Segment, rows_of
from specsot.tree import single
from specsot_worker.chances import add_chances
from specsot_worker.features import FeatureStore
from specsot_worker.history import History
from specsot_worker.judge import Written, judge_prompt, judge_tree
from specsot_worker.nodes import grammar_masks
from specsot_worker.postponed import Postponed
from specsot_worker.targets import Question, Targets, find_targets
from specsot_worker.teaching import Teaching

log = structlog.get_logger()

Logits = Callable[[torch.Tensor], torch.Tensor]
Grammars = Callable[[Opening], Grammar | Future[Grammar] | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A frame's result for master and stage 0, and what the drafter is told now, in order."""

    result: Result
    features: tuple[Features, ...]


class LastStage:
    """Judges frames that have passed every layer; remembers every sequence's tokens."""

    def __init__(self, logits: Logits, grammars: Grammars, store: FeatureStore | None = None) -> None:
        """store: where features are kept for the drafter, if it wants any."""
        self._logits, self._grammars = logits, grammars
        self._written: dict[int, Written] = {}
        self._texts: dict[int, list[int]] = {}
        self._habits = Habits()
        self._teaching = Teaching(self._texts, store)
        self._postponed = Postponed()

    @property
    def waits(self) -> bool:
        """For what holds a sequence: something is not judged yet."""
        return len(self._postponed) > 0

    @property
    def late(self) -> bool:
        """Some of that can be judged now."""
        return bool(self._postponed.ready)

    @torch.inference_mode()
    def judge(self, frame: Frame) -> Verdict:
        """Outcomes of the decoding segments, and the true features of what was committed; but for those of
        sequences that must wait.
        """
        begun = time.perf_counter()
        for opening in frame.openings:
            self._open(opening)
        judged = self._postponed.keep(frame)
        self._teaching.catch_up()  # a GPU is still at this frame
        outcomes = self._outcomes(judged)
        now = time.perf_counter()
        spent = _spent(frame, now - begun)
        result = _result(spent, tuple(outcomes.values()))
        told = self._teaching.tell(spent if judged is frame else judged, outcomes, now)
        self._forget(frame, outcomes)
        return Verdict(result, told)

    def teach_anew(self, somebody: bool = True) -> None:
        """Another drafter listens from now on, or nobody."""
        self._teaching.begin(somebody)

    @torch.inference_mode()
    def judge_late(self) -> Verdict:
        """The same of segments that need not wait any more. Its result is no lap's: number 0."""
        grammars, frame = self._postponed.take()
        for sequence, found in grammars.items():
            self._written[sequence].hold(Isolated(found.result))
        outcomes = self._outcomes(frame)
        told = self._teaching.tell(frame, outcomes, time.perf_counter())
        self._forget(frame, outcomes)
        return Verdict(Result(frame.epoch, frame.number, tuple(outcomes.values())), told)

    def _open(self, opening: Opening) -> None:
        fork = opening.fork
        text = self._texts[fork.sequence][: fork.length] if fork else []
        self._texts[opening.sequence] = text
        if opening.decodes:
            found, grammar = self._find(opening), None
            if found and found.done():
                grammar = Isolated(found.result)
            elif found:
                self._postponed.wait(opening.sequence, found)
            history = History(text) if opening.sampling.penalises else None
            self._written[opening.sequence] = Written(opening, grammar, self._habits, history)

    def _find(self, opening: Opening) -> Future[Grammar] | None:
        """What holds a sequence. That there is none, though one is asked for, is its own affair, too."""
        coming: Future[Grammar] = Future()
        try:
            found = self._grammars(opening)
        except Exception as error:
            coming.set_exception(error)
            return coming
        if found is None or isinstance(found, Future):
            return found
        coming.set_result(found)
        return coming

    def _recall(self, frame: Frame) -> None:
        for segment in frame.segments:
            if isinstance(segment, Chunk):
                self._texts[segment.sequence] += segment.tokens
                if written := self._written.get(segment.sequence):
                    written.recall(segment.start, segment.tokens)

    def _outcomes(self, frame: Frame) -> dict[int, Outcome]:
        """What each decoding segment led to, by sequence."""
        self._recall(frame)
        rows, asked = list[int](), list[tuple[Segment, Question]]()
        first = 0
        for segment in frame.segments:
            if written := self._judged(segment):
                asked.append((segment, _question(segment, written, len(rows))))
                rows += _judged_rows(segment, first)
            first += rows_of(segment)
        if not rows:
            return {}
        assert frame.hidden is not None
        logits = self._logits(frame.hidden if len(rows) == first else frame.hidden[rows])
        questions = [question for _, question in asked]
        outcomes = [
            self._outcome(segment, targets)
            for (segment, _), targets in zip(asked, find_targets(logits, questions))
        ]
        return {one.sequence: one for one in add_chances(outcomes, questions, logits)}

    def _judged(self, segment: Segment) -> Written | None:
        if isinstance(segment, Chunk) and not segment.final:
            return None
        return self._written.get(segment.sequence)

    def _outcome(self, segment: Segment, targets: Targets) -> Outcome:
        written = self._written[segment.sequence]
        if isinstance(segment, Chunk):
            outcome = judge_prompt(written, targets[0])
        else:
            outcome = judge_tree(written, segment.step, segment.tree, targets)
        if written.failure:
            outcome = Outcome(outcome.sequence, outcome.step, outcome.accepted[:1], (), End.FAILED)
            log.error("a sequence failed", sequence=segment.sequence, reason=written.failure)
        self._texts[segment.sequence] += outcome.tokens
        return outcome

    def _forget(self, frame: Frame, outcomes: dict[int, Outcome]) -> None:
        over = [sequence for sequence, outcome in outcomes.items() if outcome.end]
        for sequence in (*frame.closings, *over):
            self._written.pop(sequence, None)
        for sequence in frame.closings:
            self._texts.pop(sequence, None)
            self._postponed.forget(sequence)


def _judged_rows(segment: Segment, first: int) -> range:
    """Rows of a frame whose logits matter: a prompt's last one, every node of a tree."""
    stop = first + rows_of(segment)
    return range(stop - 1, stop) if isinstance(segment, Chunk) else range(first, stop)


def _question(segment: Segment, written: Written, row: int) -> Question:
    """A prompt's last token is a tree of one node."""
    masks = grammar_masks(segment, written)
    if isinstance(segment, Chunk):
        tree, place = single(segment.tokens[-1]), segment.start + len(segment.tokens)
    else:
        tree, place = segment.tree, segment.committed + 1
    return Question(written, row, tree, place, masks)


def _spent(frame: Frame, seconds: float) -> Frame:
    """Judging is part of the last stage's work."""
    *before, last = frame.seconds or (0.0,)
    return replace(frame, seconds=(*before, last + seconds))


def _result(frame: Frame, outcomes: tuple[Outcome, ...]) -> Result:
    rows = sum(map(rows_of, frame.segments))
    drafted = [len(segment.tree) - 1 for segment in frame.segments if isinstance(segment, Growth)]
    drafts = sum(nodes > 0 for nodes in drafted)
    return Result(frame.epoch, frame.number, outcomes, frame.seconds, rows, drafts, sum(drafted))
