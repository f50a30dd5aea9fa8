"""Drafts from repetition: what followed earlier occurrences of a sequence's last tokens, as a tree.

A *text* is an array of tokens here: a sequence, or the log of past sequences. A *place* is an earlier
occurrence of the last tokens.
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

    def __init__(self, most: int | None = None) -> None:
        """most: the tokens that are kept at most; when there are more, old ones are dropped. None: no limit.

        At least the newest `most` / 2 tokens stay. About half are dropped at once, so that tokens are moved
        rarely.
        """
        self._most = most
        self._length = 0
        self._buffer = np.empty(0, np.int32)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Tokens:
        return self._buffer[: self._length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, and drop old ones if there are too many."""
        kept = self.tokens
        if self._most is not None and self._length + len(tokens) > self._most:
            kept = (
                kept[max(self._length - self._most // 2, 0) :] if len(tokens) <= self._most // 2 else kept[:0]
            )
            tokens = tokens[-self._most :]
        size = len(kept) + len(tokens)
        if size > len(self._buffer) or len(kept) < self._length:
            room = np.empty(max(2 * size, len(self._buffer)) if self._most is None else self._most, np.int32)
            room[: len(kept)] = kept
            self._buffer = room
        self._buffer[len(kept) : size] = tokens
        self._length = size


@dataclass(slots=True)
class SuffixTree(Nodes):
    """A tree of tokens that followed earlier occurrences.

    Before `trust` is called, scores assume that the sequence continues along some path of the tree.

    matched: Number of tokens that match at the best place.
    """

    matched: int = 0

    def trust(self, chances: Sequence[float]) -> None:
        """Multiply the nodes' probabilities by the chance that the sequence follows the tree to their depth.

        chances: for each depth, the chance to follow the tree there, given that the depth above was followed.
        """
        sure = np.log(np.cumprod(chances))
        self.scores = [score + float(sure[depth - 1]) for score, depth in zip(self.scores, self.depths)]

    def walk(self, written: Sequence[int]) -> tuple[int, int]:
        """Return how deep the written tokens follow the tree, and how many depths are known by that.

        If a node with children is left, the depth below it is known, too: it was not followed. Tree A-B:
        written [A B] -> (2, 2); [A C] -> (1, 2); [A] -> (1, 1), as nothing is known of depth 2.
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
    texts: Sequence[Tokens], levels: int, nodes: int, most_places: int, least_match: int
) -> SuffixTree:
    """Return a tree of the `nodes` likeliest continuations of the first text.

    texts: the text to continue, and other texts. Earlier occurrences are looked for in all of them.
    levels: most levels of the tree.
    most_places: number of occurrences that are used: those with the longest match. Of equally long matches
    those of the first text come first, and in each text the newest.
    least_match: number of tokens that must match.
    """
    last = texts[0][-MAX_MATCH:]
    places: list[tuple[int, list[int]]] = []
    for text in filter(len, texts) if len(last) >= least_match else ():
        ends, sizes = _matches(text, last, least_match)
        for place in np.argsort(sizes, kind="stable")[::-1][:most_places].tolist() if len(ends) else ():
            places.append((int(sizes[place]), text[ends[place] : ends[place] + levels].tolist()))
    places.sort(key=lambda place: -place[0])
    return _best_first(places[:most_places], nodes) if places else SuffixTree()


def _matches(text: Tokens, last: Tokens, least: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where earlier occurrences of the end of `last` end, and how many tokens match; oldest first.

    The end of the text itself does not count. An entry `end` means that text[end - 1] is the last matching
    token, so that text[end:] is what followed.
    text [1 2 3 1 2 4 1 2], last the same, least 2 -> ends [2 5], sizes [2 2]; 3 and 4 followed
    """
    agrees = text[:-1] == last[-1]
    # Comparing two tokens at once removes most candidates early.
    if least > 1:
        agrees[0], agrees[1:] = False, agrees[1:] & (text[:-2] == last[-2])
    ends = np.flatnonzero(agrees) + 1
    if not len(ends):
        return ends, ends
    sizes = np.full(len(ends), min(least, 2))
    for size in range(3 if least > 1 else 2, len(last) + 1):
        reaching = (sizes == size - 1) & (ends >= size)
        # `ends - size` may be negative and wrap around; `reaching` is False there.
        agree = reaching & (text[ends - size] == last[-size])
        if not agree.any():
            break
        sizes[agree] = size
    found = sizes >= least
    return ends[found], sizes[found]


Place = tuple[float, list[int]]  # The weight of an occurrence, and the tokens that followed it.


def _best_first(places: Sequence[tuple[int, list[int]]], nodes: int) -> SuffixTree:
    """Build a tree from the tokens that followed places, likeliest node first.

    At each node, the probability is divided among the next tokens by the weights of the places that continue
    there. Places of equal weight that continue [5 6], [5 7] and [8 9], 3 nodes -> 5 (2/3), 8 and 5-6 (1/3).

    places: number of matching tokens, and the tokens that followed; the longest match first.
    """
    tree = SuffixTree(matched=places[0][0] if places else 0)
    offers: list[tuple[float, int, int, int, list[Place]]] = []

    def offer(share: float, number: int, depth: int, here: Sequence[Place]) -> None:
        below: dict[int, list[Place]] = {}
        for place in here:
            if len(place[1]) > depth and place[1][depth] != BREAK:
                below.setdefault(place[1][depth], []).append(place)
        weights = {token: sum(weight for weight, _ in group) for token, group in below.items()}
        whole = sum(weights.values())
        for token, group in below.items():
            heappush(offers, (-share * weights[token] / whole, number, token, depth + 1, group))

    offer(1.0, 0, 0, [(LENGTH_WEIGHT ** (size - tree.matched), tokens) for size, tokens in places])
    while offers and len(tree.tokens) < nodes:
        share, parent, token, depth, group = heappop(offers)
        offer(-share, tree.add(token, parent, math.log(-share)), depth, group)
    return tree
