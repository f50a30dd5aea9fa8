"""Spans by OpenTelemetry's SDK, handed to an exporter in the background.

What the SDK reads of the environment (sampling, limits, resource attributes, batches) holds as its
documents say.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import Tracer as SdkTracer

from specsot._version import __version__
from specsot.tracing import About, Span, Tracer


def collect(service: str, exporter: SpanExporter, at_once: bool = False) -> Tracer:
    """A tracer of one service. at_once: spans are exported as they end (tests); else in batches."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": service, "service.version": __version__})
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter))
    return Collecting(provider.get_tracer("specsot", __version__))


class Collecting(Tracer):
    on = True

    def __init__(self, tracer: SdkTracer) -> None:
        self._tracer = tracer

    def begin(
        self, name: str, within: str | None = None, beside: Iterable[str] = (), about: About | None = None
    ) -> Span:
        context = set_span_in_context(NonRecordingSpan(_read(within))) if within else None
        links = [Link(_read(other)) for other in beside]
        return Collected(self._tracer.start_span(name, context, attributes=about, links=links))


class Collected(Span):
    """One span. `context` says whether it is sampled."""

    def __init__(self, span: SdkSpan) -> None:
        self._span = span
        its = span.get_span_context()
        self.context = f"00-{its.trace_id:032x}-{its.span_id:016x}-{its.trace_flags:02x}"

    def note(self, event: str, about: About | None = None) -> None:
        self._span.add_event(event, about)

    def end(self, about: About | None = None, error: BaseException | str | None = None) -> None:
        self._span.set_attributes(about or {})
        if error is not None:
            kind = error if isinstance(error, str) else type(error).__name__
            self._span.set_status(StatusCode.ERROR, kind)
            self._span.set_attribute("error.type", kind)
        self._span.end()


def _read(context: str) -> SpanContext:
    _, trace, span, flags = context.split("-")
    return SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
