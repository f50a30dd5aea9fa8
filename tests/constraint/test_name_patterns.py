"""JSON schemas that restrict the names of properties, by patterns, enums or declared names."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from specsot.errors import InvalidRequest
from specsot.grammar.answers import AnswerAutomaton
from specsot.grammar.name_patterns import read_enforceable
from specsot.grammar.sandbox import try_form
from tests.conftest import seeds
from tests.constraint.forms import schema
from tests.constraint.test_answers import text_of, write
from tests.constraint.vocabularies import SINGLE
from tests.json_values import check_value

INTEGER = {"type": "integer"}
TEXT = {"type": "string", "maxLength": 3}
SMALL = {"enum": [1, 2, "x"]}


def settled(given: dict[str, Any]) -> Any:
    return read_enforceable(json.dumps(given))


def takes(given: dict[str, Any], text: str) -> bool:
    """Whether an answer may be this text, by the form that is made of a schema."""
    machine = AnswerAutomaton(SINGLE, schema(given))
    place = machine.start()
    for byte in text.encode():
        following = machine.advance(place, SINGLE.bytes.index(bytes([byte])))
        if following is None:
            return False
        place = following
    return machine.finished(place)


@pytest.mark.parametrize("closed", [True, False])
def test_a_pattern_that_matches_declared_properties_alone_is_an_intersection(closed: bool) -> None:
    given = {
        "type": "object",
        "properties": {"score": SMALL, "b": INTEGER},
        "patternProperties": {"^(score|b)$": INTEGER},
        **({"additionalProperties": False} if closed else {}),
    }
    try_form(schema(given))
    assert settled(given)["properties"]["score"] == {"allOf": [SMALL, INTEGER]}
    assert "patternProperties" not in settled(given)
    assert takes(given, '{"score":2,"b":7}')
    assert not takes(given, '{"score":"x"}')


def test_a_pattern_that_matches_further_names_stays() -> None:
    given = {"properties": {"score": SMALL}, "patternProperties": {"^s": INTEGER}}
    assert settled({**given}) == given
    given |= {"type": "object", "additionalProperties": False}
    assert takes(given, '{"score":2,"size":7}')
    assert not takes(given, '{"score":"x"}')
    assert not takes(given, '{"score":2,"size":"x"}')


def test_patterns_that_share_names_become_one_pattern() -> None:
    given = {
        "type": "object",
        "patternProperties": {"^a": INTEGER, "z$": {"minimum": 3}, "^q$": TEXT},
        "additionalProperties": False,
    }
    try_form(schema(given))
    assert takes(given, '{"abz":3}')
    assert takes(given, '{"q":"x"}')
    assert not takes(given, '{"abz":2}')
    assert not takes(given, '{"b":2}')


def test_patterns_that_share_names_hold_for_a_declared_property_one_by_one() -> None:
    """The pattern "z$" does not match "ab", so that its schema does not apply."""
    given = {
        "type": "object",
        "properties": {"ab": {}, "az": {}},
        "patternProperties": {"^a": INTEGER, "z$": {"minimum": 3}},
        "required": ["ab", "az"],
    }
    try_form(schema(given))
    assert takes(given, '{"ab":1,"az":3}')
    assert not takes(given, '{"ab":1,"az":2}')
    assert not takes(given, '{"ab":1,"az":3,"c":2}'), "undeclared names cannot be told apart"


def test_patterns_are_settled_wherever_a_schema_may_stand() -> None:
    inner = {"type": "object", "properties": {"é": INTEGER}, "patternProperties": {"^é$": {"maximum": 5}}}
    given = {"type": "array", "items": {"$ref": "#/$defs/Inner"}, "$defs": {"Inner": inner}}
    try_form(schema(given))
    assert takes(given, '[{"é":5}]')
    assert not takes(given, '[{"é":6}]')


def test_a_pattern_that_cannot_be_compiled_is_reported_as_before() -> None:
    with pytest.raises(InvalidRequest, match=r'in "\["'):
        try_form(schema({"properties": {"a": {}}, "patternProperties": {"[": {}, "^a$": {}}}))


RECORDS: dict[str, dict[str, Any]] = {
    "text": {"propertyNames": {"type": "string"}},
    "anything": {"propertyNames": True},
    "an enum": {"propertyNames": {"$ref": "#/$defs/C"}, "$defs": {"C": {"enum": ["ab", "x"], "title": "C"}}},
    "a constant": {"propertyNames": {"const": "ab"}},
    "a pattern": {"propertyNames": {"type": "string", "pattern": "^a"}},
    "a pattern of a declared name": {
        "propertyNames": {"pattern": "^a"},
        "properties": {"ab": INTEGER, "c": {}},
    },
}


@pytest.mark.parametrize("kind", RECORDS)
def test_names_are_restricted_as_records_of_zod_and_pydantic_say(kind: str) -> None:
    given = {"type": "object", "additionalProperties": INTEGER, **RECORDS[kind]}
    try_form(schema(given))
    assert takes(given, '{"ab":3}')
    for text in ('{"ab":"x"}', '{"c":3}'):
        assert takes(given, text) == jsonschema.Draft202012Validator(given).is_valid(json.loads(text))


@pytest.mark.parametrize(
    "names", [{"minLength": 2}, {"type": "integer"}, {"pattern": "^a", "maxLength": 3}, False]
)
def test_other_restrictions_of_names_are_refused_by_name(names: Any) -> None:
    with pytest.raises(InvalidRequest, match='"propertyNames"'):
        try_form(schema({"type": "object", "propertyNames": names, "additionalProperties": INTEGER}))


def test_unevaluated_properties_of_a_plain_object_are_additional_ones() -> None:
    given = {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False}
    assert takes(given, '{"a":3}')
    assert not takes(given, '{"a":3,"b":3}')
    composed = {**given, "allOf": [{"properties": {"b": INTEGER}}]}
    with pytest.raises(InvalidRequest, match='"unevaluatedProperties"'):
        try_form(schema(composed))


NAMES = ("a", "ab", "b", "ba", "c")
# A name that must end in a certain way, as of "b$", may outlast the budget.
PATTERNS = ("^a$", "^a", "^b", "^(a|b)$", "^[ab]+$", "^c", "^(a|ab|b|ba|c)$", "^$")
VALUES = (INTEGER, TEXT, SMALL, {}, True, False, {"type": ["integer", "string"], "maxLength": 3})


@pytest.mark.parametrize("seed", seeds(120, quick=20))
def test_what_is_drawn_satisfies_the_schema_as_it_was_given(seed: int) -> None:
    dice = random.Random(seed)
    given: dict[str, Any] = {
        "type": "object",
        "properties": {name: dice.choice(VALUES[:-2]) for name in dice.sample(NAMES, dice.randrange(4))},
        "patternProperties": {p: dice.choice(VALUES) for p in dice.sample(PATTERNS, dice.randrange(1, 4))},
    }
    given |= dice.choice([{}, {"additionalProperties": False}, {"additionalProperties": INTEGER}])
    try:
        machine = AnswerAutomaton(SINGLE, schema(given))
    except InvalidRequest as error:
        pytest.fail(f"{given}: {error}")
    for turn in range(3):
        text = text_of(SINGLE, write(machine, seed=turn))
        check_value(json.loads(text), given)
