"""The skeleton language as an automaton over UTF-8 bytes: its places, and the edges that leave them.

A numbered list is the other language, of models that were not taught the first; its "1." is in the prompt:
    list := title NL {n "." title NL} [NL]      (2 .. max_points titles; an end token may stand for the end)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from specsot.core.skeleton import MAX_TITLE_BYTES, MAX_TITLE_WORDS, PlanRules

Partial = str
Before = str  # "blank", "solid", "digit", "dot" or "over"
Row = tuple[tuple[int, int, Partial], ...]  # (low, high, what comes after); inclusive, disjoint

SOLID: Final = "solid"  # the byte ends a character that can be seen
BLANK: Final = "blank"  # the byte ends a kind of space

_ANY: dict[Partial, Row] = {
    "1": ((0x80, 0xBF, SOLID),),
    "2": ((0x80, 0xBF, "1"),),
    "3": ((0x80, 0xBF, "2"),),
    "e0": ((0xA0, 0xBF, "1"),),
    "ed": ((0x80, 0x9F, "1"),),
    "f0": ((0x90, 0xBF, "2"),),
    "f4": ((0x80, 0x8F, "2"),),
}

_LONG_LEADS: Row = (
    (0xC3, 0xDF, "1"),
    (0xE0, 0xE0, "e0"),
    (0xE4, 0xEC, "2"),
    (0xED, 0xED, "ed"),
    (0xEE, 0xEF, "2"),
    (0xF0, 0xF0, "f0"),
    (0xF1, 0xF3, "3"),
    (0xF4, 0xF4, "f4"),
)

# "[" (0x5B) is left out of both: it may begin "[END]", so the grammar looks at it itself.
FREE: dict[Partial, Row] = {
    "": ((0x00, 0x5A, SOLID), (0x5C, 0x7F, SOLID), (0xC2, 0xC2, "1"), (0xE1, 0xE3, "2"), *_LONG_LEADS),
    **_ANY,
}

# Rows put solid characters first: the first byte of a row is the surest way to a valid title.
TITLE: dict[Partial, Row] = {
    "": (
        (0x41, 0x5A, SOLID),
        (0x21, 0x40, SOLID),
        (0x5C, 0x7E, SOLID),
        (0x20, 0x20, BLANK),
        (0xC2, 0xC2, "c2"),
        (0xE1, 0xE1, "e1"),
        (0xE2, 0xE2, "e2"),
        (0xE3, 0xE3, "e3"),
        *_LONG_LEADS,
    ),
    "c2": ((0xA1, 0xBF, SOLID), (0xA0, 0xA0, BLANK)),  # 80..9F are control characters, 85 a line end
    "e1": ((0x80, 0x99, "1"), (0x9A, 0x9A, "e19a"), (0x9B, 0xBF, "1")),
    "e19a": ((0x81, 0xBF, SOLID), (0x80, 0x80, BLANK)),
    "e2": ((0x82, 0xBF, "1"), (0x80, 0x80, "e280"), (0x81, 0x81, "e281")),
    "e280": (
        (0x8B, 0xA7, SOLID),
        (0xAA, 0xAE, SOLID),
        (0xB0, 0xBF, SOLID),
        (0x80, 0x8A, BLANK),
        (0xAF, 0xAF, BLANK),
    ),
    "e281": ((0x80, 0x9E, SOLID), (0xA0, 0xBF, SOLID), (0x9F, 0x9F, BLANK)),
    "e3": ((0x81, 0xBF, "1"), (0x80, 0x80, "e380")),
    "e380": ((0x81, 0xBF, SOLID), (0x80, 0x80, BLANK)),
    **_ANY,
}

OWED: dict[Partial, int] = {
    **{"": 0, "1": 1, "2": 2, "3": 3, "e0": 2, "ed": 2, "f0": 3, "f4": 3},
    **{"c2": 1, "e1": 2, "e19a": 1, "e2": 2, "e280": 1, "e281": 1, "e3": 2, "e380": 1},
}  # continuation bytes until the character is whole


_END = b"[END]"
_MAX_LENGTH_DIGITS = 4  # digits of a point's length: up to 9999 tokens


@dataclass(frozen=True, slots=True)
class Literal:
    """Nothing but `rest` may be written now; then comes `then`."""

    rest: bytes
    then: Place


@dataclass(frozen=True, slots=True)
class Opener:
    """Behind the first "[": PLAN or DIRECT."""


@dataclass(frozen=True, slots=True)
class PlanLine:
    """At the begin of a line: point `number`, or the end of the plan."""

    number: int


@dataclass(frozen=True, slots=True)
class Length:
    """Inside LEN, `digits` of it written."""

    line: int
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Tool:
    """Inside TOOL, `seen` of it written."""

    line: int
    seen: bytes = b""


@dataclass(frozen=True, slots=True)
class Needs:
    """Inside DEPS: `last` is the id before the last comma (0: none), `seen` the digits behind it."""

    line: int
    last: int = 0
    seen: bytes = b""


@dataclass(frozen=True, slots=True)
class Title:
    """Inside TITLE.

    left:    bytes that still fit, or None where somebody else counts.
    solid:   a character that is no space has been written.
    matched: how much of "[END]" the last bytes are.
    partial: the character being written (see `characters`).
    """

    line: int
    left: int | None = MAX_TITLE_BYTES
    solid: bool = False
    matched: int = 0
    partial: Partial = ""


@dataclass(frozen=True, slots=True)
class Direct:
    """Inside the free text of a direct answer; `matched` and `partial` as in Title."""

    matched: int = 0
    partial: Partial = ""


@dataclass(frozen=True, slots=True)
class ListLine:
    """At the beginning of a line of a list, before its number."""

    line: int


@dataclass(frozen=True, slots=True)
class ListTitle:
    """Inside a title of a list; `left` and `partial` as in Title.

    words: how many were begun.
    last:  what the character before was; "over": the title has ended, as its line must.
    """

    line: int
    left: int | None = MAX_TITLE_BYTES
    words: int = 0
    last: Before = "blank"
    partial: Partial = ""


@dataclass(frozen=True, slots=True)
class Done:
    """Behind the end of a plan or of a direct answer. Nothing follows."""

    plan: bool


Place = Literal | Opener | PlanLine | Length | Tool | Needs | Title | Direct | ListLine | ListTitle | Done


class Edge(NamedTuple):
    """Bytes low .. high lead to `to`; None means that they are forbidden, whatever later edges say."""

    low: int
    high: int
    to: Place | None


def begin(rules: PlanRules) -> Place:
    if rules.listed:
        return ListTitle(1)
    return Literal(b"[", Opener()) if rules.direct else Literal(b"[PLAN]\n", PlanLine(1))


def step(rules: PlanRules, place: Place, byte: int) -> Place | None:
    """Where `byte` leads, or None when no valid output continues so."""
    for edge in edges(rules, place):
        if edge.low <= byte <= edge.high:
            return edge.to
    return None


def edges(rules: PlanRules, place: Place) -> tuple[Edge, ...]:
    """What may follow, in order of precedence. Done has no edge."""
    match place:
        case Literal(rest, then):
            return (_one(rest[0], Literal(rest[1:], then) if len(rest) > 1 else then),)
        case Opener():
            return (
                _one(ord("D"), Literal(b"IRECT]\n", Direct())),
                _one(ord("P"), Literal(b"LAN]\n", PlanLine(1))),
            )
        case PlanLine(number):
            return _begin_line(rules, number)
        case Length(line, digits):
            return _write_length(line, digits)
        case Tool(line, seen):
            return _write_tool(rules, line, seen)
        case Needs(line, last, seen):
            return _write_needs(line, last, seen)
        case Title():
            return _write_title(place)
        case Direct(matched, partial):
            return _write_direct(matched, partial)
        case ListLine(number):
            return _begin_list_line(number)
        case ListTitle():
            return _write_list_title(rules, place)
        case Done():
            return ()


def forced(rules: PlanRules, place: Place) -> bytes:
    """The bytes that must follow, up to where there is a choice, or the end."""
    stretch = bytearray()
    while True:
        live = [edge for edge in edges(rules, place) if edge.to is not None]
        if len(live) != 1 or live[0].low != live[0].high or live[0].to is None:
            return bytes(stretch)
        stretch.append(live[0].low)
        place = live[0].to


def onward(rules: PlanRules, place: Place) -> tuple[int, Place]:
    """The first byte of a short way from `place` to the end, and where it leads. Done has none."""
    first = edges(rules, place)[0]
    assert first.to is not None, f"the first edge of {place} is dead"
    return first.low, first.to


def owed(place: Place) -> int:
    """Bytes a title must still take before it may end: the rest of a character, or one to see."""
    match place:
        case Title(solid=solid, partial=partial):
            return OWED[partial] if partial else int(not solid)
        case ListTitle(words=words, partial=partial):
            return OWED[partial] if partial else int(not words)
        case _:
            return 0


def may_stop(place: Place) -> bool:
    """Whether an end token may stand here: behind a list's second title, or behind the line of one."""
    match place:
        case ListLine(number):
            return number > 2
        case ListTitle(line=line):
            return line > 1 and not owed(place)
        case _:
            return False


