"""Forced calls are held to the schema of their own function, wherever it stands."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from specsot.grammar.answers import compile_form
from specsot.params import Form
from specsot_master.core.dialects.tool_calls.forms import PLAIN
from specsot_master.core.dialects.tool_calls.schemas import (
    arguments_schema,
    calls_schema,
    fits,
    parameters_of,
    value_of_text,
)
from tests.constraint.vocabularies import SINGLE, token_ids

COLOR = {
    "name": "set_color",
    "parameters": {
        "type": "object",
        "properties": {"c": {"$ref": "#/$defs/Value"}},
        "required": ["c"],
        "$defs": {"Value": {"enum": ["red", "green"]}},
    },
}
LEVEL = {
    "name": "set_level",
    "parameters": {
        "type": "object",
        "properties": {"l": {"$ref": "#/$defs/Value"}},
        "required": ["l"],
        "$defs": {"Value": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
}
NODE = {
    "name": "node",
    "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["v", "next"],
    },
}
OLD = {
    "name": "old",
    "parameters": {
        "type": "object",
        "properties": {"c": {"$ref": "#/definitions/C"}, "d": {"$ref": "#/properties/c"}},
        "required": ["c", "d"],
        "definitions": {"C": {"enum": ["x", "y"]}},
    },
}
# A property may have the name of a keyword; a value may look like a reference.
ODD = {
    "name": "odd",
    "parameters": {
        "type": "object",
        "properties": {"$ref": {"type": "string"}, "k": {"const": {"$ref": "#/x"}}},
        "required": ["$ref", "k"],
    },
}
NOW = {"name": "now"}
FUNCTIONS: list[dict[str, Any]] = [COLOR, LEVEL, NODE, OLD, ODD, NOW]


def takes(schema: dict[str, Any], value: Any) -> bool:
    """Whether a forced answer may be this value: as the grammar that it is held to says."""
    matcher = compile_form(SINGLE, Form("json_schema", (json.dumps(schema),)))
    return matcher.consume_tokens(token_ids(SINGLE, json.dumps(value).encode())) and matcher.is_accepting()


@pytest.mark.parametrize("functions", [FUNCTIONS, FUNCTIONS[::-1]])
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("set_color", {"c": "red"}, {"c": 0}),
        ("set_level", {"l": 3}, {"l": "red"}),
        (
            "node",
            {"v": 1, "next": {"v": 2, "next": None}},
            {"v": 1, "next": [{"name": "now", "arguments": {}}]},
        ),
        ("old", {"c": "x", "d": "y"}, {"c": "x", "d": "z"}),
        ("odd", {"$ref": "a", "k": {"$ref": "#/x"}}, {"$ref": "a", "k": {"$ref": "#/$defs/arguments4/x"}}),
        ("now", {}, {"time": "12:00"}),
    ],
)
def test_a_forced_call_has_its_own_functions_arguments(
    functions: list[dict[str, Any]], name: str, right: Any, wrong: Any
) -> None:
    listed, named = calls_schema(functions, 3, PLAIN), arguments_schema(functions, name)
    for value, is_right in ((right, True), (wrong, False)):
        call = [{"name": name, "arguments": value}]
        assert takes(listed, call) == takes(named, value) == is_right
        validator = jsonschema.Draft202012Validator(listed)
        assert validator.is_valid(call) == is_right


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"type": "object", "properties": {}, "additionalProperties": False}],
)
def test_a_function_without_parameters_takes_none(parameters: Any) -> None:
    schema = parameters_of({"name": "now", "parameters": parameters})
    assert takes(schema, {})
    assert not takes(schema, {"a": 1})


@pytest.mark.parametrize(
    ("value", "schema", "is_right"),
    [
        ({"a": "1"}, {"properties": {"a": {"type": "string"}}, "required": ["a"]}, True),
        ({}, {"required": ["a"]}, False),
        ({"a": 1}, {"properties": {"a": {"type": "string"}}}, False),
        ({"a": True}, {"properties": {"a": {"type": "integer"}}}, False),
        ({"a": 1.0}, {"properties": {"a": {"type": "integer"}}}, True),
        ({"b": 1}, {"properties": {}, "additionalProperties": False}, False),
        ({"a": "x"}, {"properties": {"a": {"enum": ["y"]}}}, False),
        ({"a": "x"}, {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"const": "x"}}}, True),
        ({"a": {"a": {}}}, {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False}, True),
        ({"a": {"b": {}}}, {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False}, False),
        ({"a": None}, {"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}, True),
        ({"a": [1]}, {"properties": {"a": {"items": {"type": "string"}}}}, False),
        ({"a": 1}, {"properties": {"a": {"$ref": "#/nowhere"}}}, True),
        ({"a": 1}, {"properties": {"a": {"type": "circle", "enum": 3, "required": 5}}}, True),
        ({"a": 1}, {"required": [["a"]], "properties": 7, "anyOf": 3}, False),
    ],
)
def test_whether_arguments_fit(value: Any, schema: Any, is_right: bool) -> None:
    assert fits(value, schema, schema) == is_right


@pytest.mark.parametrize(
    ("text", "declared", "value"),
    [
        ("3", {"type": "string"}, "3"),
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "number"}, 3),
        ("3", {}, 3),
        ("three", {"type": "integer"}, "three"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("true", {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ("True", {"type": "boolean"}, True),
        ("True", {"type": "string"}, "True"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("{'a': [1, None]}", {"type": "object"}, {"a": [1, None]}),
        ('{"a": 1', {"type": "object"}, {"a": 1}),
        ("{x", {}, "{x"),
        ("red", {"enum": ["red", 1]}, "red"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1e999", {"type": "number"}, "1e999"),
        ('"\\ud83d"', {}, "\\ud83d"),
    ],
)
def test_a_value_without_quotes_has_the_type_that_its_schema_declares(
    text: str, declared: Any, value: Any
) -> None:
    assert value_of_text(text, "a", {"properties": {"a": declared}}) == value
