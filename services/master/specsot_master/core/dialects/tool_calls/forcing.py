"""Restricts an answer to calls in a model's own form, where a call is not one object of JSON.

The exact texts of the form surround JSON values and free text, which follow the functions' schemas. Whatever
is written this way, `reading` reads as calls that fit the schemas.

    MiniCPM, f(a: string, b: integer):
        '<function name="f"><param name="a">' FreeText '<param name="b">' JSON '</param></function>'
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from specsot.grammar.schemas import OTHER_KEYWORDS, every_schema
from specsot.grammar.structural_tag import (
    FreeText,
    JsonPart,
    Members,
    OneTag,
    Part,
    Pattern,
    Repeat,
    joined,
)
from specsot_master.core.dialects.tool_calls.arguments import Json
from specsot_master.core.dialects.tool_calls.forms import ArgumentTexts, CallForm, CallTexts, Hole, Marks
from specsot_master.core.dialects.tool_calls.schemas import moved, resolved, types_of

# Names of functions, and of arguments with marks of their own, that can be written in any form.
_NAME = re.compile(r"[\w.\-]+")
# Names of arguments that a call in Python, or in braces, can have.
_KEY = re.compile(r"\w+")
# What the model writes in the holes of marks. Mistral's templates take ids of nine letters and digits.
_HOLES: Final[Mapping[Hole, str]] = {Hole.NUMBER: "[0-9]{1,2}", Hole.WORD: "[A-Za-z0-9]{9}"}
# Keywords that do not restrict a value.
_ANNOTATIONS: Final = frozenset(
    ("$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title")
)
# Keywords of a function's schema that this file takes into account.
_OF_PARAMETERS: Final = _ANNOTATIONS | {
    "$defs",
    "additionalProperties",
    "definitions",
    "properties",
    "required",
    "strict",
    "type",
}


class _NotInForm(Exception):
    """Raised if a schema allows arguments that cannot be written in the model's form."""


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """An answer that is forced to consist of tool calls.

    head: The text with which the prompt ends: the beginning of the first call, as far as it is the same for
        all allowed answers; "" if nothing is.
    parts: What the model writes after `head`, in order.
    """

    head: str
    parts: tuple[Part, ...]


def forced_calls(
    form: CallForm, functions: Mapping[str, Json], max_calls: int, ends: Sequence[str] = ()
) -> ForcedCalls | None:
    """Return what an answer of 1 to `max_calls` calls consists of. Return None if the form has no exact
    texts, or if it cannot express the schema of a function; then calls have to be forced as plain JSON. One
    function and one call give the call alone; otherwise any of the functions may be called, up to the most
    calls. The marks after the calls stop before the first text of `ends`.

    form: how the model writes calls.
    functions: the schemas of the arguments, by the names of the functions; at least one.
    max_calls: the maximum number of calls that the answer may make, at least 1. A form that writes one call
        at most allows one.
    ends: the texts of tokens that end an answer, which the model itself writes after the calls; empty for
        none.
    """
    texts = form.texts
    if texts is None:
        return None
    try:
        calls = [_call(form, texts, name, schema) for name, schema in functions.items()]
    except _NotInForm:
        return None
    end = _until_any(texts.end, ends)
    if len(calls) == 1 and (max_calls == 1 or texts.between is None):
        parts = (*_parts(texts.before), *calls[0], *_parts(end))
    else:
        between = () if texts.between is None else _parts(texts.between)
        max_count = 1 if texts.between is None else max_calls
        parts = (*_parts(texts.before), Repeat((OneTag(tuple(calls)),), between, max_count), *_parts(end))
    first, *others = joined(parts)
    return ForcedCalls(first, tuple(others)) if isinstance(first, str) else ForcedCalls("", (first, *others))


def _parts(marks: Marks) -> tuple[Part, ...]:
    """Return marks as parts of a form: texts as they are, and for each hole a pattern of what may fill it.

    marks: the marks, in order; () returns ().
    """
    return tuple(Pattern(_HOLES[mark]) if isinstance(mark, Hole) else mark for mark in marks)


