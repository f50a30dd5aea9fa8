"""Steps, stages and drafts as spans of a traced request, over real links; and what the same parts count."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from specsot.service.telemetry import Observation
from specsot.tracing.collecting import collect
from specsot_drafter import __main__ as drafter
from specsot_drafter.telemetry import DrafterTelemetry
from specsot_worker import __main__ as worker
from specsot_worker.telemetry import WorkerTelemetry
from tests.cut_trees import cut_into
from tests.laws.ring import Setup, ring_of

pytestmark = pytest.mark.timeout(120)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
REQUEST = "00f067aa0ba902b7"
CALLER = f"00-{TRACE}-{REQUEST}-01"
PROMPT = [5, 17, 99, 23, 4, 8, 15, 16]


class Observed:
    """Every member of a ring with a tracer and a registry of its own."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.registries: dict[str, CollectorRegistry] = {}

    def watch(self, name: str) -> object:
        registry = self.registries[name] = CollectorRegistry()
        kind = name.split("-")[0]
        observation = Observation(registry, collect(f"specsot-{kind}", self.exporter, immediate=True))
        return DrafterTelemetry(observation) if kind == "drafter" else WorkerTelemetry(observation, every=4)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def frames(self, member: str) -> float:
        return self.figure(member, "worker_frames_total")

    def figure(self, member: str, name: str, **labels: str) -> float:
        value = self.registries[member].get_sample_value(f"specsot:{name}", labels)
        assert value is not None, generate_latest(self.registries[member]).decode()
        return value


def parents(spans: Sequence[ReadableSpan]) -> set[str]:
    return {f"{span.parent.span_id:016x}" for span in spans}


def ids(spans: Sequence[ReadableSpan]) -> set[str]:
    return {f"{span.context.span_id:016x}" for span in spans}


async def test_a_traced_request_and_an_untraced_one(demo_model: Path) -> None:
    """Trees travel whole: of a tree in parts, each stage counts each part that it computes, and the last
    stage computes no part that its verification does not need. What steps take decides whether trees are cut.
    """
    seen = Observed()
    setup = Setup(
        demo_model / "base",
        demo_model / "eagle3",
        stages=2,
        links="grpc",
        watch=seen.watch,
        make_depth=cut_into(1),
    )
    async with ring_of(setup) as ring:
        quiet = await ring.open(PROMPT, limit=8)
        await ring.written(quiet)
        assert seen.exporter.get_finished_spans() == ()

        traced = await ring.open(PROMPT, limit=24, trace=CALLER)
        await ring.written(traced)
        draft_rounds = len(ring.texts[quiet].draft_rounds) + len(ring.texts[traced].draft_rounds)
        async with asyncio.timeout(60):
            while (frames := seen.frames("worker-0")) != seen.frames("worker-1"):  # noqa: ASYNC110 - counters
                await asyncio.sleep(0.001)  # the frame that closes the text is on its way
        assert frames >= draft_rounds
        assert seen.figure("worker-0", "worker_kv_pages_free") <= seen.figure("worker-0", "worker_kv_pages")

    steps, stages, drafts = (seen.spans(name) for name in ("step", "stage", "draft"))
    assert 0 < len(steps) <= frames / 4 + 2
    assert {f"{span.context.trace_id:032x}" for span in (*steps, *stages, *drafts)} == {TRACE}
    assert parents(steps) == {REQUEST}
    assert parents(stages) == ids(steps)
    ranges = Counter(span.attributes["specsot.layers"] for span in stages)
    assert [*ranges.values()] == [len(steps)] * 2
    assert sorted(text.split(":")[0] == "0" for text in ranges) == [False, True]
    assert drafts
    assert parents(drafts) <= ids(steps)
    services = {span.resource.attributes["service.name"] for span in (*steps, *stages, *drafts)}
    assert services == {"specsot-worker", "specsot-drafter"}

    assert seen.figure("worker-0", "worker_step_seconds_count") > 0
    assert seen.figure("worker-0", "worker_hop_seconds_count") > 0
    assert seen.figure("worker-1", "worker_queue_seconds_count") > 0
    assert seen.figure("worker-1", "worker_step_seconds_count") == 0
    assert seen.figure("drafter", "drafter_draft_seconds_count") > 0
    assert seen.figure("worker-1", "worker_compute_seconds_sum") > 0


@pytest.mark.parametrize(("service", "telemetry"), [(worker, WorkerTelemetry), (drafter, DrafterTelemetry)])
def test_members_note_what_happens_in_steps_for_those_who_ask(
    demo_model: Path, service: Any, telemetry: type
) -> None:
    words = ["--model", f"{demo_model / 'base'}", "--master", "127.0.0.1:1"]
    program = service.program(words if service is worker else [*words, "--drafter", "ngram"])
    traced = Observation(tracer=collect("member", InMemorySpanExporter(), immediate=True))
    with ThreadPoolExecutor(1) as compute:
        made = [
            program.make(seen, program.options, "name", "address", None, compute)
            for seen in (Observation(), Observation(CollectorRegistry()), traced)
        ]
    assert [isinstance(one._observer, telemetry) for one in made] == [False, True, True]
