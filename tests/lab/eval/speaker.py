"""A fleet that says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from specsot.core.info import Info, ModelInfo
from specsot.core.skeleton import Point
from specsot.errors import InvalidRequest
from specsot.events import BranchText, Finished, Numbered, Planned, Reason, Started, Statistics
from specsot.params import Ask


class Broken(Exception):
    """The run is ended from outside."""


class Speaker:
    """A fleet that says its mode and 160 to everything, refuses one question, fails another, breaks off after
    `answers`. points: titles and texts of those questions that it plans, in any mode but direct.
    """

    def __init__(
        self,
        answers: int = 99,
        refused: str = "",
        serves: str = "f1",
        fails: str = "",
        points: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.left, self.refused, self.asked, self.serves = answers, refused, list[Ask](), serves
        self.points = points or {}
        self.fails, self.closed = fails, False

    async def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        self.asked.append(ask)
        if self.left == 0:
            raise Broken
        if self.refused and self.refused in ask.messages[-1].content:
            raise InvalidRequest("too long")
        self.left -= 1
        seconds = 1.0 if ask.mode == "sot" else 2.0
        plan = 8 * (ask.mode == "sot")
        figures = Statistics(
            completion_tokens=8 + plan,
            merged_tokens=8,
            seconds=seconds,
            branches=2 * (plan > 0),
            decision="not told",
            mean_accepted=2.0,
        )
        yield Numbered(0, Started("r", "demo", ask.mode, 1, 3))
        points = self.points.get(ask.messages[-1].content, {}) if ask.mode != "direct" else {}
        if points:
            yield Numbered(1, Planned(tuple(Point(n, 0, title) for n, title in enumerate(points, 1))))
        for branch, text in enumerate(points.values(), 1):
            yield Numbered(1, BranchText(branch, 0, text))
        failed = bool(self.fails) and self.fails in ask.messages[-1].content
        ended = Reason.CANCELLED if failed else Reason.STOP
        yield Numbered(1, Finished(ended, f"{ask.mode}: 160", (1,), figures))

    async def cancel(self, request: str) -> None: ...

    async def info(self) -> Info:
        return Info(models=(ModelInfo("demo", self.serves, 4, 512),))

    async def close(self) -> None:
        self.closed = True