def _until_any(marks: Marks, ends: Sequence[str]) -> Marks:
    """Return the marks up to the first occurrence of one of these texts; all marks if none of them occurs.
    The mark with that text is cut before it. Holes are kept.

    marks: the marks after the last call.
    ends: the texts of tokens that end an answer; "" among them is ignored.
    """
    found: list[str | Hole] = []
    for mark in marks:
        places = [mark.find(end) for end in ends if end and end in mark] if isinstance(mark, str) else []
        if isinstance(mark, str) and places:
            return (*found, mark[: min(places)])
        found.append(mark)
    return tuple(found)


def _call(form: CallForm, texts: CallTexts, name: str, parameters: Json) -> tuple[Part, ...]:
    """Return a call of one function, from its name to the closing marks. The arguments are one JSON value if
    the form has no marks around each of them.

    form: how the model writes calls.
    texts: the exact texts of the form.
    name: the name of the function.
    parameters: the schema of the function's arguments.

    Raises _NotInForm if the name or the arguments cannot be written in the form.
    """
    if not _NAME.fullmatch(name):
        raise _NotInForm
    if texts.arguments is None:
        arguments: Part = JsonPart(parameters)
    else:
        arguments = _arguments(form, texts.arguments, parameters)
    return (name, *_parts(texts.opening), arguments, *_parts(texts.closing))


def _arguments(form: CallForm, texts: ArgumentTexts, parameters: Json) -> Members:
    """Return the arguments in the order of the schema; those that are not required may be left out. An
    argument counts as required if the schema's "required" names it.

    form: how the model writes calls.
    texts: the exact texts around one argument.
    parameters: the schema of the function's arguments.

    Raises _NotInForm if the schema allows arguments that it does not name (without "properties", and not
    closed), has keywords that are not taken into account, requires an argument that it does not declare, has
    "properties" or "required" of a wrong type, or names an argument that the form cannot write.
    """
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    if not (isinstance(properties, dict) and isinstance(required, list)):
        raise _NotInForm
    declared = cast(Json, properties)
    needed = set(map(str, cast("list[Any]", required)))
    is_open = not declared and parameters.get("additionalProperties") is not False
    if is_open or not set(parameters) <= _OF_PARAMETERS or not needed <= set(declared):
        raise _NotInForm
    known = _KEY if form.parameter is None else _NAME
    if not all(known.fullmatch(name) for name in declared):
        raise _NotInForm
    members = tuple((_argument(form, texts, parameters, name), name in needed) for name in declared)
    return Members(members, texts.between)


def _argument(form: CallForm, texts: ArgumentTexts, parameters: Json, name: str) -> tuple[Part, ...]:
    """Return one argument with its marks. Text is written as it is, and everything else as JSON. Where marks
    or a quote tell text from other values, and the schema allows any text and other values, the model chooses
    between the two; if the schema does not certainly allow any text, only JSON is written.

    form: how the model writes calls.
    texts: the exact texts around one argument.
    parameters: the schema of all arguments of the function.
    name: the name of this argument.

    Raises _NotInForm if the schema allows no value, or text that the form cannot tell from other values.
    """
    schema = cast(Json, parameters["properties"])[name]
    if schema is False:
        raise _NotInForm
    key = texts.begin + name
    value = JsonPart(_self_contained(schema, parameters, name))
    as_json = (key + (texts.other_middle or texts.middle), value, texts.end)
    if texts.quote is None:
        return as_json
    types = types_of(schema, parameters)
    if types and "string" not in types:
        return as_json
    end = texts.quote + texts.end
    excluded = _excluded(form, texts)
    before = key + texts.middle + texts.quote
    if types == {"string"}:
        return (before, *_text(resolved(schema, parameters), end, excluded))
    if texts.other_middle is None and not texts.quote:
        # The marks do not distinguish text from other values, so both are read by the schema's types.
        if not _is_unrestricted(schema, parameters):
            raise _NotInForm
        return (before, FreeText(end, excluded))
    as_text = (before, FreeText(end, excluded))
    return (OneTag((as_text, as_json)),) if _allows_any_text(schema, parameters) else as_json


