"""Describes answers of fixed text around JSON values and free text, such as calls in a model's own marks.

Only the master writes structural tags. Clients cannot send them, because they may name tokens of the model.

    '<f=add>' Json({"type": "integer"}) '</f>'  allows  "<f=add>3</f>"
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from specsot.core.vocabulary import Vocabulary, describe
from specsot.grammar.name_patterns import read_enforceable
from specsot.params import refuse

# Characters. The longest free text whose maximum is enforced: the automaton has a state per character.
# Precedent: llguidance's limit for lexers.
MAX_COUNTED_LENGTH: Final = 4096


@dataclass(frozen=True, slots=True)
class JsonPart:
    """A part of an answer that is one JSON value.

    schema: the JSON schema of the value. True allows any value.
    """

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class FreeText:
    """A part of an answer that is any text, and the fixed text that ends it.

    end: the text that ends the part.
    excluded: texts that the part does not contain. One of them must be a part of `end`, so that the end is
        unique.
    min_length: the smallest number of characters, without the end.
    max_length: the largest number of characters, without the end. None for no maximum; a maximum above
        MAX_COUNTED_LENGTH is not enforced.
    """

    end: str
    excluded: tuple[str, ...]
    min_length: int = 0
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """A part of an answer that matches a regular expression.

    regex: the expression in Rust's dialect.
    """

    regex: str


@dataclass(frozen=True, slots=True)
class OneTag:
    """A part of an answer that is one of several sequences of parts.

    choices: the sequences.
    """

    choices: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class Members:
    """A part of an answer: sequences of parts in their order, with fixed text between two of them. Optional
    ones may be absent.

    members: pairs of (the member's parts, True if it is required).
    between: the text between two members.
    """

    members: tuple[tuple[tuple[Part, ...], bool], ...]
    between: str = ""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part of an answer: a sequence of parts, 1 to `max_count` times, with other parts between two of them.

    parts: the parts that are repeated.
    between: the parts between two repetitions.
    max_count: the largest number of repetitions.
    """

    parts: tuple[Part, ...]
    between: tuple[Part, ...]
    max_count: int


Part = str | JsonPart | FreeText | Pattern | OneTag | Members | Repeat


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A description of a whole answer: fixed text, JSON values and free text in a sequence of parts.

    parts: what the answer consists of.
    tokens: the texts of special or added tokens, by id, with which the model may write parts of fixed text.
    """

    parts: tuple[Part, ...]
    tokens: Mapping[int, str] = field(default_factory=dict)


def write_tag(tag: StructuralTag) -> str:
    """Return the text of a structural tag, which `read_tag` reads.

    tag: the structural tag.
    """
    tokens = {str(token): text for token, text in tag.tokens.items()}
    return json.dumps({"parts": _written(tag.parts), "tokens": tokens}, ensure_ascii=False)


def _written(parts: Sequence[Part]) -> list[Any]:
    """Return the JSON values of parts, in their order.

    parts: parts of a structural tag.
    """
    return [_written_part(part) for part in parts]


def _written_part(part: Part) -> Any:
    """Return the JSON value of one part: a string for fixed text, an object for any other part.

    part: the part.

    `_read_part` is the inverse. Parts within the part are written as lists.
    """
    match part:
        case str():
            return part
        case JsonPart(schema):
            return {"json": schema}
        case FreeText(end, excluded, min_length, max_length):
            return {"until": end, "excluded": list(excluded), "min": min_length, "max": max_length}
        case Pattern(regex):
            return {"pattern": regex}
        case OneTag(choices):
            return {"one_of": [_written(choice) for choice in choices]}
        case Members(members, between):
            return {"members": [[_written(parts), needed] for parts, needed in members], "between": between}
        case Repeat(parts, between, max_count):
            return {"repeat": _written(parts), "between": _written(between), "max": max_count}


def read_tag(text: str) -> StructuralTag:
    """Return the structural tag that `write_tag` wrote.

    text: the text of the tag.

    Raises InvalidRequest for any other text.

    The text is JSON with the keys `parts` and `tokens`; keys of tokens are ids.
    """
    try:
        encoded = json.loads(text)
        tokens = {int(token): str(written) for token, written in encoded["tokens"].items()}
        return StructuralTag(_read(encoded["parts"]), tokens)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise refuse("structural_tag is malformed") from None


def _read(encoded: Any) -> tuple[Part, ...]:
    """Return the parts of JSON values, in their order. Raises KeyError, TypeError or ValueError if one is
    malformed.

    encoded: a list of what `_written_part` returned.
    """
    return tuple(_read_part(one) for one in encoded)


def _read_part(encoded: Any) -> Part:
    """Return the part of a JSON value. Raises KeyError, TypeError or ValueError if the value is malformed.

    encoded: what `_written_part` returned.

    An object without a known key is read as a repetition, which raises KeyError if it is none.
    """
    if isinstance(encoded, str):
        return encoded
    found = cast("dict[str, Any]", encoded)
    if "json" in found:
        return JsonPart(found["json"])
    if "until" in found:
        excluded = tuple(map(str, found["excluded"]))
        return FreeText(str(found["until"]), excluded, int(found["min"]), found["max"])
    if "pattern" in found:
        return Pattern(str(found["pattern"]))
    if "one_of" in found:
        return OneTag(tuple(map(_read, found["one_of"])))
    if "members" in found:
        members = tuple((_read(parts), bool(needed)) for parts, needed in found["members"])
        return Members(members, str(found["between"]))
    return Repeat(_read(found["repeat"]), _read(found["between"]), int(found["max"]))


def extended(vocabulary: Vocabulary, tokens: Mapping[int, str]) -> Vocabulary:
    """Return the vocabulary in which some tokens have other texts. Tokens that have a text keep it, and
    tokens that the vocabulary does not contain are ignored.

    If no token gets a text, the vocabulary itself is returned.

    vocabulary: the bytes of every token id.
    tokens: the texts of special or added tokens, by id.

    Unnamed ids of the given vocabulary are not kept in a new one.
    """
    known = list(vocabulary.bytes)
    for token, text in tokens.items():
        if 0 <= token < len(known) and known[token] is None:
            known[token] = text.encode()
    return vocabulary if tuple(known) == vocabulary.bytes else describe(known)


def lark_of_tag(tag: StructuralTag, json_style: Mapping[str, Any]) -> str:
    """Return the rules of a structural tag in the library's dialect of Lark, one per line; the first one is
    `start`.

    tag: the structural tag.
    json_style: the library's options of JSON values, such as their white space.

    Raises InvalidRequest if a schema is invalid.

    The rules end without a line feed.
    """
    writer = _LarkWriter(json_style)
    start = writer.sequence(tag.parts)
    return "\n".join([f"start: {start}", *writer.rules])


class _LarkWriter:
    """Writes a structural tag as rules in the library's dialect of Lark: collects rules, and returns
    expressions that refer to them.

    rules: all rules except `start`.
    """

    def __init__(self, json_style: Mapping[str, Any]) -> None:
        """Begin with the rule ANY alone, which matches any text.

        json_style: the library's options of JSON values.
        """
        self.rules: list[str] = ["ANY: /(?s:.*)/"]
        self._style = json_style
        self._names: dict[FreeText, str] = {}

    def sequence(self, parts: Sequence[Part]) -> str:
        """Return the expression of parts that follow each other. Without parts, it is that of the empty text.

        parts: parts of a structural tag, in their order.
        """
        return " ".join(self._expression(part) for part in joined(parts)) or '""'

    def _expression(self, part: Part) -> str:
        """Return the expression of one part, and add the rules that it refers to.

        part: the part.

        Raises InvalidRequest if a schema is invalid.

        Equal free texts share one rule. The expression may have several words, so that the caller puts it
        into a rule where needed.
        """
        match part:
            case str():
                return json.dumps(part)
            case JsonPart(schema):
                return f"%json {self._json(schema)}"
            case FreeText():
                return self._free_text(part)
            case Pattern(regex):
                return "/" + regex.replace("/", "\\/") + "/"
            case OneTag(choices):
                return self._rule(" | ".join(self.sequence(choice) for choice in choices))
            case Members(members, between):
                return self._members(members, between)
            case Repeat(parts, between, max_count):
                one = self._rule(self.sequence(parts))
                more = self._rule(f"{self.sequence(between)} {one}")
                return f"{one} {more}{{0,{max_count - 1}}}" if max_count > 1 else one

    def _rule(self, expression: str) -> str:
        """Add a rule, and return its name.

        expression: what the rule matches.
        """
        name = f"rule{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _json(self, schema: Mapping[str, Any] | bool) -> str:
        """Return a schema as the library needs it: with closed objects and with the options of JSON values.

        schema: a JSON schema, or True for any value.

        Raises InvalidRequest if the schema is invalid.

        True becomes a schema without restrictions.
        """
        closed = read_enforceable(json.dumps(schema))
        return json.dumps({**(closed if isinstance(closed, dict) else {}), "x-guidance": self._style})

    def _free_text(self, part: FreeText) -> str:
        """Return the name of the rule of a free text, which is added at the first call for equal free texts.
        The rule is lazy, so it matches up to the first end of the text.

        part: the free text.

        A `max_length` above MAX_COUNTED_LENGTH is not enforced, and a `min_length` counts only up to that
        number.
        """
        if part not in self._names:
            name = f"text{len(self._names)}"
            counted = part.max_length is not None and part.max_length <= MAX_COUNTED_LENGTH
            max_length = part.max_length if counted else ""
            bounds = f"/(?s:.{{{min(part.min_length, MAX_COUNTED_LENGTH)},{max_length}}})/"
            excluded = " | ".join(map(json.dumps, part.excluded))
            body = f"({bounds} & ~(ANY ({excluded}) ANY))" if excluded else bounds
            self.rules.append(f"{name.upper()}: {body} {json.dumps(part.end)}")
            self.rules.append(f"{name}[lazy]: {name.upper()}")
            self._names[part] = name
        return self._names[part]

    def _members(self, members: Sequence[tuple[tuple[Part, ...], bool]], between: str) -> str:
        """Return the expression of members; that of the empty text if there are none.

        From the last to the first, two rules say what may follow: one if a member precedes, so that `between`
        must be written, and one if none does.

        members: pairs of (the member's parts, True if it is required).
        between: the text between two members.

        Absent optional members write no `between` either.
        """
        first = later = '""'
        separator = json.dumps(between) if between else ""
        for parts, required in reversed(members):
            one = self._rule(f"{self.sequence(parts)} {later}")
            first, later = (
                self._rule(_optional(one, first, required)),
                self._rule(_optional(f"{separator} {one}", later, required)),
            )
        return first


def _optional(present: str, absent: str, required: bool) -> str:
    """Return the expression of a member: `present`, or a choice between both if the member is optional.

    present: the expression if the member is written.
    absent: the expression if the member is left out.
    required: True if the member must be written.
    """
    return present if required else f"{present} | {absent}"


def joined(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield the parts. Fixed texts that follow each other are one part, and empty texts are left out.

    parts: parts of a structural tag, in their order.

    Yields nothing if there are no parts or only empty texts.
    """
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        if text:
            yield text
        text = ""
        yield part
    if text:
        yield text


class Exits:
    """Fixed texts of a structural tag that lead to the end of the answer, each text once, in the order from
    the answer's end to its beginning, as found first.

    outside: texts that may follow a value or an optional part. The values of the dict mean nothing.
    of_free_text: the ends of free texts, as keys too.

        '<f=add>' Members(a, optional b) '</f>', between "," -> outside ("</f>",);
        b is required -> outside ("</f>", ",b=", "b=")
    """

    def __init__(self, tag: StructuralTag) -> None:
        """Collect the exits.

        tag: the structural tag.
        """
        self.outside: dict[str, None] = {}
        self.of_free_text: dict[str, None] = {}
        self._collect(tag.parts, "")

    def _collect(self, parts: Sequence[Part], following: str) -> str:
        """Add the exits within `parts`. Return the fixed text with which the parts begin, if they begin with
        fixed text, else what may follow their first part.

        If there are no parts, `following` is returned.

        parts: parts of a structural tag, in their order.
        following: the fixed text after the parts; empty if there is none.

        Adds to `outside` the fixed text after each part that is no fixed text, if there is any, and to
        `of_free_text` the end of each free text. Parts within alternatives, members and repetitions are
        collected too; the text between repetitions is not.
        """
        for part in reversed(list(joined(parts))):
            if isinstance(part, str):
                following = part
                continue
            self.outside |= {following: None} if following else {}
            match part:
                case OneTag(choices):
                    for choice in choices:
                        self._collect(choice, following)
                case Members(members, between):
                    self._collect_members(members, between, following)
                case Repeat(repeated, _, _):
                    self._collect(repeated, following)
                case FreeText(end):
                    self.of_free_text[end] = None
                case _:
                    pass
        return following

    def _collect_members(
        self, members: Sequence[tuple[tuple[Part, ...], bool]], between: str, following: str
    ) -> None:
        """Add the exits within members, and the texts with which required members begin, with and without the
        text before them.

        members: pairs of (the member's parts, True if it is required).
        between: the text between two members.
        following: the fixed text after the last member; empty if there is none.

        Optional members add only the exits within them.
        """
        for parts, required in reversed(members):
            begins = self._collect(parts, following)
            if required:
                following = between + begins
                self.outside |= {following: None, begins: None}
