"""Makes restrictions of property names in JSON schemas enforceable: `patternProperties` and `propertyNames`.

The compiler intersects a pattern's schema with those of the declared properties that it matches. But it
cannot continue where a pattern matches nothing else, and it refuses two patterns that match the same name.
It does not know `propertyNames` and `unevaluatedProperties`, most uses of which other keywords can express.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, cast

from llguidance import LLMatcher, LLTokenizer

from specsot.grammar.schemas import Json, every_schema, is_composed, read_schema, resolved, values_of

# Keywords that describe a schema and restrict nothing.
_ANNOTATIONS = frozenset(("$comment", "default", "deprecated", "description", "examples", "title"))


def read_enforceable(text: str) -> Json | bool:
    """Return what `read_schema` returns, with `patternProperties` that the compiler can enforce.

    Raises InvalidRequest as `read_schema` does. A pattern that cannot be compiled is left to the compiler.
    """
    schema = read_schema(text)
    if isinstance(schema, dict):
        for one in list(every_schema(schema)):
            _express_names(one, schema)
            if isinstance(one.get("patternProperties"), dict):
                _settle(one)
    return schema


def _express_names(schema: Json, root: Json) -> None:
    """Replace `propertyNames` and `unevaluatedProperties` by keywords that the compiler knows. What cannot be
    expressed stays, and the compiler refuses it by name.

        propertyNames {"type": "string"}                          -> nothing
        propertyNames {"enum": ["a"]}, additionalProperties P     -> properties {"a": P} and no others
        propertyNames {"pattern": "^a"}, additionalProperties P   -> patternProperties {"^a": P} and no others

    root: the whole schema, at whose top references begin.
    """
    if "unevaluatedProperties" in schema and not (is_composed(schema) or "$ref" in schema):
        unevaluated = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", unevaluated)
    given = {} if schema.get("propertyNames") is True else schema.get("propertyNames")
    declared = schema.get("properties", {})
    if not isinstance(given, dict) or not isinstance(declared, dict):
        return
    rules = {key: rule for key, rule in resolved(given, root).items() if key not in _ANNOTATIONS}
    if rules.pop("type", "string") != "string":
        return
    properties = cast(Json, declared)
    others = schema.get("additionalProperties", True)
    allowed = values_of(rules)
    pattern = rules.get("pattern")
    if rules and (len(rules) > 1 or "patternProperties" in schema):
        return
    if allowed is not None:
        names = [name for name in allowed if isinstance(name, str)]
        schema["properties"] = {name: properties.get(name, others) for name in names}
        schema["additionalProperties"] = False
    elif isinstance(pattern, str) and _compiles(pattern):
        kept = {name: one if _matches(pattern, name) else False for name, one in properties.items()}
        schema |= {"properties": kept, "patternProperties": {pattern: others}, "additionalProperties": False}
    elif rules:
        return
    del schema["propertyNames"]


def _settle(schema: Json) -> None:
    """Rewrite the patterns of one schema. Answers that the new schema allows are allowed by the old one, too.

        properties {"a": A}, patternProperties {"^a$": P}   -> properties {"a": A and P}
        patternProperties {"^a": P, "z$": Q}                -> patternProperties {"(?:^a)|(?:z$)": P and Q}

    If two patterns share names, and one of them matches a declared property, neither is kept, and the object
    gets no undeclared properties: the compiler would apply both to the declared property.
    """
    declared = schema.get("properties", {})
    patterns = cast("dict[str, Any]", schema["patternProperties"])
    if not isinstance(declared, dict) or not all(map(_compiles, patterns)):
        return
    properties = cast(Json, dict(cast(Json, declared)))
    matched = {pattern: [name for name in properties if _matches(pattern, name)] for pattern in patterns}
    kept: Json = {}
    for group in _overlapping(list(patterns)):
        alone = len(group) == 1
        if not any(matched[pattern] for pattern in group):
            kept["|".join(group if alone else map("(?:{})".format, group))] = _all_of(
                [patterns[pattern] for pattern in group]
            )
        elif alone and _matches_others(group[0], matched[group[0]]):
            kept[group[0]] = patterns[group[0]]
            matched[group[0]] = []  # The compiler intersects this pattern's schema by itself.
        elif not alone:
            schema["additionalProperties"] = False
    for pattern, names in matched.items():
        for name in names:
            properties[name] = _all_of([properties[name], patterns[pattern]])
    schema |= {"properties": properties, "patternProperties": kept}
    for keyword in ("properties", "patternProperties"):
        if not schema[keyword]:
            del schema[keyword]


def _all_of(schemas: Sequence[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)}


def _overlapping(patterns: Sequence[str]) -> list[list[str]]:
    """Return the patterns in groups. Patterns of different groups match no common name."""
    groups: list[list[str]] = []
    for pattern in patterns:
        near = [group for group in groups if any(_share_names(pattern, other) for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), pattern])
    return groups


def _share_names(one: str, other: str) -> bool:
    return "not disjoint" in _matcher({one: True, other: True}).get_error()


def _compiles(pattern: str) -> bool:
    return not _matcher({pattern: True}).is_error()


def _matches(pattern: str, name: str) -> bool:
    """Return whether the pattern matches a property's name."""
    return _accepts(_matcher({pattern: True}), "{" + json.dumps(name, ensure_ascii=False))


def _matches_others(pattern: str, names: Sequence[str]) -> bool:
    """Return whether the pattern matches any name besides these, all of which it matches."""
    matcher = _matcher({pattern: True}, names)
    written = ",".join(f"{json.dumps(name, ensure_ascii=False)}:0" for name in names)
    return _accepts(matcher, "{" + written + ',"')


def _accepts(matcher: LLMatcher, text: str) -> bool:
    """Return whether a text may begin with `text`. False if the matcher fails on the way."""
    raw = list(text.encode())
    return matcher.validate_tokens(raw) == len(raw)


def _matcher(patterns: Json, names: Sequence[str] = ()) -> LLMatcher:
    """Return a matcher of objects with properties of these patterns, after integers of these names."""
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "patternProperties": patterns,
        "additionalProperties": False,
    }
    return LLMatcher(_bytes_tokenizer(), LLMatcher.grammar_from_json_schema(schema), log_level=0)


@functools.cache
def _bytes_tokenizer() -> LLTokenizer:
    """Return a tokenizer whose tokens are the bytes."""
    return LLTokenizer("byte")
