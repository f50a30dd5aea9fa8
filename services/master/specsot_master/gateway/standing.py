"""Figures that are looked up when Prometheus asks for them: of the ring, its pages, its requests.

Refuses to know what happened between two looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specsot.events import Reason
from specsot.info import Info, LapsInfo, PagesInfo, ReplicaInfo, RequestsInfo

LABELS = ("model_name", "engine")  # engine: which ring, as vLLM numbers its data-parallel ones

GAUGES = {
    "num_requests_running": "Requests in the ring",
    "num_requests_waiting": "Requests that wait for their turn",
    "kv_cache_usage_perc": "Share of KV pages that somebody needs, 1 is all",
    "kv_pages": "KV pages of the ring, the same number in every member",
    "kv_pages_free": "KV pages that nobody needs",
    "kv_pages_kept": "KV pages that hold beginnings of prompts",
    "sot_branch_active": "Branches being written",
    "ring_ready": "Whether the ring is complete",
    "epoch": "The ring's epoch",
}
COUNTERS = {
    "laps": "Laps of the ring",
    "generation_tokens": "Tokens written, skeletons included",
    "prompt_tokens": "Tokens of prompts",
    "prefix_cache_queries": "Prompt tokens looked for in the ring",
    "prefix_cache_hits": "Prompt tokens that were there already",
    "request_refused": "Requests there was no room for",
}

_FINISH_REASONS = {reason.value for reason in Reason}


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """One ring. labels: a value for each of LABELS. branches: that are being written."""

    labels: Mapping[str, str]
    ring: Info | ReplicaInfo
    branches: int


def families_of(engines: Sequence[EngineGauges]) -> Iterator[Metric]:
    """Gauges and counters of a master's rings."""
    told = [(tuple(one.labels.values()), gauges_of(one)) for one in engines]
    for name, about in GAUGES.items():
        yield _filled(GaugeMetricFamily(f"specsot:{name}", about, labels=LABELS), told, name)
    for name, about in COUNTERS.items():
        yield _filled(CounterMetricFamily(f"specsot:{name}", about, labels=LABELS), told, name)
    yield from _ended_requests(engines)


def gauges_of(engine: EngineGauges) -> dict[str, float]:
    ring = engine.ring
    requests, laps = ring.requests or RequestsInfo(), ring.laps or LapsInfo()
    pages = ring.pages or PagesInfo(0, 0, 0)
    return {
        "num_requests_running": requests.running,
        "num_requests_waiting": requests.waiting,
        "kv_cache_usage_perc": used_share(ring.pages),
        "kv_pages": pages.total,
        "kv_pages_free": pages.free,
        "kv_pages_kept": pages.kept,
        "sot_branch_active": engine.branches,
        "ring_ready": ring.ready,
        "epoch": ring.epoch,
        "laps": laps.laps,
        "generation_tokens": laps.tokens,
        "prompt_tokens": requests.prompt_tokens,
        "prefix_cache_queries": requests.prompt_tokens,
        "prefix_cache_hits": requests.cached_tokens,
        "request_refused": requests.refused,
    }


def used_share(pages: PagesInfo | None) -> float:
    return 1 - pages.free / pages.total if pages and pages.total else 0.0


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    told: Sequence[tuple[tuple[str, ...], Mapping[str, float]]],
    name: str,
) -> Metric:
    for values, figures in told:
        family.add_metric(values, figures[name])
    return family


def _ended_requests(engines: Sequence[EngineGauges]) -> Iterator[Metric]:
    """Requests that are over: by a reason of their own, or by an error."""
    well = CounterMetricFamily(
        "specsot:request_success", "Requests that ended by themselves", labels=(*LABELS, "finished_reason")
    )
    badly = CounterMetricFamily(
        "specsot:request_failure", "Requests that ended in an error", labels=(*LABELS, "error")
    )
    for one in engines:
        for why, count in one.ring.requests.ended if one.ring.requests else ():
            (well if why in _FINISH_REASONS else badly).add_metric((*one.labels.values(), why), count)
    yield from (well, badly)
