"""Events as JSON: for lines on a terminal and for chunks over HTTP."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from typing import Any

from specsot.events import Event, Numbered


def line_of(numbered: Numbered) -> str:
    """Return an event as one line of JSON without its newline. Text is not escaped to ASCII.

    numbered: the event with its number in the request's stream.
    """
    return json.dumps(fields_of(numbered), ensure_ascii=False, default=json_value_of)


def fields_of(numbered: Numbered) -> dict[str, Any]:
    """Return the fields of an event by name, with its type as "event" and its number as "number".

    Fields of `_IF_ANY` are left out if they are None or empty.

    numbered: the event with its number in the request's stream.
    """
    fields: dict[str, Any] = {"event": name_of(numbered.event), "number": numbered.number}
    fields |= dataclasses.asdict(numbered.event)
    return {
        name: field_value
        for name, field_value in fields.items()
        if field_value not in (None, ()) or name not in _IF_ANY
    }


# Fields that are left out of the JSON if they are None or empty.
_IF_ANY = ("logprobs", "forecast", "stop_string", "stop_token")


def name_of(event: Event) -> str:
    """Return the type of an event in snake case: BranchStarted -> branch_started.

    event: the event.
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()


def json_value_of(value: Any) -> Any:
    """Return a value that JSON can express in the place of one that it cannot: of an enumeration's member its
    value, and of bytes a list of numbers 0..255.

    value: the value of an event's field. Raises TypeError for any other type.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
