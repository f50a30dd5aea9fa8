"""What the drafter is told of the frames that were judged: each as it comes, or after a rest all at once.

Refuses to know logits and links. While the drafter rests a frame costs one append; how much is kept is
bounded by stage 0, which ends every rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specsot.frames import Chunk, Features, Frame, Growth, Lesson, Opening, Outcome, rows_of
from specsot_worker.pace import Pace

Judged = tuple[Frame, dict[int, Outcome]]


@dataclass(slots=True)
class _Text:
    """One sequence's lessons of several frames as one, and the kept rows they come from."""

    start: int
    last: Lesson
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def take(self, lesson: Lesson, rows: Sequence[int]) -> None:
        self.last = lesson
        self.tokens += lesson.tokens
        self.rows += rows

    @property
    def lesson(self) -> Lesson:
        return replace(self.last, start=self.start, tokens=tuple(self.tokens))


class Teaching:
    """Knows which sequences are drafted, and keeps what the drafter has not been told yet."""

    def __init__(self) -> None:
        self._drafted: set[int] = set()
        self._kept: list[Judged] = []
        self._pace = Pace()

    def tell(self, frame: Frame, outcomes: dict[int, Outcome], now: float) -> tuple[Features, ...]:
        """What to send about this frame and those kept before it; nothing while the drafter rests.

        Several messages, to be learned in order, where sequences fork what is told only now.
        """
        wall = self._pace.wall(frame, now)
        self._drafted.update(opening.sequence for opening in frame.openings if opening.drafted)
        if frame.resting:
            self._kept.append((replace(frame, hidden=None), outcomes))
            return ()
        kept, self._kept = [*self._kept, (frame, outcomes)], []
        rested = sum(_trees(judged, self._drafted) for judged, _ in kept[:-1])
        told = _merge(kept, self._drafted)
        self._drafted.difference_update(one for judged, _ in kept for one in judged.closings)
        if told:
            fed, seconds = sum(map(rows_of, frame.segments)), sum(frame.seconds)
            told[-1] = replace(
                told[-1], fed=fed, seconds=seconds, wall=wall, rested=rested, trace=frame.trace
            )
        return tuple(told)


def _trees(frame: Frame, drafted: set[int]) -> int:
    return sum(isinstance(one, Growth) and one.sequence in drafted for one in frame.segments)


def _merge(kept: Sequence[Judged], drafted: set[int]) -> list[Features]:
    """One message; one more for every generation of forks from sequences that are told only now."""
    closed = {one for frame, _ in kept for one in frame.closings if one in drafted}
    opened = [one for frame, _ in kept for one in frame.openings if one.drafted]
    over = _over(opened, closed)
    fresh = [opening for opening in opened if opening.sequence not in over]
    closings = closed - {opening.sequence for opening in opened if opening.sequence in over}
    texts = _texts(kept, drafted - over)
    if not (fresh or texts or closings):
        return []
    rows, generations = _rows(kept), _generations(fresh, texts)
    frame = kept[-1][0]
    told: list[Features] = []
    for generation in range(max(generations.values(), default=0) + 1):
        openings = tuple(one for one in fresh if generations[one.sequence] == generation)
        taught = [text for one, text in texts.items() if generations.get(one, 0) == generation]
        lessons = tuple(text.lesson for text in taught)
        told.append(Features(frame.epoch, frame.number, openings, lessons, (), _pick(rows, taught)))
    told[-1] = replace(told[-1], closings=tuple(sorted(closings)))
    return told


def _over(opened: Sequence[Opening], closed: set[int]) -> set[int]:
    """Closed sequences of which nothing more needs to be told: nobody who goes on forks them."""
    needed: set[int] = set()
    for opening in reversed(opened):
        if opening.fork and (opening.sequence not in closed or opening.sequence in needed):
            needed.add(opening.fork.sequence)
    return closed - needed


def _texts(kept: Sequence[Judged], told: set[int]) -> dict[int, _Text]:
    """By sequence what was committed and is not over; rows are counted over all kept frames."""
    texts: dict[int, _Text] = {}
    first = 0
    for frame, outcomes in kept:
        for segment in frame.segments:
            sequence, outcome = segment.sequence, outcomes.get(segment.sequence)
            if sequence in told:
                if outcome and outcome.end:
                    texts.pop(sequence, None)
                else:
                    lesson, nodes = _lesson(segment, outcome)
                    text = texts.setdefault(sequence, _Text(lesson.start, lesson))
                    text.take(lesson, [first + node for node in nodes])
            first += rows_of(segment)
    return texts


def _lesson(segment: Chunk | Growth, outcome: Outcome | None) -> tuple[Lesson, Sequence[int]]:
    """What one segment teaches, and which of its rows were committed."""
    bonus = outcome.tokens[-1] if outcome else None
    step = outcome.step + 1 if outcome else None
    forced = outcome.forced if outcome else ()
    if isinstance(segment, Chunk):
        nodes = range(len(segment.tokens))
        return Lesson(segment.sequence, segment.start, segment.tokens, bonus, step, forced), nodes
    nodes = outcome.accepted if outcome else (0,)
    tokens = tuple(segment.tree.tokens[node] for node in nodes)
    return Lesson(segment.sequence, segment.committed, tokens, bonus, step, forced), nodes


def _generations(fresh: Sequence[Opening], texts: dict[int, _Text]) -> dict[int, int]:
    """A fork comes behind what it forks, where that is told now."""
    generations: dict[int, int] = {}
    for opening in fresh:
        source = opening.fork.sequence if opening.fork else None
        now = source in generations or source in texts
        generations[opening.sequence] = generations.get(source or 0, 0) + 1 if now else 0
    return generations


def _rows(kept: Sequence[Judged]) -> Any:
    """[all rows of all kept frames, Hd], or None where nothing is fused."""
    fused: list[Any] = [frame.fused for frame, _ in kept if frame.segments]
    if not fused or any(one is None for one in fused):
        return None
    return fused[0] if len(fused) == 1 else torch.cat(fused)


def _pick(rows: Any, taught: Sequence[_Text]) -> Any:
    wanted = [row for text in taught for row in text.rows]
    if rows is None or not wanted:
        return None
    return rows if wanted == list(range(len(rows))) else rows[torch.tensor(wanted, device=rows.device)]
