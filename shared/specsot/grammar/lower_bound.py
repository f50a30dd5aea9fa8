"""Computes how many tokens every answer of a JSON schema or of a structural tag needs at least.

The bound is the sum over pieces of the answer that do not overlap, such as the name of a required property:
of each piece, the tokens that surely begin within it. A token that covers parts of two pieces counts once,
where it begins. What is not understood counts 0.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

from specsot.core.vocabulary import Vocabulary, spelling_of
from specsot.grammar.schemas import Json, resolved, strings, types_of, values_of
from specsot.grammar.structural_tag import FreeText, JsonPart, Members, OneTag, Part, Repeat

# Bytes. Of a longer text, only the beginning counts, which bounds the time: 55 KB took 1.6 s of processor
# time with tokens of up to 128 bytes. Budgets above 512 tokens are not checked at all. Untuned.
_MAX_TEXT: Final = 1024
# Stands between two tokens where text is searched in all of them.
_SEPARATOR: Final = b"\xff\xfe"


class LowerBound:
    """Lower bounds of the number of tokens that spell texts and JSON values, for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Sort the tokens, so that beginnings and ends of them are found.

        vocabulary: the bytes of every token id.
        """
        self._ids = spelling_of(vocabulary).ids
        self._sorted = sorted(self._ids)
        # Without their first bytes, because a token that begins within a piece counts there. The ends are
        # reversed: the token "abc" gives "cb".
        self._ends = sorted(text[:0:-1] for text in self._ids)
        self._joined = _SEPARATOR.join(text[1:] for text in self._sorted)
        self._longest = max(map(len, self._ids), default=1)
        # The bound of each object of the schema that is being read, by the object's `id`.
        self._found: dict[int, int] = {}

    def of_text(self, text: str) -> int:
        """Return how many tokens at least begin within a text, whatever comes before and after it.

        text: a text that the answer contains. With the tokens a, b and ab, 2 tokens begin in "aab". With a
            token xa in addition, it is 1: the first a may be the end of a token that begins before the text.
        """
        piece = text.encode()[:_MAX_TEXT]
        if piece in self._joined:
            return 0
        # The number of tokens that begin in the piece from each byte on, if one begins at that byte.
        counts = [0] * (len(piece) + 1)
        for begin in range(len(piece) - 1, -1, -1):
            if _begins_one(self._sorted, piece[begin:]):
                counts[begin] = 1
                continue
            stops = range(begin + 1, min(begin + self._longest, len(piece)) + 1)
            tails = (counts[stop] for stop in stops if piece[begin:stop] in self._ids)
            counts[begin] = 1 + min(tails, default=len(piece))
        last = min(self._longest, len(piece))
        return min(
            counts[begin]
            for begin in range(last)
            if not begin or _begins_one(self._ends, piece[:begin][::-1])
        )

    def of_parts(self, parts: Iterable[Part]) -> int:
        """Return how many tokens at least begin within parts of a structural tag that follow each other.

        parts: the parts. A regular expression counts 0.
        """
        return sum(map(self._of_part, parts))

    def _of_part(self, part: Part) -> int:
        """Return how many tokens at least begin within one part of a structural tag.

        part: the part. Texts between members and repetitions count 0.
        """
        match part:
            case str():
                return self.of_text(part)
            case JsonPart(schema):
                return self.of_schema(schema)
            case FreeText():
                return part.min_length // self._longest + self.of_text(part.end)
            case OneTag(choices):
                return min(map(self.of_parts, choices), default=0)
            case Members(members):
                return sum(self.of_parts(parts) for parts, is_required in members if is_required)
            case Repeat(parts):
                return self.of_parts(parts)
            case _:
                return 0

    def of_schema(self, schema: Any) -> int:
        """Return how many tokens at least begin within a JSON value of a schema.

        schema: the parsed JSON schema; `true` allows any value, which counts 0.
        """
        self._found = {}
        return self._of_value(schema, schema)

    def _of_value(self, schema: Any, root: Any) -> int:
        """Return how many tokens at least begin within a JSON value of a schema.

        schema: a schema within the whole one. What is no object counts 0.
        root: the whole schema, in which references are resolved.

        All keywords hold for the value, so that the largest of their bounds is returned. A schema that
        contains itself counts 0 within itself.
        """
        if not isinstance(schema, dict):
            return 0
        found = cast(Json, schema)
        if id(found) not in self._found:
            self._found[id(found)] = 0
            self._found[id(found)] = max(self._of_keywords(found, root))
        return self._found[id(found)]

    def _of_keywords(self, schema: Json, root: Any) -> Iterable[int]:
        """Yield a lower bound for each keyword of a schema that is understood, and 0.

        schema: the schema.
        root: the whole schema, in which references are resolved.
        """
        yield 0
        if "$ref" in schema:
            yield self._of_value(resolved(schema, root), root)
        yield from (self._of_value(part, root) for part in _listed(schema, "allOf"))
        for keyword in ("anyOf", "oneOf"):
            yield min((self._of_value(part, root) for part in _listed(schema, keyword)), default=0)
        values = values_of(schema)
        if values:
            yield min(self.of_text(_spelled(value)) if isinstance(value, str) else 0 for value in values)
        match sorted(types_of(schema)):
            case ["string"]:
                yield _count(schema, "minLength") // self._longest
            case ["array"]:
                first = _listed(schema, "prefixItems")[: (num_items := _count(schema, "minItems"))]
                others = (num_items - len(first)) * self._of_value(schema.get("items"), root)
                yield others + sum(self._of_value(item, root) for item in first)
            case ["object"]:
                given = schema.get("properties")
                declared = cast(Json, given) if isinstance(given, dict) else {}
                yield sum(
                    self.of_text(_spelled(name)) + self._of_value(declared.get(name), root)
                    for name in strings(schema.get("required"))
                )
            case _:
                pass


def _begins_one(texts: Sequence[bytes], beginning: bytes) -> bool:
    """Return whether one of some texts begins with the given bytes.

    texts: the texts, sorted.
    beginning: the bytes.
    """
    place = bisect_left(texts, beginning)
    return place < len(texts) and texts[place].startswith(beginning)


def _listed(schema: Json, keyword: str) -> list[Any]:
    """Return the value of a keyword if it is a list; otherwise an empty list.

    schema: the schema.
    keyword: the name of the keyword.
    """
    value = schema.get(keyword)
    return cast("list[Any]", value) if isinstance(value, list) else []


def _count(schema: Json, keyword: str) -> int:
    """Return the value of a keyword if it is a whole number; otherwise 0.

    schema: the schema.
    keyword: the name of the keyword.
    """
    value = schema.get(keyword)
    return value if isinstance(value, int) else 0


def _spelled(text: str) -> str:
    """Return a text as a JSON string, with as few characters as possible.

    text: the text.
    """
    return json.dumps(text, ensure_ascii=False)
