"""Figures for Prometheus, under the names of vLLM's: the same suffixes, labels and buckets.

Refuses to know transports and texts. Requests of every door are counted, because all pass the desk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from specsot.events import Statistics
from specsot.frames import Result
from specsot.info import Info
from specsot.process.figures import LAP as LAP_SECONDS
from specsot.process.figures import Looked, registry_of
from specsot_master.gateway.standing import LABELS, EngineGauges, families_of

_TAIL = (20.0, 40.0, 80.0)
TOKEN_LATENCY_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    *_TAIL,
)
FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    *_TAIL,
)
LATE_FIRST_TOKEN_BUCKETS = (*FIRST_TOKEN_BUCKETS, 160.0, 640.0, 2560.0)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LAP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PLAN_POINT_BUCKETS = tuple(range(1, 17))


def count_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to `most`."""
    steps = (step * 10**power for power in range(len(str(most))) for step in (1, 2, 5))
    return tuple(step for step in steps if step <= most)


class Metrics:
    """`info`: how the ring stands. branches: how many are being written now.

    busy: the ring owes a lap. clock: seconds that only go forward. registry: where the process tells its
    own already; None: in one that is only written here.
    """

    def __init__(
        self,
        info: Callable[[], Info],
        busy: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._busy, self._clock = busy, clock
        self._lap_began: float | None = None
        self._engines: list[Metrics] = []
        self._registry = registry or registry_of("master")
        model = info().models[0]
        self._labels = {"model_name": model.name, "engine": "0"}
        self._declare(count_buckets(model.max_positions))
        self.branches = 0
        self._registry.register(Looked(lambda: families_of(self._looked(info()))))

    def of(self, engine: int, busy: Callable[[], bool]) -> Metrics:
        """The same figures, of one ring among several. busy: it owes a lap."""
        one = copy(self)
        one._labels, one._busy = self._labels | {"engine": str(engine)}, busy
        self._engines.append(one)
        return one

    def _looked(self, info: Info) -> list[EngineGauges]:
        """How each ring stands."""
        engines, rings = self._engines or [self], info.replicas or [info]
        return [EngineGauges(one._labels, ring, one.branches) for one, ring in zip(engines, rings)]

    def written(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)

    def heard(self, result: Result) -> None:
        """One more lap."""
        self._time(result)
        self.observe("iteration_tokens_total", sum(len(outcome.tokens) for outcome in result.outcomes))
        for stage, seconds in enumerate(result.seconds):
            self._stage.labels(**self._labels, stage=str(stage)).observe(seconds)
        self._drafts.labels(**self._labels).inc(result.drafts)
        self._drafted.labels(**self._labels).inc(result.drafted)
        for outcome in result.outcomes:
            self._accept(len(outcome.tokens) - 1)  # the last one is the base's own

    def _time(self, result: Result) -> None:
        """From lap to lap, while there was work; and how much of that each stage did not compute."""
        now, began = self._clock(), self._lap_began
        self._lap_began = now if self._busy() else None
        if began is None:
            return
        self.observe("lap_seconds", now - began)
        for stage, seconds in enumerate(result.seconds):
            self._bubble.labels(**self._labels, stage=str(stage)).inc(max(now - began - seconds, 0.0))

    def _accept(self, depth: int) -> None:
        for position in range(depth):
            self._accepted.labels(**self._labels).inc()
            self._depths.labels(**self._labels, position=str(position)).inc()

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(**self._labels).observe(value)

    def finished(self, figures: Statistics, waited: float) -> None:
        """A request that ended by itself. waited: seconds until it was admitted."""
        first, whole = figures.seconds_to_first_token, figures.seconds
        self.observe("request_prefill_time_seconds", max(first - waited, 0.0))
        self.observe("request_decode_time_seconds", max(whole - first, 0.0))
        self.observe("request_inference_time_seconds", max(whole - waited, 0.0))
        self.observe("time_to_first_token_seconds", figures.seconds_to_first_token)
        self.observe("e2e_request_latency_seconds", figures.seconds)
        self.observe("request_prompt_tokens", figures.prompt_tokens)
        self.observe("request_generation_tokens", figures.completion_tokens)
        if figures.completion_tokens > 1:
            after = figures.seconds - figures.seconds_to_first_token
            self.observe("request_time_per_output_token_seconds", after / (figures.completion_tokens - 1))

    def _declare(self, counts: Sequence[int]) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Trees with drafted tokens")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self._depths = self._counter("spec_decode_num_accepted_tokens_per_pos", "By depth", "position")
        self._stage = self._histogram(
            "stage_seconds", "Compute of one stage in one lap", LAP_SECONDS, "stage"
        )
        self._bubble = self._counter("stage_bubble_seconds", "Time of laps a stage did not compute", "stage")
        told = (
            ("time_to_first_token_seconds", "From arrival to the first token", LATE_FIRST_TOKEN_BUCKETS),
            (
                "inter_token_latency_seconds",
                "Between laps that brought text to a request",
                TOKEN_LATENCY_BUCKETS,
            ),
            (
                "request_time_per_output_token_seconds",
                "Mean of one request, behind its first",
                TOKEN_LATENCY_BUCKETS,
            ),
            ("e2e_request_latency_seconds", "From arrival to the end", REQUEST_BUCKETS),
            ("request_queue_time_seconds", "From arrival to admission", REQUEST_BUCKETS),
            ("request_prefill_time_seconds", "From admission to the first token", REQUEST_BUCKETS),
            ("request_decode_time_seconds", "From the first token to the end", REQUEST_BUCKETS),
            ("request_inference_time_seconds", "From admission to the end", REQUEST_BUCKETS),
            ("lap_seconds", "From one lap to the next, while there is work", LAP_SECONDS),
            ("request_prompt_tokens", "Prompt tokens of one request", counts),
            ("request_generation_tokens", "Tokens one request wrote", counts),
            ("iteration_tokens_total", "Tokens one lap brought", LAP_TOKEN_BUCKETS),
            ("sot_points_per_request", "Points of one plan", PLAN_POINT_BUCKETS),
            ("sot_branch_seconds", "From a branch's start to its end", REQUEST_BUCKETS),
        )
        self._histograms = {name: self._histogram(name, about, buckets) for name, about, buckets in told}

    def _counter(self, name: str, about: str, *more: str) -> Counter:
        return Counter(f"specsot:{name}", about, (*LABELS, *more), registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float], *more: str) -> Histogram:
        labels = (*LABELS, *more)
        return Histogram(f"specsot:{name}", about, labels, buckets=buckets, registry=self._registry)
