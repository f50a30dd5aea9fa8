"""Carries out what the plans of running requests want: opens, hears, renews, closes their sequences.

Refuses to know who waits, who reads and when a request is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specsot.errors import SpecsotError
from specsot.events import Numbered
from specsot.frames import Outcome
from specsot.skeleton import PlanRules, Point
from specsot_master.conductor.accepting import require_ring
from specsot_master.conductor.counts import RequestCounts
from specsot_master.conductor.live import ActiveSequence, RequestState, check_branch_fits
from specsot_master.conductor.notes import RequestJournal
from specsot_master.conductor.ring import Ring
from specsot_master.conductor.sequences import SequenceTable, pages_of
from specsot_master.conductor.sharing import PrefixCache
from specsot_master.plan import CloseSequence, Command, FailRequest, OpenAnswer, OpenBranch, OpenSkeleton


class RequestRunner:
    """tell: the request's client hears something. fail: the request ends with an error."""

    def __init__(
        self,
        ring: Ring,
        sequences: SequenceTable,
        sharing: PrefixCache,
        notes: RequestJournal,
        counts: RequestCounts,
        tell: Callable[[RequestState, Numbered], None],
        fail: Callable[[RequestState, SpecsotError], None],
    ) -> None:
        self._ring, self._sequences, self._sharing = ring, sequences, sharing
        self._notes, self._counts = notes, counts
        self._tell, self._fail = tell, fail

    def begin(self, request: RequestState, now: float) -> None:
        """It was admitted, or again to a new ring: then it goes on where it was."""
        if request.begun:
            self.go_on(request)
            return
        request.begun = True
        self._counts.enter(request.prompt_tokens, request.found)
        self._notes.begun(request, now)
        self.obey(request, request.plan.start(request.asked_tokens, now, request.found))

    def go_on(self, request: RequestState, reserved_only: bool = False) -> None:
        """Open again what was lost with an epoch, as far as there are pages; at first from its own grant."""
        state = require_ring(self._ring)
        for sequence in request.lost:
            turn = request.turn(sequence.ordinal)
            pages = pages_of(request, turn, sequence.log.opening.limit, state)
            if not self._sharing.take(request, pages, reserved_only):
                return
            self._sequences.reopen(request, sequence, pages, state)
            self._notes.again(request, sequence.ordinal)

    def add_branch(
        self, request: RequestState, point: Point, reserved_only: bool, made: Callable[[], object]
    ) -> None:
        """Open it if its pages are there. reserved_only: from the request's own grant, as others wait.

        made: called later, if its prompt takes a while to make.
        """
        state, order = require_ring(self._ring), request.plan.preview(point)
        if not request.has_turn(order, made):
            return
        turn = request.branch_turn(order)
        check_branch_fits(request, turn, order.budget, state)
        pages = pages_of(request, turn, order.budget, state)
        if not self._sharing.take(request, pages, reserved_only):
            return
        self._sequences.open_writer(request, turn, state, ordinal=point.id, limit=order.budget)
        self._notes.branched(request, point.id)
        self.obey(request, request.plan.open_branch(point))

    def learn(self, request: RequestState, outcomes: Sequence[Outcome], now: float) -> None:
        """One lap brought these outcomes for it."""
        found = ((self._sequences.find(outcome.sequence), outcome) for outcome in outcomes)
        self._notes.heard(request, [(one[1].ordinal, outcome) for one, outcome in found if one], now)
        request.plan.lapped(outcomes, now)
        for outcome in outcomes:
            if found := self._sequences.find(outcome.sequence):
                self._learn_one(request, found[1], outcome, now)
        if request.plan.all_opened:
            self._sharing.ledger.waive(request.id)

    def obey(self, request: RequestState, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Numbered():
                    self._tell(request, command)
                case OpenAnswer(limit):
                    self._open_first(request, limit, None)
                case OpenSkeleton(limit, rules, constrained):
                    self._open_first(request, limit, rules if constrained else None)
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

    def leave(self, request: RequestState) -> None:
        """Close what still lives of it, and give everything back."""
        for sequence in tuple(request.sequences.values()):
            self._retire(request, sequence, close=True)
        self._sharing.release(request)

    def _learn_one(
        self, request: RequestState, sequence: ActiveSequence, outcome: Outcome, now: float
    ) -> None:
        self._sharing.heard(outcome, request)
        pieces = sequence.read(sequence.log.append(outcome), outcome.chances)
        if outcome.end:
            self._retire(request, sequence, close=False)
        self.obey(request, request.plan.wrote(sequence.ordinal, pieces, now))
        if outcome.end:
            self.obey(request, request.plan.ended(sequence.ordinal, outcome.end, now))

    def _open_first(self, request: RequestState, limit: int, rules: PlanRules | None) -> None:
        """The skeleton or the whole answer, from the request's grant."""
        state, turn = require_ring(self._ring), request.first_turn
        self._sharing.take(request, pages_of(request, turn, limit, state))
        self._sequences.open_writer(request, turn, state, ordinal=0, limit=limit, rules=rules)

    def _retire(self, request: RequestState, sequence: ActiveSequence, close: bool) -> None:
        self._sequences.retire(request, sequence, self._sharing.ledger, close)
