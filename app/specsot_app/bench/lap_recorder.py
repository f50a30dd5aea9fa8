"""Listens to the members of one embedded fleet, and keeps what they tell of one answer, lap by lap.

Bytes are pages by the members' own tables, not what a process takes.
"""

from __future__ import annotations

from collections.abc import Callable

from specsot.core.frames import Drafts, Frame, Outcome, Result
from specsot.core.pages import PageTable
from specsot.members import Configuration
from specsot_app.bench.core.samples import LapSample
from specsot_app.bench.stopwatch import Clock, Stopwatch, now
from specsot_drafter.observer import DrafterObserver as DrafterWatch
from specsot_worker.observer import WorkerObserver as WorkerWatch


class LapRecorder(WorkerWatch):
    """Follows a worker that has all layers; `begin` it before each request."""

    def __init__(self, row_bytes: int, drafts: DraftRecorder | None = None, clock: Clock = now) -> None:
        """row_bytes: of KV, in all layers."""
        self._row_bytes, self._drafts, self._clock = row_bytes, drafts, clock
        self._table: PageTable | None = None
        self.begin()

    def begin(self) -> None:
        """Another request; nothing of the one before is open any more."""
        self._watch, self._gone = Stopwatch(self._clock), dict[int, int]()
        self.moments: list[LapSample] = []
        self._tokens = self._grown = self._laps = self._pages = self._evictions = 0
        self._proposed = self._accepted = 0
        if self._drafts:
            self._drafts.begin()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._watch.seconds

    def formed(self, configuration: Configuration, table: PageTable) -> None:
        self._table = table

    def computed(self, frame: Frame, seconds: float) -> None:
        """The table is as the frame left it: what it reserved is held, what a window hides is gone."""
        table = self._table
        assert table is not None
        self._pages = max(self._pages, table.count - table.free)
        for sequence in table.sequences:
            gone = -table.column(sequence, 0)
            self._evictions += gone > self._gone.get(sequence, 0)
            self._gone[sequence] = gone

    def returned(self, result: Result, now: float) -> None:
        trees = [outcome for outcome in result.outcomes if outcome.step]
        self._laps += bool(trees)
        self._proposed += result.drafted
        self._accepted += sum(map(_drafts_in, trees))
        self._grown += sum(len(outcome.tokens) for outcome in trees)
        brought = sum(len(outcome.tokens) for outcome in result.outcomes)
        self._tokens += brought
        if brought:
            self.moments.append(self._moment())

    def _moment(self) -> LapSample:
        assert self._table is not None
        pages = self._pages * self._table.page_rows * self._row_bytes
        return LapSample(
            self.seconds,
            self._tokens,
            self._grown,
            self._laps,
            self._proposed,
            self._accepted,
            pages + (self._drafts.held if self._drafts else 0),
            self._evictions,
            sum(self._gone.values()),
        )


class DraftRecorder(DrafterWatch):
    """Follows a drafter. weights: bytes of what drafts."""

    def __init__(self, row_bytes: int, weights: int) -> None:
        self._row_bytes, self._weights = row_bytes, weights
        self._free: Callable[[], int] = lambda: 0
        self._most, self._count, self._page_rows = 0, 0, 0

    def begin(self) -> None:
        self._most = 0

    @property
    def held(self) -> int:
        """Bytes at most."""
        return self._weights + self._most * self._page_rows * self._row_bytes

    def formed(self, configuration: Configuration, free: Callable[[], int]) -> None:
        self._free, self._count, self._page_rows = free, configuration.pages, configuration.page_rows

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        self._most = max(self._most, self._count - self._free())


def _drafts_in(outcome: Outcome) -> int:
    """Accepted nodes, without the root, which is no draft."""
    return max(len(outcome.accepted) - 1, 0)
