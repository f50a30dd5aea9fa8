"""The ring's resources by request: sequences, the prefix cache, and the orders to stage 0.

Whoever needs pages, to enter or for a branch, gets those of prefixes that were needed longest ago.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import structlog

from specsot.core.frames import Close, End, Fork, Lease, Open, Opening, Order, Outcome
from specsot.core.skeleton import PlanRules
from specsot.errors import SpecsotError
from specsot.params import Window
from specsot.tasks import start
from specsot.tracing import followed
from specsot_master.core.admission import AdmissionOption, PageLedger, admission_options, own_pages
from specsot_master.core.prefix_tree import PrefixMatch, PrefixNode, PrefixTree
from specsot_master.core.ring import RingState
from specsot_master.core.router import scoring
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
        scored: bool = False,
    ) -> None:
        """A sequence that writes; its pages have been taken. scored: only its one token's chances matter."""
        opening = self._factory.writer(
            len(turn.tokens),
            scoring(request.ask) if scored else request.ask,
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


class PrefixCache:
    """The beginnings of one epoch. `keeps`: they outlive their requests."""

    def __init__(self, factory: SequenceFactory, outbox: OrderQueue, keeps: bool) -> None:
        self._factory, self._outbox, self._keeps = factory, outbox, keeps
        self.tree = PrefixTree()
        self.ledger = PageLedger(0)

    def begin_epoch(self, pages: int) -> None:
        """The ring is empty."""
        self.tree.clear()
        self.ledger = PageLedger(pages)

    def admit(self, request: RequestState, state: RingState) -> bool:
        """Set aside what the request must have, if there is room, and hold what it begins with."""
        drafted, beginning = is_drafted(request, state), request.beginning
        keeps = self._keeps and beginning.window is None
        route = self.tree.longest_match(beginning.tokens, drafted) if keeps else PrefixMatch()
        for way in admission_options(beginning, route, state, keeps):
            if self._make_room(way.pages + way.grant, way.route.node, way.slack):
                self.ledger.admit(request.id, way.grant)
                self._take(request, way, drafted)
                return True
        return False

    def take(self, request: RequestState, pages: int, reserved_only: bool = False) -> bool:
        """Pages for a further sequence of a request that was admitted."""
        if self.ledger.take(request.id, pages, reserved_only):
            return True
        lacking = self.ledger.shortfall(request.id, pages)
        if reserved_only or not self._make_room(lacking):
            return False
        return self.ledger.take(request.id, pages)

    def release(self, request: RequestState) -> None:
        """The request is over."""
        self.ledger.remove(request.id)
        node, request.node = request.node, None
        if node is None:
            return
        self.tree.unpin(node)
        if not self._keeps or node.suspect or node.own:
            self._close(self.tree.drop(node))

    def on_outcome(self, outcome: Outcome, request: RequestState | None = None) -> None:
        """A sequence that broke, or was refused, may have stood on something broken."""
        node = request.node if request else self.tree.find(outcome.sequence)
        if node is not None and outcome.end is End.FAILED:
            self.tree.mark_suspect(node)

    def _make_room(self, pages: int, keep: PrefixNode | None = None, slack: int = 0) -> bool:
        """See that so many are free; nothing is given up where that would not do."""
        lacking = pages - self.ledger.free
        if lacking + slack > self.tree.spare(keep):
            return False
        self._close(self.tree.evict(lacking, keep))
        return True

    def _take(self, request: RequestState, way: AdmissionOption, drafted: bool) -> None:
        node = self._open(way, drafted, request.beginning.window) if way.own else way.route.node
        if node is not None:
            self.tree.pin(node)
        request.node, request.shared, request.found = node, way.shared, way.route.length

    def _open(self, way: AdmissionOption, drafted: bool, window: Window | None) -> PrefixNode:
        """A beginning that is not there, as far as it is not."""
        source, at = way.route.node, way.route.length
        fork = Fork(source.sequence, at) if source else None
        opening = self._factory.prefix(len(way.own), drafted, fork, window)
        node = PrefixNode(opening.sequence, way.own, way.pages, drafted, source, at, own=window is not None)
        self.tree.add(node)
        self.ledger.keep(way.pages)
        self._outbox.put(Open(opening, way.own[at:], first_lease(opening.prompt, 0)))
        return node

    def _close(self, nodes: list[PrefixNode]) -> None:
        for node in nodes:
            self.ledger.give_kept(node.pages)
            self._outbox.put(Close(node.sequence))
