"""Spans, and the context that links the spans of several services.

This package does not depend on what a span describes. A context is one line in the format of W3C's
`traceparent` header: version, trace id, span id and flags, in hex and joined by dashes. It travels in gRPC
metadata, in HTTP headers and in messages of the ring.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

# The key of the context, in gRPC metadata and in HTTP headers alike.
TRACEPARENT = "traceparent"  # the key, in metadata and headers alike
# A `traceparent` of version 00, whose trace id and span id are not all zeros.
_SHAPE = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")

Value = str | int | float | bool | Sequence[str]
# Attributes of a span or of an event: OpenTelemetry's names where it has one, otherwise specsot.*. Never
# texts of requests or answers, because traces leave the fleet.
About = Mapping[str, Value]

# The context that the caller sent with the current call, or None. Set by the gRPC and HTTP servers.
caller: ContextVar[str | None] = ContextVar("caller", default=None)

# The context of the request that the engine is about to accept, or None.
current: ContextVar[str | None] = ContextVar("current", default=None)


class Span:
    """An operation that takes some time. This class records nothing; `specsot.tracing.collecting` has the one
    that does.

    context: the context to pass on to whatever runs within this span. None if no spans are collected.
    """

    context: str | None = None

    def note(self, event: str, about: About | None = None) -> None:
        """Record that an event happened within the span, at the present time.

        event: name of the event.
        about: attributes of the event, or None.
        """

    def end(self, about: About | None = None, error: BaseException | str | None = None) -> None:
        """End the span at the present time.

        about: attributes to add to the span, or None.
        error: the error that ended the operation, or the name of its kind; None if the operation succeeded.
            Only the kind is recorded, because an error's message may quote a request.
        """


class Tracer:
    """A factory of spans. This class creates spans that record nothing.

    on: True if spans are collected at all.
    """

    on = False

    def begin(
        self, name: str, parent: str | None = None, linked: Iterable[str] = (), about: About | None = None
    ) -> Span:
        """Start a span at the present time.

        name: name of the span.
        parent: the context of the span within which this one runs. None starts a new trace.
        linked: contexts of other spans that are related to this one without containing it.
        about: attributes of the span, or None.
        """
        return Span()


# The tracer that is used if no spans are collected.
OFF = Tracer()


@contextmanager
def spanning(span: Span) -> Generator[None]:
    """Return a context manager that ends a span when it is left. It yields None.

    An error that is raised within ends the span with that error, and is raised again.

    span: the span, which has been started.

    Any exception counts as an error, cancellation included.
    """
    try:
        yield
    except BaseException as error:
        span.end(error=error)
        raise
    span.end()


def well_formed(context: str | None) -> str | None:
    """Return a context that another program sent, or None if it is not a valid one.

    context: the text that was received, or None.
    """
    return context if context and _SHAPE.fullmatch(context) else None


def trace_of(context: str | None) -> str | None:
    """Return the trace's id of a context, for log lines; None if there is no valid context.

    context: the context in the format of `traceparent`, or None.
    """
    match = _SHAPE.fullmatch(context or "")
    return match[1] if match else None


def followed(context: str | None) -> str | None:
    """Return the context if its trace is sampled, otherwise None, because an unsampled one need not be passed
    on.

    context: the context in the format of `traceparent`, or None.

    Text that is no valid context gives None.
    """
    match = _SHAPE.fullmatch(context or "")
    return context if match and int(match[2], 16) & 1 else None
