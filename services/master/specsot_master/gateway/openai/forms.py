"""What an answer must look like, from the several ways in which clients say it.

Refuses to know whether a schema makes sense. Whatever is wrong is told by the name the caller used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from specsot.errors import InvalidRequest
from specsot.forms import Form
from specsot_master.gateway.openai.bodies import Asking, ResponseFormat, StructuredOutputs

FieldForm = tuple[str, Callable[[], Form]]  # the caller's field, and what it says


def form_of(body: Asking) -> Form | None:
    """None where the answer is free. Raises InvalidRequest, also for two forms at once."""
    wishes = [*_formatted(body.response_format), *_structured(body.structured_outputs), *_guided(body)]
    if len(wishes) > 1:
        first, second = wishes[0][0], wishes[1][0]
        raise InvalidRequest(f"{second} cannot come with {first}: an answer has one form", second)
    return next((make() for _, make in wishes), None)


def form_field(body: Asking) -> str:
    """Where the caller said what form the answer has."""
    wishes = [*_formatted(body.response_format), *_structured(body.structured_outputs), *_guided(body)]
    return wishes[0][0] if wishes else "specsot.constraint"


def _formatted(asked: ResponseFormat | None) -> list[FieldForm]:
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [("response_format", lambda: Form("json_object"))]
    if asked.json_schema is None:
        raise InvalidRequest("response_format.json_schema must be given", "response_format.json_schema")
    schema = asked.json_schema.json_schema
    return [("response_format", lambda: _held_to(schema))]


def _structured(asked: StructuredOutputs | None) -> list[FieldForm]:
    if asked is None:
        return []
    found = _kinds("structured_outputs.", asked.json_schema, asked.regex, asked.choice)
    if asked.json_object:
        found.append(("structured_outputs.json_object", lambda: Form("json_object")))
    return found


def _guided(body: Asking) -> list[FieldForm]:
    """The names vLLM had before."""
    return _kinds("guided_", body.guided_json, body.guided_regex, body.guided_choice)


def _kinds(prefix: str, schema: Any, regex: str | None, choice: list[str] | None) -> list[FieldForm]:
    wishes: list[FieldForm] = []
    if schema is not None:
        wishes.append((f"{prefix}json", lambda: _held_to(schema)))
    if regex is not None:
        wishes.append((f"{prefix}regex", lambda: Form("regex", (regex,))))
    if choice is not None:
        wishes.append((f"{prefix}choice", lambda: Form("choice", tuple(choice))))
    return wishes


def _held_to(schema: dict[str, Any] | str) -> Form:
    return Form("json_schema", (schema if isinstance(schema, str) else json.dumps(schema),))
