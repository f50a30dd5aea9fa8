"""The prompt prefixes whose KV is in the ring: lookup, reference counts, least-recently-used eviction.

A node is a sequence that never decodes. It may be forked from the first `at` tokens of its parent; then it is
charged for the pages behind those. A parent stays as long as its children do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specsot.core.frames import Fork
from specsot_master.core.plans.prompts import shared_length


@dataclass(slots=True, eq=False)
class PrefixNode:
    """pages: charged for it. drafted: the drafter follows it. pins: requests that need it.

    used: when it was needed last; higher is later. suspect: its rows may not be numbers.
    own: one request's alone. computed: somebody wrote behind all of it, so it is in the ring.
    """

    sequence: int
    tokens: tuple[int, ...]
    pages: int
    drafted: bool = True
    parent: PrefixNode | None = None
    at: int = 0
    pins: int = 0
    used: int = 0
    suspect: bool = False
    own: bool = False
    computed: bool = False
    children: list[PrefixNode] = field(default_factory=list["PrefixNode"])

    @property
    def keepable(self) -> bool:
        """Worth its pages when nobody needs it now. Of one that is not computed, the rest would only keep
        others waiting.
        """
        return self.computed and not (self.suspect or self.own)

    @property
    def evictable(self) -> bool:
        return not self.pins and not self.children


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The node whose first `length` tokens a prompt begins with, too; node None: there is none."""

    node: PrefixNode | None = None
    length: int = 0


class PrefixTree:
    """All nodes of one epoch."""

    def __init__(self) -> None:
        self._roots: list[PrefixNode] = []
        self._by_id: dict[int, PrefixNode] = {}
        self._ticks = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def pages(self) -> int:
        """Charged for all of them."""
        return sum(node.pages for node in self._nodes())

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._by_id)

    def find(self, sequence: int) -> PrefixNode | None:
        return self._by_id.get(sequence)

    def longest_match(self, tokens: Sequence[int], drafted: bool) -> PrefixMatch:
        best = PrefixMatch()
        among = list(self._roots)
        while among:
            node = among.pop()
            if node.suspect or node.own or node.drafted != drafted:
                continue
            length = shared_length(tokens, node.tokens, node.at)
            if length > best.length:
                best = PrefixMatch(node, length)
            among += [child for child in node.children if child.at <= length]
        return best

    def add(self, node: PrefixNode) -> None:
        (node.parent.children if node.parent else self._roots).append(node)
        self._by_id[node.sequence] = node

    def pin(self, node: PrefixNode) -> None:
        node.pins += 1
        self._ticks += 1
        for one in ancestors(node):
            one.used = self._ticks

    def unpin(self, node: PrefixNode) -> None:
        node.pins -= 1

    def written_behind(self, fork: Fork | None) -> None:
        """Somebody who began with this has written."""
        node = self._by_id.get(fork.sequence) if fork else None
        if fork and node and fork.length >= len(node.tokens):
            node.computed = True

    def spare(self, keep: PrefixNode | None = None) -> int:
        """Pages that could be given back now, all but those of `keep` and its ancestors."""
        held: set[int] = set()
        nodes = self._nodes()
        for node in nodes:
            if node.pins or node is keep:
                held.update(one.sequence for one in ancestors(node))
        return sum(node.pages for node in nodes if node.sequence not in held)

    def evict(self, pages: int, keep: PrefixNode | None = None) -> list[PrefixNode]:
        """Take nodes out until so many pages are given back, or nothing is spare: doubted ones first, then
        those that were needed longest ago.
        """
        gone: list[PrefixNode] = []
        while pages > 0:
            spare = (node for node in self._by_id.values() if node.evictable and node is not keep)
            first = min(spare, key=lambda node: (not node.suspect, node.used), default=None)
            if first is None:
                break
            self._remove(first)
            gone.append(first)
            pages -= first.pages
        return gone

    def drop(self, node: PrefixNode) -> list[PrefixNode]:
        """Take out one that nobody needs, and what then is needed by nobody."""
        gone: list[PrefixNode] = []
        one: PrefixNode | None = node
        while one is not None and one.evictable and (one is node or not one.keepable):
            self._remove(one)
            gone.append(one)
            one = one.parent
        return gone

    def mark_suspect(self, node: PrefixNode) -> None:
        """Nothing is forked any more from it and from its ancestors."""
        for one in ancestors(node):
            one.suspect = True

    def clear(self) -> None:
        self._roots.clear()
        self._by_id.clear()

    def _nodes(self) -> list[PrefixNode]:
        """A copy: figures are looked up by another thread, while nodes come and go."""
        return list(self._by_id.values())

    def _remove(self, node: PrefixNode) -> None:
        (node.parent.children if node.parent else self._roots).remove(node)
        del self._by_id[node.sequence]


def ancestors(node: PrefixNode) -> Iterator[PrefixNode]:
    one: PrefixNode | None = node
    while one is not None:
        yield one
        one = one.parent
