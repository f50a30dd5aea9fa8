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
    """A JSON value of this schema."""

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text, and the fixed text that ends it.

    end: the text that ends it.
    excluded: texts that it does not contain. One of them must be a part of `end`, so that the end is unique.
    min_length, max_length: bounds of its number of characters, without the end; None for no maximum.
    """

    end: str
    excluded: tuple[str, ...]
    min_length: int = 0
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that matches a regular expression, in Rust's dialect."""

    regex: str


@dataclass(frozen=True, slots=True)
class OneTag:
    """One of several sequences of parts."""

    choices: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class Members:
    """Sequences of parts in their order, with fixed text between two of them. Optional ones may be absent.

    members: pairs of (the member's parts, True if it is required).
    between: the text between two members.
    """

    members: tuple[tuple[tuple[Part, ...], bool], ...]
    between: str = ""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A sequence of parts, 1 to `max_count` times, with other parts between two of them."""

    parts: tuple[Part, ...]
    between: tuple[Part, ...]
    max_count: int


Part = str | JsonPart | FreeText | Pattern | OneTag | Members | Repeat


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """The whole answer.

    parts: what the answer consists of.
    tokens: the texts of special or added tokens, by id, with which the model may write parts of fixed text.
    """

    parts: tuple[Part, ...]
    tokens: Mapping[int, str] = field(default_factory=dict)


def write_tag(tag: StructuralTag) -> str:
    """Return the text of a structural tag, which `read_tag` reads."""
    tokens = {str(token): text for token, text in tag.tokens.items()}
    return json.dumps({"parts": _written(tag.parts), "tokens": tokens}, ensure_ascii=False)


def _written(parts: Sequence[Part]) -> list[Any]:
    return [_written_part(part) for part in parts]


def _written_part(part: Part) -> Any:
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
    """Return the structural tag that `write_tag` wrote. Raises InvalidRequest for any other text."""
    try:
        given = json.loads(text)
        tokens = {int(token): str(written) for token, written in given["tokens"].items()}
        return StructuralTag(_read(given["parts"]), tokens)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise refuse("structural_tag is malformed") from None


def _read(given: Any) -> tuple[Part, ...]:
    return tuple(_read_part(one) for one in given)


def _read_part(given: Any) -> Part:
    if isinstance(given, str):
        return given
    found = cast("dict[str, Any]", given)
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
    """Return the vocabulary in which these tokens have their texts. Tokens that have a text keep it, and
    tokens that the vocabulary does not contain are ignored.
    """
    known = list(vocabulary.bytes)
    for token, text in tokens.items():
        if 0 <= token < len(known) and known[token] is None:
            known[token] = text.encode()
    return vocabulary if tuple(known) == vocabulary.bytes else describe(known)


def lark_of_tag(tag: StructuralTag, json_style: Mapping[str, Any]) -> str:
    """Return the rules of a structural tag in the library's dialect of Lark; the first one is `start`.

    json_style: the library's options of JSON values. Raises InvalidRequest if a schema is invalid.
    """
    writer = _LarkWriter(json_style)
    start = writer.sequence(tag.parts)
    return "\n".join([f"start: {start}", *writer.rules])


class _LarkWriter:
    """Collects the rules of a structural tag.

    rules: all rules except `start`.
    """

    def __init__(self, json_style: Mapping[str, Any]) -> None:
        self.rules: list[str] = ["ANY: /(?s:.*)/"]
        self._style = json_style
        self._names: dict[FreeText, str] = {}

    def sequence(self, parts: Sequence[Part]) -> str:
        """Return the expression of parts that follow each other."""
        return " ".join(self._expression(part) for part in joined(parts)) or '""'

    def _expression(self, part: Part) -> str:
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
        """Add a rule, and return its name."""
        name = f"rule{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _json(self, schema: Mapping[str, Any] | bool) -> str:
        closed = read_enforceable(json.dumps(schema))
        return json.dumps({**(closed if isinstance(closed, dict) else {}), "x-guidance": self._style})

    def _free_text(self, part: FreeText) -> str:
        """Return the name of a rule. It is lazy, so it matches up to the first end of the text."""
        if part not in self._names:
            name = f"text{len(self._names)}"
            counted = part.max_length is not None and part.max_length <= MAX_COUNTED_LENGTH
            most = part.max_length if counted else ""
            bounds = f"/(?s:.{{{min(part.min_length, MAX_COUNTED_LENGTH)},{most}}})/"
            excluded = " | ".join(map(json.dumps, part.excluded))
            body = f"({bounds} & ~(ANY ({excluded}) ANY))" if excluded else bounds
            self.rules.append(f"{name.upper()}: {body} {json.dumps(part.end)}")
            self.rules.append(f"{name}[lazy]: {name.upper()}")
            self._names[part] = name
        return self._names[part]

    def _members(self, members: Sequence[tuple[tuple[Part, ...], bool]], between: str) -> str:
        """Return the expression of members. From the last to the first, two rules say what may follow: one
        if a member precedes, so that `between` must be written, and one if none does.
        """
        first = later = '""'
        separator = json.dumps(between) if between else ""
        for parts, required in reversed(members):
            one = self._rule(f"{self.sequence(parts)} {later}")
            first, later = (
                self._rule(_either(one, first, required)),
                self._rule(_either(f"{separator} {one}", later, required)),
            )
        return first


def _either(present: str, absent: str, required: bool) -> str:
    return present if required else f"{present} | {absent}"


def joined(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield the parts. Fixed texts that follow each other are one part, and empty texts are left out."""
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


@dataclass(frozen=True, slots=True)
class Exits:
    """Fixed texts that lead to the end of the answer, ordered from its end to its beginning.

    outside: texts that may follow a value or an optional part.
    of_free_text: the ends of free texts.

        '<f=add>' Members(a, optional b) '</f>', between "," -> outside ("</f>",);
        b is required -> outside ("</f>", ",b=", "b=")
    """

    outside: tuple[str, ...]
    of_free_text: tuple[str, ...]


def exits_of(tag: StructuralTag) -> Exits:
    """Return the exits of a structural tag."""
    collector = _ExitCollector()
    collector.collect(tag.parts, "")
    return Exits(tuple(dict.fromkeys(collector.outside)), tuple(dict.fromkeys(collector.of_free_text)))


class _ExitCollector:
    """Collects the exits of parts; see `Exits`."""

    def __init__(self) -> None:
        self.outside: list[str] = []
        self.of_free_text: list[str] = []

    def collect(self, parts: Sequence[Part], follows: str) -> str:
        """Add the exits within `parts`. Return the fixed text with which the parts begin, if they begin with
        fixed text, else what may follow their first part.

        follows: the fixed text after the parts; empty if there is none.
        """
        for part in reversed(list(joined(parts))):
            if isinstance(part, str):
                follows = part
                continue
            self.outside += [follows] if follows else []
            match part:
                case OneTag(choices):
                    for choice in choices:
                        self.collect(choice, follows)
                case Members(members, between):
                    self._collect_members(members, between, follows)
                case Repeat(repeated, _, _):
                    self.collect(repeated, follows)
                case FreeText(end):
                    self.of_free_text.append(end)
                case _:
                    pass
        return follows

    def _collect_members(
        self, members: Sequence[tuple[tuple[Part, ...], bool]], between: str, follows: str
    ) -> None:
        for parts, required in reversed(members):
            begins = self.collect(parts, follows)
            if required:
                follows = between + begins
                self.outside += [follows, begins]
