"""Reads JSON schemas, and closes their objects as OpenAI's strict mode and XGrammar do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from specsot.params import refuse

Json = dict[str, Any]

# Where a schema holds further ones: one, a list of them, or some by name. `not` and `contains` are left out:
# what they hold describes what an answer is not, or only a part of it.
_ONE = ("additionalProperties", "else", "if", "items", "then")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# Beside `properties` these add some that are declared elsewhere, or say what others there may be.
_JOINED = ("$ref", "allOf", "anyOf", "dependentSchemas", "if", "oneOf")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")


def read_schema(text: str) -> Json | bool:
    """The schema, its objects closed. Raises InvalidRequest for what is no JSON, or allows nothing."""
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
        _close(cast(Json, schema))
    return cast("Json | bool", schema)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _close(schema: Json) -> None:
    """Objects that declare properties, and do not mention others, have no others: a grammar cannot remember
    names, so it would let a model write one of its own any number of times.

    Objects that are composed of several parts are left as they are, all of them: each part would forbid
    what the others declare.
    """
    found = list(_every(schema))
    if any(map(_is_composed, found)):
        return
    for one in found:
        declared, required = one.get("properties"), one.get("required", [])
        if not isinstance(declared, dict) or any(name in one for name in _OPEN):
            continue
        if isinstance(required, list) and all(str(name) in declared for name in cast("list[Any]", required)):
            one["additionalProperties"] = False


def _is_composed(schema: Json) -> bool:
    parts = schema.get("allOf")
    several = isinstance(parts, list) and len(cast("list[Any]", parts)) > 1
    return several or ("properties" in schema and any(name in schema for name in _JOINED))


def _every(schema: Json) -> Iterator[Json]:
    """The schema and those in it; without recursion, since clients nest them as deeply as they like."""
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
