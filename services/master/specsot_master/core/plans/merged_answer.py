"""The merged answer: the texts of the branches in the plan's order, under their headings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specsot.core.skeleton import Point
from specsot.events import TokenLogprobs

# The text between two paragraphs of an answer.
GAP = "\n\n"


def heading_of(point: Point, number: int | None = None) -> str:
    """Return the heading that separates a point's text from the text before it. At the beginning of the
    answer the leading blank line is left out.

    point: a point of the plan, with a title.
    number: the number in the heading; None for the point's id.
    """
    return f"{GAP}## {number or point.id}. {point.title}\n"


class MergedAnswer:
    r"""Merges the texts of a plan's branches, which write in any order, into one answer. The first unfinished
    branch streams live; text of later branches waits until all branches before them are finished.

        write(2, "B")  -> ""
        write(1, "A")  -> "## 1. First\nA"
        finish(1)      -> "\n\n## 2. Second\nB"

    A branch without text gets no heading, and headings count without it: after points 1 and 3 of three, the
    last heading is "## 2. Third". `headed` lists the points whose headings were released.
    """

    def __init__(
        self,
        points: Sequence[Point],
        titled: Collection[int],
        introduction: str = "",
        closing: int | None = None,
    ) -> None:
        """Create an answer that holds its introduction only.

        points: the points whose texts are merged, in the order of the answer.
        titled: the ids of the points that get a heading.
        introduction: the text before the first point, which was sent to the client already; "" for none.
        closing: the id of the point that is a paragraph of its own after the others, without a heading; None
            for no such point.
        """
        self._points = tuple(points)
        self._titled_ids = frozenset(titled)
        self._waiting: dict[int, list[str]] = {point.id: [] for point in points}
        self._told: dict[int, list[TokenLogprobs]] = {point.id: [] for point in points}
        self._logprobs: list[TokenLogprobs] = []
        self._done: set[int] = set()
        self._current = 0
        self._titled = False
        self._begun = bool(introduction)
        self._closing = closing
        self.headed: list[int] = []
        self._shown: list[str] = [introduction]
        self.length = len(introduction)

    @property
    def text(self) -> str:
        """The merged answer so far, `length` characters; the introduction alone before the first text."""
        return "".join(self._shown)

    def write(self, id: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> str:
        """Add text of a branch. Return the new text of the merged answer; "" if the text has to wait for
        earlier branches.

        id: the point's id.
        text: the new text of the branch.
        logprobs: the logprobs of its tokens; empty if the client asked for none.

        Raises KeyError if the answer has no such point.
        """
        self._waiting[id].append(text)
        self._told[id] += logprobs
        return self._advance()

    def finish(self, id: int, mark: str = "") -> str:
        """Mark a branch as finished. Return the new text of the merged answer, which may include text of
        later branches; "" if earlier branches are not finished. A branch that is not the first unfinished one
        only becomes mergeable.

        id: the point's id.
        mark: what follows the branch's text, such as "…" for an interrupted sentence; "" for nothing. Left
            out if the branch was finished before.
        """
        if id not in self._done:
            self._waiting[id].append(mark)
        self._done.add(id)
        return self._advance()

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of the tokens whose text was merged since the last call; () if there are
        none.
        """
        taken = self._logprobs
        self._logprobs = []
        return tuple(taken)

    def _advance(self) -> str:
        """Release the text of the first unfinished branch, and move on to the next one if the branch is
        finished. Return the text that the answer gains; "" if it gains none. It may pass several finished
        branches.
        """
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
        """Return what a branch has written since the last call, with its heading before its first text; "" if
        it has written nothing. The closing is set off by a blank line, and has no heading. At the beginning
        of the answer no blank line precedes.

        point: the point of the branch.
        """
        body, self._waiting[point.id] = "".join(self._waiting[point.id]), []
        self._logprobs += self._told[point.id]
        self._told[point.id] = []
        if not body or self._titled:
            return body
        first = not self._begun
        self._titled = True
        self._begun = True
        if point.id == self._closing:
            return body if first else GAP + body
        if point.id not in self._titled_ids:
            return body
        self.headed.append(point.id)
        heading = heading_of(point, len(self.headed))
        return (heading.removeprefix(GAP) if first else heading) + body
