"""Leads every request through the ring: takes it in, lets it in, hears results, lets it go.

Refuses to know tensors, transports, members and doors. Decisions are made by plan, schedule, admission
and leases; here, in the course and by the readers they are carried out, on one event loop.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import structlog

from specsot.errors import InvalidRequest, NotFound, SpecsotError, Unavailable, WireError
from specsot.events import Finished, Numbered
from specsot.frames import End, Open, Order, Outcome, Result
from specsot.info import RequestsInfo
from specsot.params import Ask, brief
from specsot_master.core.ring import Caller, EngineConfig, Ring, RingState
from specsot_master.core.schedule import Quarantine
from specsot_master.core.sequence import SequenceFactory
from specsot_master.core.stats import RequestCounts
from specsot_master.engine.event_stream import EventStream, RequestStreams, Subscriptions, check_same_ask
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from specsot_master.engine.intake import Intake, RequestBuilder, check_deadline, refit, require_ring
from specsot_master.engine.prefix_cache import PrefixCache
from specsot_master.engine.queue import Deadlines, RequestQueue
from specsot_master.engine.replay import JournalReplay, RequestJournal
from specsot_master.engine.request_runner import RequestRunner, Scheduler
from specsot_master.engine.request_state import Clock, LoopClock, RequestState
from specsot_master.engine.sequence_table import OrderQueue, SequenceTable
from specsot_master.journal import JournaledRequest
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
        notes: RequestJournal | None = None,
        readers: Subscriptions | None = None,
    ) -> None:
        """forms, notes, readers: those of a master that has several rings."""
        self._ring, self._clock = ring, clock or LoopClock()
        self._ended: str | None = None  # why nobody is served any more
        self._text, self._notes = text, notes or RequestJournal()
        self._acceptance = RequestBuilder(
            ring, prompts, config.model, config.vocabulary, config.heads is not None
        )
        self._outbox = OrderQueue(ring.order, self.epoch_ended, self._spoil)
        self._openings = openings = SequenceFactory(text.end_ids, config.heads)
        self._sequences = SequenceTable(text, openings, self._outbox, config.lease)
        self._sharing = PrefixCache(openings, self._outbox, config.prefix_cache)
        self._quarantine = Quarantine()
        self._roster, self._counts = RequestQueue(config, self._quarantine), RequestCounts()
        self._course = RequestRunner(
            ring, self._sequences, self._sharing, self._notes, self._counts, self._tell, self._fail
        )
        self._limits = Deadlines(self._clock, self._fail, ring.waiting_for, config.repair_for)
        self._readers = readers or Subscriptions(config, self._clock, self.drop, self.renew, self._notes)
        self._arrivals = Intake(
            self._acceptance, forms or GrammarSandbox(), self._roster, self._counts, self._clock, config
        )
        self._scheduler = Scheduler(
            ring,
            self._roster,
            self._course,
            self._sequences,
            self._sharing,
            self._isolate,
            self._clock,
            self._begin,
        )

    @property
    def idle(self) -> bool:
        """Nobody waits and nothing runs."""
        return self._roster.quiet and not self._roster.crowded

    @property
    def owed(self) -> bool:
        """The ring owes a lap: something in it may go on."""
        return self._sequences.owed

    @property
    def free_pages(self) -> int:
        """KV pages that are promised to nobody; those of prefixes that nobody needs now are among them."""
        return self._scheduler.free_pages

    @property
    def kept(self) -> tuple[int, ...]:
        """Sequences that hold beginnings of prompts."""
        return self._sharing.sequences

    @property
    def kept_pages(self) -> int:
        """KV pages of beginnings of prompts, needed or not."""
        return self._sharing.pages

    @property
    def everybody(self) -> list[RequestState]:
        """Those that run, and those that wait."""
        return self._roster.everybody

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn, or are looked into before they may."""
        return self._roster.waiting + self._arrivals.inside

    def knows(self, id: str) -> bool:
        """A request of this id waits, runs, or may still be read."""
        return self._find(id) is not None

    def requests(self) -> RequestsInfo:
        """How requests stand, and how they ended."""
        return RequestsInfo(
            waiting=self._roster.waiting,
            running=self._roster.live,
            writing=len(self._sequences),
            kept=self._readers.kept,
            refused=self._counts.refused,
            ended=self._counts.ended,
            prompt_tokens=self._counts.asked,
            cached_tokens=self._counts.found,
        )

    async def open(self, ask: Ask, caller: Caller) -> EventStream:
        """The request's events, numbered from 0, Finished last, once it waits for its turn. Closing them
        cancels it, unless it is resumable: then it lives on for a while, and the same call again, or
        `reopen`, reads it.

        Raises InvalidRequest, NotFound, Overloaded, and Unavailable where there was no ring yet. The events
        raise Unavailable when the ring breaks and no other comes; TimedOut; PlanError; Cancelled when nothing
        is read for too long.
        """
        known = self._find_resumable(caller.request, caller.owner)
        if known is not None:
            request = self._take_up(known, ask, caller.timeout)
        else:
            request = await self._arrive(ask, caller)
        return self._readers.follow(request, 0)

    async def reopen(self, request_id: str, offset: int, ask: Ask | None, caller: Caller) -> EventStream:
        """The events from `offset` on of a resumable request that runs, or has ended not long ago.

        ask: what the request must have asked for; None: whatever it did. The timeout counts from now.
        Raises NotFound (another's, too), InvalidRequest, and whatever ends the request.
        """
        request = self._find_resumable(request_id, caller.owner)
        if request is None:
            raise NotFound(f"no request {brief(request_id)} is kept here")
        self._take_up(request, ask, caller.timeout)
        return self._readers.follow(request, offset)

    def cancel(self, request_id: str, owner: str = "") -> bool:
        """End a request; its client still hears Finished. False when there is no such request of theirs."""
        request = self._roster.find(request_id)
        if request is None or not request.is_of(owner):
            return False
        now = self._clock.now()
        self._notes.stopped(request, now)
        self._course.obey(request, request.plan.cancel(now))
        self.drop(request)
        return True

    async def revive(self, kept: Iterable[JournaledRequest]) -> None:
        """Take up what a master before this one had begun, and keep what it had kept."""
        for one in kept:
            try:
                request = await self._acceptance.recall(one, self._clock.now() - self._notes.age(one))
            except Exception as error:  # whatever is wrong with one of them: the master begins
                log.warning("request lost", request_id=one.id, reason=str(error), exc_info=error)
                self._notes.forget(one.id)
            else:
                self._revive(request, one)
        self._scheduler.fill()

    def received(self, result: Result) -> None:
        """Take a result of the ring. Results of another epoch are ignored."""
        if result.epoch != self._scheduler.epoch:
            return
        now = self._clock.now()
        for outcome in result.outcomes:
            self._sharing.heard(outcome)
        for request, outcomes in self._sequences.group(result.outcomes):
            with self._isolate(request):
                self._learn(request, outcomes, now)
        if self._quarantine.moved() or self._sequences.freed:
            self._scheduler.fill()

    def epoch_began(self) -> None:
        """The ring is complete: who waited for it goes on."""
        self._scheduler.fill()

    def epoch_ended(self, reason: str) -> None:
        """The ring broke: every request waits for the next one, where it goes on from its log."""
        self._forget()
        culprit = self._quarantine.broke(self._roster.suspects)
        for request in self._roster.suspend():
            request.lose()
            if request.record is culprit:
                self._fail(request, Unavailable(f"{reason}; {request.record.told}"))
            else:
                self._limits.await_ring(request, reason)

    def end(self, reason: str) -> None:
        """Every request ends with Unavailable(reason), those that come from now on too."""
        self._ended = reason
        self._forget()
        self._quarantine.clear()
        for request in self._roster.clear():
            log.warning("request failed", **request.named, reason=reason)
            request.feed.end(Unavailable(reason))
            self._counts.end(Unavailable(reason))
            self._readers.over(request)

    def drop(self, request: RequestState) -> None:
        """A request is over, or nobody wants it any more: leave nothing of it in the ring. Unknown ones are
        ignored.
        """
        if self._roster.find(request.id) is not request:
            return
        request.feed.end()
        if not (request.feed.error or request.plan.reason):
            log.info("abandoned", **request.named)
        self._counts.end(request.feed.error or request.plan.reason or "cancelled")
        self._readers.over(request)
        self._arrivals.left()
        live = self._roster.is_live(request)
        self._course.leave(request)
        self._roster.leave(request)
        self._quarantine.leave(request.record)
        if self._quarantine.moved() or live:
            self._scheduler.fill()

    def renew(self, request: RequestState) -> None:
        """Longer leases where they are needed, unless the client has stopped reading. Of running ones."""
        if self._roster.is_live(request) and not self._readers.pauses(request):
            self._course.renew(request)

    def adopt(self, request: RequestState) -> None:
        """Go on here with what another ring cannot. Raises InvalidRequest (it is too large for this ring)
        and Unavailable before anything is changed.
        """
        refit(request, require_ring(self._ring))
        self._roster.wait(request)
        self._limits.has_ring(request)
        self._limits.watch(request)
        self._scheduler.fill()

    def let_go(self, request: RequestState) -> None:
        """Another ring goes on with it; there is nothing of it in this one."""
        self._roster.leave(request)
        self._quarantine.leave(request.record)
        self._scheduler.fill()

    async def settled(self) -> None:
        """Return once every order decided so far is with the ring."""
        await self._outbox.settled()

    # --- arrival and departure ---

    async def _arrive(self, ask: Ask, caller: Caller) -> RequestState:
        """Once it has been looked into, it waits for its turn."""
        self._check_open()
        words, left = await self._arrivals.look_into(ask, caller)
        self._check_open()
        if (known := self._find_resumable(caller.request, caller.owner)) is not None:  # the same call
            return self._take_up(known, ask, left)
        self._check_free(caller.request)
        last = self._arrivals.find_room(caller.client)
        request = self._acceptance.prepare(ask, caller, self._clock.now(), words)
        if last is not None:
            self._fail(last, self._arrivals.overloaded())
        log.info("request", **request.named, mode=ask.mode, seed=request.seed, tokens=request.prompt_tokens)
        self._roster.wait(request)
        self._notes.arrived(request, self._clock.now())
        self._limits.give(request, left)
        if self._ring.state() is None:
            self._limits.await_ring(request, "the ring broke before")
        self._scheduler.fill()
        return request

    def _check_open(self) -> None:
        """Raises Unavailable."""
        if self._ended is not None:
            raise Unavailable(self._ended)

    def _revive(self, request: RequestState, kept: JournaledRequest) -> None:
        """It goes on in the next ring, unless it had ended; its client may come back in either case."""
        request.owner = kept.owner
        revival = JournalReplay(request, self._text, self._openings)
        revival.play(kept)
        log.info("taken up again", **request.named, over=revival.over)
        if revival.over:
            request.feed.end(revival.error)
            self._readers.over(request)
            return
        self._roster.wait(request)
        self._readers.set_aside(request)
        self._limits.await_ring(request, "the master was restarted")

    def _check_free(self, id: str | None) -> None:
        """Raises InvalidRequest: the id is another's."""
        if id is not None and self._find(id):
            raise InvalidRequest(f"request {id} is already running", field="request_id")

    def _find(self, id: str) -> RequestState | None:
        return self._roster.find(id) or self._readers.find(id)

    def _find_resumable(self, id: str | None, owner: str) -> RequestState | None:
        request = self._find(id) if id else None
        return request if request and request.ask.resumable and request.is_of(owner) else None

    def _take_up(self, request: RequestState, ask: Ask | None, timeout: float | None) -> RequestState:
        """Somebody reads a known request; the newest caller's deadline counts."""
        check_deadline(timeout)
        check_same_ask(request, ask)
        if self._roster.find(request.id) is request:
            self._limits.give(request, timeout)
        return request

    def _forget(self) -> None:
        """Nothing of this epoch is in the ring any more."""
        self._outbox.clear()
        self._scheduler.end_epoch()

    def _fail(self, request: RequestState, error: SpecsotError) -> None:
        log.warning("request failed", **request.named, reason=str(error))
        self._notes.failed(request, error)
        request.feed.end(error)
        self.drop(request)

    @contextmanager
    def _isolate(self, request: RequestState) -> Generator[None]:
        """What goes wrong meanwhile ends this request alone."""
        try:
            yield
        except WireError as error:  # of a member, never of the client
            log.error("a member told what cannot be", **request.named, reason=str(error))
            self._fail(request, Unavailable(f"the ring lost its place in this answer: {error}"))
        except SpecsotError as error:
            self._fail(request, error)
        except Exception:
            log.exception("a request broke the master's rules", **request.named)
            self._fail(request, SpecsotError(INTERNAL_ERROR))

    def _begin(self, state: RingState) -> None:
        """A new ring, perhaps of another size."""
        self._acceptance.remember(state)
        for request in self._roster.everybody:
            self._limits.has_ring(request)
            with self._isolate(request):
                refit(request, state)

    def _spoil(self, order: Order) -> None:
        """This one never came to the ring: whose it is cannot go on, and nobody may stand on it."""
        sequence = order.opening.sequence if isinstance(order, Open) else order.sequence
        self._sharing.heard(Outcome(sequence, 0, (), (), End.FAILED))
        for request in self._roster.everybody:
            own = {one.id for one in request.sequences.values()}
            if sequence in own or any(one.sequence == sequence for one in request.lineage):
                self._fail(request, SpecsotError(INTERNAL_ERROR))

    # --- results ---

    def _learn(self, request: RequestState, outcomes: Sequence[Outcome], now: float) -> None:
        self._quarantine.wrote(request.record, sum(len(outcome.tokens) for outcome in outcomes))
        self._course.learn(request, outcomes, now)
        self.renew(request)

    def _tell(self, request: RequestState, numbered: Numbered) -> None:
        request.feed.push(numbered)
        self._readers.told(request)
        if isinstance(numbered.event, Finished):
            ended = numbered.event.statistics
            told = {"tokens": ended.completion_tokens, "laps": ended.laps, "seconds": round(ended.seconds, 3)}
            log.info("finished", **request.named, reason=numbered.event.reason.value, **told)
            self.drop(request)
