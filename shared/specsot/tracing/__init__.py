"""Spans, and what ties those of several services together: the interface, and one that writes none.

Refuses to know who collects spans; `specsot.tracing.starting` does. Context travels as the one line of
W3C's `traceparent`: version, trace id, span id, flags; in metadata, in headers, in the ring.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

TRACEPARENT = "traceparent"  # the key, in metadata and headers alike
_SHAPE = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")

Value = str | int | float | bool | Sequence[str]
About = Mapping[str, Value]  # attributes: OpenTelemetry's names where it has one, else specsot.*; never text

caller: ContextVar[str | None] = ContextVar("caller", default=None)
"""The context that whoever called brought along; doors set it."""

current: ContextVar[str | None] = ContextVar("current", default=None)
"""The context of the request that is being taken in."""


class Span(Protocol):
    """Something that takes a while. `context`: for those who do part of it; None: nobody looks."""

    @property
    def context(self) -> str | None: ...

    def note(self, event: str, about: About | None = None) -> None:
        """Something happened now."""
        ...

    def end(self, about: About | None = None, error: BaseException | str | None = None) -> None: ...


class Tracer(Protocol):
    """`on`: whether spans go anywhere at all."""

    @property
    def on(self) -> bool: ...

    def begin(
        self, name: str, within: str | None = None, beside: Iterable[str] = (), about: About | None = None
    ) -> Span:
        """within: the context it is part of. beside: contexts it has to do with."""
        ...


class _Nothing:
    context = None
    on = False

    def begin(
        self, name: str, within: str | None = None, beside: Iterable[str] = (), about: About | None = None
    ) -> Span:
        return self

    def note(self, event: str, about: About | None = None) -> None:
        pass

    def end(self, about: About | None = None, error: BaseException | str | None = None) -> None:
        pass


OFF: Tracer = _Nothing()


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
