"""Tracks what requests hold in the ring: sequences, prefixes and their pages; sends orders to stage 0."""

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
from specsot_master.core.commands import Open as OpenCommand
from specsot_master.core.commands import OpenBranch
from specsot_master.core.inputs import OrderUnsent, RingLost
from specsot_master.core.plans.prompts import PromptTurn
from specsot_master.core.request import Home, RequestState, is_drafted
from specsot_master.core.ring.admission import (
    MIN_SHARED_TOKENS,
    AdmissionOption,
    PageLedger,
    admission_options,
    own_pages,
    pages_for,
    shared_pages,
)
from specsot_master.core.ring.migrated_sequences import MigratedSequences
from specsot_master.core.ring.prefix_tree import PrefixMatch, PrefixNode, PrefixTree, ancestors
from specsot_master.core.ring.ring_state import EngineConfig, Ring, RingState
from specsot_master.core.sequence import ActiveSequence, SequenceFactory, TokenLog, first_lease, renewed_lease
from specsot_master.text import Text

log = structlog.get_logger()


class OrderQueue:
    """Sends orders to stage 0 of the ring one after the other, in the order of the calls.

    If the ring refuses an order because the ring is gone, the engine receives `RingLost` and the remaining
    orders are dropped. If one order cannot be sent for another reason, the engine receives `OrderUnsent` with
    that order, and the remaining orders are sent.
    """

    def __init__(self, ring: Ring, home: Home) -> None:
        """Create an empty queue.

        ring: stage 0, which gets the orders.
        home: the engine, which is notified of failures.
        """
        self._ring = ring
        self._home = home
        self._orders: deque[Order] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, order: Order) -> None:
        """Append an order, and start to send if no task does so already. Orders are sent in the order of the
        calls. An event loop must run.

        order: an instruction for the sequencer, such as opening or closing a sequence.
        """
        self._orders.append(order)
        if self._task is None:
            self._task = start(self._drain())

    def clear(self) -> None:
        """Drop all orders that have not been sent."""
        self._orders.clear()

    async def _drain(self) -> None:
        """Send orders until none is left, or until the ring refuses one. If the ring refuses one, the others
        are dropped and the engine receives RingLost.
        """
        try:
            while self._orders:
                await self._send(self._orders.popleft())
        except SpecsotError as error:
            self._orders.clear()
            # The engine may put new orders while it handles RingLost; a new task sends those.
            self._task = None
            self._home.handle(RingLost(str(error)))
        else:
            self._task = None

    async def _send(self, order: Order) -> None:
        """Send one order. An error that is no SpecsotError concerns this order only: it is logged, and the
        engine receives `OrderUnsent`.

        order: an instruction for the sequencer, such as opening or closing a sequence.

        Raises SpecsotError if the ring is gone.
        """
        try:
            await self._ring.order(order)
        except SpecsotError:
            raise
        except Exception:
            log.exception("an order could not be sent", order=type(order).__name__)
            self._home.handle(OrderUnsent(order))


