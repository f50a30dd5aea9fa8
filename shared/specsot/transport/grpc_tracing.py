"""The caller's trace context, out of a call's metadata and into it.

W3C's `traceparent`, as every OpenTelemetry instrumentation of gRPC writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from structlog.contextvars import bind_contextvars

from specsot.tracing import TRACEPARENT, caller, trace_of, well_formed


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Sets `caller` for the task that answers a call, and names its trace in that task's log lines.

    What does not parse counts as absent.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        metadata: Any = handler_call_details.invocation_metadata or ()
        caller.set(next((well_formed(value) for key, value in metadata if key == TRACEPARENT), None))
        bind_contextvars(trace_id=trace_of(caller.get()))
        return await continuation(handler_call_details)


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata for a call: the context of the program around us, if it traces with OpenTelemetry."""
    api = sys.modules.get("opentelemetry.propagate")
    carrier: dict[str, str] = {}
    if api is not None:
        api.inject(carrier)
    return tuple(carrier.items())
