"""The skeleton language as values: its rules, its points, and the reader of written text.

    output := "[DIRECT]" NL text "[END]"  |  "[PLAN]" NL line{1..16} "[END]"
    line   := ID "." "<" LEN ">" "<" TOOL ">" "[" DEPS "]" TITLE NL          (no "[END]" in a TITLE)

The reader takes all of that exactly, and much that an unconstrained model makes of it:
loose spacing and list marks, full-width digits, brackets and punctuation, markers in other case, words
before the marker, lines it cannot read (left out), points on one line, TOOL, DEPS or "[END]" left out.
Points are numbered in the order in which they stand. An id in DEPS means the last line before that was
written with it; ids that name no line before are dropped, so dependencies are acyclic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from specsot.errors import InvalidRequest, PlanError

MAX_POINTS = 16  # points of a plan, by the seeds' grammar; fewer by --max-parallel and the budget
MAX_TITLE_BYTES = 80  # bytes of a point's title in UTF-8: a heading of one line; not measured
MAX_LIST_POINTS = 8  # points of a numbered list: as many branches as a request may run at once
MAX_TITLE_WORDS = 10  # of a title in a list; a model that was asked for 2 to 6 is writing a sentence then

Kind = Literal["plan", "direct"]

_END = "[END]"
_MAX_LENGTH = 9999  # tokens of a point: four digits, as the grammar has it
_PREAMBLE = 256  # characters in which the marker's line may begin, else the answer is direct; not measured
_FARTHEST = 512  # characters in which the marker must be complete: twice the preamble; not measured
_LONGEST_LINE = 512  # characters of a line that are parsed, but for its end; not measured
_MARKER = re.compile(r"^[ \t*`#>]*[\[［【] *(PLAN|DIRECT) *[\]］】][*`]*", re.IGNORECASE | re.MULTILINE)
_MARKER_BEGUN = re.compile(r"[ \t*`#>]*(?:[\[［【] *[A-Z]{0,6} *)?", re.IGNORECASE)
_END_LINE = re.compile(r"[\s*`]*[\[［【]\s*END\s*[\]］】]", re.IGNORECASE)
_LINE = re.compile(
    r"[\s*#>-]*(?P<id>\d{1,4})\s*[.．。、:：)）]\s*"
    r"[<＜〈《]\s*(?P<length>\d{1,9})\s*+(?:tokens?|词|字)?+\s*[>＞〉》]\s*"
    r"(?:[<＜〈《](?P<tool>[^<>＜＞〈〉《》]*)[>＞〉》]\s*)?"
    r"(?:[\[［【](?P<needs>[-\s\d,，、;；—－]*)[\]］】])?"
    r"(?P<title>.*)"
)
_NEXT_ON_LINE = re.compile(r"(?<=\s)(?=\d{1,4}\.<\d{1,9}><[^<>]*>\[[-\d,]*\])")
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class Point:
    """One line of a plan. `length` is a wish in tokens; `tool` a label; `needs` smaller ids."""

    id: int
    length: int
    title: str
    tool: str | None = None
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What a skeleton may be, as it travels to the last stage and the drafter.

    direct: whether "[DIRECT]" may be chosen.
    tools:  names that may stand in TOOL besides None.
    plan_tokens: a plan must be complete within this many tokens.
    listed: it is a numbered list of two points or more whose first "1." stands in the prompt; nothing else.
    """

    direct: bool = True
    tools: tuple[str, ...] = ()
    max_points: int = MAX_POINTS
    plan_tokens: int = 512
    listed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_points <= 99:
            raise InvalidRequest(f"max_points must be in 1..99, got {self.max_points}", field="max_points")


