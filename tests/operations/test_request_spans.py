"""One request as spans: its phases, whose child it is at each endpoint, and what no span ever carries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import propagate as propagate
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specsot.core.info import Info
from specsot.errors import Overloaded
from specsot.params import Ask, Limits
from specsot.tracing import Tracer, caller, current, followed, trace_of
from specsot.tracing.collecting import collect
from specsot.transport.grpc_client import trace_metadata
from specsot_master.master import RequestCounter
from specsot_master.telemetry import RequestSpans
from tests.endpoints.front import front, question, stub
from tests.http.house import Served, served
from tests.master.letters import DIRECT, SAYS, SOT
from tests.master.stage import Stage

pytestmark = pytest.mark.timeout(60)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"


class Collection:
    """What a service's tracer hands over."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer: Tracer = collect("specsot-master", self.exporter, immediate=True)

    def watch(self, desk: RequestCounter) -> None:
        desk.watch(lambda ask: RequestSpans(self.tracer, ask, "demo"))

    def watched(self, stage: Stage) -> tuple[Stage, RequestCounter]:
        """With a watched desk before it."""
        desk = RequestCounter(stage.engine, Info)
        self.watch(desk)
        return stage, desk

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def collection() -> Collection:
    caller.set(None)
    return Collection()


@pytest.fixture
async def house(collection: Collection) -> AsyncIterator[Any]:
    async with served() as one:
        collection.watch(one.desk)
        yield one


async def ask(stage: Stage, desk: RequestCounter, ask: Ask) -> None:
    async def read() -> None:
        async for _ in desk.generate(ask):
            pass

    await stage.play(asyncio.create_task(read()))


async def test_a_planned_request_is_a_tree_of_phases(collection: Collection) -> None:
    stage, desk = collection.watched(Stage(SAYS))
    await ask(stage, desk, SOT)
    spans = collection.spans
    branches = [name for name in spans if name.startswith("branch ")]
    assert set(spans) == {"request", "wait", "plan", *branches}
    assert len(branches) == spans["request"].attributes["specsot.branches"] > 1
    whole = spans["request"].get_span_context().span_id
    assert {span.parent.span_id for name, span in spans.items() if name != "request"} == {whole}
    assert spans["request"].attributes["gen_ai.usage.output_tokens"] > 0
    assert spans["request"].resource.attributes["service.name"] == "specsot-master"
    assert [event.name for event in spans["plan"].events] == ["first token"]


async def test_a_refused_request_says_by_what(collection: Collection) -> None:
    stage, desk = collection.watched(Stage(SAYS))
    stage.engine._accept = _full  # type: ignore[method-assign]
    with pytest.raises(Overloaded):
        await ask(stage, desk, SOT)
    assert collection.spans["request"].attributes["error.type"] == "Overloaded"
    assert not collection.spans["request"].status.is_ok


async def _full(*_: object) -> None:
    raise Overloaded("no room")


async def test_a_reader_that_leaves_ends_every_span(collection: Collection) -> None:
    _, desk = collection.watched(Stage(SAYS))
    events = desk.generate(SOT)
    await anext(events)
    await events.aclose()
    assert collection.spans["request"].attributes["error.type"] == "abandoned"
    assert set(collection.spans) == {"request", "wait", "plan"}


async def test_over_grpc_it_is_the_callers_child(collection: Collection) -> None:
    async with front() as one, one.channel() as channel:
        collection.watch(one.desk)
        for brought in (CALLER, "00-zz-1-01"):
            async for _ in stub(channel).Generate(question(), metadata=(("traceparent", brought),)):
                pass
    first, second = (span for span in collection.exporter.get_finished_spans() if span.name == "request")
    assert f"{first.context.trace_id:032x}" == TRACE
    assert f"{first.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert second.parent is None


async def test_over_http_it_is_the_callers_child(house: Served, collection: Collection) -> None:
    body = {"messages": [{"role": "user", "content": "What is it?"}], "model": "demo"}
    await house.post("/v1/chat/completions", body, headers={"traceparent": CALLER})
    assert f"{collection.spans['request'].context.trace_id:032x}" == TRACE


async def test_the_ring_receives_only_traces_that_are_collected(collection: Collection) -> None:
    stage, desk = collection.watched(Stage(SAYS))
    await ask(stage, desk, DIRECT)
    brought = stage.prompts_seen[-1][0].trace
    assert brought == followed(brought)
    assert brought.startswith(_context(collection.spans["request"]))
    caller.set(CALLER.removesuffix("01") + "00")
    await ask(stage, desk, DIRECT)
    assert stage.prompts_seen[-1][0].trace is None


def _context(span: ReadableSpan) -> str:
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"


async def test_spans_carry_no_text(collection: Collection) -> None:
    stage, desk = collection.watched(Stage({"zanzibar": "pomegranate juice"}))
    await ask(stage, desk, Ask(prompt="zanzibar?", mode="direct", limits=Limits(max_new_tokens=32)))
    told = json.dumps([json.loads(span.to_json()) for span in collection.exporter.get_finished_spans()])
    assert "request" in told
    assert "zanzibar" not in told
    assert "pomegranate" not in told


def test_a_program_that_traces_itself_hands_its_context_on() -> None:
    assert trace_metadata() == ()
    with TracerProvider().get_tracer("a program").start_as_current_span("work") as span:
        ((key, context),) = trace_metadata()
    assert key == "traceparent"
    assert trace_of(context) == f"{span.get_span_context().trace_id:032x}"


def test_without_a_watch_nothing_is_set() -> None:
    assert current.get() is None
