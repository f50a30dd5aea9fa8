"""The skeleton language as values: its rules, its points, and the reader of written text.

    output := "[DIRECT]" NL text "[END]"  |  "[PLAN]" NL line{1..16} "[END]"
    line   := ID "." "<" LEN ">" "<" TOOL ">" "[" DEPS "]" TITLE NL          (no "[END]" in a TITLE)

The reader accepts exactly this language, and many deviations of an unconstrained model: loose spacing and
list marks, full-width digits, brackets and punctuation, markers in other case, words before the marker,
several points on one line, and a missing TOOL, DEPS or "[END]". Lines that cannot be parsed are ignored.

Points are numbered in the order of their lines, whatever ids are written. An id in DEPS refers to the last
preceding line that was written with this id. Ids that name no preceding line are dropped, so that
dependencies are acyclic. Worked example:

    [PLAN]
    1.<40><None>[-]Pack light        -> Point(id=1, length=40, title="Pack light")
    3.<60><None>[1]Choose a route    -> Point(id=2, length=60, title="Choose a route", needs=(1,))
    4.<50><None>[3,7]Book a bed      -> Point(id=3, length=50, title="Book a bed", needs=(2,))
    [END]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specsot.errors import InvalidRequest, PlanError

# Points. Bounds a plan; --max-parallel and the token budget may allow fewer. Precedent: the grammar of
# SpecSoT's second version (docs/migrating.md).
MAX_POINTS = 16
# Bytes in UTF-8. Bounds a point's title to a heading of one line. Untuned.
MAX_TITLE_BYTES = 80
# Points. Bounds a numbered list. Chosen by reading: questions that name a larger number want one line for
# each thing, which a direct answer writes.
MAX_LIST_POINTS = 12
# Words. Bounds a title in a list: a model that was asked for 2 to 6 words and writes more writes a sentence.
MAX_TITLE_WORDS = 10

Kind = Literal["plan", "direct"]

# The marker after the last line of a plan, or after a direct answer.
_END = "[END]"
# Tokens. The longest wish of a point: LEN has at most four digits.
_MAX_LENGTH = 9999
# Characters. The marker's line must begin within them; otherwise the text is a direct answer. Untuned.
_PREAMBLE = 256
# Characters. The marker must be complete within them: twice the preamble. Untuned.
_FARTHEST = 512
# Characters. Only the beginning of a line is parsed, although its end may hold the end marker. Untuned.
_LONGEST_LINE = 512
# A line that begins with [PLAN] or [DIRECT], in any spelling of the brackets and with Markdown marks around
# it.
_MARKER = re.compile(r"^[ \t*`#>]*[\[［【] *(PLAN|DIRECT) *[\]］】][*`]*", re.IGNORECASE | re.MULTILINE)
# A last line that may still become a marker.
_MARKER_START = re.compile(r"[ \t*`#>]*(?:[\[［【] *[A-Z]{0,6} *)?", re.IGNORECASE)
# A loose spelling of "[END]" at the beginning of a line.
_END_LINE = re.compile(r"[\s*`]*[\[［【]\s*END\s*[\]］】]", re.IGNORECASE)
# One point: number, wished length, optional label, optional dependencies, title.
_LINE = re.compile(
    r"[\s*#>-]*(?P<id>\d{1,4})\s*[.．。、:：)）]\s*"
    r"[<＜〈《]\s*(?P<length>\d{1,9})\s*+(?:tokens?|词|字)?+\s*[>＞〉》]\s*"
    r"(?:[<＜〈《](?P<tool>[^<>＜＞〈〉《》]*)[>＞〉》]\s*)?"
    r"(?:[\[［【](?P<needs>[-\s\d,，、;；—－]*)[\]］】])?"
    r"(?P<title>.*)"
)
# The place before a further point on the same line.
_NEXT_ON_LINE = re.compile(r"(?<=\s)(?=\d{1,4}\.<\d{1,9}><[^<>]*>\[[-\d,]*\])")
# Control characters and line separators.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class Point:
    """One line of a plan.

    id: number of the point, 1, 2, ... in the order of the lines.
    length: how many tokens the point's branch should have, a wish of the model.
    title: heading of the point, one line.
    tool: one of the names that the request offers as labels, or None.
    needs: ids of the points, all smaller, whose branches must be complete before this point's branch starts.
    """

    id: int
    length: int
    title: str
    tool: str | None = None
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanRules:
    """The rules of a skeleton, by which the last stage and the drafter constrain its tokens.

    direct: True if the model may choose "[DIRECT]".
    tools: names that may stand in TOOL besides None.
    max_points: the largest number of points, in 1..99.
    plan_tokens: a plan must be complete within this many tokens.
    listed: True for a numbered list of at least two points. Its first "1." is the end of the prompt, and the
        skeleton consists of nothing else.

    Raises InvalidRequest if `max_points` is out of its range.
    """

    direct: bool = True
    tools: tuple[str, ...] = ()
    max_points: int = MAX_POINTS
    plan_tokens: int = 512
    listed: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidRequest, whose field is "max_points", unless `max_points` is in 1..99."""
        if not 1 <= self.max_points <= 99:
            raise InvalidRequest(f"max_points must be in 1..99, got {self.max_points}", field="max_points")