def planned(place: Place) -> bool:
    match place:
        case Literal(_, then):
            return planned(then)
        case Opener() | Direct():
            return False
        case Done(plan):
            return plan
        case _:
            return True


def _one(byte: int, to: Place | None) -> Edge:
    return Edge(byte, byte, to)


def _begin_line(rules: PlanRules, number: int) -> tuple[Edge, ...]:
    end = (_one(_END[0], Literal(_END[1:], Done(plan=True))),) if number > 1 else ()
    if number > rules.max_points:
        return end
    head = str(number).encode() + b".<"
    return (*end, _one(head[0], Literal(head[1:], Length(number))))


def _write_length(line: int, digits: int) -> tuple[Edge, ...]:
    if not digits:
        return (Edge(ord("1"), ord("9"), Length(line, 1)),)
    close = _one(ord(">"), Literal(b"<", Tool(line)))
    if digits == _MAX_LENGTH_DIGITS:
        return (close,)
    return (close, Edge(ord("0"), ord("9"), Length(line, digits + 1)))


def _write_tool(rules: PlanRules, line: int, seen: bytes) -> tuple[Edge, ...]:
    names = [b"None", *(tool.encode() for tool in rules.tools)]
    nexts = dict.fromkeys(
        name[len(seen)] for name in names if name.startswith(seen) and len(name) > len(seen)
    )  # in order of the names, so that None is what an ending says
    close = (_one(ord(">"), Literal(b"[", Needs(line))),) if seen in names else ()
    return (*close, *(_one(byte, Tool(line, seen + bytes([byte]))) for byte in nexts))