def _excluded(form: CallForm, texts: ArgumentTexts) -> tuple[str, ...]:
    """Return the marks that end a text when it is read, and therefore cannot be a part of it; each once,
    possibly none. For arguments with marks of their own these are the first mark after the value and the
    first opener of a call; otherwise the quote and the stops of the form.

    form: how the model writes calls.
    texts: the exact texts around one argument.
    """
    if form.parameter is None:
        return tuple(dict.fromkeys((texts.quote or "", *form.stops)))
    starts = [form.openers[n] for n in form.starts[:1]]
    marks = (form.parameter.end[0], *starts)
    return tuple(dict.fromkeys(mark for mark in marks if isinstance(mark, str)))


def _text(schema: Json, end: str, excluded: tuple[str, ...]) -> tuple[Part, ...]:
    """Return the text that a schema allows, with its end. A listed value ("enum" or "const") is written
    exactly, followed by the end. Without keywords any text without the excluded marks is allowed, with
    "minLength" and "maxLength" as bounds in characters; negative ones count as 0.

    schema: the schema of a text, without references.
    end: the text after the value.
    excluded: marks that the text must not contain.

    Raises _NotInForm for patterns and formats, for lengths that are no numbers, and for listed values that
    contain a mark.
    """
    keywords = set(schema) - _ANNOTATIONS - {"type"}
    if keywords and keywords <= {"enum", "const"}:
        values = [schema["const"]] if "const" in schema else cast("list[Any]", schema["enum"])
        if any(mark in str(value) for value in values for mark in excluded):
            raise _NotInForm
        return (OneTag(tuple((f"{value}{end}",) for value in values)),)
    if not keywords <= {"minLength", "maxLength"}:
        raise _NotInForm
    max_length = schema.get("maxLength")
    try:
        return (
            FreeText(
                end,
                excluded,
                min_length=max(int(schema.get("minLength", 0)), 0),
                max_length=None if max_length is None else max(int(max_length), 0),
            ),
        )
    except (TypeError, ValueError, OverflowError):
        raise _NotInForm from None


def _is_unrestricted(schema: Any, root: Json) -> bool:
    """Return True if a schema restricts nothing but the types of a value, or is a choice between such
    schemas; False for anything else, and for the schema False. Descriptions, titles, defaults and other
    annotations do not count as restrictions.

    schema: the schema of one argument: an object, or True or False.
    root: the schema of all arguments, to which references lead.
    """
    if not isinstance(schema, dict):
        return schema is True
    found = resolved(cast(Json, schema), root)
    keywords = set(found) - _ANNOTATIONS
    if keywords <= {"type"}:
        return True
    if len(keywords) != 1 or not keywords <= {"anyOf", "oneOf"}:
        return False
    choices = found[next(iter(keywords))]
    return isinstance(choices, list) and all(
        set(resolved(choice, root)) - _ANNOTATIONS <= {"type"} for choice in cast("list[Any]", choices)
    )


def _allows_any_text(schema: Any, root: Json) -> bool:
    """Return True if a schema certainly allows every text; False if it may refuse one. Return True for a
    schema that restricts nothing but types, and for a choice ("anyOf", "oneOf") of which one part allows
    every text.

    schema: the schema of one argument: an object, or True. It must allow text, if it names types.
    root: the schema of all arguments, to which references lead.
    """
    if _is_unrestricted(schema, root):
        return True
    found = resolved(schema, root)
    for key in ("anyOf", "oneOf"):
        if set(found) - _ANNOTATIONS == {key} and isinstance(found[key], list):
            choices = [resolved(choice, root) for choice in cast("list[Any]", found[key])]
            return any(
                set(one) - _ANNOTATIONS == {"type"} and "string" in types_of(one, root) for one in choices
            )
    return False


def _self_contained(schema: Any, parameters: Json, name: str) -> Json | bool:
    """Return the schema of one argument, unchanged if it has no references. Otherwise it is placed into a
    document of its own that holds all parameters. A schema that is True or False is returned as it is.

    schema: the schema of the argument: an object, or True or False.
    parameters: the schema of all arguments, to which references lead.
    name: the name of the argument.
    """
    if not isinstance(schema, dict):
        return bool(schema)
    if not any("$ref" in one or "$dynamicRef" in one for one in every_schema(schema, OTHER_KEYWORDS)):
        return cast(Json, schema)
    place = name.replace("~", "~0").replace("/", "~1")
    return {
        "$ref": f"#/$defs/parameters/properties/{place}",
        "$defs": {"parameters": moved(parameters, "#/$defs/parameters")},
    }
