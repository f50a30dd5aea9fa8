"""JSON schemas of functions: what forced calls are restricted to, and whether arguments satisfy a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from specsot.grammar.schemas import OTHER_KEYWORDS, every_schema
from specsot_master.core.dialects.tool_calls.arguments import Json, read_arguments, rewritten
from specsot_master.core.dialects.tool_calls.forms import CallForm

# References in a chain, and schemas inside each other. A longer chain of references counts as circular.
MAX_REFERENCES: Final = 32
# Keywords that compose a schema from a list of schemas.
_COMPOSED: Final = ("anyOf", "oneOf", "allOf")


def parameters_of(function: Mapping[str, Any]) -> Json:
    """Return the JSON schema of a function's arguments. A function that declares no parameters takes none.
    The schema is then a closed, empty object, also if the declared one has only a type, a title or a
    description. Any other schema is copied, with the type "object" if it names none.

    function: the function in OpenAI's format.
    """
    declared = cast("Json | None", function.get("parameters"))
    if not declared:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    bare = set(declared) <= {"type", "title", "description", "$schema"}
    none = {"properties": {}, "additionalProperties": False} if bare else {}
    return {"type": "object", **declared, **none}


def arguments_schema(functions: Sequence[Json], name: str) -> Json:
    """Return the JSON schema of the arguments of one function.

    functions: the offered functions, in OpenAI's format.
    name: the name of the function.

    Raises StopIteration if no function has this name.
    """
    return next(parameters_of(one) for one in functions if one["name"] == name)


def calls_schema(functions: Sequence[Json], max_calls: int | None, form: CallForm) -> Json:
    """Return the JSON schema of a list of 1 to `max_calls` calls of any of the functions. `$defs` holds the
    schemas of the arguments under "arguments0", "arguments1" and so on, in the order of the functions.

    functions: the offered functions, in OpenAI's format.
    max_calls: the maximum number of calls of the list; None for the schema of one call that is not in a list.
    form: how the model writes calls, which gives the names of the members.
    """
    places = [f"arguments{n}" for n in range(len(functions))]
    calls = [_call_schema(one["name"], place, form) for one, place in zip(functions, places)]
    schemas = {place: moved(parameters_of(one), f"#/$defs/{place}") for one, place in zip(functions, places)}
    if max_calls is None:
        return {"anyOf": calls, "$defs": schemas}
    bounds = {"minItems": 1, "maxItems": max_calls}
    return {"type": "array", "items": {"anyOf": calls}, **bounds, "$defs": schemas}


def _call_schema(name: str, place: str, form: CallForm) -> Json:
    """Return the JSON schema of one call of a function. Both members are required, and no others are allowed.

    name: the function's name.
    place: the name of its arguments' schema in `$defs`.
    form: how the model writes calls, which gives the names of the members.
    """
    members = {form.name_key: {"const": name}, form.arguments_key: {"$ref": f"#/$defs/{place}"}}
    return {
        "type": "object",
        "properties": members,
        "required": list(members),
        "additionalProperties": False,
    }


def moved(schema: Json, root: str) -> Json:
    """Return a copy of a JSON schema with its references changed so that it can be placed within another
    schema. References into other documents stay as they are. "$id" and "$schema" are removed at the top.

        root "#/$defs/arguments0": "#/$defs/Value" -> "#/$defs/arguments0/$defs/Value", "#" -> root

    schema: the schema, whose references begin at its own top.
    root: the place within the other schema, as a reference.
    """
    copied = cast(Json, json.loads(json.dumps(schema)))
    # These keywords name a document, and the schema no longer is one.
    for key in ("$id", "$schema"):
        copied.pop(key, None)
    for one in every_schema(copied, OTHER_KEYWORDS):
        for key in ("$ref", "$dynamicRef"):
            if isinstance(one.get(key), str) and (one[key] == "#" or one[key].startswith("#/")):
                one[key] = root + one[key][1:]
    return copied


def resolved(schema: Any, root: Json) -> Json:
    """Return the JSON schema that a chain of references leads to, or {} if it leads nowhere or is longer than
    MAX_REFERENCES. A schema that is no object, such as True, gives {}. Members next to a "$ref" are ignored.

    schema: a schema that may be a reference.
    root: the whole schema, at whose top references begin.
    """
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = cast(Json, schema).get("$ref")
        if not isinstance(reference, str):
            return cast(Json, schema)
        schema = _follow(reference, root)
    return {}


def _follow(reference: str, root: Json) -> Any:
    """Return what a reference such as "#/$defs/Value" leads to, or None if it leads nowhere or into another
    document. Escapes ~1 and ~0 are decoded, and a number selects a member of a list. Return None also for a
    missing member and an index beyond the list.

    reference: the reference, as the schema has it; "#" is the whole schema.
    root: the whole schema, at whose top references begin.
    """
    target: Any = root if reference.startswith("#") else None
    for part in reference.lstrip("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = cast(Json, target).get(name)
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(cast("list[Any]", target)):
            target = cast("list[Any]", target)[int(name)]
        else:
            return None
    return target


# The classes of decoded values, by the name of the JSON type.
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def fits(value: Any, schema: Any, root: Json, depth: int = 0) -> bool:
    """Return True if a value satisfies a JSON schema in types, members, items, enums and compositions. An
    empty list of "anyOf" or "oneOf" permits everything, and "oneOf" is read like "anyOf". Items are checked
    only if "items" is one schema.

    Bounds, patterns and formats are not checked: this decides whether a text is a call, not whether the call
    is right.

    value: a decoded JSON value.
    schema: the schema; whatever is no object permits everything, except False, which permits nothing.
    root: the whole schema, at whose top references begin.
    depth: how many schemas are nested around this one; beyond MAX_REFERENCES everything is permitted.
    """
    if depth > MAX_REFERENCES or not isinstance(schema, dict):
        return schema is not False
    schema = resolved(schema, root)
    if not _has_type(value, schema.get("type")):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return False
    for key in _COMPOSED:
        if isinstance(schema.get(key), list):
            found = [fits(value, one, root, depth + 1) for one in schema[key]]
            if not (all(found) if key == "allOf" else any(found) or not found):
                return False
    if isinstance(value, dict):
        return _members_fit(cast(Json, value), schema, root, depth)
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return all(fits(one, schema["items"], root, depth + 1) for one in cast("list[Any]", value))
    return True


def _has_type(value: Any, declared: Any) -> bool:
    """Return True if the value has one of the declared types, or if no types are declared. 3.0 is an integer;
    True is no number. An empty list of types permits nothing; a "type" that is neither a name nor a list
    permits everything.

    value: a decoded JSON value.
    declared: the schema's "type": a name, a list of names, or None. Unknown names permit everything.
    """
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list):
        return True
    for name in cast("list[Any]", names):
        kinds = _TYPES.get(name, (object,)) if isinstance(name, str) else (object,)
        whole = name == "integer" and isinstance(value, float) and value.is_integer()
        if whole or (
            isinstance(value, kinds) and not (isinstance(value, bool) and name in ("integer", "number"))
        ):
            return True
    return False


def _members_fit(value: Json, schema: Json, root: Json, depth: int) -> bool:
    """Return True if an object's members satisfy a JSON schema: required ones are present, and no others if
    the schema is closed. "additionalProperties": False closes a schema, but not if it has
    "patternProperties". Members that the schema does not name are not checked otherwise; "properties" and
    "required" of a wrong type are ignored.

    value: the object whose members are checked.
    schema: the schema, not a reference.
    root: the whole schema, at whose top references begin.
    depth: how many schemas are nested around this one.
    """
    properties = cast(Json, schema["properties"]) if isinstance(schema.get("properties"), dict) else {}
    required = cast("list[Any]", schema["required"]) if isinstance(schema.get("required"), list) else []
    if any(str(name) not in value for name in required):
        return False
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if closed and any(name not in properties for name in value):
        return False
    return all(
        fits(one, properties[name], root, depth + 1) for name, one in value.items() if name in properties
    )


def types_of(schema: Any, root: Json, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that values of a schema may have; empty if the schema does not say. A "const" or
    "enum" gives the types of its values. A composition gives the types of all its parts; of "anyOf" and
    "oneOf" none if one part does not say.

    schema: the schema, which may be a reference.
    root: the whole schema, at whose top references begin.
    depth: how many schemas are nested around this one; compositions beyond MAX_REFERENCES are not looked
        into.
    """
    schema = resolved(schema, root)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(map(str, cast("list[Any]", declared)))
    listed = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = cast("list[Any]", [schema["const"]] if "const" in schema else listed)
    if values:
        return frozenset(_type_of(value) for value in values)
    found: set[str] = set()
    for key in _COMPOSED:
        if depth < MAX_REFERENCES and isinstance(schema.get(key), list):
            parts = [types_of(one, root, depth + 1) for one in schema[key]]
            if key != "allOf" and not all(parts):
                return frozenset()
            found.update(*parts)
    return frozenset(found)


