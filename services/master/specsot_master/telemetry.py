"""Records requests and steps as OpenTelemetry spans, and as Prometheus metrics named after vLLM's.

A *step* is one forward pass of the ring.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specsot import events
from specsot.core.frames import Result
from specsot.core.info import Info, PagesInfo, ReplicaInfo, RequestsInfo, StepsInfo
from specsot.errors import SpecsotError
from specsot.params import Ask
from specsot.service.telemetry import STEP_BUCKETS as STEP_SECONDS
from specsot.service.telemetry import PolledCollector, registry_of
from specsot.tracing import Span, Tracer, caller, current
from specsot_master.config import MetricPrefix
from specsot_master.master import Master

# Names of the spans of a request: of the whole request, of its wait for admission, of its plan, and of a
# direct answer.
REQUEST_SPAN = "request"
WAIT_SPAN = "wait"
PLAN_SPAN = "plan"
ANSWER_SPAN = "answer"
# Name of the note in a phase's span with the time of its first text.
FIRST_TOKEN = "first token"


class RequestSpans:
    """Records the spans of one request, as an observer of its events.

    The request's span is a child of the caller's span. Its phases (waiting, plan, each branch, answer) are
    children of the request's span.
    """

    def __init__(self, tracer: Tracer, ask: Ask, model: str) -> None:
        """Begin the span of the request, and that of its wait for admission. The request's span becomes the
        current one.

        tracer: begins the spans.
        ask: what the client asks for.
        model: the public name of the model.
        """
        self._tracer = tracer
        about = {"gen_ai.operation.name": "chat", "gen_ai.request.model": model, "specsot.mode": ask.mode}
        self._whole = tracer.begin(REQUEST_SPAN, caller.get(), about=about)
        current.set(self._whole.context)
        self._open: dict[str, Span] = {REQUEST_SPAN: self._whole}
        self._spoken: set[str] = set()
        self._begin(WAIT_SPAN)

    def on_event(self, event: events.Event) -> None:
        """Begin or end the spans of the phases that an event separates; an event that separates none is
        ignored. Started ends the wait and begins the answer or the plan; Planned ends the plan, and begins
        the answer if it has no points; a branch has a span from its start to its end, marked as failed for
        the reason FAILED. Texts note the first token of their phase, and Finished ends everything.

        event: an event of the request.
        """
        match event:
            case events.Started():
                self._end(WAIT_SPAN)
                self._begin(ANSWER_SPAN if event.mode == "direct" else PLAN_SPAN)
                self._whole.note("started", {"gen_ai.response.id": event.request})
            case events.SkeletonText():
                self._speak(PLAN_SPAN)
            case events.Planned(points):
                self._end(PLAN_SPAN, points=len(points))
                if not points:
                    self._begin(ANSWER_SPAN)
            case events.BranchStarted(branch):
                self._begin(_branch_span(branch), branch=branch, budget=event.budget)
            case events.BranchText(branch):
                self._speak(_branch_span(branch))
            case events.BranchFinished(branch, reason, tokens):
                self._end(
                    _branch_span(branch), reason is events.Reason.FAILED, tokens=tokens, reason=reason.value
                )
            case events.MergedText() | events.PromptScored():
                self._speak(ANSWER_SPAN)
            case events.Finished():
                self._finish(event)

    def on_end(self) -> None:
        """End all open spans: with the error that is being raised, or as abandoned if the reader has left.
        Spans that have ended are not touched; any exception but a SpecsotError counts as abandoned.
        """
        error = sys.exception()
        for name in reversed(list(self._open)):
            self._open.pop(name).end(error=error if isinstance(error, SpecsotError) else "abandoned")

    def _begin(self, name: str, **attributes: int) -> None:
        """Begin the span of a phase.

        name: the name of the phase, under which `_end` finds the span.
        attributes: attributes of the span; their names get the prefix "specsot.".
        """
        named = {f"specsot.{key}": value for key, value in attributes.items()}
        self._open[name] = self._tracer.begin(name, self._whole.context, about=named)

    def _speak(self, name: str) -> None:
        """Note the first token of a phase in its span; later tokens are ignored. Nothing happens for a phase
        whose span is not open.

        name: the name of the phase.
        """
        if name in self._open and name not in self._spoken:
            self._spoken.add(name)
            self._open[name].note(FIRST_TOKEN)

    def _end(self, name: str, failed: bool = False, **attributes: int | str) -> None:
        """End the span of a phase; nothing happens if it is not open.

        name: the name of the phase.
        failed: True to mark the span as failed.
        attributes: further attributes of the span; their names get the prefix "specsot.".
        """
        if span := self._open.pop(name, None):
            named = {f"specsot.{key}": value for key, value in attributes.items()}
            span.end(named, error="failed" if failed else None)

    def _finish(self, event: events.Finished) -> None:
        """End all spans; the request's span gets the request's statistics. Phases that are still open end
        without an error.

        event: the end of the request.
        """
        figures = event.statistics
        for name in [name for name in self._open if name != REQUEST_SPAN]:
            self._end(name)
        self._open.pop(REQUEST_SPAN).end(
            {
                "gen_ai.usage.input_tokens": figures.prompt_tokens,
                "gen_ai.usage.output_tokens": figures.completion_tokens,
                "gen_ai.response.finish_reasons": [event.reason.value],
                "specsot.steps": figures.steps,
                "specsot.branches": figures.branches,
                "specsot.cached_tokens": figures.cached_tokens,
                "specsot.mean_accepted": figures.mean_accepted,
            }
        )


def _branch_span(point_id: int) -> str:
    """Return the name of the span of a branch.

    point_id: the id of the point that the branch writes.
    """
    return f"branch {point_id}"


# Labels of all metrics. "engine" is the number of the ring, as vLLM numbers its data-parallel engines.
LABELS = ("model_name", "engine")
# Labels of cache_config_info, which gateways made for vLLM read.
CACHE_LABELS = (*LABELS, "block_size", "num_gpu_blocks")
# The reasons with which a request ends by itself; a request that ended in an error has the error's name
# instead.
_FINISH_REASONS = {reason.value for reason in events.Reason}


class EngineGauges:
    """The values of one ring's gauges and counters at one moment, read from the ring's state."""

    def __init__(self, labels: Mapping[str, str], ring: Info | ReplicaInfo, num_branches: int) -> None:
        """Take the values from the state of a ring. Figures that the state lacks, because no ring is
        complete, are 0.

        labels: a value for each of LABELS, by the label's name; the attribute of the same name holds the
            values alone.
        ring: the state of the ring.
        num_branches: how many branches are in progress; the attribute `branches` holds it.
        """
        self.labels = tuple(labels.values())
        self.ring = ring
        self.branches = num_branches
        self.requests = ring.requests or RequestsInfo()
        self.steps = ring.steps or StepsInfo()
        self.pages = ring.pages or PagesInfo(0, 0, 0)

    @property
    def used_share(self) -> float:
        """The fraction of KV pages that requests have reserved; 0 while no ring is complete."""
        return 1 - self.pages.free / self.pages.total if self.pages.total else 0.0


# By the name of a metric without its prefix: its help text, and the function that reads its value.
_Table = Mapping[str, tuple[str, Callable[[EngineGauges], float]]]

# Values that rise and fall.
GAUGES: _Table = {
    "num_requests_running": ("Requests in the ring", lambda one: one.requests.running),
    "num_requests_waiting": ("Requests that wait for their turn", lambda one: one.requests.waiting),
    "kv_cache_usage_perc": (
        "Fraction of KV pages that requests have reserved, from 0 to 1",
        lambda one: one.used_share,
    ),
    "kv_pages": ("KV pages of the ring, the same number in every member", lambda one: one.pages.total),
    "kv_pages_free": ("KV pages that no request has reserved", lambda one: one.pages.free),
    "kv_pages_kept": ("KV pages that hold cached prefixes of prompts", lambda one: one.pages.kept),
    "sot_branch_active": ("Branches being written", lambda one: one.branches),
    "ring_ready": ("Whether the ring is complete", lambda one: one.ring.ready),
    "epoch": ("The ring's epoch", lambda one: one.ring.epoch),
}
# Values that only rise.
COUNTERS: _Table = {
    "steps": ("Steps of the ring", lambda one: one.steps.steps),
    "generation_tokens": ("Tokens written, plans included", lambda one: one.steps.tokens),
    "prompt_tokens": ("Tokens of prompts", lambda one: one.requests.prompt_tokens),
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache",
        lambda one: one.requests.prompt_tokens,
    ),
    "prefix_cache_hits": (
        "Prompt tokens whose KV the ring had already",
        lambda one: one.requests.cached_tokens,
    ),
    "request_refused": ("Requests refused because the queue was full", lambda one: one.requests.refused),
}


def families_of(engines: Sequence[EngineGauges], prefix: MetricPrefix) -> Iterator[Metric]:
    """Yield the gauges and counters of all rings; without a ring, families without values. Gauges come first,
    then counters, the ended requests, and `cache_config_info`.

    engines: the values of each ring.
    prefix: begins the names of all metrics.
    """
    for family, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, (about, read) in table.items():
            metric = family(f"{prefix}:{name}", about, labels=LABELS)
            for one in engines:
                metric.add_metric(one.labels, read(one))
            yield metric
    yield from _ended_requests(engines, prefix)
    cache = GaugeMetricFamily(
        f"{prefix}:cache_config_info",
        "Always 1; the labels are the positions of a KV page and the number of pages",
        labels=CACHE_LABELS,
    )
    for one in engines:
        cache.add_metric((*one.labels, str(one.pages.rows), str(one.pages.total)), 1)
    yield cache


def _ended_requests(engines: Sequence[EngineGauges], prefix: MetricPrefix) -> Iterator[Metric]:
    """Yield two metrics: the counters of finished requests, by reason, and of failed requests, by error. They
    have no values before a request has ended. A reason that is none of `events.Reason` counts as an error.

    engines: the values of each ring.
    prefix: begins the names of both metrics.
    """
    well = CounterMetricFamily(
        f"{prefix}:request_success", "Requests that ended by themselves", labels=(*LABELS, "finished_reason")
    )
    badly = CounterMetricFamily(
        f"{prefix}:request_failure", "Requests that ended in an error", labels=(*LABELS, "error")
    )
    for one in engines:
        for why, count in one.requests.ended:
            (well if why in _FINISH_REASONS else badly).add_metric((*one.labels, why), count)
    yield from (well, badly)


# Upper bounds of histogram buckets, in seconds. Precedent: vLLM.
_ABOVE_HALF = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKEN_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_ABOVE_HALF)
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_ABOVE_HALF, 160, 640, 2560)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Upper bounds of buckets for the tokens of one step. Precedent: vLLM.
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Upper bounds of buckets for the points of one plan.
PLAN_POINT_BUCKETS = tuple(range(1, 17))


def count_buckets(max_bound: int) -> tuple[int, ...]:
    """Return the bucket bounds 1, 2, 5, 10, 20, 50, ..., as vLLM builds them; () for a bound below 1.

        # max_bound 100 -> (1, 2, 5, 10, 20, 50, 100)

    max_bound: the largest bound that may occur.
    """
    bounds = (digit * 10**power for power in range(len(str(max_bound))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_bound)


# Counters that are computed from results: help text, and a label in addition to LABELS.
RESULT_COUNTERS: Mapping[str, tuple[str, *tuple[str, ...]]] = {
    "spec_decode_num_drafts": ("Trees with drafted tokens",),
    "spec_decode_num_draft_tokens": ("Drafted tokens",),
    "spec_decode_num_accepted_tokens": ("Drafted tokens that were accepted",),
    "spec_decode_num_accepted_tokens_per_pos": ("Drafted tokens that were accepted, by depth", "position"),
    "stage_bubble_seconds": ("Seconds of steps in which a stage did not compute", "stage"),
}
# Histograms: help text, bucket bounds, and a label in addition to LABELS. The bounds None stand for token
# counts up to the model's context (`count_buckets`).
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float] | None, *tuple[str, ...]]] = {
    "stage_seconds": ("Compute of one stage in one step", STEP_SECONDS, "stage"),
    "time_to_first_token_seconds": ("From arrival to the first token", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": (
        "Between steps that wrote text for a request; a step may write several tokens",
        TOKEN_LATENCY_BUCKETS,
    ),
    "request_time_per_output_token_seconds": (
        "Mean seconds per token of one request, after its first token",
        TOKEN_LATENCY_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("From arrival to the end", REQUEST_BUCKETS),
    "request_queue_time_seconds": ("From arrival to admission", REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("From admission to the first token", REQUEST_BUCKETS),
    "request_decode_time_seconds": ("From the first token to the end", REQUEST_BUCKETS),
    "request_inference_time_seconds": ("From admission to the end", REQUEST_BUCKETS),
    "step_seconds": ("From one step to the next, while there is work", STEP_SECONDS),
    "request_prompt_tokens": ("Prompt tokens of one request", None),
    "request_generation_tokens": ("Tokens written for one request", None),
    "iteration_tokens_total": (
        "Tokens of one step, over all sequences; unlike vLLM's, without those of prompts",
        STEP_TOKEN_BUCKETS,
    ),
    "sot_points_per_request": ("Points of one plan", PLAN_POINT_BUCKETS),
    "sot_branch_seconds": ("From a branch's start to its end", REQUEST_BUCKETS),
}


class Metrics:
    """The Prometheus metrics of a master, or of one ring of a master (`of`).

    The attribute `branches` is the number of branches in progress.
    """

    def __init__(
        self,
        info: Callable[[], Info],
        has_work: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        registry: CollectorRegistry | None = None,
        prefix: MetricPrefix = "specsot",
    ) -> None:
        """Register all metrics.

        info: returns the state of the rings, from which gauges are read when metrics are collected.
        has_work: returns whether the ring has work, so that the time to its next result counts as a step's
            time.
        clock: returns monotonic seconds.
        registry: the registry of the process, or None to create one.
        prefix: begins the names of all metrics, followed by ":".
        """
        self._busy = has_work
        self._clock = clock
        self._step_began: float | None = None
        self._engines: list[Metrics] = []
        self._registry = registry = registry or registry_of("master")
        model = info().models[0]
        self._labels = {"model_name": model.name, "engine": "0"}
        self._labelled_metrics: dict[tuple[str, ...], Any] = {}
        self._counters = {
            name: Counter(f"{prefix}:{name}", about, (*LABELS, *more), registry=registry)
            for name, (about, *more) in RESULT_COUNTERS.items()
        }
        counts = count_buckets(model.max_positions)
        self._histograms = {
            name: Histogram(
                f"{prefix}:{name}", about, (*LABELS, *more), buckets=buckets or counts, registry=registry
            )
            for name, (about, buckets, *more) in HISTOGRAMS.items()
        }
        self.branches = 0
        registry.register(PolledCollector(lambda: families_of(self._gauges(info()), prefix)))

    def of(self, ring_number: int, has_work: Callable[[], bool]) -> Metrics:
        """Return the metrics of one ring, which share the families of this object and have their own label.
        Once this was called, gauges have one value per ring, in the order of the calls.

        ring_number: the number of the ring.
        has_work: returns whether this ring has work.
        """
        one = copy(self)
        one._labels = self._labels | {"engine": str(ring_number)}  # noqa: SLF001
        one._busy = has_work  # noqa: SLF001
        one._labelled_metrics = {}  # noqa: SLF001
        self._engines.append(one)
        return one

    def _gauges(self, info: Info) -> list[EngineGauges]:
        """Return the present values of all rings, in the order of the rings.

        info: the present state of the rings.
        """
        engines = self._engines or [self]
        rings = info.replicas or [info]
        return [EngineGauges(one._labels, ring, one.branches) for one, ring in zip(engines, rings)]  # noqa: SLF001

    def written(self) -> bytes:
        """Return all metrics in Prometheus' text format, encoded as UTF-8."""
        return generate_latest(self._registry)

    def observe(self, name: str, value: float, *label_values: str) -> None:
        """Add a value to a histogram of this ring.

        name: the histogram's name in HISTOGRAMS, without a prefix.
        value: the value, in the unit of the histogram.
        label_values: the values of labels in addition to LABELS.

        Raises KeyError for a name that is in neither table.
        """
        self._figure(name, *label_values).observe(value)

    def _count(self, name: str, amount: float = 1, *label_values: str) -> None:
        """Add an amount to a counter of this ring.

        name: the counter's name in RESULT_COUNTERS, without a prefix.
        amount: what is added.
        label_values: the values of labels in addition to LABELS.
        """
        self._figure(name, *label_values).inc(amount)

    def _figure(self, *name_and_labels: str) -> Any:
        """Return a metric, from a cache: the client library's own lookup of labels takes as long as the
        counting itself. Histograms are looked up before counters.

        name_and_labels: the metric's name, and the values of its labels in addition to LABELS.

        Raises KeyError for a name that is in neither table.
        """
        if name_and_labels not in self._labelled_metrics:
            name, *more = name_and_labels
            family = self._histograms.get(name) or self._counters[name]
            self._labelled_metrics[name_and_labels] = family.labels(*self._labels.values(), *more)
        return self._labelled_metrics[name_and_labels]

    def on_result(self, result: Result) -> None:
        """Record one step. For each outcome all tokens but the last count as accepted drafts; depths count
        from 0. In a step of several forward passes nothing was drafted; seconds are those of one pass.

        result: what the last stage has reported.
        """
        self._time(result)
        self.observe("iteration_tokens_total", sum(len(outcome.tokens) for outcome in result.outcomes))
        for stage, seconds in enumerate(result.seconds):
            self.observe("stage_seconds", seconds / result.passes, str(stage))
        self._count("spec_decode_num_drafts", result.drafts)
        self._count("spec_decode_num_draft_tokens", result.drafted)
        for outcome in result.outcomes if result.passes == 1 else ():
            # The last token of an outcome is the base model's own (bonus) token, not an accepted one.
            for position in range(len(outcome.tokens) - 1):
                self._count("spec_decode_num_accepted_tokens")
                self._count("spec_decode_num_accepted_tokens_per_pos", 1, str(position))

    def _time(self, result: Result) -> None:
        """Record the time since the previous result, and how much of it each stage did not compute. Nothing
        is recorded if the ring had no work after the previous result. The first result only starts the
        measurement. A stage's idle time is never negative.

        result: the result that has just arrived.
        """
        now = self._clock()
        began = self._step_began
        self._step_began = now if self._busy() else None
        if began is None:
            return
        self.observe("step_seconds", (now - began) / result.passes)
        for stage, seconds in enumerate(result.seconds):
            self._count("stage_bubble_seconds", max(now - began - seconds, 0.0), str(stage))

    def on_finish(self, statistics: events.Statistics, queue_seconds: float) -> None:
        """Record the statistics of a finished request. Seconds of decoding per token are recorded only for
        more than one token; no duration is negative.

        statistics: the request's own statistics.
        queue_seconds: seconds from its arrival to its admission.
        """
        first = statistics.seconds_to_first_token
        whole = statistics.seconds
        tokens = statistics.completion_tokens
        values = {
            "request_prefill_time_seconds": max(first - queue_seconds, 0.0),
            "request_decode_time_seconds": max(whole - first, 0.0),
            "request_inference_time_seconds": max(whole - queue_seconds, 0.0),
            "time_to_first_token_seconds": first,
            "e2e_request_latency_seconds": whole,
            "request_prompt_tokens": statistics.prompt_tokens,
            "request_generation_tokens": tokens,
        }
        if tokens > 1:
            values["request_time_per_output_token_seconds"] = (whole - first) / (tokens - 1)
        for name, value in values.items():
            self.observe(name, value)


