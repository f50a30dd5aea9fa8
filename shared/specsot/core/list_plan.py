"""Reads a numbered list as a plan, as it is written: the plan of a model that was not taught to plan.

    list := title NL {n "." title NL} [NL]          behind "1.", with which the prompt ends

So the constrained language. Without a constraint a line may also have other marks ("2)", "3、"), empty lines
between it and the next, and the list ends at the first line that is none of it. It is over, too, where two
lines in a row only repeat titles: a model that does so goes on with it.
"""

from __future__ import annotations

import re

from specsot.core.skeleton import MAX_LIST_POINTS, Kind, PlanRules, Point, clean_title

LIST_HEAD = "1."  # what the prompt ends with, and the text of a list begins with

_LINE = re.compile(r"[\s*#>-]*\d{1,3}\s*[.．。、:：)）](?P<title>.*)")
_MARKS = "*_`#\"'“”„«»()"
# Behind these a model goes on about its title; a colon behind a number belongs to it ("Day 1: Arrival").
_ENDS = re.compile(r"(?<![\d０-９])[:：]|\.(?=\s)|\s[-–—]\s|——")


class ListReader:
    """Reads a list in pieces of any size. A PlanReader of another language; its kind is always a plan."""

    kind: Kind = "plan"
    direct_text = ""

    def __init__(self, rules: PlanRules) -> None:
        self.finished = False
        self.text = ""  # everything fed, as it came
        self._rules = rules
        self._rest = LIST_HEAD
        self._points: list[Point] = []
        self._repeats = False  # the newest line has a title of one before

    @property
    def points(self) -> tuple[Point, ...]:
        """Those whose lines are complete; every one as long as the other."""
        return tuple(self._points)

    def feed(self, text: str) -> list[Point]:
        """Read on; returns the points whose lines became complete."""
        if self.finished:
            return []
        self.text += text
        *lines, self._rest = (self._rest + text).split("\n")
        return [point for line in lines if (point := self._read(line))]

    def finish(self) -> list[Point]:
        """There is no more text: what is left counts as complete."""
        found = None if self.finished else self._read(self._rest)
        self.finished = True
        return [found] if found else []

    def _read(self, line: str) -> Point | None:
        if self.finished:
            return None
        match = _LINE.fullmatch(line)
        if not match:
            self.finished = bool(line.strip())
            return None
        point = Point(len(self._points) + 1, 1, title_of(match["title"]))
        again = any(one.title.casefold() == point.title.casefold() for one in self._points)
        loops = again and self._repeats
        self._repeats = again
        self._points.append(point)
        self.finished = loops or len(self._points) >= min(self._rules.max_points, MAX_LIST_POINTS)
        return point


def title_of(line: str) -> str:
    """What stands before a colon, a dash or a full stop, without marks around it; may be nothing."""
    visible = clean_title(line).strip(_MARKS + " ")
    title = _ENDS.split(visible, maxsplit=1)[0]
    return title.strip(_MARKS + " ").rstrip(" .,;:。，；、")