def _type_of(value: Any) -> str:
    """Return the name of the JSON type of a decoded value, such as "integer"; 3.0 has the type "number".

    value: a decoded JSON value.
    """
    if isinstance(value, bool):
        return "boolean"
    return next(name for name, kinds in _TYPES.items() if isinstance(value, kinds))


def value_of_text(text: str, name: str, parameters: Json) -> Any:
    """Return the value of an argument that a model wrote without quotes, by the type that its schema
    declares. If the schema declares no type, the value is JSON if possible, else text. NaN and Infinity are
    no JSON. A value of a type that the schema does not permit stays text if the schema permits text; else it
    is returned as it is. An integer satisfies "number".

        "3" -> 3 for an integer, "3" for a string

    text: the argument as the model has written it.
    name: the name of the argument; one that the schema does not declare may have any type.
    parameters: the JSON schema of all arguments of the function.
    """
    properties = parameters.get("properties")
    declared = cast(Json, properties).get(name) if isinstance(properties, dict) else None
    types = types_of(declared, parameters)
    if types == {"string"}:
        return text
    try:
        json.loads(text, parse_constant=_no_constant)
        value = json.loads(rewritten(text)[0])
    except (ValueError, RecursionError):
        return _unquoted(text, types)
    value_type = _type_of(value)
    if types and value_type not in types and not (value_type == "integer" and "number" in types):
        return text if "string" in types else value
    return value


def _no_constant(name: str) -> Any:
    """Raise ValueError, because NaN and Infinity are no JSON.

    name: the constant that the decoder has found.
    """
    raise ValueError(name)


def _unquoted(text: str, types: frozenset[str]) -> Any:
    """Return the value of text that is no JSON: a Python constant, a repaired object or list, or the text
    itself. A constant of a type that is not permitted is returned as text. An object or list is repaired only
    if text is not permitted and its type is among the permitted ones; if any type is permitted, it stays
    text.

    text: the argument as the model has written it.
    types: the JSON types that its schema permits; empty for any.
    """
    word = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    if not isinstance(word, str):
        return word if not types or _type_of(word) in types else text
    if "string" in types or not text.lstrip().startswith(("{", "[")):
        return text
    read = read_arguments(f'{{"value": {text}}}').get("value", text)
    return read if _type_of(read) in types else text