class PlanReader:
    """Reads a skeleton as it is generated, in pieces of any size.

    kind: "plan" or "direct", or None until the text shows which one it is.
    text: everything that was fed, unchanged.
    points: the points whose lines are complete. Empty before the first one, and in a direct answer.
    direct_text: the certain part of the direct answer, without markers. If the text has no marker, all of it.
    finished: True once "[END]" was read or `finish` was called. Later text is ignored.
    """

    def __init__(self, rules: PlanRules | None = None) -> None:
        """Start to read a skeleton from its first character.

        rules: tools that the rules do not offer become None, and points after the `max_points`-th are left
            out. With rules of None, no tool is known and MAX_POINTS applies.
        """
        self.kind: Kind | None = None
        self.text = ""
        self.points: tuple[Point, ...] = ()
        self.direct_text = ""
        self.finished = False
        self._rules = rules
        # Text that was fed but not parsed yet.
        self._rest = ""
        self._marked = False
        # True until text after the marker arrives, so that the newline after the marker can be dropped.
        self._at_marker = True
        # The id of the point for each id that the model wrote; a later line replaces an earlier one.
        self._written: dict[int, int] = {}

    def finish(self) -> list[Point]:
        """End the text: the last line counts as complete, and its points are returned.

        Returns an empty list if the text had ended already or is a direct answer. Raises PlanError if the
        text is a plan without a valid line.
        """
        return self.feed("", last=True)

    def feed(self, text: str, last: bool = False) -> list[Point]:
        """Read the next piece of text, decide the kind of the text if possible, and return the points that
        the piece completes.

        text: the next characters that the model generated, of any length.
        last: True if no text follows, so that an incomplete line counts as complete; see `finish`.

        Raises PlanError, which holds the whole text, if a plan ends without a valid line.

        Returns an empty list if no line is completed, while the kind is not known, after the end, and for a
        direct answer, whose text is added to `direct_text`.
        """
        if self.finished:
            return []
        self.text += text
        self._rest += text
        if self.kind is None:
            self._choose(last)
        if self.kind == "direct":
            self._read_direct(last)
        found = self._read_lines(last) if self.kind == "plan" else []
        if self.finished and self.kind == "plan" and not self.points:
            raise PlanError("the plan has no valid line", text=self.text)
        return found

    def _choose(self, last: bool) -> None:
        """Set `kind` to "plan" or "direct" if the text so far allows it, or if no text follows.

        last: True if no text follows. A text without a marker is then a direct answer.

        A marker counts if it begins within the first _PREAMBLE characters; the text up to its end is dropped.
        Without a marker, the kind becomes "direct" once none can follow any more; otherwise it stays None.
        """
        marker = _MARKER.search(self._rest, 0, _FARTHEST)
        if marker and marker.start() <= _PREAMBLE:
            self.kind = "plan" if marker[1].upper() == "PLAN" else "direct"
            self._marked, self._rest = True, self._rest[marker.end() :]
        elif last or not self._marker_may_come():
            self.kind = "direct"

    def _marker_may_come(self) -> bool:
        """Return True if a marker may still follow: if the text so far is no longer than _PREAMBLE
        characters, or no longer than _FARTHEST characters and its last line begins like a marker.
        """
        line = self._rest.rfind("\n") + 1
        marker_started = line <= _PREAMBLE and _MARKER_START.fullmatch(self._rest, line) is not None
        return len(self._rest) <= (_FARTHEST if marker_started else _PREAMBLE)

    def _read_direct(self, last: bool) -> None:
        """Move certain text to `direct_text`. A tail that may be the beginning of "[END]" is held back.

        last: True if no text follows, so that nothing is held back.

        A newline directly after the marker is dropped. Sets `finished` if "[END]" is read or no text follows.
        A text without a marker is moved as a whole, "[END]" included.
        """
        if not self._marked:
            self.direct_text = self.direct_text + self._rest
            self._rest = ""
            self.finished = last
            return
        if self._at_marker and self._rest:
            self._rest = self._rest.removeprefix("\n")
            self._at_marker = False
        body, end, _ = self._rest.partition(_END)
        held = 0 if end or last else _size_of_partial_end(body)
        self.direct_text += body[: len(body) - held]
        self._rest = body[len(body) - held :]
        self.finished = bool(end) or last

    def _read_lines(self, last: bool) -> list[Point]:
        """Parse the complete lines and return their points; keep an incomplete line for later.

        The incomplete line is parsed too if it contains an end marker, or if no text follows.

        last: True if no text follows.

        Sets `finished` if a line has the end marker or no text follows. Of a very long incomplete line, the
        middle is dropped.
        """
        *lines, incomplete = self._rest.split("\n")
        if last or _ends(incomplete):
            lines = [*lines, incomplete]
            incomplete = ""
        points = [point for line in lines for point in self._read_line(line)]
        self._rest = _shortened(incomplete)
        self.finished = self.finished or last
        return points

    def _read_line(self, line: str) -> list[Point]:
        """Parse one line, which may have several points, and return its points.

        Sets `finished` if the line has the end marker. Returns an empty list after the end.

        line: the line without its newline.

        Only the text before "[END]" is parsed, and of that the first _LONGEST_LINE characters. A line that is
        no point is skipped.
        """
        if self.finished:
            return []
        self.finished = _ends(line)
        written = _NEXT_ON_LINE.split(line.partition(_END)[0][:_LONGEST_LINE])
        return list(filter(None, map(self._point, written)))

    def _point(self, line: str) -> Point | None:
        """Parse one point and add it; return None if the text is not a point or there are enough points.

        line: the part of a line that may be a point.

        The point's id is its place in the plan, whatever number the model wrote; `needs` are translated to
        such ids, and unknown ones are dropped. The length is at least 1 and at most _MAX_LENGTH. A text
        without a title is no point.
        """
        match = _LINE.fullmatch(line.rstrip("\r"))
        title = clean_title(match["title"]) if match else ""
        if not match or not title or len(self.points) >= self._max_points():
            return None
        needs = {self._written.get(int(name)) for name in re.findall(r"\d{1,4}", match["needs"] or "")}
        point = Point(
            id=len(self.points) + 1,
            length=min(max(int(match["length"]), 1), _MAX_LENGTH),
            title=title,
            tool=self._tool((match["tool"] or "").strip()),
            needs=tuple(sorted(need for need in needs if need is not None)),
        )
        self.points += (point,)
        self._written[int(match["id"])] = point.id
        return point

    def _tool(self, name: str) -> str | None:
        """Return the label of a point: None for "None", "-" and the like, and for a name that the rules do
        not offer.

        name: the text in the place of TOOL, without spaces around it.

        Without rules, every other name is returned.
        """
        if name.casefold() in ("", "-", "none", "无"):
            return None
        return name if self._rules is None or name in self._rules.tools else None

    def _max_points(self) -> int:
        """Return the largest number of points that the plan may have."""
        return MAX_POINTS if self._rules is None else self._rules.max_points


