"""A drafter's Prometheus metrics (trees, their cost, pauses, pages), and spans for drafts of traced steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from specsot.core.frames import Drafts, Features
from specsot.members import Configuration
from specsot.service.telemetry import STEP_BUCKETS, Observation, PolledCollector, epoch_gauges
from specsot.tracing import spanning
from specsot_drafter.observer import DrafterObserver


class DrafterTelemetry(DrafterObserver):
    """Observer that records a drafter's work as Prometheus metrics and as tracing spans."""

    def __init__(self, observation: Observation) -> None:
        """Register the metrics.

        observation: The registry of metrics, which may be None, and the tracer.

        Without a registry, the metrics are counted but not exported.
        """
        registry = observation.registry
        self._tracer = observation.tracer
        self._trees = Counter("specsot:drafter_trees", "Trees sent, except single roots", registry=registry)
        self._nodes = Counter(
            "specsot:drafter_nodes", "Nodes of these trees, without roots", registry=registry
        )
        self._pauses = Counter("specsot:drafter_pauses", "Pauses of unprofitable drafting", registry=registry)
        about = "Reading all messages and drafting once"
        self._seconds = Histogram(
            "specsot:drafter_draft_seconds", about, buckets=STEP_BUCKETS, registry=registry
        )
        if registry is not None:
            registry.register(PolledCollector(self._collect))
        self._epoch: tuple[Configuration, Callable[[], int]] | None = None

    def formed(self, configuration: Configuration, free: Callable[[], int]) -> None:
        """Report the pages of an epoch from now on.

        configuration: The epoch as the master has configured it.
        free: Returns the number of free KV pages.
        """
        self._epoch = configuration, free

    def drafting(self, feature_batches: Sequence[Features]) -> AbstractContextManager[object]:
        """Return a context that is a span while trees of traced steps are drafted. Without a traced step it
        does nothing.

        feature_batches: The messages of the last stage.

        The span is a child of the newest traced step, with links to the other ones.
        """
        contexts = [features.trace for features in feature_batches if features.trace]
        if not (contexts and self._tracer.on):
            return nullcontext()
        num_batches = sum(len(features.feature_batches) for features in feature_batches)
        attributes = {"specsot.feature_batches": num_batches}
        span = self._tracer.begin("draft", contexts[-1], contexts[:-1], attributes)
        return spanning(span)

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        """Count the trees and their nodes beyond the roots, the pauses, and the seconds of a draft.

        drafts: The message for stage 0.
        seconds: Seconds that observing and drafting took.

        A tree that is its root alone is not counted.
        """
        sizes = [len(draft.tree.tokens) for draft in drafts.drafts]
        grown = [size - 1 for size in sizes if size > 1]
        self._trees.inc(len(grown))
        self._nodes.inc(sum(grown))
        self._pauses.inc(drafts.paused_trees > 0)
        self._seconds.observe(seconds)

    def disbanded(self) -> None:
        """Report no epoch until the next one begins."""
        self._epoch = None

    def _collect(self) -> Iterator[Metric]:
        """Yield the gauges of the current epoch. Nothing is yielded outside an epoch.

        They are those that `epoch_gauges` makes of the epoch and its number of free pages.
        """
        if self._epoch is not None:
            configuration, free = self._epoch
            yield from epoch_gauges("drafter", configuration, free())
