"""A worker's Prometheus metrics (frames, pages, whole steps at stage 0), and spans of traced steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from specsot.core.frames import Frame, Result
from specsot.core.tree_parts import path_seconds
from specsot.members import Configuration
from specsot.service.telemetry import STEP_BUCKETS, Observation, PolledCollector, epoch_gauges
from specsot.tracing import Span, spanning
from specsot_worker.observer import WorkerObserver
from specsot_worker.ring_links import stage_index
from specsot_worker.stage_provider import StageRunner


class WorkerTelemetry(WorkerObserver):
    """Observer of a worker that counts all steps, and traces some of those that carry a sequence whose
    request is traced: one step in `every`, and every step that opens such a sequence.

    At stage 0 a span covers a whole step, at every stage the stage's own work.
    """

    def __init__(self, observation: Observation, every: int) -> None:
        """Register the metrics.

        observation: The registry of metrics, which may be None, and the tracer.
        every: One step in this many is traced, if it carries a traced sequence.

        Without a registry, metrics are counted but not exported.
        """
        registry = observation.registry
        self._tracer = observation.tracer
        self._every = every

        def histogram(name: str, about: str) -> Histogram:
            """Return a registered histogram of seconds.

            name: Its name after the common prefix.
            about: Its help text.
            """
            return Histogram(f"specsot:worker_{name}", about, buckets=STEP_BUCKETS, registry=registry)

        self._frames = Counter(
            "specsot:worker_frames",
            "Frames, or parts of frames, that this worker computed",
            registry=registry,
        )
        self._rows = Counter("specsot:worker_rows", "Tokens that this worker computed", registry=registry)
        self._compute = histogram("compute_seconds", "Computing of one frame")
        self._queue = histogram("queue_seconds", "Waiting of one frame for its turn")
        self._step = histogram("step_seconds", "One step, from stage 0 back to stage 0")
        self._hop = histogram(
            "hop_seconds", "One hop of a step, on average: sending, and waiting at the next stage"
        )
        if registry is not None:
            registry.register(PolledCollector(self._collect))
        self._in_flight: dict[int, tuple[float, Span | None]] = {}
        self._traced: dict[int, str] = {}
        self._epoch: tuple[Configuration, StageRunner] | None = None
        self._layers = ""

    def formed(self, configuration: Configuration, stage: StageRunner) -> None:
        """Report the pages and layers of an epoch from now on.

        configuration: The epoch as the master has configured it.
        stage: The stage of this worker.
        """
        self._epoch = configuration, stage
        self._layers = str(configuration.stages[stage_index(configuration)].layers)

    def launched(self, frame: Frame, now: float) -> Frame:
        """Record when stage 0 launches a frame, and begin a span if the step is traced. Return the frame,
        with the span's context if there is one.

        frame: The composed frame.
        now: Time in seconds.

        A frame without traced sequences, or with a tracer that is off, gets no span and is returned
        unchanged. Traced sequences are remembered until a frame closes them.
        """
        opened = {opening.sequence: opening.trace for opening in frame.openings if opening.trace}
        self._traced |= opened
        due = self._traced and (opened or frame.number % self._every == 0)
        span = self._begin_step(frame) if self._tracer.on and due else None
        for sequence in frame.closings:
            self._traced.pop(sequence, None)
        self._in_flight[frame.number] = now, span
        return replace(frame, trace=span.context) if span else frame

    def dequeued(self, frame: Frame, seconds: float) -> None:
        """Record how long a frame waited at this worker.

        frame: The frame that is handled now.
        seconds: How long it waited.
        """
        self._queue.observe(seconds)

    def computing(self, frame: Frame) -> AbstractContextManager[object]:
        """Return a context that is a span while this stage computes a traced frame. For any other frame it
        does nothing.

        frame: The frame that is computed.

        That is also so if the tracer is off. The span is a child of the frame's trace.
        """
        if not (frame.trace and self._tracer.on):
            return nullcontext()
        about = {"specsot.frame": frame.number, "specsot.layers": self._layers}
        return spanning(self._tracer.begin("stage", frame.trace, about=about))

    def computed(self, frame: Frame, seconds: float) -> None:
        """Count a frame that this stage has computed.

        frame: The frame.
        seconds: Seconds that this stage computed it.

        Counted are one frame, or one part of a frame, and its number of tokens; the seconds enter a
        histogram.
        """
        self._frames.inc()
        self._rows.inc(frame.num_tokens)
        self._compute.observe(seconds)

    def returned(self, result: Result, now: float) -> None:
        """Record the times of a step whose result has reached stage 0, and end its span. A result of an
        unknown frame is ignored.

        result: The result of the frame.
        now: Time in seconds.

        The mean time of a hop is recorded only for a ring of two or more stages.
        """
        if result.number not in self._in_flight:
            return
        (began, span) = self._in_flight.pop(result.number)
        spent = sum(result.seconds)
        self._step.observe(now - began)
        # The last hop is the way back to stage 0.
        if len(result.seconds) > 1:
            computing = path_seconds(result.seconds, 1 + result.verified_part)
            self._hop.observe(max(now - began - computing, 0.0) / len(result.seconds))
        if span:
            brought = sum(len(outcome.tokens) for outcome in result.outcomes)
            span.end({"specsot.tokens": brought, "specsot.compute_seconds": spent})

    def disbanded(self) -> None:
        """End the spans of lost steps with an error, and report no epoch until the next one begins.

        Sequences that were traced are forgotten.
        """
        for _, span in self._in_flight.values():
            if span:
                span.end(error="the epoch ended")
        self._in_flight.clear()
        self._traced.clear()
        self._epoch = None

    def _begin_step(self, frame: Frame) -> Span | None:
        """Begin the span of a step as a child of the first traced request that the frame carries, with links
        to the others. Return None if it carries none.

        frame: The frame that is launched.

        Sequences of the frame that are not traced are counted in the span's attributes, but not linked.
        """
        carried = {segment.sequence: self._traced.get(segment.sequence) for segment in frame.segments}
        contexts = list(dict.fromkeys(context for context in carried.values() if context))
        if not contexts:
            return None
        about = {
            "specsot.frame": frame.number,
            "specsot.rows": frame.num_tokens,
            "specsot.sequences": len(carried),
        }
        return self._tracer.begin("step", contexts[0], contexts[1:], about)

    def _collect(self) -> Iterator[Metric]:
        """Yield the gauges of the current epoch. Nothing is yielded outside an epoch.

        The gauges are those of pages, of frames that ran without a CUDA graph, and of this stage's layers.
        """
        if self._epoch is not None:
            configuration, stage = self._epoch
            yield from epoch_gauges("worker", configuration, stage.table.free)
            about = "Frames of this epoch that ran kernel by kernel though there are CUDA graphs"
            yield GaugeMetricFamily("specsot:worker_uncaptured_frames", about, stage.uncaptured)
            yield _layers_gauge(configuration)


def _layers_gauge(configuration: Configuration) -> Metric:
    """Return the gauge with the number of layers that this stage runs.

    configuration: The epoch as the master has configured it.

    Its labels are the worker's name, its layer range and the index of its stage.
    """
    index = stage_index(configuration)
    mine = configuration.stages[index]
    labels = {"worker": mine.name, "layers": str(mine.layers), "stage": str(index)}
    gauge = GaugeMetricFamily(
        "specsot:worker_layers", "Number of layers that this worker runs", labels=tuple(labels)
    )
    gauge.add_metric(tuple(labels.values()), len(mine.layers))
    return gauge
