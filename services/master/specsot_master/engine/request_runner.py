"""Runs requests: admits them as pages allow, opens what their plans ask for, applies results to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from specsot.core.frames import Outcome
from specsot.core.skeleton import PlanRules, Point
from specsot.errors import SpecsotError
from specsot.events import Numbered
from specsot_master.core.commands import (
    CloseSequence,
    Command,
    FailRequest,
    OpenAnswer,
    OpenBranch,
    OpenPolish,
    OpenScore,
    OpenSkeleton,
)
from specsot_master.core.forecast import Forecaster, Outlook
from specsot_master.core.ring import Ring, RingState
from specsot_master.core.stats import RequestCounts
from specsot_master.engine.intake import require_ring
from specsot_master.engine.queue import RequestQueue
from specsot_master.engine.replay import RequestJournal
from specsot_master.engine.request_state import ActiveSequence, Clock, RequestState, check_branch_fits
from specsot_master.engine.ring_tables import PrefixCache, SequenceTable, pages_of
from specsot_master.journal import AdmittedRecord, LapRecord, ReopenedRecord
from specsot_master.prompts import PromptTurn


class RequestRunner:
    """Runs the requests of a queue on a ring.

    tell: a request's client hears something. fail: a request ends with an error. isolate: what goes wrong
    meanwhile ends one request alone. began: a new ring is about to be filled.
    epoch: of the ring that was filled last, while that lasts.
    """

    def __init__(
        self,
        ring: Ring,
        queue: RequestQueue,
        sequences: SequenceTable,
        prefixes: PrefixCache,
        journal: RequestJournal,
        counts: RequestCounts,
        clock: Clock,
        tell: Callable[[RequestState, Numbered], None],
        fail: Callable[[RequestState, SpecsotError], None],
        isolate: Callable[[RequestState], AbstractContextManager[None]],
        began: Callable[[RingState], None],
        costs: Forecaster,
    ) -> None:
        self._ring, self._queue, self._sequences, self._prefixes = ring, queue, sequences, prefixes
        self._journal, self._counts, self._clock = journal, counts, clock
        self._tell, self._fail, self._isolate, self._began, self._costs = tell, fail, isolate, began, costs
        self.epoch: int | None = None
        self._over = 0  # the last epoch that is known to have ended

    @property
    def free_pages(self) -> int:
        """KV pages that are promised to nobody; those of prefixes that nobody needs now are among them."""
        state = self._ring.state()
        if state is None:
            return 0
        fresh = state.epoch != self.epoch
        return state.pages if fresh else self._prefixes.ledger.free + self._prefixes.tree.spare()

    def fill(self) -> None:
        """First those who wait, then further branches of those who run."""
        self._sequences.freed = False
        state = self._ring.state()
        if state is None or state.epoch <= self._over:
            return
        if self.epoch != state.epoch:
            self._begin_epoch(state)
        self._admit(state)
        for request in self._queue.interrupted:
            with self._isolate(request):
                self._reopen_lost(request, reserved_only=bool(self._queue.waiting))
        self._add_branches()

    def end_epoch(self) -> None:
        """Nothing of this epoch is in the ring any more."""
        self._sequences.clear()
        self._prefixes.begin_epoch(0)
        self._over, self.epoch = max(self._over, self.epoch or 0), None

    def apply(self, request: RequestState, outcomes: Sequence[Outcome], now: float) -> None:
        """One lap brought these outcomes for it."""
        found = ((self._sequences.find(outcome.sequence), outcome) for outcome in outcomes)
        said = tuple((one[1].ordinal, outcome) for one, outcome in found if one)
        self._journal.record(request, LapRecord(now - request.since, said))
        request.plan.on_lap(outcomes, now)
        for outcome in outcomes:
            if found := self._sequences.find(outcome.sequence):
                self._apply_one(request, found[1], outcome, now)
        if request.plan.all_opened:
            self._prefixes.ledger.waive(request.id)

    def execute(self, request: RequestState, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Numbered():
                    self._tell(request, command)
                case OpenAnswer(limit):
                    self._open_first(request, request.answer_turn(), limit)
                case OpenSkeleton(limit, rules, constrained):
                    self._open_first(request, request.skeleton_turn(), limit, rules if constrained else None)
                case OpenPolish(text, limit):
                    self._open_first(request, request.polish_turn(text), limit)
                case OpenScore():
                    self._open_first(request, request.first_turn, 1, scored=True)
                case OpenBranch():
                    pass  # opened where its pages were taken
                case CloseSequence(ordinal):
                    if sequence := request.sequences.get(ordinal):
                        self._retire(request, sequence, close=True)
                case FailRequest(error):
                    self._fail(request, error)

    def renew(self, request: RequestState) -> None:
        """Longer leases where they are needed."""
        for sequence in request.sequences.values():
            self._sequences.renew(sequence)

    def close(self, request: RequestState) -> None:
        """Close what still lives of it, and give everything back."""
        for sequence in tuple(request.sequences.values()):
            self._retire(request, sequence, close=True)
        self._prefixes.release(request)

    def _begin_epoch(self, state: RingState) -> None:
        """An empty ring, perhaps of another size."""
        self._prefixes.begin_epoch(state.pages)
        self.epoch = state.epoch
        self._began(state)

    def _admit(self, state: RingState) -> None:
        now = self._clock.now()

        def admit(request: RequestState) -> bool:
            return self._prefixes.admit(request, state)

        while (request := self._queue.admit_next(now, admit)) is not None:
            with self._isolate(request):
                self._start(request, now)

    def _add_branches(self) -> None:
        """One branch at a time for whoever's turn it is, until nobody wants one or nothing fits."""
        stuck: set[str] = set()
        while (request := self._queue.next_to_branch(stuck)) is not None:
            before = len(request.sequences)
            with self._isolate(request):
                self._add_branch(request, request.plan.ready()[0])
            if len(request.sequences) == before:
                stuck.add(request.id)

    def _start(self, request: RequestState, now: float) -> None:
        """It was admitted, or again to a new ring: then it goes on where it was."""
        if request.begun:
            self._reopen_lost(request)
            return
        request.begun = True
        self._counts.enter(request.prompt_tokens, request.found)
        self._journal.record(request, AdmittedRecord(now - request.since, request.found))
        request.plan.outlook = Outlook(self._costs, request.workload(others=len(self._sequences)))
        if request.plan.deadline:
            request.plan.deadline.outlook = request.plan.outlook
        self.execute(request, request.plan.start(request.asked_tokens, now, request.found))

    def _reopen_lost(self, request: RequestState, reserved_only: bool = False) -> None:
        """Open again what was lost with an epoch, as far as there are pages; at first from its own grant."""
        state = require_ring(self._ring)
        for sequence in request.lost:
            turn = request.turn(sequence.ordinal)
            pages = pages_of(request, turn, sequence.log.opening.limit, state)
            if not self._prefixes.take(request, pages, reserved_only):
                return
            self._sequences.reopen(request, sequence, pages, state)
            self._journal.record(request, ReopenedRecord(sequence.ordinal))

    def _add_branch(self, request: RequestState, point: Point) -> None:
        """Open it if its pages are there: from the request's own grant, while others wait."""
        state, order = require_ring(self._ring), request.plan.preview(point)
        if not request.has_turn(order, made=self.fill):
            return
        turn = request.branch_turn(order)
        check_branch_fits(request, turn, order.budget, state)
        pages = pages_of(request, turn, order.budget, state)
        if not self._prefixes.take(request, pages, reserved_only=bool(self._queue.waiting)):
            return
        self._sequences.open_writer(request, turn, state, ordinal=point.id, limit=order.budget)
        self._journal.record_branch(request, point.id)
        self.execute(request, request.plan.open_branch(point))

    def _apply_one(
        self, request: RequestState, sequence: ActiveSequence, outcome: Outcome, now: float
    ) -> None:
        self._prefixes.on_outcome(outcome, request)
        pieces = sequence.read(sequence.log.append(outcome), outcome.chances)
        if outcome.end:
            self._retire(request, sequence, close=False)
        self.execute(request, request.plan.on_text(sequence.ordinal, pieces, now))
        if outcome.end and sequence.ordinal not in request.sequences:  # else another was opened in its place
            self.execute(request, request.plan.on_end(sequence.ordinal, outcome.end, now))

    def _open_first(
        self,
        request: RequestState,
        turn: PromptTurn,
        limit: int,
        rules: PlanRules | None = None,
        scored: bool = False,
    ) -> None:
        """The score, the skeleton or the whole answer, from the request's grant."""
        state = require_ring(self._ring)
        self._prefixes.take(request, pages_of(request, turn, limit, state))
        self._sequences.open_writer(request, turn, state, ordinal=0, limit=limit, rules=rules, scored=scored)

    def _retire(self, request: RequestState, sequence: ActiveSequence, close: bool) -> None:
        self._sequences.close(request, sequence, self._prefixes.ledger, close)
