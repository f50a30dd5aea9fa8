"""When spans are collected: the standard variables say so, and nothing is imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specsot.errors import InvalidRequest
from specsot.tracing import OFF, followed, trace_of, well_formed
from specsot.tracing.starting import exporter_of, start_tracing

GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("environment", "exporter"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "otlp_proto_grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, "otlp_proto_grpc"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            "otlp_proto_http",
        ),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp_proto_grpc"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, None),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, None),
    ],
)
def test_the_standard_variables_decide(environment: dict[str, str], exporter: str | None) -> None:
    assert exporter_of(environment) == exporter


def test_an_exporter_that_is_not_there_is_one_line() -> None:
    with pytest.raises(InvalidRequest, match="the exporter of traces zipkin is not installed"):
        start_tracing("master", {"OTEL_TRACES_EXPORTER": "zipkin"})


def test_off_costs_no_import() -> None:
    code = (
        "import sys; from specsot.tracing import OFF; from specsot.tracing.starting import start_tracing; "
        "print(start_tracing('worker', {}) is OFF, any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "False"]


def test_the_installed_exporter_is_found() -> None:
    pytest.importorskip("opentelemetry.sdk")
    assert start_tracing("worker", {"OTEL_TRACES_EXPORTER": "console"}).on
    assert not OFF.on


@pytest.mark.parametrize(
    "words",
    [
        "",
        "x",
        GOOD.upper(),
        GOOD + "-1",
        GOOD.replace("4bf92f35", "zzzzzzzz"),
        f"00-{'0' * 32}-{'1' * 16}-01",
    ],
)
def test_what_is_no_context_counts_as_absent(words: str) -> None:
    assert (well_formed(words), trace_of(words), followed(words)) == (None, None, None)


def test_only_a_sampled_context_is_carried_on() -> None:
    assert followed(GOOD) == GOOD
    assert followed(GOOD[:-2] + "00") is None
    assert trace_of(GOOD[:-2] + "00") == "4bf92f3577b34da6a3ce929d0e0e4736"
