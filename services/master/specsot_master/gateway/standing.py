"""Figures that are looked up when Prometheus asks for them: of the ring, its pages, its requests.

Refuses to know what happened between two looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specsot.events import Reason
from specsot.info import Info, LapsInfo, PagesInfo, RequestsInfo

LABELS = ("model_name", "engine")

_REASONS = {reason.value for reason in Reason}


def families_of(info: Info, branches: int, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Gauges and counters of a master. labels: a value for each of LABELS."""
    values = tuple(labels.values())
    requests, laps = info.requests or RequestsInfo(), info.laps or LapsInfo()
    pages = info.pages or PagesInfo(0, 0, 0)
    for name, about, value in (
        ("num_requests_running", "Requests in the ring", requests.running),
        ("num_requests_waiting", "Requests that wait for their turn", requests.waiting),
        ("kv_cache_usage_perc", "Share of KV pages that somebody needs, 1 is all", used_of(info.pages)),
        ("kv_pages", "KV pages of the ring, the same number in every member", pages.total),
        ("kv_pages_free", "KV pages that nobody needs", pages.free),
        ("kv_pages_kept", "KV pages that hold beginnings of prompts", pages.kept),
        ("sot_branch_active", "Branches being written", branches),
        ("ring_ready", "Whether the ring is complete", info.ready),
        ("epoch", "The ring's epoch", info.epoch),
    ):
        yield _filled(GaugeMetricFamily(f"specsot:{name}", about, labels=LABELS), values, value)
    for name, about, value in (
        ("laps", "Laps of the ring", laps.laps),
        ("generation_tokens", "Tokens written, skeletons included", laps.tokens),
        ("prompt_tokens", "Tokens of prompts", requests.prompt_tokens),
        (
            "prefix_cache_queries",
            "Prompt tokens looked for in the ring",
            requests.prompt_tokens,
        ),
        ("prefix_cache_hits", "Prompt tokens that were there already", requests.cached_tokens),
        ("request_refused", "Requests there was no room for", requests.refused),
    ):
        yield _filled(CounterMetricFamily(f"specsot:{name}", about, labels=LABELS), values, value)
    yield from _ended(requests, values)


def used_of(pages: PagesInfo | None) -> float:
    return 1 - pages.free / pages.total if pages and pages.total else 0.0


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: tuple[str, ...], value: float) -> Metric:
    family.add_metric(values, value)
    return family


def _ended(requests: RequestsInfo, values: tuple[str, ...]) -> Iterator[Metric]:
    """Requests that are over: by a reason of their own, or by an error."""
    well = CounterMetricFamily(
        "specsot:request_success", "Requests that ended by themselves", labels=(*LABELS, "finished_reason")
    )
    badly = CounterMetricFamily(
        "specsot:request_failure", "Requests that ended in an error", labels=(*LABELS, "error")
    )
    for why, count in requests.ended:
        (well if why in _REASONS else badly).add_metric((*values, why), count)
    yield from (well, badly)
