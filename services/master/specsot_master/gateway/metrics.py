"""Figures for Prometheus, under the names of vLLM's: the same suffixes, labels and buckets.

Refuses to know transports and texts. Requests of every door are counted, because all pass the desk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specsot.events import Finished
from specsot.frames import Result
from specsot.info import Info
from specsot_master.gateway.gpus import look_at_gpus

LABELS = ("model_name", "engine")

_TAIL = (20.0, 40.0, 80.0)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, *_TAIL)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, *_TAIL)
FIRST_AND_LATE = (*FIRST, 160.0, 640.0, 2560.0)
WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LAP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STAGE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
POINTS = tuple(range(1, 17))


def counts_to(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to `most`."""
    steps = (step * 10**power for power in range(len(str(most))) for step in (1, 2, 5))
    return tuple(step for step in steps if step <= most)


class Metrics:
    """`info`: how the ring stands. waiting, running, branches: how many there are now."""

    def __init__(self, info: Callable[[], Info]) -> None:
        self._info = info
        self._registry = CollectorRegistry()
        model = info().models[0]
        self._labels = {"model_name": model.name, "engine": "0"}
        self._declare(counts_to(model.max_positions))
        self.waiting = self.running = self.branches = 0
        ProcessCollector(registry=self._registry)
        self._registry.register(_Standing(self._gauges))

    def written(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)

    def heard(self, result: Result) -> None:
        """One more lap."""
        self._laps.labels(**self._labels).inc()
        tokens = sum(len(outcome.tokens) for outcome in result.outcomes)
        self.observe("iteration_tokens_total", tokens)
        for stage, seconds in enumerate(result.seconds):
            self._stage.labels(**self._labels, stage=str(stage)).observe(seconds)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(**self._labels).observe(value)

    def count(self, finished: Finished) -> None:
        """A request that ended by itself."""
        figures = finished.statistics
        self._prompt.labels(**self._labels).inc(figures.prompt_tokens)
        self._generated.labels(**self._labels).inc(figures.completion_tokens)
        self._success.labels(**self._labels, finished_reason=finished.reason.value).inc()
        self.observe("time_to_first_token_seconds", figures.seconds_to_first_token)
        self.observe("e2e_request_latency_seconds", figures.seconds)
        self.observe("request_prompt_tokens", figures.prompt_tokens)
        self.observe("request_generation_tokens", figures.completion_tokens)
        if figures.completion_tokens > 1:
            after = figures.seconds - figures.seconds_to_first_token
            self.observe("request_time_per_output_token_seconds", after / (figures.completion_tokens - 1))

    def fail(self) -> None:
        """A request that ended in an error, or whose client went away."""
        self._failures.labels(**self._labels).inc()

    def _declare(self, counts: Sequence[int]) -> None:
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("generation_tokens", "Tokens written, skeletons included")
        self._success = self._counter(
            "request_success", "Requests that ended by themselves", "finished_reason"
        )
        self._failures = self._counter("request_failure", "Requests that failed, or whose client went away")
        self._laps = self._counter("laps", "Laps of the ring")
        self._stage = self._histogram("stage_seconds", "Compute of one stage in one lap", STAGE, "stage")
        told = (
            ("time_to_first_token_seconds", "From arrival to the first token", FIRST_AND_LATE),
            ("inter_token_latency_seconds", "Between laps that brought text to a request", BETWEEN),
            ("request_time_per_output_token_seconds", "Mean of one request, behind its first", BETWEEN),
            ("e2e_request_latency_seconds", "From arrival to the end", WHOLE),
            ("request_queue_time_seconds", "From arrival to admission", WHOLE),
            ("request_prompt_tokens", "Prompt tokens of one request", counts),
            ("request_generation_tokens", "Tokens one request wrote", counts),
            ("iteration_tokens_total", "Tokens one lap brought", LAP),
            ("sot_points_per_request", "Points of one plan", POINTS),
        )
        self._histograms = {name: self._histogram(name, about, buckets) for name, about, buckets in told}

    def _counter(self, name: str, about: str, *more: str) -> Counter:
        return Counter(f"specsot:{name}", about, (*LABELS, *more), registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float], *more: str) -> Histogram:
        labels = (*LABELS, *more)
        return Histogram(f"specsot:{name}", about, labels, buckets=buckets, registry=self._registry)

    def _gauges(self) -> Iterator[Metric]:
        info = self._info()
        pages = info.pages
        used = 1 - pages.free / pages.total if pages and pages.total else 0.0
        for name, about, value in (
            ("num_requests_running", "Requests in the ring", self.running),
            ("num_requests_waiting", "Requests that wait for their turn", self.waiting),
            ("kv_cache_usage_perc", "Share of KV pages that are promised, 1 is all", used),
            ("sot_branch_active", "Branches being written", self.branches),
            ("ring_ready", "Whether the ring is complete", info.ready),
            ("epoch", "The ring's epoch", info.epoch),
        ):
            gauge = GaugeMetricFamily(f"specsot:{name}", about, labels=LABELS)
            gauge.add_metric(tuple(self._labels.values()), value)
            yield gauge
        yield from _gpu_gauges()


class _Standing(Collector):
    """Gauges that are looked up when they are asked for."""

    def __init__(self, look: Callable[[], Iterable[Metric]]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        return self._look()

    def describe(self) -> Iterable[Metric]:
        return ()


def _gpu_gauges() -> Iterator[Metric]:
    gpus = look_at_gpus()
    for name, about in (
        ("gpu_memory_used_bytes", "Memory in use"),
        ("gpu_memory_total_bytes", "Memory there is"),
        ("gpu_busy_ratio", "Share of the last moments in which it computed"),
    ):
        gauge = GaugeMetricFamily(f"specsot:{name}", about, labels=("gpu", "name"))
        for gpu in gpus:
            value = {"used": gpu.used, "total": gpu.total}.get(name.split("_")[2], gpu.busy)
            gauge.add_metric((str(gpu.index), gpu.name), value)
        if gpus:
            yield gauge
