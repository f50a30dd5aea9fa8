"""Starts OpenTelemetry where the standard variables ask for it; elsewhere nothing is even imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from specsot.errors import InvalidRequest
from specsot.tracing import OFF, Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def start_tracing(service: str, environment: Mapping[str, str] = os.environ) -> Tracer:
    """OpenTelemetry where its standard variables name an endpoint or an exporter; elsewhere nothing is even
    imported. Raises InvalidRequest for an exporter that is not installed.
    """
    name = exporter_of(environment)
    if name is None:
        return OFF
    exporter = _find(name)
    from specsot.tracing.collecting import collect

    return collect(environment.get("OTEL_SERVICE_NAME") or f"specsot-{service}", exporter())


def exporter_of(environment: Mapping[str, str]) -> str | None:
    """The exporter that the variables ask for, by OpenTelemetry's own name, or None."""
    named = environment.get("OTEL_TRACES_EXPORTER", "")
    wanted = bool(named) or any(environment.get(name) for name in ENDPOINTS)
    if not wanted or named == "none" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if named not in ("", "otlp"):
        return named
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), "grpc")
    return OTLP.get(protocol, protocol)


def _find(name: str) -> Any:
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
    if found is None:
        hint = "; pip install 'specsot[observe]'" if name == OTLP["grpc"] else ""
        raise InvalidRequest(f"no exporter of traces named {name} is installed{hint}", "OTEL_TRACES_EXPORTER")
    return found.load()
