"""Reads JSON schemas, closes their objects, and removes keywords that a grammar cannot enforce.

Objects are closed as in OpenAI's strict mode and in XGrammar. Only keywords whose violation does no harm are
removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from specsot.params import refuse

Json = dict[str, Any]

# The keywords whose value is a schema or a list of schemas, those of OTHER_KEYWORDS left out.
_KEYWORDS = ("additionalProperties", "allOf", "anyOf", "else", "if", "items", "oneOf", "prefixItems", "then")
# Further ones, whose schemas describe what an answer is not, or only a part of it, or restrict its names.
OTHER_KEYWORDS = ("contains", "not", "propertyNames", "unevaluatedProperties")
# The keywords whose value is schemas by name.
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# Keywords that, in addition to `properties`, declare further properties, and keywords that allow undeclared
# ones.
_JOINED = ("$ref", "allOf", "anyOf", "dependentSchemas", "if", "oneOf")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")


# Formats that a grammar enforces. According to JSON Schema, any other format only describes a value.
_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
# Warning for a keyword that is removed, because a grammar cannot remember the items of an array.
UNIQUE_ITEMS = "uniqueItems is not enforced: an array of the answer may repeat items"
# Warning for a keyword that the compiler treats as `anyOf`.
ONE_OF = "oneOf is read as anyOf: a value of the answer may match several of its schemas"


def read_schema(text: str) -> Json | bool:
    """Return a schema with its objects closed. The schema `true` is returned as True.

    text: the JSON schema as the client sent it.

    Raises InvalidRequest if the text is no JSON or nested too deeply, if it is no schema, or if the schema
    allows nothing.

    Keywords that a grammar cannot enforce (uniqueItems, unknown formats) are removed, also from nested
    schemas. `false` allows nothing and raises InvalidRequest. NaN and Infinity are no JSON.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise refuse("json_schema is nested too deeply") from None
    except ValueError as error:
        raise refuse(f"json_schema is not JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise refuse("json_schema must be a JSON object")
    if schema is False:
        raise refuse("json_schema allows nothing")
    if isinstance(schema, dict):
        _relax(cast(Json, schema))
        _close(cast(Json, schema))
    return cast("Json | bool", schema)


def warnings_of(schema: Json) -> tuple[str, ...]:
    """Return one sentence for each keyword of a schema that is not enforced. Empty if all of them are.

    schema: the schema as the client sent it.

    Each sentence is returned once. The sentences are UNIQUE_ITEMS, for a `uniqueItems` of true, and ONE_OF,
    for a `oneOf` whose schemas do not certainly exclude each other.
    """
    found: list[str] = []
    for one in every_schema(schema):
        if one.get("uniqueItems") is True:
            found.append(UNIQUE_ITEMS)
        choices = one.get("oneOf")
        if isinstance(choices, list) and not _exclude_each_other(cast("list[Any]", choices), schema):
            found.append(ONE_OF)
    return tuple(dict.fromkeys(found))


def _relax(schema: Json) -> None:
    """Remove uniqueItems and unknown formats from a schema and all schemas in it, in place.

    `oneOf` stays, because an option makes the compiler treat it as `anyOf`.

    schema: the parsed schema.

    A format that is no text is removed as well.
    """
    for one in every_schema(schema):
        one.pop("uniqueItems", None)
        known = one.get("format")
        if not isinstance(known, str) or known not in _FORMATS:
            one.pop("format", None)


def _exclude_each_other(choices: list[Any], root: Json) -> bool:
    """Return whether certainly no value matches two of these schemas, by their types, constants and
    properties.

    choices: the schemas of a `oneOf`. True if there are fewer than two.
    root: the whole schema, in which references are resolved.
    """
    schemas = [resolved(choice, root) for choice in choices]
    return all(_are_apart(choice, earlier) for n, choice in enumerate(schemas) for earlier in schemas[:n])


def _are_apart(first: Json, second: Json) -> bool:
    """Return whether certainly no value matches both schemas. False if this is not certain.

    They are apart if they have no type in common, no constant in common, or a property that both require and
    whose schemas are apart. An integer is a number, so these two types are not apart.

    first: a schema.
    second: another schema.

    Keywords other than types, constants, properties and required names are ignored. Types decide first: True
    if they differ. Then, if both schemas list their values, these alone decide; otherwise the properties do.
    """
    types = types_of(first)
    second_types = types_of(second)
    if types and second_types and not types & second_types and {"integer", "number"} != types | second_types:
        return True
    values, second_values = values_of(first), values_of(second)
    if values is not None and second_values is not None:
        return not any(value in second_values for value in values)
    properties, second_properties = first.get("properties"), second.get("properties")
    if not (isinstance(properties, dict) and isinstance(second_properties, dict)):
        return False
    required = strings(first.get("required")) & strings(second.get("required"))
    shared = (name for name in properties if name in second_properties and name in required)
    parts = ((properties[name], second_properties[name]) for name in shared)
    return any(isinstance(a, dict) and isinstance(b, dict) and _are_apart(a, b) for a, b in parts)


def types_of(schema: Json) -> set[str]:
    """Return the types that a schema declares; empty if it declares none.

    schema: the schema.
    """
    declared = schema.get("type")
    return {declared} if isinstance(declared, str) else strings(declared)


def strings(names: Any) -> set[str]:
    """Return the elements of a list as strings; empty for any other value.

    names: the value of a keyword, of any type.
    """
    return set(map(str, cast("list[Any]", names))) if isinstance(names, list) else set()


def values_of(schema: Json) -> list[Any] | None:
    """Return the values that a schema lists by `const` or `enum`, or None if it lists none.

    schema: the schema.
    """
    if "const" in schema:
        return [schema["const"]]
    return cast("list[Any]", schema["enum"]) if isinstance(schema.get("enum"), list) else None


def resolved(schema: Any, root: Json) -> Json:
    """Return a schema, or the schema that its reference within the document names; {} if there is none, and
    for `true` and `false`.

    schema: the schema, as the client sent it.
    root: the whole schema, in which the reference is resolved.

    A reference is followed once; a schema that it names may have a reference again. A reference to another
    document names nothing in this one, which gives {}.
    """
    target: Any = schema
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        target = root
        for part in cast(str, schema["$ref"]).split("/")[1:]:
            target = cast(Json, target).get(part) if isinstance(target, dict) else None
    return cast(Json, target) if isinstance(target, dict) else {}


def _refuse_constant(name: str) -> Any:
    """Raise ValueError for a constant that Python's JSON reader would accept.

    name: "NaN", "Infinity" or "-Infinity".
    """
    raise ValueError(f"{name} is no JSON number")


def _close(schema: Json) -> None:
    """Forbid undeclared properties, in place, in objects that declare properties and do not mention others.

    A grammar cannot remember names, so that it would let a model write an undeclared property any number of
    times. If any object of the schema is composed of several parts, no object is closed, because each part
    would forbid the properties that the other parts declare. Objects that require an undeclared property are
    not closed either.

    schema: the parsed schema.

    Objects that mention additionalProperties, patternProperties or unevaluatedProperties stay open.
    """
    found = list(every_schema(schema))
    if any(map(is_composed, found)):
        return
    for one in found:
        declared, required = one.get("properties"), one.get("required", [])
        if not isinstance(declared, dict) or any(name in one for name in _OPEN):
            continue
        if isinstance(required, list) and all(str(name) in declared for name in cast("list[Any]", required)):
            one["additionalProperties"] = False


def is_composed(schema: Json) -> bool:
    """Return whether an object may have properties that other parts of its schema declare. False for schemas
    of other values.

    This is so with several schemas in `allOf`, or with `properties` and a keyword that refers to further
    schemas.

    schema: the schema of the object.
    """
    parts = schema.get("allOf")
    several = isinstance(parts, list) and len(cast("list[Any]", parts)) > 1
    return several or ("properties" in schema and any(name in schema for name in _JOINED))


def every_schema(schema: Any, other_keywords: Sequence[str] = ()) -> Iterator[Json]:
    """Yield a schema and all schemas in it, without recursion, because clients may nest them deeply.

    schema: the parsed schema. `true` and `false` in it are not yielded; what is no object yields nothing.
    other_keywords: OTHER_KEYWORDS, or () if the schemas of these keywords are left out.

    Parts of a wrong type are skipped. The order is not that of the text.
    """
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        found = cast(Json, one)
        yield found
        for name in (*_KEYWORDS, *other_keywords):
            part = found.get(name)
            waiting += cast("list[Any]", part) if isinstance(part, list) else [part]
        for name in _NAMED:
            waiting += cast(Json, found[name]).values() if isinstance(found.get(name), dict) else ()
