"""Spans that OpenTelemetry's SDK collects and exports in the background.

The environment variables that the SDK reads (sampling, limits, resource attributes, batches) have the effect
that its documents describe.
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


def collect(service: str, exporter: SpanExporter, immediate: bool = False) -> Tracer:
    """Return the tracer of one service, whose spans are exported in the background.

    service: the value of `service.name` in the exported spans.
    exporter: sends the spans to a collector.
    immediate: True to export each span as it ends, for tests; otherwise spans are exported in batches.

    The tracer is always on.
    """
    provider = TracerProvider(
        resource=Resource.create({"service.name": service, "service.version": __version__})
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter) if immediate else BatchSpanProcessor(exporter))
    return Collecting(provider.get_tracer("specsot", __version__))


class Collecting(Tracer):
    """A tracer whose spans are collected.

    on: True, because spans are collected.
    """

    on = True

    def __init__(self, tracer: SdkTracer) -> None:
        """tracer: the SDK's tracer, which creates the spans."""
        self._tracer = tracer

    def begin(
        self, name: str, parent: str | None = None, linked: Iterable[str] = (), about: About | None = None
    ) -> Span:
        """Start a span that is collected, and return it.

        name: name of the span.
        parent: the context of the span within which this one runs. None starts a new trace.
        linked: contexts of related spans, which become links.
        about: attributes of the span, or None.

        `parent` and `linked` must be valid contexts in the format of `traceparent`; others raise ValueError.
        The caller must end the span.
        """
        context = set_span_in_context(NonRecordingSpan(_read(parent))) if parent else None
        links = [Link(_read(link)) for link in linked]
        return Collected(self._tracer.start_span(name, context, attributes=about, links=links))


class Collected(Span):
    """One collected span.

    context: the context of the span in the format of `traceparent`. Its flags say whether the span is
        sampled.
    """

    def __init__(self, span: SdkSpan) -> None:
        """Wrap a span, and write its context as text.

        span: the SDK's span, which has been started.
        """
        self._span = span
        ids = span.get_span_context()
        self.context = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"

    def note(self, event: str, about: About | None = None) -> None:
        """Add an event to the span, at the present time.

        event: name of the event.
        about: attributes of the event, or None.
        """
        self._span.add_event(event, about)

    def end(self, about: About | None = None, error: BaseException | str | None = None) -> None:
        """End the span, with the status ERROR if there is an error.

        about: attributes to add to the span, or None.
        error: the error, or the name of its kind, which becomes the attribute `error.type`; None on success.

        Must be called once. Without an error, the status stays unset.
        """
        self._span.set_attributes(about or {})
        if error is not None:
            kind = error if isinstance(error, str) else type(error).__name__
            self._span.set_status(StatusCode.ERROR, kind)
            self._span.set_attribute("error.type", kind)
        self._span.end()


def _read(context: str) -> SpanContext:
    """Return the SDK's form of a context.

    context: a valid context in the format of `traceparent`.

    Raises ValueError for any other text.
    """
    _, trace, span, flags = context.split("-")
    return SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
