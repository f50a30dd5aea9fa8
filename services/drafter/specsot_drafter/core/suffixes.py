"""Drafts from repetition: what followed earlier occurrences of a sequence's last tokens, as a tree.

A *place* is an earlier occurrence of the last tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from specsot_drafter.core.selection import Nodes

Tokens = NDArray[np.int32]
# Not a token id. Separates two sequences in a log.
BREAK = -1
# Tokens. The longest match that is looked for. Chosen by measurement: 16 and 24 draft no better.
MAX_MATCH = 8
# Factor. The weight of a place grows by this factor with every further token that matches. Chosen by
# SmolLM2's answers to MT-bench and HumanEval: drafts are 6 % worse with 1, and as good with 2 and 8.
LENGTH_WEIGHT = 4.0


class SeenTokens:
    """A growing array of tokens, from which old tokens are dropped when there are too many."""

    def __init__(self, max_tokens: int | None = None) -> None:
        """Start without tokens.

        max_tokens: Maximum number of tokens that are kept; when there are more, old ones are dropped. None:
            no limit.

        At least the newest `max_tokens` / 2 tokens stay. About half are dropped at once, so that tokens are
        moved rarely.
        """
        self._max_tokens = max_tokens
        self._length = 0
        self._buffer = np.empty(0, np.int32)

    def __len__(self) -> int:
        """Return the number of tokens that are kept."""
        return self._length

    @property
    def tokens(self) -> Tokens:
        """The kept tokens, int32, oldest first. A view that is valid until the next `extend`."""
        return self._buffer[: self._length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, and drop old ones if there are too many.

        tokens: Token ids, or BREAK between two sequences.

        Of more tokens than the maximum, only the newest are appended. Without a maximum, nothing is dropped.
        """
        kept = self.tokens
        if self._max_tokens is not None and self._length + len(tokens) > self._max_tokens:
            kept = (
                kept[max(self._length - self._max_tokens // 2, 0) :]
                if len(tokens) <= self._max_tokens // 2
                else kept[:0]
            )
            tokens = tokens[-self._max_tokens :]
        size = len(kept) + len(tokens)
        if size > len(self._buffer) or len(kept) < self._length:
            room = np.empty(
                max(2 * size, len(self._buffer)) if self._max_tokens is None else self._max_tokens, np.int32
            )
            room[: len(kept)] = kept
            self._buffer = room
        self._buffer[len(kept) : size] = tokens
        self._length = size


@dataclass(slots=True)
class SuffixTree(Nodes):
    """A tree of tokens that followed earlier occurrences.

    Before `trust` is called, scores assume that the sequence continues along some path of the tree.

    matched: Number of tokens that match at the place with the longest match. 0 if there is no place.
    """

    matched: int = 0

    def trust(self, chances: Sequence[float]) -> None:
        """Multiply the nodes' probabilities by the chance that the sequence follows the tree to their depth.

        chances: For each depth, the chance to follow the tree there, given that the depth above was followed.
            There is one for every depth of the tree, the first for depth 1.
        """
        sure = np.log(np.cumprod(chances))
        self.scores = [score + float(sure[depth - 1]) for score, depth in zip(self.scores, self.depths)]

    def walk(self, written: Sequence[int]) -> tuple[int, int]:
        """Return how deep written tokens follow the tree, and for how many depths it is known whether they
        did.

        written: Ids of the tokens that the sequence wrote after the tree's root.

        If a node with children is left, the depth below it is known, too: it was not followed. Tree A-B:
        written [A B] -> (2, 2); [A C] -> (1, 2); [A] -> (1, 1), as nothing is known of depth 2.

        For no written tokens the result is (0, 0).
        """
        node = 0
        for depth, token in enumerate(written):
            below = [n + 1 for n, parent in enumerate(self.parents) if parent == node]
            found = [n for n in below if self.tokens[n - 1] == token]
            if not found:
                return depth, depth + bool(below)
            node = found[0]
        return len(written), len(written)


def grow_suffixes(
    token_arrays: Sequence[Tokens], levels: int, nodes: int, max_places: int, min_match: int
) -> SuffixTree:
    """Return a tree of the likeliest continuations of the first token array. Return an empty tree if nothing
    matches.

    token_arrays: The tokens of the sequence to continue, then other tokens. Earlier occurrences are looked
        for in all of them.
    levels: Maximum number of levels of the tree.
    nodes: Maximum number of nodes, without the root.
    max_places: Number of occurrences that are used: those with the longest match. Of equally long matches
        those of the first array come first, and in each array the newest.
    min_match: Number of tokens that must match.

    The tree is empty, too, if the first array has fewer than `min_match` tokens. Empty arrays are skipped.
    `matched` of the tree is the longest match.
    """
    last = token_arrays[0][-MAX_MATCH:]
    places: list[tuple[int, list[int]]] = []
    for tokens in filter(len, token_arrays) if len(last) >= min_match else ():
        ends, sizes = _matches(tokens, last, min_match)
        for place in np.argsort(sizes, kind="stable")[::-1][:max_places].tolist() if len(ends) else ():
            places.append((int(sizes[place]), tokens[ends[place] : ends[place] + levels].tolist()))
    places.sort(key=lambda place: -place[0])
    return _best_first(places[:max_places], nodes) if places else SuffixTree()


def _matches(tokens: Tokens, last: Tokens, min_match: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where earlier occurrences of the end of `last` end, and how many tokens match, oldest first.
    Both arrays are empty if there is none.

    tokens: The tokens in which occurrences are looked for. Their own end does not count.
    last: The newest tokens of the sequence, at most MAX_MATCH.
    min_match: Number of tokens that must match.

    An entry `end` means that tokens[end - 1] is the last matching token, so that tokens[end:] is what
    followed.

        # tokens [1 2 3 1 2 4 1 2], last the same, min_match 2 -> ends [2 5], sizes [2 2]; 3 and 4 followed

    At most MAX_MATCH matching tokens are counted, so that a longer match counts as one of that size.
    """
    agrees = tokens[:-1] == last[-1]
    # Comparing two tokens at once removes most candidates early.
    if min_match > 1:
        agrees[0], agrees[1:] = False, agrees[1:] & (tokens[:-2] == last[-2])
    ends = np.flatnonzero(agrees) + 1
    if not len(ends):
        return ends, ends
    sizes = np.full(len(ends), min(min_match, 2))
    for size in range(3 if min_match > 1 else 2, len(last) + 1):
        reaching = (sizes == size - 1) & (ends >= size)
        # `ends - size` may be negative and wrap around; `reaching` is False there.
        agree = reaching & (tokens[ends - size] == last[-size])
        if not agree.any():
            break
        sizes[agree] = size
    found = sizes >= min_match
    return ends[found], sizes[found]


Place = tuple[float, list[int]]  # The weight of an occurrence, and the tokens that followed it.


def _best_first(places: Sequence[tuple[int, list[int]]], nodes: int) -> SuffixTree:
    """Build a tree from the tokens that followed places, likeliest node first.

    places: For each place, the number of matching tokens, and the tokens that followed; the longest match
        first.
    nodes: Maximum number of nodes, without the root.

    At each node, the probability is divided among the next tokens by the weights of the places that continue
    there. Places of equal weight that continue [5 6], [5 7] and [8 9], 3 nodes -> 5 (2/3), 8 and 5-6 (1/3).

    A path ends at BREAK and at the end of a place's tokens. Fewer nodes are returned if the places have no
    more.
    """
    tree = SuffixTree(matched=places[0][0] if places else 0)
    offers: list[tuple[float, int, int, int, list[Place]]] = []

    def offer(share: float, number: int, depth: int, places_here: Sequence[Place]) -> None:
        """Offer the children of a node, each with its share of the node's probability. Nothing happens if no
        place continues there.

        share: Probability of the node.
        number: Number of the node; 0 is the root.
        depth: Depth of the node.
        places_here: Weights and following tokens of the places that agree with the path to the node.
        """
        below: dict[int, list[Place]] = {}
        for place in places_here:
            if len(place[1]) > depth and place[1][depth] != BREAK:
                below.setdefault(place[1][depth], []).append(place)
        weights = {token: sum(weight for weight, _ in group) for token, group in below.items()}
        total_weight = sum(weights.values())
        for token, group in below.items():
            heappush(offers, (-share * weights[token] / total_weight, number, token, depth + 1, group))

    offer(1.0, 0, 0, [(LENGTH_WEIGHT ** (size - tree.matched), tokens) for size, tokens in places])
    while offers and len(tree.tokens) < nodes:
        share, parent, token, depth, group = heappop(offers)
        offer(-share, tree.add(token, parent, math.log(-share)), depth, group)
    return tree
