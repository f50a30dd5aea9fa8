"""One epoch of a drafter: its engine, what has arrived for it, and the jobs that its thread computes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from specsot.core.deadline import Deadline
from specsot.core.frames import Drafts, Features
from specsot.errors import SpecsotError
from specsot.members import Configuration
from specsot.service.compute import allow, explain_failure
from specsot.transport.links import Link
from specsot.values import value
from specsot_drafter.engine import DraftEngine


class FinishedDrafts(NamedTuple):
    """The result of a draft job.

    drafts:  The message for stage 0, with the trees or the length of a pause. It may have neither.
    sent:    True if the message is to be sent: it has trees, or a pause begins or has ended.
    seconds: Seconds that observing and drafting took.
    """

    drafts: Drafts
    sent: bool
    seconds: float


@dataclass(slots=True)
class DrafterEpoch:
    """State of a drafter in one epoch: everything that lives exactly as long as the epoch.

    name: The drafter's name, for errors.
    configuration: The epoch as the master has configured it.
    engine: The draft engine of the epoch.
    stage: The link to the stage that the drafter sends trees to.
    deadline: Bounds how many seconds a job may compute, by its number of rows.
    pending: Feature messages that arrived since the last draft, in order.
    failure: The error of a colocated draft, which `Drafter.handle` raises; None: there was none.
    """

    name: str
    configuration: Configuration
    engine: DraftEngine
    stage: Link
    deadline: Deadline
    pending: list[Features] = field(default_factory=list[Features])
    failure: SpecsotError | None = None
    # The context that every call of `keep_failure` returns. It has no state of its own.
    _kept_failure: KeptFailure = field(init=False)

    def __post_init__(self) -> None:
        """Make the context of `keep_failure` once, because a step may enter it four times."""
        self._kept_failure = KeptFailure(self)

    def observe_and_draft(self, batches: Sequence[Features]) -> FinishedDrafts:
        """Observe features and draft once, and return the drafts. Called on the thread that computes.

        batches: The messages that have arrived, in order.
        """
        began = time.perf_counter()
        return self.finish(self.begin(batches), began)

    def begin(self, batches: Sequence[Features]) -> int:
        """Observe features and launch the trees. Return the number of rows that the time limit is based on.

        batches: The messages that have arrived, in order.

        The limit is extended by the rows that must be computed before trees can grow. When a sequence is
        drafted for the first time, these are all of its rows, and a colocated worker on the same thread waits
        for them.

        Raises what `DraftEngine.observe` raises.
        """
        rows = rows_of_batches(batches)
        allow(self.deadline.seconds(rows))
        for features in batches:
            self.engine.observe(features)
        rows += self.engine.begin()
        allow(self.deadline.seconds(rows))
        return rows

    def finish(self, rows: int, began: float) -> FinishedDrafts:
        """Return the trees that `begin` launched.

        rows: Number of rows that the time limit is based on, as `begin` returned it.
        began: Time in seconds, of `time.perf_counter`, at which the job began.

        The message may have no trees and no pause; `sent` then says whether it is needed, which it is when a
        pause has just ended. The job's seconds are recorded for later time limits.
        """
        engine = self.engine
        drafts = Drafts(
            self.configuration.epoch, engine.finish(), engine.paused_trees, self.configuration.you
        )
        seconds = time.perf_counter() - began
        self.deadline.record(rows, seconds)
        return FinishedDrafts(drafts, bool(drafts.drafts or drafts.paused_trees or engine.awake), seconds)

    def keep_failure(self) -> KeptFailure:
        """Return a context in which an error of the body is kept as `failure` of this epoch instead of being
        raised. Errors that SpecSoT did not raise are explained first. If the body raises nothing, `failure`
        stays as it was, usually None.
        """
        return self._kept_failure


@value
class KeptFailure:
    """The context of `DrafterEpoch.keep_failure`. It is a class, because a generator with
    `contextlib.contextmanager` would take the host twice as long, and a step may enter it four times: to
    launch the growth, to select nodes, to observe features and to finish the drafts.

    epoch: The epoch that keeps the error.
    """

    epoch: DrafterEpoch

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keep an error of the body as the epoch's failure. Return True if there was one, so that Python does
        not raise it. Return False if there was none, or if it is no Exception (such as KeyboardInterrupt),
        which Python then raises.

        kind: Type of the error. None if the body has raised nothing.
        error: The error.
        trace: Where the error was raised.
        """
        if not isinstance(error, Exception):
            return False
        ours = isinstance(error, SpecsotError)
        self.epoch.failure = error if ours else explain_failure(self.epoch.name, error)
        return True


def rows_of_batches(batches: Sequence[Features]) -> int:
    """Return the number of rows that the time limit of a draft is based on; 0 without messages.

    batches: The messages that have arrived.

    These are the tokens of the base model's frames, the tokens of the feature batches, and the forked tokens,
    whose rows the drafter may have to compute before they are shared.
    """
    rows = 0
    for one in batches:
        rows += one.fed + sum([len(feature_batch.tokens) for feature_batch in one.feature_batches])
        rows += sum([opening.forked for opening in one.openings])
    return rows
