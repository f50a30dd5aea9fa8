"""Executes commands: opens and closes sequences, delivers events, writes the journal, counts statistics."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import structlog

from specsot.core.skeleton import PlanRules
from specsot.errors import Cancelled, SpecsotError, TooLarge
from specsot.events import Finished, Numbered
from specsot_master.core import commands
from specsot_master.core.inputs import RingOverdue, failure_of, internal_error
from specsot_master.core.records import FailedRecord, ReopenedRecord
from specsot_master.core.request import Clock, Home, RequestState
from specsot_master.core.ring.quarantine import Quarantine
from specsot_master.core.ring.queue import RequestQueue
from specsot_master.core.ring.ring_state import EngineConfig, Ring, require_ring
from specsot_master.core.sequence import SequenceFactory
from specsot_master.core.stats import RequestCounts, RetryHints, StepMeter
from specsot_master.engine.event_stream import LoopClock, Subscriptions
from specsot_master.engine.forecast_memory import ForecastMemory
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from specsot_master.engine.intake import Intake
from specsot_master.engine.ring_tables import OrderQueue, RingTables
from specsot_master.journal import RequestJournal
from specsot_master.prompts import Prompts
from specsot_master.text import Text

log = structlog.get_logger()

# Seconds. The minimum repair timeout of requests after a planned epoch change, which loads layers. Untuned.
PLANNED_SECONDS = 30.0


class Effects(Home):
    """Owns the requests, queue, page tables and statistics of one ring, and executes commands.

    `Engine` derives from this class and decides on the commands. The attribute `steps` counts the steps of
    the ring.
    """

    def __init__(
        self,
        ring: Ring,
        text: Text,
        prompts: Prompts,
        config: EngineConfig,
        clock: Clock | None = None,
        forms: GrammarSandbox | None = None,
        journal: RequestJournal | None = None,
        readers: Subscriptions | None = None,
        memory: ForecastMemory | None = None,
    ) -> None:
        """Create an engine without requests.

        A master with several rings passes the same `forms`, `journal`, `readers` and `memory` to each engine.
        Where they are omitted, the engine creates its own; then nothing is written to disk.

        ring: stage 0, which gets the orders, and the state of the ring.
        text: the model's tokenizer and chat template.
        prompts: makes the prompts of requests.
        config: how requests are treated.
        clock: returns the time and schedules calls; None for the event loop's clock.
        forms: checks the forms (grammars) that clients give for their answers; None for one of this engine's
            own.
        journal: records resumable requests; None to record nothing.
        readers: connects clients to the events of requests; None for a store of this engine's own.
        memory: the file with the measured costs for forecasts; None to keep them in memory only.
        """
        self._ring = ring
        self._config = config
        self._clock = clock or LoopClock()
        self._journal = journal or RequestJournal()
        self._subscriptions = readers or Subscriptions(config, self._clock, self._journal)
        self._memory = memory or ForecastMemory()
        self._quarantine, self._costs = Quarantine(), self._memory.read()
        self._queue = RequestQueue(config, self._quarantine)
        self._counts = RequestCounts()
        self._hints = RetryHints(config.retry_after)
        self._outbox = OrderQueue(ring, self)
        self._tables = RingTables(
            text, SequenceFactory(text.end_ids, config.heads, config.importance), self._outbox, config
        )
        forms = forms or GrammarSandbox()
        self._intake = Intake(self, ring, prompts, forms, self._clock, config, self._costs)
        self.steps = StepMeter(time.monotonic)
        # The epoch whose ring this engine fills; None between two epochs.
        self._epoch: int | None = None
        # The newest epoch that is known to have ended.
        self._newest_ended_epoch = 0
        # Why the master refuses all requests; None until the master shuts down.
        self._ended: str | None = None

    def _apply(self, request: RequestState, decided: Iterable[commands.Command]) -> None:
        """Execute the commands of a request one by one; do nothing if there are none. A closed sequence that
        is unknown is ignored.

        request: a request of this engine, waiting, running or being replayed.
        decided: the commands; may be a generator whose next command depends on the effect of the previous one
            (`RequestState.play`), so each command is executed before the next is drawn.

        Raises what a command raises, such as Unavailable if a sequence must be opened and the ring is gone,
        and KeyError for the reopening of an unknown sequence. The commands after it are not executed.
        """
        for command in decided:
            match command:
                case Numbered():
                    self._buffer_event(request, command)
                case commands.RenewLeases():
                    self._renew(request)
                case commands.OpenBranch(point, budget=limit):
                    self._open(request, command, limit, point.id)
                case commands.OpenSkeleton(limit, rules, constrained, ordinal):
                    self._open(request, command, limit, ordinal, rules if constrained else None)
                case commands.OpenAnswer(limit) | commands.OpenPolish(_, limit):
                    self._open(request, command, limit)
                case commands.OpenScore():
                    self._open(request, command, 1)
                case commands.ReopenSequence(ordinal):
                    sequence = request.sequences[ordinal]
                    state = require_ring(self._ring)
                    self._tables.place(request, sequence, state, again=True)
                    self._journal.record(request, ReopenedRecord(ordinal))
                case commands.CloseSequence(ordinal):
                    if sequence := request.sequences.get(ordinal):
                        self._tables.close(request, sequence)
                case commands.FailRequest(error, final):
                    self._fail(request, error, final)
                case commands.DropRequest():
                    self._discard(request)
                case commands.KeepRequest():
                    self._subscriptions.keep(request)
                case commands.ReleaseRequest():
                    self._subscriptions.release(request)
                case commands.WatchReader():
                    self._subscriptions.watch(request)
                case commands.CutReader():
                    self._cut_reader(request)

    @contextmanager
    def _isolate(self, request: RequestState, default_error: SpecsotError | None = None) -> Generator[None]:
        """Catch every error in the block; the error ends this request only. The error is not raised again, so
        the code after the block runs.

        request: the request that the block works on.
        default_error: the error that the client receives in place of an unexpected exception; None for
            "internal error". A SpecsotError reaches the client as `failure_of` translates it.
        """
        try:
            yield
        except Exception as error:
            self._fail_alone(request, error, default_error or internal_error())

    def _fail_alone(self, request: RequestState, error: Exception, default_error: SpecsotError) -> None:
        """Fail one request because of an error; log the error unless it is meant for the client as it is. An
        error that is translated for the client is logged with its trace.

        request: a request of this engine, waiting, running or being replayed.
        error: the exception that was raised.
        default_error: what the client receives if `error` is no SpecsotError.
        """
        if (failure := failure_of(error, default_error)) is not error:
            log.exception("a member, or the master, broke a rule", **request.log_fields)
        self._apply(request, [commands.FailRequest(failure)])

    def _park(self, request: RequestState, misfit: TooLarge) -> None:
        """Let a request that does not fit the present ring wait for a larger one. The request waits as long
        as after a broken ring. The quarantine forgets the request, so that other requests do not wait for its
        trial. The reason is logged for the first ring that is too small only.

        request: a request of this engine, waiting, running or being replayed.
        misfit: why the present ring cannot hold it.
        """
        if request.misfit is None:
            log.info("waits for a larger ring", **request.log_fields, reason=str(misfit))
        request.misfit = misfit
        self._quarantine.remove(request.breaks)
        self._await_ring(request, "")

    def _await_ring(self, request: RequestState, lacking: str, planned: bool = False) -> None:
        """Start the repair timeout of a request, unless the timeout runs already. The repair timeout starts
        at the first wait; failed or undersized epochs do not restart it. When it runs out, the engine
        receives RingOverdue. Time for which this process was stopped does not count, because members on the
        same machine were stopped as well.

        request: the request, which waits for a ring.
        lacking: why there is no ring, for the message of its failure; "" if the present ring is only too
            small.
        planned: True if the master ended the epoch to form a better ring; then the timeout is at least
            PLANNED_SECONDS.
        """
        if not request.has_alarm(RingOverdue):
            seconds = max(self._config.repair_for, PLANNED_SECONDS if planned else 0.0)
            request.set_alarm(
                RingOverdue(request, lacking, seconds), self._clock, seconds, while_running=True
            )

    def _open(
        self,
        request: RequestState,
        command: commands.Open,
        limit: int,
        ordinal: int = 0,
        rules: PlanRules | None = None,
    ) -> None:
        """Create a decoding sequence, and place it in the ring if its request has been admitted. While old
        records are replayed after a restart the request is not admitted; then the sequence is only created,
        and is opened in the ring later.

        The caller has made sure that the sequence's pages are reserved or free.

        request: the request that the sequence belongs to.
        command: the command that opens the sequence; it selects the prompt.
        limit: the maximum number of generated tokens.
        ordinal: 0 for a skeleton or a direct answer, PLAN_ORDINAL for a speculative skeleton, else the id of
            the branch's point.
        rules: the plan grammar that constrains the sequence, or None.

        Raises Unavailable if the ring is gone, and InvalidRequest if the prompt cannot be built.
        """
        sequence = self._tables.make(request, command, ordinal, limit, rules)
        if self._queue.is_live(request):
            self._tables.place(request, sequence, require_ring(self._ring))

    def _renew(self, request: RequestState) -> None:
        """Renew the leases of a request's sequences, unless the client has too many unread events. Once the
        request opens no further sequences, its base grant is dropped: only used pages stay charged. The grant
        stays while a sequence waits to be opened again. A request that is not in the ring gets no lease.

        request: the request, admitted or not.
        """
        if request.plan.all_opened and not request.has_lost:
            self._tables.ledger.drop_grant(request.id)
        if self._queue.is_live(request) and not request.events.is_full(self._config.unread):
            self._tables.renew(request)

    def _buffer_event(self, request: RequestState, numbered: Numbered) -> None:
        """Append an event to the request's buffer for its client; end the request after Finished. While the
        request is replayed after a restart, the event is only buffered, since it was counted the first time.
        The lengths of answers and the end are counted only while the request is queued; lengths of a request
        with a time limit are not counted.

        request: a request of this engine, waiting, running or being replayed.
        numbered: the event with its number.
        """
        event = numbered.event
        request.events.push(numbered)
        # During the replay after a restart the request is not queued; its events were counted the first time.
        if self._queue.has(request):
            # An answer that had to finish within a time limit says nothing about natural lengths.
            if request.ask.finish_within_s is None:
                self._costs.lengths.on_event(event)
            self._subscriptions.on_event(request)
            if isinstance(event, Finished):
                self._note_finished(request, event)
        if isinstance(event, Finished):
            self._discard(request)

    def _note_finished(self, request: RequestState, event: Finished) -> None:
        """Log the end of a request, and save the measured costs for forecasts if a save is due; otherwise
        nothing is saved. The log line names the reason, the tokens, the steps and the seconds.

        request: a request of this engine, waiting, running or being replayed.
        event: its last event, with its statistics.
        """
        ended = event.statistics
        figures = {
            "tokens": ended.completion_tokens,
            "steps": ended.steps,
            "seconds": round(ended.seconds, 3),
        }
        log.info("finished", **request.log_fields, reason=event.reason.value, **figures)
        self._memory.write(self._costs.kept, self._clock.now())

    def _cut_reader(self, request: RequestState) -> None:
        """Disconnect a client that has not read for too long; its subscription raises Cancelled.

        request: the request whose client is disconnected.
        """
        log.warning("the client does not read", **request.log_fields, unread=request.events.unread)
        request.events.disconnect(Cancelled(f"nothing was read for {self._config.unread_for:g} s"))

    def _fail(self, request: RequestState, error: SpecsotError, final: bool) -> None:
        """End a request with an error. A request that has ended already is not failed again. It is logged and
        journaled only while it is queued.

        request: the request; an ended one is not failed again.
        error: what the client's subscription raises.
        final: True to journal the failure, so that it also holds after a restart.
        """
        if self._queue.has(request):
            log.warning("request failed", **request.log_fields, reason=str(error))
            if final:
                self._journal.record(request, FailedRecord(type(error).__name__, str(error)))
        self._discard(request, error)

    def _discard(self, request: RequestState, error: SpecsotError | None = None) -> None:
        """End a request's events, and release all that the request holds in queue, ring and quarantine. A
        second call does nothing. A request that never entered the queue only ends its events. The end counts
        under the class of the error, else under the plan's reason, else as "cancelled".

        request: a request of this engine, waiting, running or being replayed.
        error: what the client's subscription raises after the last event; None after Finished or an abandoned
            request.
        """
        if request.events.over:
            return
        request.events.end(error)
        self._subscriptions.on_end(request)
        # A request that had ended before a restart is replayed without ever entering the queue.
        if not self._queue.has(request):
            return
        if not (error or request.plan.reason):
            log.info("abandoned", **request.log_fields)
        self._counts.end(error or request.plan.reason or "cancelled")
        self._hints.on_departure(self._clock.now())
        self._tables.release(request)
        self._queue.remove(request)
        self._quarantine.remove(request.breaks)