def read_plan(text: str, rules: PlanRules | None = None) -> tuple[Point, ...] | None:
    """Return the points of a complete text, or None if the text is a direct answer.

    text: the complete text of a skeleton.
    rules: tools and number of points that are allowed, or None, see `PlanReader`.

    Raises PlanError if the text is a plan without a valid line.

    The points are in the order of their lines. A text without a marker is a direct answer.
    """
    reader = PlanReader(rules)
    reader.feed(text)
    reader.finish()
    return reader.points if reader.kind == "plan" else None


def write_plan(points: Sequence[Point]) -> str:
    """Return a plan in the skeleton language, so that `read_plan` returns the same points.

        Point(1, 40, "Pack light"), Point(2, 60, "Choose a route", needs=(1,)) ->
        "[PLAN]\\n1.<40><None>[-]Pack light\\n2.<60><None>[1]Choose a route\\n[END]"

    An end marker within a title loses its brackets, and a length of more than four digits becomes 9999.

    points: at least one point, with ids 1, 2, and so on.
    """
    lines = [
        f"{one.id}.<{min(one.length, _MAX_LENGTH)}><{one.tool}>[{','.join(map(str, one.needs)) or '-'}]"
        f"{one.title.replace(_END, 'END')}\n"
        for one in points
    ]
    return f"[PLAN]\n{''.join(lines)}{_END}"


def _ends(line: str) -> bool:
    """Return whether a line contains "[END]" anywhere, or a loose spelling of it at the line's beginning.

    line: the line, or its beginning.
    """
    return _END in line or _END_LINE.match(line, 0, _LONGEST_LINE) is not None


def _shortened(line: str) -> str:
    """Return a line without its middle if it is very long, so that memory is bounded; otherwise the line
    unchanged.

    Its first _LONGEST_LINE characters, which are parsed, and its last four, which may begin "[END]", remain.

    line: an incomplete line.
    """
    head, tail = line[:_LONGEST_LINE], line[_LONGEST_LINE:]
    return line if len(tail) < len(_END) else f"{head} {tail[1 - len(_END) :]}"


def _size_of_partial_end(text: str) -> int:
    """Return how many of the last characters may be the beginning of "[END]": 2 for "see [E"; 0 if none.

    text: the text so far.
    """
    return next((size for size in range(len(_END) - 1, 0, -1) if text.endswith(_END[:size])), 0)


def clean_title(title: str) -> str:
    """Return a title as one line of at most MAX_TITLE_BYTES bytes, cut between characters.

    Control characters and line separators become spaces. The result may be empty.

    title: the title as the model wrote it.
    """
    visible = _UNSEEN.sub(" ", title).strip()
    return visible.encode()[:MAX_TITLE_BYTES].decode(errors="ignore").rstrip()
