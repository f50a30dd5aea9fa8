"""Fields of a body that its schema does not have: who wrote one and meant another is told so.

All others are ignored, as clients and gateways add fields of their own; the log names each of them once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

import structlog
from pydantic import BaseModel

from specsot.errors import InvalidRequest

log = structlog.get_logger()

MAX_LOOKED_AT = 64  # unknown fields of one body, and names in the log; a body may hold millions
MAX_NAME = 64  # characters
# Letters that a known name must have for one more or one less to be a slip, and for another one in the place
# of one, or two swapped: `top_a` is no `top_k`.
SHORT = 4
LONG = 6

IDLE = frozenset(  # they say nothing about the answer
    {
        "client_metadata",
        "context_management",
        "max_tool_calls",
        "metadata",
        "moderation",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)


class UnknownFields:
    """Of all calls to one door."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def check(self, body: BaseModel, words: Mapping[str, str], others: Collection[str] = ()) -> None:
        """words: names that we have for what this body calls otherwise. others: those that were looked at.

        Raises InvalidRequest.
        """
        known = [field.alias or name for name, field in type(body).model_fields.items()]
        for name, value in islice((body.model_extra or {}).items(), MAX_LOOKED_AT):
            if value is None or name in others or name in IDLE or len(name) > MAX_NAME:
                continue
            meant = words.get(name) or next((one for one in known if is_slip(name, one)), None)
            if meant and meant not in body.model_fields_set:
                raise InvalidRequest(f"{name} is not known here: did you mean {meant}?", name)
            if name not in self._named and len(self._named) < MAX_LOOKED_AT:
                self._named.add(name)
                log.warning("unknown field ignored", field=name)


def is_slip(name: str, known: str) -> bool:
    """Whether that is `known` in another spelling, or one stroke away from it."""
    a, b = _letters(name), _letters(known)
    if a == b or len(b) < SHORT:
        return a == b
    if len(a) > len(b):
        a, b = b, a
    at = next((n for n, (one, other) in enumerate(zip(a, b)) if one != other), len(a))
    if len(a) < len(b):
        return a[at:] == b[at + 1 :]
    return len(a) >= LONG and (a[at + 1 :] == b[at + 1 :] or a[at:] == b[at + 1] + b[at] + b[at + 2 :])


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