class RingTables:
    """The sequences, prefixes and KV pages that requests hold in the ring during one epoch.

    The allocators of the stages are not asked: the page ledger mirrors them (`core/ring/admission.py`). If
    pages are missing, for an admission or for a branch, prefixes that no request needs are evicted, the least
    recently needed first.

    The attribute `freed` is set when pages are given back, and reset by the engine. `_migrated` knows the
    sequences whose KV was migrated from the previous epoch.
    """

    def __init__(
        self, text: Text, factory: SequenceFactory, outbox: OrderQueue, config: EngineConfig
    ) -> None:
        """Create empty tables, for a ring without pages.

        text: the model's tokenizer, from which sequences get their detokenizers.
        factory: creates the openings of sequences, with new ids.
        outbox: sends the orders to stage 0.
        config: how requests are treated: the lease, and whether prefixes are cached.
        """
        self._text = text
        self._factory = factory
        self._outbox = outbox
        self._config = config
        self._by_id: dict[int, tuple[RequestState, ActiveSequence]] = {}
        self.prefixes = PrefixTree()
        self.ledger = PageLedger(0)
        self._migrated = MigratedSequences()
        self.freed = False

    def __len__(self) -> int:
        """Return the number of decoding sequences in the ring."""
        return len(self._by_id)

    @property
    def has_work(self) -> bool:
        """True if the ring holds a sequence that its next step can advance."""
        return any(sequence.has_work for _, sequence in self._by_id.values())

    @property
    def free_pages(self) -> int:
        """Pages that no request has reserved, and pages of cached prefixes that no request needs now."""
        return self.ledger.free + self.prefixes.spare()

    def begin_epoch(self, pages: int, kept: Mapping[int, int] | None = None, replays: bool = False) -> None:
        """Forget all sequences and prefixes, because the ring of the next epoch is empty. Pages of the last
        epoch are not returned one by one: the new ledger has all pages free.

        pages: number of KV pages on every stage of the new ring; 0 while there is no ring.
        kept: by sequence id of an earlier epoch, how many leading tokens' KV the new stages have received;
            None or empty if nothing was migrated. Stage 0 is ordered to drop those of sequences that have
            ended meanwhile.
        replays: True if lost layers must compute this KV again.
        """
        for ended in self._migrated.begin(kept or {}, replays):
            self._outbox.put(Close(ended, kept=True))
        self._by_id.clear()
        self.prefixes.clear()
        self.ledger = PageLedger(pages)

    def final_rows(self) -> dict[int, int]:
        """Return, by sequence id, for how many leading tokens the KV on every stage is final, see
        `TokenLog.final_rows`.

        Sequences without a final position are left out. This KV can be migrated to the stages of the next
        epoch. The sequences are remembered as those that the next epoch may reuse, in place of those of an
        earlier call.
        """
        return self._migrated.offer(sequence for _, sequence in self._by_id.values())

    def group(self, outcomes: Iterable[Outcome]) -> list[tuple[RequestState, list[tuple[int, Outcome]]]]:
        """Group a step's outcomes by request. Outcomes of sequences that are closed, or unknown, are dropped;
        empty if none is left. Requests come in the order of their first outcomes.

        Each outcome comes with its sequence's ordinal within the request (0, or the id of a branch's point):
        # outcomes of sequences [7 9 8], of which 7, 8 are ordinals 0, 1 of request a and 9 is ordinal 0 of b
        # -> [(a, [(0, outcome of 7), (1, outcome of 8)]), (b, [(0, outcome of 9)])]

        outcomes: what the step did for each sequence.
        """
        grouped: dict[str, tuple[RequestState, list[tuple[int, Outcome]]]] = {}
        for outcome in outcomes:
            if found := self._by_id.get(outcome.sequence):
                request, sequence = found
                grouped.setdefault(request.id, (request, []))[1].append((sequence.ordinal, outcome))
        return list(grouped.values())

    # --- sequences ---

    def make(
        self,
        request: RequestState,
        command: OpenCommand,
        ordinal: int,
        limit: int,
        rules: PlanRules | None = None,
    ) -> ActiveSequence:
        """Create a decoding sequence of a request, with its token log and its detokenizer; `place` opens it.
        The request remembers it under its ordinal.

        request: a request that is admitted, or whose old records are being replayed.
        command: the command to open a direct answer, skeleton, branch or polish, which selects the prompt
            (the *turn*: all prompt tokens, and how many of them the request's prefix shares).
        ordinal: 0, PLAN_ORDINAL for a speculative skeleton, or the id of the branch's point.
        limit: the maximum number of generated tokens.
        rules: the plan grammar that constrains the sequence, or None.

        Raises InvalidRequest if the prompt of a branch cannot be built.
        """
        turn = request.take_turn(command)
        opening = self._factory.decoding_opening(
            len(turn.tokens),
            request.ask_for(command),
            request.seed,
            ordinal=ordinal,
            limit=limit,
            rules=rules,
            trace=followed(request.trace),
            soft_limit=command.soft_limit if isinstance(command, OpenBranch) else None,
            excluded_first=command.excluded if isinstance(command, OpenBranch) else (),
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
        """Open a sequence at stage 0 at the position that its token log has reached, and charge its pages.
        The sequence gets its first lease, and its family: the id of the request's first placed sequence.
        Prefixes that no request needs are evicted if its pages need them.

        The order that is sent carries only tokens that are not forked:
        # prompt [p0 p1 p2 q0], written [w0 w1], fork of the first 3 tokens -> the order carries [q0 w0 w1]

        request: an admitted request.
        sequence: one of its sequences, which is in no ring now.
        state: sizes and limits of the running ring.
        again: True if the sequence was open in an earlier epoch. Then the sequence gets a new id, its
            generated tokens become part of its prompt, and migrated KV is reused.

        Raises KeyError if the request is not admitted.
        """
        log = sequence.log
        turn = request.turn(sequence.ordinal)
        opening = self._factory.reopening(log.opening, len(log.written)) if again else log.opening
        if request.family is None:
            request.family = opening.sequence
        drafted = is_drafted(request, state)
        fork = request.fork(turn)
        num_forked = fork.length if fork else 0
        reused_kv = self._migrated.reused_of_sequence(sequence, num_forked) if again else None
        if again and self._migrated.is_unused(sequence, num_forked):
            self._outbox.put(Close(sequence.id, kept=True))
        opening = replace(opening, drafted=drafted, fork=fork, family=request.family, reused=reused_kv)
        log.reopen(opening)
        sequence.pages = pages_of(request, turn, opening.limit, state)
        sequence.lost = False
        sequence.lease = first_lease(opening.prompt, self._config.lease)
        self.has_room(request, sequence.pages)
        self.ledger.use_pages(request.id, sequence.pages)
        self._by_id[sequence.id] = (request, sequence)
        self._outbox.put(sequence.order())

    def close(self, request: RequestState, sequence: ActiveSequence) -> None:
        """Forget a sequence and give back its pages, and order stage 0 to close it unless it ended by itself.
        A sequence that waits to be reopened is not in the ring; then stage 0 only drops its KV that was
        migrated from the previous epoch. Unknown sequences are ignored. `freed` is set if it was in the ring.

        request: the request that the sequence belongs to.
        sequence: one of the request's sequences, in the ring or waiting to be opened again.
        """
        if request.sequences.pop(sequence.ordinal, None) is None:
            return
        waited = self._migrated.end(sequence)
        if self._by_id.pop(sequence.id, None) is None:
            if waited:
                self._outbox.put(Close(sequence.id, kept=True))
            return
        self.freed = True
        if sequence.log.end is None:
            self._outbox.put(Close(sequence.id))
        self.ledger.return_pages(request.id, sequence.pages)

    def renew(self, request: RequestState) -> None:
        """Send a longer lease for each sequence of the request that is in the ring and needs a longer lease;
        send nothing for the others. The lease is recorded in the sequence.

        See `renewed_lease`, for example with leases of 256 positions and a maximum position of 1000:
        # position 100, lease 256 -> 156 positions are left, more than 128: no order
        # position 130, lease 256 -> 126 positions are left: the new lease is 256 + 256 = 512

        request: an admitted request.
        """
        lease_positions = self._config.lease
        for sequence in request.sequences.values():
            written = sequence.log
            lease = renewed_lease(written.position, sequence.lease, written.max_position, lease_positions)
            if lease is not None and sequence.id in self._by_id:
                sequence.lease = lease
                self._outbox.put(Lease(sequence.id, lease))

    # --- pages and prefixes ---

    def admit(self, request: RequestState, state: RingState, may_plan: bool = True) -> bool:
        """Reserve the pages that a request needs to begin, and pin or open its prompt prefix. Return False,
        with nothing changed, if there is no room. For a request that ran before, no pages are reserved for a
        speculative plan.

        The options come best first: fork the longest cached prefix, or open a new one. A request with a
        speculative plan is admitted without the plan (`RequestState.has_room_for_plan` becomes False) if
        there are no pages for both, or if the plan is not allowed.

        request: a waiting request, whose `node`, `shared` and `num_cached_tokens` are set if it is admitted.
        state: sizes and limits of the running ring.
        may_plan: False if a speculative plan is not allowed (see `RequestQueue.has_places`).
        """
        speculates = request.prompt.speculates and not request.entered_ring
        if speculates and may_plan and self._admit(request, state, with_plan=True):
            return True
        if not self._admit(request, state, with_plan=False):
            return False
        request.has_room_for_plan = request.has_room_for_plan and not speculates
        return True

    def _admit(self, request: RequestState, state: RingState, with_plan: bool) -> bool:
        """Admit the request if there is room for it, and for its speculative plan if that is wanted. Return
        False, with nothing changed, if there is not. The first option with room is taken. Prefixes are not
        shared for a windowed request, nor if caching is off.

        request: a waiting request.
        state: sizes and limits of the running ring.
        with_plan: True to grant the pages of the request's speculative plan, too.
        """
        drafted = is_drafted(request, state)
        beginning = request.beginning
        keeps = self._config.prefix_cache and beginning.window is None
        route = self.prefixes.longest_match(beginning.tokens, drafted) if keeps else PrefixMatch()
        for option in admission_options(beginning, route, state, keeps, request.begins_alone):
            grant = option.grant + (option.plan if with_plan else 0)
            if self._make_room(option.pages + grant, option.route.node, option.slack):
                self.ledger.admit(request.id, grant)
                self._hold(request, option, drafted)
                return True
        return False

    def lengthen(self, request: RequestState, tokens: tuple[int, ...], state: RingState) -> None:
        """Replace the request's prefix by a longer one, which all branches of its plan fork. Change nothing
        if the present prefix is already as long, or if there is no room; then each sequence computes the
        tokens itself. Pages of prefixes that no request needs are evicted for it. The request then pins the
        new prefix in place of the old one.

        The new prefix forks the old one, or a cached prefix that does so. Thus the old prefix stays, and only
        the pages after the shared full pages are charged:
        # page_rows 16, old prefix 40 tokens, new prefix 60 tokens
        # -> pages_for(60) - shared_pages(40) = 4 - 2 = 2 pages; the partly filled third page is copied

        request: an admitted request.
        tokens: the token ids with which the prompts of all branches, or of all threads, begin; empty to
            change nothing.
        state: sizes and limits of the running ring.
        """
        node = request.node
        shared = request.shared if request.node else 0
        if shared >= len(tokens):
            return
        drafted = is_drafted(request, state)
        route = self._route_of(request, tokens, drafted)
        own = tokens if route.length < len(tokens) else ()
        pages = pages_for(len(tokens), state.page_rows) - shared_pages(route.length, state) if own else 0
        if not self._make_room(pages, route.node):
            return
        option = AdmissionOption(route, own, pages, 0)
        request.node = self._open_prefix(request, option, drafted, None) if own else route.node
        assert request.node is not None
        self._pin(request.node, len(tokens))
        request.shared = len(tokens)
        if node:
            self.prefixes.unpin(node, shared)
            self._renew_prefix_leases(node)

    def _route_of(self, request: RequestState, tokens: tuple[int, ...], drafted: bool) -> PrefixMatch:
        """Return the prefix from which a longer prefix of the request is forked: the request's own one, or a
        longer match of the prefix cache that is forked from it. The match has length 0 and no node if the
        request has no prefix and the cache has none that is worth a fork.

        request: an admitted request.
        tokens: the token ids of the longer prefix.
        drafted: True if the ring drafts for the request.
        """
        own = PrefixMatch(request.node, request.shared) if request.node and request.shared else PrefixMatch()
        if not self._config.prefix_cache or request.beginning.window is not None:
            return own
        found = self.prefixes.longest_match(tokens, drafted)
        if found.node is None or found.length < max(own.length + 1, min(MIN_SHARED_TOKENS, len(tokens))):
            return own
        return found if own.node in (None, *ancestors(found.node)) else own

    def has_room(self, request: RequestState, pages: int, reserved_only: bool = False) -> bool:
        """Return True if an admitted request may use so many more pages; unneeded prefixes are evicted for
        them. Return False if they are neither granted, nor free, nor to be had by an eviction.

        request: an admitted request.
        pages: number of KV pages that it needs in addition to those that it uses.
        reserved_only: True to count only what is left of the request's own grant, and evict nothing.
        """
        lacking = self.ledger.shortfall(request.id, pages)
        return not lacking or (not reserved_only and self._make_room(lacking))

    def release(self, request: RequestState) -> None:
        """Close all sequences of a request that is over, and give back its pages and its prefix. The prefix
        stays cached for later requests, unless caching is off, or the prefix is suspect or made for this
        request only. If its prefill is not complete, and no other request needs it, the prefill is
        interrupted: the tokens that are computed stay cached. `freed` is set in every case.

        request: the request; one that was never admitted holds nothing.
        """
        for sequence in tuple(request.sequences.values()):
            self.close(request, sequence)
        self.ledger.remove(request.id)
        self.freed = True
        node = request.node
        request.node = None
        if node is None:
            return
        self.prefixes.unpin(node, request.shared)
        if not (self._config.prefix_cache and node.keepable):
            self._evict(self.prefixes.drop(node))
        self._renew_prefix_leases(node)

    def suspect_sequence(self, sequence: int) -> None:
        """Mark the prefix of a failed or unsent sequence as suspect, since its KV may be invalid. Of a
        decoding sequence, the prefix of its request is marked, with its ancestors; nothing happens if it has
        none.

        sequence: the id of a decoding sequence or of a prefix; unknown ids are ignored.
        """
        found = self._by_id.get(sequence)
        node = found[0].node if found else self.prefixes.find(sequence)
        if node is not None:
            self.prefixes.mark_suspect(node)

    def _make_room(self, pages: int, kept_node: PrefixNode | None = None, slack: int = 0) -> bool:
        """Evict prefixes until so many pages are free. Return False, with nothing evicted, if that cannot be.
        Nothing is evicted if enough pages are free already.

        # 3 pages free, 5 in unneeded prefixes, pages 6, slack 2 -> 3 lack, 3 + 2 <= 5: evict 3 pages, True
        # the same with slack 3 -> 3 + 3 > 5: False

        pages: number of KV pages that are needed.
        kept_node: a prefix that must stay, with its ancestors; None for no such prefix.
        slack: number of pages that must be free or evictable in addition; 0 for none.
        """
        lacking = pages - self.ledger.free
        if lacking + slack > self.prefixes.spare(kept_node):
            return False
        self._evict(self.prefixes.evict(lacking, kept_node))
        return True

    def _hold(self, request: RequestState, option: AdmissionOption, drafted: bool) -> None:
        """Pin the prefix of an admission option for the request, after opening the prefix if it is new. The
        request's `node`, `shared` and `found` are set; the node is None if the option forks nothing.

        request: the request that enters the ring.
        option: the option, for which there is room.
        drafted: True if the ring drafts for the request.
        """
        new_prefix = option.own
        window = request.beginning.window
        node = self._open_prefix(request, option, drafted, window) if new_prefix else option.route.node
        request.num_cached_tokens = self.prefixes.num_cached(option.route)
        if node is not None:
            self._pin(node, option.shared)
        request.node = node
        request.shared = option.shared

    def _open_prefix(
        self, request: RequestState, option: AdmissionOption, drafted: bool, window: Window | None
    ) -> PrefixNode:
        """Open a prefix that is not in the ring, and return it; the part that another prefix has is forked
        from there. Its pages are reserved in the ledger.

        Only the tokens after the fork are sent and prefilled:
        # prefix of 100 tokens, 64 of which begin a cached prefix -> Fork(cached, 64), 36 tokens are sent

        A prefix that is computed through a window belongs to one request only, and reuses no KV of an earlier
        epoch.

        request: the request that needs the prefix.
        option: the prefix's tokens and pages, and the prefix from which it forks.
        drafted: True if the drafter keeps KV of the prefix too.
        window: the attention window under which the prefix is computed, or None.
        """
        source = option.route.node
        at = option.route.length
        fork = Fork(source.sequence, at) if source else None
        opening = self._factory.prefix_opening(len(option.own), drafted, fork, window)
        if not window:
            opening = replace(opening, reused=self._migrated.of_prefix(request, option.own, at))
        node = PrefixNode(
            opening.sequence, option.own, option.pages, drafted, source, at, own=window is not None
        )
        self.prefixes.add(node)
        self.ledger.reserve_prefix_pages(option.pages)
        self._outbox.put(Open(opening, option.own[at:], first_lease(opening.prompt, 0)))
        return node

    def _pin(self, node: PrefixNode, length: int) -> None:
        """Record one more request that needs a prefix, and resume its prefill if that was interrupted before
        what the request needs.

        node: the prefix.
        length: number of its first tokens that the request forks.
        """
        self.prefixes.pin(node, length)
        self._renew_prefix_leases(node)

    def _renew_prefix_leases(self, node: PrefixNode) -> None:
        """Let stage 0 feed as much of a prefix, and of its ancestors, as requests need now. Nothing is sent
        for those whose lease is right, and for those that are computed or no longer in the tree.

        node: a prefix that a request has begun to need, or needs no longer.
        """
        for one in ancestors(node):
            if one.computed or self.prefixes.find(one.sequence) is not one:
                continue
            lease = self.prefixes.needed_length(one)
            if lease != one.lease:
                one.lease = lease
                self._outbox.put(Lease(one.sequence, lease))

    def _evict(self, nodes: list[PrefixNode]) -> None:
        """Give back the pages of prefixes that were taken out of the tree, and close them at stage 0.

        nodes: the prefixes; may be empty.
        """
        for node in nodes:
            self.ledger.free_prefix_pages(node.pages)
            self._outbox.put(Close(node.sequence))


def pages_of(request: RequestState, turn: PromptTurn, limit: int, state: RingState) -> int:
    """Return the pages that a sequence owns at most. Pages that the sequence shares with its prefix are
    charged to the prefix, and are not counted here.

    request: the request that the sequence belongs to.
    turn: the prompt of the sequence.
    limit: the maximum number of tokens that the sequence may generate.
    state: sizes and limits of the running ring.
    """
    return own_pages(len(turn.tokens) + limit, request.shares(turn), state, request.ask.policy)