def _write_needs(line: int, last: int, seen: bytes) -> tuple[Edge, ...]:
    ids = [str(number).encode() for number in range(last + 1, line)]
    found: list[Edge] = []
    if seen in ids:
        found.append(_one(ord("]"), Title(line)))
    if not seen and not last:
        found.append(_one(ord("-"), Literal(b"]", Title(line))))
    digits = {
        seen + name[len(seen) : len(seen) + 1] for name in ids if name.startswith(seen) and name != seen
    }
    for longer in sorted(digits, key=lambda name: (name not in ids, name)):
        found.append(_one(longer[-1], Needs(line, last, longer)))
    if seen in ids and int(seen) < line - 1:
        found.append(_one(ord(","), Needs(line, int(seen))))
    return tuple(found)


def _write_title(place: Title) -> tuple[Edge, ...]:
    found: list[Edge] = []
    if not place.partial and place.solid:
        found.append(_one(ord("\n"), PlanLine(place.line + 1)))
    if place.matched:
        byte = _END[place.matched]
        longer = place.matched + 1
        found.append(_one(byte, _spell(place, SOLID, longer) if longer < len(_END) else None))
    found += [Edge(low, high, _spell(place, after)) for low, high, after in TITLE[place.partial]]
    if not place.partial:
        found.append(_one(_END[0], _spell(place, SOLID, matched=1)))
    return tuple(edge for edge in found if edge.to is not None or place.matched)


def _spell(place: Title, after: Partial, matched: int = 0) -> Title | None:
    """The title one byte further, or None when what it then owes no longer fits."""
    left = None if place.left is None else place.left - 1
    partial = "" if after in (SOLID, BLANK) else after
    longer = Title(place.line, left, place.solid or after == SOLID, matched, partial)
    return longer if left is None or owed(longer) <= left else None


def _write_direct(matched: int, partial: Partial) -> tuple[Edge, ...]:
    found: list[Edge] = []
    if not partial:
        end = matched + 1 == len(_END)
        found.append(_one(_END[matched], Done(plan=False) if end else Direct(matched + 1)))
    for low, high, after in FREE[partial]:
        found.append(Edge(low, high, Direct(partial="" if after == SOLID else after)))
    if matched:
        found.append(_one(_END[0], Direct(matched=1)))
    return tuple(found)


def _begin_list_line(number: int) -> tuple[Edge, ...]:
    end = (_one(ord("\n"), Done(plan=True)),) if number > 2 else ()
    head = str(number).encode() + b"."
    return (*end, _one(head[0], Literal(head[1:], ListTitle(number))))


def _write_list_title(rules: PlanRules, place: ListTitle) -> tuple[Edge, ...]:
    """A colon right behind a word ends a title, and so does a full stop before a space: models go on with a
    sentence there.
    """
    rows = [Edge(low, high, _spell_list(place, after)) for low, high, after in TITLE[place.partial]]
    if place.partial:
        return tuple(edge for edge in rows if edge.to is not None)
    done = place.line >= rules.max_points
    end = _one(ord("\n"), Done(plan=True) if done else ListLine(place.line + 1))
    if place.last == "over":
        return (end,)
    found = [end if place.words else rows[0]]  # the surest way to the end comes first
    if place.last != "digit":
        ends = place.words and place.last != "blank"
        found.append(_one(ord(":"), _spell_list(place, "over") if ends else None))
    if place.last == "solid":
        found.append(_one(ord("."), _spell_list(place, "dot")))
    if place.last == "dot" or place.words == MAX_TITLE_WORDS:
        found.append(_one(ord(" "), None))
    return (*found, Edge(ord("0"), ord("9"), _spell_list(place, "digit")), *rows)


def _spell_list(place: ListTitle, after: Partial) -> ListTitle | None:
    """The title one byte further, or None when what it then owes no longer fits."""
    left = None if place.left is None else place.left - 1
    if after == BLANK:
        longer = replace(place, left=left, last="blank", partial="")
        owing = place.words == MAX_TITLE_WORDS
    elif after in (SOLID, "digit", "dot", "over"):
        words = place.words + (place.last == "blank")
        longer = ListTitle(place.line, left, words, after)
        owing = words > MAX_TITLE_WORDS
    else:
        longer = replace(place, left=left, partial=after)
        owing = False
    return None if owing or (left is not None and owed(longer) > left) else longer
