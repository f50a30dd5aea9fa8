"""Runs the requests of one ring: handles one input at a time, then starts all that has become possible.

handle                 an input: a result, a change of the ring, a client's action, an alarm   core/inputs.py
  -> play, react         turn the input into commands for one request             core/request.py, inputs.py
  -> _apply              executes the commands                                    effects.py
_advance               admits, reopens and branches, the most urgent action first, until nothing is possible

A *step* is one forward pass of the ring.
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
    Record,
    StepRecord,
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
    """Runs all requests of one ring: this class handles inputs and decides what starts next.

    The base class `Effects` owns the state and executes the commands that this class decides on. All methods
    run on the event loop; only `open` and `revive` await.
    """

    # --- inputs ---

    def handle(self, event: inputs.Input) -> None:
        """Handle one input of the engine, then start the actions that the input has made possible. An error
        that concerns one request ends that request only. The client's errors are delivered by its
        subscription. Further sequences are started only after an `inputs.UnblockingInput`, after a change of
        the quarantine, and if pages were freed.

        event: an object of one of the classes in `core.inputs`, or a result of the ring. A request that it
            names must be one of this engine, except for RequestArrived.
        """
        match event:
            case Result():
                self._read_step(event)
            case inputs.RingReady():
                pass
            case inputs.RingLost(reason, planned):
                self._lose_ring(reason, planned)
            case inputs.OrderUnsent(order):
                self._fail_users_of(order)
            case inputs.MasterLeaving(reason):
                self._shut_down(reason)
            case inputs.RequestArrived(request, lacking):
                self._enqueue(request, lacking)
            case inputs.RequestMoved(request):
                self._queue.remove(request)
                self._quarantine.remove(request.breaks)
            case inputs.RequestCancelled(request):
                self._record_and_apply(request, CancelledRecord(self._clock.now() - request.since))
            case inputs.RingOverdue(request, lacking, seconds):
                overdue = request.overdue(lacking, seconds, self._ring.waiting_for())
                self._apply(request, [FailRequest(overdue)])
            case _:
                with self._isolate(event.request):
                    self._apply(event.request, react(event))
        # A result starts something new only through the pages that it frees. For example, when a plan is
        # used, a sequence closes: its skeleton, or with a speculative plan the direct answer after its
        # introduction. The pages of that sequence are then free for the branches.
        if isinstance(event, inputs.UnblockingInput) or self._quarantine.has_changed() or self._tables.freed:
            self._advance()

    def _record_and_apply(self, request: RequestState, record: Record) -> None:
        """Write a record to the journal, then apply it to the request. After a restart, `_replay` plays the
        same records again and so restores the request.

        request: the request that the record is of.
        record: what has happened to it, with times in seconds since its arrival.
        """
        self._journal.record(request, record)
        self._apply(request, request.play(record))

    def _read_step(self, result: Result) -> None:
        """Give the outcomes of one step to their requests. A result of another epoch counts as a sign of life
        of the ring (`steps`); its outcomes are dropped. The prefix of a failed sequence is marked as suspect.
        An exception of one request fails that request only.

        result: what the last stage, or stage 0, has reported.
        """
        self.steps.on_result(result)
        if result.epoch != self._epoch:
            return
        now = self._clock.now()
        self._costs.steps.on_result(result, now)
        for progress in result.prefixes:
            self._tables.prefixes.record_progress(progress)
        for outcome in result.outcomes:
            if outcome.end is End.FAILED:
                self._tables.suspect_sequence(outcome.sequence)
        for request, request_outcomes in self._tables.group(result.outcomes):
            # `_isolate` would do the same, but a context manager per request costs as much as its decoding.
            try:
                self._quarantine.on_tokens(
                    request.breaks, sum(len(outcome.tokens) for _, outcome in request_outcomes)
                )
                self._record_and_apply(request, StepRecord(now - request.since, tuple(request_outcomes)))
            except Exception as error:
                self._fail_alone(request, error, internal_error())

    def _lose_ring(self, reason: str, planned: bool) -> None:
        """Suspend every request until the next epoch, where each request continues from its token logs. A
        planned end is blamed on no request.

        If the quarantine finds one request guilty of repeated breaks, that request fails instead.

        reason: why the epoch ended, as clients read it if no other ring comes in time.
        planned: True if the master ended the epoch itself, so that no request is suspected of having broken
            the ring.
        """
        culprit = None if planned else self._quarantine.on_break(self._queue.suspects)
        for request in self._end_epoch():
            if request.breaks is culprit:
                self._apply(request, [FailRequest(Unavailable(f"{reason}; {request.breaks.summary}"))])
            else:
                self._await_ring(request, reason, planned)

    def _fail_users_of(self, order: Order) -> None:
        """Fail every request that owns, or forks from, the sequence of an order that could not be sent. The
        prefix of that sequence is marked as suspect, so that no later request forks from it. Requests that
        fail get an internal error.

        If no request uses the sequence, no request fails.

        order: the order that stage 0 did not receive.
        """
        sequence = order.opening.sequence if isinstance(order, Open) else order.sequence
        self._tables.suspect_sequence(sequence)
        for request in self._queue.all_requests:
            own_sequences = {one.id for one in request.sequences.values()}
            if sequence in own_sequences or any(one.sequence == sequence for one in request.lineage):
                self._apply(request, [FailRequest(internal_error())])

    def _shut_down(self, reason: str) -> None:
        """Fail every request because the master shuts down, and refuse all later requests. These failures are
        not journaled (final=False), so a master that reads the journal continues the resumable requests.

        reason: the error message that clients receive.
        """
        self._ended = reason
        self._quarantine.clear()
        for request in self._end_epoch():
            self._apply(request, [FailRequest(Unavailable(reason), final=False)])

    def _enqueue(self, request: RequestState, lacking: str) -> None:
        """Queue a request in this ring. If there is no ring, start the timeout after which the request fails.
        The alarm of the deadline is set, and an alarm of an earlier ring is cleared.

        request: a new request, or one of another ring.
        lacking: why there is no ring, for the message of that failure; "" if there is one.
        """
        request.home = self
        self._queue.wait(request)
        request.clear_alarms(inputs.RingOverdue)
        self._watch_deadline(request)
        if self._ring.state() is None:
            self._await_ring(request, lacking)

    def _watch_deadline(self, request: RequestState) -> None:
        """Set the alarm of the request's deadline; an earlier alarm, perhaps of another ring, is replaced.
        Without a deadline there is no alarm. A deadline that has passed already makes the alarm ring at once.

        request: the request, whose `deadline` is in seconds of the engine's clock.
        """
        request.clear_alarms(inputs.DeadlinePassed)
        if request.deadline is not None:
            left = request.deadline - self._clock.now()
            request.set_alarm(inputs.DeadlinePassed(request), self._clock, left)

    # --- the next actions ---

    def _advance(self) -> None:
        """Start whatever the ring has room for, one action at a time, the most urgent kind first. An epoch
        that has ended is not filled again; the first call in a new epoch prepares it (`_begin_epoch`).

        Waiting requests are admitted first; then sequences that an ended epoch lost are reopened; then
        further branches of admitted requests are opened. Nothing happens while there is no running epoch.
        """
        self._tables.freed = False
        state = self._ring.state()
        if state is None or state.epoch <= self._newest_ended_epoch:
            return
        if self._epoch != state.epoch:
            self._begin_epoch(state)
        now = self._clock.now()
        # Ids of requests that this pass has tried to reopen, and of those whose next branch must wait.
        tried = set[str]()
        stuck = set[str]()
        while (
            self._admit_next(state, now) or self._reopen_next(state, tried) or self._branch_next(state, stuck)
        ):
            pass

    def _admit_next(self, state: RingState, now: float) -> bool:
        """Admit the next waiting request if its pages are free. Return True if a request was admitted, False
        if none waits or its pages are not free. A new request starts its plan, or answers directly if the
        ring has no places for a speculative plan; a request that ran in an
        earlier epoch reopens its sequences. An error in starting it fails that request only, and True is
        returned all the same.

        state: sizes and limits of the running ring.
        now: the present time, in seconds of the engine's clock.
        """
        request = self._queue.next_to_admit(now)
        if request is None or not self._tables.admit(request, state, self._queue.has_places(request)):
            return False
        self._queue.admit(request)
        with self._isolate(request):
            if request.entered_ring:
                self._reopen(request, state)
            else:
                self._counts.enter(request.prompt_tokens, request.num_cached_tokens)
                workload = request.workload(num_running_sequences=len(self._tables))
                request.plan.apply_forecast(Outlook(self._costs, workload))
                self._record_and_apply(
                    request,
                    AdmittedRecord(now - request.since, request.num_cached_tokens, request.has_room_for_plan),
                )
        return True

    def _reopen_next(self, state: RingState, tried: set[str]) -> bool:
        """Try to reopen lost sequences of one admitted request. Return False if there is no such request.
        While requests wait for admission, a reopened sequence may use only the pages that were reserved for
        its own request. True means only that it was tried: it may still have lost sequences, or have failed.

        state: sizes and limits of the running ring.
        tried: ids of requests that are passed over; the id of this request is added.
        """
        request = next((one for one in self._queue.interrupted if one.id not in tried), None)
        if request is None:
            return False
        tried.add(request.id)
        with self._isolate(request):
            self._reopen(request, state, reserved_only=bool(self._queue.waiting))
        return True

    def _reopen(self, request: RequestState, state: RingState, reserved_only: bool = False) -> None:
        """Reopen the sequences that the request lost with an epoch, in the plan's order, while pages last.
        Sequences for which no pages are left stay lost, and a later call tries again; without a lost
        sequence, nothing happens. The first sequence without pages ends this call.

        A request that has lost branches, or threads of a model that forks, first gets a prefix of all that
        they share, so that this is computed once.

        request: an admitted request.
        state: sizes and limits of the running ring.
        reserved_only: True to use only the pages that are reserved for the request itself (its grant),
            because other requests wait for the free ones.

        Raises Unavailable if the ring is gone.
        """
        self._tables.lengthen(request, request.lost_prefix, state)
        for sequence in request.lost:
            pages = pages_of(request, request.turn(sequence.ordinal), sequence.log.opening.limit, state)
            if not self._tables.has_room(request, pages, reserved_only):
                return
            self._apply(request, [ReopenSequence(sequence.ordinal)])

    def _branch_next(self, state: RingState, stuck: set[str]) -> bool:
        """Try to open one branch of the request whose turn it is. Return False if no request has a branch to
        open. True is returned also if its branch had to wait or if the request failed.

        state: sizes and limits of the running ring.
        stuck: ids of requests that are passed over. The id of this request is added unless its branch was
            opened, so each pass of `_advance` tries an unsuccessful request once.
        """
        request = self._queue.next_to_branch(stuck)
        if request is None:
            return False
        stuck.add(request.id)
        with self._isolate(request):
            if self._add_branch(request, state):
                stuck.remove(request.id)
        return True

    def _add_branch(self, request: RequestState, state: RingState) -> bool:
        """Open the first ready branch of a request. Return False if its prompt is not encoded yet, or if its
        pages are missing. While requests wait for admission, the branch may use only its request's own grant.

        request: an admitted request with a ready branch.
        state: sizes and limits of the running ring.

        Raises TooLarge if the branch can never fit this ring, and InvalidRequest if its prompt cannot be
        built.
        """
        command = request.plan.preview(request.plan.ready()[0])
        if not self._intake.has_prompt(request, command):
            return False
        self._tables.lengthen(request, request.branch_prefix(command), state)
        turn = request.branch_turn(command)
        check_branch_fits(request, turn, command.budget, state)
        pages = pages_of(request, turn, command.budget, state)
        if not self._tables.has_room(request, pages, reserved_only=bool(self._queue.waiting)):
            return False
        self._record_and_apply(
            request, self._journal.branch_record(command.point.id, request.branch_wording(command))
        )
        return True

    def _begin_epoch(self, state: RingState) -> None:
        """Start to fill a new epoch, whose ring is empty and may have another size than the previous one. A
        request that is too large for the new ring waits for a larger one, until its timeout. A request whose
        check fails for another reason than its size fails. The repair timeout of a request that fits is
        cancelled. Forecasts start anew with the ring's curve.

        state: sizes and limits of the new ring.
        """
        self._tables.begin_epoch(state.pages, state.kept, state.replays)
        self._epoch = state.epoch
        self._costs.begin(state.curve)
        self._intake.remember(state)
        for request in self._queue.all_requests:
            with self._isolate(request):
                try:
                    refit(request, state)
                    request.clear_alarms(inputs.RingOverdue)
                except TooLarge as misfit:
                    self._park(request, misfit)

    def _end_epoch(self) -> list[RequestState]:
        """Forget everything that this epoch held in the ring. Return all requests; all of them wait again.
        The list is empty if there was no request. No epoch is filled until the next one begins.

        Orders that have not been sent are dropped, and all sequences of every request are marked as lost.
        """
        self._outbox.clear()
        self._tables.begin_epoch(0)
        self._newest_ended_epoch = max(self._newest_ended_epoch, self._epoch or 0)
        self._epoch = None
        requests = self._queue.suspend()
        for request in requests:
            request.mark_lost()
        return requests

    # --- calls of clients and of the master ---

    async def open(self, ask: Ask | None, caller: Caller, offset: int | None = None) -> Subscription:
        """Queue a request, or resume one. Return its events, numbered from 0; the last event is Finished.
        Without an id of the caller, or if the caller has no such request, a new one is queued.

        Closing the returned subscription cancels the request, unless the request is resumable: then the
        request continues without a reader, and is kept for a while; the same call reads it again.

        ask: the request. To resume, either None or the same request as before (`max_new_tokens` may be left
            out again).
        caller: who asks. The caller's timeout counts from this call, for a resumed request too.
        offset: the number of the first event to return; None for the first event. Anything but None requires
            a resumable request of this caller that runs, or that ended recently.

        Raises InvalidRequest, NotFound (the caller has no such request to resume, or the model is unknown),
        Overloaded, TimedOut, and Unavailable if there has been no ring yet or the master shuts down. The
        returned events raise Unavailable if the ring breaks and no other is complete in time, TimedOut,
        PlanError, and Cancelled if nothing is read for too long.
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
        """Cancel a request; its client still receives Finished, with the text so far. Return False if no such
        request is waiting or running, or if it belongs to another owner. A request that has ended already
        counts as not running.

        request_id: the id under which the request was opened.
        owner: the owner of the caller's token; "" for a caller without a token.
        """
        request = self._queue.find(request_id)
        if request is None or not request.belongs_to(owner):
            return False
        self.handle(inputs.RequestCancelled(request))
        return True

    def adopt(self, request: RequestState) -> None:
        """Continue a request of another ring in this ring.

        request: the request, without a sequence in a running ring.

        Raises InvalidRequest if the request is too large for this ring, and Unavailable if this ring is not
        complete. In both cases nothing has changed.
        """
        refit(request, require_ring(self._ring))
        self.handle(inputs.RequestArrived(request))

    async def revive(self, journaled_requests: Iterable[JournaledRequest]) -> None:
        """Restore the requests that an earlier master process left in the journal. Unfinished requests
        continue; finished ones can be read again. A request that cannot be restored is logged and dropped
        from the journal. A request whose records cannot be applied fails, but can be read.

        journaled_requests: the requests as the journal keeps them.
        """
        for one in journaled_requests:
            try:
                request = await self._intake.rebuild(one, self._clock.now() - self._journal.age(one))
            except Exception as error:  # A single unreadable request must not keep the master from starting.
                log.warning("request lost", request_id=one.id, reason=str(error), exc_info=error)
                self._journal.forget(one.id)
            else:
                self._replay(request, one)

    def _replay(self, request: RequestState, journaled: JournaledRequest) -> None:
        """Apply the journal's records to a restored request, then queue the request if it has not ended. If
        the records cannot be applied, for example because prompts are worded differently now, the request
        fails. In every case the client can read the request again for a while. Records after the request's
        end are skipped.

        request: the request in its initial state.
        journaled: the same request as the journal keeps it, with its records.
        """
        unplayable = Unavailable("what was written down of this request cannot be played again")
        with self._isolate(request, unplayable):
            check_prompt_unchanged(journaled.wording, request.wording)
            for record in journaled.records:
                if not request.over:
                    self._apply(request, request.play(record))
        log.info("taken up again", **request.log_fields, over=request.over)
        if not request.over:
            self._subscriptions.keep(request)
            self.handle(inputs.RequestArrived(request, "the master was restarted"))

    async def _accept(self, ask: Ask, caller: Caller) -> RequestState:
        """Validate a new request, prepare its prompts, and queue it; return its state.

        Conditions that refuse the request are checked before the costly preparation, and again after it,
        because the queue may have filled meanwhile. If the same resumable request was accepted meanwhile, it
        is returned.

        ask: what the client asks for.
        caller: who asks: the request id that the client chose, its name for fairness, its time limit, and the
            owner.

        Raises the errors of `open`: among others InvalidRequest if a request with this id exists already, and
        Overloaded if the queue or the validation has no room.
        """
        self._check_open()
        check_deadline(caller.timeout)
        self._make_room(caller.client)
        if self._intake.num_validating >= self._config.queue:
            raise self._overloaded()
        # The request as received, for the comparison with an earlier call; `validate` resolves its limits.
        asked = ask
        ask, prompt, left = await self._intake.validate(asked, caller)
        self._check_open()
        if (known := self._find_resumable(caller)) is not None:  # The same call, sent twice at the same time.
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
        """Raise Unavailable once the master is shutting down."""
        if self._ended is not None:
            raise Unavailable(self._ended)

    def _make_room(self, client: str) -> RequestState | None:
        """Return the waiting request that a new request displaces from the full queue, or None while the
        queue has room. The caller must fail the returned request. The refusal is counted.

        client: the name of the new request's client.

        Raises Overloaded if the new request itself has to be refused.
        """
        try:
            return self._queue.make_room(client)
        except QueueFull:
            raise self._overloaded() from None

    def _overloaded(self) -> Overloaded:
        """Count a refusal, and return its error with the seconds after which the client should try again. The
        error says how many requests are waiting.
        """
        self._counts.refused += 1
        later = self._hints.refuse(self._clock.now())
        return Overloaded(f"{self._queue.waiting} requests are waiting already", later)

    def _find(self, id: str) -> RequestState | None:
        """Return the request of this id if it waits, runs, or has ended and can still be read; else None.

        id: the id under which the request was opened.
        """
        return self._queue.find(id) or self._subscriptions.find(id)

    def _find_resumable(self, caller: Caller) -> RequestState | None:
        """Return the resumable request that the caller names and may read, or None.

        caller: who asks; its `request` is the id, which may be None.
        """
        request = self._find(caller.request) if caller.request else None
        return request if request and request.ask.resumable and request.belongs_to(caller.owner) else None

    def _rejoin(self, request: RequestState, ask: Ask | None, timeout: float | None) -> RequestState:
        """Return a known request, which the caller reads again; from now on this caller's deadline applies.
        The deadline of a request that has ended stays as it is.

        request: the known request.
        ask: None, or the same request as before. The journal may have replaced an omitted max_new_tokens by a
            number, so omitting it again counts as the same request.
        timeout: seconds from now, or None for no deadline.

        Raises InvalidRequest if `ask` differs from the known request, TimedOut if `timeout` is not positive.
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

    # --- state for the master, for the fleet and for metrics ---

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return not self._queue.all_requests

    @property
    def parked(self) -> list[RequestState]:
        """Requests that are too large for the present ring and wait for a larger one; empty if all fit."""
        return self._queue.parked

    @property
    def at_work(self) -> int:
        """Number of requests that a new epoch would disturb: all but the parked ones."""
        return len(self._queue.all_requests) - len(self.parked)

    def fitting(self, ring: RingState) -> int:
        """Return how many of the waiting and running requests would each fit a ring like this one.

        ring: sizes and limits of a ring that need not run.
        """
        return sum(fits(request, ring) for request in self._queue.all_requests)

    def final_rows(self) -> dict[int, int]:
        """Return, by sequence id, how many of its first tokens have final KV on every stage, so that the KV
        can be migrated while requests continue; see `RingTables.final_rows`. The dict is empty unless the
        running epoch is the one that the engine fills.
        """
        state = self._ring.state()
        return self._tables.final_rows() if state and state.epoch == self._epoch else {}

    @property
    def has_work(self) -> bool:
        """True if the ring holds a sequence that its next step can advance, so that a result is due."""
        return self._tables.has_work

    @property
    def free_pages(self) -> int:
        """KV pages that no request has reserved, and pages of cached prefixes that no request needs now. 0
        without a running ring, and all pages of a new ring that the engine does not fill yet.
        """
        state = self._ring.state()
        if state is None:
            return 0
        return self._tables.free_pages if state.epoch == self._epoch else state.pages

    @property
    def kept(self) -> tuple[int, ...]:
        """Ids of the sequences that hold cached prompt prefixes; empty if none is cached."""
        return self._tables.prefixes.sequences

    @property
    def prefix_pages(self) -> int:
        """KV pages of all cached prompt prefixes, whether or not a request needs them now."""
        return self._tables.prefixes.pages

    @property
    def all_requests(self) -> list[RequestState]:
        """The requests in the ring, then the waiting ones; empty if there are none."""
        return self._queue.all_requests

    @property
    def waiting(self) -> int:
        """Number of requests that wait in the queue or are being validated before they may queue."""
        return self._queue.waiting + self._intake.num_validating

    def has_request(self, id: str) -> bool:
        """Return True if a request of this id waits, runs, or has ended and can still be read.

        id: the id under which the request was opened.
        """
        return self._find(id) is not None

    def requests(self) -> RequestsInfo:
        """Return the counts of waiting, running and ended requests, as status pages and metrics show them."""
        queue = self._queue
        num_kept = self._subscriptions.kept
        return self._counts.info(queue.waiting, queue.live, len(self._tables), num_kept)
