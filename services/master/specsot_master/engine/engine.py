"""The engine of one ring: every request of it from arrival to the last event.

handle                 what comes in: results, the ring, clients, alarms           core/inputs.py
  -> play, react         what follows for a request, as commands                   core/inputs.py
  -> _apply              commands take effect                                      effects.py
_advance               the next actions, the most urgent first, until none is left
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import structlog

from specsot.core.frames import End, Open, Order, Result
from specsot.core.info import RequestsInfo
from specsot.errors import InvalidRequest, NotFound, Overloaded, TooLarge, Unavailable
from specsot.params import Ask, brief
from specsot_master.core import inputs
from specsot_master.core.commands import FailRequest, ReopenSequence
from specsot_master.core.inputs import internal_error, react
from specsot_master.core.plans.forecast import Outlook
from specsot_master.core.records import (
    AdmittedRecord,
    CancelledRecord,
    LapRecord,
    Record,
    check_prompt_unchanged,
)
from specsot_master.core.request import RequestState
from specsot_master.core.ring.fitting import check_branch_fits, fits, refit
from specsot_master.core.ring.queue import QueueFull
from specsot_master.core.ring.ring_state import Caller, RingState, require_ring
from specsot_master.engine.effects import Effects
from specsot_master.engine.event_stream import Subscription
from specsot_master.engine.intake import check_deadline
from specsot_master.engine.ring_tables import pages_of
from specsot_master.journal import JournaledRequest

log = structlog.get_logger()


class Engine(Effects):
    """All requests of one ring."""

    # --- what comes in ---

    def handle(self, event: inputs.Input) -> None:
        """It takes effect, and what it makes possible follows."""
        match event:
            case Result():
                self._read_lap(event)
            case inputs.RingReady():
                pass
            case inputs.RingLost(reason, planned):
                self._lose_ring(reason, planned)
            case inputs.OrderUnsent(order):
                self._break_off(order)
            case inputs.MasterLeaving(reason):
                self._leave(reason)
            case inputs.RequestArrived(request, lacking):
                self._take_in(request, lacking)
            case inputs.RequestMoved(request):
                self._queue.remove(request)
                self._quarantine.remove(request.breaks)
            case inputs.RequestCancelled(request):
                self._happen(request, CancelledRecord(self._clock.now() - request.since))
            case inputs.RingOverdue(request, lacking, seconds):
                overdue = request.overdue(lacking, seconds, self._ring.waiting_for())
                self._apply(request, [FailRequest(overdue)])
            case _:
                with self._isolate(event.request):
                    self._apply(event.request, react(event))
        if isinstance(event, inputs.Opening) or self._quarantine.has_changed() or self._tables.freed:
            self._advance()

    def _happen(self, request: RequestState, record: Record) -> None:
        """What a master that reads the journal must know, too."""
        self._journal.record(request, record)
        self._apply(request, request.play(record))

    def _read_lap(self, result: Result) -> None:
        """A result of another epoch is only counted."""
        self.laps.on_result(result)
        if result.epoch != self._epoch:
            return
        now = self._clock.now()
        self._costs.laps.on_result(result, now)
        for outcome in result.outcomes:
            if outcome.end is End.FAILED:
                self._tables.doubt(outcome.sequence)
        for request, said in self._tables.group(result.outcomes):
            try:  # a context for each text costs as much as to decode it
                self._quarantine.on_tokens(request.breaks, sum(len(outcome.tokens) for _, outcome in said))
                self._happen(request, LapRecord(now - request.since, tuple(said)))
            except Exception as error:
                self._fail_alone(request, error, internal_error())

    def _lose_ring(self, reason: str, planned: bool) -> None:
        """Every request waits for the next one, where it goes on from its log. planned: nobody is blamed."""
        culprit = None if planned else self._quarantine.on_break(self._queue.suspects)
        for request in self._end_epoch():
            if request.breaks is culprit:
                self._apply(request, [FailRequest(Unavailable(f"{reason}; {request.breaks.summary}"))])
            else:
                self._await_ring(request, reason, planned)

    def _break_off(self, order: Order) -> None:
        """Whose it was cannot go on, and nobody may stand on what it would have opened."""
        sequence = order.opening.sequence if isinstance(order, Open) else order.sequence
        self._tables.doubt(sequence)
        for request in self._queue.all_requests:
            own = {one.id for one in request.sequences.values()}
            if sequence in own or any(one.sequence == sequence for one in request.lineage):
                self._apply(request, [FailRequest(internal_error())])

    def _leave(self, reason: str) -> None:
        """Every request ends, those that come from now on too."""
        self._ended = reason
        self._quarantine.clear()
        for request in self._end_epoch():
            self._apply(request, [FailRequest(Unavailable(reason), final=False)])

    def _take_in(self, request: RequestState, lacking: str) -> None:
        """It runs here, once it is its turn."""
        request.home = self
        self._queue.wait(request)
        request.clear_alarms(inputs.RingOverdue)
        self._watch_deadline(request)
        if self._ring.state() is None:
            self._await_ring(request, lacking)

    def _watch_deadline(self, request: RequestState) -> None:
        """Whoever watched it before."""
        request.clear_alarms(inputs.DeadlinePassed)
        if request.deadline is not None:
            left = request.deadline - self._clock.now()
            request.set_alarm(inputs.DeadlinePassed(request), self._clock, left)

    # --- the next actions ---

    def _advance(self) -> None:
        """First those who wait enter, then goes on what a broken ring had lost, then branches are added."""
        self._tables.freed = False
        state = self._ring.state()
        if state is None or state.epoch <= self._over:
            return
        if self._epoch != state.epoch:
            self._begin_epoch(state)
        now = self._clock.now()
        tried = set[str]()
        stuck = set[str]()
        while (
            self._admit_next(state, now) or self._reopen_next(state, tried) or self._branch_next(state, stuck)
        ):
            pass

    def _admit_next(self, state: RingState, now: float) -> bool:
        """Whose turn it is enters, or enters again and goes on where it was."""
        request = self._queue.next_to_admit(now)
        if request is None or not self._tables.admit(request, state):
            return False
        self._queue.admit(request)
        with self._isolate(request):
            if request.begun:
                self._reopen(request, state)
            else:
                self._counts.enter(request.prompt_tokens, request.found)
                request.plan.foresee(Outlook(self._costs, request.workload(others=len(self._tables))))
                self._happen(request, AdmittedRecord(now - request.since, request.found))
        return True

    def _reopen_next(self, state: RingState, tried: set[str]) -> bool:
        request = next((one for one in self._queue.interrupted if one.id not in tried), None)
        if request is None:
            return False
        tried.add(request.id)
        with self._isolate(request):
            self._reopen(request, state, reserved_only=bool(self._queue.waiting))
        return True

    def _reopen(self, request: RequestState, state: RingState, reserved_only: bool = False) -> None:
        """Open again what was lost with an epoch, as far as there are pages; at first from its own grant."""
        if request.prompt.tags and any(one.ordinal for one in request.lost):
            self._tables.lengthen(request, request.forked, state)
        for sequence in request.lost:
            pages = pages_of(request, request.turn(sequence.ordinal), sequence.log.opening.limit, state)
            if not self._tables.has_room(request, pages, reserved_only):
                return
            self._apply(request, [ReopenSequence(sequence.ordinal)])

    def _branch_next(self, state: RingState, stuck: set[str]) -> bool:
        request = self._queue.next_to_branch(stuck)
        if request is None:
            return False
        stuck.add(request.id)
        with self._isolate(request):
            if self._add_branch(request, state):
                stuck.remove(request.id)
        return True

    def _add_branch(self, request: RequestState, state: RingState) -> bool:
        """If its pages are there: from the request's own grant, while others wait."""
        order = request.plan.preview(request.plan.ready()[0])
        if not self._intake.has_turn(request, order):
            return False
        turn = request.branch_turn(order)
        if request.prompt.tags:
            self._tables.lengthen(request, request.forked, state)
        check_branch_fits(request, turn, order.budget, state)
        pages = pages_of(request, turn, order.budget, state)
        if not self._tables.has_room(request, pages, reserved_only=bool(self._queue.waiting)):
            return False
        self._happen(request, self._journal.branch_record(order.point.id, turn))
        return True

    def _begin_epoch(self, state: RingState) -> None:
        """An empty ring, perhaps of another size: whom it cannot hold waits for a larger one."""
        self._tables.begin_epoch(state.pages, state.kept)
        self._epoch = state.epoch
        self._costs.begin(state.curve)
        self._intake.remember(state)
        for request in self._queue.all_requests:
            with self._isolate(request):
                try:
                    refit(request, state)
                    request.clear_alarms(inputs.RingOverdue)
                except TooLarge as misfit:
                    self._strand(request, misfit)

    def _end_epoch(self) -> list[RequestState]:
        """Nothing of this epoch is in the ring any more. Returns who waits for the next one: everybody."""
        self._outbox.clear()
        self._tables.begin_epoch(0)
        self._over = max(self._over, self._epoch or 0)
        self._epoch = None
        everybody = self._queue.suspend()
        for request in everybody:
            request.mark_lost()
        return everybody

    # --- who calls ---

    async def open(self, ask: Ask | None, caller: Caller, offset: int | None = None) -> Subscription:
        """The request's events, numbered from 0, Finished last, once it waits for its turn. Closing them
        cancels it, unless it is resumable: then it lives on for a while, and the same call again reads it.

        offset: from which to read on in the caller's resumable request, which runs, or has ended not long
        ago; ask: what it must have asked for, None: whatever it did. Its timeout counts from now.

        Raises InvalidRequest, NotFound (no such request to read on in, or another's), Overloaded, and
        Unavailable where there was no ring yet. The events raise Unavailable when the ring breaks and no
        other comes; TimedOut; PlanError; Cancelled when nothing is read for too long.
        """
        request = self._find_resumable(caller)
        if request is not None:
            self._rejoin(request, ask, caller.timeout)
        elif ask is None or offset is not None:
            raise NotFound(f"no request {brief(caller.request)} is kept here")
        else:
            request = await self._accept(ask, caller)
        return self._subscriptions.subscribe(request, offset or 0)

    def cancel(self, request_id: str, owner: str = "") -> bool:
        """End a request; its client still hears Finished. False when there is no such request of theirs."""
        request = self._queue.find(request_id)
        if request is None or not request.belongs_to(owner):
            return False
        self.handle(inputs.RequestCancelled(request))
        return True

    def adopt(self, request: RequestState) -> None:
        """Go on here with what another ring cannot. Raises InvalidRequest (it is too large for this ring)
        and Unavailable before anything is changed.
        """
        refit(request, require_ring(self._ring))
        self.handle(inputs.RequestArrived(request))

    async def revive(self, kept: Iterable[JournaledRequest]) -> None:
        """Take up what a master before this one had begun, and keep what it had kept."""
        for one in kept:
            try:
                request = await self._intake.rebuild(one, self._clock.now() - self._journal.age(one))
            except Exception as error:  # whatever is wrong with one of them: the master begins
                log.warning("request lost", request_id=one.id, reason=str(error), exc_info=error)
                self._journal.forget(one.id)
            else:
                self._replay(request, one)

    def _replay(self, request: RequestState, kept: JournaledRequest) -> None:
        """It goes on in the next ring, unless it had ended, or what happened to it does not play any more;
        its client may come back in either case.
        """
        unplayable = Unavailable("what was written down of this request cannot be played again")
        with self._isolate(request, unplayable):
            check_prompt_unchanged(kept.wording, request.wording)
            for record in kept.records:
                if not request.over:
                    self._apply(request, request.play(record))
        log.info("taken up again", **request.log_fields, over=request.over)
        if not request.over:
            self._subscriptions.keep(request)
            self.handle(inputs.RequestArrived(request, "the master was restarted"))

    async def _accept(self, ask: Ask, caller: Caller) -> RequestState:
        """Once it has been looked into, it waits for its turn. Who would be refused anyway is refused at
        once.
        """
        self._check_open()
        check_deadline(caller.timeout)
        self._make_room(caller.client)
        if self._intake.inside >= self._config.queue:
            raise self._overloaded()
        asked, (ask, prompt, left) = ask, await self._intake.validate(ask, caller)
        self._check_open()
        if (known := self._find_resumable(caller)) is not None:  # the same call
            return self._rejoin(known, asked, left)
        if caller.request is not None and self._find(caller.request):
            raise InvalidRequest(f"request {caller.request} is already running", field="request_id")
        last = self._make_room(caller.client)
        request = self._intake.build(ask, caller, self._clock.now(), prompt)
        if last is not None:
            self._apply(last, [FailRequest(self._overloaded())])
        log.info(
            "request", **request.log_fields, mode=ask.mode, seed=request.seed, tokens=request.prompt_tokens
        )
        now = self._clock.now()
        self._journal.record_arrival(request, now)
        request.deadline = None if left is None else now + left
        self.handle(inputs.RequestArrived(request, "the ring broke before"))
        return request

    def _check_open(self) -> None:
        """Raises Unavailable."""
        if self._ended is not None:
            raise Unavailable(self._ended)

    def _make_room(self, client: str) -> RequestState | None:
        """Who must leave the queue for this client, if anybody. Raises Overloaded."""
        try:
            return self._queue.make_room(client)
        except QueueFull:
            raise self._overloaded() from None

    def _overloaded(self) -> Overloaded:
        self._counts.refused += 1
        later = self._hints.refuse(self._clock.now())
        return Overloaded(f"{self._queue.waiting} requests are waiting already", later)

    def _find(self, id: str) -> RequestState | None:
        return self._queue.find(id) or self._subscriptions.find(id)

    def _find_resumable(self, caller: Caller) -> RequestState | None:
        request = self._find(caller.request) if caller.request else None
        return request if request and request.ask.resumable and request.belongs_to(caller.owner) else None

    def _rejoin(self, request: RequestState, ask: Ask | None, timeout: float | None) -> RequestState:
        """Somebody reads a known request; the newest caller's deadline counts. Raises InvalidRequest (it asks
        for something else), TimedOut.
        """
        check_deadline(timeout)
        unlimited = replace(request.ask, limits=replace(request.ask.limits, max_new_tokens=None))
        if ask not in (None, request.ask, unlimited):
            known = f"request {request.id} is known, and asks for something else"
            raise InvalidRequest(known, field="request_id")
        if self._queue.has(request):
            request.deadline = None if timeout is None else self._clock.now() + timeout
            self._watch_deadline(request)
        return request

    # --- what is there ---

    @property
    def idle(self) -> bool:
        return not self._queue.all_requests

    @property
    def stranded(self) -> list[RequestState]:
        """Requests that wait for a larger ring."""
        return self._queue.stranded

    @property
    def at_work(self) -> int:
        """Requests that a new epoch would disturb."""
        return len(self._queue.all_requests) - len(self.stranded)

    def fitting(self, ring: RingState) -> int:
        """How many requests such a ring could hold."""
        return sum(fits(request, ring) for request in self._queue.all_requests)

    def final_rows(self) -> dict[int, int]:
        """By sequence, how many first rows every stage has computed and leaves as they are."""
        state = self._ring.state()
        return self._tables.final_rows(state.slots) if state and state.epoch == self._epoch else {}

    @property
    def has_work(self) -> bool:
        """The ring owes a lap: something in it may go on."""
        return self._tables.has_work

    @property
    def free_pages(self) -> int:
        """KV pages that are promised to nobody; those of prefixes that nobody needs now are among them."""
        state = self._ring.state()
        if state is None:
            return 0
        return self._tables.free_pages if state.epoch == self._epoch else state.pages

    @property
    def kept(self) -> tuple[int, ...]:
        """Sequences that hold beginnings of prompts."""
        return self._tables.prefixes.sequences

    @property
    def kept_pages(self) -> int:
        """KV pages of beginnings of prompts, needed or not."""
        return self._tables.prefixes.pages

    @property
    def all_requests(self) -> list[RequestState]:
        return self._queue.all_requests

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn, or are looked into before they may."""
        return self._queue.waiting + self._intake.inside

    def has_request(self, id: str) -> bool:
        """A request of this id waits, runs, or may still be read."""
        return self._find(id) is not None

    def requests(self) -> RequestsInfo:
        queue = self._queue
        kept = self._subscriptions.kept
        return self._counts.info(queue.waiting, queue.live, len(self._tables), kept)
