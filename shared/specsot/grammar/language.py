"""The skeleton language as an automaton over UTF-8 bytes: its places, and the edges that leave them.

`specsot.core.skeleton` defines the skeleton language. Models that were not taught it write a numbered list,
which is the other language of this module. The list's first "1." is the end of the prompt:

    list := title NL {n "." title NL} [NL]      (2 .. max_points titles; an end token may replace the end)

A *place* is a state of the automaton. Worked example, with one point and without tools: after "[PLAN]\\n1.<4"
the place is Length(line, digits=1) with line = NumberedLine(1, last=4), if 4 points are allowed. Its
edges are ">",
which leads to Literal(b"<", Tool(line)), and "0".."9", which lead to Length(line, 2).

Budgets are not part of the rules that these functions read. The largest number of points is part of a place,
and a caller that follows titles may count their bytes and words itself (see `Title` and `ListTitle`), so that
the places, and what is computed for each of them, serve all budgets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from specsot.core.skeleton import MAX_TITLE_BYTES, MAX_TITLE_WORDS, PlanRules

# A character whose bytes are incomplete, by what is still missing: "2" needs two continuation bytes, "e0" two
# of which the first is restricted, and so on. "" is a complete character.
Partial = str
# What precedes a byte in a list's title: "blank", "solid", "digit", "dot" or "over".
Before = str
# (low, high, result) of byte ranges, inclusive and disjoint. The result is a `Partial`, SOLID or BLANK.
Row = tuple[tuple[int, int, Partial], ...]

# The byte completes a visible character.
SOLID: Final = "solid"
# The byte completes a space of any kind.
BLANK: Final = "blank"

# The continuation bytes that complete any character, by what is missing of it.
_ANY: dict[Partial, Row] = {
    "1": ((0x80, 0xBF, SOLID),),
    "2": ((0x80, 0xBF, "1"),),
    "3": ((0x80, 0xBF, "2"),),
    "e0": ((0xA0, 0xBF, "1"),),
    "ed": ((0x80, 0x9F, "1"),),
    "f0": ((0x90, 0xBF, "2"),),
    "f4": ((0x80, 0x8F, "2"),),
}

# The first bytes of characters of several bytes, without those that the tables below treat in their own way.
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

# Neither table contains "[" (0x5B): as it may begin "[END]", the functions below add its edges.
FREE: dict[Partial, Row] = {
    "": ((0x00, 0x5A, SOLID), (0x5C, 0x7F, SOLID), (0xC2, 0xC2, "1"), (0xE1, 0xE3, "2"), *_LONG_LEADS),
    **_ANY,
}

# Visible characters come first in a row, because the first byte of a row is on the shortest way to a valid
# title.
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
    # 80..9F are control characters; 85 is a line end.
    "c2": ((0xA1, 0xBF, SOLID), (0xA0, 0xA0, BLANK)),
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

# Number of continuation bytes until the character is complete.
OWED: dict[Partial, int] = {
    **{"": 0, "1": 1, "2": 2, "3": 3, "e0": 2, "ed": 2, "f0": 3, "f4": 3},
    **{"c2": 1, "e1": 2, "e19a": 1, "e2": 2, "e280": 1, "e281": 1, "e3": 2, "e380": 1},
}


# The Chinese full stop, which no space follows.
IDEOGRAPHIC_STOP: Final = "。".encode()
# The marker after the last line of a plan, or after a direct answer.
_END = b"[END]"
# Digits. Bounds a point's length to 9999 tokens.
_MAX_LENGTH_DIGITS = 4


class NumberedLine(NamedTuple):
    """A line of a plan or of a list.

    number: number of the line, from 1.
    last: number of the last line that may be written.
    """

    number: int
    last: int

    @property
    def following(self) -> NumberedLine:
        """The next line, which may be one more than `last`: then only the end of the plan may be written in
        it.
        """
        return NumberedLine(self.number + 1, self.last)


@dataclass(frozen=True, slots=True)
class Literal:
    """A place of the byte automaton where the next bytes are determined.

    rest: the bytes that must follow.
    then: the place after these bytes.
    """

    rest: bytes
    then: Place


@dataclass(frozen=True, slots=True)
class Opener:
    """The place of the byte automaton after the first "[", where PLAN or DIRECT follows.

    line: the first line of the plan.
    """

    line: NumberedLine


@dataclass(frozen=True, slots=True)
class PlanLine:
    """The place of the byte automaton at the beginning of a line of a plan.

    line: the line that may follow. From the second line on, the end of the plan may follow instead.
    """

    line: NumberedLine


@dataclass(frozen=True, slots=True)
class Length:
    """A place of the byte automaton in LEN, the wished number of tokens of a point.

    line: the point's line.
    digits: number of digits so far.
    """

    line: NumberedLine
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Tool:
    """A place of the byte automaton in TOOL, the label of a point.

    line: the point's line.
    prefix: the bytes of the tool's name so far.
    """

    line: NumberedLine
    prefix: bytes = b""


@dataclass(frozen=True, slots=True)
class Needs:
    """A place of the byte automaton in DEPS, the ids of the points that a point depends on.

    line: the point's line.
    last: the id before the last comma, or 0 before the first comma. Ids must ascend.
    prefix: the digits after the last comma, as bytes.
    """

    line: NumberedLine
    last: int = 0
    prefix: bytes = b""


@dataclass(frozen=True, slots=True)
class Title:
    """A place of the byte automaton in TITLE, the heading of a point of a plan.

    line: the point's line.
    bytes_left: number of bytes that the title may still have. None if the caller counts them.
    solid: True once the title has a visible character.
    matched: how many bytes of "[END]" the last bytes match, in 0..4. A title must not contain "[END]".
    partial: what is missing of the incomplete last character, or "" if the last character is complete.
    """

    line: NumberedLine
    bytes_left: int | None = MAX_TITLE_BYTES
    solid: bool = False
    matched: int = 0
    partial: Partial = ""


@dataclass(frozen=True, slots=True)
class Direct:
    """A place of the byte automaton in the free text of a direct answer.

    matched: how many bytes of "[END]" the last bytes match, in 0..4. The fifth byte ends the answer.
    partial: what is missing of the incomplete last character, or "" if the last character is complete.
    """

    matched: int = 0
    partial: Partial = ""


@dataclass(frozen=True, slots=True)
class ListLine:
    """The place of the byte automaton at the beginning of a line of a list, before its number.

    line: the line.
    """

    line: NumberedLine


@dataclass(frozen=True, slots=True)
class ListTitle:
    """A place of the byte automaton in a title of a list.

    line: the line.
    bytes_left: number of bytes that the title may still have. None if the caller counts bytes and words.
    words: number of words that have started. If the caller counts them, 1 stands for any number above 0.
    last: kind of the preceding character. "over" means that the title has ended, so that its line must end.
    partial: what is missing of the incomplete last character, or "" if the last character is complete.
    """

    line: NumberedLine
    bytes_left: int | None = MAX_TITLE_BYTES
    words: int = 0
    last: Before = "blank"
    partial: Partial = ""


@dataclass(frozen=True, slots=True)
class Done:
    """The place of the byte automaton after the end. Nothing may follow.

    plan: True after a plan, False after a direct answer.
    """

    plan: bool


Place = Literal | Opener | PlanLine | Length | Tool | Needs | Title | Direct | ListLine | ListTitle | Done


class Edge(NamedTuple):
    """An edge of the automaton: the bytes low .. high lead to one place. Of several edges for a byte, the
    first one counts.

    low: the first byte.
    high: the last byte, inclusive.
    target: the place after the byte. None means that these bytes are forbidden, even if a later edge allows
        them.
    """

    low: int
    high: int
    target: Place | None


def begin(rules: PlanRules) -> Place:
    """Return the first place, before any byte of the output.

    In a list, this is the first title. If the rules allow no direct answer, "[PLAN]" is determined; otherwise
    only "[" is.

    rules: whether the output is a list, whether it may be a direct answer, and how many points it may have.

    A list may have `rules.max_points` titles, like a plan.
    """
    first = NumberedLine(1, rules.max_points)
    if rules.listed:
        return ListTitle(first)
    return Literal(b"[", Opener(first)) if rules.direct else Literal(b"[PLAN]\n", PlanLine(first))


def edges(rules: PlanRules, place: Place) -> tuple[Edge, ...]:
    """Return the edges that leave a place, in order of precedence. `Done` has none, so an empty tuple is
    returned.

    The first edge is on a short way to the end, see `onward`. Bytes that no edge contains are forbidden.

    rules: the rules of the skeleton. Only its tool names are read here.
    place: the place that the edges leave.

    An edge whose `target` is None forbids its bytes.
    """
    match place:
        case Literal(rest, then):
            return (_edge_of_byte(rest[0], Literal(rest[1:], then) if len(rest) > 1 else then),)
        case Opener(line):
            return (
                _edge_of_byte(ord("D"), Literal(b"IRECT]\n", Direct())),
                _edge_of_byte(ord("P"), Literal(b"LAN]\n", PlanLine(line))),
            )
        case PlanLine(line):
            return _begin_line(line)
        case Length(line, digits):
            return _write_length(line, digits)
        case Tool(line, prefix):
            return _write_tool(rules, line, prefix)
        case Needs(line, last, prefix):
            return _write_needs(line, last, prefix)
        case Title():
            return _write_title(place)
        case Direct(matched, partial):
            return _write_direct(matched, partial)
        case ListLine(line):
            return _begin_list_line(line)
        case ListTitle():
            return _write_list_title(place)
        case Done():
            return ()


def forced(rules: PlanRules, place: Place) -> bytes:
    """Return the bytes that the grammar determines from this place on, up to a choice or the end.

    The result is empty if the place leaves a choice, and at the end. At the beginning of a list's line, the
    end of the list counts as no choice: the number of the line is by far the likelier, and what is drafted
    in vain changes no text.

    rules: the rules of the skeleton. Only its tool names are read here.
    place: the place from which on bytes are determined.

    Stops at the end of the output, which has no edges.
    """
    determined = bytearray()
    while True:
        allowed = [edge for edge in edges(rules, place) if edge.target is not None]
        if isinstance(place, ListLine):
            allowed = [edge for edge in allowed if not isinstance(edge.target, Done)]
        if len(allowed) != 1 or allowed[0].low != allowed[0].high or allowed[0].target is None:
            return bytes(determined)
        determined.append(allowed[0].low)
        place = allowed[0].target


def onward(rules: PlanRules, place: Place) -> tuple[int, Place]:
    """Return the first byte of a short way from `place` to the end, and the place after this byte.

    rules: the rules of the skeleton. Only its tool names are read here.
    place: the place where the way begins. It must not be `Done`, which has no edges.
    """
    first = edges(rules, place)[0]
    assert first.target is not None, f"the first edge of {place} is dead"
    return first.low, first.target


def owed(place: Place) -> int:
    """Return how many bytes a title needs before it may end, 0 outside titles.

    These are the missing bytes of the incomplete character, or 1 if the title has no visible character yet.
    The result is 0 if the title may end now.

    place: any place of the automaton.

    The missing bytes of an incomplete character are up to 3.
    """
    match place:
        case Title(solid=solid, partial=partial):
            return OWED[partial] if partial else int(not solid)
        case ListTitle(words=words, partial=partial):
            return OWED[partial] if partial else int(not words)
        case _:
            return 0


def is_within_character(place: Place) -> bool:
    """Return whether the last character is incomplete. False at all places outside of titles and of direct
    answers.

    place: any place of the automaton.
    """
    return isinstance(place, Title | ListTitle | Direct) and bool(place.partial)


def may_stop(place: Place) -> bool:
    """Return whether an end token may follow: in a list that has at least two titles.

    False in plans with markers and in direct answers, which end with "[END]", and in a list's title that
    needs further bytes.

    place: any place of the automaton.

    In a list, an end token may replace the rest only from the second title on: at the beginning of a line
    after two titles, and in the second or a later title that may end.
    """
    match place:
        case ListLine(line):
            return line.number > 2
        case ListTitle(line=line):
            return line.number > 1 and not owed(place)
        case _:
            return False


def planned(place: Place) -> bool:
    """Return True if an output that has reached this place is certainly a plan. Return True for every
    place of a list. Return False in and after a direct answer, and as long as "[DIRECT]" may still be chosen.

    place: any place of the automaton.

    A place with determined bytes is what the place after these bytes is.
    """
    match place:
        case Literal(_, then):
            return planned(then)
        case Opener() | Direct():
            return False
        case Done(plan):
            return plan
        case _:
            return True


def _edge_of_byte(byte: int, target: Place | None) -> Edge:
    """Return the edge of a single byte.

    byte: the byte, 0..255.
    target: the place after the byte, or None if the byte is forbidden.
    """
    return Edge(byte, byte, target)


def _begin_line(line: NumberedLine) -> tuple[Edge, ...]:
    """Return the edges at the beginning of a line of a plan: "[END]" from the second line on, and the line's
    number.

    After the last line that may be written, only "[END]" is allowed.

    line: the line that begins. Its number may be one more than its `last`.

    In the first line, only its number may follow.
    """
    end = (_edge_of_byte(_END[0], Literal(_END[1:], Done(plan=True))),) if line.number > 1 else ()
    if line.number > line.last:
        return end
    head = str(line.number).encode() + b".<"
    return (*end, _edge_of_byte(head[0], Literal(head[1:], Length(line))))


def _write_length(line: NumberedLine, digits: int) -> tuple[Edge, ...]:
    """Return the edges in LEN: a digit, which is not 0 at first, and ">" after at least one digit. ">" alone
    is left after _MAX_LENGTH_DIGITS digits.

    line: the point's line.
    digits: number of digits so far, 0.._MAX_LENGTH_DIGITS.

    LEN is the wished number of tokens of the point, of at most _MAX_LENGTH_DIGITS digits.
    """
    if not digits:
        return (Edge(ord("1"), ord("9"), Length(line, 1)),)
    close = _edge_of_byte(ord(">"), Literal(b"<", Tool(line)))
    if digits == _MAX_LENGTH_DIGITS:
        return (close,)
    return (close, Edge(ord("0"), ord("9"), Length(line, digits + 1)))


def _write_tool(rules: PlanRules, line: NumberedLine, prefix: bytes) -> tuple[Edge, ...]:
    """Return the edges in TOOL: the next byte of every name that begins with `prefix`, and ">" if `prefix` is
    a complete name.

    rules: offers the names in addition to "None".
    line: the point's line.
    prefix: the bytes of the name so far.

    The tool may also be "None". Without tools in the rules, only "None" can be written.
    """
    # "None" comes first, so that the short way to the end writes it.
    names = [b"None", *(tool.encode() for tool in rules.tools)]
    nexts = dict.fromkeys(
        name[len(prefix)] for name in names if name.startswith(prefix) and len(name) > len(prefix)
    )
    close = (_edge_of_byte(ord(">"), Literal(b"[", Needs(line))),) if prefix in names else ()
    return (*close, *(_edge_of_byte(byte, Tool(line, prefix + bytes([byte]))) for byte in nexts))


def _write_needs(line: NumberedLine, last: int, prefix: bytes) -> tuple[Edge, ...]:
    """Return the edges in DEPS: "-" for no dependency, or ascending ids of earlier lines, separated by
    commas, and then "]".

    Complete ids come before incomplete ones, so that the first edge is on a short way to the end. In line 1,
    only "-" is allowed.

    line: the point's line. Only smaller numbers are allowed as ids.
    last: the id before the last comma, or 0 before the first comma. The next id is larger.
    prefix: the digits after the last comma.

    Each edge is a single byte. The result is never empty in a place that can be reached.
    """
    ids = [str(number).encode() for number in range(last + 1, line.number)]
    found: list[Edge] = []
    if prefix in ids:
        found.append(_edge_of_byte(ord("]"), Title(line)))
    if not prefix and not last:
        found.append(_edge_of_byte(ord("-"), Literal(b"]", Title(line))))
    digits = {
        prefix + name[len(prefix) : len(prefix) + 1]
        for name in ids
        if name.startswith(prefix) and name != prefix
    }
    for longer in sorted(digits, key=lambda name: (name not in ids, name)):
        found.append(_edge_of_byte(longer[-1], Needs(line, last, longer)))
    if prefix in ids and int(prefix) < line.number - 1:
        found.append(_edge_of_byte(ord(","), Needs(line, int(prefix))))
    return tuple(found)


def _write_title(place: Title) -> tuple[Edge, ...]:
    """Return the edges in TITLE: a line feed once the title has a visible character, and the bytes of valid
    characters.

    A byte is forbidden if it would complete "[END]", or if its character does not fit into the title's
    remaining bytes.

    place: the place in the title.

    The line feed leads to the beginning of the next line. Edges without a target, which forbid a byte, are
    returned only while a beginning of "[END]" has been written.
    """
    found: list[Edge] = []
    if not place.partial and place.solid:
        found.append(_edge_of_byte(ord("\n"), PlanLine(place.line.following)))
    if place.matched:
        byte = _END[place.matched]
        num_matched = place.matched + 1
        found.append(
            _edge_of_byte(byte, _spell(place, SOLID, num_matched) if num_matched < len(_END) else None)
        )
    found += [Edge(low, high, _spell(place, after)) for low, high, after in TITLE[place.partial]]
    if not place.partial:
        found.append(_edge_of_byte(_END[0], _spell(place, SOLID, matched=1)))
    return tuple(edge for edge in found if edge.target is not None or place.matched)


def _spell(place: Title, completes: Partial, matched: int = 0) -> Title | None:
    """Return the title after one more byte, or None if it could then not be completed within its bytes.

    place: the title before the byte.
    completes: what the byte does: SOLID or BLANK if it completes a character, otherwise what is then missing
        of the character.
    matched: how many bytes of "[END]" the title's last bytes match after the byte.

    With `bytes_left` of None, the title always continues, because the caller counts. The given place is not
    changed.
    """
    bytes_left = None if place.bytes_left is None else place.bytes_left - 1
    partial = "" if completes in (SOLID, BLANK) else completes
    longer = Title(place.line, bytes_left, place.solid or completes == SOLID, matched, partial)
    return longer if bytes_left is None or owed(longer) <= bytes_left else None


def _write_direct(matched: int, partial: Partial) -> tuple[Edge, ...]:
    """Return the edges in a direct answer: any UTF-8 text, and the next byte of "[END]", which ends the
    answer.

    Within a character, only its continuation bytes are allowed.

    matched: how many bytes of "[END]" the last bytes match.
    partial: what is missing of the incomplete last character, or "".

    The line's end and every other character are free. No edge is forbidden.
    """
    found: list[Edge] = []
    if not partial:
        end = matched + 1 == len(_END)
        found.append(_edge_of_byte(_END[matched], Done(plan=False) if end else Direct(matched + 1)))
    for low, high, after in FREE[partial]:
        found.append(Edge(low, high, Direct(partial="" if after == SOLID else after)))
    if matched:
        found.append(_edge_of_byte(_END[0], Direct(matched=1)))
    return tuple(found)


def _begin_list_line(line: NumberedLine) -> tuple[Edge, ...]:
    """Return the edges at the beginning of a line of a list: its number, and from the third line on an empty
    line, which ends the list.

    line: the line that begins.
    """
    end = (_edge_of_byte(ord("\n"), Done(plan=True)),) if line.number > 2 else ()
    head = str(line.number).encode() + b"."
    return (*end, _edge_of_byte(head[0], Literal(head[1:], ListTitle(line))))


def _write_list_title(place: ListTitle) -> tuple[Edge, ...]:
    """Return the edges in a title of a list.

    A colon directly after a word ends the title, and so does a full stop before a space or an ideographic
    one, because models continue with a sentence there. Once the title has ended ("over"), only the end of its
    line is allowed. After the last line that may be written, the end of the line is the end of the list.

    place: the place in the title.

    A title ends only after at least one word. A full stop after a word may follow, but no space directly
    after it, and no space may follow the last word that is allowed.
    """
    rows = [Edge(low, high, _spell_list(place, after)) for low, high, after in TITLE[place.partial]]
    if place.partial == "e380" and place.last == "solid":
        rows.insert(0, _edge_of_byte(IDEOGRAPHIC_STOP[-1], _spell_list(place, "over")))
    if place.partial:
        return tuple(edge for edge in rows if edge.target is not None)
    done = place.line.number >= place.line.last
    end = _edge_of_byte(ord("\n"), Done(plan=True) if done else ListLine(place.line.following))
    if place.last == "over":
        return (end,)
    # The edge on the shortest way to the end comes first.
    found = [end if place.words else rows[0]]
    if place.last != "digit":
        ends = place.words and place.last != "blank"
        found.append(_edge_of_byte(ord(":"), _spell_list(place, "over") if ends else None))
    if place.last == "solid":
        found.append(_edge_of_byte(ord("."), _spell_list(place, "dot")))
    if place.last == "dot" or place.words == MAX_TITLE_WORDS:
        found.append(_edge_of_byte(ord(" "), None))
    return (*found, Edge(ord("0"), ord("9"), _spell_list(place, "digit")), *rows)


def _spell_list(place: ListTitle, completes: Partial) -> ListTitle | None:
    """Return the title after one more byte, or None if it could then not be completed within its limits of
    bytes and words.

    place: the title before the byte.
    completes: what the byte does: SOLID or BLANK if it completes a character; "digit", "dot" or "over" (the
        title has ended) if it is a digit, a full stop or a colon; otherwise what is then missing of the
        character.

    With `bytes_left` of None, words and bytes are counted by the caller, and `words` only says whether any
    word was begun. The given place is not changed.
    """
    bytes_left = None if place.bytes_left is None else place.bytes_left - 1
    if completes == BLANK:
        longer = replace(place, bytes_left=bytes_left, last="blank", partial="")
        owing = place.words == MAX_TITLE_WORDS
    elif completes in (SOLID, "digit", "dot", "over"):
        words = place.words + (place.last == "blank")
        longer = ListTitle(place.line, bytes_left, words if bytes_left is not None else 1, completes)
        owing = words > MAX_TITLE_WORDS
    else:
        # Of the character before an incomplete one, only whether it is a space makes a difference.
        last = "blank" if place.last == "blank" else "solid"
        longer = replace(place, bytes_left=bytes_left, last=last, partial=completes)
        owing = False
    return None if owing or (bytes_left is not None and owed(longer) > bytes_left) else longer


def words_used(place: Place) -> int:
    """Return how many words a title of a list has used up. Outside of lists' titles, the result is 0.

    The first word is used up by its first visible character, and any other word by the space before it: no
    space may follow the last allowed word.

    place: any place of the automaton.
    """
    return place.words + (word_rank(place) == _IN_GAP) if isinstance(place, ListTitle) else 0


# See `word_rank`.
_IN_GAP = 2


def word_rank(place: Place) -> int:
    """Return 0 before the first word of a list's title and outside of lists, 1 in a word, and 2 in the space
    after a word.

    place: any place of the automaton.

    So within one title, a byte that leads to a higher rank uses up a word:

        # bytes of "A bc d": A 0 -> 1, space 1 -> 2, b 2 -> 1, c 1 -> 1, space 1 -> 2, d 2 -> 1: three words
    """
    if not isinstance(place, ListTitle) or not place.words:
        return 0
    return _IN_GAP if place.last == "blank" else 1
