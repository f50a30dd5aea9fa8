"""What happens to requests takes effect here: in plans and texts, in the ring, at clients, in the journal.

What happens is a record. `_play` lets it take effect, now or once more when the journal of a master before
this one is read; `_do` carries out what the request's plan then asks for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import structlog

from specsot.core.frames import Outcome
from specsot.core.skeleton import PlanRules
from specsot.errors import SpecsotError, Unavailable, WireError
from specsot.events import Finished, Numbered
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
from specsot_master.core.ring import EngineConfig, Ring
from specsot_master.core.schedule import Quarantine, RetryHints
from specsot_master.core.sequence import SequenceFactory
from specsot_master.core.stats import RequestCounts
from specsot_master.engine.event_stream import Subscriptions
from specsot_master.engine.forecast_memory import ForecastMemory
from specsot_master.engine.intake import require_ring
from specsot_master.engine.queue import RequestQueue
from specsot_master.engine.request_journal import RequestJournal, check_prompt_unchanged, error_of
from specsot_master.engine.request_state import ActiveSequence, Clock, RequestState
from specsot_master.engine.ring_tables import OrderQueue, RingTables
from specsot_master.journal import (
    AdmittedRecord,
    BranchRecord,
    CancelledRecord,
    FailedRecord,
    LapRecord,
    Record,
    ReopenedRecord,
)
from specsot_master.prompts import PromptTurn
from specsot_master.text import Text

log = structlog.get_logger()

INTERNAL_ERROR = "internal error; the master's log has the details"


class RequestEffects:
    """All requests of one ring, and everything that is kept of them."""

    def __init__(
        self,
        ring: Ring,
        text: Text,
        config: EngineConfig,
        clock: Clock,
        outbox: OrderQueue,
        subscriptions: Subscriptions,
        journal: RequestJournal,
        memory: ForecastMemory,
    ) -> None:
        self._ring, self._config, self._clock, self._outbox = ring, config, clock, outbox
        self._subscriptions, self._journal, self._memory = subscriptions, journal, memory
        self._tables = RingTables(text, SequenceFactory(text.end_ids, config.heads), outbox, config)
        self._quarantine, self._costs = Quarantine(), memory.read()
        self._queue, self._counts = RequestQueue(config, self._quarantine), RequestCounts()
        self._hints = RetryHints(config.retry_after)

    # --- what happens to a request ---

    def _happen(self, request: RequestState, record: Record) -> None:
        self._journal.record(request, record)
        self._play(request, record)

    def _play(self, request: RequestState, record: Record) -> None:
        """A record takes effect: in plan and text, and in the ring if the request is in one."""
        plan = request.plan
        match record:
            case AdmittedRecord(at, found):
                request.begun, request.found = True, found
                self._do(request, plan.start(request.asked_tokens, request.since + at, found))
            case BranchRecord(id, wording):
                point = next(one for one in plan.ready() if one.id == id)
                check_prompt_unchanged(wording, request.branch_turn(plan.preview(point)).suffix)
                self._do(request, plan.open_branch(point))
            case LapRecord(at, said):
                plan.on_lap([outcome for _, outcome in said], request.since + at)
                for ordinal, outcome in said:
                    sequence = request.sequences.get(ordinal)
                    if sequence and outcome.sequence in (0, sequence.id):  # 0: of one before a restart
                        self._read(request, sequence, outcome, request.since + at)
            case ReopenedRecord(ordinal):
                log = request.sequences[ordinal].log
                log.reopen(log.opening)
            case CancelledRecord(at):
                self._do(request, plan.cancel(request.since + at))
            case FailedRecord(name, message):
                request.events.end(error_of(name, message))

    def _read(self, request: RequestState, sequence: ActiveSequence, outcome: Outcome, now: float) -> None:
        plan, ordinal = request.plan, sequence.ordinal
        self._tables.on_outcome(outcome, request)
        pieces = sequence.read(sequence.log.append(outcome), outcome.chances, outcome.prompt_chances)
        if outcome.end:
            self._tables.close(request, sequence, ended=True)
        self._do(request, plan.on_text(ordinal, pieces, now))
        if outcome.end and ordinal not in request.sequences:  # else another was opened in its place
            self._do(request, plan.on_end(ordinal, outcome.end, now))

    # --- effects ---

    def _do(self, request: RequestState, commands: Iterable[Command]) -> None:
        """Carry out what a plan asks for."""
        for command in commands:
            match command:
                case Numbered():
                    self._tell(request, command)
                case OpenAnswer(limit):
                    self._open(request, request.answer_turn(), limit)
                case OpenSkeleton(limit, rules, constrained):
                    self._open(request, request.skeleton_turn(), limit, rules=rules if constrained else None)
                case OpenPolish(text, limit):
                    self._open(request, request.polish_turn(text), limit)
                case OpenScore():
                    self._open(request, request.first_turn, 1, scored=True)
                case OpenBranch(point, budget=budget):
                    self._open(request, request.branch_turn(command), budget, point.id)
                case CloseSequence(ordinal):
                    if sequence := request.sequences.get(ordinal):
                        self._tables.close(request, sequence)
                case FailRequest(error):
                    self._fail(request, error)

    def _open(
        self,
        request: RequestState,
        turn: PromptTurn,
        limit: int,
        ordinal: int = 0,
        rules: PlanRules | None = None,
        scored: bool = False,
    ) -> None:
        """A sequence that writes; its pages were granted, or found to be free."""
        sequence = self._tables.make(request, turn, ordinal, limit, rules, scored)
        if self._queue.is_live(request):
            self._tables.place(request, sequence, require_ring(self._ring))

    def _tell(self, request: RequestState, numbered: Numbered) -> None:
        request.events.push(numbered)
        if not self._queue.has(request):  # told again, after a restart
            return
        if request.ask.finish_within_s is None:  # else somebody made it shorter
            self._costs.lengths.on_event(numbered.event)
        self._subscriptions.on_event(request)
        if isinstance(numbered.event, Finished):
            ended = numbered.event.statistics
            told = {"tokens": ended.completion_tokens, "laps": ended.laps, "seconds": round(ended.seconds, 3)}
            log.info("finished", **request.log_fields, reason=numbered.event.reason.value, **told)
            self._memory.write(self._costs.kept, self._clock.now())
            self._forget(request)

    def _fail(self, request: RequestState, error: SpecsotError) -> None:
        if self._queue.has(request):
            log.warning("request failed", **request.log_fields, reason=str(error))
            self._journal.record(request, FailedRecord(type(error).__name__, str(error)))
        request.events.end(error)
        self._forget(request)

    def _forget(self, request: RequestState) -> None:
        """A request is over: leave nothing of it in the ring."""
        if not self._queue.has(request):
            return
        request.events.end()
        if not (request.events.error or request.plan.reason):
            log.info("abandoned", **request.log_fields)
        self._counts.end(request.events.error or request.plan.reason or "cancelled")
        self._subscriptions.on_end(request)
        self._hints.on_departure(self._clock.now())
        self._tables.freed |= self._queue.is_live(request)
        self._tables.release(request)
        self._queue.remove(request)
        self._quarantine.remove(request.breaks)

    @contextmanager
    def _isolate(self, request: RequestState) -> Generator[None]:
        """What goes wrong meanwhile ends this request alone."""
        try:
            yield
        except WireError as error:  # of a member, never of the client
            log.error("a member told what cannot be", **request.log_fields, reason=str(error))
            self._fail(request, Unavailable(f"the ring lost its place in this answer: {error}"))
        except SpecsotError as error:
            self._fail(request, error)
        except Exception:
            log.exception("a request broke the master's rules", **request.log_fields)
            self._fail(request, SpecsotError(INTERNAL_ERROR))
