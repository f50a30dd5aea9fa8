"""The engine of one ring: accepts requests, applies results, recovers from broken rings, ends requests."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import structlog

from specsot.core.frames import End, Open, Order, Outcome, Result
from specsot.core.info import RequestsInfo
from specsot.errors import InvalidRequest, NotFound, SpecsotError, Unavailable, WireError
from specsot.events import Finished, Numbered
from specsot.params import Ask, brief
from specsot_master.core.ring import Caller, EngineConfig, Ring, RingState
from specsot_master.core.schedule import Quarantine
from specsot_master.core.sequence import SequenceFactory
from specsot_master.core.stats import RequestCounts
from specsot_master.engine.event_stream import RequestStreams, Subscription, Subscriptions, check_same_ask
from specsot_master.engine.forecast_memory import ForecastMemory
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from specsot_master.engine.intake import Intake, check_deadline, refit, require_ring
from specsot_master.engine.queue import Deadlines, RequestQueue
from specsot_master.engine.replay import JournalReplay, RequestJournal
from specsot_master.engine.request_runner import RequestRunner
from specsot_master.engine.request_state import Clock, LoopClock, RequestState
from specsot_master.engine.ring_tables import OrderQueue, PrefixCache, SequenceTable
from specsot_master.journal import CancelledRecord, FailedRecord, JournaledRequest
from specsot_master.prompts import Prompts
from specsot_master.text import Text

log = structlog.get_logger()

INTERNAL_ERROR = "internal error; the master's log has the details"


class Engine(RequestStreams):
    """All requests of one ring."""

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
        self._ring, self._clock = ring, clock or LoopClock()
        self._ended: str | None = None  # why nobody is served any more
        self._text, self._journal = text, journal or RequestJournal()
        self._outbox = OrderQueue(ring.order, self.on_ring_lost, self._on_unsent)
        self._factory = factory = SequenceFactory(text.end_ids, config.heads)
        self._sequences = SequenceTable(text, factory, self._outbox, config.lease)
        self._prefixes = PrefixCache(factory, self._outbox, config.prefix_cache)
        self._memory = memory or ForecastMemory()
        self._quarantine, self._costs = Quarantine(), self._memory.read()
        self._queue, self._counts = RequestQueue(config, self._quarantine), RequestCounts()
        self._runner = RequestRunner(
            ring,
            self._queue,
            self._sequences,
            self._prefixes,
            self._journal,
            self._counts,
            self._clock,
            tell=self._tell,
            fail=self._fail,
            isolate=self._isolate,
            began=self._begin,
            costs=self._costs,
        )
        self._deadlines = Deadlines(self._clock, self._fail, ring.waiting_for, config.repair_for)
        self._subscriptions = readers or Subscriptions(
            config, self._clock, self.drop, self.renew, self._journal
        )
        self._intake = Intake(
            ring,
            prompts,
            forms or GrammarSandbox(),
            self._queue,
            self._counts,
            self._clock,
            config,
            self._costs,
        )

    @property
    def idle(self) -> bool:
        """Nobody waits and nothing runs."""
        return not self._queue.all_requests

    @property
    def has_work(self) -> bool:
        """The ring owes a lap: something in it may go on."""
        return self._sequences.has_work

    @property
    def free_pages(self) -> int:
        """KV pages that are promised to nobody; those of prefixes that nobody needs now are among them."""
        return self._runner.free_pages

    @property
    def kept(self) -> tuple[int, ...]:
        """Sequences that hold beginnings of prompts."""
        return self._prefixes.tree.sequences

    @property
    def kept_pages(self) -> int:
        """KV pages of beginnings of prompts, needed or not."""
        return self._prefixes.tree.pages

    @property
    def all_requests(self) -> list[RequestState]:
        """Those that run, and those that wait."""
        return self._queue.all_requests

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn, or are looked into before they may."""
        return self._queue.waiting + self._intake.inside

    def has_request(self, id: str) -> bool:
        """A request of this id waits, runs, or may still be read."""
        return self._find(id) is not None

    def requests(self) -> RequestsInfo:
        """How requests stand, and how they ended."""
        return RequestsInfo(
            waiting=self._queue.waiting,
            running=self._queue.live,
            writing=len(self._sequences),
            kept=self._subscriptions.kept,
            refused=self._counts.refused,
            ended=self._counts.ended,
            prompt_tokens=self._counts.asked,
            cached_tokens=self._counts.found,
        )

    async def open(self, ask: Ask | None, caller: Caller, offset: int | None = None) -> Subscription:
        """The request's events, numbered from 0, Finished last, once it waits for its turn. Closing them
        cancels it, unless it is resumable: then it lives on for a while, and the same call again reads it.

        offset: from which to read on in the caller's resumable request, which runs, or has ended not long
        ago; ask: what it must have asked for, None: whatever it did. Its timeout counts from now.

        Raises InvalidRequest, NotFound (no such request to read on in, or another's), Overloaded, and
        Unavailable where there was no ring yet. The events raise Unavailable when the ring breaks and no
        other comes; TimedOut; PlanError; Cancelled when nothing is read for too long.
        """
        request = self._find_resumable(caller.request, caller.owner)
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
        now = self._clock.now()
        self._journal.record(request, CancelledRecord(now - request.since))
        self._runner.execute(request, request.plan.cancel(now))
        self.drop(request)
        return True

    async def revive(self, kept: Iterable[JournaledRequest]) -> None:
        """Take up what a master before this one had begun, and keep what it had kept."""
        for one in kept:
            try:
                request = await self._intake.rebuild(one, self._clock.now() - self._journal.age(one))
            except Exception as error:  # whatever is wrong with one of them: the master begins
                log.warning("request lost", request_id=one.id, reason=str(error), exc_info=error)
                self._journal.forget(one.id)
            else:
                self._revive(request, one)
        self._runner.fill()

    def on_result(self, result: Result) -> None:
        """Take a result of the ring. Results of another epoch are ignored."""
        if result.epoch != self._runner.epoch:
            return
        now = self._clock.now()
        self._costs.laps.on_result(result, now)
        for outcome in result.outcomes:
            self._prefixes.on_outcome(outcome)
        for request, outcomes in self._sequences.group(result.outcomes):
            with self._isolate(request):
                self._apply(request, outcomes, now)
        if self._quarantine.has_changed() or self._sequences.freed:
            self._runner.fill()

    def on_ring_ready(self) -> None:
        """The ring is complete: who waited for it goes on."""
        self._runner.fill()

    def on_ring_lost(self, reason: str) -> None:
        """The ring broke: every request waits for the next one, where it goes on from its log."""
        self._forget()
        culprit = self._quarantine.on_break(self._queue.suspects)
        for request in self._queue.suspend():
            request.mark_lost()
            if request.breaks is culprit:
                self._fail(request, Unavailable(f"{reason}; {request.breaks.summary}"))
            else:
                self._deadlines.await_ring(request, reason)

    def end(self, reason: str) -> None:
        """Every request ends with Unavailable(reason), those that come from now on too."""
        self._ended = reason
        self._forget()
        self._quarantine.clear()
        for request in self._queue.clear():
            log.warning("request failed", **request.log_fields, reason=reason)
            request.events.end(Unavailable(reason))
            self._counts.end(Unavailable(reason))
            self._subscriptions.on_end(request)

    def drop(self, request: RequestState) -> None:
        """A request is over, or nobody wants it any more: leave nothing of it in the ring. Unknown ones are
        ignored.
        """
        if self._queue.find(request.id) is not request:
            return
        request.events.end()
        if not (request.events.error or request.plan.reason):
            log.info("abandoned", **request.log_fields)
        self._counts.end(request.events.error or request.plan.reason or "cancelled")
        self._subscriptions.on_end(request)
        self._intake.on_departure()
        live = self._queue.is_live(request)
        self._runner.close(request)
        self._queue.remove(request)
        self._quarantine.remove(request.breaks)
        if self._quarantine.has_changed() or live:
            self._runner.fill()

    def renew(self, request: RequestState) -> None:
        """Longer leases where they are needed, unless the client has stopped reading. Of running ones."""
        if self._queue.is_live(request) and not self._subscriptions.is_paused(request):
            self._runner.renew(request)

    def adopt(self, request: RequestState) -> None:
        """Go on here with what another ring cannot. Raises InvalidRequest (it is too large for this ring)
        and Unavailable before anything is changed.
        """
        refit(request, require_ring(self._ring))
        self._queue.wait(request)
        self._deadlines.has_ring(request)
        self._deadlines.watch(request)
        self._runner.fill()

    def hand_over(self, request: RequestState) -> None:
        """Another ring goes on with it; there is nothing of it in this one."""
        self._queue.remove(request)
        self._quarantine.remove(request.breaks)
        self._runner.fill()

    async def flushed(self) -> None:
        """Return once every order decided so far is with the ring."""
        await self._outbox.settled()

    # --- arrival and departure ---

    async def _accept(self, ask: Ask, caller: Caller) -> RequestState:
        """Once it has been looked into, it waits for its turn."""
        self._check_open()
        prompt, left = await self._intake.validate(ask, caller)
        self._check_open()
        if (known := self._find_resumable(caller.request, caller.owner)) is not None:  # the same call
            return self._rejoin(known, ask, left)
        self._check_free(caller.request)
        last = self._intake.make_room(caller.client)
        request = self._intake.build(ask, caller, self._clock.now(), prompt)
        if last is not None:
            self._fail(last, self._intake.overloaded())
        log.info(
            "request", **request.log_fields, mode=ask.mode, seed=request.seed, tokens=request.prompt_tokens
        )
        self._queue.wait(request)
        self._journal.record_arrival(request, self._clock.now())
        self._deadlines.set(request, left)
        if self._ring.state() is None:
            self._deadlines.await_ring(request, "the ring broke before")
        self._runner.fill()
        return request

    def _check_open(self) -> None:
        """Raises Unavailable."""
        if self._ended is not None:
            raise Unavailable(self._ended)

    def _revive(self, request: RequestState, kept: JournaledRequest) -> None:
        """It goes on in the next ring, unless it had ended; its client may come back in either case."""
        revival = JournalReplay(request, self._text, self._factory)
        revival.run(kept)
        log.info("taken up again", **request.log_fields, over=revival.over)
        if revival.over:
            request.events.end(revival.error)
            self._subscriptions.on_end(request)
            return
        self._queue.wait(request)
        self._subscriptions.start_keeping(request)
        self._deadlines.await_ring(request, "the master was restarted")

    def _check_free(self, id: str | None) -> None:
        """Raises InvalidRequest: the id is another's."""
        if id is not None and self._find(id):
            raise InvalidRequest(f"request {id} is already running", field="request_id")

    def _find(self, id: str) -> RequestState | None:
        return self._queue.find(id) or self._subscriptions.find(id)

    def _find_resumable(self, id: str | None, owner: str) -> RequestState | None:
        request = self._find(id) if id else None
        return request if request and request.ask.resumable and request.belongs_to(owner) else None

    def _rejoin(self, request: RequestState, ask: Ask | None, timeout: float | None) -> RequestState:
        """Somebody reads a known request; the newest caller's deadline counts."""
        check_deadline(timeout)
        check_same_ask(request, ask)
        if self._queue.find(request.id) is request:
            self._deadlines.set(request, timeout)
        return request

    def _forget(self) -> None:
        """Nothing of this epoch is in the ring any more."""
        self._outbox.clear()
        self._runner.end_epoch()

    def _fail(self, request: RequestState, error: SpecsotError) -> None:
        log.warning("request failed", **request.log_fields, reason=str(error))
        self._journal.record(request, FailedRecord(type(error).__name__, str(error)))
        request.events.end(error)
        self.drop(request)

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

    def _begin(self, state: RingState) -> None:
        """A new ring, perhaps of another size."""
        self._costs.begin(state.curve)
        self._intake.remember(state)
        for request in self._queue.all_requests:
            self._deadlines.has_ring(request)
            with self._isolate(request):
                refit(request, state)

    def _on_unsent(self, order: Order) -> None:
        """This one never came to the ring: whose it is cannot go on, and nobody may stand on it."""
        sequence = order.opening.sequence if isinstance(order, Open) else order.sequence
        self._prefixes.on_outcome(Outcome(sequence, 0, (), (), End.FAILED))
        for request in self._queue.all_requests:
            own = {one.id for one in request.sequences.values()}
            if sequence in own or any(one.sequence == sequence for one in request.lineage):
                self._fail(request, SpecsotError(INTERNAL_ERROR))

    # --- results ---

    def _apply(self, request: RequestState, outcomes: Sequence[Outcome], now: float) -> None:
        self._quarantine.on_tokens(request.breaks, sum(len(outcome.tokens) for outcome in outcomes))
        self._runner.apply(request, outcomes, now)
        self.renew(request)

    def _tell(self, request: RequestState, numbered: Numbered) -> None:
        request.events.push(numbered)
        if request.ask.finish_within_s is None:  # else somebody made it shorter
            self._costs.lengths.on_event(numbered.event)
        self._subscriptions.on_event(request)
        if isinstance(numbered.event, Finished):
            ended = numbered.event.statistics
            told = {"tokens": ended.completion_tokens, "laps": ended.laps, "seconds": round(ended.seconds, 3)}
            log.info("finished", **request.log_fields, reason=numbered.event.reason.value, **told)
            self._memory.write(self._costs.kept, self._clock.now())
            self.drop(request)
