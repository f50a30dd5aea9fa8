"""Checks JSON values by the published jsonschema library, which reads each schema once."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema


def check_value(value: Any, schema: Any) -> None:
    """Raise jsonschema.ValidationError if a value does not satisfy a schema.

    Like `jsonschema.validate`, but a schema is itself validated only once, not at every call. That took 40 %
    of the time of the tests of forced calls.
    """
    _validator_of(json.dumps(schema)).validate(value)


@cache
def _validator_of(schema: str) -> Any:
    known = json.loads(schema)
    jsonschema.Draft202012Validator.check_schema(known)
    return jsonschema.Draft202012Validator(known)
