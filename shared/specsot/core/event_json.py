"""Events as JSON: for lines on a terminal and for chunks over HTTP."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from typing import Any

from specsot.events import Event, Numbered


def line_of(numbered: Numbered) -> str:
    """One line, without its newline; text stays as it is, not escaped to ASCII."""
    return json.dumps(fields_of(numbered), ensure_ascii=False, default=plain_of)


def fields_of(numbered: Numbered) -> dict[str, Any]:
    """What an event says, by name; log-probabilities, forecasts and stops only where there are any."""
    fields: dict[str, Any] = {"event": name_of(numbered.event), "number": numbered.number}
    fields |= dataclasses.asdict(numbered.event)
    return {name: told for name, told in fields.items() if told not in (None, ()) or name not in _IF_ANY}


_IF_ANY = ("logprobs", "forecast", "stop_string", "stop_token")


def name_of(event: Event) -> str:
    """BranchStarted -> branch_started."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()


def plain_of(value: Any) -> Any:
    """What JSON has no word for: an enumeration becomes its value, bytes become numbers."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes):
        return list(value)
    raise TypeError(f"{type(value).__name__} does not go into JSON")
