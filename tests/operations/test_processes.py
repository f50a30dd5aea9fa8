"""A fleet of processes, watched in every way at once: lines, spans and figures agree, and none has text."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk")

import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from specsot.errors import InvalidRequest
from specsot.events import Finished
from specsot.params import Ask, Limits
from specsot.transport.grpc_client import MasterClient
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_app.fleet.processes import ProcessFleet
from tests.conftest import REPOSITORY
from tests.endpoints.front import stub

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

MARKER = "Zanzibar"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE}-00f067aa0ba902b7-01"
BOARD = REPOSITORY / "deploy" / "grafana" / "dashboards" / "specsot.json"
ASK = Ask(prompt=f"Explain {MARKER}.", mode="sot", seed=1, limits=Limits(max_new_tokens=400))


@dataclass
class Told:
    """Everything the services wrote, and what was answered."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    pages: dict[str, str] = field(default_factory=dict)
    answer: str = ""

    def logged(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for service, line in self.lines:
            if line.startswith('{"'):
                yield service, json.loads(line)

    def about(self, event: str) -> list[dict[str, Any]]:
        return [line for _, line in self.logged() if line["event"] == event]

    def spans(self) -> list[dict[str, Any]]:
        """The console exporter writes each as indented JSON; log lines may stand between."""
        found: list[dict[str, Any]] = []
        for service in {service for service, _ in self.lines}:
            text = "\n".join(line for one, line in self.lines if one == service and not line.startswith('{"'))
            found += [
                json.loads(block) for block in re.findall(r"^\{$.*?^\}$", text, re.DOTALL | re.MULTILINE)
            ]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told() -> AsyncIterator[Told]:
    """One request is traced, one left by its client, one refused; then the fleet is gone."""
    told = Told()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("SPECSOT_LOG_LEVEL", "debug"),
            ("SPECSOT_LOG_FORMAT", "json"),
            ("SPECSOT_METRICS", "127.0.0.1:0"),
            ("SPECSOT_TRACE_STEPS", "2"),
            ("OTEL_TRACES_EXPORTER", "console"),
            ("OTEL_TRACES_SAMPLER", "parentbased_always_off"),
        ):
            patch.setenv(name, value)
        wanted = FleetOptions(kind="processes", stages=2)
        fleet = await ProcessFleet.start(
            wanted, models_of(wanted), on_line=lambda service, line: told.lines.append((service, line))
        )
        try:
            told.answer = await traced(fleet.children[0].service.address)
            await abandoned(fleet._client)  # type: ignore[reportPrivateUsage]
            # What was abandoned may still turn: a step that the master counts has been through the workers.
            for line in sorted(told.about("metrics served"), key=lambda line: line["service"] != "master"):
                page = await asyncio.to_thread(read, line["at"])
                told.pages[line["service"]] = told.pages.get(line["service"], "") + page
        finally:
            await fleet.close()
    yield told


async def traced(address: str) -> str:
    from specsot.transport.wire.events import decode_event, encode_ask

    async with grpc.aio.insecure_channel(address) as channel:
        call = stub(channel).Generate(encode_ask(ASK, "r-traced"), metadata=(("traceparent", CALLER),))
        events = [decode_event(message).event async for message in call]
    assert isinstance(events[-1], Finished)
    return events[-1].text


async def abandoned(client: MasterClient) -> None:
    """One that its client leaves at its first event, and one that is too long to be looked at."""
    events = client.generate(ASK, "r-left")
    await anext(events)
    await events.aclose()
    while (await client.info()).requests.running:
        pass  # each look is a call: the master hears of the other's end meanwhile
    with pytest.raises(InvalidRequest):
        async for _ in client.generate(Ask(prompt=MARKER * 200_000), "r-long"):
            pass


def read(url: str) -> str:
    local = re.sub(r"//[^:/]+:", "//127.0.0.1:", url)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(local, timeout=100) as page:
        return page.read().decode()


