"""The strict skeleton language as an automaton over bytes: places, and the edges that leave them.

Refuses to know tokens, vocabularies, numpy; pure.

    output := "[DIRECT]" NL text "[END]"  |  "[PLAN]" NL line{1..max_points} "[END]"
    line   := ID "." "<" LEN ">" "<" TOOL ">" "[" DEPS "]" TITLE NL

ID is the next number; LEN 1-4 digits without a leading zero; TOOL None or an offered name; DEPS "-" or
ascending smaller ids; TITLE 1..80 bytes of UTF-8 with something to see, no control character, no line or
paragraph separator, no "[END]". `text` is UTF-8 up to the first "[END]"; nothing follows "[END]".

Edges come in order of precedence, and the low byte of a place's first edge leads to a valid end from
everywhere: the way along first edges (`onward`) is the ending that budgets are measured with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specsot.constraint.characters import BLANK, FREE, OWED, SOLID, TITLE, Partial
from specsot.skeleton import MAX_TITLE_BYTES, PlanRules

_END = b"[END]"
_MAX_LENGTH_DIGITS = 4


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
class Done:
    """Behind "[END]" of a plan or of a direct answer. Nothing follows."""

    plan: bool


Place = Literal | Opener | PlanLine | Length | Tool | Needs | Title | Direct | Done


class Edge(NamedTuple):
    """Bytes low .. high lead to `to`; None means that they are forbidden, whatever later edges say."""

    low: int
    high: int
    to: Place | None


def begin(rules: PlanRules) -> Place:
    """Where every output begins."""
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
    if not isinstance(place, Title):
        return 0
    return OWED[place.partial] if place.partial else int(not place.solid)


def planned(place: Place) -> bool:
    """Whether the output is a plan for sure."""
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
        byte, longer = _END[place.matched], place.matched + 1
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
