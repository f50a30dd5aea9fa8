"""The end of the ring: logits where they are wanted, targets, acceptance, results and features.

Refuses to know text, requests and transports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from specsot.frames import Chunk, Features, Frame, Growth, Lesson, Opening, Outcome, Result, rows_of
from specsot.skeleton import PlanRules
from specsot.tree import depths
from specsot_worker.judge import Grammar, Written, judge_prompt, judge_tree
from specsot_worker.nodes import grammar_masks
from specsot_worker.sampling import Wish, choose

Logits = Callable[[torch.Tensor], torch.Tensor]
Grammars = Callable[[PlanRules], Grammar]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A frame's result for master and stage 0, and its lessons for the drafter, if it has any."""

    result: Result
    features: Features | None


class LastStage:
    """Judges frames that have passed every layer; remembers what each sequence wrote."""

    def __init__(self, logits: Logits, grammars: Grammars) -> None:
        self._logits, self._grammars = logits, grammars
        self._written: dict[int, Written] = {}
        self._drafted: set[int] = set()

    @torch.inference_mode()
    def judge(self, frame: Frame) -> Verdict:
        """Outcomes of every decoding segment, and the true features of what was committed."""
        begun = time.perf_counter()
        for opening in frame.openings:
            self._open(opening)
        self._recall(frame)
        targets = self._targets(frame)
        outcomes = {
            segment.sequence: self._outcome(segment, targets[segment.sequence])
            for segment in frame.segments
            if segment.sequence in targets
        }
        frame = _spent(frame, time.perf_counter() - begun)
        result = _result(frame, tuple(outcomes.values()))
        verdict = Verdict(result, _features(frame, outcomes, self._drafted))
        self._forget(frame, outcomes)
        return verdict

    def _open(self, opening: Opening) -> None:
        if opening.drafted:
            self._drafted.add(opening.sequence)
        if opening.decodes:
            grammar = self._grammars(opening.plan) if opening.plan else None
            self._written[opening.sequence] = Written(opening, grammar)

    def _recall(self, frame: Frame) -> None:
        for segment in frame.segments:
            written = self._written.get(segment.sequence)
            if written and isinstance(segment, Chunk) and written.opening.generated:
                written.recall(segment.start, segment.tokens)

    def _targets(self, frame: Frame) -> dict[int, list[int | None]]:
        """Target tokens by sequence, one per judged row."""
        rows, wishes, masks, counts = list[int](), list[Wish](), list[np.ndarray | None](), dict[int, int]()
        first = 0
        for segment in frame.segments:
            if written := self._judged(segment):
                rows += _judged_rows(segment, first)
                wishes += _wishes(segment, written.opening)
                masks += grammar_masks(segment, written)
                counts[segment.sequence] = len(wishes) - sum(counts.values())
            first += rows_of(segment)
        if not rows:
            return {}
        chosen = iter(choose(self._masked(frame, rows, masks), wishes))
        return {sequence: [next(chosen) for _ in range(count)] for sequence, count in counts.items()}

    def _masked(self, frame: Frame, rows: list[int], masks: list[np.ndarray | None]) -> torch.Tensor:
        """Logits [len(rows), V] with -inf where a grammar forbids."""
        hidden = frame.hidden
        assert hidden is not None
        picked = hidden if len(rows) == hidden.shape[0] else hidden[rows]
        logits = self._logits(picked)
        for row, mask in enumerate(masks):
            if mask is not None:
                forbidden = torch.from_numpy(~mask[: logits.shape[1]])  # the cached mask itself is read-only
                logits[row, forbidden.to(logits.device)] = float("-inf")
        return logits

    def _judged(self, segment: Chunk | Growth) -> Written | None:
        if isinstance(segment, Chunk) and not segment.final:
            return None
        return self._written.get(segment.sequence)

    def _outcome(self, segment: Chunk | Growth, targets: list[int | None]) -> Outcome:
        written = self._written[segment.sequence]
        if isinstance(segment, Chunk):
            return judge_prompt(written, targets[0])
        return judge_tree(written, segment.step, segment.tree, targets)

    def _forget(self, frame: Frame, outcomes: dict[int, Outcome]) -> None:
        over = [sequence for sequence, outcome in outcomes.items() if outcome.end]
        for sequence in (*frame.closings, *over):
            self._written.pop(sequence, None)
        self._drafted.difference_update(frame.closings)


def _judged_rows(segment: Chunk | Growth, first: int) -> range:
    """Rows of a frame whose logits matter: a prompt's last one, every node of a tree."""
    stop = first + rows_of(segment)
    return range(stop - 1, stop) if isinstance(segment, Chunk) else range(first, stop)


def _wishes(segment: Chunk | Growth, opening: Opening) -> list[Wish]:
    if isinstance(segment, Chunk):
        after = [segment.start + len(segment.tokens)]
    else:
        after = [segment.committed + depth + 1 for depth in depths(segment.tree.parents)]
    return [Wish(opening.sampling, opening.seed, opening.ordinal, position) for position in after]


def _spent(frame: Frame, seconds: float) -> Frame:
    """Judging is part of the last stage's work."""
    *before, last = frame.seconds or (0.0,)
    return replace(frame, seconds=(*before, last + seconds))


def _result(frame: Frame, outcomes: tuple[Outcome, ...]) -> Result:
    rows = sum(map(rows_of, frame.segments))
    return Result(frame.epoch, frame.number, outcomes, frame.seconds, rows)


def _features(frame: Frame, outcomes: dict[int, Outcome], drafted: set[int]) -> Features | None:
    """What a drafter shall know of this frame; None when nothing in it is drafted."""
    lessons, rows = _lessons(frame, outcomes, drafted)
    openings = tuple(opening for opening in frame.openings if opening.drafted)
    closings = tuple(sequence for sequence in frame.closings if sequence in drafted)
    if not (lessons or openings or closings):
        return None
    return Features(
        frame.epoch,
        frame.number,
        openings,
        tuple(lessons),
        closings,
        frame.fused[rows] if frame.fused is not None and rows else None,
        fed=sum(map(rows_of, frame.segments)),
        seconds=sum(frame.seconds),
    )


def _lessons(frame: Frame, outcomes: dict[int, Outcome], drafted: set[int]) -> tuple[list[Lesson], list[int]]:
    """Lessons of what was committed and is not over, and the frame's rows they come from."""
    lessons: list[Lesson] = []
    rows: list[int] = []
    first = 0
    for segment in frame.segments:
        outcome = outcomes.get(segment.sequence)
        if segment.sequence in drafted and (outcome is None or outcome.end is None):
            kept = outcome.accepted if outcome and outcome.accepted else tuple(range(rows_of(segment)))
            lessons.append(_lesson(segment, outcome, kept))
            rows += [first + node for node in kept]
        first += rows_of(segment)
    return lessons, rows


def _lesson(segment: Chunk | Growth, outcome: Outcome | None, kept: tuple[int, ...]) -> Lesson:
    bonus = outcome.tokens[-1] if outcome else None
    step = outcome.step + 1 if outcome else None
    if isinstance(segment, Chunk):
        return Lesson(segment.sequence, segment.start, segment.tokens, bonus, step)
    tokens = tuple(segment.tree.tokens[node] for node in kept)
    return Lesson(segment.sequence, segment.committed, tokens, bonus, step)