@pytest.mark.asyncio(loop_scope="module")
async def test_every_log_line_is_json_and_names_its_service(told: Told) -> None:
    lines = list(told.logged())
    assert len(lines) > 20
    for service, line in lines:
        assert {"event", "level", "timestamp", "service"} <= set(line), line
        assert line["service"] == service.split("-")[0]
    assert {line["service"] for _, line in lines} == {"master", "worker", "drafter"}
    assert not any("Traceback" in line for _, line in told.lines)


@pytest.mark.asyncio(loop_scope="module")
async def test_lines_about_a_request_name_it_and_its_trace(told: Told) -> None:
    for event in ("request", "finished"):
        (line,) = [one for one in told.about(event) if one["request_id"] == "r-traced"]
        assert line["trace_id"] == TRACE
    (left,) = [one for one in told.about("abandoned") if one["request_id"] == "r-left"]
    assert "trace_id" in left, "its own trace has an id, though nobody collects it"


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_that_is_written_down_has_text(told: Told) -> None:
    """At the debug level, in lines, spans and figures."""
    written = "\n".join([*(line for _, line in told.lines), *told.pages.values()])
    assert MARKER not in written
    words = {word for word in re.findall(r"\w{8,}", told.answer) if word.lower() not in ("generated",)}
    assert len(words) > 3
    assert not [word for word in words if re.search(rf"\b{word}\b", written)]


@pytest.mark.asyncio(loop_scope="module")
async def test_one_trace_through_all_services(told: Told) -> None:
    spans = told.spans()
    ours = [span for span in spans if span["context"]["trace_id"] == f"0x{TRACE}"]
    assert len(ours) == len(spans), "requests whose callers collect nothing are not collected"
    services = {span["resource"]["attributes"]["service.name"] for span in ours}
    assert services == {"specsot-master", "specsot-worker", "specsot-drafter"}
    assert {"request", "wait", "plan", "step", "stage", "draft"} <= {span["name"] for span in ours}
    known = {span["context"]["span_id"] for span in ours} | {"0x00f067aa0ba902b7"}
    assert {span["parent_id"] for span in ours} <= known, "a span whose parent nobody wrote"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_board_asks_for_figures_that_there_are(told: Told) -> None:
    there = known(told)
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            wanted = re.findall(r"(?:specsot:|process_)\w+", target["expr"])
            assert wanted, target["expr"]
            lacking = [name for name in wanted if name not in there and ":gpu_" not in name]
            assert not lacking, f"{panel['title']}: {lacking}"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_tells_of_figures_that_there_are(told: Told) -> None:
    """And of all that are ours."""
    docs = REPOSITORY / "docs"
    page = (docs / "operations.md").read_text() + (docs / "metrics.md").read_text()
    named = {name for name in re.findall(r"specsot:\w+", page) if ":gpu_" not in name}
    bare = {re.sub("_(bucket|count|sum)$", "", name) for name in known(told)}
    assert named <= bare
    assert {name for name in bare if name.startswith("specsot:")} <= named


def known(told: Told) -> set[str]:
    """Names of samples, of all services."""
    families = (text_string_to_metric_families(page) for page in told.pages.values())
    return {name for page in families for family in page for name in names_of(family)}


def names_of(family: Any) -> set[str]:
    """Of a family's samples; those of a histogram and a counter without a sample yet are known anyway."""
    ends = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",)}.get(family.type, ("",))
    return {sample.name for sample in family.samples} | {family.name + end for end in ends}


@pytest.mark.asyncio(loop_scope="module")
async def test_figures_of_all_services_agree(told: Told) -> None:
    master, worker = (figures(told.pages[name]) for name in ("master", "worker"))
    assert master["specsot:request_success_total"] >= 1
    assert master["specsot:step_seconds_count"] > 3
    assert worker["specsot:worker_frames_total"] >= 2 * master["specsot:steps_total"], "each of both stages"
    assert master["specsot:kv_pages"] == worker["specsot:worker_kv_pages"] / 2
    assert master["specsot:sot_branch_seconds_count"] >= 1
    assert 0 < worker["specsot:worker_hop_seconds_sum"] < worker["specsot:worker_step_seconds_sum"]
    assert figures(told.pages["drafter"])["specsot:drafter_draft_seconds_count"] > 0


def figures(page: str) -> dict[str, float]:
    """Sums over labels and processes."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums
