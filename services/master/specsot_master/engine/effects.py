"""Where commands take effect: in the ring, at clients, in the journal, in figures."""

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
from specsot_master.core.stats import LapMeter, RequestCounts, RetryHints
from specsot_master.engine.event_stream import LoopClock, Subscriptions
from specsot_master.engine.forecast_memory import ForecastMemory
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from specsot_master.engine.intake import Intake
from specsot_master.engine.ring_tables import OrderQueue, RingTables
from specsot_master.journal import RequestJournal
from specsot_master.prompts import Prompts
from specsot_master.text import Text

log = structlog.get_logger()

PLANNED_SECONDS = 30.0  # seconds, at least, for a ring that was better than the one it replaces; not measured


class Effects(Home):
    """All requests of one ring, and everything that is kept of them."""

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
        """forms, journal, readers, memory: those of a master that has several rings."""
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
        self.laps = LapMeter(time.monotonic)
        self._epoch: int | None = None  # of the ring that is being filled
        self._over = 0  # the last epoch that is known to have ended
        self._ended: str | None = None  # why nobody is served any more

    def _apply(self, request: RequestState, decided: Iterable[commands.Command]) -> None:
        for command in decided:
            match command:
                case Numbered():
                    self._tell(request, command)
                case commands.RenewLeases():
                    self._renew(request)
                case commands.OpenBranch(point, budget=limit):
                    self._open(request, command, limit, point.id)
                case commands.OpenSkeleton(limit, rules, constrained=True):
                    self._open(request, command, limit, rules=rules)
                case commands.OpenSkeleton(most) | commands.OpenAnswer(most) | commands.OpenPolish(_, most):
                    self._open(request, command, most)
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
                case commands.ForgetRequest():
                    self._forget(request)
                case commands.KeepRequest():
                    self._subscriptions.keep(request)
                case commands.ReleaseRequest():
                    self._subscriptions.release(request)
                case commands.WatchReader():
                    self._subscriptions.watch(request)
                case commands.CutReader():
                    self._cut_reader(request)

    @contextmanager
    def _isolate(self, request: RequestState, otherwise: SpecsotError | None = None) -> Generator[None]:
        """What goes wrong meanwhile ends this request alone. otherwise: what its client hears of errors that
        are not meant for it.
        """
        try:
            yield
        except Exception as error:
            self._fail_alone(request, error, otherwise or internal_error())

    def _fail_alone(self, request: RequestState, error: Exception, otherwise: SpecsotError) -> None:
        if (failure := failure_of(error, otherwise)) is not error:
            log.exception("a member, or the master, broke a rule", **request.log_fields)
        self._apply(request, [commands.FailRequest(failure)])

    def _strand(self, request: RequestState, misfit: TooLarge) -> None:
        """It waits for a larger ring, as long as for one that broke; all others go on without it."""
        if request.misfit is None:
            log.info("waits for a larger ring", **request.log_fields, reason=str(misfit))
        request.misfit = misfit
        self._quarantine.remove(request.breaks)
        self._await_ring(request, "")

    def _await_ring(self, request: RequestState, lacking: str, planned: bool = False) -> None:
        """From when it had to wait: rings that come to nothing, or are too small, give it no more time."""
        if not request.has_alarm(RingOverdue):
            seconds = max(self._config.repair_for, PLANNED_SECONDS if planned else 0.0)
            request.set_alarm(RingOverdue(request, lacking, seconds), self._clock, seconds)

    def _open(
        self,
        request: RequestState,
        order: commands.Open,
        limit: int,
        ordinal: int = 0,
        rules: PlanRules | None = None,
    ) -> None:
        """A sequence that writes; its pages were granted, or found to be free."""
        sequence = self._tables.make(request, order, ordinal, limit, rules)
        if self._queue.is_live(request):
            self._tables.place(request, sequence, require_ring(self._ring))

    def _renew(self, request: RequestState) -> None:
        """A request that opens nothing more needs no grant for that."""
        if request.plan.all_opened and not request.lost:
            self._tables.ledger.waive(request.id)
        if self._queue.is_live(request) and not request.events.is_full(self._config.unread):
            self._tables.renew(request)

    def _tell(self, request: RequestState, numbered: Numbered) -> None:
        event = numbered.event
        request.events.push(numbered)
        if self._queue.has(request):  # else it is told again, after a restart
            if request.ask.finish_within_s is None:  # else somebody made it shorter
                self._costs.lengths.on_event(event)
            self._subscriptions.on_event(request)
            if isinstance(event, Finished):
                self._note_finished(request, event)
        if isinstance(event, Finished):
            self._forget(request)

    def _note_finished(self, request: RequestState, event: Finished) -> None:
        ended = event.statistics
        told = {"tokens": ended.completion_tokens, "laps": ended.laps, "seconds": round(ended.seconds, 3)}
        log.info("finished", **request.log_fields, reason=event.reason.value, **told)
        self._memory.write(self._costs.kept, self._clock.now())

    def _cut_reader(self, request: RequestState) -> None:
        log.warning("the client does not read", **request.log_fields, unread=request.events.unread)
        request.events.disconnect(Cancelled(f"nothing was read for {self._config.unread_for:g} s"))

    def _fail(self, request: RequestState, error: SpecsotError, final: bool) -> None:
        if self._queue.has(request):
            log.warning("request failed", **request.log_fields, reason=str(error))
            if final:
                self._journal.record(request, FailedRecord(type(error).__name__, str(error)))
        self._forget(request, error)

    def _forget(self, request: RequestState, error: SpecsotError | None = None) -> None:
        """A request is over: its client hears so, and nothing of it stays in the ring."""
        if request.events.over:
            return
        request.events.end(error)
        self._subscriptions.on_end(request)
        if not self._queue.has(request):  # it was over before a restart
            return
        if not (error or request.plan.reason):
            log.info("abandoned", **request.log_fields)
        self._counts.end(error or request.plan.reason or "cancelled")
        self._hints.on_departure(self._clock.now())
        self._tables.release(request)
        self._queue.remove(request)
        self._quarantine.remove(request.breaks)
