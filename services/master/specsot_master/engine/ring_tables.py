"""What requests have in the ring: sequences, prefixes, the pages of both; and the orders to stage 0."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

import structlog

from specsot.core.frames import Close, Fork, Lease, Open, Order, Outcome
from specsot.core.skeleton import PlanRules
from specsot.errors import SpecsotError
from specsot.params import Window
from specsot.tasks import start
from specsot.tracing import followed
from specsot_master.core.commands import Open as OpenOrder
from specsot_master.core.inputs import OrderUnsent, RingLost
from specsot_master.core.plans.prompts import PromptTurn
from specsot_master.core.request import Home, RequestState, is_drafted
from specsot_master.core.ring.admission import (
    AdmissionOption,
    PageLedger,
    admission_options,
    own_pages,
    pages_for,
    shared_pages,
)
from specsot_master.core.ring.handed_texts import HandedTexts
from specsot_master.core.ring.prefix_tree import PrefixMatch, PrefixNode, PrefixTree
from specsot_master.core.ring.ring_state import EngineConfig, Ring, RingState
from specsot_master.core.sequence import ActiveSequence, SequenceFactory, TokenLog, first_lease, renewed_lease
from specsot_master.text import Text

log = structlog.get_logger()


class OrderQueue:
    """Orders on their way to the ring, in order. That it takes no more, or not this one, comes in at home."""

    def __init__(self, ring: Ring, home: Home) -> None:
        self._ring = ring
        self._home = home
        self._orders: deque[Order] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, order: Order) -> None:
        self._orders.append(order)
        if self._task is None:
            self._task = start(self._drain())

    def clear(self) -> None:
        self._orders.clear()

    async def _drain(self) -> None:
        try:
            while self._orders:
                await self._send(self._orders.popleft())
        except SpecsotError as error:
            self._orders.clear()
            self._task = None  # what follows from it is sent by a task of its own
            self._home.handle(RingLost(str(error)))
        else:
            self._task = None

    async def _send(self, order: Order) -> None:
        try:
            await self._ring.order(order)
        except SpecsotError:
            raise
        except Exception:
            log.exception("an order could not be sent", order=type(order).__name__)
            self._home.handle(OrderUnsent(order))


class RingTables:
    """Of one epoch. Whoever needs pages, to enter or for a branch, gets those of prefixes that were needed
    longest ago.

    freed: something was given back since it was last set to False.
    """

    def __init__(
        self, text: Text, factory: SequenceFactory, outbox: OrderQueue, config: EngineConfig
    ) -> None:
        self._text = text
        self._factory = factory
        self._outbox = outbox
        self._config = config
        self._by_id: dict[int, tuple[RequestState, ActiveSequence]] = {}
        self.prefixes = PrefixTree()
        self.ledger = PageLedger(0)
        self._handed = HandedTexts()
        self.freed = False

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def has_work(self) -> bool:
        return any(sequence.has_work for _, sequence in self._by_id.values())

    @property
    def free_pages(self) -> int:
        """Those that are promised to nobody; those of prefixes that nobody needs now are among them."""
        return self.ledger.free + self.prefixes.spare()

    def begin_epoch(self, pages: int, kept: Mapping[int, int] | None = None) -> None:
        """The ring is empty; 0 pages: there is none. kept: see `RingState`."""
        for ended in self._handed.begin(kept or {}):
            self._outbox.put(Close(ended, kept=True))
        self._by_id.clear()
        self.prefixes.clear()
        self.ledger = PageLedger(pages)

    def final_rows(self, slots: int) -> dict[int, int]:
        """By sequence, how many first rows every stage has computed and leaves as they are."""
        return self._handed.offer((sequence for _, sequence in self._by_id.values()), slots)

    def group(self, outcomes: Iterable[Outcome]) -> list[tuple[RequestState, list[tuple[int, Outcome]]]]:
        """Outcomes of sequences that live, with their ordinals, together by request; those of closed ones are
        dropped.
        """
        grouped: dict[str, tuple[RequestState, list[tuple[int, Outcome]]]] = {}
        for outcome in outcomes:
            if found := self._by_id.get(outcome.sequence):
                request, sequence = found
                self.prefixes.written_behind(sequence.log.opening.fork)
                grouped.setdefault(request.id, (request, []))[1].append((sequence.ordinal, outcome))
        return list(grouped.values())

    # --- sequences ---

    def make(
        self,
        request: RequestState,
        order: OpenOrder,
        ordinal: int,
        limit: int,
        rules: PlanRules | None = None,
    ) -> ActiveSequence:
        """A sequence that writes, in no ring yet."""
        turn = request.take_turn(order)
        opening = self._factory.writer(
            len(turn.tokens),
            request.asks(order),
            request.seed,
            ordinal=ordinal,
            limit=limit,
            rules=rules,
            trace=followed(request.trace),
        )
        ask = request.ask
        log = TokenLog(opening, turn.tokens)
        detokenizer = self._text.detokenizer(ask.skip_special_tokens, turn.tokens if ask.tokens else ())
        sequence = ActiveSequence(log, detokenizer, self._text.spell, ends=ask.include_stop_str_in_output)
        request.sequences[ordinal] = sequence
        return sequence

    def place(
        self, request: RequestState, sequence: ActiveSequence, state: RingState, again: bool = False
    ) -> None:
        """It goes on in the ring where it is. again: its epoch was another one."""
        log = sequence.log
        turn = request.turn(sequence.ordinal)
        opening = self._factory.again(log.opening, len(log.written)) if again else log.opening
        if request.family is None:
            request.family = opening.sequence
        drafted = is_drafted(request, state)
        fork = request.fork(turn)
        kept = self._handed.of_writer(sequence, fork.length if fork else 0) if again else None
        opening = replace(opening, drafted=drafted, fork=fork, family=request.family, kept=kept)
        log.reopen(opening)
        sequence.pages = pages_of(request, turn, opening.limit, state)
        sequence.lost = False
        sequence.lease = first_lease(opening.prompt, self._config.lease)
        self.has_room(request, sequence.pages)
        self.ledger.take(request.id, sequence.pages)
        self._by_id[sequence.id] = (request, sequence)
        self._outbox.put(sequence.order())

    def close(self, request: RequestState, sequence: ActiveSequence) -> None:
        """Forget a sequence. Its end is ordered, unless it ended by itself."""
        if request.sequences.pop(sequence.ordinal, None) is None:
            return
        waited = self._handed.end(sequence)
        if self._by_id.pop(sequence.id, None) is None:
            if waited:
                self._outbox.put(Close(sequence.id, kept=True))
            return
        self.freed = True
        if sequence.log.end is None:
            self._outbox.put(Close(sequence.id))
        self.ledger.give(request.id, sequence.pages)

    def renew(self, request: RequestState) -> None:
        """Longer leases for those of its sequences that live, if it is time."""
        grant = self._config.lease
        for sequence in request.sequences.values():
            written = sequence.log
            lease = renewed_lease(written.position, sequence.lease, written.max_position, grant)
            if lease is not None and sequence.id in self._by_id:
                sequence.lease = lease
                self._outbox.put(Lease(sequence.id, lease))

    # --- pages and prefixes ---

    def admit(self, request: RequestState, state: RingState) -> bool:
        """Set aside what the request must have, if there is room, and hold what it begins with."""
        drafted = is_drafted(request, state)
        beginning = request.beginning
        keeps = self._config.prefix_cache and beginning.window is None
        route = self.prefixes.longest_match(beginning.tokens, drafted) if keeps else PrefixMatch()
        for way in admission_options(beginning, route, state, keeps):
            if self._make_room(way.pages + way.grant, way.route.node, way.slack):
                self.ledger.admit(request.id, way.grant)
                self._hold(request, way, drafted)
                return True
        return False

    def lengthen(self, request: RequestState, tokens: tuple[int, ...], state: RingState) -> None:
        """Hold this longer beginning for its threads, where there are pages for it."""
        node = request.node
        shared = request.shared if request.node else 0
        pages = pages_for(len(tokens), state.page_rows) - shared_pages(shared, state)
        if shared == len(tokens) or not self._make_room(pages, node):
            return
        way = AdmissionOption(PrefixMatch(node, shared) if shared else PrefixMatch(), tokens, pages, 0)
        request.node = self._open_prefix(request, way, is_drafted(request, state), None)
        self.prefixes.pin(request.node)
        request.shared = len(tokens)
        if node:
            self.prefixes.unpin(node)

    def has_room(self, request: RequestState, pages: int, reserved_only: bool = False) -> bool:
        """For a further sequence of a request that was admitted. reserved_only: within its own grant."""
        lacking = self.ledger.shortfall(request.id, pages)
        return not lacking or (not reserved_only and self._make_room(lacking))

    def release(self, request: RequestState) -> None:
        """The request is over: what still lives of it is closed, and everything given back."""
        for sequence in tuple(request.sequences.values()):
            self.close(request, sequence)
        self.ledger.remove(request.id)
        self.freed = True
        node = request.node
        request.node = None
        if node is None:
            return
        self.prefixes.unpin(node)
        if not (self._config.prefix_cache and node.keepable):
            self._evict(self.prefixes.drop(node))

    def doubt(self, sequence: int) -> None:
        """It broke, or was refused: it may have stood on something broken."""
        found = self._by_id.get(sequence)
        node = found[0].node if found else self.prefixes.find(sequence)
        if node is not None:
            self.prefixes.mark_suspect(node)

    def _make_room(self, pages: int, keep: PrefixNode | None = None, slack: int = 0) -> bool:
        """See that so many are free; nothing is given up where that would not do."""
        lacking = pages - self.ledger.free
        if lacking + slack > self.prefixes.spare(keep):
            return False
        self._evict(self.prefixes.evict(lacking, keep))
        return True

    def _hold(self, request: RequestState, way: AdmissionOption, drafted: bool) -> None:
        own = way.own
        window = request.beginning.window
        node = self._open_prefix(request, way, drafted, window) if own else way.route.node
        if node is not None:
            self.prefixes.pin(node)
        request.node = node
        request.shared = way.shared
        request.found = way.route.length

    def _open_prefix(
        self, request: RequestState, way: AdmissionOption, drafted: bool, window: Window | None
    ) -> PrefixNode:
        """A beginning that is not there, as far as it is not."""
        source = way.route.node
        at = way.route.length
        fork = Fork(source.sequence, at) if source else None
        opening = self._factory.prefix(len(way.own), drafted, fork, window)
        if not window:
            opening = replace(opening, kept=self._handed.of_prefix(request, way.own, at))
        node = PrefixNode(opening.sequence, way.own, way.pages, drafted, source, at, own=window is not None)
        self.prefixes.add(node)
        self.ledger.keep(way.pages)
        self._outbox.put(Open(opening, way.own[at:], first_lease(opening.prompt, 0)))
        return node

    def _evict(self, nodes: list[PrefixNode]) -> None:
        for node in nodes:
            self.ledger.give_kept(node.pages)
            self._outbox.put(Close(node.sequence))


def pages_of(request: RequestState, turn: PromptTurn, limit: int, state: RingState) -> int:
    """Pages of a sequence that begins with `turn` and writes up to `limit` tokens."""
    return own_pages(len(turn.tokens) + limit, request.shares(turn), state, request.ask.policy)
