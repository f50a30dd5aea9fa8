"""Checks fields of a body that its schema does not have, and refuses those that look like misspelt ones.

All other unknown fields are ignored, because clients and gateways add their own; the log names each of them
once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

import structlog
from pydantic import BaseModel

from specsot.errors import InvalidRequest
from specsot_master.http.unserved_fields import (
    MAX_CHECKED_FIELDS,
    WINDOWS_OF_PENALTIES,
    WITHOUT_EFFECT,
)

log = structlog.get_logger()

# Names that one server logs.
MAX_LOGGED_NAMES = 64
# Characters. Longer names are ignored.
MAX_NAME_CHARACTERS = 64
# Letters. A known name must have at least so many for a missing or additional letter to count as a
# misspelling.
MIN_LETTERS_TO_INSERT = 4
# Letters. Both names must have at least so many for a replaced letter, or two swapped ones, to count as a
# misspelling: `top_a` is not taken for `top_k`.
MIN_LETTERS_TO_REPLACE = 6

# Known fields of other servers that do not affect the answer, and are ignored without a log entry.
HARMLESS_FIELDS = frozenset(
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
    """Checks the unknown fields of all bodies that one server gets, and remembers which names were logged."""

    def __init__(self) -> None:
        """Create a check that has logged no names."""
        self._named: set[str] = set()

    def check(
        self, body: BaseModel, meant_names: Mapping[str, str], checked_fields: Collection[str] = ()
    ) -> None:
        """Check the unknown fields of a body. Fields that look like no known one are ignored; the log names
        each of them once. A field with the value None, a harmless one and one with a name of more than
        MAX_NAME_CHARACTERS is not checked; a field that looks like one that the body also has is ignored. At
        most MAX_LOGGED_NAMES names are logged.

        body: the parsed body; `model_extra` holds its unknown fields, of which the first MAX_CHECKED_FIELDS
            are checked.
        meant_names: from names of other APIs to the names that this body has for them.
        checked_fields: fields that the caller of this method has checked already; empty for none.

        Raises InvalidRequest for an unknown field that looks like another name of a known field.
        """
        known = [field.alias or name for name, field in type(body).model_fields.items()]
        for name, value in islice((body.model_extra or {}).items(), MAX_CHECKED_FIELDS):
            if (
                value is None
                or name in checked_fields
                or name in HARMLESS_FIELDS
                or name in WITHOUT_EFFECT
                or name in WINDOWS_OF_PENALTIES
                or len(name) > MAX_NAME_CHARACTERS
            ):
                continue
            meant = meant_names.get(name) or next((one for one in known if is_slip(name, one)), None)
            if meant and meant not in body.model_fields_set:
                raise InvalidRequest(f"{name} is not known here: did you mean {meant}?", name)
            if name not in self._named and len(self._named) < MAX_LOGGED_NAMES:
                self._named.add(name)
                log.warning("unknown field ignored", field=name)


def is_slip(name: str, known_name: str) -> bool:
    """Return True if a name is a known name in another spelling, or differs from it by one keystroke. Case,
    hyphens and underscores do not count. A missing or additional letter counts from MIN_LETTERS_TO_INSERT
    letters of the known name on, a replaced or swapped one from MIN_LETTERS_TO_REPLACE on.

        # max_tokens: "maxTokens" and "max-tokens" (other spelling), "max_token" (one letter less),
        #             "max_tokans" (one letter replaced), "max_toknes" (two letters swapped) -> True

    name: the name of an unknown field.
    known_name: the name of a field that the body may have.
    """
    a, b = _letters(name), _letters(known_name)
    if a == b or len(b) < MIN_LETTERS_TO_INSERT:
        return a == b
    if len(a) > len(b):
        a, b = b, a
    at = next((n for n, (one, other) in enumerate(zip(a, b)) if one != other), len(a))
    if len(a) < len(b):
        return a[at:] == b[at + 1 :]
    return len(a) >= MIN_LETTERS_TO_REPLACE and (
        a[at + 1 :] == b[at + 1 :] or a[at:] == b[at + 1] + b[at] + b[at + 2 :]
    )


def _letters(name: str) -> str:
    """Return a name in lower case, without hyphens and underscores.

    name: the name of a field.
    """
    return name.lower().replace("_", "").replace("-", "")
