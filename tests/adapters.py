"""Pydantic's adapters of FastAPI's fields, built once for all endpoints of a process of tests.

Nearly every test of HTTP opens an endpoint of its own, of the same routes: 28 ms of a processor, of which 18
went
into these adapters, which keep no state. Services that are processes of their own build theirs as ever.
"""

from __future__ import annotations

from typing import Any, get_args

from fastapi._compat import v2
from pydantic import TypeAdapter

BUILT: dict[tuple[Any, str, str], TypeAdapter[Any]] = {}


def built_once(annotated: Any, *, config: Any = None) -> TypeAdapter[Any]:
    """The one of the same type, with the same notes on it."""
    kind, *notes = get_args(annotated)
    key = kind, repr(notes), repr(config)
    if key not in BUILT:
        BUILT[key] = TypeAdapter(annotated, config=config)
    return BUILT[key]


def install() -> None:
    v2.TypeAdapter = built_once  # type: ignore[assignment]
