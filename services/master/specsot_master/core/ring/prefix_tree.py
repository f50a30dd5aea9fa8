"""The prefixes whose KV is in the ring: lookup, reference counts, least-recently-used eviction.

A node is a sequence that never decodes. It may be forked from the first `at` tokens of its parent; then it is
charged only for the pages after those. A parent stays as long as it has children.

A prefix whose prefill no request needs any more is kept with the tokens that were computed until then. Its
prefill is interrupted by its lease, and continues where it ended once a request needs more of the prefix.

    node 1: [a b c d]              node 2: [a b x y], forked from node 1 at 2
    longest_match([a b x z]) -> node 2, length 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specsot.core.frames import PrefixProgress
from specsot_master.core.plans.prompts import shared_length


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One prefix whose KV is in the ring, for requests to fork.

    sequence: the id of the prefix's sequence.
    tokens: all tokens of the prefix, those of its parent included.
    pages: number of KV pages that are charged for it, without the full pages that it shares with its parent.
    drafted: True if the drafter has KV of the prefix too.
    parent: the prefix that it is forked from, or None if it was prefilled alone.
    at: how many first tokens it shares with its parent; 0 without a parent.
    pins: for each request that needs the prefix now, how many of its first tokens the request forks.
    used: a counter of when it was last needed; higher is later.
    suspect: True if its KV may contain values that are not finite, so that it must not be forked any more.
    own: True if only one request may fork it.
    num_computed: number of its first tokens whose KV every stage is known to have; 0 until the first chunk of
        its own prompt has been computed.
    lease: number of its first tokens that stage 0 may feed now.
    children: prefixes that are forked from it.
    """

    sequence: int
    tokens: tuple[int, ...]
    pages: int
    drafted: bool = True
    parent: PrefixNode | None = None
    at: int = 0
    pins: list[int] = field(default_factory=list[int])
    used: int = 0
    suspect: bool = False
    own: bool = False
    num_computed: int = 0
    lease: int = field(init=False)
    children: list[PrefixNode] = field(default_factory=list["PrefixNode"])

    def __post_init__(self) -> None:
        """Set the lease with which a prefix is opened: all of its tokens may be fed."""
        self.lease = len(self.tokens)

    @property
    def keepable(self) -> bool:
        """True if later requests may fork the prefix, so that it is kept although no request needs it; False
        if it is suspect, or if only one request may fork it.
        """
        return not (self.suspect or self.own)

    @property
    def computed(self) -> bool:
        """True if all of the prefix is known to be computed."""
        return self.num_computed == len(self.tokens)

    @property
    def begun(self) -> bool:
        """True if a token of the prefix itself, after those of its parent, is known to be computed."""
        return self.num_computed > self.at

    @property
    def evictable(self) -> bool:
        """True if no request and no other prefix needs it."""
        return not self.pins and not self.children


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest match of a prompt: the prompt begins with the first `length` tokens of `node`.

    node: the prefix, or None if no prefix matches.
    length: the number of matching tokens.
    """

    node: PrefixNode | None = None
    length: int = 0


class PrefixTree:
    """All prefixes of one epoch whose KV is in the ring."""

    def __init__(self) -> None:
        """Create a tree without prefixes."""
        self._roots: list[PrefixNode] = []
        self._by_id: dict[int, PrefixNode] = {}
        self._ticks = 0

    @property
    def pages(self) -> int:
        """KV pages that are charged for all prefixes."""
        return sum(node.pages for node in self._nodes())

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequence ids of all prefixes, in the order in which they were added; empty if there are none."""
        return tuple(self._by_id)

    def find(self, sequence: int) -> PrefixNode | None:
        """Return the prefix whose sequence has this id, or None if there is none.

        sequence: the id of the prefix's sequence.
        """
        return self._by_id.get(sequence)

    def longest_match(self, tokens: Sequence[int], drafted: bool) -> PrefixMatch:
        """Return the prefix that shares the most first tokens with a prompt, and how many; a match of length
        0 without a node if none shares a token. Suspect prefixes, and those of a single request, are not
        considered. A child is considered only if the prompt shares all tokens before the point at which it is
        forked. Of equal matches the first found is returned.

        tokens: token ids of the prompt.
        drafted: True if the prefix must have KV in the drafter, False if it must have none.
        """
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
        """Add a prefix under its parent, or as a root if it has none.

        node: the prefix; its sequence id must be new.
        """
        (node.parent.children if node.parent else self._roots).append(node)
        self._by_id[node.sequence] = node

    def pin(self, node: PrefixNode, length: int | None = None) -> None:
        """Record one more request that needs the prefix, and mark it and its ancestors as used now, so that
        they are evicted last. A prefix may be pinned several times; each pin must be undone by `unpin`.

        node: a prefix of this tree.
        length: number of its first tokens that the request forks; None for all of them.
        """
        node.pins.append(len(node.tokens) if length is None else length)
        self._ticks += 1
        for one in ancestors(node):
            one.used = self._ticks

    def unpin(self, node: PrefixNode, length: int | None = None) -> None:
        """Record that a request no longer needs the prefix. The prefix stays in the ring until it is evicted
        or dropped.

        node: a prefix that was pinned.
        length: the length with which it was pinned.
        """
        node.pins.remove(len(node.tokens) if length is None else length)

    def record_progress(self, progress: PrefixProgress) -> None:
        """Record how much of a prefix has been computed. An unknown sequence is ignored.

        progress: what the last stage reports.
        """
        if node := self._by_id.get(progress.sequence):
            node.num_computed = max(node.num_computed, progress.num_computed)

    def num_cached(self, match: PrefixMatch) -> int:
        """Return how many first tokens of a prompt need not be computed for a request that forks this match;
        0 without a node. Tokens that are still to be computed count if another request needs them, and
        are left out if the prefill was interrupted before them.

            node of 100 tokens, of which 60 are computed, match of 80 tokens
            -> 80 while a request needs all of the node, 60 if none does

        match: the match; no request has pinned it for the prompt yet.
        """
        length = match.length
        for node in ancestors(match.node) if match.node else ():
            available = max(node.num_computed, self.needed_length(node))
            if available > node.at:
                return min(length, available)
            length = min(length, node.at)
        return length

    def needed_length(self, node: PrefixNode) -> int:
        """Return how many first tokens of a prefix are needed now, by requests that fork it and by needed
        prefixes that are forked from it; 0 if there are none.

            node of 100 tokens, pinned by a request that forks 30; children forked at 40 (pinned) and at 70
            (not pinned) -> 40

        node: a prefix of this tree.
        """
        forks = (child.at for child in node.children if _is_needed(child))
        return max((*node.pins, *forks), default=0)

    def spare(self, kept_node: PrefixNode | None = None) -> int:
        """Return how many KV pages could be freed now: those of all prefixes that no request needs. Prefixes
        with a pinned descendant stay, so they do not count; the result is 0 if nothing can be freed.

        kept_node: a prefix that must stay although no request needs it, with its ancestors; None for no such
            prefix.
        """
        held: set[int] = set()
        nodes = self._nodes()
        for node in nodes:
            if node.pins or node is kept_node:
                held.update(one.sequence for one in ancestors(node))
        return sum(node.pages for node in nodes if node.sequence not in held)

    def evict(self, pages: int, kept_node: PrefixNode | None = None) -> list[PrefixNode]:
        """Remove prefixes until enough pages are freed or nothing more can be removed. Suspect prefixes go
        first, then those of which no token is computed, then the least recently used. Return the removed
        ones, in order; empty if nothing was removed.
        A prefix is removed only if neither a request nor another prefix needs it; removing a child may make
        its parent removable. More pages than asked for may be freed by the last removal.

        pages: how many KV pages to free; 0 or less removes nothing.
        kept_node: a prefix that must stay although no request needs it; None for no such prefix.
        """
        gone: list[PrefixNode] = []
        while pages > 0:
            spare = (node for node in self._by_id.values() if node.evictable and node is not kept_node)
            first = min(spare, key=lambda node: (not node.suspect, node.begun, node.used), default=None)
            if first is None:
                break
            self._remove(first)
            gone.append(first)
            pages -= first.pages
        return gone

    def drop(self, node: PrefixNode) -> list[PrefixNode]:
        """Remove a prefix that no request needs, and then each ancestor that is neither needed nor worth
        keeping. Return the removed ones; empty if a request or another prefix still needs the prefix. The
        first ancestor that stays ends this.

        node: a prefix of this tree.
        """
        gone: list[PrefixNode] = []
        one: PrefixNode | None = node
        while one is not None and one.evictable and (one is node or not one.keepable):
            self._remove(one)
            gone.append(one)
            one = one.parent
        return gone

    def mark_suspect(self, node: PrefixNode) -> None:
        """Mark a prefix and its ancestors as suspect: their KV may contain values that are not finite, so
        they are not forked any more.

        node: a prefix of this tree.
        """
        for one in ancestors(node):
            one.suspect = True

    def clear(self) -> None:
        """Remove all prefixes, because the epoch has ended."""
        self._roots.clear()
        self._by_id.clear()

    def _nodes(self) -> list[PrefixNode]:
        """Return a copy of all prefixes, in the order in which they were added, as another thread reads the
        figures while prefixes are added and removed; [] if there are none.
        """
        return list(self._by_id.values())

    def _remove(self, node: PrefixNode) -> None:
        """Remove one prefix from its parent and from the index.

        node: a prefix of this tree, without children.

        Raises ValueError or KeyError if it is not in the tree.
        """
        (node.parent.children if node.parent else self._roots).remove(node)
        del self._by_id[node.sequence]


def _is_needed(node: PrefixNode) -> bool:
    """Return True if a request needs a prefix, or one that is forked from it, directly or indirectly.

    node: the prefix.
    """
    unseen = [node]
    while unseen:
        one = unseen.pop()
        if one.pins:
            return True
        unseen += one.children
    return False


def ancestors(node: PrefixNode) -> Iterator[PrefixNode]:
    """Yield the prefix itself, then its parent, and so on up to the root; only the prefix itself if it has no
    parent. It must not be removed while the iterator is used.

    node: the prefix to begin with.
    """
    one: PrefixNode | None = node
    while one is not None:
        yield one
        one = one.parent