class PlanReader:
    """Reads a skeleton as it is written, in pieces of any size.

    kind:        what the text turned out to be, None as long as that is open.
    points:      those whose lines are complete.
    direct_text: the direct answer as far as it is certain, markers left out; without a marker the raw text.
    finished:    "[END]" has been read, or `finish` called. Later text is ignored.
    """

    def __init__(self, rules: PlanRules | None = None) -> None:
        """rules: tools not offered there become None, points beyond its number are left out."""
        self.kind: Kind | None = None
        self.direct_text = ""
        self.finished = False
        self._rules = rules
        self._raw = ""
        self._rest = ""  # read, but not yet understood
        self._marked = False
        self._at_marker = True  # nothing read behind the marker
        self._points: list[Point] = []
        self._written: dict[int, int] = {}  # ids as written -> ids as numbered

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points)

    @property
    def text(self) -> str:
        return self._raw

    def feed(self, text: str) -> list[Point]:
        """Read on; returns the points whose lines became complete.

        Raises PlanError when a plan ends without one valid line.
        """
        return self._read(text, last=False)

    def finish(self) -> list[Point]:
        """There is no more text: what is left counts as complete. Raises PlanError as `feed` does."""
        return [] if self.finished else self._read("", last=True)

    def _read(self, text: str, last: bool) -> list[Point]:
        if self.finished:
            return []
        self._raw += text
        self._rest += text
        if self.kind is None:
            self._choose(last)
        if self.kind == "direct":
            self._read_direct(last)
        found = self._read_lines(last) if self.kind == "plan" else []
        if self.finished and self.kind == "plan" and not self._points:
            raise PlanError("the plan has no valid line", text=self._raw)
        return found

    def _choose(self, last: bool) -> None:
        marker = _MARKER.search(self._rest, 0, _FARTHEST)
        if marker and marker.start() <= _PREAMBLE:
            self.kind = "plan" if marker[1].upper() == "PLAN" else "direct"
            self._marked, self._rest = True, self._rest[marker.end() :]
        elif last or not self._marker_may_come():
            self.kind = "direct"

    def _marker_may_come(self) -> bool:
        line = self._rest.rfind("\n") + 1
        begun = line <= _PREAMBLE and _MARKER_BEGUN.fullmatch(self._rest, line) is not None
        return len(self._rest) <= (_FARTHEST if begun else _PREAMBLE)

    def _read_direct(self, last: bool) -> None:
        if not self._marked:
            self.direct_text = self.direct_text + self._rest
            self._rest = ""
            self.finished = last
            return
        if self._at_marker and self._rest:
            self._rest = self._rest.removeprefix("\n")
            self._at_marker = False
        body, end, _ = self._rest.partition(_END)
        held = 0 if end or last else _end_begun(body)
        self.direct_text += body[: len(body) - held]
        self._rest = body[len(body) - held :]
        self.finished = bool(end) or last

    def _read_lines(self, last: bool) -> list[Point]:
        *lines, begun = self._rest.split("\n")
        if last or _ends(begun):
            lines = [*lines, begun]
            begun = ""
        points = [point for line in lines for point in self._read_line(line)]
        self._rest = _shortened(begun)
        self.finished = self.finished or last
        return points

    def _read_line(self, line: str) -> list[Point]:
        if self.finished:
            return []
        self.finished = _ends(line)
        written = _NEXT_ON_LINE.split(line.partition(_END)[0][:_LONGEST_LINE])
        return list(filter(None, map(self._point, written)))

    def _point(self, line: str) -> Point | None:
        match = _LINE.fullmatch(line.rstrip("\r"))
        title = clean_title(match["title"]) if match else ""
        if not match or not title or len(self._points) >= self._max_points():
            return None
        needs = {self._written.get(int(name)) for name in re.findall(r"\d{1,4}", match["needs"] or "")}
        point = Point(
            id=len(self._points) + 1,
            length=min(max(int(match["length"]), 1), _MAX_LENGTH),
            title=title,
            tool=self._tool((match["tool"] or "").strip()),
            needs=tuple(sorted(need for need in needs if need is not None)),
        )
        self._points.append(point)
        self._written[int(match["id"])] = point.id
        return point

    def _tool(self, name: str) -> str | None:
        if name.casefold() in ("", "-", "none", "无"):
            return None
        return name if self._rules is None or name in self._rules.tools else None

    def _max_points(self) -> int:
        return MAX_POINTS if self._rules is None else self._rules.max_points


def read_plan(text: str, rules: PlanRules | None = None) -> tuple[Point, ...] | None:
    """The points of a whole text, or None when it is a direct answer. Raises PlanError."""
    reader = PlanReader(rules)
    reader.feed(text)
    reader.finish()
    return reader.points if reader.kind == "plan" else None


def _ends(line: str) -> bool:
    """It contains the end marker: exactly, or loosely at its beginning."""
    return _END in line or _END_LINE.match(line, 0, _LONGEST_LINE) is not None


def _shortened(line: str) -> str:
    """Of an endless line what is looked at, and what may be the begin of "[END]"."""
    head, tail = line[:_LONGEST_LINE], line[_LONGEST_LINE:]
    return line if len(tail) < len(_END) else f"{head} {tail[1 - len(_END) :]}"


def _end_begun(text: str) -> int:
    """How many of the last characters may be the begin of "[END]"."""
    return next((size for size in range(len(_END) - 1, 0, -1) if text.endswith(_END[:size])), 0)


def clean_title(title: str) -> str:
    """One line of at most MAX_TITLE_BYTES bytes, cut between characters."""
    visible = _UNSEEN.sub(" ", title).strip()
    return visible.encode()[:MAX_TITLE_BYTES].decode(errors="ignore").rstrip()
