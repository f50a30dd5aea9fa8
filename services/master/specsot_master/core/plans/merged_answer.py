"""The merged answer: texts of branches in the plan's order, under their headings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specsot.core.skeleton import Point
from specsot.events import TokenLogprobs

GAP = "\n\n"


def heading_of(point: Point) -> str:
    """The separator between the text before and a point's own; the first one has no gap before it."""
    return f"{GAP}## {point.id}. {point.title}\n"


class MergedAnswer:
    """Branches write in any order; the first one that is not finished streams live, later ones wait.

    A branch without text leaves no heading. titled: ids of the points that have one.
    """

    def __init__(self, points: Sequence[Point], titled: Collection[int]) -> None:
        self._points = tuple(points)
        self._titled_ids = frozenset(titled)
        self._waiting: dict[int, list[str]] = {point.id: [] for point in points}
        self._told: dict[int, list[TokenLogprobs]] = {point.id: [] for point in points}
        self._logprobs: list[TokenLogprobs] = []
        self._done: set[int] = set()
        self._current = 0
        self._titled = self._begun = False
        self.headed: list[int] = []  # points whose heading is out
        self._shown: list[str] = []
        self.length = 0

    @property
    def text(self) -> str:
        """The merged answer so far, `length` characters."""
        return "".join(self._shown)

    def write(self, id: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> str:
        self._waiting[id].append(text)
        self._told[id] += logprobs
        return self._advance()

    def finish(self, id: int, mark: str = "") -> str:
        """A branch writes no more. mark: follows its text."""
        self._waiting[id].append(mark)
        self._done.add(id)
        return self._advance()

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the tokens of the stretches since the last call."""
        taken = self._logprobs
        self._logprobs = []
        return tuple(taken)

    def _advance(self) -> str:
        out: list[str] = []
        while self._current < len(self._points):
            point = self._points[self._current]
            out.append(self._take(point))
            if point.id not in self._done:
                break
            self._current = self._current + 1
            self._titled = False
        delta = "".join(out)
        self._shown.append(delta)
        self.length += len(delta)
        return delta

    def _take(self, point: Point) -> str:
        """What the current branch has written since last time, its heading first."""
        body, self._waiting[point.id] = "".join(self._waiting[point.id]), []
        self._logprobs += self._told[point.id]
        self._told[point.id] = []
        if not body or self._titled:
            return body
        first = not self._begun
        self._titled = True
        self._begun = True
        if point.id not in self._titled_ids:
            return body
        self.headed.append(point.id)
        heading = heading_of(point)
        return (heading.removeprefix(GAP) if first else heading) + body
