"""Starts OpenTelemetry if its standard variables ask for it. Otherwise OpenTelemetry is not even imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from specsot.errors import InvalidRequest
from specsot.tracing import OFF, Tracer

# Variables that name the address of a collector. Any of them turns tracing on.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# Variables that name the protocol to a collector; the first that is set applies.
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# Name of the exporter's entry point, by protocol.
OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def start_tracing(service: str, environment: Mapping[str, str] = os.environ) -> Tracer:
    """Return the tracer that OpenTelemetry's standard variables ask for.

    Returns `OFF`, which records nothing, if they name neither an endpoint nor an exporter, or turn tracing
    off.

    service: name of the service; spans are exported for "specsot-" and this name unless OTEL_SERVICE_NAME is
        set.
    environment: the environment variables.

    Raises InvalidRequest for an exporter that is not installed.

    Raises InvalidRequest also if the variables name an exporter that does not exist. A returned tracer
    exports in the background.
    """
    name = exporter_of(environment)
    if name is None:
        return OFF
    exporter = _find(name)
    from specsot.tracing.collecting import collect

    return collect(environment.get("OTEL_SERVICE_NAME") or f"specsot-{service}", exporter())


def exporter_of(environment: Mapping[str, str]) -> str | None:
    """Return the name of the exporter's entry point that the variables ask for, or None if tracing is off.

    environment: the environment variables.

    Tracing is off if neither an endpoint nor an exporter is named, if the exporter is "none", or if
    OTEL_SDK_DISABLED is "true" in any case. Without an exporter, or with "otlp", the name follows from the
    protocol, which is "grpc" by default; any other exporter or protocol is returned as it is.
    """
    named = environment.get("OTEL_TRACES_EXPORTER", "")
    requested = bool(named) or any(environment.get(name) for name in ENDPOINTS)
    if not requested or named == "none" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if named not in ("", "otlp"):
        return named
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), "grpc")
    return OTLP.get(protocol, protocol)


def _find(name: str) -> Any:
    """Return the class of an installed exporter. Raises InvalidRequest if it is not installed.

    name: name of the exporter's entry point, such as "otlp_proto_grpc".

    The error names OTEL_TRACES_EXPORTER as its field. Raises also what importing the exporter raises.
    """
    entry = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
    if entry is None:
        hint = "; pip install 'specsot[observe]'" if name == OTLP["grpc"] else ""
        raise InvalidRequest(f"the exporter of traces {name} is not installed{hint}", "OTEL_TRACES_EXPORTER")
    return entry.load()
