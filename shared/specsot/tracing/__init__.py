"""Spans, and the context that links those of several services.

Refuses to know what a span is about. Context travels as the one line of W3C's `traceparent`: version, trace
id, span id, flags; in metadata, in headers, in the ring.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

TRACEPARENT = "traceparent"  # the key, in metadata and headers alike
_SHAPE = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")

Value = str | int | float | bool | Sequence[str]
About = Mapping[str, Value]  # attributes: OpenTelemetry's names where it has one, else specsot.*; never text

caller: ContextVar[str | None] = ContextVar("caller", default=None)
"""The context that whoever called brought along; endpoints set it."""

current: ContextVar[str | None] = ContextVar("current", default=None)
"""The context of the request that is being taken in."""


class Span:
    """Something that takes a while. This one goes nowhere; `specsot.tracing.collecting` has those that do.

    context: for those who do part of it; None: nobody looks.
    """

    context: str | None = None

    def note(self, event: str, about: About | None = None) -> None:
        """Something happened now."""

    def end(self, about: About | None = None, error: BaseException | str | None = None) -> None:
        """It is over. error: why it failed; only its kind is told, as its words may quote somebody."""


class Tracer:
    """on: whether spans go anywhere at all."""

    on = False

    def begin(
        self, name: str, within: str | None = None, beside: Iterable[str] = (), about: About | None = None
    ) -> Span:
        """within: the context it is part of. beside: contexts it has to do with."""
        return Span()


OFF = Tracer()


@contextmanager
def spanning(span: Span) -> Generator[None]:
    """Ends the span behind what happens inside; what is raised there ends it as an error."""
    try:
        yield
    except BaseException as error:
        span.end(error=error)
        raise
    span.end()


def well_formed(context: str | None) -> str | None:
    """The context, if it is one; a stranger may have written anything."""
    return context if context and _SHAPE.fullmatch(context) else None


def trace_of(context: str | None) -> str | None:
    """The trace's id, for log lines."""
    found = _SHAPE.fullmatch(context or "")
    return found[1] if found else None


def followed(context: str | None) -> str | None:
    """The context, if somebody collects this trace: others are not worth carrying around."""
    found = _SHAPE.fullmatch(context or "")
    return context if found and int(found[2], 16) & 1 else None
