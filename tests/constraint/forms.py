"""Forms to test with, and how to tell, without the library, whether a text has one."""

from __future__ import annotations

import json
import re
from typing import Any

from specsot.params import Form
from tests.json_values import check_value

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["blatt", "ast 🌳", "größe"]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["kind", "children"],
            "additionalProperties": False,
        }
    },
}
PATTERN = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}}
ANY_OF = {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, {"const": "none"}, {"type": "null"}]}


def schema(value: Any) -> Form:
    return Form("json_schema", (json.dumps(value),))


FORMS: dict[str, Form] = {
    "object": Form("json_object"),
    "person": schema(PERSON),
    "tree": schema(TREE),
    "pattern": schema(PATTERN),
    "any of": schema(ANY_OF),
    "date": Form("regex", (r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]",)),
    "words": Form("regex", ("([a-zé]{1,6} ){2,5}(😀|ß)+!",)),
    "anchored": Form("regex", ("^(yes|no)$",)),
    "choice": Form("choice", ("yes", "yes, but", "no", "größer 😀", 'a "quoted" \\ one\n')),
}


def has_form(form: Form, text: str) -> bool:
    """Whether the whole text has the form."""
    match form.kind:
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "json_schema":
            check_value(json.loads(text), json.loads(form.texts[0]))
            return True
        case "regex":
            return re.fullmatch(form.texts[0], text) is not None
        case "choice":
            return text in form.texts
