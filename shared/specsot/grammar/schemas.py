"""Reads JSON schemas, closes their objects, and removes keywords that a grammar cannot enforce.

Objects are closed as in OpenAI's strict mode and in XGrammar. Only keywords whose violation does no harm are
removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from specsot.params import refuse

Json = dict[str, Any]

# The keywords whose value is a schema, a list of schemas, or schemas by name. `not` and `contains` are left
# out, because their schemas describe what an answer is not, or only a part of it.
_ONE = ("additionalProperties", "else", "if", "items", "then")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# Keywords that, in addition to `properties`, declare further properties, and keywords that allow undeclared
# ones.
_JOINED = ("$ref", "allOf", "anyOf", "dependentSchemas", "if", "oneOf")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")


# Formats that a grammar enforces. According to JSON Schema, any other format only describes a value.
_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
UNIQUE_ITEMS = "uniqueItems is not enforced: an array of the answer may repeat items"
ONE_OF = "oneOf is read as anyOf: a value of the answer may match several of its schemas"


def read_schema(text: str) -> Json | bool:
    """Return a schema with its objects closed.

    Raises InvalidRequest if the text is no JSON, if it is no schema, or if the schema allows nothing.
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
    """Return one sentence for each keyword of a schema that is not enforced."""
    found: list[str] = []
    for one in every_schema(schema):
        if one.get("uniqueItems") is True:
            found.append(UNIQUE_ITEMS)
        choices = one.get("oneOf")
        if isinstance(choices, list) and not _exclude_each_other(cast("list[Any]", choices), schema):
            found.append(ONE_OF)
    return tuple(dict.fromkeys(found))


def _relax(schema: Json) -> None:
    """Remove uniqueItems and unknown formats. An option makes the compiler treat `oneOf` as `anyOf`."""
    for one in every_schema(schema):
        one.pop("uniqueItems", None)
        known = one.get("format")
        if not isinstance(known, str) or known not in _FORMATS:
            one.pop("format", None)


def _exclude_each_other(choices: list[Any], root: Json) -> bool:
    """Return whether certainly no value matches two of these schemas, by their types and constants."""
    schemas = [resolved(one, root) for one in choices]
    return all(_are_apart(one, other) for n, one in enumerate(schemas) for other in schemas[:n])


def _are_apart(one: Json, other: Json) -> bool:
    """Return whether certainly no value matches both schemas."""
    types = _types(one)
    others = _types(other)
    if types and others and not types & others and {"integer", "number"} != types | others:
        return True
    values, their_values = values_of(one), values_of(other)
    if values is not None and their_values is not None:
        return not any(value in their_values for value in values)
    properties, theirs = one.get("properties"), other.get("properties")
    if not (isinstance(properties, dict) and isinstance(theirs, dict)):
        return False
    required = strings(one.get("required")) & strings(other.get("required"))
    shared = (name for name in properties if name in theirs and name in required)
    parts = ((properties[name], theirs[name]) for name in shared)
    return any(isinstance(a, dict) and isinstance(b, dict) and _are_apart(a, b) for a, b in parts)


def _types(schema: Json) -> set[str]:
    declared = schema.get("type")
    return {declared} if isinstance(declared, str) else strings(declared)


def strings(given: Any) -> set[str]:
    return set(map(str, cast("list[Any]", given))) if isinstance(given, list) else set()


def values_of(schema: Json) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return cast("list[Any]", schema["enum"]) if isinstance(schema.get("enum"), list) else None


def resolved(schema: Any, root: Json) -> Json:
    """Return a schema, or the schema that its reference within the document names; {} if there is none."""
    here: Any = schema
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        here = root
        for part in cast(str, schema["$ref"]).split("/")[1:]:
            here = cast(Json, here).get(part) if isinstance(here, dict) else None
    return cast(Json, here) if isinstance(here, dict) else {}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _close(schema: Json) -> None:
    """Forbid undeclared properties in objects that declare properties and do not mention others.

    A grammar cannot remember names, so that it would let a model write an undeclared property any number of
    times. If any object of the schema is composed of several parts, no object is closed, because each part
    would forbid the properties that the other parts declare.
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
    parts = schema.get("allOf")
    several = isinstance(parts, list) and len(cast("list[Any]", parts)) > 1
    return several or ("properties" in schema and any(name in schema for name in _JOINED))


def every_schema(schema: Json) -> Iterator[Json]:
    """Yield a schema and all schemas in it, without recursion, because clients may nest them deeply."""
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        yield cast(Json, one)
        waiting += (one.get(name) for name in _ONE)
        for name in _LISTED:
            waiting += cast("list[Any]", one[name]) if isinstance(one.get(name), list) else ()
        for name in _NAMED:
            waiting += cast(Json, one[name]).values() if isinstance(one.get(name), dict) else ()
