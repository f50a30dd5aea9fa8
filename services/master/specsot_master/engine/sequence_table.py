"""All sequences in the ring by id, and the queue of orders to stage 0 that open, extend and close them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import structlog

from specsot.core.frames import Close, Lease, Opening, Order, Outcome
from specsot.core.skeleton import PlanRules
from specsot.errors import SpecsotError
from specsot.tasks import start
from specsot.tracing import followed
from specsot_master.core.admission import PageLedger, own_pages
from specsot_master.core.ring import RingState
from specsot_master.core.sequence import SequenceFactory, TokenLog, first_lease, renewed_lease
from specsot_master.engine.request_state import ActiveSequence, RequestState, is_drafted
from specsot_master.prompts import PromptTurn
from specsot_master.text import Text

log = structlog.get_logger()


class OrderQueue:
    """`send` delivers one order; `broken` hears why the ring takes no more, and the rest is dropped. An order
    that cannot be sent for any other reason is told to `spoiled`, and the rest goes on.
    """

    def __init__(
        self,
        send: Callable[[Order], Awaitable[None]],
        broken: Callable[[str], None],
        spoiled: Callable[[Order], None],
    ) -> None:
        self._send, self._broken, self._spoiled = send, broken, spoiled
        self._orders: deque[Order] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, order: Order) -> None:
        self._orders.append(order)
        if self._task is None:
            self._task = start(self._drain())

    def clear(self) -> None:
        """Forget what was not sent yet."""
        self._orders.clear()

    async def settled(self) -> None:
        """Return once everything put so far is sent or dropped."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _drain(self) -> None:
        try:
            while self._orders:
                await self._deliver(self._orders.popleft())
        except SpecsotError as error:
            self._orders.clear()
            self._task = None  # what `broken` may put is sent by a task of its own
            self._broken(str(error))
        else:
            self._task = None

    async def _deliver(self, order: Order) -> None:
        try:
            await self._send(order)
        except SpecsotError:
            raise
        except Exception:
            log.exception("an order could not be sent", order=type(order).__name__)
            self._spoiled(order)


class SequenceTable:
    """`freed`: something was given back since it was last set to False."""

    def __init__(self, text: Text, factory: SequenceFactory, outbox: OrderQueue, grant: int) -> None:
        self._text, self._factory, self._outbox, self._grant = text, factory, outbox, grant
        self._by_id: dict[int, tuple[RequestState, ActiveSequence]] = {}
        self.freed = False

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def has_work(self) -> bool:
        """Something may go on in the next lap."""
        return any(sequence.has_work for _, sequence in self._by_id.values())

    def find(self, id: int) -> tuple[RequestState, ActiveSequence] | None:
        return self._by_id.get(id)

    def group(self, outcomes: Iterable[Outcome]) -> list[tuple[RequestState, list[Outcome]]]:
        """Outcomes of sequences that live, together by request; those of closed ones are dropped."""
        grouped: dict[str, tuple[RequestState, list[Outcome]]] = {}
        for outcome in outcomes:
            if found := self.find(outcome.sequence):
                grouped.setdefault(found[0].id, (found[0], []))[1].append(outcome)
        return list(grouped.values())

    def clear(self) -> None:
        """The ring has forgotten them all."""
        self._by_id.clear()

    def open_writer(
        self,
        request: RequestState,
        turn: PromptTurn,
        state: RingState,
        *,
        ordinal: int,
        limit: int,
        rules: PlanRules | None = None,
    ) -> None:
        """A sequence that writes; its pages have been taken."""
        opening = self._factory.writer(
            len(turn.tokens),
            request.ask,
            request.seed,
            ordinal=ordinal,
            limit=limit,
            drafted=is_drafted(request, state),
            fork=request.fork(turn),
            family=request.family,
            rules=rules,
            trace=followed(request.trace),
        )
        request.family = opening.family
        pages = pages_of(request, turn, limit, state)
        request.sequences[ordinal] = self._launch(request, opening, turn.tokens, pages)

    def reopen(self, request: RequestState, sequence: ActiveSequence, pages: int, state: RingState) -> None:
        """A sequence whose epoch is over goes on where it was; its pages have been taken."""
        log = sequence.log
        opening = self._factory.reopened(
            log.opening,
            len(log.written),
            drafted=is_drafted(request, state),
            fork=request.fork(request.turn(sequence.ordinal)),
            family=request.family,
        )
        request.family = opening.family
        log.reopen(opening)
        sequence.pages, sequence.lease, sequence.lost = pages, first_lease(opening.prompt, self._grant), False
        self._enter(request, sequence)

    def close(self, request: RequestState, sequence: ActiveSequence, ledger: PageLedger, close: bool) -> None:
        """Forget a sequence; `close`: order its end, because it has not ended by itself."""
        if request.sequences.pop(sequence.ordinal, None) is None:
            return
        if self._by_id.pop(sequence.id, None) is None:
            return
        self.freed = True
        if close:
            self._outbox.put(Close(sequence.id))
        ledger.give(request.id, sequence.pages)

    def renew(self, sequence: ActiveSequence) -> None:
        """A longer lease, if it is time and the sequence still lives."""
        written = sequence.log
        lease = renewed_lease(written.position, sequence.lease, written.max_position, self._grant)
        if lease is not None and sequence.id in self._by_id:
            sequence.lease = lease
            self._outbox.put(Lease(sequence.id, lease))

    def _launch(
        self, request: RequestState, opening: Opening, prompt: tuple[int, ...], pages: int
    ) -> ActiveSequence:
        lease = first_lease(opening.prompt, self._grant)
        sequence = ActiveSequence(
            TokenLog(opening, prompt), pages, lease, self._text.detokenizer(), self._text.spell
        )
        self._enter(request, sequence)
        return sequence

    def _enter(self, request: RequestState, sequence: ActiveSequence) -> None:
        self._by_id[sequence.id] = (request, sequence)
        self._outbox.put(sequence.order())


def pages_of(request: RequestState, turn: PromptTurn, limit: int, state: RingState) -> int:
    """Pages of a sequence that begins with `turn` and writes up to `limit` tokens."""
    shared = turn.shared if request.node else 0
    return own_pages(len(turn.tokens) + limit, shared, state, request.ask.policy)
