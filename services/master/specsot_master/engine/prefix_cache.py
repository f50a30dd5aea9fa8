"""The prefix cache: finds what of a prompt is in the ring, opens what is missing, keeps it afterwards.

Whoever needs pages, to enter or for a branch, gets those of prefixes that were needed longest ago.
"""

from __future__ import annotations

from specsot.core.frames import Close, End, Fork, Open, Outcome
from specsot.params import Window
from specsot_master.core.admission import AdmissionOption, PageLedger, admission_options
from specsot_master.core.prefix_tree import PrefixMatch, PrefixNode, PrefixTree
from specsot_master.core.ring import RingState
from specsot_master.core.sequence import SequenceFactory, first_lease
from specsot_master.engine.request_state import RequestState, is_drafted
from specsot_master.engine.sequence_table import OrderQueue


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