# Seconds. Events that are closer together came with the same step. Untuned.
SAME_STEP_SECONDS = 0.001


class RequestMetrics:
    """Records the metrics of one request, as an observer of its events."""

    def __init__(self, metrics_of: Callable[[str], Metrics], clock: Callable[[], float]) -> None:
        """Observe a request that has just arrived. Until the request has started, the metrics are those of
        the first ring.

        metrics_of: returns the metrics of the ring that has a request, by the request's id; those of the
            first ring for an unknown id.
        clock: returns monotonic seconds.
        """
        self._find = metrics_of
        self._metrics = metrics_of("")
        self._clock = clock
        self._began = clock()
        self._last: float | None = None
        self._waited = 0.0
        self._branches: dict[int, float] = {}

    def on_event(self, event: events.Event) -> None:
        """Record what an event says of the request's latencies and branches; other events are ignored. Text
        records the time since the previous step, Started the time in the queue, Planned the number of points
        (none is recorded for an empty plan), the end of a branch its seconds, and Finished the statistics.

        event: an event of the request.
        """
        match event:
            case events.MergedText() | events.BranchText() | events.SkeletonText():
                self._on_text()
            case events.Started(request):
                self._metrics = self._find(request)
                self._waited = self._clock() - self._began
                self._metrics.observe("request_queue_time_seconds", self._waited)
            case events.Planned(points) if points:
                self._metrics.observe("sot_points_per_request", len(points))
            case events.BranchStarted(branch):
                self._branches[branch] = self._clock()
                self._metrics.branches += 1
            case events.BranchFinished(branch) if branch in self._branches:
                self._metrics.observe("sot_branch_seconds", self._clock() - self._branches.pop(branch))
                self._metrics.branches -= 1
            case events.Finished():
                self._metrics.on_finish(event.statistics, self._waited)
            case _:
                pass

    def on_end(self) -> None:
        """Count the request's unfinished branches as no longer in progress."""
        self._metrics.branches -= len(self._branches)
        self._branches.clear()

    def _on_text(self) -> None:
        """Record the time since the previous step that wrote text for this request. Nothing is recorded for
        the first step, or if the step is the same as before (SAME_STEP_SECONDS).
        """
        now = self._clock()
        if self._last is not None and now - self._last > SAME_STEP_SECONDS:
            self._metrics.observe("inter_token_latency_seconds", now - self._last)
        self._last = now


def observe_master(
    master: Master, registry: CollectorRegistry | None = None, prefix: MetricPrefix = "specsot"
) -> Metrics:
    """Record metrics of all requests and steps of a master from now on, and return them. The metrics of each
    ring follow its steps.

    master: the master whose requests and steps are recorded.
    registry: the registry of the process, or None to create one.
    prefix: begins all names.
    """
    metrics = Metrics(master.info, registry=registry, prefix=prefix)
    engines = [metrics.of(one.number, lambda one=one: one.engine.has_work) for one in master.replicas]
    for one, engine in zip(master.replicas, engines):
        one.engine.steps.follow(engine.on_result)

    def engine_of(request_id: str) -> Metrics:
        """Return the metrics of the ring that has a request, or of the first ring for an unknown id.

        request_id: the id under which the request was opened.
        """
        found = (
            engine for one, engine in zip(master.replicas, engines) if one.engine.has_request(request_id)
        )
        return next(found, engines[0])

    master.requests.watch(lambda _: RequestMetrics(engine_of, time.monotonic))
    return metrics
